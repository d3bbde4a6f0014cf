"""Whole layers with all that looks back beside attention, by loops and sums over all pairs."""

from __future__ import annotations

from typing import Any

import judge
import torch
import torch.nn.functional as F
from torch import Tensor

from linear_rope import SoftmaxAttention
from linear_rope.decays import LearnedDecay
from linear_rope.selective import SelectiveRotation

__all__ = ["look_back", "selective_angles", "turned", "written_out"]


def turned(x: Tensor, angles: Tensor, pairing: Any) -> Tensor:
    """Each pair of x (..., width) as a complex number, times e^(i angle)."""
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if pairing == "interleaved" else x.split(half, -1)
    y = torch.complex(a, b) * torch.exp(1j * angles)
    if pairing == "half":
        return torch.cat([y.real, y.imag], -1)
    return torch.stack([y.real, y.imag], -1).flatten(-2)


def look_back(x: Tensor, weights: list[Tensor]) -> Tensor:
    """sum_j weights[j] x_{t-j}, token by token."""
    rows = []
    for t in range(x.shape[1]):
        near = range(min(t + 1, len(weights)))
        rows.append(torch.stack([weights[j] * x[:, t - j] for j in near]).sum(0))
    return torch.stack(rows, 1)


def selective_angles(rotation: SelectiveRotation, x: Tensor) -> Tensor:
    """(batch, head, time, pairs), by the equations at `SelectiveRotation`."""
    slices = x.unflatten(-1, (rotation.heads, -1))
    slices = slices / (slices.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    if rotation.full is not None:
        assert rotation.scale is not None
        columns = rotation.full / rotation.full.norm(dim=1, keepdim=True)
        columns = columns * rotation.scale[:, None, None]
        steps = torch.stack(
            [slices[:, :, h] @ columns[h] for h in range(rotation.heads)], 2
        ).flatten(2)
    else:
        assert rotation.down is not None and rotation.up is not None
        steps = slices.flatten(2) @ rotation.down.T @ rotation.up.T
    taps = rotation.convolution.weight
    steps = look_back(steps, [taps[:, -1 - j] for j in range(taps.shape[1])])
    steps = steps.unflatten(-1, (rotation.heads, -1))
    if rotation.beta is not None:
        steps = steps + rotation.beta.exp()
    if rotation.gate_up is not None:
        inner = slices.flatten(2)
        if rotation.gate_down is not None:
            inner = inner @ rotation.gate_down.T
        gate = (inner @ rotation.gate_up.T + rotation.gate_bias).sigmoid()
        steps = steps * gate.unflatten(-1, (rotation.heads, -1))
    rates = rotation.theta ** (-torch.arange(rotation.pairs).double() / rotation.pairs)
    return (steps * rates).cumsum(1).transpose(1, 2)


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def softmax_heads(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """As many key heads as heads."""
    time = torch.arange(q.shape[2])
    behind = time[:, None] - time
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill((behind < 0) | (behind >= window), -1e300)
    return scores.softmax(-1) @ v


def linear_heads(layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
    """Eq. 19 with decay over all pairs; q, k, v and angles with as many key heads as heads."""
    after = layer.rotate == "after"
    if layer.rotate == "before":
        q, k = (turned(y, angles, layer.pairing_by_hand) for y in (q, k))
    below_q, below_k = judge.phi("elu+1", q), judge.phi("elu+1", k)
    above_q, above_k = below_q, below_k
    if after:
        above_q, above_k = (turned(y, angles, layer.pairing_by_hand) for y in (below_q, below_k))
    left = torch.ones(q.shape[2], q.shape[2], dtype=torch.float64).tril()
    if layer.gate is not None:
        g = torch.tensor([1 - 2.0**-e for e in (2, 5)], dtype=torch.float64).log()
        g = g[None, :, None].expand(x.shape[0], 2, x.shape[1])
        if isinstance(layer.gate, LearnedDecay):
            g = F.logsigmoid(x @ layer.gate.weight.T + layer.gate.bias).mT
        left = judge.left_over(g, x[:, None])[..., 1:]
        left = left.repeat_interleave(q.shape[1] // left.shape[1], 1)
    out = ((above_q @ above_k.mT) * left) @ v
    if layer.denominator == "none":
        return out
    return out / ((below_q @ below_k.mT) * left).sum(-1, keepdim=True)


def written_out(layer: Any, x: Tensor) -> Tensor:
    """The layer's output for whole sequences without padding, by loops and sums over all pairs."""
    if layer.shift is not None:
        x = look_back(x, [1 - layer.shift.mu, layer.shift.mu])
    y = [layer.query(x), layer.key(x), layer.value(x)]
    if layer.convolution is not None:
        taps = layer.convolution.weight
        sizes = [part.shape[-1] for part in y]
        y = list(look_back(torch.cat(y, -1), list(taps.flip(1).unbind(1))).split(sizes, -1))
    groups = layer.heads // layer.kv_heads
    q, k, v = (
        heads_of(part, n)
        for part, n in zip(y, (layer.heads, layer.kv_heads, layer.kv_heads), strict=True)
    )
    if layer.query_norm is not None:
        q, k = (
            part * (part.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
            for part, norm in ((q, layer.query_norm), (k, layer.key_norm))
        )
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    near = 0 if layer.local is None else layer.local.heads
    far = layer.heads - near
    at, width = torch.arange(x.shape[1]), layer.head_dim
    fixed = at[:, None] * 10000.0 ** (-torch.arange(width // 2).double() * 2 / width)
    angles = fixed
    if isinstance(layer.rotary, SelectiveRotation):
        angles = selective_angles(layer.rotary, x).repeat_interleave(groups, 1)
    if isinstance(layer, SoftmaxAttention):
        q, k = (turned(part, angles, layer.pairing_by_hand) for part in (q, k))
        out = softmax_heads(q, k, v, x.shape[1])
    else:
        out = linear_heads(layer, x, q[:, :far], k[:, :far], v[:, :far], angles)
        if near:
            q, k, v = q[:, far:], k[:, far:], v[:, far:]
            if layer.local.rotary is not None:
                q, k = (turned(part, fixed, layer.pairing_by_hand) for part in (q, k))
            out = torch.cat([out, softmax_heads(q, k, v, layer.local.window)], 1)
    if layer.output_norm:
        out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    merged = out.transpose(1, 2).flatten(2)
    if layer.output_gate is not None:
        gate = x @ layer.output_gate.weight.T
        merged = merged * gate * gate.sigmoid()
    return layer.out(merged)
