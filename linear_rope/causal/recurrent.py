"""The recurrent form: one token after another, the form that decodes."""

from __future__ import annotations

import torch
from torch import Tensor

from linear_rope.causal.reference import empty_state, reference


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T;  o_t = q_t S_t.

    Constant memory a token without gradients. With gradients autograd keeps a state a token:
    use the chunkwise form to train.
    """
    if q.shape[-2] == 0:  # no step to take: this keeps the graph, and hands back a state of its own
        return reference(q, k, v, log_decay, state)
    S = empty_state(k, v) if state is None else state
    decay = None if log_decay is None else log_decay.exp()[..., None, None]
    rows = []
    for t in range(q.shape[-2]):
        if decay is not None:
            S = S * decay[:, :, t]
        S = S + k[:, :, t, :, None] * v[:, :, t, None, :]
        rows.append(q[:, :, t, None, :] @ S)
    return torch.cat(rows, dim=-2), S
