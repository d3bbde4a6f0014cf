"""A linear map that code for linear layers leaves alone: what gates are made of."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Projection"]


class Projection(nn.Module):
    """x W^T + b, (..., dim) -> (..., width), with the parameters and the start of `nn.Linear`.

    It is no `nn.Linear`, so that `model.apply(...)` with the usual initialization, a small normal W
    and b = 0 wherever a module is an `nn.Linear`, does not touch it: the bias of a decay is its
    time-scale, and 0 would be 1.44 tokens in every head.

    Args:
        dim, width: of the input and of the output. bias: whether there is a b.

    Raises:
        ValueError: sizes below 1.
    """

    def __init__(self, dim: int, width: int, bias: bool = True) -> None:
        super().__init__()
        if dim < 1 or width < 1:
            raise ValueError(f"dim={dim} and width={width} must both be at least 1")
        self.in_features, self.out_features = dim, width
        self.weight = nn.Parameter(torch.empty(width, dim))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in `nn.Linear`, bit by bit: uniform in +-1/sqrt(dim), from the global generator."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
