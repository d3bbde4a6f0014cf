"""Equation 19 of RoFormer (arXiv 2104.09864), written out token by token, against the library."""

from __future__ import annotations

import torch
from torch import Tensor

from linear_rope import Rotary, linear_attention


def phi(x: Tensor) -> Tensor:
    """elu(x) + 1, the feature map: non-negative."""
    return torch.where(x > 0, x + 1, x.exp())


def turn(x: Tensor, position: int) -> Tensor:
    """R_m x: the pair (x[2j], x[2j+1]) is turned by the angle position * 10000^(-2j/width)."""
    width = x.shape[-1]
    out = x.clone()
    for j in range(width // 2):
        angle = torch.tensor(position * 10000.0 ** (-2 * j / width), dtype=x.dtype)
        a, b = x[..., 2 * j], x[..., 2 * j + 1]
        out[..., 2 * j] = a * angle.cos() - b * angle.sin()
        out[..., 2 * j + 1] = a * angle.sin() + b * angle.cos()
    return out


def equation_19(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v (batch, head, time, width): the rotation is in the numerator only."""
    out = torch.zeros_like(v)
    for m in range(q.shape[2]):
        numerator, denominator = torch.zeros_like(v[:, :, 0]), torch.zeros_like(v[:, :, 0, :1])
        for n in range(m + 1):  # causal: query m sees the keys n <= m
            phi_q, phi_k = phi(q[:, :, m]), phi(k[:, :, n])
            rotated = (turn(phi_q, m) * turn(phi_k, n)).sum(-1, keepdim=True)
            numerator += rotated * v[:, :, n]
            denominator += (phi_q * phi_k).sum(-1, keepdim=True)
        out[:, :, m] = numerator / denominator
    return out


torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 32, 16, dtype=torch.float64)  # 2 rows, 4 heads, 32 tokens, width 16

by_hand = equation_19(q, k, v)
library = linear_attention(q, k, v, feature_map="elu+1", rotary=Rotary(16))

difference = (by_hand - library).abs().max().item()
print(f"largest difference between the equation and the library: {difference:.1e}")
assert difference < 1e-12
print(f"the first token sees only itself: {(library[:, :, 0] - v[:, :, 0]).abs().max():.1e}")
assert torch.allclose(library[:, :, 0], v[:, :, 0])
