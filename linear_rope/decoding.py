"""One token: the recurrent step that decodes, with nothing in its way.

The equation for a single token with a state behind it is short:

    S' = exp(g) S + (R phi(k)) v^T,   z' = exp(g) z + phi(k),   out = (R phi(q)) S' / (phi(q) . z')

and takes some thirty small operations, so that general checks and tables would cost several times
as much as the step. `linear_attention` comes here when what it was given is plain; everything else
takes the long way, and the two agree (that is tested).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from linear_rope.causal.division import divisor
from linear_rope.elementwise import elu_plus_one
from linear_rope.feature_base import FeatureMap
from linear_rope.feature_maps import EluPlusOne, Relu
from linear_rope.rotary import Rotary, has_values, rotate
from linear_rope.states import AttentionState

__all__ = ["decode_step", "is_plain_step"]


def is_plain_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Any,
    rotary: Any,
    where: str,
    state: Any,
    log_decay: Tensor | None,
    positions: Any,
) -> bool:
    """Whether these are one token, a state that fits it, and nothing that needs the long way."""
    if not isinstance(state, AttentionState) or not isinstance(phi, FeatureMap):
        return False
    shape, dtype, device = q.shape, q.dtype, q.device
    if len(shape) != 4 or k.shape != shape or v.shape[:-1] != shape[:-1]:
        return False
    batch, heads, time, width = shape
    S, z, features = state.S, state.z, phi.feature_dim
    return bool(
        time == 1
        and not phi.log_space
        and phi.head_dim == width
        and dtype in (torch.float32, torch.float64)
        and k.dtype == v.dtype == S.dtype == z.dtype == dtype
        and k.device == v.device == S.device == z.device == device
        and device.type in ("cpu", "cuda")
        and S.shape == (batch, heads, features, v.shape[3])
        and z.shape == (batch, heads, features)
        and (rotary is None or type(rotary) is Rotary)
        and (rotary is None or rotary.width == (features if where == "after" else width))
        and (rotary is None or not rotary.by_length)
        and (positions is None or _one_a_row(positions, batch))
        and has_values(q)
        and not torch.is_autocast_enabled(device.type)
        and (log_decay is None or _is_decay(log_decay, shape, device))
    )


def _one_a_row(positions: Any, batch: int) -> bool:
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        return False
    return positions.shape == (batch, 1) and int(positions.min()) >= 0


def _is_decay(g: Tensor, shape: torch.Size, device: torch.device) -> bool:
    return g.shape == shape[:3] and g.device == device and not bool((g > 0).any())


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: FeatureMap,
    rotary: Rotary | None,
    state: AttentionState,
    where: str,
    denominator: str,
    log_decay: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, AttentionState]:
    """Output (batch, head, 1, value width) and the new state; see `is_plain_step`."""
    at = state.position if positions is None else positions[:, 0]
    both = torch.cat([q, k])  # (2 batch, head, 1, width): one operation for two
    turns = None if rotary is None else _turns(rotary, at, q.dtype)
    if rotary is not None and where == "before":
        both = _turned(both, turns, rotary)
    sure = type(phi) in (EluPlusOne, Relu)  # no feature of theirs is 0, so no denominator is
    below = elu_plus_one(both) if type(phi) is EluPlusOne else phi(both)
    above = below
    if rotary is not None and where == "after":
        above = _turned(below, turns, rotary)
    above_q, above_k = above.chunk(2)
    signed = denominator == "rotated" and above is not below
    below_q, below_k = (above_q, above_k) if signed else below.chunk(2)

    old, z = state.S, state.z
    if log_decay is not None:
        fade = log_decay.to(q.dtype).exp()
        old, z = old * fade.unsqueeze(-1), z * fade
    S = torch.addcmul(old, above_k.mT, v)
    out = above_q @ S
    if denominator == "none":
        z = torch.zeros_like(z)
    else:
        z = z + below_k.squeeze(2)
        den = below_q @ z.unsqueeze(-1)
        out = out / (den if sure and not signed else divisor(den, signed))
    return out, AttentionState(S, z, state.stabilizer.clone(), at + 1)


def _turns(rotary: Rotary, at: Tensor, dtype: torch.dtype) -> Tensor:
    """multiplier * exp(i position theta), (2 batch, 1, 1, pairs): for the queries, then the keys.

    Formed in float64 and rounded once, as `Rotary.tables` are.
    """
    theta, size = _frequencies(rotary, at.device)
    turns = torch.polar(size, torch.outer(at.to(torch.float64), theta))
    turns = turns.to(torch.complex64 if dtype == torch.float32 else torch.complex128)
    return (turns if len(turns) == 1 else turns.repeat(2, 1))[:, None, None]


@lru_cache(maxsize=256)
def _frequencies(rotary: Rotary, device: torch.device) -> tuple[Tensor, Tensor]:
    """theta and the multiplier, (pairs,) float64. They depend on no position, length or dtype."""
    with torch.inference_mode(False), torch.no_grad():
        theta = rotary.frequencies(device)
        return theta, torch.full_like(theta, rotary.multiplier)


def _turned(x: Tensor, turns: Tensor | None, rotary: Rotary) -> Tensor:
    assert turns is not None
    if rotary.pairing == "half" or rotary.rotated_width < rotary.width:
        return rotate(x, turns.real, turns.imag, rotary.pairing)
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).view(x.shape)
