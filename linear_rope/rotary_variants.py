"""Rotations beside `Rotary`, and `make_rotary`, which makes any of them from a short text.

`AxialRotary` turns by row and column of an image, `LearnedRotary` learns its frequencies; `XPos`,
which also fades, `CosFormer` and `Permute` have pages of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linear_rope.cosformer import CosFormer
from linear_rope.permute import Permute
from linear_rope.rotary import Rotary, cos_and_sin, turn
from linear_rope.scaling import SCALINGS, Scaling, build
from linear_rope.xpos import XPos

__all__ = ["AxialRotary", "LearnedRotary", "grid_positions", "make_rotary"]


@dataclass(frozen=True)
class AxialRotary(Rotary):
    """Rotation by two-dimensional positions: half of the pairs turn by row, half by column.

    With d the rotated width, a multiple of 4: pairs 0 ... d/4 - 1 turn by the row's angle, the
    others by the column's, both with theta_j = base^(-2j / (d/2)). Products of a query and a key
    depend on the difference of their rows and that of their columns only.

    Positions are ids, (time, 2) or (batch, time, 2), row and column of each token (see
    `grid_positions`); they are always given. There is no next one to count on to, so no state.
    Image models often use a smaller base, such as 100.

    Source: Heo et al. 2024, arXiv 2403.13298, section 3.2 (axial frequencies).
    """

    axes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotated_width % 4:
            raise ValueError(
                f"an axial rotation of {self.rotated_width} features must have a multiple of 4: "
                "half of the pairs turn by row and half by column; choose another width or fraction"
            )
        if self.by_length:
            raise ValueError("an axial rotation has no dynamic scaling: an image has no one length")

    def frequencies(
        self, device: torch.device | str | None = None, length: Tensor | None = None
    ) -> Tensor:
        """theta_j of one axis, float64, (rotated width / 4,)."""
        return Rotary(self.rotated_width // 2, self.base, scaling=self.scaling).frequencies(device)

    def angles(self, positions: Tensor) -> Tensor:
        """(..., time, pairs) in radians, from positions (..., time, 2) in float64."""
        return (positions.unsqueeze(-1) * self.frequencies(positions.device)).flatten(-2)


def grid_positions(rows: int, columns: int, device: torch.device | str | None = None) -> Tensor:
    """Row and column of the tokens of an image read row by row, (rows * columns, 2) int64."""
    return torch.cartesian_prod(
        torch.arange(rows, device=device), torch.arange(columns, device=device)
    )


class LearnedRotary(nn.Module):
    """A rotation that learns its frequencies: one parameter for each pair's log theta_j.

    They start as those of `Rotary` with the same arguments, and are shared by the heads that the
    rotation is applied to. Angles are formed in float64; the parameter is float32 at least, also
    after `.half()` or `.to(torch.bfloat16)`: at position 10000 an error of 2^-9 in a frequency is
    an unrelated angle. The gradient of log theta_j grows with position * theta_j: over long
    sequences the fast pairs want a small learning rate.

    Source: RoFormer, arXiv 2104.09864, section 3.2.2 fixes theta_j; making the frequencies
    parameters is in Heo et al. 2024, arXiv 2403.13298, section 3.2.
    """

    axes: ClassVar[int] = 1
    by_length: ClassVar[bool] = False

    def __init__(
        self,
        width: int,
        base: float = 10000.0,
        fraction: float = 1.0,
        pairing: str = "interleaved",
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        self.start = Rotary(width, base, fraction, pairing, scaling)
        if self.start.by_length:
            raise ValueError(
                "learned frequencies have no dynamic scaling: there is one set for every length"
            )
        self.width, self.pairing = width, pairing
        self.rotated_width, self.multiplier = self.start.rotated_width, self.start.multiplier
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.log_frequencies = nn.Parameter(torch.empty(self.rotated_width // 2, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the fixed frequencies."""
        with torch.no_grad():
            self.log_frequencies.copy_(self.start.frequencies(self.log_frequencies.device).log())

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """theta_j in radians a position, float64, (rotated width / 2,), with a gradient."""
        return self.log_frequencies.to(device, torch.float64).exp()

    def angles(self, positions: Tensor) -> Tensor:
        """position * theta in radians, (..., time, pairs), from positions in float64."""
        return positions.unsqueeze(-1) * self.frequencies(positions.device)

    def tables(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of position * theta, (..., time, pairs), at least float32."""
        return cos_and_sin(self, positions, dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (batch, head, time, width) by positions (time,) or (batch, time)."""
        return turn(self, x, positions)

    def extra_repr(self) -> str:
        return f"{self.start}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedRotary:
        def keep_precision(x: Tensor) -> Tensor:
            y = fn(x)
            wide = torch.promote_types(y.dtype, torch.float32)
            return y if y.dtype == wide else x.to(y.device, wide)

        return super()._apply(keep_precision, recurse)


def make_rotary(
    width: int,
    base: float = 10000.0,
    fraction: float = 1.0,
    pairing: str = "interleaved",
    scaling: str | Scaling | None = None,
) -> Rotary | LearnedRotary | CosFormer | Permute:
    """A rotation from what a configuration can hold.

    Args:
        width, base, fraction, pairing: see `Rotary`.
        scaling: None; a rule of `linear_rope.scaling`; or a text, NAME or NAME:OPTION=VALUE,...:
            a name in `SCALINGS` with its options ("yarn:factor=4,original_length=2048"), or another
            rotation: "xpos" (options gamma, scale_base), "axial" (positions are pairs), "learned",
            "cosformer" (option max_length) and "permute" (options seed, ratio, heads; 1 head unless
            a layer says how many), which take no base, fraction or pairing.

    Raises:
        ValueError: an unknown name or option (the known ones are listed), or a value that does not
            fit.
    """
    if scaling is None or isinstance(scaling, Scaling):
        return Rotary(width, base, fraction, pairing, scaling)
    shape: dict[str, Any] = {
        "width": width,
        "base": base,
        "fraction": fraction,
        "pairing": pairing,
    }

    def xpos(gamma: float = 0.4, scale_base: float = 512.0) -> XPos:
        return XPos(**shape, gamma=gamma, scale_base=scale_base)

    def unshaped(why: str) -> None:
        if (base, fraction, pairing) != (10000.0, 1.0, "interleaved"):
            raise ValueError(
                f"{why}: leave rotary_base, rotary_fraction and pairing as they are, got {base}, "
                f"{fraction} and {pairing!r}"
            )

    def cosformer(max_length: int) -> CosFormer:
        unshaped("cosformer turns all pairs by one angle")
        return CosFormer(width, max_length)

    def permute(heads: int = 1, seed: int = 0, ratio: float | None = None) -> Permute:
        unshaped("a permutation has no angles")
        return Permute(width, heads, seed, ratio)

    def selective() -> None:
        raise ValueError(
            f"rotary_scaling={scaling!r} reads a layer's input: give it to a layer or a Config, or "
            "make it with linear_rope.selective.make_selective"
        )

    known: dict[str, Callable[..., Any]] = {
        **SCALINGS,
        "xpos": xpos,
        "axial": lambda: AxialRotary(**shape),
        "learned": lambda: LearnedRotary(**shape),
        "cosformer": cosformer,
        "permute": permute,
        "selective": selective,
    }
    name, options = parse(scaling)
    made = build("rotary_scaling", name, known, {} if name == "selective" else options)
    return Rotary(**shape, scaling=made) if isinstance(made, Scaling) else made


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options: "linear:factor=4" -> ("linear", {"factor": 4})."""
    if not isinstance(text, str):
        raise ValueError(
            f"rotary_scaling={text!r} must be a text such as 'yarn:factor=4,original_length=2048', "
            "a rule such as Yarn(4, 2048), or None"
        )
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in rest.split(",") if rest else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value) or key in options:
            raise ValueError(
                f"rotary_scaling={text!r} must be NAME or NAME:OPTION=VALUE,OPTION=VALUE, each "
                f"option once; {item!r} does not fit"
            )
        options[key] = _value(value)
    return name.strip(), options


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
