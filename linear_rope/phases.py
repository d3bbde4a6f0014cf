"""Rotation by angles that are given, a token each, and the exact sums that such angles are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_rope.positions import boundaries
from linear_rope.rotary import rotate

__all__ = ["GivenRotation", "running_sum"]

# A turn in the integers that phases are summed in. Sums that overflow do so at 2^64, a multiple of
# a turn, and stay right.
TURN = 2.0**62


@dataclass(frozen=True)
class GivenRotation:
    """A rotation whose tables are given: what `linear_attention` takes as `rotary`.

    Positions are ignored: the tables hold an angle a token.

    Args:
        cos, sin: (batch, key head, time, pairs). Vectors with more heads share them in groups, as
            `linear_attention` groups query heads.
        pairing: see `Rotary`.
    """

    cos: Tensor
    sin: Tensor
    pairing: str = "interleaved"

    @property
    def width(self) -> int:
        return 2 * self.cos.shape[-1]

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate x (batch, head, time, width)."""
        groups = x.shape[1] // self.cos.shape[1]
        if x.ndim != 4 or x.shape[1] % self.cos.shape[1] or x.shape[2] != self.cos.shape[2]:
            raise ValueError(
                f"x of shape {tuple(x.shape)} does not fit tables of shape "
                f"{tuple(self.cos.shape)} (batch, key head, time, pairs)"
            )
        cos, sin = self.cos, self.sin
        if groups > 1:
            cos, sin = cos.repeat_interleave(groups, 1), sin.repeat_interleave(groups, 1)
        return rotate(x, cos, sin, self.pairing)


def running_sum(
    steps: Tensor, start: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sums of steps (batch, time, head, pairs) over time, modulo 2 pi, float64; and the last one.

    Args:
        start: (batch, head, pairs), what the first document goes on from.
        segment_ids: (batch, time); the sum begins again with each document.
    """
    batch, length, *shape = steps.shape
    first = steps.new_zeros(batch, *shape) if start is None else start.to(steps.device)
    steps = torch.cat([first.unsqueeze(1), steps], dim=1)
    # The value: in integers, which neither round nor grow, so that no angle is worse than another.
    turns = steps.detach() / (2 * math.pi)
    units = ((turns - turns.round()) * TURN).round().to(torch.int64)
    total = units.cumsum(1)
    # The gradient: that of a sum in float64.
    smooth = steps.cumsum(1)
    if segment_ids is not None and length:
        # What had come before each document, to be taken off; nothing for the row's first one.
        fresh = F.pad(boundaries(segment_ids.to(steps.device)), (1, 0))
        place = torch.arange(length + 1, device=steps.device).masked_fill(~fresh, 0)
        place = place.cummax(1).values[:, :, None, None].expand(steps.shape)
        total = total - (total - units).gather(1, place)
        smooth = smooth - (smooth - steps).gather(1, place)
    phase = total.remainder(int(TURN)).to(steps.dtype) * (2 * math.pi / TURN)
    phase = phase + (smooth - smooth.detach())
    return phase[:, 1:], phase[:, -1].clone()
