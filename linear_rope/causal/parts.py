"""The memory of the chunked form's blocks, all views of it made once, and what is loaded into it.

Layouts are those of `linear_rope.causal.blocks`. A batch of matrices is such a tensor as one
matrix a chunk and key head, (n rows K, R C, width).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from linear_rope.causal.blocks import (
    Block,
    Fade,
    Piece,
    Plan,
    Turn,
    Workspace,
    block_of,
    torn_chunks,
)
from linear_rope.causal.operator import work_dtype
from linear_rope.elementwise import write_features

__all__ = ["Call", "Part"]

# Tokens between two sums of keys: a triangle times that many keys costs less than a long one.
SHORT = 16


class Call:
    """What is the same for all blocks of a call; arguments as in `linear_rope.causal.operator`."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        g: Tensor | None,
        fresh: Tensor | None,
        phi: str,
        eps: float,
        pairing: str,
        denominator: str,
        plan: Plan,
        *,
        back: bool,
    ) -> None:
        self.q, self.k, self.v, self.plan, self.back = q, k, v, plan, back
        self.g = None if g is None else g.unsqueeze(-1)
        self.fresh = None if fresh is None else fresh[:, None, :, None]
        self.phi, self.eps = phi, eps
        self.heads, self.groups = k.shape[1], q.shape[1] // max(1, k.shape[1])
        self.space = Workspace(q, work_dtype(q.dtype))
        self.turn = None
        if cos is not None and sin is not None:
            self.turn = Turn(cos, sin, pairing, q.shape[0], q.shape[3])
        self.divides = denominator != "none"
        self.signed = denominator == "rotated" and self.turn is not None

    def parts(self) -> Iterator[tuple[Part, int, slice]]:
        """Every block, loaded, with its number and rows of the batch; from the last if `back`."""
        blocks, batch = self.plan.blocks(self.q.shape[2]), self.q.shape[0]
        made: dict[tuple[int, ...], Part] = {}
        for first in range(0, batch, self.plan.rows):
            rows = slice(first, min(first + self.plan.rows, batch))
            for block in reversed(blocks) if self.back else blocks:
                shape = (block.chunks, rows.stop - rows.start, block.length)
                if shape not in made:
                    made[shape] = Part(self, *shape)
                made[shape].load(rows, block)
                yield made[shape], block.number, rows


class Scan:
    """States between chunks: x_{i+1} = whole_i x_i + steps_i, or the same from the last chunk on.

    all: (n + 1, rows, K, ..); before, after: its first and its last n.
    """

    def __init__(self, states: Tensor, steps: Sequence[Tensor]) -> None:
        self.all, self.before, self.after = states, states[:-1], states[1:]
        self.states, self.steps = states.unbind(0), steps
        self.first, self.last = self.states[0], self.states[-1]

    def run(self, whole: Sequence[Tensor | None] | None, *, back: bool = False) -> None:
        """Fills all states from `first` (`last` if back). whole: a factor a chunk; None is 1."""
        n = len(self.steps)
        for i in reversed(range(n)) if back else range(n):
            old, new = (i + 1, i) if back else (i, i + 1)
            factor = None if whole is None else whole[i]
            if factor is None:
                torch.add(self.states[old], self.steps[i], out=self.states[new])
            else:
                torch.addcmul(self.steps[i], self.states[old], factor, out=self.states[new])


class Sums:
    """Sums of keys for denominators, and their gradients, a token: `all` (n, rows, K, 1, C, D).

        z_i = exp(G_i) z + sum_{j<=i} exp(G_i - G_j) k_j

    Chunks are cut again, into s short ones of c tokens: (n, rows, K, s, c, D). z, dz: scans over
    all of them.
    """

    def __init__(self, space: Workspace, n: int, rows: int, K: int, C: int, D: int) -> None:
        self.space, c = space, SHORT if C % SHORT == 0 else C
        self.cut = (n, rows, K, C // c, c)
        self.all = space("sums", n, rows, K, 1, C, D)
        self.short, self.flat = self.all.view(*self.cut, D), self.all.view(-1, c, D)
        self.firsts, self.lasts = (self._in_order(self.short[..., i, :]) for i in (0, -1))
        self.steps = space("sum_steps", *self.firsts.shape)
        self.z, self.dz = (
            Scan(space(name, n * (C // c) + 1, rows, K, D), self.steps.flatten(0, 1).unbind(0))
            for name in ("z", "dz")
        )
        self.before, self.d_after = (
            x.view(self.steps.shape).permute(0, 2, 3, 1, 4).unsqueeze(-2)
            for x in (self.z.before, self.dz.after)
        )
        self.lower = lower_triangle(c, self.all)
        self.fade = self.plain = Fade(None, None, slice(0, 0), self.lower, space)
        self.whole: Sequence[Tensor | None] | None = None

    def load(self, g: Tensor | None, fresh: Tensor | None, torn: slice) -> None:
        """Decay and documents of a block, as `Fade` takes them."""
        self.fade, self.whole = self.plain, None
        if g is not None or fresh is not None:
            g = None if g is None else g.reshape(*self.cut, 1)
            if fresh is not None:
                fresh = fresh.reshape(*self.cut[:2], 1, *self.cut[3:], 1)
            self.fade = Fade(g, fresh, torn, self.lower, self.space, "short")
            assert self.fade.whole is not None
            self.whole = [None if x is None else x.squeeze(-1) for x in self.fade.whole]

    def of_keys(self, k: Tensor, first: Tensor) -> None:
        """`all` = z_i, from keys and the sum before the block."""
        for piece in self.fade.pieces:
            self._within(piece, k)
        self.steps.copy_(self.lasts)
        self.z.first.copy_(first)
        self.z.run(self.whole)
        for piece in self.fade.pieces:
            _add_scaled(self.short[piece.at], self.before[piece.at], piece.start)

    def of_queries(self, q: Tensor, last: Tensor) -> None:
        """The same backward: `all` = what flows to each key, from what flows to each token's sum
        and to that after the block."""
        for piece in self.fade.pieces:
            self._within(piece, q, back=True)
        # What flows to a first key flows, one step further, to the sum before it.
        self.steps.copy_(self.firsts)
        for piece in self.fade.pieces:
            if piece.start is not None:
                self.steps[piece.at].mul_(self._in_order(piece.start[..., 0, :]))
        self.dz.last.copy_(last)
        self.dz.run(self.whole, back=True)
        for piece in self.fade.pieces:
            _add_scaled(self.short[piece.at], self.d_after[piece.at], piece.end)

    def through_ends(self) -> Tensor:
        """<z, dz> at the end of each chunk: (n, rows, K)."""
        step = self.cut[3]
        return (self.z.all[step::step] * self.dz.all[step::step]).sum(-1)

    @staticmethod
    def _in_order(x: Tensor) -> Tensor:
        """(n, rows, K, s, D) in order of time, (n, s, rows, K, D)."""
        return x.permute(0, 3, 1, 2, 4)

    def _within(self, piece: Piece, x: Tensor, *, back: bool = False) -> None:
        """`all` = mask x, or mask^T x, short chunk by short chunk."""
        out = self.short[piece.at]
        x = x.view(self.short.shape)[piece.at].flatten(0, 3)
        mask = piece.mask.expand(*out.shape[:-1], out.shape[-2]).flatten(0, 3)
        torch.bmm(mask.mT if back else mask, x, out=out.flatten(0, 3))


class Part:
    """The memory of blocks of one shape, and what is loaded into it of one of them.

    fq, fk, tq, tk  (n, rows, K, R or 1, C, D)  features of queries and keys, and rotated ones (the
                    same memory, without a rotation)
    v6              (n, rows, K, 1, C, E)       values
    q, k, v         tq, tk and v6 as batches of matrices
    num6, num; d6, d                            numerators, and their gradients, like queries
    S, dS           scans of the states, (D, E), backward (E, D); of their gradients, (D, E)
    dq6, dk6, dv6 and dq, dk, dv                gradients of tq, tk and values
    sums            of keys, for denominators
    """

    def __init__(self, call: Call, n: int, rows: int, C: int) -> None:
        self.call, space = call, call.space
        K, R, D, E = call.heads, call.groups, call.k.shape[3], call.v.shape[3]
        of_q, of_k, count = (n, rows, K, R, C), (n, rows, K, 1, C), n * rows * K

        def pair(name: str, of: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
            x = space(name, *of, width)
            return x, x.view(count, of[3] * C, width)

        self.fq, self.q = pair("fq", of_q, D)
        self.fk, self.k = pair("fk", of_k, D)
        self.tq, self.tk = self.fq, self.fk
        if call.turn is not None:
            self.tq, self.q = pair("tq", of_q, D)
            self.tk, self.k = pair("tk", of_k, D)
            self.pairs = [call.turn.pairs_of(x) for x in (self.fq, self.tq, self.fk, self.tk)]
        self.v6, self.v = pair("v", of_k, E)
        self.spare_q, self.spare_k = space("spare", *of_q, D), space("spare", *of_k, D)
        self.spare_v = space("spare", *of_q, E)
        self.scores6, self.scores = pair("scores", of_q, C)
        self.lower = lower_triangle(C, self.v)
        self.plain = Fade(None, None, slice(0, 0), self.lower, space)
        if call.divides:
            self.sums = Sums(space, n, rows, K, C, D)
        of_S = (E, D) if call.back else (D, E)
        self.updates, self.S = self._states("S", (n, rows, K), of_S)
        self.before = self.S.before.view(count, *of_S)
        if not call.back:
            self.num6, self.num = pair("num", of_q, E)
            return
        self.d6, self.d = pair("d", of_q, E)
        self.d_updates, self.dS = self._states("dS", (n, rows, K), (D, E))
        self.d_after = self.dS.after.view(count, D, E)
        self.dq6, self.dq = pair("dq", of_q, D)
        self.dk6, self.dk = pair("dk", of_k, D)
        self.dv6, self.dv = pair("dv", of_k, E)
        if call.turn is not None:
            self.d_pairs = [call.turn.pairs_of(x) for x in (self.dq6, self.dk6)]

    def _states(
        self, name: str, size: tuple[int, int, int], shape: tuple[int, int]
    ) -> tuple[Tensor, Scan]:
        """Room for what chunks add, as a batch of matrices, and the scan of it."""
        (n, rows, K), space = size, self.call.space
        steps = space(f"{name}_steps", n, rows, K, *shape)
        return steps.view(-1, *shape), Scan(space(name, n + 1, rows, K, *shape), steps.unbind(0))

    def load(self, rows: slice, block: Block) -> None:
        """Features of the block's queries and keys, rotated ones, values, decay."""
        call = self.call
        self.rows, self.block = rows, block
        write_features(call.phi, call.eps, self.of(call.q), self.fq, self.spare_q)
        write_features(call.phi, call.eps, self.of(call.k), self.fk, self.spare_k)
        if call.turn is not None:
            self.tables = call.turn.of_block(rows, block)
            call.turn.write(self.pairs[0], self.tables, self.pairs[1])
            call.turn.write(self.pairs[2], self.tables, self.pairs[3])
        self.v6.copy_(self.of(call.v))
        g = None if call.g is None else self.of(call.g)
        fresh = None if call.fresh is None else block_of(call.fresh, rows, block, 1)
        torn = slice(0, 0) if fresh is None else torn_chunks(fresh)
        if torn.stop == 0:
            fresh = None  # no document begins here
        if g is not None:
            torn = slice(0, block.chunks)
        self.fresh, self.fade = fresh, self.plain
        if g is not None or fresh is not None:
            self.fade = Fade(g, fresh, torn, self.lower, call.space, "whole")
        if call.divides:
            self.sums.load(g, fresh, torn)

    def of(self, x: Tensor) -> Tensor:
        """The block's part of (batch, head, time, width)."""
        return block_of(x, self.rows, self.block, self.call.heads)

    def turned_back(self) -> tuple[Tensor, Tensor]:
        """Gradients of the features from those of rotated ones, in the memory of the latter."""
        turn = self.call.turn
        if turn is None:
            return self.dq6, self.dk6
        turn.write(self.d_pairs[0], self.tables, self.pairs[1], back=True)
        turn.write(self.d_pairs[1], self.tables, self.pairs[3], back=True)
        return self.tq, self.tk

    def dv_through_states(self) -> None:
        """Adds to dv what flows through the states after the chunks."""
        for piece in self.fade.pieces:
            keys, dv = self.tk[piece.at], self.dv6[piece.at].flatten(0, 3)
            if piece.end is not None:
                keys = torch.mul(keys, piece.end, out=self.call.space("k_end", *keys.shape))
            dv.baddbmm_(keys.flatten(0, 3), self.dS.after[piece.at].flatten(0, 2))

    def masked_scores(self, a: Tensor, b: Tensor) -> Tensor:
        """a b^T, within what queries see."""
        torch.bmm(a, b.mT, out=self.scores)
        self.fade.mask(self.scores6)
        return self.scores


def lower_triangle(size: int, like: Tensor) -> Tensor:
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril_()


def _add_scaled(x: Tensor, y: Tensor, factor: Tensor | None) -> None:
    """x += factor y."""
    x.add_(y) if factor is None else x.addcmul_(y, factor)
