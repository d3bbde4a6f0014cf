"""What is refused: one sentence that names the argument, its value, the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from linear_rope.causal import BACKENDS, check_signs
from linear_rope.cosformer import CosFormer
from linear_rope.counts import check_counts
from linear_rope.feature_maps import Expand
from linear_rope.permute import Permute
from linear_rope.states import AttentionState
from linear_rope.xpos import XPos

__all__ = [
    "DENOMINATORS",
    "ROTATE",
    "check_arguments",
    "check_choices",
    "check_cosformer",
    "check_dropout",
    "check_expansion",
    "check_flags",
    "check_heads",
    "check_key_mask",
    "check_local",
    "check_one_axis",
    "check_sizes",
    "check_softmax",
    "check_state",
    "check_tensors",
]

ROTATE = ("after", "before", "none")
DENOMINATORS = ("unrotated", "rotated", "none")


def check_choices(**choices: tuple[Any, Iterable[str]]) -> None:
    """Refuses a name that is not known: NAME=(value, known values)."""
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of: {', '.join(known)}")


def check_flags(**flags: Any) -> None:
    """Refuse what is neither True nor False, by name."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")


def check_sizes(
    dim: Any, heads: Any, kv_heads: Any = None, head_dim: Any = None, value_dim: Any = None
) -> None:
    """Refuses widths and numbers of heads that are none, or do not fit together; None: by default.

    `check_local` says the same of local heads.
    """
    check_counts(dim=dim, heads=heads)
    check_counts(optional=True, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    if head_dim is None and dim % heads:
        raise ValueError(
            f"heads={heads} does not divide dim={dim}; choose a divisor, or give the layer head_dim"
        )
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(
            f"kv_heads={kv_heads} does not divide heads={heads}; choose a divisor (1 is "
            "multi-query attention)"
        )


def check_local(local_heads: Any, window: Any, heads: int, kv_heads: int | None) -> None:
    """Refuses local heads that leave none linear or split a group, and a window without a token."""
    check_counts(0, local_heads=local_heads)
    check_counts(window=window)
    if local_heads >= heads:
        raise ValueError(f"local_heads={local_heads} must leave one of heads={heads} linear")
    group = heads // (kv_heads or heads)
    if local_heads % group:
        raise ValueError(
            f"local_heads={local_heads} must be a multiple of heads / kv_heads = {group}, which "
            "share a key head"
        )


def check_one_axis(local_heads: int, rotary: Any) -> None:
    """Refuses local heads beside positions of two axes."""
    if local_heads and getattr(rotary, "axes", 1) > 1:
        raise ValueError(
            f"local_heads={local_heads} look back along one axis; use another rotary_scaling "
            "than 'axial', or no local heads"
        )


def check_dropout(dropout: Any) -> None:
    """Refuses what is no number, or would leave nothing."""
    if not isinstance(dropout, int | float) or not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout!r} must be in [0, 1)")


def check_softmax(decay: Any, local_heads: Any, rotary: Any = None) -> None:
    """Refuses what softmax attention has no form for; `rotary` turns its queries and keys."""
    for name, value, none, why in (
        ("decay", decay, "none", "softmax attention has no state that could fade"),
        ("local_heads", local_heads, 0, "beside softmax heads local ones are no choice"),
    ):
        if value != none:
            raise ValueError(
                f"{name}={value!r} needs attention='linear', RotaryLinearAttention; {why}"
            )
    if isinstance(rotary, XPos):
        raise ValueError(
            "rotary_scaling='xpos' needs linear attention: a cache of rotated keys does not fade"
        )
    if isinstance(rotary, CosFormer | Permute):
        name = type(rotary).__name__.lower()
        raise ValueError(
            f"rotary_scaling={name!r} needs linear attention: its weights are products of features"
        )


def check_tensors(**given: Any) -> None:
    """Refuses what is no tensor: NAME=value."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x)}; use torch.tensor")


def check_key_mask(
    mask: Tensor | None, want: tuple[int, int], device: torch.device, name: str = "key_mask"
) -> None:
    """Refuses a mask that is not bool of shape `want`: others would broadcast, or add to scores."""
    if mask is None:
        return
    check_tensors(**{name: mask})
    if mask.dtype != torch.bool or mask.shape != want:
        raise ValueError(
            f"{name} must be bool of shape (batch, time) = {want}, True at real tokens, "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    if mask.device != device:
        raise ValueError(f"{name} is on {mask.device} but the input is on {device}")


def check_expansion(feature_map: Any, rotary: Any, rotate: str) -> None:
    """Refuses a rotation that mixes the features of an expanded map."""
    half = getattr(rotary, "pairing", "") == "half"
    if half and rotate == "after" and isinstance(feature_map, Expand):
        raise ValueError(
            "pairing='half' would turn the features of an expanded map against each other, so that "
            "weights exceed the unrotated ones; use pairing='interleaved'"
        )


def check_cosformer(feature_map: Any, rotary: Any, rotate: str) -> None:
    """Refuses cosFormer's rotation where its weights could be negative."""
    fits = isinstance(feature_map, Expand) and rotate == "after"
    if isinstance(rotary, CosFormer) and not fits:
        raise ValueError(
            "cosformer turns expanded features after the map: use feature_map='relu-expand' or "
            f"'elu+1-expand' and rotate='after', got {type(feature_map).__name__} and {rotate!r}"
        )


def check_heads(**given: Any) -> None:
    """Refuses what does not have the axes of heads: NAME=value."""
    for name, x in given.items():
        check_tensors(**{name: x})
        if x.ndim != 4:
            raise ValueError(
                f"{name} must have shape (batch, head, time, width), got {tuple(x.shape)}"
            )


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotate: str,
    denominator: str,
    causal: bool,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    state: AttentionState | None,
    return_state: bool,
    backend: str,
) -> None:
    """Names, sizes, dtypes and devices; arguments as in `linear_attention`."""
    check_choices(
        rotate=(rotate, ROTATE),
        denominator=(denominator, DENOMINATORS),
        backend=(backend, ("auto", *BACKENDS)),
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got dtype {x.dtype}")
        if x.device != q.device or x.dtype != q.dtype:
            raise ValueError(
                f"q, k and v must share dtype and device: {name} is {x.dtype} on {x.device}, q is "
                f"{q.dtype} on {q.device}; convert one with .to()"
            )
        if x.shape[0] != q.shape[0]:
            raise ValueError(
                f"q, k and v must agree in batch, got {name} {tuple(x.shape)} for q "
                f"{tuple(q.shape)}"
            )
    if k.shape[1] != v.shape[1] or k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the {q.shape[1]} heads of q must be a multiple of those of k and v, which agree, got "
            f"{k.shape[1]} and {v.shape[1]}"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"q has head width {q.shape[3]} but k has {k.shape[3]}; make them equal")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"there are {k.shape[2]} keys but {v.shape[2]} values; make them equal")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"causal attention needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}; "
            "use causal=False for cross-attention, or pass the past as `state`"
        )
    check_key_mask(key_mask, (k.shape[0], k.shape[2]), q.device)
    if log_decay is not None:
        check_tensors(log_decay=log_decay)
        if not log_decay.is_floating_point():
            raise ValueError(f"log_decay must be a floating-point tensor, got {log_decay.dtype}")
        if not causal:
            raise ValueError("log_decay needs causal=True: without an order nothing decays")
        if log_decay.shape != k.shape[:3]:
            raise ValueError(
                f"log_decay must have shape (batch, key head, time) = {tuple(k.shape[:3])}, "
                f"got {tuple(log_decay.shape)}"
            )
        if log_decay.device != q.device:
            raise ValueError(f"log_decay is on {log_decay.device} but q is on {q.device}")
        check_signs(log_decay)
    if (state is not None or return_state) and not causal:
        raise ValueError("a state needs causal=True: non-causal attention sees all keys at once")


def check_state(state: AttentionState | None, features: int | None, k: Tensor, v: Tensor) -> None:
    """Refuses a state of other sizes; `features` is None for a plain function, which has no say."""
    if state is None:
        return
    if not isinstance(state, AttentionState):
        raise ValueError(
            f"state must be an AttentionState, as an earlier call returned, got {type(state)}"
        )
    rows = (k.shape[0], k.shape[1])
    features = state.S.shape[-2] if features is None else features
    wanted = {
        "S": (*rows, features, v.shape[-1]),
        "z": (*rows, features),
        "stabilizer": rows,
        "position": rows[:1],
    }
    for name, want in wanted.items():
        x: Tensor = getattr(state, name)
        if x.shape != want or x.device != k.device:
            raise ValueError(
                f"state.{name} must have shape {want} on {k.device}, got {tuple(x.shape)} on "
                f"{x.device}; pass the state of an earlier call with the same sizes, or none"
            )
        if x.is_floating_point() == (name == "position"):
            kind = "int64" if name == "position" else "floating-point"
            raise ValueError(f"state.{name} must be {kind}, got dtype {x.dtype}")
