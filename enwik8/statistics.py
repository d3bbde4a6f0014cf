"""Means with uncertainty over few seeds: Student's t, and differences in pairs.

The quantile needs the incomplete beta function, here by its continued fraction (Abramowitz and
Stegun, 26.5.8, evaluated by Lentz's method), so that the experiment needs no statistics package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Interval", "interval", "paired", "t_distribution", "t_quantile"]


@dataclass(frozen=True)
class Interval:
    """A mean over ``count`` values, their standard deviation, and half of the 95 % interval.

    With one value there is no spread to know: ``deviation`` and ``half`` are NaN.
    """

    mean: float
    deviation: float
    half: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval; False where there is none."""
        return abs(self.mean) > self.half  # False for NaN


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean of independent values with its interval: mean ± t_{n-1} s / sqrt(n).

    ``s`` is the standard deviation with n - 1 in the denominator. The interval holds for normally
    distributed values; with 3 of them t is 4.30, so it is wide, and honestly so.

    Raises:
        ValueError: no values, or a confidence outside (0, 1).
    """
    if not values:
        raise ValueError("values is empty: give at least one")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, math.nan, math.nan, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = t_quantile(0.5 + confidence / 2, count - 1) * deviation / math.sqrt(count)
    return Interval(mean, deviation, half, count)


def paired(
    ours: Mapping[int, float], theirs: Mapping[int, float], confidence: float = 0.95
) -> Interval | None:
    """The mean of ours - theirs over the seeds (keys) that both have; None where they share none.

    What a seed does to both (its batches, its initial values) cancels, so this interval can be much
    narrower than those of the two means.
    """
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    return interval([ours[seed] - theirs[seed] for seed in common], confidence)


def t_distribution(t: float, freedom: float) -> float:
    """P(T <= t) of Student's t with ``freedom`` degrees of freedom.

    I_x(freedom / 2, 1 / 2) / 2 at x = freedom / (freedom + t^2) is the tail beyond \\|t\\|
    (Abramowitz and Stegun, 26.7.1).
    """
    if not freedom > 0:
        raise ValueError(f"freedom must be positive, got {freedom}")
    tail = _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def t_quantile(p: float, freedom: float) -> float:
    """The t with P(T <= t) = p, by bisection to the last digits.

    Raises:
        ValueError: p outside (0, 1), or freedom not positive.
    """
    if not 0 < p < 1:
        raise ValueError(f"p must lie in (0, 1), got {p}")
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while t_distribution(high, freedom) < p:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if t_distribution(middle, freedom) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, by symmetry
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 1000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + numerator * d or tiny)
            c = 1 + numerator / c or tiny
            change = c * d
            fraction *= change
        if abs(change - 1) < 1e-15:
            break
    return math.exp(log_front) / a * fraction
