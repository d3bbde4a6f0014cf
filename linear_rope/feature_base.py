"""What all feature maps share: the interface, and the precision they are computed in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["FeatureMap", "Map", "full_precision", "log_floor"]


def log_floor(dtype: torch.dtype) -> float:
    """The smallest logarithm of an exponential feature: exp(-30) = 9.4e-14 in float32.

    A product of two such features (8.8e-27) is a normal number, and so is its inverse times any
    gradient, so a denominator made of them is never 0.
    """
    return -300.0 if dtype == torch.float64 else -30.0


def peak_floor(dtype: torch.dtype) -> float:
    """How far below its maximum an exponential feature may lie: exp(-40) = 4.2e-18 in float32.

    A query's largest feature is 1, so a denominator is not below this either. It must be low,
    because the largest features of a query and of a key can lie far apart and the kernel is then a
    sum of small terms; it cannot be lower, because the gradient of a quotient with rotated terms
    divides by the denominator twice.
    """
    return -300.0 if dtype == torch.float64 else -40.0


def full_precision(x: Tensor) -> Tensor:
    """x in at least float32: float16 reaches 65504 only, and its exp is 0 from -17.4 on."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class FeatureMap(nn.Module):
    """Base class: phi maps (..., head_dim) to (..., feature_dim).

    Attributes:
        head_dim, feature_dim: D and M.
        log_space: True if phi is an exponential and `log_features` returns its logarithm.
        non_negative: True if no feature is negative. Where it is False, the map itself keeps
            phi(q) . phi(k) above 0, which is what an unrotated denominator needs.
    """

    log_space: bool = False
    non_negative: bool = True

    def __init__(self, head_dim: int, feature_dim: int) -> None:
        super().__init__()
        if head_dim < 1 or feature_dim < 1:
            raise ValueError(
                f"head_dim={head_dim} and features={feature_dim} must both be at least 1"
            )
        self.head_dim = head_dim
        self.feature_dim = feature_dim

    def log_features(self, x: Tensor) -> Tensor:
        """log phi(x), for maps with `log_space`."""
        raise TypeError(f"{type(self).__name__} is not an exponential feature map (log_space)")

    def extra_repr(self) -> str:
        return f"{self.head_dim} -> {self.feature_dim}"


Map = FeatureMap | Callable[[Tensor], Tensor]  # what a `feature_map` may be, but for its name
