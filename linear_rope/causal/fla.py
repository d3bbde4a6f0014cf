"""The form that runs flash-linear-attention's CUDA kernels, between two passes of our own.

    phi(q), R phi(q), phi(k), R phi(k)                      one pass each (`around.features`)
    num_t = sum_{n<=t} exp(G_t - G_n) (R phi(q_t) . R phi(k_n)) v_n      chunk_simple_gla
    den_t = sum_{n<=t} exp(G_t - G_n)  phi(q_t) . phi(k_n)               the same, v = 1
    out_t = num_t / den_t                                   one pass (`around.divide`)

What is relied on, of fla.ops.simple_gla.chunk_simple_gla (versions 0.4 to 0.6 agree in it):

- q, k (batch, time, head, features), v (batch, time, head, width), g (batch, time, head), the
  natural logarithm of a token's decay, which scales the past before that token enters;
- scale multiplies the scores: 1 here, where its default is features^(-1/2);
- the state before the first and after the last token is (batch, head, features, width), float32;
- one number of heads for q, k and v: grouped queries get their key head repeated;
- q, k and v share a dtype, which is that of the output and, forward, of the states between chunks;
  16-bit tensors must have even widths (odd ones get a column of zeros here).

Precision. bfloat16 inputs run on bfloat16 features. float16 inputs run on float32 ones: features
reach from exp(-30) to sums above 65504, which float16 does not hold. For float32 the kernels'
products are in TF32 (11 bits, so about as float16) unless the environment variable
TRITON_F32_DEFAULT is "ieee" or "tf32x3" when they are first compiled.

Documents are told apart by a decay of `FORGET` at their first token: no synchronization with the
CPU, which the kernels' own cu_seqlens needs, and still exact, since exp(FORGET) is 0 in float32.
`chunk` has no effect: the kernels cut time into chunks of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_rope.causal.around import divide, features, once

__all__ = ["fla", "why_not"]

# exp(-110) is 0 in float32, whose smallest number is exp(-103.3), so stronger decays are the same.
# A small one keeps the sums of decays in a chunk short, and with them their rounding.
FORGET = -110.0

# Columns of ones, of which one is needed: a row of 16-bit numbers is then 16 bytes, one load.
ONES = 8


def fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    g: Tensor | None = None,
    fresh: Tensor | None = None,
    S0: Tensor | None = None,
    z0: Tensor | None = None,
    phi: str = "none",
    eps: float = 0.0,
    pairing: str = "interleaved",
    denominator: str = "none",
    wide: bool = False,
    chunk: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, S, z) of a fused form, as at the top of `linear_rope.causal.operator`.

    Differentiable once, in q, k, v, g, S0 and z0. `torch.compile` breaks its graph here, and there
    is no rule for torch.func.vmap.

    Raises:
        ValueError: tensors that are not on a GPU, float64, or flash-linear-attention missing.
    """
    product = _kernel(q)
    signed = denominator == "rotated" and cos is not None
    apart = denominator == "unrotated" and cos is not None  # other features below than above
    work = torch.promote_types(q.dtype, torch.float32)
    out_dtype = work if wide or denominator == "none" else q.dtype
    if not (q.numel() and v.numel()):
        return _nothing(q, k, v, S0, z0, out_dtype, work)

    # 1. Features below and above the line.
    narrow = torch.bfloat16 if q.dtype == torch.bfloat16 else work
    options: dict[str, Any] = {"phi": phi, "eps": eps, "pairing": pairing, "dtype": narrow}
    below_q, above_q = features(once(q), cos, sin, both=apart, **options)
    below_k, above_k = features(once(k), cos, sin, both=apart, **options)
    v = once(v).to(narrow)

    # 2. Numerator and denominator.
    decay = _decay(once(g), fresh, k, work)
    S0, z0 = once(S0), once(z0)

    def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return _product(product, q, k, v, decay, state)

    if denominator == "none":
        num, S = run(above_q, above_k, v, S0)
        return num.to(out_dtype), S, S.new_zeros(S.shape[:3])
    ones = v.new_ones(()).expand(*v.shape[:3], ONES)
    past = None if z0 is None else z0.unsqueeze(-1).expand(*z0.shape, ONES)
    if apart:
        num, S = run(above_q, above_k, v, S0)
        den, z = run(below_q, below_k, ones, past)
    else:  # the same features: columns of ones beside v
        E = v.shape[-1]
        if S0 is not None or past is not None:
            S0 = _zeros_state(k, v, work) if S0 is None else S0
            past = S0.new_zeros(*S0.shape[:3], ONES) if past is None else past
            past = torch.cat([S0, past], dim=-1)
        both, state = run(above_q, above_k, torch.cat([v, ones], dim=-1), past)
        num, den = both[..., :E], both[..., E:]
        S, z = state[..., :E], state[..., E:]

    # 3. Divide, once.
    return divide(num, den[..., 0], signed=signed, dtype=out_dtype), S, z[..., 0]


def why_not() -> str | None:
    """Why this form cannot run here, with the remedy; None if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU, which its kernels need: use backend='chunked'"
    try:
        _chunk_simple_gla()
    except ImportError as error:
        return f"flash-linear-attention is missing ({error}): pip install fla-core"
    return None


# ---- The product --------------------------------------------------------------------------------


@cache
def _chunk_simple_gla() -> Callable[..., tuple[Tensor, Tensor]]:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla  # type: ignore[no-any-return]


def _kernel(q: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """flash-linear-attention's function, or one sentence about what is missing."""
    if q.device.type != "cuda":
        raise ValueError(
            f"backend='fla' runs on CUDA GPUs and q is on {q.device}: move the inputs to a GPU, or "
            "use backend='chunked'"
        )
    if q.dtype == torch.float64:
        raise ValueError(
            "backend='fla' has no float64 kernels: use backend='chunked', or float32 inputs"
        )
    try:
        return _chunk_simple_gla()
    except ImportError as error:
        raise ValueError(
            f"backend='fla' needs flash-linear-attention ({error}): pip install fla-core, or use "
            "backend='chunked'"
        ) from error


def _product(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The causal product and its final state, (batch, head, time, width) and one a key head.

    decay (batch, time, key head).
    """
    groups, width, features = q.shape[1] // k.shape[1], v.shape[-1], k.shape[-1]
    odd_q, odd_v = (n % 2 if q.element_size() == 2 else 0 for n in (features, width))
    if odd_q:
        q, k = F.pad(q, (0, 1)), F.pad(k, (0, 1))
    if odd_v:
        v = F.pad(v, (0, 1))
    if state is not None and (odd_q or odd_v):
        state = F.pad(state, (0, odd_v, 0, odd_q))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if groups > 1:
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        decay = None if decay is None else decay.repeat_interleave(groups, 2)
        state = None if state is None else state.repeat_interleave(groups, 1)
    with torch.autocast(q.device.type, enabled=False):
        out, final = kernel(
            q=q,
            k=k,
            v=v,
            g=decay,
            scale=1.0,
            initial_state=state,
            output_final_state=True,
        )
    return out.transpose(1, 2)[..., :width], final[:, ::groups, :features, :width]


def _decay(g: Tensor | None, fresh: Tensor | None, k: Tensor, work: torch.dtype) -> Tensor | None:
    """Log decay, (batch, time, key head), that also forgets where documents begin."""
    if g is None and fresh is None:
        return None
    if g is None:
        decay = k.new_zeros(k.shape[0], k.shape[2], k.shape[1], dtype=work)
    else:
        decay = g.to(work).clamp(min=FORGET).transpose(1, 2)
    return decay if fresh is None else decay.masked_fill(fresh.unsqueeze(-1), FORGET)


def _zeros_state(k: Tensor, v: Tensor, work: torch.dtype) -> Tensor:
    """The state before the first token."""
    return k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=work)


def _nothing(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S0: Tensor | None,
    z0: Tensor | None,
    out_dtype: torch.dtype,
    work: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Without a token there is no grid to launch: the state stays, and gradients are 0."""
    link = (q.sum() + k.sum() + v.sum()).to(work) * 0
    out = link.to(out_dtype).expand(*q.shape[:3], v.shape[3])
    S = _zeros_state(k, v, work) if S0 is None else S0
    z = _zeros_state(k, v[..., :1], work)[..., 0] if z0 is None else z0
    return out, S + link, z + link
