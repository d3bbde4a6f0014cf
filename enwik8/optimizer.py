"""AdamW, what its weight decay spares, and the schedule of the learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from linear_rope.feature_maps import FeatureMap
from linear_rope.mixing import ShortConvolution
from linear_rope.selective import SelectiveRotation

from .presets import Settings

__all__ = ["learning_rate", "make_optimizer"]


def learning_rate(step: int, settings: Settings) -> float:
    """Rate of step 1, 2, ...: linear warm-up to the highest rate, then half a cosine.

    The last step has ``final_learning_rate`` times the highest rate.
    """
    if step <= settings.warmup:
        return settings.learning_rate * step / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    low = settings.final_learning_rate
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with weight decay on matrices only.

    Spared are vectors (biases, norms, learned frequencies), and whatever starts at an identity that
    zero, which decay pulls to, is not: Hedgehog's matrix (softmax(0) tells no two queries apart),
    the taps of short convolutions, selective rotations.
    """
    spared = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, FeatureMap | ShortConvolution | SelectiveRotation)
        for parameter in module.parameters()
    }
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for p in model.parameters():
        if p.requires_grad:
            (decayed if p.ndim >= 2 and id(p) not in spared else plain).append(p)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas)
