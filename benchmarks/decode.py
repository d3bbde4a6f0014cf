"""Time per token when decoding, over context, and the size of what is kept.

    python -m benchmarks.decode --out results/benchmarks                (a minute)
    python -m benchmarks.decode --quick --out build/quick

One attention step (batch 1, 8 heads, width 64) after n tokens, without a graph: ours with its state
(`linear_attention(..., state=state, return_state=True)`; by the native kernels where they are
ready, and then in torch too), the recurrent step of fast-transformers (which cannot rotate), and
softmax attention with rotation over a cache of n keys and values that has room for the next ones
(no copy a token). Each is judged in float64 from the same state. Then
`LanguageModel.generate`: tokens a second, and the share of its time in matrix products; and
`LanguageModel.decode` by each way there is through it, with --compile torch.compile's too.

Written to --out: decode.md, decode.csv, decode.png and decode.svg.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks._figures import curves
from benchmarks._generate import decode_report, generation_report
from benchmarks._machine import add_common_options, describe, prepare, progress
from benchmarks._results import facts_list, table, verdict
from benchmarks._steps import Sizes, Stepper, find_steppers
from benchmarks._timing import interleave, quartiles, timed
from enwik8.plot import INK, frame, save_figure, write_whole

SLICE = 0.05  # seconds of steps in one timing
MOST_STEPS = 200


@dataclass(frozen=True)
class Row:
    """One contestant at one context; seconds a step, bytes kept."""

    contestant: str
    context: int
    seconds: float
    low: float
    high: float
    error: float
    state_bytes: int


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=(__doc__ or "").splitlines()[0]
    )
    add_common_options(parser, "build/benchmarks")
    add = parser.add_argument
    add("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536], help="tokens before")
    add("--far", type=int, default=1_048_576, help="a context for constant states only; 0: none")
    add("--heads", type=int, default=8)
    add("--width", type=int, default=64)
    add("--rounds", type=int, default=15)
    add("--compile", action="store_true", help="also through torch.compile: minutes")
    add("--new-tokens", type=int, default=256, help="that generate adds")
    add("--model", type=int, nargs=3, default=[6, 256, 4], metavar=("LAYERS", "DIM", "HEADS"))
    add("--quick", action="store_true", help="fewer contexts and rounds: half a minute")
    if parser.parse_known_args(argv)[0].quick:
        parser.set_defaults(contexts=[1024, 16384], rounds=5, new_tokens=64)
    options = parser.parse_args(argv)
    if options.width % 2 or min(options.width, options.heads, *options.contexts) < 1:
        parser.error("--width must be even, and it, --heads and --contexts positive")
    return options


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, and write the report; returns its rows."""
    options = parse(argv)
    before = prepare(options)
    sizes = Sizes(options.heads, options.width, MOST_STEPS + 1, options.seed)
    steppers, absent = find_steppers(sizes, compiled=options.compile)
    for name, reason in absent.items():
        progress(f"absent: {name} ({reason})")
    rows = measure(steppers, options)
    generation = "\n".join([generation_report(options), decode_report(options)])
    facts = describe(list(sys.argv[1:] if argv is None else argv), "benchmarks.decode", before)
    write_whole(options.out / "decode.md", report(rows, facts, absent, generation, sizes).encode())
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_whole(options.out / "decode.csv", buffer.getvalue().encode())
    save_figure(figure(rows, sizes), options.out / "decode")
    progress(f"written: {options.out}/decode.md, .csv, .png")
    return rows


def measure(
    steppers: Mapping[str, Callable[[int], Stepper]], options: argparse.Namespace
) -> list[Row]:
    """All rows: every contestant at every context, in interleaved rounds."""
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    steps: dict[tuple[str, int], int] = {}
    known: dict[tuple[str, int], tuple[float, int]] = {}
    for context in [*options.contexts, *([options.far] if options.far else [])]:
        for name, make in steppers.items():
            stepper = make(context)
            if context == options.far and not stepper.constant:
                continue
            key = (name, context)
            known[key] = (stepper.judge(), stepper.state_bytes())
            once = min(timed(partial(stepper.run, 3)) for _ in range(3)) / 3
            steps[key] = max(3, min(MOST_STEPS, int(SLICE / once)))
            calls[key] = partial(stepper.run, steps[key])
        progress(f"context {context}")
    with torch.no_grad():
        times = interleave(calls, rounds=options.rounds, budget=float("inf"), seed=options.seed)
    rows = []
    for key, seconds in times.items():
        low, median, high = (x / steps[key] for x in quartiles(seconds))
        rows.append(Row(*key, median, low, high, *known[key]))
    return rows


def report(
    rows: Sequence[Row],
    facts: dict[str, str],
    absent: dict[str, str],
    generation: str,
    sizes: Sizes,
) -> str:
    """The Markdown report."""
    text = ["# Decoding\n", facts_list(facts)]
    text[-1] += "".join(f"- absent: {name} ({reason})\n" for name, reason in absent.items())
    text.append("![time a token over context](decode.png)\n")
    text.append(f"## One step of attention, batch 1, {sizes.heads} heads, width {sizes.width}\n")
    lines = [
        [
            row.contestant,
            str(row.context),
            f"{1e6 * row.seconds:.1f} ({1e6 * row.low:.1f} to {1e6 * row.high:.1f})",
            f"{row.error:.0e}",
            f"{row.state_bytes / 1e6:.3g}",
        ]
        for row in rows
    ]
    judged = (sizes.heads, sizes.width) == (8, 64)  # what the targets are for
    header = ["contestant", "context", "microseconds a token", "error", "kept, MB"]
    targets = table(["", "", "target", "verdict"], ratios(rows, judged))
    return "\n".join([*text, table(header, lines), targets, generation])


def ratios(rows: Sequence[Row], judged: bool) -> list[list[str]]:
    """Ratios of our step to the others; `judged`: with what was set out to be reached."""

    def goal(value: float, bound: float) -> list[str]:
        cells = verdict(value, bound)
        return cells if judged else [cells[0], "", ""]

    at = {(row.contestant, row.context): row for row in rows}
    near = min(row.context for row in rows)
    far = max(row.context for row in rows)
    ours = "linear_rope, rotation"
    lines = []
    for name in sorted({row.contestant for row in rows}):
        if name.startswith(ours):
            peer = at.get(("fast-transformers, no rotation", near))
            if peer is not None:
                ratio = at[name, near].seconds / peer.seconds
                lines.append([f"{name} / fast-transformers' step, {near}", *goal(ratio, 1.0)])
            if far > near:
                ratio = at[name, far].seconds / at[name, near].seconds
                lines.append([f"{name}, {far} / {near}", *goal(ratio, 1.1)])
                growth = at[name, far].state_bytes / at[name, near].state_bytes
                lines.append([f"{name}, state, {far} / {near}", *goal(growth, 1.0)])
            for context in sorted({row.context for row in rows}):
                cache = at.get(("softmax cache, rotation", context))
                if cache is not None:
                    ratio = at[name, context].seconds / cache.seconds
                    lines.append([f"{name} / softmax cache, {context}", f"{ratio:.3g}", "", ""])
    return lines


def figure(rows: Sequence[Row], sizes: Sizes) -> Figure:
    """Microseconds a token over context."""
    picture = Figure(figsize=(7.2, 5.2))
    FigureCanvasAgg(picture)
    axes = picture.subplots()
    heading = f"Time of a step, batch 1, {sizes.heads} heads, width {sizes.width} (slope)"
    frame(axes, heading, xlabel="tokens before")
    axes.set_ylabel("microseconds a token", fontsize=10.5, color=INK)
    points: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        x, y = points.setdefault(row.contestant, ([], []))
        x.append(row.context)
        y.append(1e6 * row.seconds)
    curves(axes, points, [row.context for row in rows])
    picture.tight_layout()
    return picture


if __name__ == "__main__":
    main()
