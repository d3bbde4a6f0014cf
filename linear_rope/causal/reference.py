"""The quadratic form: a dozen obvious lines that judge every other form."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """O(T^2) time and memory; plain torch, so it can be differentiated any number of times."""
    scores = (q @ k.mT).tril()  # (B, H, T, T): query i sees keys j <= i
    to_query: Tensor | float = 1.0  # what is left of the initial state at each query,
    to_end: Tensor | float = 1.0  # of each key at the end,
    whole: Tensor | float = 1.0  # and of the initial state at the end
    if log_decay is not None:
        total = widened(log_decay).cumsum(-1)  # (B, H, T)
        # exp only of the lower triangle: above it the differences are positive and may overflow
        scores = scores * (total[..., :, None] - total[..., None, :]).tril().exp().to(q.dtype)
        to_query = total.exp().to(q.dtype)[..., None]
        to_end = (total[..., -1:] - total).exp().to(q.dtype)[..., None]
        whole = total[..., -1:].exp().to(q.dtype)[..., None] if total.shape[-1] else 1.0
    out = scores @ v
    final = (k * to_end).mT @ v
    if state is not None:
        out = out + (q * to_query) @ state
        final = final + whole * state
    return out, final


def widened(log_decay: Tensor) -> Tensor:
    """In float64 (Apple's GPUs have none): sums of log decays grow, and their differences count."""
    return log_decay if log_decay.device.type == "mps" else log_decay.to(torch.float64)


def empty_state(k: Tensor, v: Tensor) -> Tensor:
    """The state before the first token: zeros of shape (batch, head, features, value width)."""
    return torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=k.dtype, device=k.device)
