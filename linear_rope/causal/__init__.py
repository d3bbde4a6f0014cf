"""The one hot primitive: the unnormalised causal product, in several forms of one signature.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T          (features x value width, one matrix a head)
    o_t = q_t S_t

Feature maps, rotation and denominators are somebody else's business (`linear_rope.functional`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from linear_rope.causal import fla as _fla
from linear_rope.causal import native as _native
from linear_rope.causal.chunked import chunked
from linear_rope.causal.native import build_native
from linear_rope.causal.operator import FusedForm, work_dtype
from linear_rope.causal.recurrent import recurrent
from linear_rope.causal.reference import reference
from linear_rope.positions import can_read

__all__ = [
    "BACKENDS",
    "FORGET",
    "FUSED",
    "backends",
    "build_native",
    "causal_product",
    "check_chunk_size",
    "check_signs",
    "checked_product",
    "choose_backend",
    "say_single_token",
    "work_dtype",
]

PlainForm = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], tuple[Tensor, Tensor]
]

# Forms of the product alone, in plain torch ...
PLAIN: dict[str, PlainForm] = {"reference": reference, "recurrent": recurrent}

# ... and forms that can also do the feature map, the rotation and the division in the same pass.
FUSED: dict[str, FusedForm] = {"chunked": chunked, "native": _native.native, "fla": _fla.fla}

BACKENDS: tuple[str, ...] = ("reference", "chunked", "recurrent", "native", "fla")

logger = logging.getLogger("linear_rope")

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
            Signs are checked where that costs no wait, see `check_signs`.
        fresh: (batch, time) bool, True where a new document begins: the state is forgotten there,
            exactly, and nothing of it comes back through rounding.
        state: S_0, (batch, head, features, value width); None is zeros.
        backend: "reference" (quadratic, the judge), "chunked" (to train; differentiable once),
            "recurrent" (token after token, in plain torch), "native" (the chunkwise form in C++,
            see `build_native`), "fla" (flash-linear-attention's kernels, on a GPU), or "auto", see
            `choose_backend`.
        chunk_size: tokens a chunk of the chunkwise forms (default: by shape); the result does not
            depend on it but for rounding.

    Returns:
        (o, S_T): o (batch, head, time, value width) and the final state, both in the inputs' dtype
        but at least float32, because unnormalised sums overflow float16. Any time from 0 up.
        Gradients flow to every input and through both states.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a positive log_decay, an unknown
            backend.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236, eq. 9-12); the decay as in Sun et al. 2023
    (RetNet, arXiv 2307.08621, eq. 6-7).
    """
    _check(q, k, v, log_decay, fresh, state, chunk_size)
    return checked_product(
        q, k, v, log_decay=log_decay, fresh=fresh, state=state, backend=backend,
        chunk_size=chunk_size,
    )  # fmt: skip


def checked_product(
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
    """`causal_product` for callers that have checked what they were given.

    What they make of it may break the promise by rounding: a decay of nothing and the differences
    of a stabilizer add up to 5e-8.
    """
    dtype = torch.float32
    for x in (q, k, v, log_decay, state):
        if x is not None:
            dtype = torch.promote_types(dtype, x.dtype)
    if log_decay is not None:
        log_decay = log_decay.to(dtype).clamp(min=FORGET)
    if state is not None:
        state = state.to(dtype)
    backend = choose_backend(backend, q)
    if backend in FUSED:
        if work_dtype(q.dtype) != dtype:  # something else is wider
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        out, state, _ = FUSED[backend](
            q, k, v, g=log_decay, fresh=fresh, S0=state, chunk=chunk_size or 0
        )
        return out, state
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if fresh is not None:
        if log_decay is None:
            log_decay = torch.zeros(q.shape[:3], dtype=dtype, device=q.device)
        log_decay = log_decay.masked_fill(fresh[:, None, :], FORGET)
    return PLAIN[backend](q, k, v, log_decay, state)


def backends() -> dict[str, str]:
    """Every backend, and why it cannot be used here, in one sentence; "" if it can.

    It looks for compiled kernels and for a GPU, and compiles only if LINEAR_ROPE_NATIVE=1.
    """
    reasons = {"native": _native.why_not(), "fla": _fla.why_not() or ""}
    return {name: reasons.get(name, "") for name in BACKENDS}


def choose_backend(backend: str, q: Tensor) -> str:
    """The backend meant by "auto": the fastest that is ready for queries like q.

    A single token is recurrent; where `linear_attention` or a model decodes it with nothing to
    differentiate, and the native kernels are ready, the same step is one call of theirs
    (`linear_rope.decoding`). More tokens are "fla" on a GPU if it is installed, "native" on a CPU
    if it is compiled, else "chunked". Nothing is compiled unasked. The logger "linear_rope" says
    once what was chosen (at level INFO). A name is taken at its word.

    Raises:
        ValueError: an unknown name.
    """
    if backend == "auto":
        if q.shape[-2] == 1:
            if not torch.compiler.is_compiling():
                say_single_token("recurrent", q.device.type)
            return "recurrent"
        backend = _fastest(q.device.type, q.dtype)
        if not torch.compiler.is_compiling():
            _say(backend, q.device.type)
    elif backend not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ValueError(f"backend={backend!r} is unknown; choose one of: {known}")
    return backend


def _fastest(device: str, dtype: torch.dtype) -> str:
    if device == "cuda" and dtype != torch.float64 and _fla_ready():
        return "fla"
    if device == "cpu" and _native.is_ready():
        return "native"
    return "chunked"


@cache
def _fla_ready() -> bool:
    return _fla.why_not() is None


@cache
def _say(backend: str, device: str) -> None:
    logger.info('backend="auto" is %s for tensors on %s', backend, device)


@cache
def say_single_token(step: str, device: str) -> None:
    """Log once what "auto" makes single tokens of, for the quick ways that ask no backend."""
    logger.info('backend="auto" is %s for single tokens on %s', step, device)


def check_signs(log_decay: Tensor) -> None:
    """Refuses a decay that grows; on a GPU or in a trace it is the caller's promise.

    A NaN passes, and makes NaNs, as one in q, k or v does: a gate has it from its input.
    """
    if can_read(log_decay) and bool((log_decay > 0).any()):
        largest = float(log_decay.detach().nan_to_num(-math.inf).max())
        raise ValueError(
            f"log_decay must be <= 0 (a factor of at most 1), got {largest:.4g}; for a gate use "
            "logsigmoid"
        )


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
    if log_decay is not None:
        check_signs(log_decay)
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
    check_chunk_size(chunk_size)


def check_chunk_size(chunk_size: int | None) -> None:
    """Refuses a chunk without a token; None leaves the length to the form."""
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size must be at least 1, and an integer, got {chunk_size!r}")
