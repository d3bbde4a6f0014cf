"""The two feature maps that act number by number, each with its value and its derivative.

They have two readers: `EluPlusOne` and `Relu` of `linear_rope.feature_maps`, which want an ordinary
differentiable function, and the fused causal forms, which write into memory that they reuse and
differentiate by hand.

| Name | phi(x) | phi'(x), from f = phi(x) |
|---|---|---|
| `none` | x | 1 |
| `elu+1` | exp(min(x, 0)) + max(x, 0), at least `floor` | min(f, 1), 0 at the floor |
| `relu` | max(x, 0) + eps | 1 where f > eps, else 0 |

The textbook form of elu+1, exp(x) - 1 + 1, is exactly 0 below -16.6 in float32; this one is right
to rounding everywhere, and flat below `log_floor`, so that a feature cannot reach 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linear_rope.feature_base import log_floor

__all__ = ["ELEMENTWISE", "elu_plus_one", "relu", "write_features", "write_gradient"]

ELEMENTWISE = ("none", "elu+1", "relu")


def elu_plus_one(x: Tensor) -> Tensor:
    """phi(x) of `elu+1`, in x's dtype."""
    return x.clamp(log_floor(x.dtype), 0.0).exp() + x.relu()


def relu(x: Tensor, eps: float) -> Tensor:
    """phi(x) of `relu`, in x's dtype."""
    return x.relu() + eps


def write_features(phi: str, eps: float, x: Tensor, out: Tensor, spare: Tensor) -> None:
    """out = phi(x), for x of any strides and dtype; `spare` (like out) is overwritten."""
    if phi == "none":
        out.copy_(x)
    elif phi == "relu":
        out.copy_(x).clamp_(min=0.0).add_(eps)
    else:
        if x.dtype != out.dtype:
            x = spare.copy_(x)
        torch.clamp(x, log_floor(out.dtype), 0.0, out=out)
        out.exp_()
        torch.clamp(x, min=0.0, out=spare)
        out.add_(spare)


def write_gradient(phi: str, eps: float, features: Tensor, grad: Tensor, out: Tensor) -> None:
    """out = grad phi'(x), given features = phi(x), for out of any strides and dtype.

    `features` and `grad` are overwritten.
    """
    if phi == "none":
        out.copy_(grad)
        return
    least = eps
    if phi == "elu+1":
        # The exponential at the floor may differ from its neighbors' in the last bit.
        least = math.exp(log_floor(features.dtype)) * (1.0 + 1e-6)
        features.clamp_(max=1.0)
        grad.mul_(features)
    target = out if out.dtype == grad.dtype else grad
    torch.ops.aten.threshold_backward.grad_input(grad, features, least, grad_input=target)
    if target is grad:
        out.copy_(grad)
