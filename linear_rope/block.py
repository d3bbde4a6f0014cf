"""One layer of a model: attention and a feed-forward layer, each behind a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope.attention import RotaryLinearAttention, SoftmaxAttention
from linear_rope.config import ROTATING, Config

__all__ = ["Block", "feed_forward", "make_norm"]

Map = Callable[[Tensor], Tensor]


def make_norm(config: Config) -> nn.Module:
    """The norm of a block's kind: LayerNorm, or RMSNorm (arXiv 1910.07467)."""
    if config.block == "llama":
        return nn.RMSNorm(config.dim, eps=1e-6)
    return nn.LayerNorm(config.dim, bias=config.bias)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)).

    block="gpt" is the pre-norm block of GPT-2, with LayerNorm and down(gelu(up(x))); "llama" that
    of LLaMA (arXiv 2302.13971, section 2.2), with RMSNorm and down(silu(mlp_gate(x)) * up(x)).
    """

    def __init__(self, config: Config, *, causal: bool = True) -> None:
        super().__init__()
        c = config
        rotate = c.rotate if c.position in ROTATING else "none"
        shared: dict[str, Any] = {
            "rotate": rotate,
            "rotary_base": c.rotary_base,
            "rotary_fraction": c.rotary_fraction,
            "rotary_scaling": c.rotation,
            "pairing": c.pairing,
            "kv_heads": c.kv_heads,
            "qk_norm": c.qk_norm,
            "output_norm": c.output_norm,
            "short_conv": c.short_conv,
            "token_shift": c.token_shift,
            "output_gate": c.output_gate,
            "causal": causal,
            "dropout": c.dropout,
            "bias": c.bias,
        }
        self.attention: nn.Module
        if c.attention == "softmax":
            self.attention = SoftmaxAttention(c.dim, c.heads, alibi=c.position == "alibi", **shared)
        else:
            self.attention = RotaryLinearAttention(
                c.dim,
                c.heads,
                feature_map=c.feature_map,
                features=c.features,
                redraw_interval=c.redraw_interval,
                denominator=c.denominator,
                decay=c.decay,
                local_heads=c.local_heads,
                window=c.window,
                backend=c.backend,
                chunk_size=c.chunk_size,
                **shared,
            )
        self.attention_norm, self.mlp_norm = make_norm(c), make_norm(c)
        self.up = nn.Linear(c.dim, c.hidden, bias=c.bias)
        self.down = nn.Linear(c.hidden, c.dim, bias=c.bias)
        self.mlp_gate = nn.Linear(c.dim, c.hidden, bias=False) if c.block == "llama" else None
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        positions: int | Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: Any = None,
        return_state: bool = False,
    ) -> Any:
        """(batch, time, dim) -> the same, and the layer's new state if asked for."""
        attended = self.attention(
            self.attention_norm(x),
            key_mask=key_mask,
            positions=positions,
            segment_ids=segment_ids,
            state=state,
            return_state=return_state,
        )
        after = None
        if return_state:
            attended, after = attended
        x = self.feed_forward(x + attended)
        return (x, after) if return_state else x

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half of the layer: x + feed-forward(norm(x))."""
        inner = feed_forward(x, self.mlp_norm, self.up, self.down, self.mlp_gate)
        return x + self.dropout(inner)


def feed_forward(x: Tensor, norm: Map, up: Map, down: Map, gate: Map | None) -> Tensor:
    """The feed-forward layer itself: GPT's, or with a gate LLaMA's."""
    normed = norm(x)
    inner = F.gelu(up(normed)) if gate is None else F.silu(gate(normed)) * up(normed)
    return down(inner)
