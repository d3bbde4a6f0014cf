"""The chunkwise form, with a hand-written backward: linear time, the form that trains.

Time is cut into chunks of C tokens. Inside a chunk everything is a small quadratic product, between
chunks only the state S (M x E) is handed on. In a chunk, with G_i the sum of the log decays from
the chunk's first token up to token i, and S the state before the chunk:

    o_i = exp(G_i) q_i S + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) v_j
    S'  = exp(G_C) S + sum_j exp(G_C - G_j) k_j v_j^T

The gradients of q, k, v are products of the same kind, run backward in time with dS handed from
chunk to chunk. The gradient of the log decay needs no product of its own: scaling the past of token
t is scaling q_i for i >= t and unscaling k_j for j >= t, so

    dg_t = sum_{i>=t} (q_i . dq_i - k_i . dk_i) + <S', dS'>       (i in the chunk of t)

(the identity behind the gated linear attention kernels, arXiv 2312.06635, appendix C; taken here a
chunk at a time, so that rounding does not pile up over the sequence).

Memory: the work is done block by block (some thousand rows of some heads), so that what is needed
for a moment stays in the cache. For the backward pass only the inputs and the state before each
block are kept; states inside a block are computed again. In all O(T (M + E) + (T / C) M E) or less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linear_rope.causal.reference import empty_state, widened

# Rows (heads x tokens) a block: small enough for its temporaries to be reused while still in the
# cache, large enough to keep torch's overhead a call small.
ROWS = 16384


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """O(T (C + M) E) time for chunks of C tokens; differentiable once."""
    out, final, _ = _Chunked.apply(q, k, v, log_decay, state, chunk_size)
    return out, final


class _Chunked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor | None, chunk_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(q, k, v, g, state, chunk_size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, g, state, ctx.chunk_size = inputs
        ctx.has_state = state is not None
        starts = output[2]
        ctx.mark_non_differentiable(starts)
        ctx.save_for_backward(q, k, v, g, starts)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, starts = ctx.saved_tensors
        # A decay that no one trains (a stabilizer's, a document's end) costs no gradient.
        want_dg = g is not None and ctx.needs_input_grad[3]
        dq, dk, dv, dg, d_state = _ChunkedBackward.apply(
            q, k, v, g, starts, d_out, d_final, ctx.chunk_size, want_dg
        )
        return dq, dk, dv, (dg if want_dg else None), (d_state if ctx.has_state else None), None


class _ChunkedBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that a second derivative is refused aloud."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        starts: Tensor,
        d_out: Tensor,
        d_final: Tensor,
        chunk_size: int,
        want_dg: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return _backward(q, k, v, g, starts, d_out, d_final, chunk_size, want_dg)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "the chunked form is differentiable once; for second derivatives use "
            'backend="reference" or backend="recurrent", which are plain torch'
        )


# ---- The blocks ---------------------------------------------------------------------------------


def _plan(q: Tensor, chunk_size: int) -> tuple[int, int]:
    """(chunk length, chunks a block): independent of the batch, so that vmap may fold into it."""
    heads, length = q.shape[1], q.shape[2]
    chunk = max(1, min(chunk_size, length))
    return chunk, max(1, ROWS // (max(1, heads) * chunk))


def _blocks(q: Tensor, chunk_size: int) -> list[tuple[int, int, int, int]]:
    """(start, stop, chunks, chunk length) of each block of time, the short last chunk by itself."""
    length = q.shape[2]
    chunk, step = _plan(q, chunk_size)
    whole = length // chunk
    blocks = [
        (n * chunk, min(n + step, whole) * chunk, min(step, whole - n), chunk)
        for n in range(0, whole, step)
    ]
    if rest := length - whole * chunk:
        blocks.append((whole * chunk, length, 1, rest))
    return blocks


def _empty_starts(q: Tensor, state: Tensor, chunk_size: int) -> Tensor:
    """Room for the state before each block: (blocks or one more, batch, head, M, E)."""
    chunk, step = _plan(q, chunk_size)
    return state.new_empty(q.shape[2] // (chunk * step) + 2, *state.shape)


def _groups(q: Tensor) -> Iterator[slice]:
    """Slices of the batch that go together through a block: many when sequences are short."""
    batch, heads, length = q.shape[:3]
    step = max(1, min(batch, ROWS // max(1, heads * length)))
    return (slice(b, b + step) for b in range(0, batch, step))


def _cut(x: Tensor, block: tuple[int, int, int, int]) -> Tensor:
    """The block's part of (group, head, time, width) as (group, head, chunks, C, width): a view."""
    start, stop, chunks, length = block
    return x[:, :, start:stop].unflatten(2, (chunks, length))


class _Decay:
    """The decay factors of a block, each of them at most 1; all None without decay."""

    def __init__(self, g: Tensor | None, block: tuple[int, int, int, int], lower: Tensor) -> None:
        self.lower = lower  # (C, C) of ones up to the diagonal
        self.pairs = self.from_start = self.to_end = self.whole = None
        if g is not None:
            total = widened(_cut(g.unsqueeze(-1), block).squeeze(-1)).cumsum(-1)  # (g, h, n, C)
            pairs = (total[..., :, None] - total[..., None, :]).to(g.dtype)
            # Above the diagonal the exponent is positive and may overflow: cut it before exp.
            self.pairs = pairs.clamp_(max=0.0).exp_().mul_(lower)  # exp(G_i - G_j), j <= i
            self.from_start = total.exp().to(g.dtype).unsqueeze(-1)  # exp(G_i)
            self.to_end = (total[..., -1:] - total).exp().to(g.dtype).unsqueeze(-1)
            self.whole = total[..., -1:].exp().to(g.dtype).unsqueeze(-1)  # exp(G_C)

    def mask(self, scores: Tensor) -> Tensor:
        return scores.mul_(self.lower if self.pairs is None else self.pairs)

    @staticmethod
    def scale(x: Tensor, factor: Tensor | None) -> Tensor:
        return x if factor is None else x * factor

    def scan(self, first: Tensor, updates: Tensor, reverse: bool = False) -> Tensor:
        """States (group, head, chunks + 1, M, E): x_0 = first, x_{n+1} = exp(G_C) x_n + updates_n.

        With `reverse` the same from the last chunk to the first: x_n from x_{n+1} and updates_n.
        """
        chunks = updates.shape[2]
        states = updates.new_empty(*updates.shape[:2], chunks + 1, *updates.shape[3:])
        states[:, :, chunks if reverse else 0] = first
        for n in reversed(range(chunks)) if reverse else range(chunks):
            old, new = (n + 1, n) if reverse else (n, n + 1)
            if self.whole is None:
                torch.add(states[:, :, old], updates[:, :, n], out=states[:, :, new])
            else:
                torch.addcmul(
                    updates[:, :, n], states[:, :, old], self.whole[:, :, n], out=states[:, :, new]
                )
        return states


def _lower(q: Tensor, block: tuple[int, int, int, int]) -> Tensor:
    return torch.ones(block[3], block[3], dtype=q.dtype, device=q.device).tril_()


def _without_autocast(q: Tensor) -> torch.autocast:
    """Inside the operators products keep their inputs' dtype, whatever the caller's autocast."""
    return torch.autocast(q.device.type, enabled=False)


# ---- Forward ------------------------------------------------------------------------------------


def _forward_kernel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, final state, and the state before each block (blocks, batch, head, M, E)."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final = empty_state(k, v)
    if state is not None:
        final.copy_(state)
    blocks = _blocks(q, chunk_size)
    starts = _empty_starts(q, final, chunk_size)
    with _without_autocast(q):
        for group in _groups(q):
            carry = final[group]
            gg = None if g is None else g[group]
            for number, block in enumerate(blocks):
                starts[number, group] = carry
                _forward_block(q[group], k[group], v[group], gg, carry, out[group], block)
    return out, final, starts


def _forward_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    carry: Tensor,
    out: Tensor,
    block: tuple[int, int, int, int],
) -> None:
    """Writes the block's rows of `out` and advances `carry` in place."""
    qc, kc, vc = _cut(q, block), _cut(k, block), _cut(v, block)
    decay = _Decay(g, block, _lower(q, block))
    # 1. States between the chunks: what each chunk adds, then the sum over chunks.
    states = decay.scan(carry, decay.scale(kc, decay.to_end).mT @ vc)
    # 2. Inside each chunk: the quadratic product, masked and decayed.
    inside = decay.mask(qc @ kc.mT) @ vc
    # 3. What came before each chunk, through its state.
    before = decay.scale(qc, decay.from_start) @ states[:, :, :-1]
    torch.add(inside, before, out=_cut(out, block))
    carry.copy_(states[:, :, -1])


# ---- Backward -----------------------------------------------------------------------------------


def _backward_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    starts: Tensor,
    d_out: Tensor,
    d_final: Tensor,
    chunk_size: int,
    want_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log decay (empty if unwanted) and initial state."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dg = torch.empty(q.shape[:3] if want_dg else (0,), dtype=q.dtype, device=q.device)
    d_state = d_final.clone(memory_format=torch.contiguous_format)
    blocks = _blocks(q, chunk_size)
    with _without_autocast(q):
        for group in _groups(q):
            gg = None if g is None else g[group]
            dgg = dg[group] if want_dg else None
            for number in reversed(range(len(blocks))):
                _backward_block(
                    (q[group], k[group], v[group], gg, starts[number, group], d_out[group]),
                    d_state[group],
                    (dq[group], dk[group], dv[group], dgg),
                    blocks[number],
                )
    return dq, dk, dv, dg, d_state


def _backward_block(
    saved: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor],
    carry: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor | None],
    block: tuple[int, int, int, int],
) -> None:
    """Writes the block's rows of the gradients; takes dS from after the block to before it."""
    q, k, v, g, start, d_out = saved
    dq, dk, dv, dg = grads
    qc, kc, vc, dc = _cut(q, block), _cut(k, block), _cut(v, block), _cut(d_out, block)
    decay = _Decay(g, block, _lower(q, block))
    # 1. The states again, as in the forward pass; their gradients from the last chunk to the first.
    k_end, q_start = decay.scale(kc, decay.to_end), decay.scale(qc, decay.from_start)
    states = decay.scan(start, k_end.mT @ vc)
    d_states = decay.scan(carry, q_start.mT @ dc, reverse=True)
    before, d_after = states[:, :, :-1], d_states[:, :, 1:]
    # 2. Values: through the chunk's scores, and through the state after the chunk.
    scores = decay.mask(qc @ kc.mT)
    torch.add(scores.mT @ dc, k_end @ d_after, out=_cut(dv, block))
    # 3. Queries and keys: through the scores' gradient, and through the states.
    d_scores = decay.mask(torch.matmul(dc, vc.mT, out=scores))
    d_q = decay.scale(dc @ before.mT, decay.from_start)
    d_k = decay.scale(vc @ d_after.mT, decay.to_end)
    torch.add(d_scores @ kc, d_q, out=_cut(dq, block))
    torch.add(d_scores.mT @ qc, d_k, out=_cut(dk, block))
    # 4. Log decay: the identity at the top of this file.
    if dg is not None:
        row = (qc * _cut(dq, block) - kc * _cut(dk, block)).sum(-1)  # (group, head, chunks, C)
        from_here = row.flip(-1).cumsum(-1).flip(-1)
        after = (states[:, :, 1:] * d_after).sum((-2, -1)).unsqueeze(-1)
        _cut(dg.unsqueeze(-1), block).squeeze(-1).copy_(from_here + after)
    carry.copy_(d_states[:, :, 0])


# ---- torch.func.vmap: one more batch dimension, folded into the batch ----------------------------


def _fold(x: Any, dim: int | None, size: int, batch_axis: int = 0) -> Any:
    if not isinstance(x, Tensor):
        return x
    x = (
        x.unsqueeze(batch_axis).expand(*x.shape[:batch_axis], size, *x.shape[batch_axis:])
        if dim is None
        else x.movedim(dim, batch_axis)
    )
    return x.flatten(batch_axis, batch_axis + 1)


def _forward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    size = info.batch_size
    out, final, starts = _forward(*(_fold(a, d, size) for a, d in zip(args, in_dims, strict=True)))
    return (
        out.unflatten(0, (size, -1)),
        final.unflatten(0, (size, -1)),
        starts.unflatten(1, (size, -1)),
    ), (0, 0, 1)


def _backward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    size, starts = info.batch_size, 4  # position of `starts`, whose batch axis is the second
    folded = [
        _fold(a, d, size, batch_axis=int(i == starts))
        for i, (a, d) in enumerate(zip(args, in_dims, strict=True))
    ]
    grads = _backward(*folded)
    want_dg = args[-1]
    return tuple(
        g.unflatten(0, (size, -1)) if i != 3 or want_dg else g for i, g in enumerate(grads)
    ), tuple(0 if i != 3 or want_dg else None for i in range(5))


# ---- Operators: opaque to compilers, which need to know the shapes only --------------------------


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    final = empty_state(k, v)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    return out, final, _empty_starts(q, final, chunk_size)


def _backward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    starts: Tensor,
    d_out: Tensor,
    d_final: Tensor,
    chunk_size: int,
    want_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dg = torch.empty(q.shape[:3] if want_dg else (0,), dtype=q.dtype, device=q.device)
    return dq, dk, dv, dg, d_final.new_empty(d_final.shape)


def _operator(name: str, kernel: Any, fake: Any, vmap: Any) -> Any:
    """Registers a torch operator. `torch.library.custom_op` does the same with one line less, but
    loads the whole compiler at the first call (two seconds)."""
    schema = name + torch.library.infer_schema(kernel, mutates_args=())
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linear_rope::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"linear_rope::{name}", vmap, lib=_LIBRARY)
    return getattr(torch.ops.linear_rope, name)


_LIBRARY = torch.library.Library("linear_rope", "FRAGMENT")
_forward = _operator("chunked_forward", _forward_kernel, _forward_fake, _forward_vmap)
_backward = _operator("chunked_backward", _backward_kernel, _backward_fake, _backward_vmap)
