"""Drawing one token from logits: temperature, top-k and nucleus."""

from __future__ import annotations

import torch
from torch import Tensor

from linear_rope.counts import is_count

__all__ = ["check_sampling", "pick"]


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuses sampling options that mean nothing, before the first token is computed."""
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be at least 0 (0 is greedy)")
    if top_k is not None and not (is_count(top_k) and top_k >= 1):
        raise ValueError(f"top_k={top_k!r} must be an integer of at least 1; None keeps all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be in (0, 1]; None keeps all tokens")


def pick(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """One token a row from logits (batch, vocab): greedy at temperature 0, else a draw."""
    if temperature < 1e-6:  # below that the division overflows, and the result is the same
        return logits.argmax(-1)
    logits = logits.float()
    if temperature != 1:
        # Relative to the largest logit, so that a tiny temperature overflows to -inf only.
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        best = logits.topk(top_k, dim=-1).indices  # by index: of equal logits no more than k stay
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)
        logits = logits.masked_fill(~kept, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        # A token stays if those before it have not reached p yet: the first one always stays.
        late = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(late.gather(-1, order.argsort(-1)), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
