"""Memory of training: linear in the length, and never a state a token."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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
            train(64, decay)  # code and libraries are loaded: the idle process
            idle = peak()
            train(int(time), decay)
            print(peak() - idle, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
)


@pytest.mark.slow
def test_memory_grows_with_the_length_and_stays_far_below_a_state_a_token() -> None:
    # B=1, H=8, 64 features, value width 64: q, k, v and their gradients alone are 50 MB at 4096;
    # a state a token would be 512 MB there, and so would the scores of quadratic attention.
    runs = [("plain", 2048), ("plain", 4096), ("plain", 8192), ("decay", 4096)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *(str(x) for run in runs for x in run)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    # Peak resident memory of a forward and backward pass over the idle process, in MB
    used = dict(zip(runs, (int(x) / 1e6 for x in done.stdout.split()), strict=True))
    assert 50 < used["plain", 4096] < 300 and 50 < used["decay", 4096] < 300, used
    for time in (4096, 8192):
        assert used["plain", time] / used["plain", time // 2] <= 2.3, used
