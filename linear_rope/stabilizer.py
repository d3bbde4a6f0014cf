"""phi(q) and phi(k), stabilized: what is subtracted from exponents, and what that does to sums."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_rope.feature_base import Map, peak_floor
from linear_rope.segments import segment_max, segmented_cummax

__all__ = ["both_features"]


def both_features(
    phi: Map,
    q: Tensor,
    k: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    fresh: Tensor | None,
    denominator: str,
    top: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | float, Tensor | None, Tensor]:
    """phi(q), phi(k), the factor that undoes their scaling, the log decay, the new stabilizer.

    Exponential features need a maximum subtracted. One over all keys would let later tokens move
    earlier outputs; one a key would reweight the keys. A running maximum c_t does neither: keys
    enter as exp(log phi(k_t) - c_t), and what is already in the sums is scaled by exp(c_{t-1} -
    c_t), a decay that numerator and denominator share. Under a log decay the maximum sinks with
    what it stands for: c_t = max(c_{t-1} + g_t, log phi(k_t)), or a loud key would press on the
    later ones when it is long forgotten. A maximum a query cancels in the ratio.
    All of them cancel exactly, so no gradient needs to flow through them.
    """
    hidden = None if key_mask is None else ~key_mask[:, None, :]  # (batch, 1, key time)
    if log_decay is not None:
        log_decay = log_decay.to(q.dtype)
        if hidden is not None:
            log_decay = log_decay.masked_fill(hidden, 0.0)  # a pad is no step in time
    scale: Tensor | float = 1.0
    if not getattr(phi, "log_space", False):
        phi_q, phi_k = phi(q), phi(k)
        # A new state shares no memory with the old one.
        top = phi_k.new_zeros(k.shape[:2]) if top is None else top.clone()
    else:
        log_q, log_k = phi.log_features(q), phi.log_features(k)  # type: ignore[union-attr]
        floor = peak_floor(log_q.dtype)
        if top is None:
            top = log_k.new_full(k.shape[:2], -torch.inf)
        peaks = log_k.detach().amax(-1)  # (batch, head, key time)
        if hidden is not None:
            peaks = peaks.masked_fill(hidden, -torch.inf)
        start_of = None if fresh is None else fresh[:, None, :]
        if causal:
            peaks = torch.cat([top.unsqueeze(-1), peaks], dim=-1)
            running = _running_maximum(peaks, log_decay, start_of)
            # A copy, for the state: a view would keep the maxima of the whole sequence alive.
            top = running[..., -1].clone(memory_format=torch.contiguous_format)
        elif start_of is None:
            running = torch.cat([top.unsqueeze(-1), peaks], dim=-1).amax(-1, keepdim=True)
        else:
            running = segment_max(peaks, start_of)
        # Before the first real key there is nothing to scale: any finite number will do.
        finite = running.masked_fill(running == -torch.inf, 0.0)
        if causal:
            step = finite[..., :-1] - finite[..., 1:]
            step = step.masked_fill(running[..., :-1] == -torch.inf, 0.0)
            # Rounding may lift it above 0 by a hair; a clamp there would cut the decay's gradient.
            step = step.to(log_q.dtype)  # a state's maximum may be wider, and is subtracted as such
            log_decay = step if log_decay is None else log_decay + step
            finite = finite[..., 1:]
        query_peak = log_q.detach().amax(-1, keepdim=True)
        phi_q = (log_q - query_peak).clamp(min=floor).exp()
        below = (log_k - finite.unsqueeze(-1)).to(log_k.dtype)
        if hidden is not None:
            below = below.masked_fill(hidden.unsqueeze(-1), floor)  # a pad may lie above
        phi_k = below.clamp(min=floor).exp()
        if denominator == "none":
            groups = q.shape[1] // k.shape[1]
            top_log = math.log(torch.finfo(log_q.dtype).max) - 1.0  # inf * 0 would be NaN
            scale = query_peak + finite.unsqueeze(-1).repeat_interleave(groups, 1)
            scale = scale.clamp(max=top_log).exp().to(log_q.dtype)
    if hidden is not None:
        phi_k = phi_k.masked_fill(hidden.unsqueeze(-1), 0.0)
    return phi_q, phi_k, scale, log_decay, top


def _running_maximum(peaks: Tensor, log_decay: Tensor | None, fresh: Tensor | None) -> Tensor:
    """c_t = max(c_{t-1} + g_t, peak_t); `peaks` has c_{-1}, of the state, in front."""
    level: Tensor | float = 0.0
    if log_decay is not None:
        wide = log_decay if log_decay.device.type == "mps" else log_decay.double()
        level = F.pad(wide.detach().clamp(min=-1e6).cumsum(-1), (1, 0))
    above = peaks - level  # subtract what has decayed, and the maximum only rises
    if fresh is None:
        risen = above.cummax(-1).values
    else:  # a document's features depend on that document alone
        risen = segmented_cummax(above, F.pad(fresh, (1, 0)))
    return (risen + level).to(peaks.dtype)
