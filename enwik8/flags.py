"""Checks of numbers that a command was told; the sentences name its flags."""

from __future__ import annotations

__all__ = ["MOST_THREADS", "check_seed", "check_sizes", "flag"]

MOST = 2**31  # of anything counted: more than anyone waits for, and it fits every integer
MOST_THREADS = 1024


def flag(name: str) -> str:
    """The flag of a field: ``--batch-size`` for ``batch_size``."""
    return "--" + name.replace("_", "-")


def check_sizes(*, most: int = MOST, **sizes: int | None) -> None:
    """Refuse counts outside 1 .. ``most``; None is a flag that was not given.

    Raises:
        ValueError: which flag, and its value.
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{flag(name)} must be at least 1, got {size}")
        if size is not None and size > most:
            raise ValueError(f"{flag(name)} must be at most {most}, got {size}")


def check_seed(name: str, seed: int) -> None:
    """Refuse a seed that the generators of random numbers cannot have.

    Raises:
        ValueError: which flag, and its value.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"{flag(name)} must lie in 0 .. 2**64 - 1, got {seed}")
