"""Recipes: configurations that were measured against others, by one name each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from linear_rope.config import Config
from linear_rope.model import LanguageModel

__all__ = ["BEST", "best", "count_parameters", "fit_parameters"]

# RoPE after elu(x) + 1, heads that forget at learned rates, an output norm, an output gate, LLaMA's
# block. The norm takes any positive factor of a head's output out again, so that with it the
# denominator of eq. 19 would change nothing but its cost. A ratio of 3.5 gives back the dim^2
# weights of the gate: as many parameters as without it.
BEST: Mapping[str, object] = MappingProxyType(
    {
        "attention": "linear",
        "feature_map": "elu+1",
        "position": "rotary",
        "rotate": "after",
        "denominator": "none",
        "output_norm": True,
        "decay": "learned",
        "output_gate": True,
        "block": "llama",
        "mlp_ratio": 3.5,
    }
)


def best(dim: int = 128, heads: int = 4, layers: int = 4, **changes: Any) -> Config:
    """The recipe for language models, for `LanguageModel(best(...))`.

    Args:
        dim, heads, layers: sizes; `heads` divides `dim`.
        changes: other fields of `Config`, also in place of the recipe's.

    Raises:
        ValueError: sizes and choices that do not fit, unknown fields.
    """
    return Config.from_dict({**BEST, "dim": dim, "heads": heads, "layers": layers, **changes})


def count_parameters(config: Config) -> int:
    """Parameters of a language model; tied ones count once. Needs no memory for them."""
    with torch.device("meta"):
        model = LanguageModel(config)
    return sum(p.numel() for p in model.parameters())


def fit_parameters(config: Config, target: int) -> Config:
    """The config with the `mlp_ratio` that brings its parameters closest to `target`.

    So arms of a comparison are of equal size whatever else they have. One unit of the feed-forward
    layers is 2 dim weights a layer (3 dim in the LLaMA-like block), so the rest is at most half of
    that.

    Raises:
        ValueError: the target is below what the model has without its feed-forward layers.
    """
    least = count_parameters(_with_hidden(config, 1))
    unit = count_parameters(_with_hidden(config, 2)) - least
    hidden = 1 + round((target - least) / unit)
    if hidden < 1:
        raise ValueError(
            f"target={target} parameters are too few: with one hidden unit a layer the model has "
            f"{least}; make dim or layers smaller"
        )
    return _with_hidden(config, hidden)


def _with_hidden(config: Config, hidden: int) -> Config:
    ratio = hidden / config.dim
    return replace(config, mlp_ratio=ratio * 1.5 if config.block == "llama" else ratio)
