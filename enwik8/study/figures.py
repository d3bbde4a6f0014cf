"""A study's figures: means over seeds with 95 % intervals, where they do not say otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from ..curves import Floats, align
from ..plot import GRID, INK, MUTED, curves_figure, frame, short_number, style_of
from ..statistics import Interval, interval
from .tables import ArmRow, Condition

__all__ = ["draw"]

WIDTH, HEIGHT = 9.6, 4.8  # inches
_BAND: dict[str, Any] = {"alpha": 0.16, "linewidth": 0}


def draw(each: Condition, title: str, unit: str) -> dict[str, tuple[Figure, str]]:
    """The figures of a condition: name -> (figure, one sentence on what it shows).

    A figure that there are no numbers for is left out.
    """
    logs = [run.log for row in each.chosen for run in row.runs if run.log is not None]
    if not logs:
        return {}
    found = {
        "curves": (
            curves_figure(logs, title=title),
            f"Training and validation loss in {unit}, each arm at its best learning rate.",
        )
    }
    drawn = (
        ("difference", _difference(each, unit)),
        ("speed-up", _speed_up(each)),
        ("clock", _clock(each, unit)),
        ("positions", _positions(each, unit)),
        ("pareto", _pareto(each, unit)),
        ("rates", _rates(each, unit)),
    )
    found.update({name: result for name, result in drawn if result is not None})
    return found


def _new(
    heading: str, note: str, xlabel: str, ylabel: str, height: float = HEIGHT
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.1, 0.72 / height, 0.63, 1 - 1.32 / height))
    frame(axes, "", xlabel=xlabel)
    axes.set_ylabel(ylabel, fontsize=10.5, color=INK)
    words: dict[str, Any] = {"va": "top", "parse_math": False}
    top = 1 - 0.1 / height
    figure.text(0.012, top, heading, fontsize=13, color=INK, fontweight="bold", **words)
    figure.text(0.012, 0.24 / height, note, fontsize=9, color=MUTED, **words)
    return figure, axes


def _legend(axes: Axes, order: Sequence[str]) -> None:
    """Names right of the panel, in the order of the lines' ends."""
    handles, labels = axes.get_legend_handles_labels()
    pairs = sorted(zip(handles, labels, strict=True), key=lambda p: order.index(p[1]))
    axes.legend(
        [handle for handle, _ in pairs],
        [label for _, label in pairs],
        loc="upper left",
        bbox_to_anchor=(1.015, 1.02),
        fontsize=9.5 if max(map(len, order)) <= 22 else 7.7,  # the margin's width is fixed
        frameon=False,
        handlelength=3.2,
    )


def _lines(styles: dict[str, dict[str, Any]], arm: str) -> dict[str, Any]:
    return {name: styles[arm][name] for name in ("color", "linestyle")}


def _others(each: Condition) -> list[ArmRow]:
    return [row for row in each.chosen if row.arm != each.baseline]


def _seeds(rows: Sequence[ArmRow], drawn: str) -> str:
    """How many seeds, and what is drawn of the spread over them, if there is any."""
    counts = sorted({len(row.runs) for row in rows})
    words = " or ".join(map(str, counts))
    return "1 seed an arm." if counts == [1] else f"{words} seeds an arm{drawn}"


def _difference(each: Condition, unit: str) -> tuple[Figure, str] | None:
    """Validation loss less the baseline's on the same seed, over the tokens."""
    base, styles = each.base, style_of([row.arm for row in each.chosen])
    if base is None or not _others(each):
        return None
    figure, axes = _new(
        f"Difference to {each.baseline} during training",
        f"Same seed against same seed; "
        f"{_seeds(each.chosen, '. Band: 95 % interval of the paired difference.')} "
        "Below 0 is better.",
        "training tokens (bytes)",
        f"{unit}, less the baseline's",
    )
    axes.axhline(0, color=styles[each.baseline]["color"], linewidth=1.4, label=each.baseline)
    of_base = {run.spec.seed: run.log for run in base.runs}
    ends = {each.baseline: 0.0}
    late: list[Floats] = []
    for row in _others(each):
        series = []
        for run in row.runs:
            theirs = of_base.get(run.spec.seed)
            if theirs is not None and run.log is not None:
                tokens, both = align([run.log.validation, theirs.validation])
                series.append((tokens, both[0] - both[1]))
        if not series:
            continue
        tokens, values = align(series)
        points = [interval(column.tolist()) for column in values.T]
        mean = _band(axes, tokens, points, styles[row.arm]["color"])
        axes.plot(tokens, mean, label=row.arm, linewidth=1.8, **_lines(styles, row.arm))
        ends[row.arm] = float(mean[-1])
        late.append(values[:, len(tokens) // 5 :].ravel())
    if late:  # the first evaluations differ widely and would flatten the rest
        _keep(axes, np.concatenate([*late, np.zeros(1)]), 0.25)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
    _legend(axes, sorted(ends, key=lambda arm: -ends[arm]))
    return figure, f"Difference to {each.baseline} over training, in pairs of equal seeds."


def _keep(axes: Axes, values: Floats, share: float) -> None:
    """Show ``values`` with some room; say so where an interval goes beyond the panel."""
    room = max(float(np.ptp(values)) * share, 0.01)
    low, high = float(values.min()) - room, float(values.max()) + room
    axes.set_ylim(low, high)
    paths = [path for each in axes.collections for path in each.get_paths()]
    ends = np.concatenate([np.zeros(0), *(np.asarray(path.vertices)[:, 1] for path in paths)])
    if ends.size and (ends.min() < low or ends.max() > high):
        place: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top"}
        words = "some intervals are wider than this panel"
        axes.text(0.99, 0.985, words, fontsize=9, color=MUTED, **place)


def _band(axes: Axes, x: Floats, points: Sequence[Interval], color: str) -> Floats:
    """Draw the intervals, where there are any; returns the means."""
    low, high = (np.array([getattr(p, end) for p in points]) for end in ("low", "high"))
    if np.isfinite(low).any():
        axes.fill_between(x, low, high, color=color, **_BAND)
    return np.array([point.mean for point in points])


def _speed_up(each: Condition) -> tuple[Figure, str] | None:
    """Tokens to the baseline's final loss, as a share of the baseline's tokens."""
    rows = [row for row in _others(each) if row.reached is not None and row.reached.of]
    if not rows:
        return None
    styles = style_of([row.arm for row in rows])

    def share(row: ArmRow) -> float:
        return row.reached.share.mean if row.reached and row.reached.share else 2.0

    rows.sort(key=share, reverse=True)
    figure, axes = _new(
        f"Tokens needed to reach the final loss of {each.baseline}",
        "Bars end at the loss that the baseline has at 100 %; shorter is better. Lines: 95 % "
        "interval. No factor where a seed never gets there.",
        f"% of the tokens of {each.baseline}",
        "",
        1.55 + 0.34 * max(len(rows), 2),
    )
    for place, row in enumerate(rows):
        assert row.reached is not None
        reached, color = row.reached, styles[row.arm]["color"]
        if reached.share is None:
            axes.text(1, place, "did not reach it", va="center", fontsize=9, color=MUTED)
            continue
        mean = reached.share.mean
        error = None if reached.count < 2 else [100 * reached.share.half]
        axes.barh(place, 100 * mean, xerr=error, height=0.62, color=color, ecolor=INK, capsize=3)
        if reached.count == reached.of:
            text = f"{1 / mean:.2f}x as fast"
        else:  # those that never get there have no number, so a factor of the rest would flatter
            text = f"{reached.count} of {reached.of} seeds"
        axes.text(
            1.02, place, text, va="center", fontsize=9.5, transform=axes.get_yaxis_transform()
        )
    axes.axvline(100, color=MUTED, linewidth=1)
    ends = [100 * row.reached.share.high for row in rows if row.reached and row.reached.share]
    furthest = max([112.0, *(1.03 * end for end in ends if np.isfinite(end))])
    axes.set(xlim=(0, furthest), yticks=range(len(rows)), ylim=(-0.6, len(rows) - 0.4))
    _names_left(figure, axes, [row.arm for row in rows])
    return figure, f"How many tokens each arm needs for the final loss of {each.baseline}."


def _clock(each: Condition, unit: str) -> tuple[Figure, str] | None:
    """Validation loss over the seconds that the arms take when each has the machine to itself."""
    rows = [row for row in each.chosen if row.alone is not None]
    if not rows:
        return None
    styles = style_of([row.arm for row in each.chosen])
    figure, axes = _new(
        "Loss over time",
        "Seconds from tokens per second measured apart, one arm at a time; "
        + _seeds(rows, ". Band: 95 % interval."),
        "seconds of training",
        f"validation {unit}",
    )
    ends, late = {}, []
    for row in rows:
        assert row.alone is not None
        tokens, values = align([run.log.validation for run in row.runs if run.log is not None])
        points = [interval(column.tolist()) for column in values.T]
        seconds = tokens / row.alone.mean
        mean = _band(axes, seconds, points, styles[row.arm]["color"])
        axes.plot(seconds, mean, label=row.arm, linewidth=1.8, **_lines(styles, row.arm))
        axes.plot(seconds[-1], mean[-1], "o", markersize=5, color=styles[row.arm]["color"])
        ends[row.arm] = float(mean[-1])
        late.append(mean[len(mean) // 5 :])
    _keep(axes, np.concatenate(late), 0.1)
    _legend(axes, sorted(ends, key=lambda arm: -ends[arm]))
    return figure, "Validation loss over the seconds of training, each arm alone on the machine."


def _names_left(figure: Figure, axes: Axes, names: Sequence[str]) -> None:
    """Label a bar chart's rows, and make room for the longest name."""
    axes.set_yticklabels(names)
    axes.grid(False, axis="y")
    box = axes.get_position()
    left = 0.03 + 0.0098 * max(map(len, names))
    axes.set_position((left, box.y0, 0.78 - left, box.height))


def _positions(each: Condition, unit: str) -> tuple[Figure, str] | None:
    """Loss by position, in the longest windows that an arm was measured in."""
    styles = style_of([row.arm for row in each.chosen])
    lines: dict[str, tuple[Floats, list[Interval]]] = {}
    length = 0
    for row in each.chosen:
        windows = [w for run in row.runs for w in run.measured.get("windows", []) if "bits" in w]
        if not windows:
            continue
        factor = max(w["factor"] for w in windows)
        windows = [w for w in windows if w["factor"] == factor]
        length = windows[0]["length"] // factor
        edges = np.asarray(windows[0]["edges"], dtype=np.float64)
        bits = np.asarray([w["bits"] for w in windows])
        centers = np.sqrt((edges[:-1] + 1) * edges[1:])
        lines[row.arm] = centers, [interval(column.tolist()) for column in bits.T]
    if not lines:
        return None
    figure, axes = _new(
        "Loss by position in the window",
        f"Read recurrently in pieces of the training length ({length} bytes, dotted line); "
        f"{_seeds(each.chosen, '. Band: 95 % interval.')}",
        "position in the window (bytes read before)",
        unit,
    )
    for arm, (x, points) in lines.items():
        mean = _band(axes, x, points, styles[arm]["color"])
        axes.plot(x, mean, label=arm, linewidth=1.7, **_lines(styles, arm))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(length, color=MUTED, linewidth=1.2, linestyle=":")
    # The first bytes, read without any context, would squash what follows.
    flat = [point.mean for _, points in lines.values() for point in points[len(points) // 6 :]]
    _keep(axes, np.array(flat), 0.15)
    _legend(axes, sorted(lines, key=lambda arm: -lines[arm][1][-1].mean))
    return figure, "Loss by position, in windows up to several times the training length."


def _pareto(each: Condition, unit: str) -> tuple[Figure, str] | None:
    """Final loss against the speed of training."""
    # Runs at once slow each other down: rates measured alone say more, if all arms have them.
    alone = all(row.alone is not None for row in each.chosen)
    speeds = {row.arm: row.alone if alone else row.speed for row in each.chosen}
    rows = [row for row in each.chosen if speeds[row.arm] is not None]
    if not rows:
        return None
    styles = style_of([row.arm for row in rows])
    figure, axes = _new(
        "Loss against speed",
        _seeds(rows, "; lines: 95 % interval of the loss.")
        + " Gray: arms that none beats in both.",
        "training tokens per second, "
        + ("alone on the machine" if alone else "beside the study's other runs"),
        f"final validation {unit}",
    )
    places = []
    for row in rows:
        x, y = speeds[row.arm], row.final
        assert x is not None
        places.append((x.mean, y.mean))
        error: dict[str, Any] = {} if y.count < 2 else {"yerr": [y.half]}
        look = {"color": styles[row.arm]["color"], "marker": styles[row.arm]["marker"]}
        axes.errorbar(
            x.mean, y.mean, **error, markersize=7, linestyle="", elinewidth=1, label=row.arm, **look
        )
    front = sorted(
        p for p in places if not any(q[0] >= p[0] and q[1] <= p[1] and q != p for q in places)
    )
    axes.plot(*zip(*front, strict=True), color="#bbbbbb", linewidth=1.2, zorder=0, label="_front")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
    _keep(axes, np.array([y for _, y in places]), 0.35)
    across = [x for x, _ in places]
    axes.set_xlim(0.85 * min(across), 1.08 * max(across))
    order = sorted(rows, key=lambda row: -row.final.mean)
    _legend(axes, [row.arm for row in order])
    return figure, "Final loss against training speed."


def _rates(each: Condition, unit: str) -> tuple[Figure, str] | None:
    """Final loss over the learning rates that were tried."""
    if not each.swept:
        return None
    arms = [row.arm for row in each.chosen]
    styles = style_of(arms)
    figure, axes = _new(
        "Learning rates",
        "Mean of the seeds of each rate, with the 95 % interval where there are several. "
        "Ring: the rate chosen.",
        "highest learning rate",
        f"final validation {unit}",
    )
    for arm in arms:
        rows = each.of_arm(arm)
        finals = [row.final for row in rows]
        axes.errorbar(
            [row.learning_rate for row in rows],
            [value.mean for value in finals],
            yerr=[0 if value.count < 2 else value.half for value in finals],
            label=arm,
            capsize=3,
            linewidth=1.6,
            markersize=5,
            **styles[arm],
        )
        best = next(row for row in rows if row.chosen)
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": INK, "zorder": 5, "s": 110}
        axes.scatter(best.learning_rate, best.final.mean, label="_ring", **ring)
    axes.set_xscale("log")
    rates = sorted({row.learning_rate for row in each.rows})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, color=GRID)
    _legend(axes, [row.arm for row in sorted(each.chosen, key=lambda row: -row.final.mean)])
    return figure, "Final loss over the learning rates tried."
