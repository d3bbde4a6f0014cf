"""The sizes and choices of a model in one value, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from linear_rope.arguments import (
    DENOMINATORS,
    ROTATE,
    check_choices,
    check_dropout,
    check_flags,
    check_local,
    check_one_axis,
    check_sizes,
    check_softmax,
)
from linear_rope.causal import BACKENDS, check_chunk_size
from linear_rope.counts import check_counts
from linear_rope.decays import make_decay
from linear_rope.feature_maps import FEATURE_MAPS
from linear_rope.rotary import PAIRINGS, check_rates
from linear_rope.rotary_variants import make_rotary
from linear_rope.selective import check_unturned, is_selective, make_selective

__all__ = ["ATTENTION", "BLOCKS", "POSITIONS", "Config"]

ATTENTION = ("linear", "softmax")
BLOCKS = ("gpt", "llama")
# Positions inside attention that queries and keys are rotated, or permuted, by.
ROTATING = ("rotary", "cosformer", "permute")
POSITIONS = ("none", "sinusoidal", "learned", *ROTATING, "alibi")
EXPANDED = tuple(name for name in FEATURE_MAPS if name.endswith("-expand"))


@dataclass(frozen=True)
class Config:
    """Sizes and choices of a model; checked when it is made.

    By the checks of the layers, which add those that need the width of a feature map: an odd number
    of features, a `rotary_fraction` that leaves no pair, cosFormer's expanded ones.

    Names and ranges are always checked, but a value may have no effect, so that the arms of a
    comparison can differ in one field: rotate, pairing, rotary_base and rotary_fraction where
    nothing turns; window without local_heads; max_length with any position but "learned" and
    "cosformer"; feature_map, denominator, backend and chunk_size with attention="softmax" (where
    rotate="after" means "before").

    Args:
        vocab_size, dim, layers, heads: sizes; `heads` divides `dim`.
        attention: "linear" (`RotaryLinearAttention`) or "softmax" (`SoftmaxAttention`).
        kv_heads, feature_map, features, redraw_interval, rotate, denominator, output_norm,
            qk_norm, decay, short_conv, token_shift, output_gate, local_heads, window, rotary_base,
            rotary_fraction, rotary_scaling, pairing, backend, chunk_size: see
            `RotaryLinearAttention`; rotary_scaling is a text or None here, so that a config can be
            saved.
        position: "rotary" (inside attention, as `rotate` says), "cosformer" (the same, for the
            re-weighting of `CosFormer`: an expanded feature map, denominator="rotated"), "permute"
            (features that change places, see `Permute`), "alibi" (a bias by distance,
            attention="softmax"), "sinusoidal" or "learned" (added to the embeddings), or "none".
        max_length: rows of the table of position="learned", or L of "cosformer"; nothing else has
            a longest length.
        block: "gpt" (LayerNorm; feed-forward layer of two matrices with GELU) or "llama" (RMSNorm;
            of three with SwiGLU, arXiv 2002.05202; no biases).
        mlp_ratio: hidden width of the feed-forward layer over `dim`; for block="llama" two thirds
            of that are taken (8/3 of dim for the ratio 4), rounded, so that three matrices have the
            parameters of two. Any ratio will do, also 3.47.
        dropout: on embeddings, attention output and feed-forward output.
        bias: in the linear layers. tie_embeddings: the output layer is the embedding.
        init_std: standard deviation of the initial linear layers (the two that write into the
            residual stream: over sqrt(2 layers)); none: 1/sqrt(fan in). GPT-2's is 0.02.
    """

    vocab_size: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    attention: str = "linear"
    feature_map: str = "elu+1"
    features: int | None = None
    redraw_interval: int | None = None
    position: str = "rotary"
    rotate: str = "after"
    denominator: str = "unrotated"
    output_norm: bool = False
    qk_norm: bool = False
    decay: str = "none"
    short_conv: int = 0
    token_shift: bool = False
    output_gate: bool = False
    local_heads: int = 0
    window: int = 64
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0
    rotary_scaling: str | None = None
    pairing: str = "interleaved"
    max_length: int | None = None
    block: str = "gpt"
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    bias: bool = False
    tie_embeddings: bool = True
    init_std: float | None = None
    backend: str = "auto"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        check_counts(vocab_size=self.vocab_size, layers=self.layers)
        check_counts(
            optional=True,
            max_length=self.max_length,
            features=self.features,
            redraw_interval=self.redraw_interval,
        )
        check_counts(0, short_conv=self.short_conv)
        check_sizes(self.dim, self.heads, self.kv_heads)
        check_flags(
            output_norm=self.output_norm,
            qk_norm=self.qk_norm,
            token_shift=self.token_shift,
            output_gate=self.output_gate,
            bias=self.bias,
            tie_embeddings=self.tie_embeddings,
        )
        check_choices(
            attention=(self.attention, ATTENTION),
            feature_map=(self.feature_map, FEATURE_MAPS),
            position=(self.position, POSITIONS),
            rotate=(self.rotate, ROTATE),
            denominator=(self.denominator, DENOMINATORS),
            block=(self.block, BLOCKS),
            pairing=(self.pairing, PAIRINGS),
            backend=(self.backend, ("auto", *BACKENDS)),
        )
        check_dropout(self.dropout)
        check_rates(self.rotary_base, self.rotary_fraction)
        check_chunk_size(self.chunk_size)
        if self.init_std is not None and not 0.0 < self.init_std < math.inf:
            raise ValueError(
                f"init_std={self.init_std} must be positive and finite; omit it for 1/sqrt(fan in)"
            )
        if self.hidden < 1:
            raise ValueError(
                f"mlp_ratio={self.mlp_ratio} must leave the feed-forward layer at least one unit"
            )
        if self.block == "llama" and self.bias:
            raise ValueError("block='llama' has no biases; use bias=False, or block='gpt'")
        with torch.device("meta"):  # without values, so that no random number is drawn
            make_decay(self.decay, 1, 1)  # refuses what it must
        check_local(self.local_heads, self.window, self.heads, self.kv_heads)
        if self.attention == "softmax":
            check_softmax(self.decay, self.local_heads)
        given = [n for n in ("features", "redraw_interval") if getattr(self, n) is not None]
        if given and (self.attention == "softmax" or not self.feature_map.startswith("favor")):
            raise ValueError(
                f"{' and '.join(given)} only fit a random feature map (favor+, favor+relu), got "
                f"attention={self.attention!r} and feature_map={self.feature_map!r}; omit them"
            )
        if self.rotary_scaling is not None:
            if self.position != "rotary":
                raise ValueError(
                    f"rotary_scaling={self.rotary_scaling!r} needs position='rotary', got "
                    f"{self.position!r}; omit it"
                )
            if not isinstance(self.rotary_scaling, str):
                raise ValueError(
                    f"rotary_scaling={self.rotary_scaling!r} must be a text in a config, such as "
                    "'yarn:factor=4,original_length=2048'"
                )
            if self.rotate == "none":
                check_unturned(self.rotary_scaling)
            if is_selective(self.rotary_scaling):
                base, fraction = self.rotary_base, self.rotary_fraction
                with torch.device("meta"):
                    make_selective(self.rotary_scaling, 4, 1, 4, base, fraction, self.pairing)
                kv_heads = self.kv_heads or self.heads
                far = kv_heads - self.local_heads * kv_heads // self.heads
                if self.attention == "linear" and far > 0 and self.dim % far:
                    raise ValueError(
                        f"rotary_scaling={self.rotary_scaling!r} cuts dim={self.dim} into a slice "
                        f"for each key head that is not local, and {far} of them do not divide it; "
                        "choose another local_heads, heads or dim"
                    )
            else:
                rotary = make_rotary(4, self.rotary_base, scaling=self.rotary_scaling)
                check_one_axis(self.local_heads, rotary)
                if self.attention == "softmax":
                    check_softmax(self.decay, self.local_heads, rotary)
        if self.position == "learned" and self.max_length is None:
            raise ValueError(
                "position='learned' needs max_length, the number of positions in its table"
            )
        if self.position == "cosformer":
            self._check_cosformer()
        if self.position == "permute":
            self._check_linear("its features change places")
            make_rotary(4, self.rotary_base, self.rotary_fraction, self.pairing, self.rotation)
        if self.position == "alibi" and self.attention != "softmax":
            raise ValueError(
                f"position='alibi' is a bias inside a softmax: use attention='softmax', got "
                f"{self.attention!r}; linear attention has decay='fixed'"
            )

    def _check_linear(self, why: str) -> None:
        if self.attention != "linear" or self.rotate != "after":
            raise ValueError(
                f"position={self.position!r} needs attention='linear' and rotate='after', got "
                f"{self.attention!r} and {self.rotate!r}: {why}"
            )

    def _check_cosformer(self) -> None:
        if self.max_length is None:
            raise ValueError(
                "position='cosformer' needs max_length, the positions over which its weights fall "
                "from 1 to 0"
            )
        for name, value, wanted in (
            ("attention", self.attention, ("linear",)),
            ("feature_map", self.feature_map, EXPANDED),
            ("rotate", self.rotate, ("after",)),
            ("denominator", self.denominator, ("rotated",)),
        ):
            if value not in wanted:
                choice = " or ".join(f"{name}={w!r}" for w in wanted)
                raise ValueError(
                    f"position='cosformer' re-weights non-negative features and divides by their "
                    f"sum: use {choice}, got {value!r}"
                )
        make_rotary(4, self.rotary_base, self.rotary_fraction, self.pairing, self.rotation)

    @property
    def hidden(self) -> int:
        """Hidden width of the feed-forward layer."""
        # The small addition keeps a ratio such as 47 / 96 from losing a unit of 96 * 47 / 96.
        if self.block == "llama":
            return int(self.dim * self.mlp_ratio * 2 / 3 + 0.5)
        return int(self.dim * self.mlp_ratio + 1e-6)

    @property
    def rotation(self) -> str | None:
        """What the attention layers take as `rotary_scaling`."""
        if self.position == "cosformer":
            return f"cosformer:max_length={self.max_length}"
        if self.position == "permute":
            return "permute"
        return self.rotary_scaling

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The config saved as a dict; unknown keys are refused by name."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown config keys: {', '.join(unknown)}")
        return cls(**values)
