"""The equation: rotary linear attention (RoFormer, arXiv 2104.09864, eq. 19). Read this page first.

For one head, with R_m the rotation by position m over the features of phi:

    out_m = sum_{n<=m} (R_m phi(q_m)) . (R_n phi(k_n)) v_n  /  sum_{n<=m} phi(q_m) . phi(k_n)

The rotation comes after the feature map and only into the numerator: the denominator stays a sum of
non-negative terms. What follows from it, and surprises: a single weight can be negative or exceed
1; the weights do not sum to 1; and over keys that are alike the rotations cancel, so that the
output shrinks as the position grows (`output_norm` undoes that).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_rope.arguments import (
    DENOMINATORS,
    ROTATE,
    check_arguments,
    check_expansion,
    check_heads,
    check_state,
)
from linear_rope.causal import FUSED, check_chunk_size, checked_product, choose_backend
from linear_rope.causal.division import FLOAT16_MAX, divisor
from linear_rope.decoding import decode_step, is_plain_step
from linear_rope.documents import full_product
from linear_rope.feature_base import Map
from linear_rope.feature_maps import FeatureMap, resolve_feature_map
from linear_rope.fused import fused, tables_of
from linear_rope.permute import Permute, ratio_product
from linear_rope.positions import boundaries, next_position, resolve_positions
from linear_rope.rotary import Rotary, Rotation, check_rotation, check_width
from linear_rope.segments import resolve_segments
from linear_rope.stabilizer import both_features
from linear_rope.states import AttentionState
from linear_rope.xpos import XPos, fade_clock, fading_product

__all__ = ["DENOMINATORS", "ROTATE", "linear_attention"]

Product = Callable[..., tuple[Tensor, Tensor]]  # sums of k v^T: what each query reads, and the last


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Map = "elu+1",
    rotary: Rotation | None = None,
    rotate: str = "after",
    denominator: str = "unrotated",
    causal: bool = True,
    key_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    positions: int | Tensor | None = None,
    key_positions: int | Tensor | None = None,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_norm: bool = False,
    state: AttentionState | None = None,
    return_state: bool = False,
    backend: str = "auto",
    chunk_size: int | None = None,
) -> Any:  # Tensor, or (Tensor, AttentionState) with return_state
    """Rotary linear attention, causal or not (the equation at the top of this page).

    Args:
        q: queries, (batch, head, time, head width D).
        k: keys, (batch, key head, key time, D); key time = time if causal. There may be fewer key
            heads than query heads, if their number divides: query head h uses key head
            h // (heads / key heads) (grouped-query attention, arXiv 2305.13245; one key head is
            multi-query attention).
        v: values, (batch, key head, key time, value width E).
        feature_map: phi; "elu+1" or "relu", a `FeatureMap`, or any function of (..., D) with
            non-negative output. Random feature maps hold weights: build them once and pass them.
        rotary: the rotation; None rotates nothing. Its width is the number of features of phi
            (rotate="after") or D (rotate="before"). See `Rotary` and
            `linear_rope.rotary_variants`.
        rotate: "after" the feature map (the paper's eq. 19), "before" it, or "none".
        denominator: "unrotated" (eq. 19), "rotated" (the features of the numerator; may pass
            through 0, its magnitude is kept above 1e-6), or "none" (no division).
        causal: query m sees keys n <= m, or all keys.
        key_mask: (batch, key time) bool, True at real keys. Others count nowhere and advance no
            position; a query without any real key gives 0.
        log_decay: g <= 0, (batch, key head, time), causal only: the past is scaled by exp(g_t)
            before token t enters, in numerator and denominator alike.
        positions: integers, see `linear_rope.positions.resolve_positions`: None counts from 0, or
            on from the state; an int is the first position; (batch, 1), (time,), (batch, time). An
            axial rotation takes (time, 2) or (batch, time, 2).
        key_positions: the same for the keys; default: as for the queries when there are as many,
            else counted from 0.
        segment_ids: (batch, time) integers, several documents in a row: positions begin again and
            nothing is seen across a boundary. With a state, the first document goes on from it,
            and the state returned is that of the last one. A pad is of the document
            that its id says: padding with an id of its own is a document without a token, and the
            state after it is empty; give pads the id of their neighbor.
            Self-attention only.
        cu_seqlens: the same for a flat row (batch 1): the documents' limits, see
            `linear_rope.segments.resolve_segments`.
        output_norm: divide each head's output by its root mean square (no weights: an output
            projection that follows would absorb them).
        state: what an earlier call returned, to continue that sequence; causal only. It must be of
            the same feature map, rotation and denominator: states of layers are marked and refused
            otherwise, those of this function are not (sizes alone are checked).
        return_state: also return the state after the last token.
        backend, chunk_size: see `linear_rope.causal.causal_product`.

    Returns:
        (batch, head, time, E) in q's dtype; with `return_state` also an `AttentionState`, in
        float32 at least. All sums are in float32 at least, also under autocast. Rotated weights can
        exceed 1 by orders of magnitude: what float16 cannot hold becomes its largest number, and a
        gradient beyond its range becomes inf, for a loss scaler to see.

    Raises:
        ValueError: arguments that do not fit; the message names the argument, value and remedy.
    """
    check_heads(q=q, k=k, v=v)
    phi = resolve_feature_map(feature_map, q)
    check_chunk_size(chunk_size)
    if (
        state is not None
        and causal
        and q.shape[2] == 1
        and backend in ("auto", "recurrent")
        and rotate in ROTATE
        and denominator in DENOMINATORS
        and key_mask is key_positions is segment_ids is cu_seqlens is None
    ):
        turn = None if rotate == "none" else rotary
        if is_plain_step(q, k, v, phi, turn, rotate, state, log_decay, positions):
            assert isinstance(phi, FeatureMap) and not isinstance(positions, int)
            assert turn is None or isinstance(turn, Rotary)
            choices = (rotate, denominator, log_decay, positions)
            out, stepped = decode_step(q, k, v, phi, turn, state, *choices, backend=backend)
            if output_norm:
                out = F.rms_norm(out, out.shape[-1:], eps=1e-6)
            return (out, stepped) if return_state else out
    check_arguments(
        q, k, v, rotate, denominator, causal, key_mask, log_decay, state, return_state, backend
    )
    check_state(state, getattr(phi, "feature_dim", None), k, v)
    if not (rotary is None or hasattr(rotary, "width")):
        raise ValueError(
            f"rotary={rotary!r} must be a Rotary, such as Rotary(width), or None to rotate nothing"
        )
    out_dtype = q.dtype
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, device = q.shape[0], q.device
    documents = resolve_segments(batch, k.shape[2], segment_ids, cu_seqlens, device, key_mask)
    if documents is not None and (q.shape[2] != k.shape[2] or key_positions is not None):
        raise ValueError("segment_ids and cu_seqlens need self-attention: as many queries as keys")
    fresh = None if documents is None else boundaries(documents)
    one_clock = q.shape[2] == k.shape[2] and key_positions is None
    if rotate == "none":
        rotary = None
    check_rotation(
        rotary,
        rotate=rotate,
        causal=causal,
        state=state is not None or return_state,
        packed=documents is not None,
        one_clock=one_clock,
    )
    check_expansion(phi, rotary, rotate)
    axes = getattr(rotary, "axes", 1)
    # Shapes on the meta device know no autocast of their own.
    with torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False):
        start = None if state is None else state.position
        mask_q = key_mask if one_clock else None
        at_q = resolve_positions(
            q.shape[2],
            positions,
            start=start,
            key_mask=mask_q,
            documents=documents,
            batch=batch,
            device=device,
            axes=axes,
        )
        at_k = at_q
        if not one_clock:
            at_k = resolve_positions(
                k.shape[2],
                key_positions,
                key_mask=key_mask,
                batch=batch,
                device=device,
                axes=axes,
                name="key_positions",
            )

        if rotary is not None and rotate == "before":
            q, k = rotary(q.to(dtype), at_q), rotary(k.to(dtype), at_k)
            rotary, v = None, v.to(dtype)
        after = None
        fades = isinstance(rotary, XPos | Permute) and rotary.log_fade is not None
        if return_state or fades:
            given = positions if one_clock else key_positions
            after = next_position(
                at_k,
                batch=batch,
                start=start,
                key_mask=key_mask,
                documents=documents,
                given=given,
            )
        shared: dict[str, Any] = {
            "denominator": denominator,
            "key_mask": key_mask,
            "log_decay": log_decay,
            "fresh": fresh,
            "state": state,
            "backend": choose_backend(backend, q) if causal else backend,
            "chunk_size": chunk_size,
        }
        tables = None
        if causal and shared["backend"] in FUSED:
            tables = tables_of(rotary, at_q, dtype)
        if tables is not None:
            out, S, z, top = fused(phi, q, k, v, rotary, tables, output_norm, **shared)
        else:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            form: Product = checked_product if causal else full_product
            if isinstance(rotary, XPos | Permute) and fades and after is not None:
                clock = fade_clock(
                    at_k,
                    batch=batch,
                    start=start,
                    after=after,
                    key_mask=key_mask,
                    fresh=fresh,
                    title=rotary.title,
                )
                fading = fading_product if isinstance(rotary, XPos) else ratio_product
                form = partial(fading, rotary, clock)  # type: ignore[arg-type]
            out, S, z, top = _composed(phi, q, k, v, rotary, at_q, at_k, form, causal, **shared)
        if output_norm:
            out = F.rms_norm(out, out.shape[-1:], eps=1e-6)
        if out_dtype == torch.float16:
            # Weights can exceed 1: what float16 cannot hold becomes its largest number, not inf.
            out = out.clamp(-FLOAT16_MAX, FLOAT16_MAX)
        out = out.to(out_dtype)
    if not return_state:
        return out
    assert after is not None
    return out, AttentionState(S, z, top, after)


def _composed(
    phi: Map,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: Rotation | None,
    at_q: Tensor,
    at_k: Tensor,
    form: Product,
    causal: bool,
    *,
    denominator: str,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    fresh: Tensor | None,
    state: AttentionState | None,
    backend: str,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The equation step by step: output, S, z, stabilizer. `form` is the product it is made of."""
    # 1. Features, rotated.
    top = None if state is None else state.stabilizer
    phi_q, phi_k, scale, log_decay, top = both_features(
        phi, q, k, causal, key_mask, log_decay, fresh, denominator, top
    )
    turned_q, turned_k = phi_q, phi_k
    if rotary is not None:
        check_width(rotary, phi_q)
        turned_q, turned_k = rotary(phi_q, at_q), rotary(phi_k, at_k)
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0.0)

    # 2. Numerator and denominator: the same primitive.
    product = partial(
        form, log_decay=log_decay, fresh=fresh, backend=backend, chunk_size=chunk_size
    )
    past_S, past_z = (None, None) if state is None else (state.S, state.z.unsqueeze(-1))
    if denominator == "none":
        num, S = _grouped(product, turned_q, turned_k, v, past_S)
        return num * scale, S, torch.zeros_like(S[..., 0]), top
    ones = torch.ones_like(v[..., :1])
    if denominator == "rotated" or turned_k is phi_k:
        # Same features above and below: a column of ones in v is the denominator.
        past = None if state is None else torch.cat([state.S, state.z[..., None]], dim=-1)
        both, S = _grouped(product, turned_q, turned_k, torch.cat([v, ones], dim=-1), past)
        num, den = both[..., :-1], both[..., -1:]
        # As dense as those of the other forms: a graph made for one state serves the next.
        S, z = S[..., :-1].contiguous(), S[..., -1].contiguous()
    else:
        num, S = _grouped(product, turned_q, turned_k, v, past_S)
        den, z = _grouped(product, phi_q, phi_k, ones, past_z)
        z = z.squeeze(-1)

    # 3. Divide, once.
    out = num / divisor(den, denominator == "rotated" and turned_k is not phi_k)
    return out, S, z, top


def _grouped(
    product: Product,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The product for one or several query heads a key head; there is one state a key head."""
    if q.shape[1] == k.shape[1]:
        return product(q, k, v, state=state)
    # One query head of each group at a time: the shared keys and values are never copied.
    turns = q.unflatten(1, (k.shape[1], -1)).unbind(2)
    results = [product(turn, k, v, state=state) for turn in turns]
    return torch.stack([out for out, _ in results], dim=2).flatten(1, 2), results[0][1]
