"""Rotary position embedding: angles from integer positions, and the rotation itself.

R_m turns pair j of a vector by the angle m * theta_j, theta_j = base^(-2j/width), so that
(R_m x) . (R_n y) depends on m - n only (RoFormer, arXiv 2104.09864, eq. 13-16).

Rules that change theta are in `linear_rope.scaling`, other rotations in
`linear_rope.rotary_variants`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from linear_rope.scaling import Scaling, powers

__all__ = ["PAIRINGS", "Rotary", "Rotation", "resolve_positions", "rotate"]

PAIRINGS = ("interleaved", "half")

# From here on float64, in which angles are formed, skips integers.
TOO_FAR = 2**53


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

    axes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2:
            raise ValueError(
                f"rotary width={self.width} must be an even number of at least 2: features turn in "
                f"pairs; use {self.width + 1 if self.width > 0 else 2} features, "
                "or rotate a fraction of them"
            )
        if not 0 < self.fraction <= 1 or self.rotated_width < 2:
            raise ValueError(
                f"rotary fraction={self.fraction} must be in (0, 1] and leave at least one pair of "
                f"the {self.width} features; use position 'none' to rotate nothing"
            )
        if not self.base > 0:
            raise ValueError(f"rotary base={self.base} must be positive (the usual one is 10000)")
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
    def rotated_width(self) -> int:
        """How many features turn: the largest even number within `fraction * width`."""
        # The small addition keeps a fraction such as 0.7 of 10, which is 6.999..., from losing one.
        return int(self.width * self.fraction + 1e-9) // 2 * 2

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
        _several_axes(positions, x.shape[-2], batch, axes)
    else:
        _check_positions(positions, x.shape[-2], batch)
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


def resolve_positions(
    length: int,
    positions: int | Tensor | None = None,
    *,
    start: Tensor | None = None,
    key_mask: Tensor | None = None,
    documents: Tensor | None = None,
    batch: int | None = None,
    device: torch.device | str | None = None,
    axes: int = 1,
    name: str = "positions",
) -> Tensor:
    """The integer position of every token, (time,) or (batch, time) int64.

    Args:
        length: time.
        positions: None counts on from `start`; an int or a 0-d tensor is the position of the first
            token; (batch, 1) is that of each row; (time,) or (batch, time) are ids, used as given.
            Whatever is given replaces `start`.
        start: (batch,) the first position of each row (a state's `position`); None is 0.
        key_mask: (batch, time), True at real tokens: only those count (the first real token of a
            left-padded row has the row's first position). Explicit ids are not recounted; a pad's
            may be anything, and becomes that of the real token before it, or of the first one, or
            in a row without one `start`.
        documents: (batch, time), one id a document: the count begins again with each of them.
        batch: rows, to check shapes; None accepts any.
        axes: more than 1 (a rotation's `axes`) takes ids only, with that many numbers a token:
            (time, axes) or (batch, time, axes), returned as int64.
        name: what errors call `positions`.

    Raises:
        ValueError: positions that are not integers, negative, 2^53 or more, or of another shape.
    """
    first: int | Tensor
    if axes > 1:
        ids = _several_axes(positions, length, batch, axes, name)
        return ids.to(device=device, dtype=torch.int64)
    if isinstance(positions, Tensor):
        _check_positions(positions, length, batch, name)
        first = positions.to(device=device, dtype=torch.int64)
        if positions.ndim > 0 and positions.shape[-1] == length:
            return first if key_mask is None or not length else _at_pads(first, key_mask, start)
    elif positions is not None:
        if isinstance(positions, bool) or not isinstance(positions, int):
            raise ValueError(
                f"{name}={positions!r} must be an integer (the first token's position) or an "
                "integer tensor"
            )
        _check_range(name, positions, positions)
        first = positions
    else:
        first = 0 if start is None else start.to(device=device).unsqueeze(-1)
    if documents is not None:
        origin = _tensor(first, device).reshape(-1, 1)
        return document_positions(documents, key_mask, origin)
    if key_mask is None:
        count = torch.arange(length, device=device)
    else:
        count = (key_mask.to(torch.int64).cumsum(-1) - 1).clamp(min=0)
    return count + first


def _at_pads(ids: Tensor, key_mask: Tensor, start: Tensor | None) -> Tensor:
    """Ids (batch, time) in which a pad has that of a real token: what is there may be anything."""
    order = torch.arange(key_mask.shape[1], device=key_mask.device)
    before = torch.where(key_mask, order, -1).cummax(-1).values
    first = key_mask.to(torch.int64).argmax(-1, keepdim=True)  # 0 if there is none
    ids = ids.expand(key_mask.shape).gather(1, torch.where(before < 0, first, before))
    if start is None:
        return ids
    return torch.where(key_mask.any(-1, keepdim=True), ids, start.to(ids.device).unsqueeze(-1))


def document_positions(documents: Tensor, key_mask: Tensor | None, origin: Tensor) -> Tensor:
    """Positions that begin again with each document, (batch, time) int64.

    A row's first document counts from `origin`, (1 or batch, 1); only real tokens count.
    """
    real = torch.ones_like(documents) if key_mask is None else key_mask.to(torch.int64)
    upto = real.cumsum(-1)
    fresh = boundaries(documents)
    # Tokens counted before the document: the largest such number so far, for it only grows.
    before = (upto - real).masked_fill(~fresh, 0).cummax(-1).values
    count = (upto - 1 - before).clamp(min=0)
    return count + torch.where(fresh.cumsum(-1) == 0, origin, 0)


def next_position(
    positions: Tensor,
    *,
    batch: int,
    start: Tensor | None,
    key_mask: Tensor | None,
    documents: Tensor | None = None,
    given: int | Tensor | None = None,
) -> Tensor:
    """The position that follows each row's last real token, (batch,) int64.

    Without a real token that is the position of the row's first token, for which every pad before
    the first real token stands: a first position that was given is not forgotten. Neither is it
    without any token; there are no `positions` then, and `given` is what the caller gave for them.
    """
    if positions.shape[-1] == 0:
        ids = isinstance(given, Tensor) and given.ndim > 0 and given.shape[-1] == 0
        if given is None or ids:
            return positions.new_zeros(batch) if start is None else start.clone()
        first = _tensor(given, positions.device)
        return first.reshape(-1).expand(batch).clone()
    positions = positions.expand(batch, -1)
    first = positions[:, 0]
    if documents is not None:
        last = documents == documents[:, -1:]  # the document that a following call goes on with
        first = torch.where(last.all(-1), first, 0)
        key_mask = last if key_mask is None else last & key_mask
    if key_mask is None:
        return positions[:, -1] + 1
    count = torch.arange(1, positions.shape[1] + 1, device=positions.device)
    upto = torch.where(key_mask, count, 0).amax(-1, keepdim=True)  # the last real token, from 1
    seen = positions.gather(1, (upto - 1).clamp(min=0)) + 1
    return torch.where(upto > 0, seen, first[:, None])[:, 0]


def _tensor(number: int | Tensor, device: torch.device | str | None) -> Tensor:
    """As int64 on the device. An int is written there: to copy it would wait for a GPU."""
    if isinstance(number, Tensor):
        return number.to(device=device, dtype=torch.int64)
    return torch.full((), number, dtype=torch.int64, device=device)


def boundaries(documents: Tensor) -> Tensor:
    """(batch, time) bool, True at the first token of each document but the row's first one."""
    first = torch.zeros_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=1)


def _check_positions(
    positions: Tensor, length: int, batch: int | None, name: str = "positions"
) -> None:
    _check_integers(positions, name)
    shape, rows = tuple(positions.shape), "batch" if batch is None else batch
    fits = positions.ndim == 0 or (positions.ndim == 1 and shape[0] == length)
    if positions.ndim == 2:
        fits = shape[1] in (1, length) and (batch is None or shape[0] == batch)
    if not fits:
        raise ValueError(
            f"{name} must be a single integer, or have shape (time,) = ({length},), "
            f"(batch, time) = ({rows}, {length}) or (batch, 1) = ({rows}, 1), got {shape}"
        )


def _several_axes(
    positions: int | Tensor | None,
    length: int,
    batch: int | None,
    axes: int,
    name: str = "positions",
) -> Tensor:
    got: Any = positions
    if isinstance(positions, Tensor):
        _check_integers(positions, name)
        got = tuple(positions.shape)
        rows_fit = positions.ndim == 2 or (positions.ndim == 3 and batch in (None, got[0]))
        if rows_fit and got[-2:] == (length, axes):
            return positions
    rows = "batch" if batch is None else batch
    raise ValueError(
        f"{name} of {axes} axes must be given as integers of shape (time, {axes}) = "
        f"({length}, {axes}) or (batch, time, {axes}) = ({rows}, {length}, {axes}), got {got}; for "
        "an image see linear_rope.rotary_variants.grid_positions"
    )


def _check_integers(positions: Tensor, name: str) -> None:
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(
            f"{name} must be integers, got dtype {positions.dtype}; "
            "pass position ids as int64 (angles are formed from them in float64)"
        )
    if can_read(positions) and positions.numel():
        least, most = positions.to(torch.int64).aminmax()
        _check_range(name, int(least), int(most))


def _check_range(name: str, least: int, most: int) -> None:
    if least < 0:
        raise ValueError(f"{name} must not be negative, got {least}; count from 0")
    if most >= TOO_FAR:
        raise ValueError(
            f"{name} must be below 2^53, got {most}: angles are formed in float64, which skips "
            "integers from there on; count from a nearer origin"
        )


def can_read(x: Tensor) -> bool:
    """Whether looking at x's values costs nothing: on the CPU, outside a trace or a transform."""
    return x.device.type == "cpu" and has_values(x)


def has_values(x: Tensor) -> bool:
    """Whether x's values can be looked at, if need be by waiting for its device."""
    return (
        x.device.type != "meta"
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )
