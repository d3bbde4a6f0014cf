"""One token through a stack of blocks, with nothing in its way.

What a layer checks and resolves at every call (masks, documents, positions, marks of states), and
what a module's own call costs, take several times as long as the matrix products of a single token.
`LanguageModel` decodes through here where its blocks are plain and the state is known to fit;
everything else takes `Block.forward`, and the two agree (that is tested).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from linear_rope.attention import RotaryLinearAttention
from linear_rope.block import Block, feed_forward
from linear_rope.decoding import decode_step, frequencies_of, is_transformed
from linear_rope.feature_base import FeatureMap
from linear_rope.native_blocks import make_blocks
from linear_rope.rotary import Rotary

__all__ = ["Run", "Steps", "is_watched", "make_steps", "run_steps", "trains"]

# x (batch, 1, dim) and a layer's state -> the same after the layer
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


class Steps:
    """Quick ways through a stack of plain blocks: one native call, or a step for each block.

    They hold the parameters of the moment they were made, and know nothing of modules or hooks that
    come later; `is_current` tells whether there were any.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device, self.blocks = device, tuple(blocks)
        layers: list[Any] = [block.attention for block in self.blocks]
        may = device.type == "cpu" and all(layer.backend == "auto" for layer in layers)
        self.native = make_blocks(self.blocks, is_watched) if may else None
        self._each: list[Step] | None = None
        self._same: list[tuple[dict[str, Any], str, Any]] = []
        self._hooks: list[Any] = []
        self._kinds: list[tuple[nn.Module, type, bool]] = []
        for module in (part for block in blocks for part in block.modules()):
            own = vars(module)
            tables = (own["_parameters"], own["_buffers"], own["_modules"])
            self._same += [(table, name, x) for table in tables for name, x in table.items()]
            self._same += [(own, name, x) for name, x in own.items() if name[0] != "_"]
            self._hooks += [own["_forward_hooks"], own["_forward_pre_hooks"]]
            self._kinds.append((module, type(module), "forward" in own))
        self._numbers = [x for _, _, x in self._same if isinstance(x, Tensor)]
        self._places = self._places_now()

    def _places_now(self) -> list[Any]:
        """Where the parameters' numbers are and how they lie there: `parameter.data = ...` and
        `model.to()` move them, and pruning by `parameter.data = parameter.data[:n]` does not."""
        return [
            (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.layout is torch.strided else x.dtype
            for x in self._numbers
        ]

    @property
    def each(self) -> list[Step]:
        if self._each is None:
            self._each = [_make_step(block, self.device) for block in self.blocks]
        return self._each

    def is_current(self, blocks: Iterable[nn.Module], device: torch.device) -> bool:
        """Whether these are the blocks, with the same parts, settings and numbers as then."""
        return (
            device == self.device
            and tuple(blocks) == self.blocks
            and all(table.get(name, self) is x for table, name, x in self._same)
            and not any(self._hooks)
            and all(
                type(m) is kind and ("forward" in vars(m)) is own for m, kind, own in self._kinds
            )
            and not (hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks)
            and self._places_now() == self._places
        )


# Of each model, while it lives: to find out anew at every token takes as long as the token does.
_KEPT: WeakKeyDictionary[nn.Module, Steps] = WeakKeyDictionary()


def make_steps(model: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> Steps | None:
    """Steps through the model's blocks, or None where only their own forward passes do it all."""
    if (
        device.type not in ("cpu", "cuda")
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled(device.type)
        or is_transformed()
    ):
        return None
    blocks, kept = tuple(blocks), _KEPT.get(model)
    if kept is not None and kept.is_current(blocks, device):
        return kept
    _KEPT.pop(model, None)
    parts = [x for block in blocks for x in (*block.parameters(), *block.buffers())]
    if not all(_is_plain(block) for block in blocks):
        return None
    if not all(type(x) in (Tensor, nn.Parameter) for x in parts):
        return None
    _KEPT[model] = steps = Steps(blocks, device)
    return steps


def run_steps(steps: Steps, x: Tensor, states: Iterable[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """(batch, 1, dim) -> the same, and the layers' new states."""
    states = tuple(states)
    if steps.native is not None and (done := steps.native(x, states)) is not None:
        return done
    after = []
    for step, past in zip(steps.each, states, strict=True):
        x, new = step(x, past)
        after.append(new)
    return x, tuple(after)


class Run:
    """Tokens one after another, x (batch, 1, dim) -> the same after the blocks, with states that
    nobody else sees meanwhile."""

    def __init__(self, steps: Steps, batch: int, states: Iterable[Any]) -> None:
        self.steps, self._states = steps, tuple(states)
        self._native = None
        if steps.native is not None:
            self._native = steps.native.begin(batch, self._states)

    def __call__(self, x: Tensor) -> Tensor:
        if self._native is not None:
            if (out := self._native(x)) is not None:
                return out
            self._states, self._native = self._native.states, None
        x, self._states = run_steps(self.steps, x, self._states)
        return x

    @property
    def states(self) -> tuple[Any, ...]:
        """The layers' states after the last token, to go on otherwise."""
        return self._states if self._native is None else self._native.states


def _is_plain(block: Any) -> bool:
    if type(block) is not Block or type(block.attention) is not RotaryLinearAttention:
        return False
    layer, weight = block.attention, getattr(block.attention.query, "weight", None)
    phi, rotary = layer.feature_map, layer.rotary
    return bool(
        not (layer.mixed or trains(block.modules()))
        and layer.backend in ("auto", "recurrent")
        and isinstance(phi, FeatureMap)
        and not phi.log_space
        and (rotary is None or (type(rotary) is Rotary and not rotary.by_length))
        and isinstance(weight, Tensor)  # a quantized projection has a method, a wrapped one nothing
        and weight.dtype in (torch.float32, torch.float64)
        and not (is_watched(block) or is_watched(layer))
    )


# Their mode changes nothing, and a new one is in training mode.
MODELESS = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.ModuleList)


def trains(parts: Iterable[nn.Module | None]) -> bool:
    """Whether any of the parts is in training mode and may compute otherwise for it."""
    return any(part is not None and part.training and type(part) not in MODELESS for part in parts)


def is_watched(module: nn.Module) -> bool:
    """Whether a hook wants to see the module's calls, or a function of its own stands in."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or hooks_of_all._global_forward_hooks
        or hooks_of_all._global_forward_pre_hooks
    )


def _direct(module: Any) -> Callable[[Tensor], Tensor]:
    """The function behind a plain module; the module itself, if it is anything but plain."""
    if not is_watched(module):
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
    form = partial(decode_step, backend=layer.backend)

    def step(x: Tensor, past: Any) -> tuple[Tensor, Any]:
        batch, normed = x.shape[0], norm(x)
        q = query(normed).view(batch, heads, 1, width)
        k = key(normed).view(batch, kv_heads, 1, width)
        v = value(normed).view(batch, kv_heads, 1, value_width)
        if norm_heads is not None:
            q, k = norm_heads(q, k)
        g = None if gate is None else gate(normed)
        out, after = form(q, k, v, phi, rotary, past, rotate, denominator, g, None, theta)
        if output_norm:
            out = F.rms_norm(out, (value_width,), eps=1e-6)
        merged = out.view(batch, 1, heads * value_width)
        if output_gate is not None:
            merged = output_gate(merged, normed)
        x = x + project(merged)
        x = x + feed_forward(x, mlp_norm, up, down, mlp_gate)
        return x, after._replace(made_by=past.made_by)

    return step
