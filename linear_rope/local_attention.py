"""Softmax attention to the last few tokens: local heads beside linear ones, or layers between.

Performers have such heads (performer-pytorch calls their number `local_attn_heads`): linear
attention remembers far back and blurs, a window is sharp and forgets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope.arguments import check_key_mask
from linear_rope.counts import check_counts
from linear_rope.mixing import Row, check_segments
from linear_rope.rotary import Rotary
from linear_rope.states import _to

__all__ = ["LocalHeads", "WindowCache", "local_attention"]

# Queries a block has at least: many tiny products are slow.
BLOCK = 64


class WindowCache(NamedTuple):
    """The past of local attention, constant in size: the keys that a next token still sees."""

    k: Tensor  # (batch, key head, window - 1, head width), the latest last
    v: Tensor  # (batch, key head, window - 1, value width)
    mask: Tensor  # (batch, window - 1) bool, True at keys that are there

    def detach(self) -> WindowCache:
        return WindowCache(*(x.detach() for x in self))

    def clone(self) -> WindowCache:
        return WindowCache(*(x.clone() for x in self))

    def to(self, *args: Any, **kwargs: Any) -> WindowCache:
        return WindowCache(*_to(self, *args, **kwargs))

    def index_select(self, rows: Tensor) -> WindowCache:
        return WindowCache(*(x.index_select(0, rows) for x in self))


torch.serialization.add_safe_globals([WindowCache])


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: WindowCache | None = None,
    return_state: bool = False,
) -> Any:  # Tensor, or (Tensor, WindowCache) with return_state
    """Causal softmax attention to the last `window` tokens, the current one included.

        out_m = sum_{m - window < n <= m} softmax_n(q_m . k_n / sqrt(D)) v_n

    by `torch.nn.functional.scaled_dot_product_attention` over blocks of queries, so that time and
    memory are O(time * window). Rotate queries and keys before.

    Args:
        q: (batch, head, time, D). k, v: (batch, key head, time, D or E); heads a multiple of key
            heads.
        window: tokens that a query sees at most, from 1 (itself) up. Pads do not count.
        key_mask: (batch, time) bool, True at real tokens; the output at others is 0.
        segment_ids: (batch, time), a document a run of one id (`resolve_segments`).
        state: of an earlier call, to continue; return_state: also return the new one.

    Returns:
        (batch, head, time, E) in q's dtype; with `return_state` also a `WindowCache`.

    Raises:
        ValueError: shapes that do not fit, a window below 1.
    """
    _check(q, k, v, window, key_mask, segment_ids, state)
    batch, before = q.shape[0], window - 1
    row = Row(batch, q.shape[2], before, key_mask, segment_ids, q.device)
    if state is None:
        state = WindowCache(
            k.new_zeros(*k.shape[:2], before, k.shape[3]),
            v.new_zeros(*v.shape[:2], before, v.shape[3]),
            row.real.new_zeros(batch, before),
        )
    keys = torch.cat([state.k.to(k.dtype), row.move(k, 2)], dim=2)
    values = torch.cat([state.v.to(v.dtype), row.move(v, 2)], dim=2)
    there = torch.cat([state.mask, row.real], dim=1)
    out = row.move_back(_blocks(row.move(q, 2), keys, values, window, there, row.of_all), 2)
    if not return_state:
        return out
    mask = row.end(there, 1)
    if row.goes_on is not None:
        mask = mask & row.goes_on
    return out, WindowCache(row.end(keys, 2), row.end(values, 2), mask)


class LocalHeads(nn.Module):
    """Heads of a layer that attend by `local_attention`, with RoPE before it. No parameters.

    The rotation is always plain: rules that stretch it are for distances beyond a window.

    Args:
        heads, kv_heads: how many of the layer's heads, and of its key heads.
        window: see `local_attention`.
        rotary: of their queries and keys, or None.
        output_norm: divide each head's output by its root mean square.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        window: int,
        *,
        rotary: Rotary | None = None,
        output_norm: bool = False,
    ) -> None:
        super().__init__()
        check_counts(window=window)
        self.heads, self.kv_heads, self.window = heads, kv_heads, window
        self.rotary, self.output_norm = rotary, output_norm

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        *,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: WindowCache | None = None,
    ) -> tuple[Tensor, WindowCache]:
        """Arguments and results as in `local_attention`; positions (time,) or (batch, time)."""
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        out, after = local_attention(
            q,
            k,
            v,
            self.window,
            key_mask=key_mask,
            segment_ids=segment_ids,
            state=state,
            return_state=True,
        )
        if self.output_norm:
            out = F.rms_norm(out, out.shape[-1:], eps=1e-6)
        return out, after

    def extra_repr(self) -> str:
        return f"{self.heads}, {self.kv_heads}, window={self.window}, rotary={self.rotary}"


def _blocks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int,
    there: Tensor,
    of_key: Tensor | None,
) -> Tensor:
    """Local attention of queries to keys that begin window - 1 tokens before them.

    there: (batch, keys), False at keys that are none. of_key: (batch, keys), the keys' documents.
    """
    batch, heads, length = q.shape[:3]
    if length == 0:
        return q.new_zeros(batch, heads, 0, values.shape[-1])
    size = min(max(window, BLOCK), length)
    number = -(-length // size)
    extra = number * size - length
    reach = size + window - 1  # keys of a block

    def cut(x: Tensor, dim: int, step: int) -> Tensor:
        """(batch, ..., time, ...) -> (batch * blocks, ..., block, ...)."""
        pad = [0, 0] * (x.ndim - 1 - dim) + [0, extra]
        return F.pad(x, pad).unfold(dim, step, size).movedim(dim, 1).flatten(0, 1)

    # 1. Blocks: of queries, and of the keys that any of them may see.
    q = cut(q, 2, size).mT
    keys, values = cut(keys, 2, reach).mT, cut(values, 2, reach).mT
    # 2. Who sees whom: by distance, by padding, by document. A query sees itself at least.
    behind = torch.arange(size, device=q.device)[:, None] + (window - 1)
    behind = behind - torch.arange(reach, device=q.device)
    allowed = ((behind >= 0) & (behind < window)) & cut(there, 1, reach)[:, None, :]
    if of_key is not None:
        of_query = cut(of_key[:, window - 1 :], 1, size)
        allowed = allowed & (of_query[:, :, None] == cut(of_key, 1, reach)[:, None, :])
    allowed = (allowed | (behind == 0)).unsqueeze(1)
    # 3. Attention a block, and the blocks in a row again.
    # Chosen by a branch: a traced comparison of lengths is no bool, which torch asks for.
    grouped = {"enable_gqa": True} if heads != keys.shape[1] else {}
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed, **grouped)
    out = out.unflatten(0, (batch, number)).transpose(1, 2).flatten(2, 3)
    return out[:, :, :length]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    state: WindowCache | None,
) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device: {name} is {x.dtype} on {x.device}, q is "
                f"{q.dtype} on {q.device}; convert one with .to()"
            )
    check_counts(window=window)
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    fits = all(x.ndim == 4 for x in (q, k, v)) and k.shape[:3] == v.shape[:3]
    fits = fits and (q.shape[0], q.shape[2:]) == (k.shape[0], k.shape[2:])
    if not fits or k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(
            "q, k and v must have shapes (batch, head, time, D), (batch, key head, time, D) and "
            "(batch, key head, time, E), with a multiple of key heads as heads, got "
            f"{', '.join(map(str, shapes))}"
        )
    check_key_mask(key_mask, (q.shape[0], q.shape[2]), q.device)
    check_segments(segment_ids, (q.shape[0], q.shape[2]))
    if state is None:
        return
    want = {
        "k": (*k.shape[:2], window - 1, k.shape[3]),
        "v": (*v.shape[:2], window - 1, v.shape[3]),
        "mask": (k.shape[0], window - 1),
    }
    for name, shape in want.items():
        got = getattr(state, name, None)
        if not isinstance(state, WindowCache) or got is None or got.shape != shape:
            raise ValueError(
                f"state.{name} must have shape {shape}, got "
                f"{type(state).__name__ if got is None else tuple(got.shape)}; pass the "
                "WindowCache of an earlier call with the same sizes, or none"
            )
