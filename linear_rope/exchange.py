"""What ranks tell each other about their pieces of a sequence: states, lengths, positions.

The equation, and who uses this, is in `linear_rope.parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from linear_rope.causal import FORGET
from linear_rope.positions import can_read
from linear_rope.states import AttentionState

__all__ = [
    "AllGather",
    "add_up",
    "count",
    "last_position",
    "pack",
    "place",
    "total_decay",
    "unpack",
]


_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def pack(piece: AttentionState, decay: Tensor) -> Tensor:
    """(batch, key head, numbers): S, z, sum of the log decays, stabilizer, in one tensor."""
    top = piece.stabilizer.to(piece.S.dtype)
    return torch.cat([piece.S.flatten(2), piece.z, decay[..., None], top[..., None]], dim=-1)


def unpack(numbers: Tensor, like: AttentionState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S, z, sum of the log decays, stabilizer."""
    width, features = like.S.shape[-1], like.z.shape[-1]
    S, z, decay, top = numbers.split([features * width, features, 1, 1], dim=-1)
    return S.unflatten(-1, (features, width)), z, decay[..., 0], top[..., 0].detach()


def add_up(begin: AttentionState, pieces: Tensor) -> AttentionState:
    """The state after `begin` and all of the pieces, packed, (ranks, batch, key head, numbers)."""
    S, z, top = begin.S, begin.z, begin.stabilizer
    for numbers in pieces.unbind(0):
        new_S, new_z, decay, new_top = unpack(numbers, begin)
        highest = torch.maximum(top + decay.detach(), new_top)
        finite = highest.masked_fill(highest == -torch.inf, 0.0)  # nothing to scale yet
        keep, enter = (decay + top - finite).exp(), (new_top - finite).exp()
        S = keep[..., None, None] * S + enter[..., None, None] * new_S
        z = keep[..., None] * z + enter[..., None] * new_z
        top = highest
    return begin._replace(S=S, z=z, stabilizer=top)


def total_decay(log_decay: Tensor | None, key_mask: Tensor | None, like: AttentionState) -> Tensor:
    """(batch, key head): G, the sum of the real tokens' log decays."""
    if log_decay is None:
        return torch.zeros_like(like.S[..., 0, 0])
    if key_mask is not None:
        log_decay = log_decay.masked_fill(~key_mask[:, None], 0.0)  # a pad is no step in time
    wide = log_decay if log_decay.device.type == "mps" else log_decay.double()
    return wide.clamp(min=FORGET).sum(-1).to(like.S.dtype)


class AllGather(torch.autograd.Function):
    """(...) -> (ranks, ...). Back: what all ranks want of this rank's tensor, added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wanted = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(wanted, gradient.contiguous(), group=ctx.group)
        return wanted.sum(0), None


def _gather(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


def place(group: Any) -> tuple[int, int]:
    """This process's rank in the group, and the number of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "sequence parallel needs processes that know each other: call "
            "torch.distributed.init_process_group first (and start the program with torchrun)"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the given group; call it on the group's ranks")
    return rank, dist.get_world_size(group)


def count(
    length: int,
    key_mask: Tensor | None,
    state: Any,
    group: Any,
    device: torch.device | str | None,
    alike: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Positions of this rank's first tokens, and of those after the last rank's: (batch,) int64.

    Of one element, for all rows, without mask and state.

    Args:
        alike: sizes, by their names, that all ranks must have alike.
        dtype: of what the ranks compute with, likewise. They exchange numbers of one type only.

    Raises:
        ValueError: torch.distributed is not initialized, or the ranks do not agree; on each rank.
    """
    rank, _ = place(group)
    compared = {"rows of the key_mask": 0 if key_mask is None else len(key_mask), **(alike or {})}
    if dtype is not None:
        compared["element type"] = _TYPES.index(dtype) if dtype in _TYPES else len(_TYPES)
    header = torch.tensor([length, *compared.values()], dtype=torch.int64, device=device)
    headers = _gather(header, group)
    if can_read(headers) and bool((headers[:, 1:] != header[1:]).any()):
        rows = headers[:, 1:].tolist()
        if dtype is not None:
            types = (*(str(each).removeprefix("torch.") for each in _TYPES), "another")
            rows = [[*row[:-1], types[row[-1]]] for row in rows]
        names = ", ".join(compared)
        raise ValueError(
            f"all ranks must agree; by rank, ({names}) = "
            f"{', '.join('(' + ', '.join(map(str, row)) + ')' for row in rows)}: give every rank a "
            "piece of the same sequences"
        )
    counts = headers[:, :1]
    if key_mask is not None:
        counts = _gather(key_mask.sum(-1), group)
    start = 0 if state is None else state.position
    return counts[:rank].sum(0) + start, counts.sum(0) + start


def last_position(length: int, key_mask: Tensor | None, position: Tensor, group: Any) -> Tensor:
    """(batch,): `position`, which follows a rank's last token, of the last rank with a token."""
    count = torch.full_like(position, length) if key_mask is None else key_mask.sum(-1)
    counts, positions = _gather(torch.stack([count, position]), group).unbind(1)
    ranks = torch.arange(len(counts), device=position.device)[:, None]
    last = torch.where(counts > 0, ranks, 0).amax(0, keepdim=True)
    return positions.gather(0, last)[0]
