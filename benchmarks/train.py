"""Tokens a second and peak memory of a whole training step of a language model.

    python -m benchmarks.train --out results/benchmarks                 (some 5 minutes)
    python -m benchmarks.train --quick --out build/quick

A step is forward, cross-entropy, backward and AdamW on the same random tokens (`_models.py`): this
library's `LanguageModel` with linear and with softmax attention, `PerformerLM` of performer-pytorch
at the same size and number of features, and the model whose attention mixes no tokens, which is the
floor. The tokens of a step are the same at each length, so longer sequences are fewer. A model that
needs more memory than there is takes its batch in parts, with gradients accumulated; the table says
so. Losses of the first and the last step are there to show that the step trains.

Written to --out: train.md and train.csv.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks._generate import self_times
from benchmarks._machine import add_common_options, describe, prepare, progress
from benchmarks._memory import Measured, Meter
from benchmarks._models import Size, Trainer, find_models
from benchmarks._results import facts_list, table, verdict
from benchmarks._timing import interleave, quartiles
from enwik8.plot import write_whole

TASK = "benchmarks._models:memory_task"
TOP = 12
TARGET_SIZE = (6, 256, 4, 8192)  # layers, width, heads, tokens: what the targets are for


@dataclass(frozen=True)
class Row:
    """One model at one length; seconds and bytes are of a step of `tokens` tokens."""

    model: str
    time: int
    batch: int
    part: int
    parameters: int = 0
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    extra_bytes: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    note: str = ""

    @property
    def rate(self) -> float | None:
        """Tokens a second."""
        return None if self.seconds is None else self.batch * self.time / self.seconds


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train", description=(__doc__ or "").splitlines()[0]
    )
    add_common_options(parser, "build/benchmarks")
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[512, 4096], help="T; each divides --tokens")
    add("--tokens", type=int, default=8192, help="of a step; the batch is tokens / T")
    add("--layers", type=int, default=6)
    add("--dim", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--only", nargs="+", default=[], help="models whose name contains one of these words")
    add("--rounds", type=int, default=5, help="timed steps of each model")
    add("--budget", type=float, default=30.0, help="seconds after which a model has enough steps")
    add("--limit", type=float, default=120.0, help="seconds; a slower step is left out")
    add("--compile", action="store_true", help="also our models through torch.compile")
    add("--profile", action="store_true", help="also the largest costs of a step")
    add("--no-memory", action="store_true", help="no processes of their own; whole batches only")
    add("--quick", action="store_true", help="a quarter of the tokens, the short length only")
    if parser.parse_known_args(argv)[0].quick:
        parser.set_defaults(lengths=[512], tokens=2048, rounds=3)
    options = parser.parse_args(argv)
    if any(time < 2 or options.tokens % time for time in options.lengths):
        parser.error("--tokens must be a multiple of every one of --lengths, of 2 at least")
    if options.dim % (2 * options.heads):
        parser.error("--heads must divide --dim into even widths")
    return options


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure, and write the report; returns its rows."""
    options = parse(argv)
    before = prepare(options)
    names, absent = find_models(compiled=options.compile)
    if options.only:
        names = [name for name in names if any(word in name for word in options.only)]
    for name, reason in absent.items():
        progress(f"absent: {name} ({reason})")
    rows: list[Row] = []
    profiles: list[str] = []
    with Meter(options.threads) as meter:
        for time in options.lengths:
            size = Size(
                time,
                options.tokens // time,
                options.layers,
                options.dim,
                options.heads,
                options.seed,
            )
            rows += measure(names, size, options, meter, profiles)
    facts = describe(list(sys.argv[1:] if argv is None else argv), "benchmarks.train", before)
    write_whole(options.out / "train.md", report(rows, facts, absent, profiles, options).encode())
    buffer = io.StringIO()
    writer = csv.DictWriter(
        buffer, [*(f.name for f in fields(Row)), "tokens_per_second"], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows({**asdict(row), "tokens_per_second": row.rate} for row in rows)
    write_whole(options.out / "train.csv", buffer.getvalue().encode())
    progress(f"written: {options.out}/train.md, train.csv")
    return rows


def measure(
    names: Sequence[str],
    size: Size,
    options: argparse.Namespace,
    meter: Meter,
    profiles: list[str],
) -> list[Row]:
    """All rows of one length: the largest part of a batch that fits, then interleaved steps."""
    progress(f"T={size.time}, batch {size.batch}: {', '.join(names)}")
    parts: dict[str, int] = {}
    memory: dict[str, Measured] = {}
    for name in names:
        part = size.batch
        while not options.no_memory:
            memory[name] = meter.measure(
                TASK, _arguments(name, size, part), _arguments(name, size.small(), 1), options.limit
            )
            short = memory[name].failure and "memory" in str(memory[name].failure)
            if not short or part == 1:
                break
            progress(f"  {name}: a part of {part} does not fit in memory")
            part = (part + 1) // 2
        parts[name] = part
        if name in memory and memory[name].failure:
            progress(f"  left out: {name}: {memory[name].failure}")
    trainers = {
        name: Trainer(name, size, parts[name])
        for name in names
        if name not in memory or not memory[name].failure
    }
    for trainer in trainers.values():
        trainer.step()  # AdamW makes its state in the first step, which is not timed
    times = interleave(
        {name: trainer.step for name, trainer in trainers.items()},
        rounds=options.rounds,
        budget=options.budget,
        seed=options.seed,
        first=dict.fromkeys(trainers, 0.0),
    )
    rows = []
    for name in names:
        if name not in trainers:
            rows.append(Row(name, size.time, size.batch, parts[name], note=_failure(memory[name])))
            continue
        trainer = trainers[name]
        low, median, high = quartiles(times[name])
        rows.append(
            Row(
                name,
                size.time,
                size.batch,
                parts[name],
                parameters=sum(p.numel() for p in trainer.model.parameters()),
                seconds=median,
                low=low,
                high=high,
                extra_bytes=memory[name].extra if name in memory else None,
                first_loss=trainer.losses[0],
                last_loss=trainer.losses[-1],
            )
        )
        if options.profile and "compiled" not in name:
            profiles.append(_profile(name, trainer, size))
    return rows


def _arguments(name: str, size: Size, part: int) -> dict[str, Any]:
    return {"name": name, "size": asdict(size), "part": part}


def _failure(measured: Measured) -> str:
    return measured.failure or ""


def _profile(name: str, trainer: Trainer, size: Size) -> str:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.step()
    spent = self_times(profiled.key_averages())
    whole = sum(spent.values())
    lines = [
        [f"`{key}`", f"{1e3 * seconds:.0f}", f"{seconds / whole:.0%}"]
        for key, seconds in list(spent.items())[:TOP]
    ]
    heading = f"### {name}, T = {size.time}: largest costs of a step\n"
    return "\n".join([heading, table(["operator itself", "ms", "share"], lines)])


def report(
    rows: Sequence[Row],
    facts: dict[str, str],
    absent: dict[str, str],
    profiles: Sequence[str],
    options: argparse.Namespace,
) -> str:
    """The Markdown report."""
    text = ["# Training step\n", facts_list(facts)]
    text[-1] += "".join(f"- absent: {name} ({reason})\n" for name, reason in absent.items())
    text.append(
        f"Layers {options.layers}, width {options.dim}, heads {options.heads}, {options.tokens} "
        "tokens a step, float32, AdamW; medians (quartiles); memory is the peak of one step in a "
        "process of its own, over the model and its data.\n"
    )
    lines = []
    for row in rows:
        batch = f"{row.batch}" + (f" in parts of {row.part}" if row.part < row.batch else "")
        cells = [row.model, str(row.time), batch]
        if row.seconds is None or row.low is None or row.high is None:
            lines.append([*cells, row.note, "", "", ""])
            continue
        speed = [row.batch * row.time / seconds for seconds in (row.seconds, row.high, row.low)]
        lines.append(
            [
                *cells,
                f"{speed[0]:.0f} ({speed[1]:.0f} to {speed[2]:.0f})",
                f"{row.extra_bytes / 1e6:.0f}" if row.extra_bytes is not None else "",
                f"{row.parameters / 1e6:.2f}",
                f"{row.first_loss:.2f}, {row.last_loss:.2f}",
            ]
        )
    judged = (options.layers, options.dim, options.heads, options.tokens) == TARGET_SIZE
    header = ["model", "T", "batch", "tokens/s", "extra MB", "million parameters", "loss"]
    text += [table(header, lines), table(["", "", "target", "verdict"], ratios(rows, judged))]
    text += profiles
    return "\n".join(text)


def ratios(rows: Sequence[Row], judged: bool) -> list[list[str]]:
    """Ratios of our models to the others; `judged`: with what was set out to be reached."""

    def goal(value: float, bound: float, at_least: bool) -> list[str]:
        cells = verdict(value, bound, at_least=at_least)
        return cells if judged else [cells[0], "", ""]

    lines = []
    at = {(row.model, row.time): row for row in rows if row.seconds is not None}
    for (name, time), row in at.items():
        if not name.startswith("linear_rope") or row.rate is None or "softmax" in name:
            continue
        performer, softmax = at.get(("PerformerLM", time)), at.get(("linear_rope softmax", time))
        plain = at.get((name.removesuffix(", compiled"), time))
        if performer is not None and performer.rate:
            cells = goal(row.rate / performer.rate, 4.5, True)
            lines.append([f"{name} / PerformerLM, T = {time}, tokens/s", *cells])
            if row.extra_bytes and performer.extra_bytes:
                # Per token of a part: a smaller part would make the other look leaner than it is.
                ours = row.extra_bytes / row.part
                cells = goal(ours / (performer.extra_bytes / performer.part), 0.1, False)
                lines.append([f"{name} / PerformerLM, T = {time}, memory a token", *cells])
        if softmax is not None and softmax.rate:
            bound = 2.0 if time >= 4096 else 1.2 if "native" in name else 1.05
            cells = goal(row.rate / softmax.rate, bound, True)
            lines.append([f"{name} / the same with softmax, T = {time}, tokens/s", *cells])
        if plain is not None and plain is not row and plain.rate:
            gain = f"{row.rate / plain.rate:.3g}"
            lines.append([f"{name} / not compiled, T = {time}", gain, "", ""])
    return lines


if __name__ == "__main__":
    main()
