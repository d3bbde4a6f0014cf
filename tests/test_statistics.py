"""Intervals over few seeds: known quantiles of Student's t, known intervals, honest gaps."""

from __future__ import annotations

import math

import pytest

from enwik8.statistics import interval, paired, t_distribution, t_quantile


@pytest.mark.parametrize(
    ("p", "freedom", "expected"),
    [  # Abramowitz and Stegun, table 26.10
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.975, 120, 1.980),
        (0.95, 2, 2.920),
        (0.995, 4, 4.604),
        (0.9995, 1, 636.619),
    ],
)
def test_quantiles_are_those_of_the_tables(p: float, freedom: int, expected: float) -> None:
    assert t_quantile(p, freedom) == pytest.approx(expected, abs=6e-4)
    assert t_quantile(1 - p, freedom) == pytest.approx(-expected, abs=6e-4)


@pytest.mark.parametrize("t", [-40.0, -3.0, -0.2, 0.0, 0.7, 5.0, 300.0])
def test_distribution_with_a_closed_form(t: float) -> None:
    assert t_distribution(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, rel=1e-9)
    two = 0.5 + t / (2 * math.sqrt(2 + t * t))
    assert t_distribution(t, 2) == pytest.approx(two, rel=1e-9)
    normal = 0.5 * math.erfc(-t / math.sqrt(2))
    assert t_distribution(t, 1e7) == pytest.approx(normal, rel=1e-4, abs=1e-12)


def test_quantile_inverts_the_distribution() -> None:
    for freedom in (1, 2.5, 7, 60):
        for p in (0.001, 0.3, 0.5, 0.8, 0.999):
            assert t_distribution(t_quantile(p, freedom), freedom) == pytest.approx(p, rel=1e-9)


def test_interval_of_known_values() -> None:
    found = interval([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.deviation == pytest.approx(math.sqrt(7 / 3))
    assert found.half == pytest.approx(4.302652730 * math.sqrt(7 / 9), rel=1e-6)
    assert (found.low, found.high) == (found.mean - found.half, found.mean + found.half)
    assert not found.excludes_zero and interval([1.0, 1.1, 1.2]).excludes_zero
    assert interval([1.0, 2.0, 4.0], confidence=0.8).half < found.half


def test_one_value_has_no_interval_and_claims_nothing() -> None:
    found = interval([3.0])
    assert found.mean == 3.0 and found.count == 1
    assert math.isnan(found.half) and math.isnan(found.deviation) and not found.excludes_zero


def test_pairs_cancel_what_a_seed_does_to_both() -> None:
    base = {0: 1.0, 1: 5.0, 2: 9.0}
    other = {0: 0.9, 1: 4.9, 2: 8.9, 3: 100.0}
    found = paired(other, base)
    assert found is not None and found.count == 3
    assert found.mean == pytest.approx(-0.1) and found.half == pytest.approx(0, abs=1e-12)
    assert interval(list(base.values())).half > 9
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="values is empty"):
        interval([])
    with pytest.raises(ValueError, match=r"confidence must lie in \(0, 1\), got 1"):
        interval([1.0, 2.0], confidence=1)
    with pytest.raises(ValueError, match=r"p must lie in \(0, 1\), got 1"):
        t_quantile(1, 3)
    with pytest.raises(ValueError, match="freedom must be positive, got 0"):
        t_distribution(1, 0)
