"""The one hot primitive: the unnormalised causal product, in several forms of one signature.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T          (features x value width, one matrix a head)
    o_t = q_t S_t

Feature maps, rotation and denominators are somebody else's business (`linear_rope.functional`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linear_rope.causal.chunked import chunked
from linear_rope.causal.recurrent import recurrent
from linear_rope.causal.reference import reference

__all__ = ["BACKENDS", "causal_product"]

Form = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", int], tuple[Tensor, Tensor]
]

BACKENDS: dict[str, Form] = {
    "reference": reference,
    "chunked": chunked,
    "recurrent": recurrent,
}

CHUNK_SIZE = 64

# exp(-1000) is 0 in every dtype, so a stronger decay (down to -inf, "forget everything") is the
# same as this one, and sums and differences of log decays stay finite.
FORGET = -1000.0


def causal_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    fresh: Tensor | None = None,
    state: Tensor | None = None,
    backend: str = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Unnormalised causal linear attention, with an optional scalar decay per head and token.

        o_t = exp(G_t) q_t S_0 + sum_{n<=t} exp(G_t - G_n) (q_t . k_n) v_n
        S_T = exp(G_T) S_0     + sum_n      exp(G_T - G_n) k_n v_n^T,   G_t = g_1 + ... + g_t

    Args:
        q, k: queries and keys (usually rotated features), (batch, head, time, features).
        v: values, (batch, head, time, value width).
        log_decay: g <= 0, (batch, head, time); None is no decay. -inf forgets the past exactly.
            Signs are the caller's promise: they are checked in `linear_attention`, not here.
        fresh: (batch, time) bool, True where a new document begins: the state is forgotten there,
            exactly, and nothing of it comes back through rounding.
        state: S_0, (batch, head, features, value width); None is zeros.
        backend: "reference" (quadratic, the judge), "chunked" (to train; differentiable once),
            "recurrent" (to decode), or "auto": recurrent for a single token, else chunked.
        chunk_size: tokens a chunk of the chunked form (default 64); the result does not depend on
            it but for rounding.

    Returns:
        (o, S_T): o (batch, head, time, value width) and the final state, both in the inputs' dtype
        but at least float32, because unnormalised sums overflow float16. Any time from 0 up.
        Gradients flow to every input and through both states.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236, eq. 9-12); the decay as in Sun et al. 2023
    (RetNet, arXiv 2307.08621, eq. 6-7).
    """
    _check(q, k, v, log_decay, fresh, state, chunk_size)
    dtype = torch.float32
    for x in (q, k, v, log_decay, state):
        if x is not None:
            dtype = torch.promote_types(dtype, x.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if log_decay is not None:
        log_decay = log_decay.to(dtype).clamp(min=FORGET)
    if fresh is not None:
        if log_decay is None:
            log_decay = torch.zeros(q.shape[:3], dtype=dtype, device=q.device)
        log_decay = log_decay.masked_fill(fresh[:, None, :], FORGET)
    if state is not None:
        state = state.to(dtype)
    if backend == "auto":
        backend = "recurrent" if q.shape[-2] == 1 else "chunked"
    if backend not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ValueError(f"backend={backend!r} is unknown; choose one of: {known}")
    return BACKENDS[backend](q, k, v, log_decay, state, chunk_size or CHUNK_SIZE)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    fresh: Tensor | None,
    state: Tensor | None,
    chunk_size: int | None,
) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            "q, k and v must have shape (batch, head, time, width), got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[:3] != k.shape[:3]:
        raise ValueError(
            "q and k must agree in batch, head and time for a causal product, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}; "
            "for cross-attention use linear_attention(causal=False)"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q has {q.shape[3]} features and k has {k.shape[3]}; give both the same width"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            "v must agree with k in batch, head and time, got "
            f"v {tuple(v.shape)} for k {tuple(k.shape)}"
        )
    if log_decay is not None and log_decay.shape != q.shape[:3]:
        raise ValueError(
            f"log_decay must have shape (batch, head, time) = {tuple(q.shape[:3])}, "
            f"got {tuple(log_decay.shape)}"
        )
    want = (*k.shape[:2], k.shape[3], v.shape[3])
    if state is not None and state.shape != want:
        raise ValueError(
            f"state must have shape (batch, head, features, value width) = {want}, "
            f"got {tuple(state.shape)}"
        )
    for name, x in (("q", q), ("k", k), ("v", v), ("log_decay", log_decay), ("state", state)):
        if x is None:
            continue
        if x.device != q.device:
            raise ValueError(
                f"{name} is on {x.device} but q is on {q.device}; move both to one device"
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got dtype {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must share a dtype, got {q.dtype}, {k.dtype} and {v.dtype}; convert one "
            "with .to()"
        )
    if fresh is not None and (
        fresh.dtype != torch.bool
        or fresh.shape != (q.shape[0], q.shape[2])
        or fresh.device != q.device
    ):
        want_fresh = (q.shape[0], q.shape[2])
        raise ValueError(
            f"fresh must be bool of shape (batch, time) = {want_fresh} on {q.device}, "
            f"got {fresh.dtype} of shape {tuple(fresh.shape)} on {fresh.device}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
