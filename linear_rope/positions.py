"""What positions mean: integers a token, counted on, given, begun again with each document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "boundaries",
    "can_read",
    "check_positions",
    "document_positions",
    "has_values",
    "next_position",
    "resolve_positions",
    "several_axes",
]

# From here on float64, in which angles are formed, skips integers.
TOO_FAR = 2**53


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
        ids = several_axes(positions, length, batch, axes, name)
        return ids.to(device=device, dtype=torch.int64)
    if isinstance(positions, Tensor):
        check_positions(positions, length, batch, name)
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


def check_positions(
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


def several_axes(
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
