"""Times that can be compared: all contestants in turn, round after round, in one process.

A machine's speed drifts over minutes (its clock, its neighbors), so contestants timed one after
another are not timed on the same machine. Here each round calls every contestant once, in a random
order; what is reported is the median over the rounds and the quartiles around it.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

__all__ = ["Call", "chunkwise_flops", "interleave", "matmul_call", "quartiles", "slope"]

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

MATMUL = 2048
WARM = 1.0  # seconds; a first call this long counts, since being cold no longer matters
CHUNK = 64


def timed(call: Call) -> float:
    """Seconds of one call; what it returns is freed outside the clock."""
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def interleave(
    calls: Mapping[Key, Call],
    *,
    rounds: int,
    budget: float,
    seed: int = 0,
    first: Mapping[Key, float] | None = None,
) -> dict[Key, list[float]]:
    """Seconds of each call, a list of one entry a round.

    Args:
        calls: what to time, by name.
        rounds: how many.
        budget: seconds after which a call takes part in no more rounds, once it has two entries.
        seed: of the order in each round.
        first: seconds of a warm-up call made already (else one is made here).
    """
    order = random.Random(seed)
    times: dict[Key, list[float]] = {}
    for key, call in calls.items():
        warm = first[key] if first is not None and key in first else timed(call)
        times[key] = [warm] if warm >= WARM else []
    names = list(calls)
    for _ in range(rounds):
        order.shuffle(names)
        gc.collect()
        for key in names:
            done = times[key]
            if len(done) < min(rounds, 2) or (len(done) < rounds and sum(done) < budget):
                done.append(timed(calls[key]))
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile (the values themselves where there are few)."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def matmul_call(size: int = MATMUL, seed: int = 0) -> tuple[Call, float]:
    """A float32 product of two size x size matrices into a given third, and its flops."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    out = torch.empty(size, size)
    return lambda: torch.mm(a, b, out=out), 2.0 * size**3


def chunkwise_flops(
    batch: int, heads: int, tokens: int, features: int, values: int, *, backward: bool
) -> float:
    """Useful flops of the causal product, the same formula for every contestant.

        forward = 2 B H T (C (M + E) + 2 M E),   C = 64

    the four products of the chunkwise form: scores q k^T and their product with v inside a chunk
    (whole C x C squares, as matrix products have them; half of each is masked), q S and k^T v
    between chunks. Each of them has two of the same size in the backward pass, so forward and
    backward together are three times the forward. Not counted: what an algorithm computes again,
    feature maps, rotation, denominators. C is 64 in the formula whatever the contestant does.
    """
    forward = 2.0 * batch * heads * tokens * (CHUNK * (features + values) + 2 * features * values)
    return 3 * forward if backward else forward


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent p of the power law y = c x^p, by least squares of the logarithms; nan for one."""
    if len(x) < 2:
        return math.nan
    a, b = [math.log(value) for value in x], [math.log(value) for value in y]
    return statistics.linear_regression(a, b).slope
