"""What numerators are divided by: the rule for denominators near 0, and its numbers.

Kernels cannot call it, so that each has the rule once more in its own terms: `_divisor` of
`linear_rope.causal.around` and `linear_rope.causal.triton_kernels`, and the C++ of the native form.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FLOAT16_MAX", "ROTATED_FLOOR", "divisor"]

# A rotated denominator may pass through 0; its magnitude is kept at least here.
ROTATED_FLOOR = 1e-6

FLOAT16_MAX = torch.finfo(torch.float16).max


def divisor(den: Tensor, signed: bool) -> Tensor:
    """den, but so that x / den is 0 where there is nothing to divide by (no key, no feature).

    It is divided by, not multiplied by the inverse: the gradient of an inverse squares it, and the
    square of a small denominator's inverse overflows.

    Args:
        signed: den is made of rotated features and may be negative.
    """
    if signed:
        return torch.where(den < 0, den.clamp(max=-ROTATED_FLOOR), den.clamp(min=ROTATED_FLOOR))
    return den.masked_fill(den == 0, torch.inf)
