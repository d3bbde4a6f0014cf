"""Several documents in one row: where each begins, and what that does to positions and sums."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from linear_rope.positions import boundaries, can_read

__all__ = ["resolve_segments", "segment_max", "segmented_cummax", "unpack"]


def resolve_segments(
    batch: int,
    length: int,
    segment_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    device: torch.device,
    key_mask: Tensor | None = None,
) -> Tensor | None:
    """The document of every token, (batch, time) int64, or None for one document a row.

    Args:
        segment_ids: (batch, time) or (time,) integers; a document is a run of one id.
        cu_seqlens: (documents + 1,) the documents' limits in a flat row (batch must be 1), from 0
            to time, ascending; equal neighbours are an empty document, which leaves no trace: a
            state goes on in the first document that has a token, and the new one is that of the
            last such document. The name and layout are those of FlashAttention's variable-length
            functions.
        key_mask: (batch, time), True at real tokens. A flat row holds no padding within its
            documents; a document of padding alone (to fill a fixed size) is none within.

    Raises:
        ValueError: both are given, a wrong shape or dtype, an id that comes back after another,
            limits that do not start at 0, end at time, or ascend, a mask that hides a part of a
            document of `cu_seqlens`.
    """
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("give segment_ids (padded layout) or cu_seqlens (flat layout), not both")
    if segment_ids is not None:
        _integers("segment_ids", segment_ids)
        if tuple(segment_ids.shape) not in ((batch, length), (length,)):
            raise ValueError(
                f"segment_ids must have shape (batch, time) = ({batch}, {length}) or ({length},), "
                f"got {tuple(segment_ids.shape)}"
            )
        ids = segment_ids.to(device=device, dtype=torch.int64).expand(batch, length)
        if can_read(ids) and ids.numel():
            # Sorted, a row has as many runs as ids.
            runs = boundaries(ids).sum(-1)
            torn = (runs != boundaries(ids.sort(-1).values).sum(-1)).nonzero()
            if len(torn):
                raise ValueError(
                    f"segment_ids must be contiguous, but in row {int(torn[0])} an id comes back "
                    "after another one; give each document its own id"
                )
        return ids
    if cu_seqlens is None:
        return None
    _integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens must have shape (documents + 1,), got {tuple(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(
            f"cu_seqlens describes one flat row, but the batch is {batch}; flatten it to batch 1 "
            "or use segment_ids"
        )
    if can_read(cu_seqlens):
        limits = cu_seqlens.tolist()
        if limits[0] != 0 or limits[-1] != length:
            raise ValueError(
                f"cu_seqlens must start at 0 and end at time = {length}, got {limits[0]} and "
                f"{limits[-1]}"
            )
        if any(a > b for a, b in pairwise(limits)):
            raise ValueError(f"cu_seqlens must ascend, got {limits}")
        if key_mask is not None and can_read(key_mask):
            _whole_documents(cu_seqlens, key_mask[0])
    ends = cu_seqlens[1:].to(device=device, dtype=torch.int64).contiguous()
    return torch.searchsorted(ends, torch.arange(length, device=device), right=True)[None]


def unpack(tokens: Tensor, cu_seqlens: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """A flat row of documents as a right-padded batch, and its mask: (documents, longest) each.

    Raises:
        ValueError: as in `resolve_segments`, and for a document without a token.
    """
    batch, length = tokens.shape
    resolve_segments(batch, length, None, cu_seqlens, tokens.device, key_mask)
    lengths = cu_seqlens.diff().tolist()
    if min(lengths) < 1:
        raise ValueError(
            f"cu_seqlens must leave each prompt at least one token, got none in document "
            f"{lengths.index(0)}; leave empty ones out"
        )
    rows = tokens[0].split(lengths)
    real = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    if key_mask is not None:
        real = list(key_mask[0].split(lengths))
    return pad_sequence(rows, batch_first=True), pad_sequence(real, batch_first=True)


def _whole_documents(cu_seqlens: Tensor, real: Tensor) -> None:
    tokens = cu_seqlens.diff()
    seen = F.pad(real.cumsum(0), (1, 0))[cu_seqlens.long()].diff()
    torn = ((seen > 0) & (seen < tokens)).nonzero()
    if len(torn):
        n = int(torn[0])
        raise ValueError(
            f"key_mask contradicts cu_seqlens: it hides {int(tokens[n] - seen[n])} of the "
            f"{int(tokens[n])} tokens of document {n}; leave padding out of a flat row, or use "
            "segment_ids, where a row may hold padding"
        )


def segmented_cummax(x: Tensor, fresh: Tensor) -> Tensor:
    """Running maximum over the last axis that begins again where `fresh` is True; float64 inside.

    Each document is lifted above the one before it by more than the values' range, so that one
    cummax serves all; x is finite or -inf.
    """
    wide = x if x.device.type == "mps" else x.double()
    low = torch.where(wide == -torch.inf, torch.inf, wide).amin(-1, keepdim=True)
    low = torch.where(low == torch.inf, 0.0, low)
    lift = (wide.amax(-1, keepdim=True) - low).clamp(min=0.0) + 2.0
    number = fresh.cumsum(-1).to(wide.dtype)
    # -inf becomes a finite number below the document's values, but above the document before.
    floor = low - 1.0
    highest = (wide.maximum(floor) + number * lift).cummax(-1).values - number * lift
    return torch.where(highest < low - 0.5, -torch.inf, highest).to(x.dtype)


def segment_max(x: Tensor, fresh: Tensor) -> Tensor:
    """The maximum of each document over the last axis, at every one of its tokens."""
    number = fresh.to(torch.int64).cumsum(-1).expand(x.shape)
    most = torch.full_like(x, -torch.inf).scatter_reduce(-1, number, x, "amax")
    return most.gather(-1, number)


def _integers(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor of integers, got {type(x)}; use torch.tensor")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got dtype {x.dtype}; use int32 or int64")
