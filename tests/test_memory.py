"""Memory of training: linear in the length, and never a state a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forms import BACKENDS

from benchmarks._memory import STATUS, Meter
from benchmarks._problem import Case, small
from linear_rope import Rotary, linear_attention

pytestmark = pytest.mark.skipif(
    not STATUS.exists(), reason="the peak of resident memory is read from Linux's /proc"
)

# What was measured, with some room: see the log of results.
MOST = {
    ("chunked", 512): 2.8,
    ("chunked", 16384): 1.4,
    ("native", 512): 1.3,
    ("native", 16384): 1.15,
}


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    """Measures functions of this file too, each in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with Meter(threads=1) as meter:
        yield meter


def training(time: int, decay: bool) -> Callable[[], None]:
    """A task of the meter: a forward and backward pass, inputs included."""

    def call() -> None:
        q, k, v = (torch.randn(1, 8, time, 64, requires_grad=True) for _ in range(3))
        g = (-torch.rand(1, 8, time)).requires_grad_() if decay else None
        out = linear_attention(q, k, v, rotary=Rotary(64), log_decay=g)
        out.square().mean().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))

    return call


@pytest.mark.slow
def test_memory_grows_with_the_length_and_stays_far_below_a_state_a_token(meter: Meter) -> None:
    # B=1, H=8, 64 features, value width 64: q, k, v and their gradients alone are 50 MB at 4096;
    # a state a token would be 512 MB there, and so would the scores of quadratic attention.
    used = {}
    for time, decay in ((4096, False), (8192, False), (16384, False), (4096, True)):
        sizes = {"time": time, "decay": decay}
        got = meter.measure("test_memory:training", sizes, {**sizes, "time": 64}, 300.0)
        assert got.extra is not None, got.failure
        used[time, decay] = got.extra / 1e6
    assert 50 < used[4096, False] < 300 and 50 < used[4096, True] < 300, used
    for time in (8192, 16384):
        assert used[time, False] / used[time // 2, False] <= 2.3, used


@pytest.mark.slow
@pytest.mark.parametrize("form", [name for name in BACKENDS if name in ("chunked", "native")])
@pytest.mark.parametrize(
    "case", [Case(512, 4, 8, 64, 64), Case(16384, 1, 8, 64, 64)], ids=lambda case: str(case.time)
)
def test_fused_forms_need_little_more_than_their_results(
    meter: Meter, form: str, case: Case
) -> None:
    """The output and the gradients of q, k and v are 17 and 134 MB here; features are never held.

    At 512 tokens the blocks that `chunked` works on count too, some 20 MB.
    """
    who = {"contestant": f"linear_rope {form}", "native_peer": "none"}
    for job in ("product", "rotary"):
        task = {**who, "job": job, "backward": True}
        got = meter.measure(
            "benchmarks._problem:memory_task",
            {**task, "case": dataclasses.asdict(case)},
            {**task, "case": dataclasses.asdict(small(case))},
            300.0,
        )
        assert got.extra is not None, got.failure
        share = got.extra / (case.result_bytes + case.gradient_bytes)
        # All of what is returned is held at the end: less is not measured right.
        assert 0.98 < share < MOST[form, case.time], (form, job, case.time, share)
