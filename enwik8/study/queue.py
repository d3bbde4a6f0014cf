"""Runs in processes of their own, several at once, spread over the devices at hand."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from tqdm import tqdm

from .. import checkpoint
from ..errors import UserError
from ..interrupt import Interrupt, Interrupted
from .plan import Evaluation, RunSpec

__all__ = ["FAILURE", "run_all"]

FAILURE = "failure.json"
LOG = "run.log"
_POLL = 0.1  # seconds


@dataclass
class _Worker:
    """A process at work on a run."""

    run: RunSpec
    folder: Path
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    slot: int
    began: float
    told: bool = False

    def stop(self) -> None:
        if not self.told:
            self.told = True
            with contextlib.suppress(OSError):
                self.process.terminate()

    def close(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.log.close()


def run_all(
    runs: Sequence[RunSpec],
    out: Path,
    *,
    workers: int,
    evaluation: Evaluation | None,
    command: str,
    finished: Callable[[RunSpec, float], None] = lambda run, seconds: None,
) -> list[str]:
    """Train the runs in their order into ``out/runs``, ``workers`` at once.

    A run that fails is left as it is, with the reason in its ``failure.json``, and the others go
    on. What a run says goes into its ``run.log``.

    Args:
        finished: told each run that ended well, and the seconds that it took.

    Returns:
        The failures, a sentence each.

    Raises:
        Interrupted: SIGINT or SIGTERM came. All processes have stopped; all runs can be resumed.
    """
    waiting, failures = list(runs), []
    free, active = list(range(workers)), list[_Worker]()
    devices = _devices()
    with Interrupt() as interrupt, _Bar(runs, out) as bar:
        try:
            while active or (waiting and not interrupt):
                while waiting and free and not interrupt:
                    run, slot = waiting.pop(0), free.pop(0)
                    active.append(_start(run, slot, devices, out, evaluation, command))
                time.sleep(_POLL)
                for worker in list(active):
                    if interrupt:
                        worker.stop()
                    code = worker.process.poll()
                    if code is None:
                        continue
                    worker.close()
                    active.remove(worker)
                    free.append(worker.slot)
                    if code == 0:
                        finished(worker.run, time.monotonic() - worker.began)
                    elif not interrupt:
                        failures.append(_record_failure(worker, code))
                        tqdm.write(f"failed: {failures[-1]}", file=sys.stderr)
                bar.show(len(active))
        finally:  # whatever went wrong here, no process is left behind
            for worker in active:
                worker.stop()
            for worker in active:
                worker.process.wait()
                worker.close()
    if interrupt.signum is not None:
        raise Interrupted(
            interrupt.signum, "the study stopped; the same command goes on where it was"
        )
    return failures


def _start(
    run: RunSpec,
    slot: int,
    devices: Sequence[str],
    out: Path,
    evaluation: Evaluation | None,
    command: str,
) -> _Worker:
    folder = out / "runs" / run.folder
    task: dict[str, Any] = {
        "arm": run.arm,
        "settings": dataclasses.asdict(run.settings),
        "folder": str(folder),
        "command": command,
        "evaluation": None
        if evaluation is None
        else {"factors": list(evaluation.factors), "bytes": evaluation.bytes},
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(run.settings.threads or 1)}
    if devices and not run.settings.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILURE).unlink(missing_ok=True)
        log = (folder / LOG).open("ab")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror or error})") from error
    # A session of its own: Ctrl-C on the terminal reaches the parent, which passes it on.
    process = subprocess.Popen(
        [sys.executable, "-m", "enwik8.study.worker"],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died already: the loop will see
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()
    return _Worker(run, folder, process, log, slot, time.monotonic())


def _devices() -> list[str]:
    """The accelerators by the names that CUDA_VISIBLE_DEVICES takes; empty: the CPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        return []
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def _record_failure(worker: _Worker, code: int) -> str:
    """Why a process ended, from its own last words or from its code; kept in the run's folder."""
    if code < 0:
        reason = f"killed by signal {-code}"
    else:
        text = (worker.folder / LOG).read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("error: ")] or lines
        reason = said[-1].removeprefix("error: ") if said else f"exit code {code}"
    checkpoint.replace_file(worker.folder / FAILURE, json.dumps({"reason": reason}) + "\n")
    return f"{worker.run.folder}: {reason}"


class _Bar:
    """Progress over the steps of all runs, read from their logs."""

    def __init__(self, runs: Sequence[RunSpec], out: Path) -> None:
        self._logs = [out / "runs" / run.folder / "metrics.csv" for run in runs]
        # A file gets a line now and then, a terminal a smooth bar.
        self._bar = tqdm(
            total=sum(run.settings.steps for run in runs),
            initial=self._done(),  # of a resumed study: says nothing about the rate
            unit="step",
            desc="study",
            dynamic_ncols=True,
            mininterval=1.0 if sys.stderr.isatty() else 30.0,
        )
        self._looked = time.monotonic()

    def _done(self) -> int:
        done = 0
        for log in self._logs:
            with contextlib.suppress(OSError):
                done += max(log.read_bytes().count(b"\n") - 1, 0)
        return done

    def show(self, active: int) -> None:
        """Move the bar; seldom, as this reads files."""
        if time.monotonic() - self._looked > 2:
            self._looked = time.monotonic()
            self._bar.set_postfix_str(f"{active} at work", refresh=False)
            self._bar.update(self._done() - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
