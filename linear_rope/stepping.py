"""One token through a stack of blocks, with nothing in its way.

What a layer checks and resolves at every call (masks, documents, positions, marks of states), and
what a module's own call costs, take several times as long as the matrix products of a single token.
`LanguageModel` decodes through here where its blocks are plain and the state is known to fit;
everything else takes `Block.forward`, and the two agree (that is tested).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from linear_rope.attention import RotaryLinearAttention
from linear_rope.block import Block, feed_forward
from linear_rope.decoding import decode_step, frequencies_of
from linear_rope.feature_base import FeatureMap
from linear_rope.rotary import Rotary

__all__ = ["Step", "make_steps", "run_steps"]

# x (batch, 1, dim) and a layer's state -> the same after the layer
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def make_steps(blocks: Iterable[nn.Module], device: torch.device) -> list[Step] | None:
    """A step for each block, or None where only the blocks' own forward passes do it all.

    Steps hold the parameters of this moment, and know nothing of modules or hooks that come later:
    they are for one run of tokens.
    """
    if (
        device.type not in ("cpu", "cuda")
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled(device.type)
    ):
        return None
    steps = []
    for block in blocks:
        if not _is_plain(block):
            return None
        steps.append(_make_step(block, device))
    return steps


def run_steps(
    steps: Sequence[Step], x: Tensor, states: Iterable[Any]
) -> tuple[Tensor, tuple[Any, ...]]:
    """(batch, 1, dim) -> the same, and the layers' new states."""
    after = []
    for step, past in zip(steps, states, strict=True):
        x, new = step(x, past)
        after.append(new)
    return x, tuple(after)


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
        and not (_is_watched(block) or _is_watched(layer))
    )


def _is_watched(module: nn.Module) -> bool:
    """Whether a hook wants to see the module's calls."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or hooks_of_all._global_forward_hooks
        or hooks_of_all._global_forward_pre_hooks
    )


def _direct(module: Any) -> Callable[[Tensor], Tensor]:
    """The function behind a plain module; the module itself, if it is anything but plain."""
    if not _is_watched(module):
        if type(module) is nn.Linear:
            weight, bias = module.weight, module.bias
            return lambda x: F.linear(x, weight, bias)
        if type(module) is nn.LayerNorm:
            shape, scale, shift, eps = (
                module.normalized_shape,
                module.weight,
                module.bias,
                module.eps,
            )
            return lambda x: torch.layer_norm(x, shape, scale, shift, eps)
    return module  # type: ignore[no-any-return]


def _make_step(block: Any, device: torch.device) -> Step:
    layer = block.attention
    norm, query, key, value, project, mlp_norm, up, down = (
        _direct(module)
        for module in (
            *(block.attention_norm, layer.query, layer.key, layer.value, layer.out),
            *(block.mlp_norm, block.up, block.down),
        )
    )
    mlp_gate = None if block.mlp_gate is None else _direct(block.mlp_gate)
    gate, output_gate, output_norm = layer.gate, layer.output_gate, layer.output_norm
    norm_heads = None if layer.query_norm is None else layer.norm_heads
    heads, kv_heads, width, value_width = (
        layer.heads,
        layer.kv_heads,
        layer.head_dim,
        layer.value_dim,
    )
    phi, rotary, rotate, denominator = (
        layer.feature_map,
        layer.rotary,
        layer.rotate,
        layer.denominator,
    )
    theta = None if rotary is None else frequencies_of(rotary, device)

    def step(x: Tensor, past: Any) -> tuple[Tensor, Any]:
        batch, normed = x.shape[0], norm(x)
        q = query(normed).view(batch, heads, 1, width)
        k = key(normed).view(batch, kv_heads, 1, width)
        v = value(normed).view(batch, kv_heads, 1, value_width)
        if norm_heads is not None:
            q, k = norm_heads(q, k)
        g = None if gate is None else gate(normed)
        out, after = decode_step(q, k, v, phi, rotary, past, rotate, denominator, g, None, theta)
        if output_norm:
            out = F.rms_norm(out, (value_width,), eps=1e-6)
        merged = out.view(batch, 1, heads * value_width)
        if output_gate is not None:
            merged = output_gate(merged, normed)
        x = x + project(merged)
        x = x + feed_forward(x, mlp_norm, up, down, mlp_gate)
        return x, after._replace(made_by=past.made_by)

    return step
