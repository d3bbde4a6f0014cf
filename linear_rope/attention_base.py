"""What both attention layers share: heads, projections, mixing, positions, what they refuse."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from linear_rope.arguments import (
    ROTATE,
    check_choices,
    check_dropout,
    check_flags,
    check_key_mask,
    check_sizes,
    check_tensors,
)
from linear_rope.counts import check_counts
from linear_rope.local_attention import LocalHeads
from linear_rope.mixing import OutputGate, ShortConvolution, TokenShift
from linear_rope.positions import can_read, resolve_positions
from linear_rope.rotary import PAIRINGS, check_rates
from linear_rope.rotary_variants import make_rotary, parse
from linear_rope.segments import resolve_segments
from linear_rope.selective import (
    GivenRotation,
    SelectiveRotation,
    check_unturned,
    is_selective,
    make_selective,
)
from linear_rope.states import AttentionState, MixedState, signature

__all__ = ["AttentionBase"]


class AttentionBase(nn.Module):
    """A multi-head layer but for the attention itself, which is the subclass's `_attend`.

    A subclass sets `state_type`, `rotary` (a `Rotation`, a `SelectiveRotation` or None), maybe
    `local` (`LocalHeads`, the last ones), and calls `_sign` with all that its states depend on.
    Arguments as in `RotaryLinearAttention`.

    With a part that looks back beside attention (`mixed`), states are `MixedState`s of that of
    attention, and of theirs; else they are those of attention.
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
        short_conv: int,
        token_shift: bool,
        output_gate: bool,
        causal: bool,
        dropout: float,
        bias: bool,
    ) -> None:
        super().__init__()
        check_flags(
            qk_norm=qk_norm,
            token_shift=token_shift,
            output_gate=output_gate,
            causal=causal,
            bias=bias,
        )
        check_sizes(dim, heads, kv_heads, head_dim, value_dim)
        check_dropout(dropout)
        check_counts(0, short_conv=short_conv)
        head_dim = dim // heads if head_dim is None else head_dim
        value_dim = head_dim if value_dim is None else value_dim
        kv_heads = heads if kv_heads is None else kv_heads
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
        self._check_order(short_conv=short_conv, token_shift=token_shift)
        self.shift = TokenShift(dim) if token_shift else None
        self.convolution: ShortConvolution | None = None
        if short_conv:
            channels = (heads + kv_heads) * head_dim + kv_heads * value_dim
            self.convolution = ShortConvolution(channels, short_conv)
        self.output_gate = OutputGate(dim, heads * value_dim, bias) if output_gate else None
        self.local: LocalHeads | None = None
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
            positions, context_positions: integers, see `linear_rope.positions.resolve_positions`.
            segment_ids, cu_seqlens: several documents in a row, see `linear_attention`.
            state: from an earlier call, to continue; return_state: also return the new one.

        Returns:
            (batch, time, dim) in the projections' dtype, and the state if asked for.
        """
        self._check(x, context, key_mask, query_mask)
        if (state is not None or return_state) and not self.causal:
            raise ValueError("a state needs causal=True: without it attention sees all at once")
        self.check_state(state, x.shape[0])
        past = state if isinstance(state, MixedState) else MixedState(state)
        if context is not None and (segment_ids is not None or cu_seqlens is not None):
            raise ValueError("segment_ids and cu_seqlens need self-attention, without a context")
        documents = resolve_segments(
            x.shape[0], x.shape[1], segment_ids, cu_seqlens, x.device, key_mask
        )
        if context is None and query_mask is not None:
            raise ValueError("query_mask needs a context; use key_mask for self-attention")
        if context is None and context_positions is not None:
            raise ValueError("context_positions needs a context; use positions for self-attention")
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
                name="context_positions",
                key_mask=key_mask,
                batch=batch,
                device=device,
                axes=axes,
            )
        # 1. What looks back: these need causal=True, so that there is no context.
        rows: dict[str, Any] = {"key_mask": key_mask, "segment_ids": documents}
        last = shifted = turned = window = None
        if self.shift is not None:
            x, shifted = self.shift(x, state=past.shift, return_state=True, **rows)
        q, k, v, convolved = self._project(x, context, past.convolution, rows)
        rotary = self.rotary
        if isinstance(rotary, SelectiveRotation):
            cos, sin, turned = rotary(x, state=past.rotation, return_state=True, **rows)
            rotary = GivenRotation(cos, sin, rotary.pairing)
        # 2. Attention, the last heads on their own where they are local.
        near, (n, m) = None, self._far_heads()
        if self.local is not None:
            near, window = self.local(q[:, n:], k[:, m:], v[:, m:], at_q, state=past.window, **rows)
            q, k, v = q[:, :n], k[:, :m], v[:, :m]
        # Without a token a first position is all that there is to know.
        at = at_q if x.shape[1] else positions
        heads, last = self._attend(
            x, q, k, v, rotary, at, at_k, key_mask, documents, past.attention, return_state
        )
        if near is not None:
            heads = torch.cat([heads, near], dim=1)
        # 3. (batch, head, time, width) back to (batch, time, dim): the one rearrangement on the
        # way out.
        merged = rearrange(heads, "b h t d -> b t (h d)")
        if self.output_gate is not None:
            merged = self.output_gate(merged, x)
        merged = self.dropout(self.out(merged))
        if not return_state:
            return merged
        return merged, MixedState(last, shifted, convolved, turned, window) if self.mixed else last

    def _attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Any,
        at_q: int | Tensor | None,
        at_k: Tensor | None,
        key_mask: Tensor | None,
        documents: Tensor | None,
        state: Any,
        return_state: bool,
    ) -> tuple[Tensor, Any]:
        """Heads (batch, head, time, value width), and the state, or None if not asked for.

        rotary: what turns queries and keys, or None.
        at_q, at_k: the positions; at_k is None where the keys are those of x, and at_q is what the
        caller gave where x has no token.
        """
        raise NotImplementedError

    def _project(
        self, x: Tensor, context: Tensor | None, past: Tensor | None, rows: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v as (batch, head, time, width): the one rearrangement on the way in.

        And what the convolution leaves behind, if there is one; `past` is what it left before.
        """
        source = x if context is None else context
        q, k, v = self.query(x), self.key(source), self.value(source)
        after = None
        if self.convolution is not None:
            sizes = [y.shape[-1] for y in (q, k, v)]
            mixed, after = self.convolution(
                torch.cat([q, k, v], dim=-1), state=past, return_state=True, **rows
            )
            q, k, v = mixed.split(sizes, dim=-1)
        q = rearrange(q, "b t (h d) -> b h t d", h=self.heads)
        k, v = (rearrange(y, "b t (h d) -> b h t d", h=self.kv_heads) for y in (k, v))
        return *self.norm_heads(q, k), v, after

    def norm_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, divided by their root mean square a head if the layer does so."""
        if self.query_norm is not None and self.key_norm is not None:
            # The gains may be wider than the projections: autocast narrows only the latter.
            wide = self.query_norm.weight.dtype
            q = self.query_norm(q.to(wide)).to(q.dtype)
            k = self.key_norm(k.to(wide)).to(k.dtype)
        return q, k

    def _make_rotary(
        self, rotate: str, width: int, base: float, fraction: float, pairing: str, scaling: Any
    ) -> Any:
        """`make_rotary`, or a rotation that reads the layer's input; None if rotate is "none".

        Names and ranges are refused even where nothing turns.
        """
        check_choices(rotate=(rotate, ROTATE), pairing=(pairing, PAIRINGS))
        check_rates(base, fraction)
        if rotate == "none":
            check_unturned(scaling)
            return None
        heads = self._far_heads()[1]
        if isinstance(scaling, str) and parse(scaling)[0] == "permute":
            # A permutation for each key head; without an order nothing fades (as in the paper).
            own = {"heads": heads} if self.causal else {"heads": heads, "ratio": 1}
            options = {**own, **parse(scaling)[1]}
            scaling = "permute:" + ",".join(f"{name}={value}" for name, value in options.items())
        if not is_selective(scaling):
            return make_rotary(width, base, fraction, pairing, scaling)
        self._check_order(rotary_scaling=scaling)
        return make_selective(scaling, self.dim, heads, width, base, fraction, pairing)

    def _far_heads(self) -> tuple[int, int]:
        """Heads, and key heads, that are not local: the first ones."""
        if self.local is None:
            return self.heads, self.kv_heads
        return self.heads - self.local.heads, self.kv_heads - self.local.kv_heads

    def _check_order(self, **options: Any) -> None:
        for name, value in options.items():
            if value and not self.causal:
                raise ValueError(
                    f"{name}={value!r} needs causal=True: it follows the order of the tokens"
                )

    def _check(
        self,
        x: Tensor,
        context: Tensor | None,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
    ) -> None:
        weight = getattr(self.query, "weight", None)
        inputs = {"x": x} if context is None else {"x": x, "context": context}
        check_tensors(**inputs)
        for name, given in inputs.items():
            if given.ndim != 3 or given.shape[-1] != self.dim:
                raise ValueError(
                    f"{name} must have shape (batch, time, {self.dim}), got {tuple(given.shape)}"
                )
            if not isinstance(weight, Tensor):
                continue  # a quantized or wrapped projection, which says itself what it takes
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
        mixing: tuple[object, ...] = (self.shift, self.convolution, self.local)
        mixing = tuple(part for part in mixing if part is not None)
        normed = () if self.key_norm is None else ("qk_norm",)
        self.mixed = bool(mixing) or isinstance(self.rotary, SelectiveRotation)
        parts = (*parts, *normed, *mixing)
        self.origin = " ".join(", ".join(map(str, parts)).split())
        self.made_by = signature(type(self).__name__, *parts)

    def _mark(self, batch: int, device: torch.device) -> Tensor:
        return torch.full((batch,), self.made_by, dtype=torch.int64, device=device)

    def check_state(self, state: Any, batch: int) -> None:
        """Refuses a state of another kind of layer, batch, number of heads, map or rotation."""
        if state is None:
            return
        got, mixed = type(state).__name__, isinstance(state, MixedState)
        parts = state if isinstance(state, MixedState) else MixedState(state)
        state, want = parts.attention, (batch, self._far_heads()[1])
        fits = isinstance(state, self.state_type) and mixed == self.mixed
        fits = fits and self._has_parts(parts)
        if fits:
            got = f"one for {tuple(state[0].shape[:2])}"
        if not fits or state[0].shape[:2] != want:
            kind = MixedState if self.mixed else self.state_type
            raise ValueError(
                f"state must be the {kind.__name__} that this layer returned, for "
                f"(batch, key head) = {want}, got {got}"
            )
        marks = state.made_by.tolist() if state.made_by.ndim and can_read(state.made_by) else []
        if any(mark != self.made_by for mark in marks):
            raise ValueError(
                "state is of another feature map, rotation, denominator or decay: its mark is "
                f"{marks[0]}, that of this layer ({self.origin}) is {self.made_by}; pass a state "
                "that this layer returned, or none"
            )

    def _has_parts(self, state: MixedState) -> bool:
        """Whether it has a part for each of the layer's that looks back, and no other."""
        selective = self.rotary if isinstance(self.rotary, SelectiveRotation) else None
        mine = (self.shift, self.convolution, selective, self.local)
        return all((a is None) == (b is None) for a, b in zip(mine, state[1:], strict=True))
