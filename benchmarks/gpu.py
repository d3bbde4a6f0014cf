"""Everything that needs a GPU, in one run: first whether results are right, then times.

    pip install '.[cuda]'
    python -m benchmarks.gpu --out results/gpu

1. Each backend in float32, bfloat16 and float16 against the judge in float64: outputs and
   gradients of `linear_attention`, a language model, states handed on, documents, decay, padding;
   the Triton kernels around the product; where the CPU waits, whether a CUDA graph takes it.
2. Times of attention over length, forward and with gradients: ours beside flash-linear-attention's
   own functions, softmax attention (FlashAttention, through torch), and a copy of the bytes that
   must be moved at least. Of a training step of a language model, and of decoding.

It stops by itself after --minutes and says what it left out; what takes the time is compilers, so
checks run in processes side by side. gpu.md and gpu.json hold the results. The exit code is 1 if a
result is wrong. --cpu-dry-run runs the same code on a CPU at tiny sizes, without judging times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu_checks import Check, groups, run_group, unready
from benchmarks._gpu_times import (
    SETTINGS,
    Sizes,
    attention_times,
    compile_one,
    decode_times,
    few_settings,
    train_times,
)
from benchmarks._machine import ROOT, describe, load, progress

CHECKED_LENGTH = 150  # two chunks and a rest
RESULT = "result: "


class Clock:
    """The time that is left, and what there was no time for."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.skipped: list[str] = []

    def left(self) -> float:
        return self.end - time.monotonic()

    def allows(self, what: str, seconds: float) -> bool:
        """Whether there is time for it; if not, and if it has a name, it is written down."""
        if self.left() >= seconds:
            return True
        if what:
            self.skipped.append(what)
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device = "cpu" if options.cpu_dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA GPU; --cpu-dry-run runs this on the CPU", file=sys.stderr)
        return 2
    if options.part:
        return _part(options.part, device, options)
    before, clock = load(), Clock(60 * options.minutes)
    found: dict[str, Any] = {"absent": unready(device), "checks": [], "times": []}

    def write() -> None:
        found["skipped"] = clock.skipped
        found["facts"] = _facts(options, device, before)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        (options.out / "gpu.md").write_text(_report(found), "utf-8")

    sizes = Sizes.tiny() if options.cpu_dry_run else Sizes()
    parts = groups(device)
    if "fla" not in found["absent"]:
        parts = [*(f"compile {n}" for n in range(SETTINGS)), *parts]
    found["checks"] = _run_parts(parts, device, options, clock)
    write()
    with few_settings(device):
        for times in (
            *(attention_times(device, "bfloat16", n, sizes, clock.allows) for n in sizes.lengths),
            train_times(device, sizes, clock.allows),
            decode_times(device, sizes, clock.allows),
        ):
            for timed in times:
                found["times"].append(asdict(timed))
                progress(_line(asdict(timed)))
            write()
    wrong = [check for check in found["checks"] if not check["passed"]]
    progress(f"{len(found['checks'])} checks, {len(wrong)} wrong; see {options.out / 'gpu.md'}")
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder of results")
    parser.add_argument("--minutes", type=float, default=7.5, help="stop after so many")
    workers = max(1, (os.cpu_count() or 2) - 1)
    parser.add_argument(
        "--workers", type=int, default=workers, help="processes side by side; 0: in this one"
    )
    parser.add_argument("--cpu-dry-run", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.minutes > 0 or options.workers < 0:
        parser.error("--minutes must be above 0 and --workers at least 0")
    return options


# ---- Checks, each group in a process of its own -------------------------------------------------


def _part(name: str, device: str, options: argparse.Namespace) -> int:
    """What a child process does: one group of checks, or compiling; its results go to stdout."""
    kind, _, number = name.partition(" ")
    if kind == "compile":
        compile_one(int(number), device, Sizes.tiny() if options.cpu_dry_run else Sizes())
        return 0
    with few_settings(device, only=0):  # here it matters what they compute, not how fast
        checks = run_group(name, device, CHECKED_LENGTH)
    print(RESULT + json.dumps(checks), flush=True)
    return 0


def _run_parts(
    names: list[str], device: str, options: argparse.Namespace, clock: Clock
) -> list[dict[str, Any]]:
    """The checks of all groups, in the order of their names."""
    if not options.workers:
        return [check for name in names for check in run_group(name, device, CHECKED_LENGTH)]
    end = time.monotonic() + clock.left() / 2  # the other half is for times

    def run(name: str) -> list[dict[str, Any]]:
        if time.monotonic() >= end:
            clock.skipped.append(name)
            return []
        found = _child(name, end - time.monotonic(), options)
        for check in found:
            progress(_check_line(check))
        return found

    with ThreadPoolExecutor(options.workers) as pool:
        return [check for found in pool.map(run, names) for check in found]


def _child(name: str, seconds: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a process of its own finds; if it ends badly, or is ended for lack of time, that."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name]
    command += ["--cpu-dry-run"] * options.cpu_dry_run
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return [_failed(name, "no time left", demanded=False)]
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))  # type: ignore[no-any-return]
    if done.returncode == 0:
        return []
    last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    demanded = not name.startswith(("compile", "waits"))
    return [_failed(name, f"ended with code {done.returncode}: {last}", demanded)]


def _failed(name: str, note: str, demanded: bool) -> dict[str, Any]:
    check = Check(name, "the whole group", {}, {}, note, demanded)
    return {**asdict(check), "passed": check.passed}


# ---- The report ---------------------------------------------------------------------------------


def _facts(options: argparse.Namespace, device: str, before: str) -> dict[str, str]:
    words = ["--out", str(options.out), "--minutes", f"{options.minutes:g}"]
    facts = describe(words + ["--cpu-dry-run"] * options.cpu_dry_run, "benchmarks.gpu", before)
    if device == "cuda":
        facts["GPU"] = torch.cuda.get_device_name()
        facts["CUDA"] = str(torch.version.cuda)
        try:
            import triton

            facts["triton"] = str(triton.__version__)
        except ImportError:
            facts["triton"] = "not installed"
    facts["float32 products"] = os.environ.get("TRITON_F32_DEFAULT", "tf32") + " in Triton"
    return facts


def _check_line(check: dict[str, Any]) -> str:
    """group | name | errors, each beside its limit."""
    errors = ", ".join(
        f"{name} {error:.1e}" + ("" if error <= check["limits"][name] else " **WRONG**")
        for name, error in check["errors"].items()
    )
    limits = sorted(set(check["limits"].values()))
    words = [errors, check["note"], "" if check["passed"] or errors else "**WRONG**"]
    limit = " / ".join(f"{x:.0e}" for x in limits)
    return " | ".join([check["group"], check["name"], " ".join(filter(None, words)), limit])


def _line(timed: dict[str, Any]) -> str:
    """contestant | dtype | length | time | error | memory."""
    numbers = [timed["note"], "", ""]
    if timed["error"] is not None:
        numbers[1] = f"{timed['error']:.0e}"
    if timed["milliseconds"] is not None:
        low, middle, high = (timed[n] for n in ("low", "milliseconds", "high"))
        numbers[0] = f"{middle:.3g} ({low:.3g} to {high:.3g})"
    if timed["extra_mb"] is not None:
        numbers[2] = f"{timed['extra_mb']:.0f}"
    return " | ".join([timed["contestant"], timed["dtype"], str(timed["length"]), *numbers])


def _report(found: dict[str, Any]) -> str:
    """The Markdown report."""
    text = ["# On a GPU\n", *(f"- {name}: `{value}`" for name, value in found["facts"].items())]
    text += [f"- absent: {name} ({reason})" for name, reason in found["absent"].items()]
    text += [f"- skipped for lack of time: {name}" for name in found["skipped"]]
    wrong = sum(not check["passed"] for check in found["checks"])
    text += [
        "\n## Results against float64\n",
        f"{len(found['checks'])} checks, {wrong} wrong. Errors are the largest difference over the "
        "largest value; the limits are those of results and of gradients.\n",
        "| group | case | errors | limits |",
        "|---|---|---|---|",
        *(f"| {_check_line(check)} |" for check in found["checks"]),
    ]
    by_job: dict[str, list[dict[str, Any]]] = {}
    for timed in found["times"]:
        by_job.setdefault(timed["job"], []).append(timed)
    for job, rows in by_job.items():
        text += [
            f"\n## Time: {job}\n",
            "| contestant | dtype | T | milliseconds (quartiles) | error | extra MB |",
            "|---|---|---:|---:|---:|---:|",
            *(f"| {_line(timed)} |" for timed in rows),
        ]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
