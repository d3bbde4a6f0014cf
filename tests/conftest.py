"""What all tests share: one thread a process, no display, and the profiles of hypothesis."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# Before torch is imported, and for the processes that tests start: with two workers on two cores,
# more threads only get in each other's way, and bit-equality of two runs needs one.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
# Compiled kernels of the tests' own, in a folder that git ignores.
os.environ.setdefault("LINEAR_ROPE_CACHE", str(Path(__file__).parent.parent / "build" / "native"))
# Plots must work by themselves where there is no screen and nobody chose a backend.
for name in ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND"):
    os.environ.pop(name, None)

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# No deadline: the first call of a compiled or parallel operation is slow on a busy machine.
_SHARED = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", _SHARED)
settings.register_profile("ci", _SHARED, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Compile the native kernels once, before the workers start; without a compiler, say so."""
    if hasattr(config, "workerinput"):
        return
    from linear_rope import build_native

    with contextlib.suppress(RuntimeError):  # `pytest_report_header` says why
        build_native()


def pytest_report_header() -> list[str]:
    """What no test of this run can reach, and why."""
    import browsers
    import forms

    missing = [f"not tested: backend {name}: {why}" for name, why in forms.REASONS.items() if why]
    if not forms.HAS_TRITON:
        missing.append("not tested: the Triton kernels: no Triton (make test-triton)")
    if not forms.HAS_FLA:
        missing.append(
            "not tested: flash-linear-attention beside its stand-in: no fla-core with Triton "
            "(make test-triton)"
        )
    if browsers.find() is None:
        missing.append(f"not tested: a study's page: {browsers.WANTED}")
    return missing


@pytest.fixture(autouse=True)
def _torch_defaults_are_kept():
    """Each test starts from the same global settings of torch, whatever the one before did."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


@pytest.fixture
def poisoned():
    """Uninitialized memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def count_calls(monkeypatch):
    """count_calls(owner, name): a list that grows by 1, or by note(*arguments), at every call."""

    def start(owner, name, note=lambda *_: 1):
        real, calls = getattr(owner, name), []

        def counted(*args, **kwargs):
            calls.append(note(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
        return calls

    return start
