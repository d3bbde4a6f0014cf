"""The loss over the vocabulary piece by piece, so that logits never exist for a whole sequence.

A million tokens of 256 symbols are a gigabyte of logits, and as much again for their gradient; with
a vocabulary of 32,000 it is a hundred times that. Nothing but the sum of their losses is needed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["linear_cross_entropy"]

# Logits that exist at a time: 2^22 of them are 16 MiB in float32.
LOGITS = 2**22


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, targets) in nats, chunk by chunk.

    The backward pass forms each chunk's logits again (one more product of a third of the cost).
    Unlike the chunked option of `torch.nn.functional.linear_cross_entropy` (torch 2.13 and later)
    this is plain torch: it compiles, and can be differentiated any number of times.

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
    losses = [
        checkpoint(
            _losses, rows, weight, wanted, bias, ignore_index, reduction == "none",
            use_reentrant=False, preserve_rng_state=False,
        )
        for rows, wanted in zip(flat.split(size), labels.split(size), strict=True)
    ]  # fmt: skip
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
