"""The layer this library is about: projections and heads around `functional.linear_attention`.

`linear_rope.softmax` has softmax attention with the same interface, the ceiling that comparisons
need.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linear_rope.arguments import (
    DENOMINATORS,
    ROTATE,
    check_choices,
    check_cosformer,
    check_expansion,
    check_flags,
    check_local,
    check_one_axis,
)
from linear_rope.attention_base import AttentionBase
from linear_rope.causal import BACKENDS, check_chunk_size
from linear_rope.decays import make_decay
from linear_rope.feature_maps import FEATURE_MAPS, FeatureMap, make_feature_map
from linear_rope.functional import linear_attention
from linear_rope.local_attention import LocalHeads
from linear_rope.rotary import Rotary, check_rotation
from linear_rope.scaling import Scaling
from linear_rope.softmax import SoftmaxAttention

__all__ = ["RotaryLinearAttention", "SoftmaxAttention"]


class RotaryLinearAttention(AttentionBase):
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
        feature_map: a name in `FEATURE_MAPS` or a `FeatureMap` made for `head_dim`. By its name
            `hedgehog` has a learned map for every key head, as in its paper.
        features: number of features of a random map (even when they are rotated).
        redraw_interval: optimizer steps between redraws of a random map, see `RandomFeatures`.
        rotate: "after" the feature map (eq. 19), "before" it, or "none".
        rotary_base, rotary_fraction, pairing: see `Rotary`.
        rotary_scaling: a rule for longer sequences or another rotation, by name with its options
            ("yarn:factor=4,original_length=2048", "xpos", "axial", "learned",
            "cosformer:max_length=512", "permute"), see `make_rotary`; or "selective"
            ("selective:gate=head"), angles that each token adds to, whatever its position (causal
            only), see `make_selective`.
        denominator, output_norm, backend, chunk_size: see `linear_attention`.
        decay: "none"; "fixed", a constant a head, or RetNet's own, "retnet"; or "learned",
            log_decay = logsigmoid(w x + b) a key head and token, heads starting at time-scales of
            4 to 4096 tokens ("learned:bias=3": all at b = 3). Causal only; options: see
            `make_decay`.
        short_conv: tokens that a causal convolution over q, k and v sees, 0 for none (causal only),
            see `ShortConvolution`.
        token_shift: whether each channel of x mixes with that of the token before (causal only),
            see `TokenShift`.
        output_gate: whether the heads are multiplied by silu(W x) before the output projection, see
            `OutputGate`.
        local_heads, window: how many of the heads, the last ones, are softmax attention to the last
            `window` tokens instead (causal only), see `LocalHeads`. With RoPE, unless rotate is
            "none".
        causal: token m sees n <= m (a state can be carried), or all tokens (an encoder).
        dropout: after the output projection. bias: in the projections.

    Raises:
        ValueError: at construction for sizes and names that do not fit.
    """

    # What computes the attention of projected heads; `linear_rope.parallel` puts its own here.
    attend = staticmethod(linear_attention)

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
        short_conv: int = 0,
        token_shift: bool = False,
        output_gate: bool = False,
        local_heads: int = 0,
        window: int = 64,
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
            short_conv=short_conv,
            token_shift=token_shift,
            output_gate=output_gate,
            causal=causal,
            dropout=dropout,
            bias=bias,
        )
        check_choices(
            rotate=(rotate, ROTATE),
            denominator=(denominator, DENOMINATORS),
            backend=(backend, ("auto", *BACKENDS)),
        )
        check_flags(output_norm=output_norm)
        self.rotate, self.denominator, self.output_norm = rotate, denominator, output_norm
        check_local(local_heads, window, heads, kv_heads)
        check_chunk_size(chunk_size)
        self._check_order(local_heads=local_heads)
        if local_heads:
            turn = None
            if rotate != "none":
                turn = Rotary(self.head_dim, rotary_base, rotary_fraction, pairing)
            near = local_heads * self.kv_heads // heads
            self.local = LocalHeads(local_heads, near, window, rotary=turn, output_norm=output_norm)
        kv_heads = self._far_heads()[1]
        self.backend, self.chunk_size = backend, chunk_size
        options: dict[str, object] = {"features": features, "redraw_interval": redraw_interval}
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(feature_map, str):
            if getattr(FEATURE_MAPS.get(feature_map), "per_head", False):
                given["heads"] = kv_heads
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
        width = feature_map.feature_dim if rotate == "after" else self.head_dim
        self.rotary = self._make_rotary(
            rotate, width, rotary_base, rotary_fraction, pairing, rotary_scaling
        )
        if self.rotary is not None:
            check_expansion(feature_map, self.rotary, rotate)
            check_cosformer(feature_map, self.rotary, rotate)
            check_rotation(
                self.rotary, rotate=rotate, causal=causal, state=False, packed=False, one_clock=True
            )
        check_one_axis(local_heads, self.rotary)
        self.gate = make_decay(decay, dim, kv_heads)
        if self.gate is not None and not causal:
            raise ValueError(f"decay={decay!r} needs causal=True: without an order nothing decays")
        own = f"rotate={rotate}", f"denominator={denominator}", f"decay={self.gate}"
        self._sign(feature_map, self.rotary, *own)

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
        result = self.attend(
            q,
            k,
            v,
            feature_map=self.feature_map,
            rotary=rotary,
            rotate=self.rotate,
            denominator=self.denominator,
            causal=self.causal,
            key_mask=key_mask,
            log_decay=None if self.gate is None else self.gate(x),
            positions=at_q,
            key_positions=at_k,
            segment_ids=documents,
            output_norm=self.output_norm,
            state=state,
            return_state=return_state,
            backend=self.backend,
            chunk_size=self.chunk_size,
        )
        if not return_state:
            return result, None
        heads, after = result
        return heads, after._replace(made_by=self._mark(x.shape[0], x.device))
