"""Rotary position embedding: angles from integer positions, and the rotation itself.

R_m turns pair j of a vector by the angle m * theta_j, theta_j = base^(-2j/width), so that
(R_m x) . (R_n y) depends on m - n only (RoFormer, arXiv 2104.09864, eq. 13-16).

Rules that change theta are in `linear_rope.scaling`, other rotations in
`linear_rope.rotary_variants`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from linear_rope.positions import check_positions, several_axes
from linear_rope.scaling import Scaling, powers

__all__ = ["PAIRINGS", "Rotary", "Rotation", "rotate"]

PAIRINGS = ("interleaved", "half")


class Rotation(Protocol):
    """What `linear_attention` takes as `rotary`: a width, and a call on heads and positions.

    The rest is optional, and absent means no: `axes`, the number of integers that make a position
    (1); `by_length`, whether angles depend on the length of the call; `log_fade`, what fades with
    the distance, with `title`, its name in errors (see `XPos` and `Permute`).
    """

    @property
    def width(self) -> int: ...

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Rotary:
    """A rotation by position of the first `fraction * width` features of a vector.

    It is a value, not a module: it holds no table, so nothing goes stale when a model changes its
    dtype, its device, its length or is built on the meta device, and nothing enters `state_dict`.
    Angles are formed in float64 from integer positions at each call; cosine and sine are rounded
    once, to the dtype of the vectors but at least float32.

    Args:
        width: features of the vectors to rotate, even. After a feature map this is the number of
            features, before it the head width.
        base: theta_j = base^(-2j / rotated width).
        fraction: the share of the features that is rotated, in (0, 1]; the rotated width is the
            largest even number within it. The rest passes unchanged.
        pairing: "interleaved" rotates features (2j, 2j+1) together (the paper; default), "half"
            features (j, j + rotated width / 2) (as GPT-NeoX and Llama checkpoints do).
        scaling: a rule of `linear_rope.scaling` that changes theta, such as `Linear(factor=4)`.

    Raises:
        ValueError: an odd width, a fraction that rotates nothing, an unknown pairing, a scaling
            that is none.
    """

    width: int
    base: float = 10000.0
    fraction: float = 1.0
    pairing: str = "interleaved"
    scaling: Scaling | None = None

    # How many features turn: the largest even number within `fraction * width`. Kept as a number,
    # since torch.compile with dynamic shapes can make no size of a float.
    rotated_width: int = field(init=False, repr=False, compare=False)

    axes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2:
            raise ValueError(
                f"rotary width={self.width} must be an even number of at least 2: features turn in "
                f"pairs; use {self.width + 1 if self.width > 0 else 2} features, "
                "or rotate a fraction of them"
            )
        check_rates(self.base, self.fraction)
        # The small addition keeps a fraction such as 0.7 of 10, which is 6.999..., from losing one.
        turning = int(self.width * self.fraction + 1e-9) // 2 * 2
        object.__setattr__(self, "rotated_width", turning)
        if self.rotated_width < 2:
            raise ValueError(
                f"rotary fraction={self.fraction} must leave at least one pair of the {self.width} "
                "features; use position 'none' to rotate nothing"
            )
        if self.pairing not in PAIRINGS:
            raise ValueError(
                f"pairing={self.pairing!r} is unknown; choose one of: {', '.join(PAIRINGS)}"
            )
        if not (self.scaling is None or isinstance(self.scaling, Scaling)):
            raise ValueError(
                f"scaling={self.scaling!r} must be a rule, such as Linear(factor=4), or None; "
                "linear_rope.scaling.make_scaling makes one by its name"
            )

    @property
    def by_length(self) -> bool:
        """Whether angles depend on the length of the call (`Dynamic` scaling)."""
        return self.scaling is not None and self.scaling.by_length

    @property
    def multiplier(self) -> float:
        """The factor of cosines and sines; 1, but for `Yarn` scaling."""
        return 1.0 if self.scaling is None else self.scaling.multiplier

    def frequencies(
        self, device: torch.device | str | None = None, length: Tensor | None = None
    ) -> Tensor:
        """theta_j in radians a position, float64, (..., rotated width / 2).

        `length`, (..., 1), is that of the call, for scalings that depend on it.
        """
        if self.scaling is None:
            return powers(self.base, self.rotated_width, device)
        return self.scaling.frequencies(self.base, self.rotated_width, device, length)

    def angles(self, positions: Tensor) -> Tensor:
        """position * theta in radians, (..., time, pairs), from positions in float64."""
        length = None
        if self.by_length and positions.shape[-1]:
            length = positions.amax(-1, keepdim=True) - positions.amin(-1, keepdim=True) + 1
        theta = self.frequencies(positions.device, length)
        if length is not None:
            theta = theta.unsqueeze(-2)  # a row's own, over its time
        return positions.unsqueeze(-1) * theta

    def tables(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of position * theta, (..., time, pairs), at least float32."""
        return cos_and_sin(self, positions, dtype)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (batch, head, time, width) by positions (time,) or (batch, time)."""
        return turn(self, x, positions)


def check_rates(base: Any, fraction: Any) -> None:
    """Refuses a base that is not positive, and what is no share of the features."""
    if not isinstance(base, int | float) or not base > 0:
        raise ValueError(f"rotary base={base!r} must be positive (the usual one is 10000)")
    if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(
            f"rotary fraction={fraction!r} must be in (0, 1]; use position 'none' to rotate nothing"
        )


def cos_and_sin(rotation: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tables of a rotation that knows its `angles` and `multiplier`; rounded once, here."""
    dtype = torch.promote_types(dtype, torch.float32)
    home = positions.device
    # Apple's GPUs have no float64: form the (small) tables on the CPU there.
    work = torch.device("cpu") if home.type == "mps" else home
    angles = rotation.angles(positions.to(work, torch.float64))
    cos, sin = angles.cos(), angles.sin()
    if rotation.multiplier != 1.0:
        cos, sin = cos * rotation.multiplier, sin * rotation.multiplier
    return cos.to(home, dtype), sin.to(home, dtype)


def turn(rotation: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Rotate x (batch, head, time, width); positions with or without a batch axis."""
    if x.shape[-1] != rotation.width:
        raise ValueError(
            f"x has width {x.shape[-1]} but this rotation was made for width {rotation.width}"
        )
    batch, axes = x.shape[0] if x.ndim == 4 else None, getattr(rotation, "axes", 1)
    if axes > 1:
        several_axes(positions, x.shape[-2], batch, axes)
    else:
        check_positions(positions, x.shape[-2], batch)
        if positions.ndim == 0 or positions.shape[-1] != x.shape[-2]:
            raise ValueError(
                f"positions must give one integer a token, (time,) or (batch, time) with time = "
                f"{x.shape[-2]}, got shape {tuple(positions.shape)}"
            )
    if positions.device != x.device:
        raise ValueError(f"positions are on {positions.device} but x is on {x.device}")
    cos, sin = rotation.tables(positions, x.dtype)
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # one table for all heads
    return rotate(x, cos, sin, rotation.pairing)


def check_rotation(
    rotation: Any, *, rotate: str, causal: bool, state: bool, packed: bool, one_clock: bool
) -> None:
    """Refuses what a rotation cannot do.

    Args:
        rotate: "after" or "before" the feature map. causal: whether keys ahead are unseen.
        state: a state is given or asked for. packed: rows hold several documents.
        one_clock: queries and keys share their positions.

    Raises:
        ValueError: one sentence with the reason and what to do instead.
    """
    if getattr(rotation, "by_length", False):
        if state:
            raise ValueError(
                "dynamic scaling cannot take or return a state: its angles depend on the length of "
                "the whole sequence, and those of keys already in the sum cannot be changed; run "
                "whole sequences, or use the scaling 'ntk' or 'yarn'"
            )
        if packed or not one_clock:
            raise ValueError(
                "dynamic scaling needs one sequence a row and the same positions for queries and "
                "keys: its angles depend on the one length of the call; use the scaling 'ntk' or "
                "'yarn'"
            )
    if getattr(rotation, "axes", 1) > 1 and state:
        raise ValueError(
            "axial positions cannot take or return a state: a state counts on along one axis; run "
            "whole sequences"
        )
    if getattr(rotation, "log_fade", None) is not None:
        if not causal:
            raise ValueError(
                f"{rotation.title} needs causal=True: keys ahead of a query would grow with their "
                "distance"
            )
        if rotate != "after":
            raise ValueError(
                f'{rotation.title} needs rotate="after", got {rotate!r}: its decay does not pass '
                "through a feature map"
            )


def check_width(rotary: Rotation, features: Tensor) -> None:
    if rotary.width != features.shape[-1]:
        raise ValueError(
            f"rotary was made for width {rotary.width} but the feature map gives "
            f'{features.shape[-1]} features; with rotate="after" use Rotary({features.shape[-1]})'
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: str = "interleaved") -> Tensor:
    """Turn each pair (a, b) of x into (a cos - b sin, b cos + a sin).

    Args:
        x: (..., width); its first 2 * cos.shape[-1] features are rotated, the rest is kept.
        cos, sin: tables that broadcast over x's leading dimensions, (..., pairs).
        pairing: "interleaved" or "half", see `Rotary`.

    Returns:
        The rotated x in x's dtype; the arithmetic is done in the tables' dtype if that is wider.
    """
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rotate(x[..., :turned], cos, sin, pairing), x[..., turned:]], dim=-1)
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    if pairing == "half":
        a, b = wide.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    if torch.compiler.is_compiling():
        # The compiler fuses real arithmetic and leaves complex arithmetic alone.
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        # (a + ib) e^{i angle} in a single pass over memory
        pairs = torch.view_as_complex(wide.contiguous().unflatten(-1, (-1, 2)))
        out = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    return out.to(x.dtype)
