"""Sequences longer than memory: attention over slices of time, in and out of mapped files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linear_rope.functional import linear_attention
from linear_rope.states import AttentionState

__all__ = ["attend_in_pieces"]

# Rows (batch x head x time) at a time: 64 MiB of float32 values at a width of 64.
ROWS = 2**18

# Whatever gives one entry a token, and is cut along with the sequence.
BY_TOKEN = ("key_mask", "log_decay")


@torch.no_grad()
def attend_in_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    piece: int | None = None,
    state: AttentionState | None = None,
    **options: Any,
) -> AttentionState:
    """`linear_attention` over a sequence of any length, a slice at a time: memory is constant.

    Meant for tensors of `torch.from_file`, of which only the slice at hand is in memory. A slice is
    read, attended to with the state of those before it, and written to `out`. There is no gradient.
    Rows at pads (key_mask False) hold something, but nothing to rely on.

    Args:
        q, k, v: as in `linear_attention`. Files are best laid out with time outermost, and viewed
            as (batch, head, time, width): a slice of time is then one stretch of the file.
        out: (batch, head, time, value width), written in place; any floating dtype.
        piece: tokens a slice; default: as many as make 2^18 rows of all heads. The result does not
            depend on it but for rounding.
        state: of an earlier sequence, to go on from.
        options: of `linear_attention`: feature_map, rotary, log_decay, key_mask, ...

    Returns:
        The state after the last token.

    Raises:
        ValueError: an `out` of another shape, a piece below 1, and what `linear_attention` refuses.
    """
    length, want = q.shape[2], (*q.shape[:3], v.shape[3])
    if tuple(out.shape) != want:
        raise ValueError(
            f"out must have shape (batch, head, time, value width) = {want}, got {tuple(out.shape)}"
        )
    for name in ("causal", "positions", "key_positions", "segment_ids", "cu_seqlens"):
        given = options.get(name)
        if not (given is None or given is True):
            raise ValueError(
                f"{name} cannot be used in pieces: positions are carried in the state of one "
                "causal sequence; call linear_attention with a state of your own"
            )
    size = max(1, ROWS // max(1, q.shape[0] * q.shape[1])) if piece is None else piece
    if size < 1:
        raise ValueError(f"piece={size} must be at least 1 token")
    for start in range(0, length, size) if length else (0,):
        part = slice(start, start + size)
        cut = {
            name: x[..., part] if name in BY_TOKEN and x is not None else x
            for name, x in options.items()
        }
        rows, state = linear_attention(
            q[:, :, part], k[:, :, part], v[:, :, part], state=state, return_state=True, **cut
        )
        out[:, :, part] = rows
    assert state is not None
    return state
