"""One token through a stack of blocks, with nothing in its way.

What a layer checks and resolves at every call (masks, documents, positions, marks of states) costs
several times as much as the matrix products of a single token. `LanguageModel` decodes through here
where its blocks are plain and the state is known to fit; everything else takes `Block.forward`, and
the two agree (that is tested).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope.attention import RotaryLinearAttention
from linear_rope.block import Block
from linear_rope.decoding import decode_step
from linear_rope.feature_base import FeatureMap
from linear_rope.rotary import Rotary

__all__ = ["can_step", "step"]


def can_step(blocks: Iterable[nn.Module], device: torch.device) -> bool:
    """Whether `step` may take the place of the blocks' own forward passes."""
    return (
        device.type in ("cpu", "cuda")
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(device.type)
        and all(_is_plain(block) for block in blocks)
    )


def _is_plain(block: Any) -> bool:
    if type(block) is not Block or type(block.attention) is not RotaryLinearAttention:
        return False
    layer, dtype = block.attention, block.attention.query.weight.dtype
    phi, rotary = layer.feature_map, layer.rotary
    return bool(
        not (layer.mixed or block.training)
        and layer.backend in ("auto", "recurrent")
        and isinstance(phi, FeatureMap)
        and not phi.log_space
        and (rotary is None or (type(rotary) is Rotary and not rotary.by_length))
        and dtype in (torch.float32, torch.float64)
        # Someone may be watching.
        and not any(x._forward_hooks or x._forward_pre_hooks for x in (block, layer))
    )


def step(blocks: Iterable[Any], x: Tensor, states: Iterable[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """(batch, 1, dim) -> the same, and the layers' new states; see `can_step`."""
    after = []
    for block, past in zip(blocks, states, strict=True):
        x, new = _layer(block, x, past)
        after.append(new)
    return x, tuple(after)


def _layer(block: Block, x: Tensor, past: Any) -> tuple[Tensor, Any]:
    layer: Any = block.attention
    batch, normed = x.shape[0], block.attention_norm(x)
    q = layer.query(normed).view(batch, layer.heads, 1, layer.head_dim)
    k = layer.key(normed).view(batch, layer.kv_heads, 1, layer.head_dim)
    v = layer.value(normed).view(batch, layer.kv_heads, 1, layer.value_dim)
    q, k = layer.norm_heads(q, k)
    g = None if layer.gate is None else layer.gate(normed)
    heads, after = decode_step(
        q, k, v, layer.feature_map, layer.rotary, past, layer.rotate, layer.denominator, g, None
    )
    if layer.output_norm:
        heads = F.rms_norm(heads, heads.shape[-1:], eps=1e-6)
    merged = heads.view(batch, 1, layer.heads * layer.value_dim)
    if layer.output_gate is not None:
        merged = layer.output_gate(merged, normed)
    x = x + layer.out(merged)
    return block.feed_forward(x), after._replace(made_by=past.made_by)
