"""Scaling rules: how a rotation trained to one length is made to fit a longer one.

A rule changes the frequencies theta_j = base^(-2j/d) of the d rotated features, j = 0 ... d/2 - 1;
`Rotary(width, scaling=rule)` applies it. Rules are frozen values without tables, so that a rotation
stays a value too. Where s appears, it is the `factor`: the new length over the trained one.

To add a rule: a subclass of `Scaling` with its formula and source, and a line in `SCALINGS`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = [
    "SCALINGS",
    "Dynamic",
    "Linear",
    "Llama3",
    "Ntk",
    "NtkByParts",
    "Scaling",
    "Yarn",
    "make_scaling",
]

RAMPS = ("index", "turns")
Device = torch.device | str | None


@dataclass(frozen=True)
class Scaling:
    """A rule for frequencies. All checks are made at construction and raise ValueError."""

    factor: float

    # Whether the angles depend on the length of the call: such a rule has no recurrent form.
    by_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _number(self, "factor", 1, "the new length over the trained one")

    def frequencies(self, base: float, width: int, device: Device, length: Tensor | None) -> Tensor:
        """theta_j in radians a position, float64, (..., width / 2).

        `length`, (..., 1), is the length of the call; only rules `by_length` look at it.
        """
        raise NotImplementedError

    @property
    def multiplier(self) -> float:
        """What cosines and sines are multiplied with, of queries and keys alike."""
        return 1.0


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: theta_j / s, which is the rotation of positions divided by s.

    Source: Chen et al. 2023, arXiv 2306.15595, eq. 4.
    """

    def frequencies(self, base: float, width: int, device: Device, length: Tensor | None) -> Tensor:
        return powers(base, width, device) / self.factor


@dataclass(frozen=True)
class Ntk(Scaling):
    """NTK-aware interpolation: base * s^(d/(d-2)).

    The slowest pair is slowed down by exactly s, the fastest not at all (a width of 2 has no other
    pair and is not changed).

    Source: Peng et al. 2023, arXiv 2309.00071, definition 1 (section 3.1).
    """

    def frequencies(self, base: float, width: int, device: Device, length: Tensor | None) -> Tensor:
        return powers(self.scaled_base(base, width), width, device)

    def scaled_base(self, base: float, width: int) -> float:
        """The base to use instead."""
        return base if width == 2 else base * self.factor ** (width / (width - 2))


@dataclass(frozen=True)
class Dynamic(Scaling):
    """Dynamic NTK: base * (s L / L_0 - (s - 1))^(d/(d-2)) for calls longer than L_0, else base.

    L is the length of the call, that is its last position minus its first plus 1, row by row; L_0
    is `original_length`. Nothing is remembered from one call to the next. A longer sequence turns
    all of its keys otherwise, the earlier ones too, so that a sum of keys turned before cannot be
    continued: a state is refused (use `Ntk` or `Yarn` to stream), and so are rows of several
    documents and cross-attention, where there is no one length.

    Source: arXiv 2309.00071, section 3.3, in the form of the transformers library ("dynamic").
    """

    original_length: int

    by_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _length(self)

    def frequencies(self, base: float, width: int, device: Device, length: Tensor | None) -> Tensor:
        if length is None or width == 2:
            return powers(base, width, device)
        j = torch.arange(0, width, 2, dtype=torch.float64, device=device)
        return self._bases(base, width, length.to(torch.float64)) ** (-j / width)

    def scaled_base(self, base: float, width: int, length: int) -> float:
        """The base of a call of `length` positions."""
        return float(self._bases(base, width, torch.tensor(length, dtype=torch.float64)))

    def _bases(self, base: float, width: int, length: Tensor) -> Tensor:
        stretch = self.factor * length / self.original_length - (self.factor - 1)
        return base * stretch.clamp(min=1.0) ** (width / (width - 2) if width > 2 else 0.0)


@dataclass(frozen=True)
class NtkByParts(Scaling):
    """NTK-by-parts: fast pairs keep their frequency, slow ones are interpolated.

        theta_j <- (1 - g_j) theta_j / s + g_j theta_j

    Pair j makes r_j = L_0 theta_j / 2 pi turns over the trained length L_0 (`original_length`);
    g_j is 1 above `beta_fast` turns, 0 below `beta_slow`, and between them falls linearly:
    ramp="index" in j, between the pairs where r_j takes these values, rounded outward (as the
    authors' code and the transformers library do: what checkpoints were trained with); ramp="turns"
    in r_j (as the paper is written).

    Source: arXiv 2309.00071, definition 2 (section 3.2).
    """

    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: str = "index"

    def __post_init__(self) -> None:
        super().__post_init__()
        _length(self)
        _number(self, "beta_slow", 0, "turns over the trained length", strict=True)
        _number(self, "beta_fast", self.beta_slow, "turns, more than beta_slow", strict=True)
        if self.ramp not in RAMPS:
            raise ValueError(f"ramp={self.ramp!r} is unknown; choose one of: {', '.join(RAMPS)}")

    def frequencies(self, base: float, width: int, device: Device, length: Tensor | None) -> Tensor:
        theta = powers(base, width, device)
        if self.ramp == "turns":
            turns = self.original_length * theta / (2 * math.pi)
            keep = (turns - self.beta_slow) / (self.beta_fast - self.beta_slow)
        else:
            first = max(math.floor(self._pair(self.beta_fast, base, width)), 0)
            last = min(math.ceil(self._pair(self.beta_slow, base, width)), width - 1)
            last_or_more = max(float(last), first + 0.001)
            j = torch.arange(width // 2, dtype=torch.float64, device=device)
            keep = 1 - (j - first) / (last_or_more - first)
        return _blend(theta, self.factor, keep)

    def _pair(self, turns: float, base: float, width: int) -> float:
        """The (fractional) pair that makes so many turns over the trained length."""
        if base <= 1:
            raise ValueError(f"rotary base={base} must exceed 1 to be scaled by parts")
        return width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True)
class Yarn(NtkByParts):
    """YaRN: NTK-by-parts, and cosines and sines times 0.1 ln s + 1 (`attention_factor`).

    Queries and keys are both multiplied once, so that products of two rotated features grow by the
    square. In softmax attention that is the paper's temperature on the logits. In linear attention
    with rotation after phi it multiplies the numerator only: with denominator "unrotated" or "none"
    the whole output is multiplied by (0.1 ln s + 1)^2 (1.30 for s = 4) - a gain, which leaves the
    proportions of the weights as they are; with "rotated" it cancels, and with `output_norm` too.
    With a partial rotation it weighs rotated features more than the others. attention_factor=1
    turns it off.

    Source: arXiv 2309.00071, section 3.4, eq. 22; "yarn" of the transformers library.
    """

    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_factor is not None:
            _number(self, "attention_factor", 0, "1 turns it off", strict=True)

    @property
    def multiplier(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Llama3(Scaling):
    """The rule of Llama 3.1: as NTK-by-parts, with the ramp in the number of turns.

        theta_j <- (1 - g_j) theta_j / s + g_j theta_j,
        g_j = (r_j - low) / (high - low), cut to [0, 1];  r_j = L_0 theta_j / 2 pi

    with low, high = `low_freq_factor`, `high_freq_factor`; Llama 3.1: s = 8, low 1, high 4,
    L_0 = 8192.

    Source: Llama 3 (arXiv 2407.21783) as published in its reference code; "llama3" of the
    transformers library.
    """

    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _length(self)
        low = self.low_freq_factor
        _number(self, "low_freq_factor", 0, "turns over the trained length", strict=True)
        _number(self, "high_freq_factor", low, "turns, more than low_freq_factor", strict=True)

    def frequencies(self, base: float, width: int, device: Device, length: Tensor | None) -> Tensor:
        theta = powers(base, width, device)
        turns = self.original_length * theta / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(theta, self.factor, keep)


SCALINGS: dict[str, type[Scaling]] = {
    "linear": Linear,
    "ntk": Ntk,
    "dynamic": Dynamic,
    "ntk-by-parts": NtkByParts,
    "yarn": Yarn,
    "llama3": Llama3,
}


def make_scaling(name: str, **options: Any) -> Scaling:
    """The rule called `name`, such as make_scaling("yarn", factor=4, original_length=2048).

    Raises:
        ValueError: an unknown name or option, a missing one, or a value that does not fit.
    """
    return build("scaling", name, SCALINGS, options)


def build(what: str, name: str, known: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """known[name](**options), unknown names and options refused with a list of the known ones."""
    if name not in known:
        raise ValueError(f"{what}={name!r} is unknown; choose one of: {', '.join(known)}")
    parameters = inspect.signature(known[name]).parameters
    unknown = sorted(set(options) - set(parameters))
    if unknown:
        raise ValueError(
            f"{what} {name!r} does not know the option {', '.join(unknown)}; "
            f"its options are: {', '.join(parameters) or 'none'}"
        )
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in options]
    if missing:
        raise ValueError(f"{what} {name!r} needs the option {', '.join(missing)}")
    return known[name](**options)


def powers(base: float, width: int, device: Device = None) -> Tensor:
    """base^(-2j / width), float64, (width / 2,)."""
    # A default dtype or autocast of half precision must not reach this line.
    j = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    return base ** (-j / width)


def _blend(theta: Tensor, factor: float, keep: Tensor) -> Tensor:
    keep = keep.clamp(0.0, 1.0)
    return theta * keep + theta / factor * (1 - keep)


def _number(rule: Scaling, name: str, least: float, meaning: str, strict: bool = False) -> None:
    value = getattr(rule, name)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or value < least or (strict and value == least):
        limit = f"above {least:g}" if strict else f"at least {least:g}"
        raise ValueError(f"{name}={value!r} must be a number {limit} ({meaning})")


def _length(rule: Any) -> None:
    value = rule.original_length
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"original_length={value!r} must be an integer of at least 1: the trained length"
        )
