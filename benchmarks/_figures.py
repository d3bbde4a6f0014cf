"""Time and memory over length, on logarithmic axes with the slopes in the legends."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks._results import GROUPS, MODES, Row
from benchmarks._timing import slope
from enwik8.plot import INK, MUTED, frame

__all__ = ["attention_figures", "curves"]

SLOPE_FROM = 2048  # shorter sequences cost a call's overhead too; used where two points are left
NOISE = 1e5  # bytes; less is a matter of how many pages were free
STYLES = {
    "linear_rope chunked": ("#0072b2", "o", "-"),
    "linear_rope native": ("#332288", "s", "-"),
    "linear_rope recurrent": ("#56b4e9", "^", ":"),
    "linear_rope reference": ("#88ccee", "v", ":"),
    "fast-transformers": ("#d55e00", "D", "--"),
    "fast-transformers native": ("#e69f00", "d", "--"),
    "fla naive chunk": ("#009e73", "P", "--"),
    "performer-pytorch": ("#cc79a7", "X", "--"),
    "softmax": ("#444444", "*", "-."),
    # Steps of decoding.
    "linear_rope, rotation": ("#0072b2", "o", "-"),
    "linear_rope, rotation, compiled": ("#332288", "s", "-"),
    "linear_rope, no rotation": ("#56b4e9", "^", "-"),
    "fast-transformers, no rotation": ("#d55e00", "D", "--"),
    "softmax cache, rotation": ("#444444", "*", "-."),
}
OTHER = ("#999933", "h", "-")

Points = dict[str, tuple[list[int], list[float]]]


def attention_figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """The figures "time" and "memory", as far as they were measured, of the first setting."""
    if not rows:
        return {}
    first = rows[0]
    setting = (first.shape, first.dtype, first.layout)
    here = [row for row in rows if (row.shape, row.dtype, row.layout) == setting]
    subtitle = f"batch x heads x width x value width = {first.shape}, {first.dtype}"
    figures = {}
    if any(row.counts for row in here):
        figures["time"] = _grid(
            here,
            lambda row: None if row.seconds is None or not row.right else 1e3 * row.seconds,
            "Time of a call",
            "milliseconds",
            subtitle,
        )
    if any(row.extra_bytes is not None for row in here):
        figures["memory"] = _grid(
            here,
            lambda row: (row.extra_bytes or 0) / 1e6 if (row.extra_bytes or 0) >= NOISE else None,
            "Peak memory of a call over its inputs",
            "MB",
            subtitle,
        )
    return figures


def _grid(
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    title: str,
    unit: str,
    subtitle: str,
) -> Figure:
    groups = {name: jobs for name, jobs in GROUPS.items() if any(r.job in jobs for r in rows)}
    figure = Figure(figsize=(1.2 + 4.6 * len(groups), 11.0))
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(MODES), len(groups), squeeze=False, sharex=True, sharey=True)
    for line, mode in zip(panels, MODES.values(), strict=True):
        for axes, (name, jobs) in zip(line, groups.items(), strict=True):
            points: Points = {}
            for row in rows:
                number = value(row) if row.job in jobs and row.mode == mode else None
                if number is not None:
                    times, numbers = points.setdefault(row.contestant, ([], []))
                    times.append(row.time)
                    numbers.append(number)
            frame(axes, f"{name}, {mode}", xlabel="tokens T")
            curves(axes, points, [row.time for row in rows])
            axes.set_ylabel(unit, fontsize=10.5, color=INK)
            axes.tick_params(labelleft=True, labelbottom=True)
    figure.text(0.012, 0.985, title, fontsize=13, color=INK, fontweight="bold", va="top")
    lines = textwrap.wrap(
        f"{subtitle}. In brackets: slope of the line on these axes, from T = {SLOPE_FROM} on where "
        "it has two points there.",
        int(15 * figure.get_figwidth()),  # characters of this size
    )
    figure.text(
        0.012,
        0.963,
        "\n".join(lines),
        fontsize=9,
        color=MUTED,
        va="top",
    )
    left = 0.75 / figure.get_figwidth()
    top = 0.935 - 0.015 * len(lines)
    figure.subplots_adjust(left=left, right=0.99, top=top, bottom=0.13, hspace=0.47, wspace=0.2)
    return figure


def curves(axes: Axes, points: Points, ticks: Iterable[int]) -> None:
    """A line a name on logarithmic axes, its slope in the legend; ticks on x where they are told.

    Panels that share an axis share its ticks too, so they must be told the same.
    """
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, (x, y) in points.items():
        color, marker, line = STYLES.get(name, OTHER)
        order = sorted(range(len(x)), key=x.__getitem__)
        x, y = [x[i] for i in order], [y[i] for i in order]
        far = [i for i, at in enumerate(x) if at >= SLOPE_FROM]
        chosen = far if len(far) >= 2 else range(len(x))
        power = slope([x[i] for i in chosen], [y[i] for i in chosen])
        label = f"{name} ({power:.2f})" if power == power else name
        look: dict[str, Any] = {"color": color, "marker": marker, "linestyle": line}
        axes.plot(x, y, label=label, markersize=5, linewidth=1.6, **look)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(ticks))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _tokens(at)))
    if points:
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 2}
        axes.legend(fontsize=8, frameon=False, **below)


def _tokens(count: float) -> str:
    for size, unit in ((1024**2, "M"), (1024, "k")):
        if count >= size and count % size == 0:
            return f"{count / size:g}{unit}"
    return f"{count:g}"
