"""Forward and backward over 100,000 tokens on a CPU: time and memory grow with the length only.

Peak memory comes from the operating system; Windows does not tell it in either of these ways.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import torch

from linear_rope import RotaryLinearAttention

LENGTH, WIDTH, HEADS = 100_000, 64, 4


def peak() -> float:
    """The most memory this process has held so far, in MB."""
    status = Path("/proc/self/status")  # Linux, where getrusage also counts the parent's peak
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    if found:
        return int(found[1]) / 1e3
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (1e6 if sys.platform == "darwin" else 1e3)  # bytes there, kilobytes elsewhere


torch.manual_seed(0)
layer = RotaryLinearAttention(WIDTH, HEADS, output_norm=True)
x = torch.randn(1, LENGTH, WIDTH)

layer(x[:, :1000]).square().mean().backward()  # the first call loads what later ones use
idle = peak()
print(f"one layer of width {WIDTH} with {HEADS} heads, forward and backward; idle: {idle:.0f} MB")

extra = {}
for length in (LENGTH // 2, LENGTH):
    start = time.perf_counter()
    part = x[:, :length].clone().requires_grad_()
    layer(part).square().mean().backward()
    seconds, extra[length] = time.perf_counter() - start, peak() - idle
    print(f"{length:7,} tokens: {seconds:5.2f} s, peak {extra[length]:4.0f} MB above idle")
    assert part.grad is not None and part.grad.isfinite().all()
    layer.zero_grad()

scores = 4 * HEADS * LENGTH**2 / 1e9
print(f"the {LENGTH:,} x {LENGTH:,} scores of quadratic attention alone: {scores:.0f} GB")
assert extra[LENGTH] < 3 * extra[LENGTH // 2], "twice the length took far over twice the memory"
assert extra[LENGTH] < 2000
