"""Train one arm: a loop that can be stopped, killed and resumed at any moment.

Everything that a step needs is in `enwik8.run`; here is when steps, evaluations and saves come.
"""

from __future__ import annotations

import json
import math
import signal
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import checkpoint, run_folder
from .corpus import Corpus, load_corpus
from .distributed import ends_with_others
from .errors import UserError
from .interrupt import Interrupt, Interrupted, Lock
from .methods import find
from .metrics import MetricsLog
from .presets import Settings
from .progress import ProgressBar
from .run import Run
from .tensorboard import TensorBoard, check_installed, continuation

__all__ = ["RunResult", "train"]


@dataclass(frozen=True)
class RunResult:
    """Where a finished run lies, and its record (as in config.json)."""

    folder: Path
    step: int
    batch_hash: str
    config: dict[str, Any]


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
        run = Run(settings, arm, corpus, command)
        main = run.accelerator.is_main_process  # Only the main process writes.
        if main:
            run_folder.make_writable(out)
        with Lock(out) if main else nullcontext():
            _begin_or_resume(run, out, resume=resume, overwrite=overwrite)
            with ExitStack() as files:
                log, board = None, None
                if main:
                    path = out / "metrics.csv"
                    log = files.enter_context(
                        MetricsLog(path, run.step, run.objective, run.hash.digest)
                    )
                if main and settings.tensorboard:
                    board = files.enter_context(TensorBoard(out, run.step, run.objective))
                _loop(run, out, log, board, interrupt)
    return RunResult(out, run.step, run.hash.digest, run.record)


def _begin_or_resume(run: Run, out: Path, *, resume: bool, overwrite: bool) -> None:
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
    run: Run,
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
