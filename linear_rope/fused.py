"""The equation by a fused form: blocks of tokens, and never the features of a whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from linear_rope.causal import FORGET, FUSED, work_dtype
from linear_rope.cosformer import CosFormer
from linear_rope.feature_base import Map
from linear_rope.feature_maps import EluPlusOne, Relu
from linear_rope.rotary import Rotary, Rotation, check_width
from linear_rope.rotary_variants import AxialRotary, LearnedRotary
from linear_rope.stabilizer import both_features
from linear_rope.states import AttentionState

__all__ = ["TABLED", "fused", "tables_of"]

# Rotations that are nothing but a table of angles (a class of one's own may do more).
TABLED = (Rotary, AxialRotary, CosFormer, LearnedRotary)


def tables_of(
    rotary: Rotation | None, at: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None] | None:
    """cos and sin for a fused form; None if it cannot serve: it trains and fades nothing."""
    if rotary is None:
        return None, None
    if type(rotary) not in TABLED:
        return None
    cos, sin = rotary.tables(at, dtype)  # type: ignore[attr-defined]
    return None if cos.requires_grad else (cos, sin)


def fused(
    phi: Map,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: Rotation | None,
    tables: tuple[Tensor | None, Tensor | None],
    wide: bool,
    *,
    denominator: str,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    fresh: Tensor | None,
    state: AttentionState | None,
    backend: str,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `linear_rope.functional` does step by step: output, S, z, stabilizer."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    if state is not None and state.S.dtype != dtype:  # a state may be wider
        dtype = torch.promote_types(dtype, state.S.dtype)
    named, eps = "none", 0.0
    scale: Tensor | float = 1.0
    top = None if state is None else state.stabilizer
    if type(phi) in (EluPlusOne, Relu) and key_mask is None:
        named, eps = ("relu", phi.eps) if isinstance(phi, Relu) else ("elu+1", 0.0)
        top = torch.zeros(k.shape[:2], dtype=dtype, device=k.device) if top is None else top.clone()
    else:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        q, k, scale, log_decay, top = both_features(
            phi, q, k, True, key_mask, log_decay, fresh, denominator, top
        )
        if key_mask is not None:
            v = v.masked_fill(~key_mask[:, None, :, None], 0.0)
    if rotary is not None:
        check_width(rotary, q)
    if work_dtype(q.dtype) != dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    cos, sin = (None if x is None else x.to(dtype) for x in tables)
    out, S, z = FUSED[backend](
        q,
        k,
        v,
        cos=cos,
        sin=sin,
        g=None if log_decay is None else log_decay.to(dtype).clamp(min=FORGET),
        fresh=fresh,
        S0=None if state is None else state.S.to(dtype),
        z0=None if state is None else state.z.to(dtype),
        phi=named,
        eps=eps,
        pairing=getattr(rotary, "pairing", "interleaved"),
        denominator=denominator,
        wide=wide,
        chunk=chunk_size or 0,
    )
    if denominator == "none" and isinstance(scale, Tensor):
        out = out * scale
    return out, S, z, top
