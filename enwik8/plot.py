"""Figures of training runs, from their files only.

Uses matplotlib's object interface with the Agg canvas: no display, no window, no global state.
"""

from __future__ import annotations

import io
import os
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from enwik8.curves import (
    Floats,
    Run,
    align,
    by_arm,
    corpora_of,
    corpus_name,
    load_runs,
    model_size,
    objective_of,
    read_metrics,
    smooth,
)
from enwik8.errors import UserError

__all__ = [
    "curves_figure",
    "plot",
    "read_metrics",
    "save_figure",
    "short_number",
    "smooth",
    "style_of",
]

INK, MUTED, GRID = "#222222", "#666666", "#e6e6e6"

# Warm colors for arms without rotation, cool ones for arms with it, gray for softmax attention;
# those of the two default arms are from the Okabe-Ito palette. Line style and marker say the same
# as the color, for readers and printers that do not see it.
COLORS = {
    "elu-none": "#d55e00",
    "elu-learned": "#e69f00",
    "elu-sinusoidal": "#b58900",
    "elu-none-decay": "#882255",
    "elu-rope": "#0072b2",
    "elu-rope-before": "#56b4e9",
    "elu-rope-decay": "#332288",
    "favor-none": "#a6761d",
    "favor-rope": "#009e73",
    "favor-rope-before": "#4fb395",
    "favor-rope-decay": "#00573f",
    "relu-none": "#cc79a7",
    "relu-rope": "#6a3d9a",
    "softmax-rope": "#000000",
    "softmax-none": "#888888",
    "softmax-learned": "#56657a",
}
OTHER_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#332288"),
    *("#117733", "#999933", "#aa4499", "#44aa99", "#661100", "#6699cc", "#b15928", "#6a3d9a"),
    *("#e31a1c", "#33a02c", "#8dd3c7", "#bc80bd"),
)
MARKERS = {"elu": "o", "relu": "s", "favor": "^", "softmax": "D"}
SKIPPED = 0.05  # share of the tokens, at the start, that does not set the y range
WIDTH, HEIGHT = 10.4, 5.0  # inches; at the 850 pixels of a README, 10 points are 11 pixels

Series = tuple[Floats, Floats]  # tokens, values


def style_of(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Color, line style and marker of each arm.

    An arm with an entry in COLORS looks the same in every figure, whatever its company; others get
    the free colors in the order of their names. Lines are solid with RoPE after the feature map,
    dash-dotted with RoPE before it, dashed without RoPE.
    """
    taken = {COLORS[arm] for arm in arms if arm in COLORS}
    free = [color for color in OTHER_COLORS if color not in taken] or list(OTHER_COLORS)
    unknown = sorted(arm for arm in arms if arm not in COLORS)
    colors = {**COLORS, **{arm: free[i % len(free)] for i, arm in enumerate(unknown)}}

    def line(arm: str) -> Any:
        if "rope-before" in arm:
            return (0, (6, 1.5, 1.5, 1.5))
        turns = ("rope", "best", "selective")  # all recipes rotate, but for one that says so
        rotates = "no-rope" not in arm and any(word in arm for word in turns)
        return "-" if rotates else (0, (4, 1.5))

    return {
        arm: {
            "color": colors[arm],
            "linestyle": line(arm),
            "marker": MARKERS.get(arm.split("-")[0], "o"),
        }
        for arm in arms
    }


def plot(
    folders: str | Path | Iterable[str | Path],
    out: str | Path | None = None,
    *,
    smoothing: float = 0.9,
    title: str | None = None,
) -> list[Path]:
    """Draw the training and validation curves of runs and comparisons over tokens.

    Args:
        folders: one or several folders with a `metrics.csv` (and `config.json`, if there), or
            a study's `curves.csv`.
        out: folder that gets `curves.png` and `curves.svg`; default: the first of `folders`, or
            the folder of that file.
        smoothing: factor of the training curve's exponential average, see `smooth`; not for
            `curves.csv`, which holds means of many steps.
        title: replaces the first line, which names the corpus.

    Returns:
        The two paths. Each file is replaced whole or not at all.

    Raises:
        UserError: nothing to read, runs of two objectives, or nowhere to write.
        ValueError: smoothing outside [0, 1).
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"--smoothing must be at least 0 (none) and below 1, got {smoothing}")
    folders = [folders] if isinstance(folders, (str, Path)) else list(folders)
    runs = load_runs(folders)
    figure = curves_figure(runs, smoothing=smoothing, title=title)
    first = Path(folders[0])
    beside = first.parent if first.is_file() else first
    return save_figure(figure, Path(beside if out is None else out) / "curves")


def curves_figure(
    runs: Sequence[Run], *, smoothing: float = 0.9, title: str | None = None
) -> Figure:
    """Return the figure that `plot` saves: training left, validation right, one y scale."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    FigureCanvasAgg(figure)
    training, validation = figure.subplots(1, 2, sharex=True, sharey=True)
    groups = by_arm(runs)
    styles = style_of(list(groups))
    # A raw curve of many thousand steps as SVG paths would make the file unusable.
    rasterized = sum(len(run.tokens) for run in runs) > 20_000

    averages: dict[str, Series] = {}
    validations: dict[str, Series] = {}
    for arm, seeds in groups.items():
        style = styles[arm]
        raw = {"color": style["color"], "linewidth": 0.7, "alpha": 0.25, "rasterized": rasterized}
        for run in seeds:
            _line(training, run.tokens, run.train, label=f"{arm}, each step", **raw)
        smoothed = [
            (run.tokens, smooth(run.train, 0 if run.spaced else smoothing)) for run in seeds
        ]
        lines = {name: style[name] for name in ("color", "linestyle")}
        averages[arm] = _mean_and_band(training, arm, smoothed, lines)
        validations[arm] = _mean_and_band(validation, arm, [run.validation for run in seeds], style)

    for axes, heading in ((training, "Training"), (validation, "Validation")):
        frame(axes, heading, xlabel="training tokens (bytes)")
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
        axes.tick_params(axis="y", labelleft=True)
    training.set_ylabel(objective_of(runs).unit, fontsize=10.5, color=INK)
    raw_curves = [(run.tokens, run.train) for run in runs]
    clipped = _limits(validation, list(averages.values()), list(validations.values()), raw_curves)
    _label_ends(figure, validation, averages, validations, styles)
    _titles(figure, runs, groups, smoothing, title, clipped)
    return figure


def _line(axes: Axes, x: Floats, y: Floats, **style: Any) -> None:
    """Plot a line with gaps at non-finite values; a point without neighbors gets a dot."""
    finite = np.isfinite(y)
    padded = np.concatenate([[False], finite, [False]])
    alone = np.flatnonzero(finite & ~padded[:-2] & ~padded[2:])
    if "marker" not in style and alone.size:
        style.update(marker="o", markersize=4, markevery=alone.tolist())
    axes.plot(x, np.where(finite, y, np.nan), **style)


def _mean_and_band(axes: Axes, arm: str, seeds: Sequence[Series], style: dict[str, Any]) -> Series:
    """Draw the mean of the seeds and the band from least to greatest; returns the mean.

    Seeds without a row yet are left out; the others count where all of them have a value.
    """
    seeds = [(tokens, values) for tokens, values in seeds if tokens.size]
    if not seeds:
        return np.empty(0), np.empty(0)
    tokens, values = align(seeds)
    mean = values.mean(axis=0)
    if "marker" in style:
        style = {**style, "markersize": 4.5 if tokens.size <= 25 else 2.5}
    _line(axes, tokens, mean, label=arm, linewidth=1.9, **style)
    if len(seeds) > 1:
        band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
        axes.fill_between(tokens, values.min(axis=0), values.max(axis=0), **band)
    return tokens, mean


def frame(axes: Axes, heading: str, *, xlabel: str) -> None:
    """Give a panel the look that all figures share."""
    axes.set_title(heading, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(xlabel, fontsize=10.5, color=INK)
    axes.tick_params(labelsize=10, color=GRID, labelcolor=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#bbbbbb")


def short_number(count: float) -> str:
    """Like 2.05M: three digits and a unit, for axes."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def _limits(
    axes: Axes,
    averages: Sequence[Series],
    validations: Sequence[Series],
    raw: Sequence[Series],
) -> float | None:
    """Set both ranges; returns the greatest average or validation value above the y range.

    The first steps start at 8 bits, log2(256), and would squash what follows. The top is therefore
    the 90 % quantile of the training averages, or the validation's greatest value after the first
    SKIPPED share of the tokens if that is higher.
    """

    def pool(series: Sequence[Series]) -> Series:
        tokens = np.concatenate([np.empty(0), *(one[0] for one in series)])
        values = np.concatenate([np.empty(0), *(one[1] for one in series)])
        kept = np.isfinite(values)
        return tokens[kept], values[kept]

    tokens, values = pool([*averages, *validations])
    if values.size == 0:
        axes.set(xlim=(0, 1), ylim=(0, 8), xticks=[])
        return None
    axes.set_xlim(0, float(tokens.max()) * 1.03)
    if values.size < 20:  # few points: show them all, the raw ones too
        shown = np.concatenate([values, pool(raw)[1]])
        low, high = float(shown.min()), float(shown.max())
    else:
        average, (when, validation) = pool(averages)[1], pool(validations)
        late = validation[when > SKIPPED * tokens.max()]
        tops = [np.quantile(average, 0.9)] if average.size else []
        tops += [late.max()] if late.size else []
        low, high = float(values.min()), float(max(tops, default=values.max()))
    pad = max(0.06 * (high - low), 0.02)
    axes.set_ylim(max(low - pad, 0), high + pad)
    return float(values.max()) if values.max() > high + pad else None


def _label_ends(
    figure: Figure,
    axes: Axes,
    averages: dict[str, Series],
    validations: dict[str, Series],
    styles: dict[str, dict[str, Any]],
) -> None:
    """Name the lines right of the right panel, by their last value, apart from each other.

    The labels serve both panels. Room is made for the longest one. An arm without validation is
    named beside its training average.
    """
    ends: list[tuple[float, float, str, str]] = []  # value, tokens, arm, text
    for arm in styles:
        for validated, (tokens, values) in ((True, validations[arm]), (False, averages[arm])):
            last = np.flatnonzero(np.isfinite(values))
            if last.size:
                value = float(values[last[-1]])
                text = f"{arm}  {value:.3f}" if validated else arm
                ends.append((value, float(tokens[last[-1]]) if validated else np.nan, arm, text))
                break
    ends.sort(key=lambda end: end[0])
    longest = max((len(end[3]) for end in ends), default=0)
    right = 1 - (longest * 6.4 + 32) / (WIDTH * 72)  # 6.4 points a letter
    figure.subplots_adjust(left=0.072, right=right, bottom=0.175, top=0.775, wspace=0.14)
    for panel, series in zip(figure.axes, (averages, validations), strict=True):
        if not any(np.isfinite(values).any() for _, values in series.values()):
            message = "no data yet" if not ends else f"no {panel.get_title('left').lower()} yet"
            panel.text(
                0.5,
                0.5,
                message,
                transform=panel.transAxes,
                ha="center",
                va="center",
                fontsize=14,
                color=MUTED,
            )

    (low, high), (_, most) = axes.get_ylim(), axes.get_xlim()
    height = axes.get_position().height * HEIGHT * 72  # points
    wanted = [min(max((end[0] - low) / (high - low), 0.0), 1.0) for end in ends]
    places = _spread(wanted, min(14.5 / height, 1.1 / max(len(ends) - 1, 1)))
    for (value, end, arm, text), place in zip(ends, places, strict=True):
        color = styles[arm]["color"]
        if np.isfinite(end) and low <= value <= high:
            leader = [end / most + 0.008, 1.035], [(value - low) / (high - low), place]
            look: dict[str, Any] = {"color": color, "linewidth": 0.7, "alpha": 0.6}
            axes.plot(*leader, transform=axes.transAxes, clip_on=False, label="_leader", **look)
        axes.text(
            1.045,
            place,
            text,
            transform=axes.transAxes,
            va="center",
            fontsize=9.5,
            color=color,
            fontweight="bold",
            parse_math=False,
        )


def _spread(wanted: Sequence[float], step: float) -> list[float]:
    """Move ascending places apart to at least `step`, each cluster about its own center, and none
    below the axes by more than half a line, where other words are."""
    clusters: list[list[float]] = []  # [sum of (wanted - index * step), size]
    for place in wanted:
        clusters.append([place, 1.0])
        while len(clusters) > 1:
            (sum_a, size_a), (sum_b, size_b) = clusters[-2:]
            if sum_b / size_b - sum_a / size_a >= step * (size_a + size_b) / 2:
                break
            clusters[-2:] = [[sum_a + sum_b, size_a + size_b]]
    places: list[float] = []
    for total, size in clusters:
        for index in range(int(size)):
            place = total / size + (index - (size - 1) / 2) * step
            places.append(max(place, places[-1] + step if places else -0.05))
    return places


def _titles(
    figure: Figure,
    runs: Sequence[Run],
    groups: dict[str, list[Run]],
    smoothing: float,
    title: str | None,
    clipped: float | None,
) -> None:
    corpora, objective = corpora_of(runs), objective_of(runs)
    if title is None:
        title = f"{objective.models} on {corpus_name(runs[0].config)}"
        if len(corpora) > 1:
            title = "Different corpora: NOT comparable"
    notes = [f"Faint: each step; line: exponential average, factor {smoothing:g}."]
    if spaced := [run for run in runs if run.spaced]:
        means = "Training: means of the steps from one validation to the next"
        notes = [f"{means}."] if len(spaced) == len(runs) else [f"{means}, or {notes[0].lower()}"]
    most = max((len(seeds) for seeds in groups.values()), default=1)
    if most > 1:
        notes.append(f"Mean of {most} seeds, band from least to greatest.")
    if clipped is not None:
        notes.append(f"Cut at the top: the first steps reach {clipped:.1f}.")
    size = model_size(runs) if objective.causal else f"{model_size(runs)}. {objective.description}"
    subtitle = "\n".join([*(textwrap.fill(each, 130) for each in corpora), size])
    muted: dict[str, Any] = {"fontsize": 9, "color": MUTED, "va": "top", "parse_math": False}
    figure.text(
        0.012, 0.98, title, fontsize=13, color=INK, fontweight="bold", va="top", parse_math=False
    )
    figure.text(0.012, 0.925, subtitle, linespacing=1.35, **muted)
    figure.text(0.012, 0.035, "  ".join(notes), **muted)


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.png and STEM.svg, each replaced whole; makes the folder.

    Raises:
        UserError: the folder cannot be made or written.
    """
    paths = []
    for suffix in (".png", ".svg"):
        buffer = io.BytesIO()
        # No date, so that the same numbers give the same picture.
        metadata = {"Date": None} if suffix == ".svg" else {}
        figure.savefig(buffer, format=suffix[1:], dpi=150, metadata=metadata)
        path = stem.with_name(stem.name + suffix)
        write_whole(path, buffer.getvalue())
        paths.append(path)
    return paths


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new, never a part.

    Raises:
        UserError: the folder cannot be made or written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
        temporary.chmod(0o644)  # the temporary file is private; a result is not
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): name another output folder"
        ) from error
