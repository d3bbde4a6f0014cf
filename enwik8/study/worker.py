"""One run of a study in a process of its own: ``python -m enwik8.study.worker``.

The task comes as a line of JSON on standard input, which the parent then leaves open: its end means
that the parent is gone, and the run stops as on SIGTERM, resumably. So no run outlives its study.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from .. import checkpoint
from ..errors import UserError
from ..interrupt import Interrupted, Lock
from ..presets import Settings
from ..train import train
from ..windows import evaluate_windows

__all__ = ["RESULT", "read_result"]

RESULT = "result.json"
_PATIENCE = 60.0  # seconds that the worker of a study killed just now may still need to stop


def read_result(folder: Path) -> dict[str, Any]:
    """What a run measured beside its log; empty where there is nothing yet.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / RESULT
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}); it was left untouched: delete it, and it is made again"
        ) from error
    if not isinstance(result, dict):
        raise UserError(f"{path} does not hold an object: delete it, and it is made again")
    return result


def work(task: dict[str, Any]) -> None:
    """Train a run to its end and measure what its log does not say."""
    folder = Path(task["folder"])
    settings = Settings(**task["settings"])
    _wait_for(folder)
    result = read_result(folder)
    # A run that has all its steps comes here again for an evaluation only, which says nothing about
    # the memory of training.
    log = folder / "metrics.csv"
    before = len(log.read_text(encoding="utf-8").splitlines()) - 1 if log.exists() else 0
    done = train(settings, task["arm"], folder, resume=True, command=task["command"])
    memory = result.get("peak_memory") if before >= done.step else _peak_memory()
    result = {**result, "steps": done.step, "peak_memory": memory}
    _write(folder, result)
    plan = task["evaluation"]
    if plan is not None and result.get("evaluated") != plan:
        device = "cpu" if settings.cpu or not torch.cuda.is_available() else "cuda"
        measured = evaluate_windows(folder, plan["factors"], limit=plan["bytes"], device=device)
        _write(folder, {**result, "evaluated": plan, "windows": measured})


def _write(folder: Path, result: dict[str, Any]) -> None:
    checkpoint.replace_file(folder / RESULT, json.dumps(result, indent=1) + "\n")


def _wait_for(folder: Path) -> None:
    """Until no other process works in the folder, or for `_PATIENCE`."""
    until = time.monotonic() + _PATIENCE
    while folder.is_dir():
        try:
            with Lock(folder):
                return
        except UserError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _peak_memory() -> int:
    """Bytes: of the device, where there is one, or the whole process's resident memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    with contextlib.suppress(OSError, StopIteration, ValueError):
        # Linux hands the highest use down to a child (ru_maxrss outlives exec), so ask for our own.
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(x for x in lines if x.startswith("VmHWM:")).split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Do the task on standard input; returns the exit code, as the command line's."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(task)
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
