"""Train one arm: a loop that can be stopped, killed and resumed at any moment.

What a step does depends only on its number, the seeds and the state in the checkpoint: the batch,
its masks and the learning rate are functions of the step, dropout is seeded anew for each step, and
random features count their own steps. So a resumed run is the uninterrupted one, bit by bit on one
CPU thread, without any hidden state to save.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

import linear_rope

from . import checkpoint, run_folder
from .batches import BatchHash, WindowSampler, bits_per_byte
from .corpus import Corpus, load_corpus
from .distributed import ends_with_others, load_whole, make_accelerator, together, whole
from .errors import UserError
from .evaluate import split_bits_per_byte
from .interrupt import Interrupt, Interrupted, Lock
from .masked import IGNORED
from .methods import find
from .metrics import MetricsLog
from .objectives import objective_named
from .optimizer import learning_rate, make_optimizer
from .presets import Settings, model_fields
from .progress import ProgressBar
from .record import make_record
from .tasks import make_config, make_model, training_batch
from .tensorboard import TensorBoard, check_installed, continuation

__all__ = [
    "RunResult",
    "accumulate_gradient",
    "make_sampler",
    "train",
]


@dataclass(frozen=True)
class RunResult:
    """Where a finished run lies, and its record (as in config.json)."""

    folder: Path
    step: int
    batch_hash: str
    config: dict[str, Any]


def accumulate_gradient(
    accelerator: Accelerator, model: nn.Module, x: Tensor, y: Tensor, micro_batch_size: int | None
) -> Tensor:
    """Add the gradient of the mean loss over all targets to ``.grad``; return that mean, in nats.

    The windows (B, T) are computed ``micro_batch_size`` at a time; each part counts by its number
    of windows, so a smaller last part is weighted right and the result does not depend on the size.
    (All windows have equally many targets, with masks too: see `masked_count`.)
    """
    parts = list(zip(*(t.split(micro_batch_size or len(x)) for t in (x, y)), strict=True))
    total = torch.zeros((), device=accelerator.device)
    for i, (inputs, targets) in enumerate(parts):
        last = i == len(parts) - 1
        with nullcontext() if last else accelerator.no_sync(model):
            logits = model(inputs.to(accelerator.device))
            nats = F.cross_entropy(
                logits.flatten(0, 1).float(),
                targets.to(accelerator.device).flatten(),
                ignore_index=IGNORED,
            )
            loss = nats * (len(inputs) / len(x))
            accelerator.backward(loss)
        total += loss.detach()
    return total


def make_sampler(
    settings: Settings, corpus: Corpus, *, rank: int = 0, world: int = 1
) -> WindowSampler:
    """The batches of a run.

    Raises:
        UserError: the text is too short to evaluate or to train on, or the processes cannot share
            a batch equally.
        ValueError: the seed is impossible.
    """
    if len(corpus.valid) < 2:
        raise UserError(
            f"the validation split of {corpus.name} has {len(corpus.valid)} bytes, too few to "
            "evaluate on; use a longer text"
        )
    if len(corpus.train) < settings.length + 1:
        raise UserError(
            f"--length {settings.length:,} is too long: a window has one byte more, and the "
            f"training split of {corpus.name} has {len(corpus.train):,}; use a longer text or a "
            "smaller length"
        )
    if settings.batch_size % world:
        raise UserError(
            f"--batch-size {settings.batch_size} cannot be shared equally by {world} processes: "
            f"choose a multiple of {world}"
        )
    return WindowSampler(
        corpus.train,
        settings.length,
        settings.batch_size,
        settings.seeds["data"],
        rank=rank,
        world=world,
    )


class _Run:
    """The parts of a run that the loop and the checkpoint share."""

    def __init__(self, settings: Settings, arm: str, corpus: Corpus, command: str) -> None:
        self.settings = settings
        self.objective = objective_named(settings.objective)
        self.accelerator = make_accelerator(settings.cpu, settings.precision)
        self.device = self.accelerator.device
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.corpus = corpus
        self.sampler = make_sampler(settings, corpus, rank=rank, world=world)
        config = make_config(model_fields(settings, find(arm)))
        self.module = make_model(config, self.objective)
        # Each parameter by its own generator, (seed, name): the same in all arms that share it.
        self.module.initialize(settings.seeds["init"], settings.seeds["features"])
        self.record = make_record(
            settings,
            arm,
            config,
            corpus,
            self.module,
            processes=world,
            device=self.device.type,
            command=command,
        )
        optimizer = make_optimizer(self.module, settings)
        self.model, self.optimizer = together(self.accelerator, self.module, optimizer)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.hash = BatchHash(corpus.sha256)

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint; with FSDP all processes must ask for it."""
        scaler = self.accelerator.scaler
        return {
            "config": self.record,
            "model": whole(self.accelerator.unwrap_model(self.model).state_dict()),
            "optimizer": whole(self.optimizer.state_dict()),
            "scaler": scaler.state_dict() if scaler is not None else {},
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "batch_hash": self.hash.digest,
            # Nothing here draws from it between steps; kept for programs that do.
            "torch_rng": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to the checkpoint; its record is kept, as that of the run's beginning."""
        self.record = state["config"]
        module = self.accelerator.unwrap_model(self.model)
        load_whole(module, self.optimizer, state["model"], state["optimizer"])
        if self.accelerator.scaler is not None and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds = state["seconds"]
        self.hash = BatchHash.restore(state["batch_hash"])
        torch.set_rng_state(state["torch_rng"])

    def train_step(self) -> dict[str, str]:
        """Do the next step; returns its row. Loss or gradient not finite: nothing is updated."""
        settings, started = self.settings, time.perf_counter()
        step = self.step + 1
        torch.manual_seed(_mix("dropout", settings.seeds["dropout"], step, self.sampler.rank))
        rate = learning_rate(step, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        self.optimizer.zero_grad()
        batch = training_batch(self.sampler, step, self.objective)
        self.hash.update(batch.hashed)  # of what is trained on, not of what should have been
        x, y = batch.share(self.sampler.rank, self.sampler.world)
        loss = accumulate_gradient(self.accelerator, self.model, x, y, settings.micro_batch_size)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf)
        nats = float(self.accelerator.reduce(loss, "mean"))
        if self.healthy(nats, float(norm)):
            self.optimizer.step()
            linear_rope.advance_random_features(self.module)
        self.step = step
        self.tokens += settings.batch_size * settings.length
        took = time.perf_counter() - started
        self.seconds += took
        return {
            "step": str(step),
            "tokens": str(self.tokens),
            self.objective.train_column: repr(bits_per_byte(nats)),
            self.objective.validation_column: "",
            "learning_rate": repr(rate),
            "gradient_norm": repr(float(norm)),
            "seconds": f"{self.seconds:.3f}",
            "tokens_per_second": f"{settings.batch_size * settings.length / took:.1f}",
            "batch_hash": self.hash.digest,
        }

    def healthy(self, loss: float, gradient_norm: float) -> bool:
        """Whether a step may be used. A loss scaler skips infinite gradients by itself."""
        scaled = self.accelerator.scaler is not None
        return math.isfinite(loss) and (scaled or math.isfinite(gradient_norm))

    def agree(self, interrupt: Interrupt | bool) -> bool:
        """Whether to stop; the same answer in all processes, or they would wait for each other.

        Raises:
            UserError: they are not at the same step.
        """
        world = self.accelerator.num_processes
        if world == 1:
            return bool(interrupt)
        mine = torch.tensor([int(bool(interrupt)), self.step, -self.step], device=self.device)
        flags, last, first = self.accelerator.gather(mine).view(world, 3).amax(0).tolist()
        if last != -first:
            raise UserError(
                f"the processes of this run are at the steps {-first} to {last}: not all of them "
                "see its checkpoint; keep the folder where every machine can read it"
            )
        return bool(flags)

    def validate(self, interrupt: Interrupt, report: Callable[[float], None]) -> str:
        """Validation loss in the objective's unit as a field of the log; empty if interrupted.

        ``report`` is told the share that is done.
        """
        value = split_bits_per_byte(
            self.accelerator.unwrap_model(self.model),  # keeps its mixed precision
            self.corpus.valid,
            self.settings.length,
            # As many windows at once as fit in training; there is no gradient to store.
            self.settings.micro_batch_size or self.settings.batch_size,
            objective=self.objective,
            limit=self.settings.validation_bytes,
            device=self.device,
            stop=lambda: bool(interrupt) and self.accelerator.num_processes == 1,
            report=report,
        )
        return "" if value is None else repr(value)


def train(
    settings: Settings,
    arm: str,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    command: str = "",
    corpus: Corpus | None = None,
) -> RunResult:
    """Train one arm into the folder ``out``: config.json, metrics.csv, checkpoint.pt.

    Raises:
        UserError: the folder holds a run already, cannot be written or is in use; the checkpoint
            belongs to another configuration or is damaged; the loss is not finite.
        ValueError: a setting is impossible.
        Interrupted: SIGINT or SIGTERM came; the run can be resumed.
    """
    find(arm)
    settings.check()
    if settings.tensorboard:
        check_installed()
    run_folder.check_new(out, resume=resume, overwrite=overwrite)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if corpus is None:
        corpus = load_corpus(settings.corpus, data_dir=settings.data_dir)
    with Interrupt() as interrupt, ends_with_others():
        run = _Run(settings, arm, corpus, command)
        main = run.accelerator.is_main_process  # Only the main process writes.
        if main:
            run_folder.make_writable(out)
        with Lock(out) if main else nullcontext():
            _begin_or_resume(run, out, resume=resume, overwrite=overwrite)
            with ExitStack() as files:
                log, board = None, None
                if main:
                    path = out / "metrics.csv"
                    log = files.enter_context(MetricsLog(path, run.step, run.objective))
                if main and settings.tensorboard:
                    board = files.enter_context(TensorBoard(out, run.step, run.objective))
                _loop(run, out, log, board, interrupt)
    return RunResult(out, run.step, run.hash.digest, run.record)


def _begin_or_resume(run: _Run, out: Path, *, resume: bool, overwrite: bool) -> None:
    """Bring run and folder to the same step."""
    main = run.accelerator.is_main_process
    if main:
        # Again, now that the folder is ours: another run may have come and gone meanwhile.
        run_folder.check_new(out, resume=resume, overwrite=overwrite)
        checkpoint.remove_part_files(out)
        if overwrite:
            run_folder.clear(out)
    run.accelerator.wait_for_everyone()
    there, state = None, None
    path = checkpoint.latest(out)
    if resume and path is not None:
        state = checkpoint.load(path)
        there = state["config"]
    elif resume:  # Stopped before the first checkpoint, if it had begun at all.
        there = run_folder.read_config(out)
    differ = run_folder.differences(there, run.record) if there is not None else []
    if differ:
        raise UserError(
            f"{out} cannot be resumed with another configuration: {'; '.join(differ)}; "
            "give the settings of then, or --overwrite to start again"
        )
    if state is not None:
        try:
            run.restore(state)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} does not hold what a run needs ({error}); it was left "
                "untouched (--overwrite starts again)"
            ) from error
    if main:
        checkpoint.replace_file(out / "config.json", json.dumps(run.record, indent=2) + "\n")


def _loop(
    run: _Run,
    out: Path,
    log: MetricsLog | None,
    board: TensorBoard | None,
    interrupt: Interrupt,
) -> None:
    """Train to the last step, logging, evaluating and saving on the way."""
    settings, objective, saved = run.settings, run.objective, run.step
    validation = objective.validation_column

    def validate() -> str:
        value = run.validate(interrupt, bar.validating)
        bar.validated(value)
        return value

    def evaluation_due(step: int) -> bool:
        return step % settings.evaluate_every == 0 or step == settings.steps

    def save() -> None:
        nonlocal saved
        if run.step == saved:
            return
        state = run.state()  # all processes ask for it: each may hold a part
        if log is not None:
            log.sync()
            if board is not None:
                board.flush()
            keep = settings.keep_checkpoints
            checkpoint.save(out / checkpoint.NAME, state, keep=keep, previous=saved)
        # A launcher ends the others where one ends: not while this is being written.
        run.accelerator.wait_for_everyone()
        saved = run.step

    bar = ProgressBar(
        run.record["arm"],
        run.step,
        settings.steps,
        run.tokens,
        run.seconds,
        log is not None,
        objective,
    )
    with bar:
        # An evaluation that a signal had cut off comes first, so that the log has no hole.
        pending = log is not None and log.last is not None and not log.last[validation]
        if run.agree(pending) and evaluation_due(run.step):
            value = validate()
            if log is not None:
                log.amend_last(validation, value)
            if board is not None:
                board.validated(value, run.step)
        while run.step < settings.steps and not run.agree(interrupt):
            row = run.train_step()
            loss, norm = float(row[objective.train_column]), float(row["gradient_norm"])
            healthy = run.healthy(loss, norm)
            if healthy and evaluation_due(run.step):
                row[validation] = validate()
            if log is not None:
                log.append(row)
            if board is not None:
                board.trained(row)
                # One process has the whole model for sure, and keeps no other one waiting.
                if row[validation] and run.accelerator.num_processes == 1:
                    board.sampled(continuation(run.module, run.corpus.valid, run.device), run.step)
            if not healthy:
                what = "loss" if not math.isfinite(loss) else "gradient"
                kept = f"the checkpoint of step {saved} is kept" if saved else "no checkpoint yet"
                raise UserError(
                    f"the {what} of step {run.step} is not finite (loss {loss:g} {objective.unit}, "
                    f"gradient norm {norm:g}), so training stopped before using it; {kept} in "
                    f"{out}; a lower --learning-rate or a smaller --clip may help"
                )
            bar.trained(row)
            if run.step % settings.checkpoint_every == 0 or run.step == settings.steps:
                save()
        if run.agree(interrupt):
            save()
            where = f"after step {run.step} of {settings.steps}"
            raise Interrupted(
                interrupt.signum or signal.SIGINT,
                f"stopped {where}; the same command with --resume goes on from there",
            )


def _mix(*parts: object) -> int:
    """A seed from names and numbers; neighboring numbers give unrelated seeds."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
