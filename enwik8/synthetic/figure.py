"""The figure of a table: accuracy over pairs, and over length for each task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from enwik8.errors import UserError
from enwik8.plot import INK, MUTED, frame, save_figure, style_of

from .grid import Table
from .tasks import TASKS
from .train import Settings

__all__ = ["draw", "series"]

COLUMNS = 3

Points = dict[int, list[float]]  # x -> accuracies, one a seed


def series(table: Table, task: str, arm: str, *, pairs: int | None, length: int | None) -> Points:
    """Accuracies over pairs (pairs=None, at that length) or over length (length=None)."""
    points: Points = {}
    for cell, results in table.items():
        if (cell.task, cell.arm) != (task, arm):
            continue
        for result in results:
            if pairs in (None, result.pairs) and length in (None, result.length):
                x = result.pairs if pairs is None else result.length
                points.setdefault(x, []).append(result.accuracy)
    return dict(sorted(points.items()))


def draw(table: Table, settings: Settings, out: Path) -> list[Path]:
    """Write accuracy.png and accuracy.svg into the folder; returns their paths.

    Raises:
        UserError: an empty table, or a folder that cannot be written.
    """
    if not table:
        raise UserError(f"{out} holds no results yet; run `python -m enwik8.synthetic --out {out}`")
    tasks = [task for task in TASKS if any(cell.task == task for cell in table)]
    panels: list[tuple[str, int | None]] = []  # task, pairs; None: over pairs
    for task in tasks:
        pairs = sorted(TASKS[task].pairs(settings.pairs))
        if len(pairs) > 1:
            panels.append((task, None))
        panels.append((task, pairs[len(pairs) // 2]))
    arms = list(dict.fromkeys(cell.arm for cell in table))
    rows = -(-(len(panels) + 1) // COLUMNS)  # one more for the legend
    figure = Figure(figsize=(10.4, 2.9 * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten().tolist()
    styles = style_of(arms)
    for panel, (task, number) in zip(axes, panels, strict=False):
        _panel(panel, table, settings, task, number, arms, styles)
    for first in axes[: len(panels) : COLUMNS]:
        first.set_ylabel("share of right answers", fontsize=10.5, color=INK)
    for empty in axes[len(panels) :]:
        empty.set_axis_off()
    handles = [Line2D([], [], **styles[arm], label=arm) for arm in arms]
    handles.append(Line2D([], [], color=MUTED, linestyle=":", label="guessing"))
    axes[len(panels)].legend(handles=handles, loc="center left", frameon=False, fontsize=10)
    seeds = len({cell.seed for cell in table})
    mixed = f"convolution of {settings.short_conv} tokens on q, k, v; " * bool(settings.short_conv)
    figure.suptitle(
        f"Recall and state tracking: {settings.layers} layers, {settings.dim} wide; {mixed}\n"
        f"trained at length {settings.length} for at most {settings.steps:,} steps, "
        f"{seeds} seed{'s' if seeds > 1 else ''}",
        fontsize=11,
        color=INK,
    )
    return save_figure(figure, out / "accuracy")


def _panel(
    axes: Axes,
    table: Table,
    settings: Settings,
    task: str,
    pairs: int | None,
    arms: Sequence[str],
    styles: dict[str, dict[str, Any]],
) -> None:
    heading = TASKS[task].description.capitalize()
    if pairs is None:
        heading, label = f"{heading}\nover pairs", "pairs"
    else:
        label = f"length (trained at {settings.length})"
        heading += f"\n{pairs} pairs, over length" if pairs else "\nover length"
    frame(axes, heading, xlabel=label)
    ticks: set[int] = set()
    for arm in arms:
        length = settings.length if pairs is None else None
        points = series(table, task, arm, pairs=pairs, length=length)
        if not points:
            continue
        ticks |= set(points)
        means = [sum(values) / len(values) for values in points.values()]
        axes.plot(list(points), means, linewidth=1.6, markersize=4, **styles[arm])
        low, high = map(min, points.values()), map(max, points.values())
        if any(len(values) > 1 for values in points.values()):
            band = {"color": styles[arm]["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(list(points), list(low), list(high), **band)
    axes.axhline(1 / TASKS[task].answers(settings.vocab_size), color=MUTED, linestyle=":")
    axes.set_ylim(-0.03, 1.03)
    _ticks(axes, ticks)


def _ticks(axes: Axes, ticks: Iterable[int]) -> None:
    places = sorted(ticks)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, labels=[str(place) for place in places])
    axes.minorticks_off()
