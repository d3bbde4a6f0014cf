"""One token: the recurrent step that decodes, with nothing in its way.

The equation for a single token with a state behind it is short:

    S' = exp(g) S + (R phi(k)) v^T,   z' = exp(g) z + phi(k),   out = (R phi(q)) S' / (phi(q) . z')

and takes some thirty small operations, so that general checks and tables would cost several times
as much as the step. `linear_attention` comes here when what it was given is plain; everything else
takes the long way, and the two agree (that is tested). With backend="auto", where no
gradient is asked for and the native kernels are ready, the whole step is one call of theirs; else,
and always with backend="recurrent", it is plain torch, to be differentiated as often as one likes.

exp(g) is rounded here, by a constant g the same way at each step, so that sums of time-scale
tau = -1/g come out off by up to 2^-25 tau in float32. `linear_rope.causal.recurrent` does
not, for whole sequences.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from linear_rope.causal import native, native_steps, say_single_token
from linear_rope.causal.division import divisor
from linear_rope.elementwise import elu_plus_one
from linear_rope.feature_base import FeatureMap, log_floor
from linear_rope.feature_maps import EluPlusOne, Relu
from linear_rope.positions import can_read, has_values
from linear_rope.rotary import Rotary, rotate
from linear_rope.states import AttentionState

__all__ = [
    "NATIVE_MAPS",
    "are_mere_numbers",
    "decode_step",
    "frequencies_of",
    "is_plain_state",
    "is_plain_step",
    "is_transformed",
]


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
    """Whether these are one token, a state that fits it, and nothing that needs the long way.

    In a graph nothing is: there values cannot be looked at, and the compiler makes the long way
    short by itself.
    """
    if not (isinstance(state, AttentionState) and isinstance(phi, FeatureMap) and has_values(q)):
        return False
    shape, dtype, device = k.shape, q.dtype, q.device
    if len(shape) != 4 or q.ndim != 4 or v.shape[:-1] != shape[:-1]:
        return False
    batch, heads, time, width = shape  # of the keys
    if q.shape != (batch, q.shape[1], time, width) or not heads or q.shape[1] % heads:
        return False
    S, z, features = state.S, state.z, phi.feature_dim
    return bool(
        time == 1
        and not phi.log_space
        and phi.head_dim == width
        and dtype in (torch.float32, torch.float64)
        and k.dtype == v.dtype == dtype
        and is_plain_state(state, batch, dtype)
        and k.device == v.device == S.device == z.device == device
        and device.type in ("cpu", "cuda")
        and S.shape == (batch, heads, features, v.shape[3])
        and z.shape == (batch, heads, features)
        and (rotary is None or type(rotary) is Rotary)
        and (rotary is None or rotary.width == (features if where == "after" else width))
        and (rotary is None or not rotary.by_length)
        and (positions is None or _one_a_row(positions, batch))
        and not torch.is_autocast_enabled(device.type)
        and (log_decay is None or _is_decay(log_decay, shape, device))
    )


def is_plain_state(state: Any, batch: int, dtype: torch.dtype) -> bool:
    """Whether the state's tensors are of the types that the quick ways trust."""
    return bool(
        state.S.dtype == state.z.dtype == dtype
        and state.position.dtype == torch.int64
        and state.position.shape == (batch,)
    )


def _fits(q: Tensor, k: Tensor, v: Tensor, state: AttentionState) -> bool:
    """Whether sizes and types are those that the kernels take them for."""
    return bool(
        is_plain_state(state, q.shape[0], q.dtype)
        and q.dtype == k.dtype == v.dtype
        and state.S.shape == (*k.shape[:2], k.shape[3], v.shape[3])
        and state.z.shape == (*k.shape[:2], k.shape[3])
        and q.shape[3] == k.shape[3]
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1]
    )


def _one_a_row(positions: Any, batch: int) -> bool:
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        return False
    fits = positions.shape == (batch, 1)
    return fits and (batch == 0 or not can_read(positions) or int(positions.min()) >= 0)


def _is_decay(g: Tensor, shape: torch.Size, device: torch.device) -> bool:
    fits = isinstance(g, Tensor) and g.shape == shape[:3] and g.device == device
    return fits and not (can_read(g) and bool((g > 0).any()))


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
    theta: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, AttentionState]:
    """Output (batch, head, 1, value width) and the new state; see `is_plain_step`.

    theta: `frequencies_of(rotary, device)`, from a caller that keeps them.
    backend: "auto", or "recurrent" for plain torch.
    """
    if rotary is not None and theta is None:
        theta = frequencies_of(rotary, q.device)
    numbers = (q, k, v, state.S, state.z, state.position, log_decay, positions)
    if backend == "auto" and are_mere_numbers(*numbers):
        name = NATIVE_MAPS.get(type(phi))
        suits = (rotary is None or where == "after") and q.numel() and native.is_ready()
        if name and suits and _fits(q, k, v, state):
            eps = getattr(phi, "eps", 0.0)
            given = (state, denominator, log_decay, positions)
            say_single_token("native", "cpu")
            return _native_step(q, k, v, name, eps, rotary, theta, *given)
    if backend == "auto":
        say_single_token("recurrent", q.device.type)
    at = state.position if positions is None else positions[:, 0]
    heads = (q.shape[1], k.shape[1])
    turns = None if rotary is None or theta is None else _turns(rotary, theta, at, q.dtype)
    sure = _is_above_zero(phi)  # each feature is, so no denominator is 0

    def features(q: Tensor, k: Tensor) -> Tensor:  # (batch, all heads, 1, features)
        if type(phi) is EluPlusOne:
            return elu_plus_one(torch.cat([q, k], 1))  # one operation for two
        return torch.cat([phi(q), phi(k)], 1)  # a map may differ from head to head

    if rotary is not None and where == "before":
        q, k = _turned(torch.cat([q, k], 1), turns, rotary).split(heads, 1)
    above = below = features(q, k)
    if rotary is not None and where == "after":
        above = _turned(below, turns, rotary)
    signed = denominator == "rotated" and above is not below
    above_q, above_k = above.split(heads, 1)
    below_q, below_k = (above if signed else below).split(heads, 1)
    # The query heads of a key head are rows of one product.
    groups = (k.shape[0], k.shape[1], heads[0] // heads[1], phi.feature_dim)

    old, z = state.S, state.z
    if log_decay is not None:
        fade = log_decay.to(q.dtype).exp()
        old, z = old * fade.unsqueeze(-1), z * fade
    S = torch.addcmul(old, above_k.mT, v)
    out = above_q.reshape(groups) @ S
    if denominator == "none":
        z = torch.zeros_like(z)
    else:
        z = z + below_k.squeeze(2)
        den = below_q.reshape(groups) @ z.unsqueeze(-1)
        out = out / (den if sure and not signed else divisor(den, signed))
    out = out.reshape(*q.shape[:3], v.shape[3])
    return out, AttentionState(S, z, state.stabilizer.clone(), at + 1)


NATIVE_MAPS = {EluPlusOne: "elu+1", Relu: "relu"}


def _is_above_zero(phi: FeatureMap) -> bool:
    """Whether a product of two features cannot be 0, nor round to it: both are at least e^-30."""
    return type(phi) is EluPlusOne or (
        type(phi) is Relu and phi.eps >= math.exp(log_floor(torch.float32))
    )


def is_transformed() -> bool:
    """Whether a transform or a mode of torch sees operations before they are done."""
    return bool(
        forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
    )


def are_mere_numbers(*tensors: Tensor | None) -> bool:
    """Whether nobody follows these tensors (no derivative of any kind, no transform, no mode, no
    subclass), so that a kernel may take their addresses."""
    if is_transformed():
        return False
    follows = torch.is_grad_enabled()
    return all(
        x is None
        or (
            type(x) in (Tensor, nn.Parameter)
            and x.device.type == "cpu"
            and not (follows and x.requires_grad)
        )
        for x in tensors
    )


def _native_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: str,
    eps: float,
    rotary: Rotary | None,
    theta: Tensor | None,
    state: AttentionState,
    denominator: str,
    log_decay: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, AttentionState]:
    out, S, z, after = native_steps.step(
        q,
        k,
        v,
        state.S,
        state.z,
        state.position if positions is None else positions[:, 0],
        log_decay=None if log_decay is None else log_decay.to(q.dtype),
        theta=theta,
        multiplier=1.0 if rotary is None else rotary.multiplier,
        pairing="interleaved" if rotary is None else rotary.pairing,
        phi=phi,
        eps=eps,
        denominator=denominator,
    )
    return out, AttentionState(S, z, state.stabilizer, after)


def _turns(rotary: Rotary, theta: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """multiplier * exp(i position theta), (batch, 1, 1, pairs).

    Formed in float64 and rounded once, as `Rotary.tables` are.
    """
    angles = torch.outer(at.to(torch.float64), theta)
    turns = torch.polar(torch.full_like(angles, rotary.multiplier), angles)
    turns = turns.to(torch.complex64 if dtype == torch.float32 else torch.complex128)
    return turns[:, None, None]


@lru_cache(maxsize=256)
def frequencies_of(rotary: Rotary, device: torch.device) -> Tensor:
    """theta, (pairs,) float64. They depend on no position, length or dtype."""
    with torch.inference_mode(False), torch.no_grad():
        return rotary.frequencies(device)


def _turned(x: Tensor, turns: Tensor | None, rotary: Rotary) -> Tensor:
    assert turns is not None
    if rotary.pairing == "half" or rotary.rotated_width < rotary.width:
        return rotate(x, turns.real, turns.imag, rotary.pairing)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2))
    return torch.view_as_real(pairs * turns).view(x.shape)
