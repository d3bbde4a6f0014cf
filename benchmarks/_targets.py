"""Ratios of our backends to the others, and what this project set out to reach.

The targets hold at the shape 4 x 8 x 64 in float32. A ratio is of medians of one run. The best peer
is the fastest linear attention that pip installs as it stands and whose result is right, for the
same job, length and mode; softmax attention is compared with separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks._timing import slope

if TYPE_CHECKING:
    from benchmarks._results import Row

__all__ = ["Target", "best_peer", "targets_of", "targets_table"]

SHAPE, DTYPE = "4x8x64x64", "float32"
BOTH = ("forward", "forward+backward")
# The slope of time is that of the least squares from this length on, over at least three doublings
# (it is meant for 2048 to 32768).
SLOPE_FROM, SLOPE_OVER = 2048, 8
# Whose ratios are shown: the forms that are meant to be fast.
FAST = ("chunked", "native")

Value = Callable[[Sequence["Row"], int], float | None]
Bound = float | Mapping[int, float]


@dataclass(frozen=True)
class Target:
    """A number over T and the bound that it should keep.

    Args:
        what: its name in the table.
        value: from all rows of a setting and T to the number; None where there is none.
        bound: the same for every T from 512 to 16384, or one for each T; {} has no target.
        at_least: whether the number should be above the bound, not below it.
        once: a number of the whole line, not of a T.
    """

    what: str
    value: Value
    bound: Bound
    at_least: bool = False
    once: bool = False

    def bound_at(self, time: int) -> float | None:
        """The bound at this T, if there is one."""
        if isinstance(self.bound, Mapping):
            return self.bound.get(time)
        return self.bound if self.once or 512 <= time <= 16384 else None

    def kept(self, time: int, value: float) -> bool | None:
        """Whether the bound is kept; None where there is none."""
        bound = self.bound_at(time)
        if bound is None:
            return None
        return value >= bound if self.at_least else value <= bound


def targets_of(backend: str) -> list[Target]:
    """What is shown of one backend of ours."""
    fast = backend == "native"
    none: Bound = {}
    peer: dict[str, Bound] = {
        "product": 0.20 if fast else 0.45,
        "attention": none,
        "rotary": 0.20 if fast else 0.40,
    }
    softmax: Bound = none if fast else {1024: 0.40, 4096: 0.17, 16384: 0.07}
    share: Bound = {4096: 0.55, 16384: 0.45} if fast else none
    names = {"product": "bare product", "attention": "no rotation", "rotary": "rotation"}
    targets = [
        Target(f"{backend} / best peer, {names[job]}, {mode}", _to_peer(backend, job, mode), bound)
        for job, bound in peer.items()
        for mode in BOTH
    ]
    targets += [
        Target(
            f"{backend} / softmax, {names[job]}, {mode}",
            _to_softmax(backend, job, mode),
            softmax if mode == BOTH[1] else none,
        )
        for job in ("attention", "rotary")
        for mode in BOTH
    ]
    targets += [
        Target(
            f"{backend}: of the matmul rate, bare product, {mode}",
            _share(backend, mode),
            share,
            at_least=True,
        )
        for mode in BOTH
    ]
    targets += [
        Target(
            f"{backend}: rotation and normalization / bare product, {mode}",
            _overhead(backend, mode),
            none if fast else 1.35,
        )
        for mode in BOTH
    ]
    targets += [
        Target(
            f"{backend}: extra memory / (output + gradients), {names[job]}",
            _memory(backend, job),
            1.1 if fast else 1.4,
        )
        for job in ("product", "rotary")
    ]
    targets += [
        Target(
            f"{backend}: slope of time from T = {SLOPE_FROM} on, {names[job]}, {mode}",
            _slope(backend, job, mode),
            1.1,
            once=True,
        )
        for job in ("product", "rotary")
        for mode in BOTH
    ]
    return targets


def targets_table(rows: Sequence[Row]) -> str:
    """Each number over T, its bound, and whether it is kept (at the shape the bounds are for).

    Where not every T of the table is judged, the verdict names those that are.
    """
    from benchmarks._results import milliseconds, table

    times = sorted({row.time for row in rows})
    lines = []
    for job in ("product", "attention", "rotary"):
        for mode in BOTH:
            cells = []
            for time in times:
                best = best_peer(rows, job, mode, time)
                cells.append(f"{best.contestant} {milliseconds(best.seconds)}" if best else "")
            if any(cells):
                lines.append([f"best peer, {job}, {mode}, ms", *cells, "", ""])
    judged = bool(rows) and (rows[0].shape, rows[0].dtype, rows[0].layout) == (SHAPE, DTYPE, "own")
    for backend in FAST:
        for target in targets_of(backend):
            line = _target_line(target, rows, times, judged)
            if line is not None:
                lines.append(line)
    return table(["", *(f"T={time}" for time in times), "target", "verdict"], lines)


def _target_line(
    target: Target, rows: Sequence[Row], times: Sequence[int], judged: bool
) -> list[str] | None:
    if target.once:
        value = target.value(rows, 0)
        if value is None:
            return None
        cells, values = ["" for _ in times], {0: value}
        cells[-1] = f"{value:.2f}"
    else:
        found = {time: target.value(rows, time) for time in times}
        values = {time: value for time, value in found.items() if value is not None}
        if not values:
            return None
        cells = [f"{values[time]:.2f}" if time in values else "" for time in times]
    kept = {time: target.kept(time, value) for time, value in values.items()}
    bounds = {time: target.bound_at(time) for time in values if kept[time] is not None}
    if not bounds or not judged:
        return [target.what, *cells, "", ""]
    sign = "≥" if target.at_least else "≤"
    distinct = list(dict.fromkeys(f"{bound:g}" for bound in bounds.values()))
    verdicts = []
    for word, truth in (("**missed**", False), ("met", True)):
        which = [time for time in bounds if kept[time] is truth]
        if which:
            everywhere = target.once or len(which) == len(times)
            verdicts.append(word + ("" if everywhere else f" at {_list_of(which, times)}"))
    if verdicts[1:] and len(bounds) == len(times):
        verdicts.pop()  # met at the others
    return [target.what, *cells, f"{sign} {' / '.join(distinct)}", "; ".join(verdicts)]


def _list_of(some: Sequence[int], times: Sequence[int]) -> str:
    """Lengths among those of the table, three and more in a row by their ends."""
    at = times.index(some[0])
    if len(some) > 2 and list(some) == list(times[at : at + len(some)]):
        return f"{some[0]} to {some[-1]}"
    return ", ".join(map(str, some))


# --- the numbers ----------------------------------------------------------------------------------


def _find(rows: Sequence[Row], backend: str, job: str, mode: str, time: int) -> Row | None:
    for row in rows:
        if (row.backend, row.job, row.mode, row.time) == (backend, job, mode, time) and row.counts:
            return row
    return None


def best_peer(rows: Sequence[Row], job: str, mode: str, time: int) -> Row | None:
    """The fastest rival with a right result."""
    rivals = [
        row
        for row in rows
        if row.rival and row.counts and (row.job, row.mode, row.time) == (job, mode, time)
    ]
    return min(rivals, key=lambda row: row.seconds or math.inf, default=None)


def _ratio(ours: Row | None, other: Row | None) -> float | None:
    if ours is None or other is None or ours.seconds is None or not other.seconds:
        return None
    return ours.seconds / other.seconds


def _to_peer(backend: str, job: str, mode: str) -> Value:
    return lambda rows, time: _ratio(
        _find(rows, backend, job, mode, time), best_peer(rows, job, mode, time)
    )


def _to_softmax(backend: str, job: str, mode: str) -> Value:
    other = "softmax" if job == "attention" else "softmax-rotary"
    return lambda rows, time: _ratio(
        _find(rows, backend, job, mode, time), _find(rows, "", other, mode, time)
    )


def _overhead(backend: str, mode: str) -> Value:
    return lambda rows, time: _ratio(
        _find(rows, backend, "rotary", mode, time), _find(rows, backend, "product", mode, time)
    )


def _share(backend: str, mode: str) -> Value:
    def value(rows: Sequence[Row], time: int) -> float | None:
        row = _find(rows, backend, "product", mode, time)
        return None if row is None else row.share

    return value


def _memory(backend: str, job: str) -> Value:
    def value(rows: Sequence[Row], time: int) -> float | None:
        for row in rows:
            if (row.backend, row.job, row.mode, row.time) == (backend, job, BOTH[1], time):
                return row.extra_share
        return None

    return value


def _slope(backend: str, job: str, mode: str) -> Value:
    def value(rows: Sequence[Row], _: int) -> float | None:
        points = [
            (row.time, row.seconds)
            for row in rows
            if (row.backend, row.job, row.mode) == (backend, job, mode)
            and row.counts
            and row.seconds is not None
            and row.time >= SLOPE_FROM
        ]
        times = [time for time, _ in points]
        if not times or max(times) < SLOPE_OVER * min(times):
            return None
        return slope(times, [seconds for _, seconds in points])

    return value
