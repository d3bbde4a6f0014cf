"""Softmax attention with rotary embedding, with the interface of the linear layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_rope.arguments import check_flags, check_softmax
from linear_rope.attention_base import AttentionBase
from linear_rope.positions import next_position, resolve_positions
from linear_rope.rotary import check_rotation
from linear_rope.scaling import Scaling
from linear_rope.states import KeyValueCache

__all__ = ["SoftmaxAttention"]


class SoftmaxAttention(AttentionBase):
    """Softmax attention with rotary embedding: the interface of `RotaryLinearAttention`, O(T^2).

        out_m = sum_n softmax_n( (R_m q_m) . (R_n k_n) / sqrt(D) ) v_n        (RoFormer, eq. 16)

    computed by `torch.nn.functional.scaled_dot_product_attention`. With ALiBi, instead of rotation,
    s_h |m - n| is taken from the score, s_h = 2^(-8h/H) for h = 1 ... H (arXiv 2108.12409, section
    3): the bias is a tensor of heads x time x keys.

    Args:
        rotate: "before" (queries and keys are rotated before the softmax kernel; "after" means the
            same here, so that one configuration serves both layers), or "none".
        alibi: a bias by distance; needs rotate="none".
        decay, local_heads: other values than these are refused: they belong to the linear layer.
        others: as in `RotaryLinearAttention`; a selective rotation turns queries and keys as a
            fixed one does, before the kernel.
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
        alibi: bool = False,
        rotary_base: float = 10000.0,
        rotary_fraction: float = 1.0,
        pairing: str = "interleaved",
        rotary_scaling: str | Scaling | None = None,
        output_norm: bool = False,
        decay: str = "none",
        short_conv: int = 0,
        token_shift: bool = False,
        output_gate: bool = False,
        local_heads: int = 0,
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
            short_conv=short_conv,
            token_shift=token_shift,
            output_gate=output_gate,
            causal=causal,
            dropout=dropout,
            bias=bias,
        )
        self.rotary = self._make_rotary(
            rotate, self.head_dim, rotary_base, rotary_fraction, pairing, rotary_scaling
        )
        if alibi and rotate != "none":
            raise ValueError(
                f"alibi=True takes the place of a rotation: use rotate='none', got {rotate!r}"
            )
        check_flags(output_norm=output_norm, alibi=alibi)
        self.output_norm, self.alibi = output_norm, alibi
        check_softmax(decay, local_heads, self.rotary)
        self._sign(self.rotary, *(("alibi",) if alibi else ()))

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
        check_rotation(
            rotary,
            rotate="before",
            causal=self.causal,
            state=state is not None or return_state,
            packed=documents is not None,
            one_clock=at_k is None,
        )
        given = at_q
        if not x.shape[1]:  # `given` is for the state, and nothing turns
            at_q = resolve_positions(0, device=x.device)
        assert isinstance(at_q, Tensor)
        at_k = at_q if at_k is None else at_k
        if rotary is not None:
            q = rotary(q, at_q) if x.shape[1] else q
            k = rotary(k, at_k) if k.shape[2] else k
        real = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        past, seen = 0, real
        if state is not None:
            past, seen = state.k.shape[2], torch.cat([state.mask, real], dim=1)
            k = torch.cat([state.k.to(k.dtype), k], dim=2)  # a state may be wider, or narrower
            v = torch.cat([state.v.to(v.dtype), v], dim=2)
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
        mask, at = allowed, at_k
        if self.alibi:
            at = at_k.expand(real.shape)
            at = at if state is None else torch.cat([state.at, at], dim=1)
            mask = self._bias(at_q, at, allowed, q.dtype)
        heads = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=self.kv_heads != self.heads,
        )
        if self.output_norm:
            heads = F.rms_norm(heads, heads.shape[-1:], eps=1e-6)
        if not return_state:
            return heads, None
        if documents is not None:  # what follows goes on with the last document
            seen = seen & (of_key == documents[:, -1:])
        after = next_position(
            at_k,
            batch=x.shape[0],
            start=None if state is None else state.position,
            key_mask=key_mask,
            documents=documents,
            given=given,
        )
        cache = KeyValueCache(k, v, seen, after, self._mark(x.shape[0], x.device))
        return heads, cache._replace(at=at) if self.alibi else cache

    def _bias(
        self, at_q: Tensor, at_k: Tensor, allowed: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """-s_h |m - n|, and -inf at keys that are not allowed: (batch or 1, head, time, keys)."""
        slopes = [2.0 ** (-8 * (h + 1) / self.heads) for h in range(self.heads)]
        # Distances are integers, however far positions are from 0.
        apart = (at_q[..., :, None] - at_k[..., None, :]).abs().unsqueeze(-3)
        if allowed is None and self.causal:  # no past and no pads: the rows have their order
            allowed = torch.ones(apart.shape[-2:], dtype=torch.bool, device=apart.device).tril()
        scores = torch.promote_types(dtype, torch.float32)
        bias = apart * -torch.tensor(slopes, dtype=scores, device=apart.device)[:, None, None]
        if allowed is not None:
            bias = bias.masked_fill(~allowed, -torch.inf)
        return bias.to(dtype)
