"""The chunkwise form in pure torch, fused and with a hand-written backward: the form that trains.

Time is cut into chunks of C tokens. Inside a chunk everything is a small quadratic product, between
chunks only the state S (M x E) is handed on. In a chunk, with q and k the rotated features, G_i the
sum of the log decays from the chunk's first token up to token i, and S the state before the chunk:

    o_i = exp(G_i) q_i S + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) v_j
    S'  = exp(G_C) S + sum_j exp(G_C - G_j) k_j v_j^T

The gradients of q, k, v are products of the same kind, run backward in time with dS handed from
chunk to chunk. A denominator is a product with sums of keys, of the features f below the line
(unrotated or rotated ones):

    den_i = f(q)_i . z_i,   z_i = exp(G_i) z + sum_{j<=i} exp(G_i - G_j) f(k)_j.

The gradient of the log decay needs no product of its own: scaling the past of token t is scaling
q_i for i >= t and unscaling k_j for j >= t, so, with all that flows to the features f,

    dg_t = sum_{i>=t} (f(q)_i . df(q)_i - f(k)_i . df(k)_i) + <S', dS'> + <z', dz'>,  i in t's chunk

(the identity behind the gated linear attention kernels, arXiv 2312.06635, appendix C; taken here a
chunk at a time, so that rounding does not pile up over the sequence). Nothing flows across the
beginning of a document.

All of it, from feature map to division, is done block by block (`linear_rope.causal.blocks`) in
memory that is reused, so that it stays in the cache. For the backward pass only the inputs, the
output, the denominators and the state before each block are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linear_rope.causal.blocks import plan_of
from linear_rope.causal.division import FLOAT16_MAX, ROTATED_FLOOR, divisor
from linear_rope.causal.operator import (
    empty_gradients,
    empty_results,
    make_form,
    without_autocast,
)
from linear_rope.causal.parts import Call, Part
from linear_rope.elementwise import write_gradient

__all__ = ["chunked"]


# ---- Forward ------------------------------------------------------------------------------------


def _starts(
    q: Tensor, k: Tensor, v: Tensor, denominator: str, chunk: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    blocks = plan_of(q, k, v, chunk).total
    keys = (*k.shape[:2], k.shape[3])
    return (blocks, *keys, v.shape[3]), (blocks, *keys)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    g: Tensor | None,
    fresh: Tensor | None,
    S0: Tensor | None,
    z0: Tensor | None,
    phi: str,
    eps: float,
    pairing: str,
    denominator: str,
    wide: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    starts = _starts(q, k, v, denominator, chunk)
    out, den, S, z, starts_S, starts_z = empty_results(q, k, v, denominator, wide, starts)
    plan = plan_of(q, k, v, chunk)
    call = Call(q, k, v, cos, sin, g, fresh, phi, eps, pairing, denominator, plan, back=False)
    for state, given in ((S, S0), (z, None if denominator == "none" else z0)):
        state.zero_() if given is None else state.copy_(given)
    with without_autocast(q):
        for part, number, rows in call.parts():
            starts_S[number, rows] = S[rows]
            starts_z[number, rows] = z[rows]
            _forward_block(part, out, den.unsqueeze(-1), S[rows], z[rows])
    return out, den, S, z, starts_S, starts_z


def _forward_block(part: Part, out: Tensor, den: Tensor, S: Tensor, z: Tensor) -> None:
    """Writes the block's rows of out and den; takes S and z from before the block to after it."""
    call, fade = part.call, part.fade
    # 1. Inside each chunk, the masked quadratic product.
    torch.bmm(part.masked_scores(part.q, part.k), part.v, out=part.num)
    # 2. The denominator.
    if call.divides:
        q, k = (part.tq, part.tk) if call.signed else (part.fq, part.fk)
        part.sums.of_keys(k, z)
        z.copy_(part.sums.z.last)
        total = torch.mul(q, part.sums.all, out=part.spare_q).sum(-1, keepdim=True)
        part.of(den).copy_(total)
    # 3. States between the chunks: what each chunk adds, then the sum over chunks. Values and
    # queries have done all else, and are scaled where they are.
    fade.to_end(part.v6)
    torch.bmm(part.k.mT, part.v, out=part.updates)
    part.S.first.copy_(S)
    part.S.run(fade.whole)
    S.copy_(part.S.last)
    # 4. What came before each chunk, through its state; and the division.
    fade.from_start(part.tq)
    part.num.baddbmm_(part.q, part.before)
    target, value = part.of(out), part.num6
    if not call.divides:
        target.copy_(value)
        return
    by = divisor(total, call.signed)
    if target.dtype == value.dtype:
        torch.div(value, by, out=target)
        return
    value.div_(by)
    if target.dtype == torch.float16:
        value.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
    target.copy_(value)


# ---- Backward -----------------------------------------------------------------------------------


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    g: Tensor | None,
    fresh: Tensor | None,
    out: Tensor,
    den: Tensor,
    starts_S: Tensor,
    starts_z: Tensor,
    d_out: Tensor,
    dS: Tensor,
    dz: Tensor,
    phi: str,
    eps: float,
    pairing: str,
    denominator: str,
    chunk: int,
    want_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = empty_gradients(q, k, v, want_dg)
    dS0, dz0 = grads[4:]
    plan = plan_of(q, k, v, chunk, starts_S.shape[0])
    call = Call(q, k, v, cos, sin, g, fresh, phi, eps, pairing, denominator, plan, back=True)
    dS0.copy_(dS)
    dz0.zero_() if denominator == "none" else dz0.copy_(dz)
    saved = (out, den.unsqueeze(-1), d_out)
    with without_autocast(q):
        for part, number, rows in call.parts():
            start = (starts_S[number, rows], starts_z[number, rows])
            _backward_block(part, start, saved, (dS0[rows], dz0[rows]), grads)
    return grads


def _backward_block(
    part: Part,
    start: tuple[Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    carry: tuple[Tensor, Tensor],
    grads: tuple[Tensor, ...],
) -> None:
    """Writes the block's rows of the gradients; takes dS and dz from after the block to before."""
    call, fade = part.call, part.fade
    (S, z), (dS, dz), (dq, dk, dv, dg, *_) = start, carry, grads
    # 1. Through the division.
    d_den = _through_division(part, *saved)
    # 2. Inside each chunk, through its scores and their gradient.
    torch.bmm(part.masked_scores(part.q, part.k).mT, part.d, out=part.dv)
    d_scores = part.masked_scores(part.d, part.v)
    torch.bmm(d_scores, part.k, out=part.dq)
    torch.bmm(d_scores.mT, part.q, out=part.dk)
    # 3. The states again, transposed; their gradients from the last chunk to the first.
    # Values and numerators' gradients have done all else, and are scaled where they are.
    fade.to_end(part.v6)
    torch.bmm(part.v.mT, part.k, out=part.updates)
    part.S.first.copy_(S.mT)
    part.S.run(fade.whole)
    fade.from_start(part.d6)
    torch.bmm(part.q.mT, part.d, out=part.d_updates)
    part.dS.last.copy_(dS)
    part.dS.run(fade.whole, back=True)
    dS.copy_(part.dS.first)
    # 4. Through the states before and after each chunk.
    part.dq.baddbmm_(part.d, part.before)
    part.dk.baddbmm_(part.v, part.d_after.mT)
    part.dv_through_states()
    part.of(dv).copy_(part.dv6)
    # 5. The denominator, of rotated features or of unrotated ones.
    if call.signed:
        _through_sums(part, z, dz, d_den, (part.tq, part.tk), (part.dq6, part.dk6))
    dfq, dfk = part.turned_back()
    if call.divides and not call.signed:
        _through_sums(part, z, dz, d_den, (part.fq, part.fk), (dfq, dfk))
    # 6. Log decay: the identity at the top of this file.
    if dg.ndim > 1:
        _write_dg(part, dfq, dfk, dg)
    # 7. Through the feature map.
    write_gradient(call.phi, call.eps, part.fq, dfq, part.of(dq))
    write_gradient(call.phi, call.eps, part.fk, dfk, part.of(dk))


def _through_division(part: Part, out: Tensor, den: Tensor, d_out: Tensor) -> Tensor:
    """The numerators' gradients, in part.d6; returns those of the denominators."""
    call, given, d = part.call, part.of(d_out), part.d6
    if not call.divides:
        return d.copy_(given)
    total, y = part.of(den), part.of(out)
    torch.div(given, divisor(total, call.signed), out=d)
    if y.dtype == torch.float16:  # no gradient where the output was clamped
        d.masked_fill_(y.abs() >= FLOAT16_MAX, 0.0)
    d_den = torch.mul(d, y, out=part.spare_v).sum(-1, keepdim=True).neg_()
    return d_den.masked_fill_(total.abs() < ROTATED_FLOOR, 0.0) if call.signed else d_den


def _through_sums(
    part: Part,
    z: Tensor,
    dz: Tensor,
    d_den: Tensor,
    features: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
) -> None:
    """Adds to the features' gradients what flows through the denominators; takes dz back."""
    (q, k), (dq, dk), sums = features, grads, part.sums
    sums.of_keys(k, z)
    dq.addcmul_(sums.all, d_den)
    weighed = torch.mul(q, d_den, out=part.spare_q)
    if part.call.groups > 1:
        weighed = weighed.sum(3, keepdim=True)
    sums.of_queries(weighed, dz)
    dz.copy_(sums.dz.first)
    dk.add_(sums.all)


def _write_dg(part: Part, dfq: Tensor, dfk: Tensor, dg: Tensor) -> None:
    """dg of the block from all that flows to the features."""
    fade = part.fade
    row = torch.mul(part.fq, dfq, out=part.spare_q).sum((3, 5))  # (n, rows, K, C)
    row -= torch.mul(part.fk, dfk, out=part.spare_k).sum((3, 5))
    steps = part.updates.view(part.S.after.shape)
    through = torch.mul(part.S.after, part.dS.after.mT, out=steps).sum((-2, -1))
    if part.call.divides:
        through += part.sums.through_ends()
    d = (row[..., None, None, :] @ fade.sees).mT  # sums over i >= t: (n, rows, K, 1, C, 1)
    after = through[..., None, None, None]
    d += after if fade.last is None else after * fade.last
    if part.fresh is not None:  # a first token: nothing is before it that its decay scales
        d.masked_fill_(part.fresh, 0.0)
    part.of(dg.unsqueeze(-1)).copy_(d)


chunked = make_form("chunked", _forward, _backward, _starts)
