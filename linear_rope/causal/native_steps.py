"""One token in a native call: the attention of a layer, or a stack of whole blocks.

See `linear_rope.decoding` and `linear_rope.native_blocks`, which decide when these may be called.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from linear_rope.causal import native
from linear_rope.causal.native_calls import DENOMINATOR, PHI, BlockCall, StepCall, level

__all__ = ["run_blocks", "step"]


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    z: Tensor,
    position: Tensor,
    *,
    log_decay: Tensor | None = None,
    theta: Tensor | None = None,
    multiplier: float = 1.0,
    pairing: str = "interleaved",
    phi: str = "none",
    eps: float = 0.0,
    denominator: str = "unrotated",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token a row, without gradients: the output, S, z and position after it.

    Args:
        q, k, v: (batch, head, 1, width), (batch, key head, 1, width), all, like S, z and log_decay
            (batch, key head, 1), float32 or all float64, on the CPU.
        position: (batch,) int64. theta: (pairs,) float64, radians a position, or None.
        phi, eps: the map that is applied to q and k here, see `linear_rope.elementwise`.
    """
    kernels = native.library()
    # Dense, and kept here until the call is over
    q, k, v, S, z, position = (x.contiguous() for x in (q, k, v, S, z, position))
    g = None if log_decay is None else log_decay.contiguous()
    out = v.new_empty((*q.shape[:3], v.shape[3]))
    new = torch.empty_like(S), torch.empty_like(z), torch.empty_like(position)
    call = StepCall(
        q.shape[0],
        q.shape[1],
        k.shape[1],
        q.shape[3],
        v.shape[3],
        0 if theta is None else theta.shape[0],
        PHI[phi],
        DENOMINATOR[denominator],
        pairing == "half",
        torch.get_num_threads(),
        level(),
        q.dtype == torch.float64,
        eps,
        multiplier,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        None if g is None else g.data_ptr(),
        S.data_ptr(),
        z.data_ptr(),
        position.data_ptr(),
        None if theta is None else theta.data_ptr(),
        out.data_ptr(),
        new[0].data_ptr(),
        new[1].data_ptr(),
        new[2].data_ptr(),
    )
    if kernels.linear_rope_step(ctypes.byref(call)):
        raise MemoryError("the native step found no memory for its workspace")
    return (out, *new)


def run_blocks(calls: ctypes.Array[BlockCall]) -> None:
    """A token through the blocks of a model, as `calls` say."""
    if native.library().linear_rope_blocks(ctypes.byref(calls), len(calls)):
        raise MemoryError("the native step found no memory for its workspace")
