"""One run: its model, optimizer, batches and counters, a step, a validation, and its state.

What a step does depends only on its number, the seeds and the state in the checkpoint: the batch,
its masks and the learning rate are functions of the step, dropout is seeded anew for each step, and
random features count their own steps. So a resumed run is the uninterrupted one, bit by bit on one
CPU thread, without any hidden state to save.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

import linear_rope

from .batches import BatchHash, WindowSampler, bits_per_byte
from .corpus import Corpus
from .distributed import load_whole, make_accelerator, together, whole
from .errors import UserError
from .evaluate import split_bits_per_byte
from .interrupt import Interrupt
from .masked import IGNORED
from .methods import find
from .objectives import objective_named
from .optimizer import learning_rate, make_optimizer
from .presets import Settings, model_fields
from .record import make_record
from .tasks import make_config, make_model, training_batch

__all__ = ["Run", "accumulate_gradient", "make_sampler"]


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
        UserError: the text is too short to evaluate on.
        ValueError: it is too short to train on, the processes cannot share a batch equally, or the
            seed is impossible.
    """
    if len(corpus.valid) < 2:
        raise UserError(
            f"the validation split of {corpus.name} has {len(corpus.valid)} bytes, too few to "
            "evaluate on; use a longer text"
        )
    if len(corpus.train) < settings.length + 1:
        raise ValueError(
            f"--length {settings.length:,} is too long: a window has one byte more, and the "
            f"training split of {corpus.name} has {len(corpus.train):,}; use a longer text or a "
            "smaller length"
        )
    if settings.batch_size % world:
        raise ValueError(
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


class Run:
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

    def plain(self) -> Any:
        """The model without what several processes, or a compiler, have put around it: the names of
        its parameters are those of one process that compiles nothing."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint; with FSDP all processes must ask for it."""
        scaler = self.accelerator.scaler
        return {
            "config": self.record,
            "model": whole(self.plain().state_dict()),
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
        module = self.plain()
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
            # Not `plain`: this keeps its mixed precision, and under FSDP what gathers its parts.
            self.accelerator.unwrap_model(self.model),
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


def _mix(*parts: object) -> int:
    """A seed from names and numbers; neighboring numbers give unrelated seeds."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
