"""Non-causal sums of each document in a row: every query sees its whole document and nothing else.

    o_m = q_m S_d,   S_d = sum_{n in d} k_n v_n^T,   d the document of token m

That is as much work as for a row of one document, if nothing is copied on the way: so the loop over
documents is inside one differentiable operation that works on slices.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linear_rope.causal import checked_product
from linear_rope.positions import can_read, has_values

__all__ = ["full_product", "product_by_document"]

# Tokens a document on average, below which a loop over documents costs more than it saves.
FEWEST = 32


def full_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: Tensor | None,
    log_decay: Tensor | None,
    fresh: Tensor | None,
    backend: str,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """The non-causal counterpart of `causal_product`: every query sees its whole document."""
    if fresh is None:
        S = k.mT @ v
        return q @ S, S
    if backend not in ("reference", "recurrent"):  # those are differentiable twice
        done = product_by_document(q, k, v, fresh)
        if done is not None:
            return done
    # What a token sees is what is before it and what is behind it, and itself once.
    one_way = partial(checked_product, backend=backend, chunk_size=chunk_size)
    before, S = one_way(q, k, v, fresh=fresh)
    # Backward in time a document begins where forward the next one does, one token earlier.
    fresh = fresh.roll(-1, 1).flip(1)  # (a row's first token never begins one)
    behind, _ = one_way(q.flip(2), k.flip(2), v.flip(2), fresh=fresh)
    return before + behind.flip(2) - (q * k).sum(-1, keepdim=True) * v, S


def product_by_document(
    q: Tensor, k: Tensor, v: Tensor, fresh: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The outputs and each row's last S, differentiable once; None where a loop is no good.

    That is for many short documents, and where their limits cannot be looked at: on a GPU, inside a
    compiled graph or a transform.

    Args:
        q, k: (batch, head, time, features). v: (batch, head, time, value width).
        fresh: (batch, time) bool, True where a document begins, but for the row's first.
    """
    if not can_read(fresh) or not all(map(has_values, (q, k, v))):
        return None
    if fresh.numel() < FEWEST * (int(fresh.sum()) + fresh.shape[0]):
        return None
    limits = [(0, *row.nonzero()[:, 0].tolist(), q.shape[2]) for row in fresh]
    return _PerDocument.apply(q, k, v, limits)


class _PerDocument(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, limits: list[tuple[int, ...]]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.limits = limits
        out = v.new_empty(*q.shape[:3], v.shape[3])
        last = v.new_zeros(*q.shape[:2], k.shape[3], v.shape[3])
        for row, borders in enumerate(limits):
            for start, end in pairwise(borders):
                at = (row, slice(None), slice(start, end))
                S = k[at].mT @ v[at]
                torch.matmul(q[at], S, out=out[at])
            last[row] = S
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        g, g_last = grads
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for row, borders in enumerate(ctx.limits):
            for start, end in pairwise(borders):
                at = (row, slice(None), slice(start, end))
                S, dS = k[at].mT @ v[at], q[at].mT @ g[at]
                if end == borders[-1]:
                    dS = dS + g_last[row]
                torch.matmul(g[at], S.mT, out=dq[at])
                torch.matmul(v[at], dS.mT, out=dk[at])
                torch.matmul(k[at], dS, out=dv[at])
        return dq, dk, dv, None
