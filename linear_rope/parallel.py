"""One sequence over several processes: they exchange states, never keys, values or scores.

Each rank holds a consecutive piece of the sequence. All that the tokens before it mean to a piece
is a state, and states add up. With S_r what piece r leaves behind by itself, G_r the sum of its log
decays, and c the stabilizers (`linear_rope.stabilizer`), the state before piece r + 1 is

    B_{r+1} = exp(b_r + G_r - b_{r+1}) B_r + exp(c_r - b_{r+1}) S_r,   b_{r+1} = max(b_r + G_r, c_r)

So a call sums up its piece, gathers the sums of all ranks, and attends to its piece with the state
that follows: one all-gather on the way forward, one all-to-all of the same size on the way
back, whatever the length.

    with parallel.sequence_parallel(model, group):
        loss = model.loss(tokens, targets)              # every rank has its piece of them

Source: Sun et al. 2025, LASP-2, arXiv 2502.07563, algorithms 1 and 2; decay and stabilizer as here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linear_rope.arguments import check_arguments, check_heads, check_state
from linear_rope.attention import RotaryLinearAttention
from linear_rope.attention_base import AttentionBase
from linear_rope.exchange import (
    AllGather,
    add_up,
    count,
    last_position,
    pack,
    place,
    total_decay,
    unpack,
)
from linear_rope.feature_base import Map
from linear_rope.functional import linear_attention as attend
from linear_rope.fused import TABLED
from linear_rope.model import Encoder, LanguageModel
from linear_rope.positions import resolve_positions
from linear_rope.rotary import Rotation
from linear_rope.rotary_variants import AxialRotary
from linear_rope.states import AttentionState

__all__ = ["first_positions", "linear_attention", "sequence_parallel"]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    feature_map: str | Map = "elu+1",
    rotary: Rotation | None = None,
    rotate: str = "after",
    denominator: str = "unrotated",
    causal: bool = True,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    positions: int | Tensor | None = None,
    output_norm: bool = False,
    state: AttentionState | None = None,
    return_state: bool = False,
    backend: str = "auto",
    chunk_size: int | None = None,
) -> Any:  # Tensor, or (Tensor, AttentionState) with return_state
    """`linear_rope.linear_attention` of a sequence whose pieces are on the ranks of a group.

    Every rank calls it with its own piece, in the order of the ranks. Lengths may differ, also be
    0; all else must be alike. The result is that of one call on the whole sequence, but for
    rounding, and so are the gradients of q, k, v and log_decay, if every rank runs its backward
    pass (through the empty output too of a rank without a token) and the loss is the sum of the
    ranks' losses. Of what all ranks share (parameters, `state`) each has a part of the gradient:
    add them up.

    What is exchanged: W = ranks, each sends
    batch x key heads x (features x (value width + 1) + 2) numbers of at least float32 to W - 1
    others, and the same again in the backward pass; and, without `positions`, 7 integers (batch + 7
    with a `key_mask`). This does not grow with the length. The piece is read twice, first for its
    state, with one query head a key head: attention takes twice the time of one process on that
    piece, or 1.5 times with four query heads a key head.

    Args:
        group: of torch.distributed; None is all processes.
        positions: of this rank's tokens in the whole sequence, as there. None counts from 0, or on
            from `state`, through all the ranks' lengths (of real tokens, with a `key_mask`).
        causal: False: every query sees the keys of all ranks. Self-attention only.
        state: what came before the first rank's piece, the same on every rank.
        return_state: also return the state after the last rank's piece, the same on every rank.
        others: see `linear_rope.linear_attention`. There are no documents (segment_ids) here.

    Raises:
        ValueError: torch.distributed is not initialized; pieces that do not fit together; a
            rotation other than `Rotary`, `CosFormer` and `LearnedRotary`; and what
            `linear_rope.linear_attention` refuses.

    Source: arXiv 2502.07563 (LASP-2).
    """
    rank, _ = place(group)
    check_heads(q=q, k=k, v=v)
    check_arguments(
        q, k, v, rotate, denominator, causal, key_mask, log_decay, state, return_state, backend
    )
    check_state(state, getattr(feature_map, "feature_dim", None), k, v)
    _check_rotation(rotary)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"a sequence over several ranks attends to itself: q has {q.shape[2]} tokens but k has "
            f"{k.shape[2]}; make them equal"
        )
    options: dict[str, Any] = {
        "feature_map": feature_map,
        "rotary": rotary,
        "rotate": rotate,
        "denominator": denominator,
        "backend": backend,
        "chunk_size": chunk_size,
    }
    after = None
    if positions is None:
        names = ("batch", "key heads", "width of k", "width of v")
        sizes = (k.shape[0], k.shape[1], k.shape[3], v.shape[3])
        alike = dict(zip(names, sizes, strict=True))
        first, after = count(k.shape[2], key_mask, state, group, k.device, alike, k.dtype)
        positions = first[0] if key_mask is None and state is None else first[:, None]
    length, at = k.shape[2], positions
    if length:
        at = resolve_positions(
            length, positions, key_mask=key_mask, batch=k.shape[0], device=k.device
        )
    # 1. What this piece leaves behind by itself. Its keys stand in for the queries, whose answers
    # nobody wants.
    past: dict[str, Any] = {"key_mask": key_mask, "log_decay": log_decay, "positions": at}
    _, piece = attend(k.detach(), k, v, return_state=True, **past, **options)
    # 2. What all of them do.
    gathered = AllGather.apply(pack(piece, total_decay(log_decay, key_mask, piece)), group)
    empty = torch.zeros_like(piece.stabilizer)
    if getattr(feature_map, "log_space", False):
        empty = empty - torch.inf
    # A sum over no rank: zeros that know of the exchange. So each rank takes part in its backward.
    nothing = piece._replace(S=unpack(gathered[:0].sum(0), piece)[0], stabilizer=empty)
    nothing = nothing._replace(z=torch.zeros_like(piece.z))
    begin = nothing if state is None else state._replace(S=state.S + nothing.S)
    if causal:
        before = add_up(begin, gathered[:rank])._replace(position=piece.position)
        out = attend(q, k, v, state=before, output_norm=output_norm, **past, **options)
    else:
        # All keys are in the state: those at hand are hidden, and the queries keep their places.
        total = add_up(begin, gathered)._replace(position=piece.position)
        out = attend(
            q,
            torch.zeros_like(k),
            torch.zeros_like(v),
            state=total,
            key_mask=torch.zeros(k.shape[0], length, dtype=torch.bool, device=k.device),
            positions=at,
            key_positions=at,
            output_norm=output_norm,
            **options,
        )
    if not return_state:
        return out
    if after is None:
        after = last_position(length, key_mask, piece.position, group)
    return out, add_up(begin, gathered)._replace(position=after.expand(k.shape[0]).clone())


def first_positions(
    length: int,
    *,
    group: Any = None,
    key_mask: Tensor | None = None,
    state: Any = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of each row's first token on this rank, for a layer's or model's `positions`.

    Args:
        length: tokens that this rank holds. group: None is all processes.
        key_mask: (batch, length) bool, True at real tokens, which alone count.
        state: of what came before the first rank's piece: anything with a `position` (batch,).
        device: where the ranks exchange their lengths (that of the tokens).

    Returns:
        () int64 if all rows are alike, else (batch, 1).

    Raises:
        ValueError: torch.distributed is not initialized.
    """
    return _first(length, key_mask, state, group, device)


def _first(
    length: int, key_mask: Tensor | None, state: Any, group: Any, device: Any, **compared: Any
) -> Tensor:
    """`first_positions`, after the ranks have compared what they have; see `count`."""
    first, _ = count(length, key_mask, state, group, device, **compared)
    return first[0] if key_mask is None and state is None else first[:, None]


@contextmanager
def sequence_parallel(module: nn.Module, group: Any = None) -> Iterator[None]:
    """Within it, the layers and models in `module` read sequences whose pieces are on the ranks.

    Every rank calls the model with its piece, in the order of the ranks: forward passes and
    `LanguageModel.loss` (with targets: the successor of a piece's last token is on the next rank).
    Positions count through the ranks unless they are given. A state that is taken, or returned, is
    that before, or after, the whole sequence; so one can read a prompt here and decode from the
    state afterwards, outside of it. For gradients see `linear_attention`; those of the parameters
    are to be added up over the ranks. The backward pass may run outside, except where it computes
    activations again.

    Args:
        module: it, or modules in it, are `RotaryLinearAttention`, `LanguageModel` or `Encoder`.
        group: of torch.distributed; None is all processes.

    Raises:
        ValueError: torch.distributed is not initialized; there is no such layer; a layer that needs
            its neighbors' tokens: softmax attention, local heads, a short convolution, a token
            shift, a selective rotation; or a rotation that `linear_attention` here refuses.
    """
    place(group)
    layers = [_usable(m) for m in module.modules() if isinstance(m, AttentionBase)]
    if not layers:
        raise ValueError(
            f"sequence_parallel needs a module with RotaryLinearAttention in it, got "
            f"{type(module).__name__}"
        )
    stacks = [m for m in module.modules() if isinstance(m, LanguageModel | Encoder)]
    replaced: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    for layer in layers:
        replaced += [
            (layer, "attend", partial(_attend, group=group)),
            (layer, "forward", partial(_forward, layer.forward, group)),
        ]
    replaced += [
        (stack, "_run", partial(_run, stack._run, group, stack.embedding.weight))
        for stack in stacks
    ]
    for owner, name, _ in replaced:
        if name in vars(owner):
            raise ValueError("sequence_parallel is on already for this module; leave it first")
    # An attribute of the instance comes before the method of its class.
    for owner, name, function in replaced:
        vars(owner)[name] = function
    try:
        yield
    finally:
        for owner, name, _ in replaced:
            del vars(owner)[name]


# ---- Layers and models


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    segment_ids: Tensor | None,
    key_positions: Tensor | None,  # those of the queries: there is no context
    **options: Any,
) -> Any:
    """`linear_attention` of this page, in the place of a layer's."""
    if segment_ids is not None:
        raise ValueError(
            "segment_ids and cu_seqlens cannot be used in sequence parallel: give each document "
            "its own row, or run whole rows on one rank"
        )
    return linear_attention(q, k, v, group=group, **options)


def _forward(forward: Callable[..., Any], group: Any, x: Tensor, *args: Any, **given: Any) -> Any:
    """A layer's forward pass; by itself it would count positions from 0 on every rank."""
    if args or given.get("context") is not None:
        raise ValueError("a sequence over several ranks attends to itself; leave out the context")
    if given.get("positions") is None:
        given["positions"] = _first(
            x.shape[1],
            given.get("key_mask"),
            given.get("state"),
            group,
            x.device,
            alike={"batch": x.shape[0], "dim": x.shape[2]},
            dtype=x.dtype,
        )
    return forward(x, **given)


def _run(
    run: Callable[..., Any],
    group: Any,
    weight: Tensor,  # the embedding's, in the type that the model computes with
    tokens: Tensor,
    key_mask: Tensor | None,
    positions: int | Tensor | None,
    segment_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Any,
    return_state: bool,
) -> Any:
    """A model's pass through its layers, likewise."""
    if positions is None:
        alike = {"batch": tokens.shape[0], "dim": weight.shape[-1]}
        positions = _first(
            tokens.shape[1],
            key_mask,
            state,
            group,
            tokens.device,
            alike=alike,
            dtype=weight.dtype,
        )
    return run(tokens, key_mask, positions, segment_ids, cu_seqlens, state, return_state)


def _usable(layer: AttentionBase) -> RotaryLinearAttention:
    """The layer, if it needs nothing but states from other ranks."""
    looks_back = {
        "softmax attention": not isinstance(layer, RotaryLinearAttention),
        "short_conv": layer.convolution is not None,
        "token_shift": layer.shift is not None,
        "local_heads": layer.local is not None,
    }
    found = [name for name, there in looks_back.items() if there]
    if found or not isinstance(layer, RotaryLinearAttention):
        raise ValueError(
            f"{' and '.join(found)} cannot be used in sequence parallel: they need tokens of other "
            "ranks, which exchange states only; use layers without"
        )
    _check_rotation(layer.rotary)
    return layer


def _check_rotation(rotary: Any) -> None:
    placed = type(rotary) in TABLED and type(rotary) is not AxialRotary
    if rotary is None or (placed and not getattr(rotary, "by_length", False)):
        return
    raise ValueError(
        f"the rotation {rotary!r} cannot be used in sequence parallel, where angles must follow "
        "from a token's own position, and nothing fades by position; use Rotary (without dynamic "
        "scaling), CosFormer or LearnedRotary"
    )
