"""Attention layers: projections, heads, and the way in and out of `functional.linear_attention`.

`RotaryLinearAttention` is the layer this library is about; `SoftmaxAttention` has the same
interface and is the ceiling that comparisons need.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from linear_rope.arguments import DENOMINATORS, ROTATE, check_key_mask
from linear_rope.causal import BACKENDS
from linear_rope.feature_maps import FeatureMap, full_precision, make_feature_map
from linear_rope.functional import linear_attention
from linear_rope.rotary import check_rotation, next_position, resolve_positions
from linear_rope.rotary_variants import make_rotary
from linear_rope.scaling import Scaling
from linear_rope.segments import resolve_segments
from linear_rope.states import AttentionState, KeyValueCache
from linear_rope.xpos import XPos

__all__ = ["DECAYS", "RotaryLinearAttention", "SoftmaxAttention"]

DECAYS = ("none", "learned")

# sigmoid(3) = 0.953: at the start a head looks back some 20 tokens, and learns from there.
GATE_BIAS = 3.0


class _Attention(nn.Module):
    """What both layers share: heads, projections, positions."""

    state_type: Any = AttentionState
    rotary: Any  # a `Rotation`, or None

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None,
        head_dim: int | None,
        value_dim: int | None,
        qk_norm: bool,
        causal: bool,
        dropout: float,
        bias: bool,
    ) -> None:
        super().__init__()
        if dim < 1 or heads < 1:
            raise ValueError(f"dim={dim} and heads={heads} must both be at least 1")
        if head_dim is None:
            if dim % heads:
                raise ValueError(
                    f"heads={heads} does not divide dim={dim}; choose a divisor or give head_dim"
                )
            head_dim = dim // heads
        value_dim = head_dim if value_dim is None else value_dim
        if head_dim < 1 or value_dim < 1:
            raise ValueError(
                f"head_dim={head_dim} and value_dim={value_dim} must both be at least 1"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"kv_heads={kv_heads} does not divide heads={heads}; choose a divisor (1 is "
                "multi-query attention)"
            )
        self.dim, self.heads, self.kv_heads, self.causal = dim, heads, kv_heads, causal
        self.head_dim, self.value_dim = head_dim, value_dim
        self.query = nn.Linear(dim, heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, kv_heads * value_dim, bias=bias)
        self.query_norm: nn.RMSNorm | None = None
        self.key_norm: nn.RMSNorm | None = None
        if qk_norm:
            self.query_norm = nn.RMSNorm(head_dim, eps=1e-6)
            self.key_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.out = nn.Linear(heads * value_dim, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def check_state(self, state: Any, batch: int) -> None:
        """Refuses a state of another kind of layer, batch or number of heads."""
        if state is None:
            return
        got = type(state).__name__
        if isinstance(state, self.state_type):
            got = f"one for {tuple(state[0].shape[:2])}"
            if state[0].shape[:2] == (batch, self.kv_heads):
                return
        raise ValueError(
            f"state must be the {self.state_type.__name__} that this layer returned, for "
            f"(batch, key head) = {(batch, self.kv_heads)}, got {got}"
        )

    def _check(self, x: Tensor, context: Tensor | None, key_mask: Tensor | None) -> None:
        weight = self.query.weight
        for name, given in (("x", x), ("context", context)):
            if given is None:
                continue
            if given.ndim != 3 or given.shape[-1] != self.dim:
                raise ValueError(
                    f"{name} must have shape (batch, time, {self.dim}), got {tuple(given.shape)}"
                )
            if given.device != weight.device:
                raise ValueError(
                    f"{name} is on {given.device} but the layer is on {weight.device}; "
                    "move one with .to()"
                )
            mixed = given.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type)
            if not given.is_floating_point() or (mixed and weight.is_floating_point()):
                raise ValueError(
                    f"{name} is {given.dtype} but the layer is {weight.dtype}; convert one with "
                    ".to(), or use torch.autocast"
                )
        source = x if context is None else context
        if context is not None and self.causal:
            raise ValueError("a context needs causal=False: cross-attention has no common order")
        if source.shape[0] != x.shape[0]:
            raise ValueError(f"context has {source.shape[0]} rows but x has {x.shape[0]}")
        check_key_mask(key_mask, (source.shape[0], source.shape[1]), x.device)

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (batch, head, time, width): the one rearrangement on the way in."""
        source = x if context is None else context
        q, k, v = self.query(x), self.key(source), self.value(source)
        q = rearrange(q, "b t (h d) -> b h t d", h=self.heads)
        k, v = (rearrange(y, "b t (h d) -> b h t d", h=self.kv_heads) for y in (k, v))
        if self.query_norm is not None and self.key_norm is not None:
            # The gains may be wider than the projections: autocast narrows only the latter.
            wide = self.query_norm.weight.dtype
            q = self.query_norm(q.to(wide)).to(q.dtype)
            k = self.key_norm(k.to(wide)).to(k.dtype)
        return q, k, v

    def _merge(self, heads: Tensor) -> Tensor:
        """(batch, head, time, width) back to (batch, time, dim): the one on the way out."""
        return self.dropout(self.out(rearrange(heads, "b h t d -> b t (h d)")))

    def _positions(
        self,
        x: Tensor,
        context: Tensor | None,
        positions: int | Tensor | None,
        context_positions: int | Tensor | None,
        key_mask: Tensor | None,
        start: Tensor | None,
        documents: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if context is not None and documents is not None:
            raise ValueError("segment_ids and cu_seqlens need self-attention, without a context")
        if context is None and context_positions is not None:
            raise ValueError("context_positions needs a context; use positions for self-attention")
        at_q = resolve_positions(
            x.shape[1],
            positions,
            start=start,
            key_mask=key_mask if context is None else None,
            documents=documents,
            batch=x.shape[0],
            device=x.device,
            axes=getattr(self.rotary, "axes", 1),
        )
        if context is None:
            return at_q, at_q
        at_k = resolve_positions(
            context.shape[1],
            context_positions,
            key_mask=key_mask,
            batch=x.shape[0],
            device=x.device,
            axes=getattr(self.rotary, "axes", 1),
        )
        return at_q, at_k


class RotaryLinearAttention(_Attention):
    """Multi-head linear attention with rotation after (or before) the feature map.

    x (batch, time, dim) -> q, k, v a head -> `linear_attention` (eq. 19) -> merged heads -> output
    projection.

    Args:
        dim, heads: model width and number of heads.
        kv_heads: heads of keys and values, a divisor of `heads` (grouped-query attention, arXiv
            2305.13245; 1 is multi-query); default as many. The state has one entry a key head.
        head_dim, value_dim: widths a head of queries/keys and of values; default dim / heads.
        qk_norm: divide queries and keys by their root mean square a head, with a learned gain
            (arXiv 2302.05442, section 2 with RMSNorm), before rotation and feature map.
        feature_map: a name in `FEATURE_MAPS` or a `FeatureMap` made for `head_dim`.
        features: number of features of a random map (even when they are rotated).
        redraw_interval: optimizer steps between redraws of a random map, see `RandomFeatures`.
        rotate: "after" the feature map (eq. 19), "before" it, or "none".
        rotary_base, rotary_fraction, pairing: see `Rotary`.
        rotary_scaling: a rule for longer sequences or another rotation, by name with its options
            ("yarn:factor=4,original_length=2048", "xpos", "axial", "learned"), see `make_rotary`.
        denominator, output_norm, backend, chunk_size: see `linear_attention`.
        decay: "none", or "learned": log_decay = logsigmoid(w x + b) a key head and token, b = 3 at
            the start (causal only). Gated as in arXiv 2312.06635, by a scalar for a vector.
        causal: token m sees n <= m (a state can be carried), or all tokens (an encoder).
        dropout: after the output projection. bias: in the projections.

    Raises:
        ValueError: at construction for sizes and names that do not fit.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        qk_norm: bool = False,
        feature_map: str | FeatureMap = "elu+1",
        features: int | None = None,
        redraw_interval: int | None = None,
        rotate: str = "after",
        rotary_base: float = 10000.0,
        rotary_fraction: float = 1.0,
        pairing: str = "interleaved",
        rotary_scaling: str | Scaling | None = None,
        denominator: str = "unrotated",
        output_norm: bool = False,
        decay: str = "none",
        causal: bool = True,
        dropout: float = 0.0,
        bias: bool = False,
        backend: str = "auto",
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(
            dim,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            qk_norm=qk_norm,
            causal=causal,
            dropout=dropout,
            bias=bias,
        )
        for name, choice, known in (
            ("rotate", rotate, ROTATE),
            ("denominator", denominator, DENOMINATORS),
            ("decay", decay, DECAYS),
            ("backend", backend, ("auto", *BACKENDS)),
        ):
            if choice not in known:
                raise ValueError(f"{name}={choice!r} is unknown; choose one of: {', '.join(known)}")
        if decay != "none" and not causal:
            raise ValueError(f"decay={decay!r} needs causal=True: without an order nothing decays")
        self.rotate, self.denominator, self.output_norm = rotate, denominator, output_norm
        self.backend, self.chunk_size = backend, chunk_size
        options: dict[str, object] = {"features": features, "redraw_interval": redraw_interval}
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(feature_map, str):
            feature_map = make_feature_map(feature_map, self.head_dim, **given)
        elif not isinstance(feature_map, FeatureMap) or feature_map.head_dim != self.head_dim:
            raise ValueError(
                f"feature_map must be a name or a FeatureMap made for heads of width "
                f"{self.head_dim}, got {feature_map!r}"
            )
        elif given:
            raise ValueError(
                f"{' and '.join(given)} must be given to the feature map itself, which was made "
                "already; or give its name"
            )
        self.feature_map = feature_map
        self.rotary = None
        if rotate != "none":
            width = feature_map.feature_dim if rotate == "after" else self.head_dim
            self.rotary = make_rotary(width, rotary_base, rotary_fraction, pairing, rotary_scaling)
            check_rotation(
                self.rotary, rotate=rotate, causal=causal, state=False, packed=False, one_clock=True
            )
        self.gate = nn.Linear(dim, self.kv_heads) if decay == "learned" else None
        if self.gate is not None:
            nn.init.constant_(self.gate.bias, GATE_BIAS)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        positions: int | Tensor | None = None,
        context_positions: int | Tensor | None = None,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: AttentionState | None = None,
        return_state: bool = False,
    ) -> Any:  # Tensor, or (Tensor, AttentionState) with return_state
        """Attend.

        Args:
            x: (batch, time, dim).
            context: (batch, key time, dim) to attend to instead of x (causal=False only).
            key_mask: (batch, key time) bool, True at real tokens.
            positions, context_positions: integers, see `linear_rope.rotary.resolve_positions`.
            segment_ids, cu_seqlens: several documents in a row, see `linear_attention`.
            state: from an earlier call, to continue; return_state: also return the new one.

        Returns:
            (batch, time, dim) in the projections' dtype, and the `AttentionState` if asked for.
        """
        self._check(x, context, key_mask)
        self.check_state(state, x.shape[0])
        q, k, v = self._project(x, context)
        start = None if state is None else state.position
        documents = resolve_segments(x.shape[0], x.shape[1], segment_ids, cu_seqlens, x.device)
        at_q, at_k = self._positions(
            x, context, positions, context_positions, key_mask, start, documents
        )
        gate = None
        if self.gate is not None:
            gate = rearrange(F.logsigmoid(full_precision(self.gate(x))), "b t h -> b h t")
        result = linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            rotary=self.rotary,
            rotate=self.rotate,
            denominator=self.denominator,
            causal=self.causal,
            key_mask=key_mask,
            log_decay=gate,
            positions=at_q,
            key_positions=None if context is None else at_k,
            segment_ids=documents,
            output_norm=self.output_norm,
            state=state,
            return_state=return_state,
            backend=self.backend,
            chunk_size=self.chunk_size,
        )
        if return_state:
            return self._merge(result[0]), result[1]
        return self._merge(result)


class SoftmaxAttention(_Attention):
    """Softmax attention with rotary embedding: the interface of `RotaryLinearAttention`, O(T^2).

        out_m = sum_n softmax_n( (R_m q_m) . (R_n k_n) / sqrt(D) ) v_n        (RoFormer, eq. 16)

    computed by `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        rotate: "before" (queries and keys are rotated before the softmax kernel; "after" means the
            same here, so that one configuration serves both layers), or "none".
        others: as in `RotaryLinearAttention`.
    """

    state_type = KeyValueCache

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        qk_norm: bool = False,
        rotate: str = "before",
        rotary_base: float = 10000.0,
        rotary_fraction: float = 1.0,
        pairing: str = "interleaved",
        rotary_scaling: str | Scaling | None = None,
        output_norm: bool = False,
        causal: bool = True,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(
            dim,
            heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            qk_norm=qk_norm,
            causal=causal,
            dropout=dropout,
            bias=bias,
        )
        if rotate not in ROTATE:
            raise ValueError(f"rotate={rotate!r} is unknown; choose one of: {', '.join(ROTATE)}")
        self.output_norm = output_norm
        self.rotary = None
        if rotate != "none":
            self.rotary = make_rotary(
                self.head_dim, rotary_base, rotary_fraction, pairing, rotary_scaling
            )
            if isinstance(self.rotary, XPos):
                raise ValueError(
                    "rotary_scaling='xpos' needs linear attention: a cache of rotated keys does "
                    "not fade"
                )

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        positions: int | Tensor | None = None,
        context_positions: int | Tensor | None = None,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: KeyValueCache | None = None,
        return_state: bool = False,
    ) -> Any:  # Tensor, or (Tensor, KeyValueCache) with return_state
        """Attend; arguments as in `RotaryLinearAttention.forward`."""
        if (state is not None or return_state) and not self.causal:
            raise ValueError("a state needs causal=True")
        self._check(x, context, key_mask)
        self.check_state(state, x.shape[0])
        q, k, v = self._project(x, context)
        start = None if state is None else state.position
        documents = resolve_segments(x.shape[0], x.shape[1], segment_ids, cu_seqlens, x.device)
        check_rotation(
            self.rotary,
            rotate="before",
            causal=self.causal,
            state=state is not None or return_state,
            packed=documents is not None,
            one_clock=context is None,
        )
        at_q, at_k = self._positions(
            x, context, positions, context_positions, key_mask, start, documents
        )
        if self.rotary is not None:
            q, k = self.rotary(q, at_q), self.rotary(k, at_k)
        real = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        past, seen = 0, real
        if state is not None:
            past, seen = state.k.shape[2], torch.cat([state.mask, real], dim=1)
            k, v = torch.cat([state.k, k], dim=2), torch.cat([state.v, v], dim=2)
        # Without padding, past or documents the causal order is all there is to say.
        plain = key_mask is None and state is None and documents is None
        allowed = None
        if not plain:
            allowed = seen[:, None, None, :]
            if self.causal:
                order = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool, device=x.device)
                allowed = allowed & order.tril(past)
            if documents is not None:  # the past belongs to the first document
                of_key = torch.cat([documents[:, :1].expand(-1, past), documents], dim=1)
                allowed = allowed & (documents[:, None, :, None] == of_key[:, None, None, :])
        heads = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=allowed,
            is_causal=self.causal and plain,
            enable_gqa=self.kv_heads != self.heads,
        )
        if self.output_norm:
            heads = F.rms_norm(heads, heads.shape[-1:], eps=1e-6)
        merged = self._merge(heads)
        if not return_state:
            return merged
        if documents is not None:  # what follows goes on with the last document
            seen = seen & (of_key == documents[:, -1:])
        after = next_position(
            at_k, batch=x.shape[0], start=start, key_mask=key_mask, documents=documents
        )
        return merged, KeyValueCache(k, v, seen, after)
