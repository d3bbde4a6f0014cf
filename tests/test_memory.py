"""Memory of training: linear in the length, and never a state a token."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from forms import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
if not Path("/proc/self/status").exists():
    pytest.skip("the peak of resident memory is read from Linux's /proc", allow_module_level=True)

SCRIPT = textwrap.dedent(
    """
    import os, sys
    import torch
    from linear_rope import Rotary, linear_attention

    def peak():  # VmHWM, because ru_maxrss starts from the parent process's peak
        with open("/proc/self/status") as status:
            (line,) = (x for x in status if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def whole(time, backend):
        # Over the inputs: the peak of a forward and backward pass, and what it hands out
        q, k, v, cotangent = (torch.randn(1, 8, time, 64) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        idle = peak()
        out = linear_attention(*leaves, rotary=Rotary(64), backend=backend)
        out.backward(cotangent)
        return peak() - idle, sum(x.nbytes for x in (out, *(x.grad for x in leaves)))

    def train(time, decay):
        q, k, v = (torch.randn(1, 8, time, 64, requires_grad=True) for _ in range(3))
        g = (-torch.rand(1, 8, time)).requires_grad_() if decay == "decay" else None
        out = linear_attention(q, k, v, rotary=Rotary(64), log_decay=g)
        out.square().mean().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v))

    torch.set_num_threads(1)
    for decay, time in zip(sys.argv[1::2], sys.argv[2::2]):
        sys.stdout.flush()
        child = os.fork()  # a process for each run, but torch is imported once
        if child == 0:
            if decay in ("plain", "decay"):
                train(64, decay)  # code and libraries are loaded: the idle process
                idle = peak()
                train(int(time), decay)
                print(peak() - idle, flush=True)
            else:
                whole(64, decay)
                used, results = whole(int(time), decay)
                print(used / results, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
)


def measured(runs: list[tuple[str, int]]) -> dict[tuple[str, int], float]:
    """What the script prints of each run, each in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *(str(x) for run in runs for x in run)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(runs, map(float, done.stdout.split()), strict=True))


@pytest.mark.slow
def test_memory_grows_with_the_length_and_stays_far_below_a_state_a_token() -> None:
    # B=1, H=8, 64 features, value width 64: q, k, v and their gradients alone are 50 MB at 4096;
    # a state a token would be 512 MB there, and so would the scores of quadratic attention.
    runs = [("plain", 4096), ("plain", 8192), ("plain", 16384), ("decay", 4096)]
    # Peak resident memory of a forward and backward pass over the idle process, in MB
    used = {run: x / 1e6 for run, x in measured(runs).items()}
    assert 50 < used["plain", 4096] < 300 and 50 < used["decay", 4096] < 300, used
    for time in (8192, 16384):
        assert used["plain", time] / used["plain", time // 2] <= 2.3, used


@pytest.mark.slow
def test_fused_forms_need_little_more_than_their_results() -> None:
    """The output and the gradients of q, k and v are 134 MB here; features are never held."""
    forms = [name for name in BACKENDS if name in ("chunked", "native")]
    for run, ratio in measured([(form, 16384) for form in forms]).items():
        assert 0.9 < ratio < 1.4, (run, ratio)
