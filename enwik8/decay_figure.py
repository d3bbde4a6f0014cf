"""How rotation weighs distance: RoFormer's long-term decay, and the same for rotated features.

    python -m enwik8.decay_figure --out results/long-term-decay

writes long-term-decay.png, .svg and .csv. Everything is computed from closed forms, in float64.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from enwik8.curves import Floats
from enwik8.errors import UserError
from enwik8.plot import INK, MUTED, frame, save_figure, write_whole

__all__ = ["mean_weight", "plot_long_term_decay", "relative_upper_bound", "weight_sum"]

BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"


def _frequencies(width: int, base: float) -> Floats:
    """theta_i = base^(-2 i / width), i = 0 .. width/2 - 1 (RoFormer, section 3.2.2)."""
    if width < 2 or width % 2:
        raise ValueError(f"width is {width}: give an even number from 2 on")
    return np.asarray(base ** (-2.0 * np.arange(width // 2) / width))


def relative_upper_bound(distance: ArrayLike, width: int = 128, base: float = 10000.0) -> Floats:
    """RoFormer's bound on how a score falls with distance (arXiv 2104.09864, section 3.4.3).

    With S_j = sum_{i<j} exp(1j * distance * theta_i), Abel summation bounds the rotated score by
    max_i |h_{i+1} - h_i| times sum_j |S_j|. Returned is the mean of |S_j| over j = 1 .. width/2,
    which the paper's figure 2 shows. At distance 0 it is (width/2 + 1) / 2.
    """
    phases = np.multiply.outer(np.asarray(distance, np.float64), _frequencies(width, base))
    partial = np.cumsum(np.exp(1j * phases), axis=-1)
    return np.asarray(np.abs(partial).mean(axis=-1))


def mean_weight(distance: ArrayLike, width: int = 64, base: float = 10000.0) -> Floats:
    """E[phi(q)^T R_distance phi(k)] / E[phi(q)^T phi(k)] for independent q and k.

    The features are independent and all have one mean mu (elu+1, or any map applied to each entry,
    of i.i.d. entries), so a rotated pair contributes 2 mu^2 cos(distance * theta_i), the sine terms
    cancel, and mu drops out: the mean of cos(distance * theta_i) over the width/2 pairs.
    """
    phases = np.multiply.outer(np.asarray(distance, np.float64), _frequencies(width, base))
    return np.asarray(np.cos(phases).mean(axis=-1))


def weight_sum(positions: int, width: int = 64, base: float = 10000.0) -> Floats:
    """Sum of the weights over the denominator at positions 0 .. positions - 1, i.i.d. keys.

    sum_{n<=t} E[phi(q)^T R_{t-n} phi(k)] / sum_{n<=t} E[phi(q)^T phi(k)], a ratio of expectations:
    what equation 19 of RoFormer, whose denominator is not rotated, makes of constant values 1. It
    is 1 at position 0 and falls.
    """
    weights = mean_weight(np.arange(positions), width, base)
    return np.cumsum(weights) / np.arange(1, positions + 1)


def plot_long_term_decay(
    out: str | Path,
    *,
    width: int = 128,
    feature_width: int = 64,
    base: float = 10000.0,
    distances: int = 250,
    positions: int = 2000,
) -> list[Path]:
    """Write long-term-decay.png, .svg and .csv into the folder `out`; returns their paths.

    Panels: the relative upper bound over distance (`width`; RoFormer's figure 2), the mean weight
    of rotated features over distance, and the sum of weights over the denominator by position (both
    `feature_width`).

    Raises:
        ValueError: an odd width.
        UserError: the folder cannot be made or written.
    """
    near = np.arange(distances + 1, dtype=np.float64)
    bound = relative_upper_bound(near, width, base)
    far = np.arange(positions + 1, dtype=np.float64)
    weight = mean_weight(far, feature_width, base)
    total = weight_sum(positions + 1, feature_width, base)

    figure = Figure(figsize=(10.4, 4.0))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.045, right=0.975, bottom=0.15, top=0.7, wspace=0.2)
    first, second, third = figure.subplots(1, 3)
    heading = f"RoPE: relative upper bound\n(RoFormer, figure 2; width {width})"
    _panel(first, heading, "relative distance", near, bound, BLUE)
    first.set_ylim(0)
    heading = f"Rotated features: mean weight,\n1 without rotation (width {feature_width})"
    _panel(second, heading, "relative distance", far, weight, ORANGE)
    second.axhline(0, color=MUTED, linewidth=0.8)
    heading = f"Sum of the weights over the\ndenominator (eq. 19; width {feature_width})"
    _panel(third, heading, "position", far, total, GREEN)
    third.set_ylim(0, 1.05)
    for position in sorted({100, 500, 1000, positions}):
        if position > positions:
            continue
        last = position == positions
        third.plot([position], [total[position]], "o", color=GREEN, markersize=4, clip_on=False)
        third.annotate(
            f"{total[position]:.2f} at {position:,}",
            (position, total[position]),
            xytext=(2, -15) if last else (6, 6),
            textcoords="offset points",
            ha="right" if last else "left",
            fontsize=9,
            color=INK,
        )
    title = "Long-term decay of rotary position embedding"
    note = (
        f"base {base:g}; middle and right: in expectation over i.i.d. queries and keys whose "
        "features have one common mean, such as elu+1 of normal entries"
    )
    figure.text(0.012, 0.955, title, fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.012, 0.885, note, fontsize=9, color=MUTED, va="center")

    stem = Path(out) / "long-term-decay"
    paths = save_figure(figure, stem)
    rows = io.StringIO()
    rows.write("distance,relative_upper_bound,mean_weight,weight_sum\n")
    for step in range(max(distances, positions) + 1):
        cells = [f"{y[step]:.8g}" if step < len(y) else "" for y in (bound, weight, total)]
        rows.write(f"{step},{','.join(cells)}\n")
    table = stem.with_suffix(".csv")
    write_whole(table, rows.getvalue().encode())
    return [*paths, table]


def _panel(axes: Axes, heading: str, xlabel: str, x: Floats, y: Floats, color: str) -> None:
    frame(axes, heading, xlabel=xlabel)
    axes.plot(x, y, color=color, linewidth=1.0 if len(x) > 1000 else 1.5)
    axes.set_xlim(0, x[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m enwik8.decay_figure",
        description="Draw RoFormer's long-term decay, and that of rotated features.",
    )
    parser.add_argument("--out", default="results/long-term-decay", help="folder to write to")
    parser.add_argument("--width", type=int, default=128, help="head width of the bound")
    parser.add_argument("--feature-width", type=int, default=64, help="number of features")
    parser.add_argument("--base", type=float, default=10000.0, help="base of the frequencies")
    options = parser.parse_args(arguments)
    try:
        paths = plot_long_term_decay(
            options.out,
            width=options.width,
            feature_width=options.feature_width,
            base=options.base,
        )
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
