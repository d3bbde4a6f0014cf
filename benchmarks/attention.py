"""Time, memory and error of causal linear attention, ours and what a user would pick instead.

    python -m benchmarks.attention --out results/benchmarks            (some 15 minutes)
    python -m benchmarks.attention --quick --out build/quick            (some 2 minutes)
    python -m benchmarks.attention --only-memory --out build/memory     (no times: any machine)

All contestants that are installed (`_contestants.py`) do the same jobs (`_judge.JOBS`) on the same
inputs: standard normal, T tokens of (batch x heads x width x value width). At each length first
each contestant is called once in a process of its own, for its peak memory (`_memory.py`) and to
leave out what is too slow or too large; then its result is judged in float64 (`_judge.py`); then
all are timed in interleaved rounds (`_timing.py`). "forward" is without a graph,
"forward+backward" makes the gradients of q, k and v from a given gradient of the output. With
--only-memory nothing is timed, so that a machine that is not quiet will do.

Written to --out: attention.md, attention.csv, attention-time and attention-memory as PNG and SVG.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks._contestants import NATIVE_PEER, Contestant, Field, find_contestants
from benchmarks._figures import attention_figures
from benchmarks._judge import JOBS
from benchmarks._machine import (
    add_common_options,
    available_bytes,
    describe,
    prepare,
    progress,
)
from benchmarks._memory import STATUS, Measured, Meter
from benchmarks._problem import LAYOUTS, TOLERANCE, Case, Errors, Problem, small
from benchmarks._results import MODES, Row, attention_report, write_csv
from benchmarks._timing import Call, chunkwise_flops, interleave, matmul_call, quartiles
from enwik8.plot import save_figure, write_whole

Entry = tuple[str, str, bool]  # contestant, job, backward

# Shares of --limit: at --more-lengths, and for forms that are not meant to be fast.
MORE, SLOW = 0.25, 0.1


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=(__doc__ or "").splitlines()[0],
    )
    add_common_options(parser, "build/benchmarks")
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[1024, 4096, 16384], help="T, in the tables")
    add(
        "--more-lengths",
        type=int,
        nargs="*",
        default=[512, 2048, 8192, 32768],
        help="T, for the figures, the slopes and the CSV only; a quarter of --limit",
    )
    add("--shapes", nargs="+", default=["4x8x64"], help="BATCHxHEADSxWIDTH[xVALUE_WIDTH] ...")
    add("--dtypes", nargs="+", default=["float32"], choices=sorted(TOLERANCE))
    add("--layout", default="own", choices=LAYOUTS, help="order in memory, see _problem.Case")
    add("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    add("--only", nargs="+", default=[], help="contestants whose name contains one of these words")
    add("--rounds", type=int, default=7, help="timings of each call")
    add("--budget", type=float, default=2.0, help="seconds after which a call has enough timings")
    add(
        "--limit",
        type=float,
        default=20.0,
        help="seconds; what is slower is left out, and the forms that are not for speed at a tenth",
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument(
        "--no-memory", action="store_true", help="no processes of their own, so no limits either"
    )
    memory.add_argument(
        "--only-memory", action="store_true", help="peak memory and errors, and no times"
    )
    add("--native-peer", type=Path, default=NATIVE_PEER, help="see benchmarks/README.md")
    add("--quick", action="store_true", help="fewer lengths and rounds: two minutes")
    known = parser.parse_known_args(argv)[0]
    if known.only_memory:
        parser.set_defaults(lengths=[512, 1024, 2048, 4096, 8192, 16384], more_lengths=[])
    if known.quick:
        parser.set_defaults(lengths=[1024, 4096], more_lengths=[512, 2048])
        parser.set_defaults(rounds=5, budget=0.5, limit=5.0)
    options = parser.parse_args(argv)
    if options.only_memory and not STATUS.exists():
        parser.error(f"--only-memory reads {STATUS}, which is not there: it needs Linux")
    try:
        options.cases = [
            _case(shape, time, dtype, options)
            for shape in options.shapes
            for dtype in options.dtypes
            for time in sorted({*options.lengths, *options.more_lengths})
        ]
    except ValueError as error:
        parser.error(str(error))
    return options


def _case(shape: str, time: int, dtype: str, options: argparse.Namespace) -> Case:
    sizes = shape.split("x")
    if len(sizes) not in (3, 4) or not all(x.isdigit() and int(x) for x in sizes) or time < 1:
        raise ValueError(
            f"shape {shape!r} at T={time} must be positive integers, BATCHxHEADSxWIDTH, such as "
            "4x8x64, with the value width as a fourth where it differs"
        )
    batch, heads, width, value_width = map(int, (sizes + sizes[-1:])[:4])
    if width % 2:
        raise ValueError(f"shape {shape!r} has an odd width, which cannot be rotated in pairs")
    return Case(time, batch, heads, width, value_width, dtype, options.layout, options.seed)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, and write the report; returns its rows."""
    options = parse(argv)
    before = prepare(options)
    found = find_contestants(options.native_peer)
    progress(f"contestants: {', '.join(found.present)}")
    for name, reason in found.absent.items():
        progress(f"absent: {name} ({reason})")
    rows: list[Row] = []
    out_of_play: dict[tuple[str, str, str, bool], str] = {}  # shape and dtype, contestant, job, ...
    with Meter(options.threads) as meter:
        for case in options.cases:
            rows += measure(case, found, options, meter, out_of_play)
    arguments = list(sys.argv[1:] if argv is None else argv)
    facts = describe(arguments, "benchmarks.attention", before)
    report = attention_report(rows, facts, found.absent, options.lengths)
    write_whole(options.out / "attention.md", report.encode())
    write_csv(options.out / "attention.csv", rows)
    figures = attention_figures(rows)
    for name, figure in figures.items():
        save_figure(figure, options.out / f"attention-{name}")
    drawn = "".join(f", -{name}.png" for name in figures)
    progress(f"written: {options.out}/attention.md, .csv{drawn}")
    return rows


def measure(
    case: Case,
    found: Field,
    options: argparse.Namespace,
    meter: Meter,
    out_of_play: dict[tuple[str, str, str, bool], str],
) -> list[Row]:
    """All rows of one case."""
    entries: list[Entry] = [
        (who.name, job, backward)
        for who in found.present.values()
        if not options.only or any(word in who.name for word in options.only)
        for job in options.jobs
        if job in who.jobs
        for backward in (False, True)
    ]
    progress(f"T={case.time} {case.shape} {case.dtype}: {len(entries)} calls")
    failures: dict[Entry, str] = {}
    memory: dict[Entry, Measured] = {}
    for entry in entries:
        name, job, backward = entry
        key = (f"{case.shape} {case.dtype}", *entry)
        if case.dtype not in found.present[name].dtypes:
            failures[entry] = f"does not take {case.dtype}"
        elif key in out_of_play:
            failures[entry] = out_of_play[key]
        elif not options.no_memory:
            share = 1.0 if case.time in options.lengths else MORE
            share = share if found.present[name].fast else SLOW
            memory[entry] = _gate(case, entry, options, meter, share * options.limit)
            if memory[entry].failure:
                failures[entry] = f"{memory[entry].failure} at T={case.time}"
                if share != MORE or "takes more" not in failures[entry]:
                    out_of_play[key] = failures[entry]
                progress(f"  left out: {name}, {job}, {MODES[backward]}: {failures[entry]}")

    problem, judged = Problem(case), dict[Entry, Errors]()
    calls: dict[Entry | str, Call] = {}
    for entry in entries:
        if entry in failures:
            continue
        name, job, backward = entry
        who = found.present[name]
        try:
            _refuse_if_too_large(memory.get(entry))
            judged[entry] = problem.judge(who, job, backward)
            calls[entry] = problem.call(who, job, backward)
        except Exception as error:  # a contestant that fails does not end the comparison
            failures[entry] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            progress(f"  failed: {name}, {job}, {MODES[backward]}: {failures[entry]}")
    times: dict[Entry | str, list[float]] = {}
    matmul_rate = 0.0
    if not options.only_memory:
        calls["matmul"], flops = matmul_call()
        first: dict[Entry | str, float] = {entry: e.seconds for entry, e in judged.items()}
        times = interleave(
            calls, rounds=options.rounds, budget=options.budget, seed=options.seed, first=first
        )
        matmul_rate = flops / quartiles(times.pop("matmul"))[1]
    rows = []
    for entry in entries:
        row = _row(case, found.present[entry[0]], entry, failures.get(entry, ""))
        if entry in judged:
            row = _with_errors(row, judged[entry])
        if entry in times:
            row = _with_times(row, case, times[entry], matmul_rate)
        if entry in memory:
            row = dataclasses.replace(row, extra_bytes=memory[entry].extra)
        rows.append(row)
    return rows


def _gate(
    case: Case, entry: Entry, options: argparse.Namespace, meter: Meter, limit: float
) -> Measured:
    """Peak memory in a process of its own, or why there is none."""
    name, job, backward = entry
    arguments = {
        "contestant": name,
        "job": job,
        "backward": backward,
        "native_peer": str(options.native_peer.absolute()),
    }
    return meter.measure(
        "benchmarks._problem:memory_task",
        {**arguments, "case": dataclasses.asdict(case)},
        {**arguments, "case": dataclasses.asdict(small(case))},
        limit,
    )


def _refuse_if_too_large(measured: Measured | None) -> None:
    """In this process the inputs of the others take memory too."""
    available = available_bytes()
    extra = None if measured is None else measured.extra
    if extra is not None and available is not None and extra > 0.9 * available:
        raise MemoryError(f"needs {extra / 2**30:.1f} GiB beside the others' inputs")


def _row(case: Case, who: Contestant, entry: Entry, note: str) -> Row:
    name, job, backward = entry
    return Row(
        contestant=name,
        backend=who.backend or "",
        rival=who.rival,
        job=job,
        mode=MODES[backward],
        time=case.time,
        shape=case.shape,
        dtype=case.dtype,
        layout=case.layout,
        result_bytes=case.result_bytes + (case.gradient_bytes if backward else 0),
        note=note,
    )


def _with_errors(row: Row, errors: Errors) -> Row:
    right = errors.within(row.dtype)
    return dataclasses.replace(
        row,
        error=errors.out,
        grad_error=errors.grad,
        right=right,
        note="" if right else "WRONG",
    )


def _with_times(row: Row, case: Case, seconds: list[float], matmul_rate: float) -> Row:
    low, median, high = quartiles(seconds)
    flops = chunkwise_flops(
        case.batch,
        case.heads,
        case.time,
        case.width,
        case.value_width,
        backward=row.mode == MODES[True],
    )
    return dataclasses.replace(
        row,
        seconds=median,
        low=low,
        high=high,
        runs=len(seconds),
        rate=flops / median,
        matmul_rate=matmul_rate,
    )


if __name__ == "__main__":
    main()
