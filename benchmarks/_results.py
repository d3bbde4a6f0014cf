"""Rows of the attention benchmark, and the report that is made of them."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._targets import targets_table
from benchmarks._timing import CHUNK
from enwik8.plot import write_whole

__all__ = ["GROUPS", "MODES", "Row", "attention_report", "facts_list", "table", "write_csv"]

MODES = {False: "forward", True: "forward+backward"}
# Which jobs stand in one table, and how they are called there.
GROUPS = {
    "bare product": ("product",),
    "attention without rotation": ("attention", "softmax"),
    "attention with rotation": ("rotary", "softmax-rotary"),
}


@dataclass(frozen=True)
class Row:
    """One contestant at one job, length and mode. Times in seconds, memory in bytes.

    Args:
        seconds, low, high: median and quartiles over `runs` timings.
        error, grad_error: see `_judge.relative_error`. right: whether both are small.
        rate: useful flops a second (`_timing.chunkwise_flops`); matmul_rate: of the machine, in
            the same rounds.
        extra_bytes: peak memory over inputs. result_bytes: size of the output, and of the
            gradients in the backward mode.
        note: why there is no time, or WRONG.
    """

    contestant: str
    backend: str
    rival: bool
    job: str
    mode: str
    time: int
    shape: str
    dtype: str
    layout: str
    result_bytes: int
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    runs: int = 0
    error: float | None = None
    grad_error: float | None = None
    right: bool = False
    rate: float | None = None
    matmul_rate: float | None = None
    extra_bytes: int | None = None
    note: str = ""

    @property
    def counts(self) -> bool:
        """Whether it has a time that is worth comparing."""
        return self.seconds is not None and self.right

    @property
    def share(self) -> float | None:
        """Of the machine's matmul rate; softmax attention does other work, and has none."""
        if self.rate is None or self.matmul_rate is None or self.job.startswith("softmax"):
            return None
        return self.rate / self.matmul_rate

    @property
    def extra_share(self) -> float | None:
        """Extra memory over the size of what is returned, of a right result."""
        if self.extra_bytes is None or not self.right:
            return None
        return self.extra_bytes / self.result_bytes


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All rows with all fields."""
    buffer = io.StringIO()
    names = [field.name for field in dataclasses.fields(Row)]
    writer = csv.DictWriter(buffer, [*names, "share"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({**dataclasses.asdict(row), "share": row.share})
    write_whole(path, buffer.getvalue().encode())


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    align = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, align, *lines)) + "\n"


def facts_list(facts: Mapping[str, str]) -> str:
    """Machine, versions and command as a list."""
    return "".join(f"- {name}: `{value}`\n" for name, value in facts.items())


def attention_report(
    rows: Sequence[Row],
    facts: Mapping[str, str],
    absent: Mapping[str, str],
    lengths: Sequence[int],
) -> str:
    """The Markdown report: the machine, ratios and targets, then a table a job and shape."""
    rates = [row.matmul_rate for row in rows if row.matmul_rate is not None]
    timed = any(row.seconds is not None for row in rows)
    header, legend = (_HEADER, _LEGEND) if timed else (_MEMORY_HEADER, _MEMORY_LEGEND)
    text = [f"# Attention: {'time, ' if timed else ''}memory, error\n", facts_list(facts)]
    if rates:
        low, high = min(rates) / 1e9, max(rates) / 1e9
        text[-1] += (
            f"- matmul: 2048 x 2048 x 2048 in float32 at {low:.0f} to {high:.0f} GFLOP/s, timed in "
            "the same rounds\n"
        )
    text[-1] += "".join(f"- absent: {name} ({reason})\n" for name, reason in absent.items())
    if any(row.counts for row in rows):
        text.append("![time over length](attention-time.png)\n")
    if any(row.extra_bytes is not None for row in rows):
        text.append("![memory over length](attention-memory.png)\n")
    settings = list(dict.fromkeys((row.shape, row.dtype, row.layout) for row in rows))
    for setting in settings:
        here = [row for row in rows if (row.shape, row.dtype, row.layout) == setting]
        shape, dtype, layout = setting
        name = f"batch x heads x width x value width {shape}, {dtype}"
        name += ", views of (batch, time, head, width)" if layout == "layer" else ""
        text += [f"## {name}\n", "### Ratios and targets\n", targets_table(here)]
        for group, jobs in GROUPS.items():
            lines = [
                (_line if timed else _memory_line)(pair)
                for time in lengths
                for pair in _pairs(row for row in here if row.job in jobs and row.time == time)
            ]
            if lines:
                text += [f"### {group[0].upper()}{group[1:]}\n", table(header, lines)]
    text.append(legend)
    return "\n".join(text)


_HEADER = (
    *("contestant", "T", "forward, ms", "error", "of matmul", "extra MB"),
    *("forward+backward, ms", "error of gradients", "of matmul", "extra MB"),
)

_MEMORY_HEADER = (
    *("contestant", "T", "forward, extra MB", "/ output", "error"),
    *("forward+backward, extra MB", "/ (output + gradients)", "error of gradients"),
)

_ERRORS = """\
Errors: largest difference from float64 over the largest value, on sampled rows and all gradients
that flow from them.
"""

_MEMORY_LEGEND = f"""\
Extra MB: peak of a process that makes the call once, over its inputs (and the given gradient of the
output). {_ERRORS}"""

_LEGEND = f"""\
Times: median (lower to upper quartile). Of matmul: useful flops (`_timing.chunkwise_flops`, chunks
of {CHUNK}) a second over the machine's rate. {_MEMORY_LEGEND}"""


def _pairs(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """The rows of each contestant by mode."""
    by_name: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_name.setdefault(row.contestant, {})[row.mode] = row
    return list(by_name.values())


def _line(pair: Mapping[str, Row]) -> list[str]:
    one = next(iter(pair.values()))
    cells = [one.contestant, str(one.time)]
    for mode in MODES.values():
        row = pair[mode]
        if row.seconds is None:
            cells += [row.note, "", "", ""]
            continue
        ms = [f"{milliseconds(x)}" for x in (row.seconds, row.low, row.high)]
        error = row.error if mode == MODES[False] else row.grad_error
        cells += [
            f"{ms[0]} ({ms[1]} to {ms[2]})" + (" WRONG" if not row.right else ""),
            f"{error:.0e}",
            f"{row.share:.2f}" if row.share is not None else "",
            f"{row.extra_bytes / 1e6:.0f}" if row.extra_bytes is not None else "",
        ]
    return cells


def _memory_line(pair: Mapping[str, Row]) -> list[str]:
    one = next(iter(pair.values()))
    cells = [one.contestant, str(one.time)]
    for mode in MODES.values():
        row = pair[mode]
        error = row.error if mode == MODES[False] else row.grad_error
        if row.extra_bytes is None or error is None:
            cells += [row.note, "", ""]
            continue
        share = row.extra_share
        cells += [
            f"{row.extra_bytes / 1e6:.1f}" + ("" if row.right else " WRONG"),
            "" if share is None else f"{share:.2f}",
            f"{error:.0e}",
        ]
    return cells


def milliseconds(seconds: float | None) -> str:
    """Three digits, no exponent."""
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def verdict(value: float, bound: float, *, at_least: bool = False) -> list[str]:
    """A number, its bound, and whether it is kept, as cells of a table."""
    kept = value >= bound if at_least else value <= bound
    sign = "≥" if at_least else "≤"
    return [f"{value:.3g}", f"{sign} {bound:g}", "met" if kept else "**missed**"]
