"""The float64 judge of the benchmarks: a few rows of the output and the gradients they cause.

Rows of a causal attention cost little each: row t needs the scores of one query with t + 1 keys.
The gradients that flow back from a few rows cost as little, and they are complete: a loss of rows
t_1, ..., t_R reaches every key and value before t_R. So outputs and gradients are judged at the
length that is timed, in float64, by autograd through the plain quadratic formula.

Nothing here is shared with the library or with a peer.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["JOBS", "relative_error", "rows_of", "turned"]

# What is computed. "product": o_t = sum_{n<=t} (q_t . k_n) v_n of given features. "attention": with
# the feature map elu(x) + 1, divided by the sum of the weights. "rotary": RoFormer's eq. 19, the
# rotation after the feature map and in the numerator only. "softmax" and "softmax-rotary": softmax
# attention without rotation and with it.
JOBS = ("product", "attention", "rotary", "softmax", "softmax-rotary")


def turned(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Pairs of neighboring features turned by position * base^(-2j/width), in float64."""
    pairs = x.shape[-1] // 2
    theta = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = positions.double()[:, None] * theta
    a, b = x.unflatten(-1, (pairs, 2)).unbind(-1)
    c, s = angle.cos(), angle.sin()
    return torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)


def rows_of(job: str, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Rows `rows` of the output of one head; q, k (T, D), v (T, E) in float64; (R, E)."""
    at = torch.arange(k.shape[0])
    seen = at[None, :] <= rows[:, None]
    q = q[rows]
    if job in ("attention", "rotary"):
        q, k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    below = (q @ k.T) * seen
    if job in ("rotary", "softmax-rotary"):
        q, k = turned(q, rows), turned(k, at)
    scores = q @ k.T
    if job.startswith("softmax"):
        scores = (scores / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v
    out = (scores * seen) @ v
    return out if job == "product" else out / below.sum(-1, keepdim=True)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference over the largest wanted magnitude; inf if anything is NaN."""
    if got.shape != want.shape:
        return float("inf")
    top = float(want.abs().max())
    worst = float((got.double() - want).abs().max()) / (top if top > 0 else 1.0)
    return worst if worst == worst else float("inf")
