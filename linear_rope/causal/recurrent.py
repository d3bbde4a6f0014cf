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
    factor, rest = (None, None) if log_decay is None else factors(log_decay[..., None, None])
    rows = []
    for t in range(q.shape[-2]):
        new = k[:, :, t, :, None] * v[:, :, t, None, :]
        if factor is None or rest is None:
            S = S + new
        else:
            S = torch.addcmul(torch.addcmul(new, S, rest[:, :, t]), S, factor[:, :, t])
        rows.append(q[:, :, t, None, :] @ S)
    return torch.cat(rows, dim=-2), S


def factors(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """exp(g) as a sum of two numbers: 1 and expm1(g), or for strong decays exp(g) and 0.

    A constant exp(g) close to 1 is rounded the same way in each step, by 2^-25 in float32, and so
    would be off by 2^-25 tau over the time-scale tau = -1/g: 1.2e-4 for 4096 tokens. expm1(g) is
    small, and so is what is rounded of it; forward and backward.
    """
    weak = log_decay > -0.5
    ones = torch.ones_like(log_decay)
    factor = torch.where(weak, ones, log_decay.exp())
    return factor, torch.where(weak, log_decay.expm1(), torch.zeros_like(log_decay))
