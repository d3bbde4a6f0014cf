"""cosFormer's re-weighting by position: one slow rotation of doubled features.

    weight(m, n) = phi(q_m) . phi(k_n) cos(pi/2 (m - n) / L) >= 0,   L = max_length

(Qin et al. 2022, arXiv 2202.08791; phi is relu there.) By the addition theorem this is a
rotation of the pairs (f, 0) by m pi / (2 L), so `linear_attention` does it as it is:

    phi = make_feature_map("relu-expand", head_dim)
    linear_attention(q, k, v, feature_map=phi, rotary=CosFormer(phi.feature_dim, max_length),
                     denominator="rotated")

The paper divides by the sum of the re-weighted terms, which is denominator="rotated" here; since
all of them are >= 0 and the newest has cosine 1, it stays positive. In a model it is
`Config(position="cosformer", max_length=..., feature_map="relu-expand", denominator="rotated")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linear_rope.positions import can_read
from linear_rope.rotary import rotate

__all__ = ["CosFormer"]


@dataclass(frozen=True)
class CosFormer:
    """The rotation of cosFormer, in the place of a `Rotary`: one theta, pi / (2 max_length).

    A value without tables, like `Rotary`: angles are formed in float64 at each call. It goes with
    an `Expand`ed feature map and rotate="after"; with a map that is not doubled, neighbouring
    features mix and weights may be negative.

    Args:
        width: features of the vectors to rotate, even.
        max_length: L; positions run from 0 to L - 1, so that no cosine is negative. It is a part of
            the method, not of a call: another L is another set of weights.

    Raises:
        ValueError: an odd width, a max_length below 1; when called, positions of L or more (looked
            at on the CPU only, where that waits for nothing, and outside graphs).
    """

    width: int
    max_length: int

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2:
            raise ValueError(
                f"cosformer width={self.width} must be an even number of at least 2; double the "
                'features, as feature_map="relu-expand" does'
            )
        if not isinstance(self.max_length, int) or self.max_length < 1:
            raise ValueError(
                f"max_length={self.max_length!r} must be an integer of at least 1 position"
            )

    def tables(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of position * theta, (..., time, width / 2), at least float32."""
        if can_read(positions) and positions.numel() and int(positions.max()) >= self.max_length:
            raise ValueError(
                f"position {int(positions.max())} is beyond max_length={self.max_length}, where "
                "the weights of cosFormer turn negative; use a larger max_length, or a Rotary"
            )
        dtype = torch.promote_types(dtype, torch.float32)
        home = positions.device
        # Apple's GPUs have no float64: form the (small) tables on the CPU there.
        work = torch.device("cpu") if home.type == "mps" else home
        angles = positions.to(work, torch.float64).unsqueeze(-1) * (math.pi / 2 / self.max_length)
        pairs = (*positions.shape, self.width // 2)
        cos, sin = angles.cos().to(home, dtype), angles.sin().to(home, dtype)
        return cos.expand(pairs), sin.expand(pairs)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (batch, head, time, width) by positions (time,) or (batch, time)."""
        if x.shape[-1] != self.width:
            raise ValueError(
                f"x has width {x.shape[-1]} but this rotation was made for width {self.width}"
            )
        cos, sin = self.tables(positions, x.dtype)
        if positions.ndim == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # one table for all heads
        return rotate(x, cos, sin)
