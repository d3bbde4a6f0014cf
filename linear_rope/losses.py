"""The loss over the vocabulary piece by piece, so that logits never exist for a whole sequence.

A million tokens of 256 symbols are a gigabyte of logits, and as much again for their gradient; with
a vocabulary of 32,000 it is a hundred times that. Nothing but the sum of their losses is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linear_rope.arguments import check_key_mask
from linear_rope.segments import resolve_segments

__all__ = ["linear_cross_entropy", "next_tokens"]

IGNORED = -100

# Logits that exist at a time: 2^22 of them are 16 MiB in float32.
LOGITS = 2**22


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, targets) in nats, chunk by chunk.

    The backward pass forms each chunk's logits again (one more product of a third of the cost).
    Unlike the chunked option of `torch.nn.functional.linear_cross_entropy` (torch 2.13 and later)
    this is plain torch: it compiles, and can be differentiated any number of times. Under a
    transform of `torch.func`, which knows of no such second forming, all logits are kept.

    Args:
        hidden: (..., dim). weight: (vocabulary, dim). bias: (vocabulary,).
        targets: (...) int64, in [0, vocabulary) or `ignore_index`.
        reduction: "mean" over the targets that count (NaN if there are none, as in torch), "sum",
            or "none" for one loss a token (0 where ignored).
        chunk_size: tokens at a time; default: as many as have 2^22 logits (16 MiB in float32).

    Returns:
        A scalar, or (...) for "none"; in float32 at least.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, chunk_size below 1.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; choose one of: mean, sum, none")
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the shape of hidden without its last axis, "
            f"{tuple(hidden.shape[:-1])}, got {tuple(targets.shape)}"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must have shape (vocabulary, {hidden.shape[-1]}), got {tuple(weight.shape)}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64, got {targets.dtype}; convert with .long()")
    size = max(1, LOGITS // weight.shape[0]) if chunk_size is None else chunk_size
    if size < 1:
        raise ValueError(f"chunk_size={size} must be at least 1 token")

    flat, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    piece: Callable[..., Tensor] = _losses
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        piece = partial(checkpoint, _losses, use_reentrant=False, preserve_rng_state=False)
    losses = [
        piece(rows, weight, wanted, bias, ignore_index, reduction == "none")
        for rows, wanted in zip(flat.split(size), labels.split(size), strict=True)
    ]
    if reduction == "none":
        return torch.cat(losses).view(targets.shape)
    total = torch.stack(losses).sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def _losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    each: bool,
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits, targets, ignore_index=ignore_index, reduction="none" if each else "sum"
    )


def next_tokens(
    tokens: Tensor,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What a language model is to predict from all but the last of the tokens (batch, time).

    The others are as in a call of the model, for all tokens or for all but the last, which is then
    as the one before it.

    Returns:
        targets (batch, time - 1) int64: each real token's successor among the real ones of its
        document, -100 where there is none and at pads; and the mask and the documents, the same
        shape, of what is read.

    Raises:
        ValueError: a mask, ids or limits that do not fit.
    """
    batch, length = tokens.shape
    device = tokens.device
    key_mask, segment_ids = (_with_last(x, length) for x in (key_mask, segment_ids))
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim == 1 and cu_seqlens.numel():
        short = (cu_seqlens == length - 1) & (cu_seqlens[-1] == length - 1)
        cu_seqlens = cu_seqlens + short.to(cu_seqlens.dtype)
    check_key_mask(key_mask, (batch, length), device)
    documents = resolve_segments(batch, length, segment_ids, cu_seqlens, device, key_mask)
    place = torch.arange(length, device=device).expand(batch, length)
    if key_mask is not None:  # the first real token from each place on
        place = torch.where(key_mask, place, length).flip(1).cummin(1).values.flip(1)
    place = place[:, 1:]
    there = place < length
    place = place.clamp(max=length - 1)
    if key_mask is not None:
        there = there & key_mask[:, :-1]
    if documents is not None:
        there = there & (documents.gather(1, place) == documents[:, :-1])
        documents = documents[:, :-1]
    targets = tokens.gather(1, place).long().masked_fill(~there, IGNORED)
    return targets, None if key_mask is None else key_mask[:, :-1], documents


def _with_last(x: Tensor | None, length: int) -> Tensor | None:
    """A mask, or ids, with that of the last token."""
    if not isinstance(x, Tensor) or not x.ndim or not 0 < x.shape[-1] == length - 1:
        return x
    return torch.cat([x, x[..., -1:]], dim=-1)
