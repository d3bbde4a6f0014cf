"""The machine, the versions and the command: what a reader needs to weigh the numbers."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import linear_rope

__all__ = [
    "ROOT",
    "add_common_options",
    "available_bytes",
    "describe",
    "prepare",
    "progress",
]

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("performer-pytorch", "pytorch-fast-transformers", "fla-core")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def cores() -> int:
    """Processors that this process may use."""
    count = getattr(os, "sched_getaffinity", None)
    return len(count(0)) if count else os.cpu_count() or 1


def add_common_options(parser: argparse.ArgumentParser, out: str) -> None:
    """What all benchmarks take."""
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the results")
    parser.add_argument("--threads", type=int, default=cores(), help="default: all cores")
    parser.add_argument(
        "--build-native", action="store_true", help="compile the native backend first, if need be"
    )
    parser.add_argument("--seed", type=int, default=0, help="of inputs and of the order in a round")


def prepare(options: argparse.Namespace) -> str:
    """Set the threads, build what was asked for, and return the load average before the run.

    The number of threads is one for torch and for peers that bring an OpenMP runtime of their own;
    theirs reads the variable when it is loaded, so this comes before the peers are imported.
    """
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    before = load()
    if options.build_native:
        build = getattr(linear_rope, "build_native", None)
        if build is None:
            raise SystemExit("this version of linear_rope has no native backend to build")
        build()
    return before


def load() -> str:
    """Load average of the last minute: near 0 before a run, or the run was not alone."""
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


def available_bytes() -> int | None:
    """Memory that a process may still take: the machine's, or the rest of its control group's."""
    found = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        found.append(int(limit) - int(used))
    return min(found, default=None)


def describe(arguments: list[str], module: str, load_before: str) -> dict[str, str]:
    """Machine, threads, versions, command and date, as lines of a report."""
    processor, flags = platform.processor() or platform.machine(), ""
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            processor = value.strip()
        elif key.strip() == "flags":
            flags = " ".join(x for x in INSTRUCTIONS if x in value.split())
    total = _read("/proc/meminfo").split()[1:2]
    memory = f", {int(total[0]) / 2**20:.0f} GiB" if total else ""
    return {
        "command": " ".join(["python", "-m", module, *arguments]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{processor}, {cores()} cores{memory} ({flags or 'instructions unknown'})",
        "threads": str(torch.get_num_threads()),
        "load average": f"{load_before} before, {load()} after",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(
            [
                f"linear_rope {linear_rope.__version__}{_commit()}",
                f"torch {torch.__version__}",
                *_installed(PEERS),
            ]
        ),
    }


def _installed(names: Iterable[str]) -> list[str]:
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return versions


def _commit() -> str:
    """The revision of the clone, and whether files differ from it."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "linear_rope")
    return f" ({head}{', changed since' if changed else ''})" if head else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def progress(text: str) -> None:
    """A line for whoever waits, at once."""
    print(text, file=sys.stderr, flush=True)
