"""The memory of the chunked form's blocks, all views of it made once, and what is loaded into it.

Layouts are those of `linear_rope.causal.blocks`. A batch of matrices is such a tensor as one
matrix a chunk and key head, (n rows K, R C, width).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from linear_rope.causal.blocks import Block, Fade, Plan, Turn, Workspace, block_of
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

    def run(self, whole: Sequence[Tensor] | None, *, back: bool = False) -> None:
        """Fills all states from `first` (`last` if back). whole: a factor a chunk; None is 1."""
        n = len(self.steps)
        for i in reversed(range(n)) if back else range(n):
            old, new = (i + 1, i) if back else (i, i + 1)
            if whole is None:
                torch.add(self.states[old], self.steps[i], out=self.states[new])
            else:
                torch.addcmul(self.steps[i], self.states[old], whole[i], out=self.states[new])


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
        self.fade = self.plain = Fade(None, None, self.lower, space)

    def load(self, g: Tensor | None, fresh: Tensor | None) -> None:
        """Decay and documents of a block, as `Fade` takes them."""
        self.fade = self.plain
        if g is not None or fresh is not None:
            g = None if g is None else g.reshape(*self.cut, 1)
            if fresh is not None:
                fresh = fresh.reshape(*self.cut[:2], 1, *self.cut[3:], 1)
            self.fade = Fade(g, fresh, self.lower, self.space, "short")

    def of_keys(self, k: Tensor, first: Tensor) -> None:
        """`all` = z_i, from keys and the sum before the block."""
        torch.bmm(self._mask(), k.view(self.flat.shape), out=self.flat)
        self.steps.copy_(self.lasts)
        self.z.first.copy_(first)
        self.z.run(self._whole())
        _add_scaled(self.short, self.before, self.fade.start)

    def of_queries(self, q: Tensor, last: Tensor) -> None:
        """The same backward: `all` = what flows to each key, from what flows to each token's sum
        and to that after the block."""
        torch.bmm(self._mask().mT, q.view(self.flat.shape), out=self.flat)
        # What flows to a first key flows, one step further, to the sum before it.
        self.steps.copy_(self.firsts)
        if self.fade.start is not None:
            self.steps.mul_(self._in_order(self.fade.start[..., 0, :]))
        self.dz.last.copy_(last)
        self.dz.run(self._whole(), back=True)
        _add_scaled(self.short, self.d_after, self.fade.end)

    def through_ends(self) -> Tensor:
        """<z, dz> at the end of each chunk: (n, rows, K)."""
        step = self.cut[3]
        return (self.z.all[step::step] * self.dz.all[step::step]).sum(-1)

    @staticmethod
    def _in_order(x: Tensor) -> Tensor:
        """(n, rows, K, s, D) in order of time, (n, s, rows, K, D)."""
        return x.permute(0, 3, 1, 2, 4)

    def _mask(self) -> Tensor:
        mask = self.fade.mask
        if mask.ndim == 2:
            return mask.expand(self.flat.shape[0], *mask.shape)
        return mask.expand(*self.cut, mask.shape[-1]).flatten(0, 3)

    def _whole(self) -> Sequence[Tensor] | None:
        whole = self.fade.whole
        return None if whole is None else self._in_order(whole.squeeze(-1)).flatten(0, 1).unbind(0)


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
        self.plain = Fade(None, None, self.lower, space)
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
        if fresh is not None and fresh.device.type == "cpu" and not fresh.any():
            fresh = None  # no document begins here
        self.fresh, self.fade, self.whole = fresh, self.plain, None
        if g is not None or fresh is not None:
            self.fade = Fade(g, fresh, self.lower, call.space, "whole")
            if self.fade.whole is not None:
                self.whole = self.fade.whole.squeeze(3).unbind(0)
        if call.divides:
            self.sums.load(g, fresh)

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

    def scaled(self, name: str, x: Tensor, factor: Tensor | None) -> Tensor:
        """x times a factor a token, as a batch of matrices."""
        if factor is not None:
            x = torch.mul(x, factor, out=self.call.space(name, *x.shape))
        return x.view(-1, x.shape[3] * x.shape[4], x.shape[5])

    def masked_scores(self, a: Tensor, b: Tensor) -> Tensor:
        """a b^T, within what queries see."""
        torch.bmm(a, b.mT, out=self.scores)
        self.scores6.mul_(self.fade.mask)
        return self.scores


def lower_triangle(size: int, like: Tensor) -> Tensor:
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril_()


def _add_scaled(x: Tensor, y: Tensor, factor: Tensor | None) -> None:
    """x += factor y."""
    x.add_(y) if factor is None else x.addcmul_(y, factor)
