"""Integers that count something; what is none of them is refused in one sentence."""

from __future__ import annotations

from typing import Any

__all__ = ["check_counts", "is_count"]


def is_count(value: Any) -> bool:
    """Whether it is an integer of at least 0; True and False are not, though Python counts them."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_counts(least: int = 1, *, optional: bool = False, **counts: Any) -> None:
    """Refuses what is no integer of at least `least`: NAME=value. None passes if `optional`."""
    for name, value in counts.items():
        if (value is None and optional) or (is_count(value) and value >= least):
            continue
        other = ", or None" if optional else " (0: none)" if least == 0 else ""
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}{other}")
