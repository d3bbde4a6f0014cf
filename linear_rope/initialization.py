"""Initial values: each parameter from a generator of its own, seeded by (seed, its name)."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from linear_rope.decays import LearnedDecay
from linear_rope.feature_maps import Hedgehog, RandomFeatures
from linear_rope.mixing import ShortConvolution, TokenShift
from linear_rope.projection import Projection
from linear_rope.rotary_variants import LearnedRotary
from linear_rope.selective import SelectiveRotation

__all__ = ["EMBEDDING_STD", "initialize"]

EMBEDDING_STD = 0.02

# What starts at values that are not drawn.
GIVEN = (nn.LayerNorm, nn.RMSNorm, LearnedRotary, Hedgehog, ShortConvolution, TokenShift)


def initialize(
    model: nn.Module,
    seed: int,
    layers: int,
    features_seed: int | None = None,
    init_std: float | None = None,
) -> None:
    """Draw every parameter anew; what is drawn is said at `LanguageModel.initialize`."""
    depth = (2 * layers) ** 0.5
    with torch.no_grad():
        # Parts before what holds them: a selective rotation has a say in its convolution's start.
        for name, module in reversed(list(model.named_modules())):
            if isinstance(module, RandomFeatures):
                module.reset(_seed(seed if features_seed is None else features_seed, name))
            elif isinstance(module, GIVEN):
                module.reset_parameters()
            elif isinstance(module, SelectiveRotation):
                module.reset_parameters(torch.Generator().manual_seed(_seed(seed, name)))
            elif isinstance(module, nn.Linear | Projection | nn.Embedding):
                std = EMBEDDING_STD
                if isinstance(module, nn.Linear | Projection):
                    residual = name.endswith(("attention.out", "down"))
                    std = module.in_features**-0.5 if init_std is None else init_std
                    std /= depth if residual else 1.0
                    if isinstance(module, LearnedDecay):
                        module.reset_bias()
                    elif module.bias is not None:
                        module.bias.zero_()
                generator = torch.Generator().manual_seed(_seed(seed, name))
                drawn = torch.randn(
                    module.weight.shape, generator=generator, dtype=torch.float32, device="cpu"
                )
                module.weight.copy_(drawn * std)


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2  # 62 bits
