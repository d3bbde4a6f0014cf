"""Peak memory of one call, in a process of its own.

A helper process imports torch and starts no thread. For every measurement it forks: the child makes
the inputs, hands memory that it holds but does not use back to the system, notes the peak of its
resident memory (VmHWM in Linux's /proc), makes the call once, and reports by how much the peak rose
and how long it took. So a measurement is of a first call in a fresh process, costs no import, and
takes the benchmark with it neither if it needs more memory than there is nor if it takes too long:
that becomes the reason why a contestant is left out.

What is handed back matters: glibc keeps what was freed, up to 32 MB an allocation, and a call that
takes such memory again does not raise the peak. Allocation itself is as in any other process.

    python -m benchmarks._memory     the helper: requests and replies are lines of JSON
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Measured", "Meter"]

ROOT = Path(__file__).resolve().parent.parent
STATUS = Path("/proc/self/status")
SHARE = 0.9  # of the available memory


@dataclass(frozen=True)
class Measured:
    """Peak bytes over those before the call, its seconds, or why there are none."""

    extra: int | None = None
    seconds: float | None = None
    failure: str | None = None


class Meter:
    """Measures tasks: functions "module:name" that return the call to measure.

    If the module has a function `before_fork`, the helper process calls it with the same arguments,
    to import what the tasks need.
    Where there is no /proc to read from (not Linux), nothing is measured and nothing fails.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.helper: subprocess.Popen[str] | None = None
        if STATUS.exists():
            self.helper = subprocess.Popen(
                [sys.executable, "-m", "benchmarks._memory"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def measure(
        self, task: str, arguments: dict[str, Any], warm: dict[str, Any], limit: float
    ) -> Measured:
        """One call of task(**arguments)(), after one of the small task(**warm)().

        Args:
            limit: seconds; a longer call is ended.
        """
        if self.helper is None:
            return Measured()
        assert self.helper.stdin is not None and self.helper.stdout is not None
        request = {"task": task, "arguments": arguments, "warm": warm, "limit": limit}
        self.helper.stdin.write(json.dumps({**request, "threads": self.threads}) + "\n")
        self.helper.stdin.flush()
        reply = self.helper.stdout.readline()
        if not reply:
            raise RuntimeError("the helper process that measures memory has ended; see its message")
        return Measured(**json.loads(reply))

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        if self.helper is not None:
            with self.helper:  # closes its input, upon which it ends, and waits
                pass


# --- the helper process ---------------------------------------------------------------------------


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _hand_back() -> None:
    """Memory that was freed goes back to the system, so that taking it again counts.

    A C library without malloc_trim (musl) keeps no large block that was freed.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _limit_memory() -> None:
    """More than there is becomes an error of the allocator instead of a killed machine."""
    import resource

    from benchmarks._machine import available_bytes

    available = available_bytes()
    if available is not None:
        most = _status("VmSize") + int(SHARE * available)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _child(request: dict[str, Any], write: int) -> None:
    import torch

    torch.set_num_threads(request["threads"])
    module, _, name = request["task"].partition(":")
    task = getattr(importlib.import_module(module), name)
    reply: dict[str, Any]
    try:
        _limit_memory()
        task(**request["warm"])()  # code, libraries and threads are there
        call = task(**request["arguments"])
        _hand_back()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        idle, start = _status("VmHWM"), time.perf_counter()
        os.write(write, b"\n")  # the clock of the limit starts
        result = call()
        seconds, extra = time.perf_counter() - start, _status("VmHWM") - idle
        del result
        reply = {"extra": extra, "seconds": seconds}
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            reply = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        else:
            reply = {"failure": "needs more memory than there is"}
    except Exception as error:
        reply = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    os.write(write, json.dumps(reply).encode() + b"\n")


def _serve_one(request: dict[str, Any]) -> dict[str, Any]:
    # Imported before the fork, so that no child pays for it; importing starts no thread. The second
    # is what torch.autograd.grad imports when it is first called, half a second's work.
    module = importlib.import_module(request["task"].partition(":")[0])
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
    getattr(module, "before_fork", lambda **_: None)(**request["arguments"])
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            _child(request, write)
        finally:
            os._exit(0)
    os.close(write)
    content, limit, reply = b"", 600.0, None  # making the inputs is not what is limited
    while reply is None:
        ready, _, _ = select.select([read], [], [], limit)
        got = os.read(read, 65536) if ready else b""
        content += got
        if not ready:
            os.kill(child, signal.SIGKILL)
            reply = {"failure": f"takes more than {request['limit']:g} s"}
        elif content.strip().endswith(b"}"):
            reply = dict(json.loads(content))
            if reply.get("seconds", 0.0) > request["limit"]:  # it ended before this process woke
                reply = {"failure": f"takes more than {request['limit']:g} s"}
        elif not got:
            reply = {"failure": "the process died (out of memory, most likely)"}
        else:
            limit = request["limit"]
    os.waitpid(child, 0)
    os.close(read)
    return reply


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is not a reply
    for line in sys.stdin:
        print(json.dumps(_serve_one(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
