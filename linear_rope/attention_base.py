"""What both attention layers share: heads, projections, positions, and what they refuse."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from linear_rope.arguments import check_key_mask
from linear_rope.rotary import can_read, resolve_positions
from linear_rope.segments import resolve_segments
from linear_rope.states import AttentionState, signature

__all__ = ["AttentionBase"]


class AttentionBase(nn.Module):
    """A multi-head layer but for the attention itself, which is the subclass's `_attend`.

    A subclass sets `state_type`, `rotary` (a `Rotation` or None), and calls `_sign` with all that
    its states depend on. Arguments as in `RotaryLinearAttention`.
    """

    state_type: Any = AttentionState
    rotary: Any

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

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        positions: int | Tensor | None = None,
        context_positions: int | Tensor | None = None,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: Any = None,
        return_state: bool = False,
    ) -> Any:  # Tensor, or (Tensor, state) with return_state
        """Attend.

        Args:
            x: (batch, time, dim).
            context: (batch, key time, dim) to attend to instead of x (causal=False only).
            key_mask: (batch, key time) bool, True at real tokens; others count nowhere.
            query_mask: (batch, time) bool, with a context only: True at real tokens of x, which
                alone count positions (without a context `key_mask` says it).
            positions, context_positions: integers, see `linear_rope.rotary.resolve_positions`.
            segment_ids, cu_seqlens: several documents in a row, see `linear_attention`.
            state: from an earlier call, to continue; return_state: also return the new one.

        Returns:
            (batch, time, dim) in the projections' dtype, and the state if asked for.
        """
        self._check(x, context, key_mask, query_mask)
        if (state is not None or return_state) and not self.causal:
            raise ValueError("a state needs causal=True: without it attention sees all at once")
        self.check_state(state, x.shape[0])
        documents = resolve_segments(
            x.shape[0], x.shape[1], segment_ids, cu_seqlens, x.device, key_mask
        )
        if context is None and query_mask is not None:
            raise ValueError("query_mask needs a context; use key_mask for self-attention")
        if context is None and context_positions is not None:
            raise ValueError("context_positions needs a context; use positions for self-attention")
        if context is not None and documents is not None:
            raise ValueError("segment_ids and cu_seqlens need self-attention, without a context")
        batch, device, axes = x.shape[0], x.device, getattr(self.rotary, "axes", 1)
        at_q = resolve_positions(
            x.shape[1],
            positions,
            start=None if state is None else state.position,
            key_mask=key_mask if context is None else query_mask,
            documents=documents,
            batch=batch,
            device=device,
            axes=axes,
        )
        at_k = None
        if context is not None:
            at_k = resolve_positions(
                context.shape[1],
                context_positions,
                key_mask=key_mask,
                batch=batch,
                device=device,
                axes=axes,
            )
        heads, after = self._attend(
            x, *self._project(x, context), at_q, at_k, key_mask, documents, state, return_state
        )
        # (batch, head, time, width) back to (batch, time, dim): the one rearrangement on the way
        # out.
        merged = self.dropout(self.out(rearrange(heads, "b h t d -> b t (h d)")))
        return (merged, after) if return_state else merged

    def _attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at_q: Tensor,
        at_k: Tensor | None,
        key_mask: Tensor | None,
        documents: Tensor | None,
        state: Any,
        return_state: bool,
    ) -> tuple[Tensor, Any]:
        """Heads (batch, head, time, value width), and the state, or None if not asked for.

        at_q, at_k: the positions; at_k is None where the keys are those of x.
        """
        raise NotImplementedError

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

    def _check(
        self,
        x: Tensor,
        context: Tensor | None,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
    ) -> None:
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
        check_key_mask(query_mask, (x.shape[0], x.shape[1]), x.device, "query_mask")

    # ---- States

    def _sign(self, *parts: object) -> None:
        """Name what the layer's states depend on; its states carry the mark of it."""
        self.origin = " ".join(", ".join(map(str, parts)).split())
        self.made_by = signature(type(self).__name__, *parts)

    def _mark(self, batch: int, device: torch.device) -> Tensor:
        return torch.full((batch,), self.made_by, dtype=torch.int64, device=device)

    def check_state(self, state: Any, batch: int) -> None:
        """Refuses a state of another kind of layer, batch, number of heads, map or rotation."""
        if state is None:
            return
        got = type(state).__name__
        fits = isinstance(state, self.state_type)
        if fits:
            got = f"one for {tuple(state[0].shape[:2])}"
        if not fits or state[0].shape[:2] != (batch, self.kv_heads):
            raise ValueError(
                f"state must be the {self.state_type.__name__} that this layer returned, for "
                f"(batch, key head) = {(batch, self.kv_heads)}, got {got}"
            )
        marks = state.made_by.tolist() if state.made_by.ndim and can_read(state.made_by) else []
        if any(mark != self.made_by for mark in marks):
            raise ValueError(
                f"state is of another feature map, rotation or denominator: its mark is {marks[0]}"
                f", that of this layer ({self.origin}) is {self.made_by}; pass a state that this "
                "layer returned, or none"
            )
