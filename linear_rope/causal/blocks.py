"""How the chunked form cuts its work, and what it needs in each piece: memory, rotation, decay.

A block is n chunks of C tokens, for some rows of the batch and all heads. Tensors of a block are
laid out chunk by chunk,

    (n chunks, rows, K key heads, R query heads a key head, C tokens, width),

R = 1 for keys and values, so that all that is done to a chunk is one batched product, and a state
that runs through the chunks is a loop over the first axis.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linear_rope.causal.reference import widened
from linear_rope.positions import can_read

__all__ = ["Block", "Fade", "Plan", "Turn", "Workspace", "block_of", "plan_of", "torn_chunks"]

# Numbers in a tensor of a block: enough to keep torch's overhead a call small, and few enough for
# what is reused to stay in the cache.
NUMBERS = 1 << 18

# The states that are kept for the backward pass take at most 1 / SPARSE of the memory of the output
# and the gradients.
SPARSE = 16


class Block(NamedTuple):
    """Chunks of equal length that go together."""

    number: int
    start: int  # the first token
    chunks: int
    length: int  # tokens a chunk


class Plan(NamedTuple):
    """Tokens a chunk, chunks a block, the number of blocks, and rows of the batch a block."""

    chunk: int
    step: int
    total: int
    rows: int

    def blocks(self, time: int) -> list[Block]:
        whole, rest = divmod(time, self.chunk)
        blocks = [
            Block(i, n * self.chunk, min(self.step, whole - n), self.chunk)
            for i, n in enumerate(range(0, whole, self.step))
        ]
        if rest:  # the short last chunk by itself
            blocks.append(Block(len(blocks), whole * self.chunk, 1, rest))
        return blocks


def plan_of(q: Tensor, k: Tensor, v: Tensor, chunk: int, total: int | None = None) -> Plan:
    """The plan for a call; `total` says how many blocks another plan of it had, which then is this
    one (torch.func.vmap may call backward with another batch than forward)."""
    batch, heads, time = q.shape[:3]
    features, values = k.shape[3], v.shape[3]
    chunk = max(1, min(chunk or default_chunk(features, values), time))
    whole, rest = time // chunk, time % chunk  # a length that is traced knows no divmod
    row = max(1, heads * chunk * max(features, values))  # numbers in a chunk of one row
    if total is None:
        apart = SPARSE * features * values // (2 * (features + values))  # tokens
        step = max(1, -(-apart // chunk), NUMBERS // (max(1, batch) * row))
        total = -(-whole // step)
    else:
        total -= rest > 0
    step = max(1, -(-whole // max(1, total)))
    rows = max(1, min(batch, NUMBERS // (row * min(step, max(1, whole)))))
    return Plan(chunk, step, -(-whole // step) + (rest > 0), rows)


def default_chunk(features: int, values: int) -> int:
    """Tokens a chunk: work inside chunks grows with them, that on states between chunks shrinks.

    Measured on a CPU; a chunk of the width would balance the two, but small products are slow.
    """
    width = 2 * features * values / max(1, features + values)
    return 32 if width < 24 else 64 if width < 96 else 128


def block_of(x: Tensor, rows: slice, block: Block, heads: int) -> Tensor:
    """The block's part of x (batch, any multiple of heads, time, width), as above: a view."""
    sb, sh, st, sw = x.stride()
    groups, rows_ = x.shape[1] // heads, rows.stop - rows.start
    return x.as_strided(
        (block.chunks, rows_, heads, groups, block.length, x.shape[3]),
        (block.length * st, sb, groups * sh, sh, st, sw),
        x.storage_offset() + rows.start * sb + block.start * st,
    )


class Workspace:
    """Named tensors, allocated once a call and handed out again for every block."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.kept: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        size = 1
        for n in shape:
            size *= n
        flat = self.kept.get(name)
        if flat is None or flat.numel() < size:
            flat = self.kept[name] = self.like.new_empty(size, dtype=dtype or self.dtype)
        return flat[:size].view(shape)


# ---- Rotation -----------------------------------------------------------------------------------


class Turn:
    """The rotation by tables (time, pairs) or (batch, time, pairs), and its transpose."""

    def __init__(self, cos: Tensor, sin: Tensor, pairing: str, batch: int, width: int) -> None:
        self.pairs, self.half = cos.shape[-1], pairing == "half"
        # One complex product turns neighbors in a single pass, if all of them are at even places.
        self.complex = not self.half and width % 2 == 0
        self.tables = [cos, sin, -sin]
        if self.complex:
            self.tables = [torch.complex(cos, sin), torch.complex(cos, -sin)]
        self.tables = [x.expand(batch, *x.shape[-2:]).unsqueeze(1) for x in self.tables]

    def of_block(self, rows: slice, block: Block) -> list[Tensor]:
        return [block_of(x, rows, block, 1) for x in self.tables]

    def pairs_of(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of contiguous x: complex pairs, or their first and second parts; and the rest."""
        turned = 2 * self.pairs
        pairs, rest = x[..., :turned], x[..., turned:]
        if self.complex:
            return torch.view_as_complex(pairs.unflatten(-1, (-1, 2))), rest
        if self.half:
            return *pairs.chunk(2, dim=-1), rest
        return pairs[..., ::2], pairs[..., 1::2], rest

    def write(
        self,
        x: tuple[Tensor, ...],
        tables: list[Tensor],
        out: tuple[Tensor, ...],
        *,
        back: bool = False,
    ) -> None:
        """out = R x, or R^T x, for `pairs_of` tensors that share no memory."""
        if x[-1].shape[-1]:
            out[-1].copy_(x[-1])
        if self.complex:
            torch.mul(x[0], tables[back], out=out[0])
        else:
            cos, sin, minus = tables[0], tables[1 + back], tables[2 - back]
            torch.mul(x[0], cos, out=out[0]).addcmul_(x[1], minus)
            torch.mul(x[1], cos, out=out[1]).addcmul_(x[0], sin)


# ---- Decay and documents ------------------------------------------------------------------------


class Piece(NamedTuple):
    """Chunks `at` of a block and what is left in them, as in `Fade`; None is 1 throughout."""

    at: slice
    mask: Tensor
    start: Tensor | None = None
    end: Tensor | None = None


class Fade:
    """What is left of a key at each query of its chunk, of the state, and at the chunk's end.

    With G_i the sum of log decays from the chunk's first token up to token i:

        mask   (.., C, C)  exp(G_i - G_j) for j <= i, else 0
        start  (.., C, 1)  exp(G_i), of the state before the chunk
        end    (.., C, 1)  exp(G_C - G_j), of key j after the chunk
        whole  (rows, K or 1, 1, 1)  exp(G_C), of the state over the chunk: a list, in order of
               time, with None for 1; None is 1 throughout the block
        sees   (.., C, C)  1 for j <= i of one document, else 0
        last   (.., C, 1)  1 in the chunk's last document, else 0; None is 1 throughout

    mask, start, end and whole are 0 across a document's beginning. Leading axes are (n, rows, K or
    1, X), X chunks in one of the block's, or none where all chunks are alike.

    All this costs passes over memory. Without a decay only the chunks from the first to the last
    one with a boundary pay for it; the others are `pieces` as plain as without documents.

    Args:
        g: (n, rows, K, X, C, 1), fresh: (n, rows, 1, X, C, 1), of the block, or None.
        torn: all chunks if there is a decay, else those of `torn_chunks`, at least one.
        lower: (C, C), 1 for j <= i, else 0. space, name: room for the mask of a decay.
    """

    def __init__(
        self,
        g: Tensor | None,
        fresh: Tensor | None,
        torn: slice,
        lower: Tensor,
        space: Workspace,
        name: str = "",
    ) -> None:
        self.sees, self.last = lower, None
        self.whole: list[Tensor | None] | None = None
        self.pieces = [Piece(slice(None), lower)]
        given = [x for x in (g, fresh) if x is not None]
        if not given:
            return
        n, inside = given[0].shape[0], given[0].shape[3]
        start: Tensor | None = None
        end: Tensor | None = None
        if fresh is not None:
            number = fresh[torn].cumsum(-2)  # documents that began in the chunk
            self.sees = lower * (number == number.mT)
            start = (number == 0).to(space.dtype)
            self.last = end = (number == number[..., -1:, :]).to(space.dtype)
        mask = self.sees
        if g is not None:
            total = widened(g).cumsum(-2)
            mask = _decayed(total, mask, space, name)
            start = _times(total.exp(), start, space)
            end = _times((total[..., -1:, :] - total).exp(), end, space)
        assert start is not None
        around = (slice(0, torn.start), slice(torn.stop, n))
        self.pieces = [Piece(torn, mask, start, end)]
        self.pieces += [Piece(at, lower) for at in around if at.start < at.stop]
        whole = start[..., -1:, :].permute(0, 3, 1, 2, 4, 5)
        self.whole = [None] * (n * inside)
        self.whole[torn.start * inside : torn.stop * inside] = whole.flatten(0, 1).unbind(0)

    def mask(self, scores: Tensor) -> None:
        """Scales scores (n, rows, K, R, C, C), in place."""
        for piece in self.pieces:
            scores[piece.at].mul_(piece.mask)

    def from_start(self, x: Tensor) -> None:
        """Scales what comes from the state before each chunk, (n, rows, K, R, C, width)."""
        for piece in self.pieces:
            if piece.start is not None:
                x[piece.at].mul_(piece.start)

    def to_end(self, x: Tensor) -> None:
        """Scales what goes to the state after each chunk, (n, rows, K, R, C, width)."""
        for piece in self.pieces:
            if piece.end is not None:
                x[piece.at].mul_(piece.end)


def torn_chunks(fresh: Tensor) -> slice:
    """From the first to the last chunk with a boundary; all where looking would wait for a GPU."""
    if not can_read(fresh):
        return slice(0, fresh.shape[0])
    torn = fresh.flatten(1).any(-1).nonzero().flatten().tolist()
    return slice(torn[0], torn[-1] + 1) if torn else slice(0, 0)


def _decayed(total: Tensor, sees: Tensor, space: Workspace, name: str) -> Tensor:
    """exp(G_i - G_j) of what is seen; total: G, (n, rows, K, X, C, 1), float64 or float32."""
    pairs = (*total.shape[:-1], total.shape[-2])
    wide = torch.sub(total, total.mT, out=space(f"{name}_wide", *pairs, dtype=total.dtype))
    # Above the diagonal the exponent is positive and may overflow: cut it before exp.
    return space(f"{name}_mask", *pairs).copy_(wide).clamp_(max=0.0).exp_().mul_(sees)


def _times(wide: Tensor, factor: Tensor | None, space: Workspace) -> Tensor:
    x = wide.to(space.dtype)
    return x if factor is None else x * factor
