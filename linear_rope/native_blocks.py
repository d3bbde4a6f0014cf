"""One token through all blocks of a model in a single native call.

Of a small model, the calls of torch for a token take longer than its matrix products. The kernels
of native_block.h do a whole block, for blocks made of nothing but what they know; `make_blocks`
looks whether they are. Its result is one of the quick ways of `linear_rope.stepping`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linear_rope.causal import native, say_single_token
from linear_rope.causal.native_calls import DENOMINATOR, PHI, Affine, BlockCall, StepCall, level
from linear_rope.causal.native_steps import run_blocks
from linear_rope.decays import FixedDecay, LearnedDecay
from linear_rope.decoding import NATIVE_MAPS, are_mere_numbers, frequencies_of
from linear_rope.mixing import OutputGate
from linear_rope.states import AttentionState

__all__ = ["NativeBlocks", "NativeRun", "make_blocks"]

# Rows of a batch: the kernels read a weight once for all of them, but keep no tile of it in
# registers, so that torch's matrix products win for more.
ROWS = 8


class NativeBlocks:
    """x (batch, 1, dim) and the layers' states -> the same after the blocks."""

    def __init__(self, calls: Sequence[BlockCall], dtype: torch.dtype, kept: Sequence[Tensor]):
        self._calls = (BlockCall * len(calls))(*calls)
        self._dtype = dtype
        self._kept = kept  # what the addresses are of

    def __call__(
        self, x: Tensor, states: Iterable[Any]
    ) -> tuple[Tensor, tuple[AttentionState, ...]] | None:
        """None where this call is not for the kernels, which trust sizes and types."""
        run = self.begin(x.shape[0], tuple(states))
        out = None if run is None else run(x)
        return None if run is None or out is None else (out, run.states)

    def begin(self, batch: int, states: tuple[Any, ...]) -> NativeRun | None:
        """Tokens one after another from these states; None where those are not for the kernels."""
        tensors = (t for state in states for t in (state.S, state.z, state.position))
        if not 0 < batch <= ROWS or len(states) != len(self._calls):
            return None
        if not self._fits(batch, states) or not are_mere_numbers(*tensors):
            return None
        say_single_token("native", "cpu")
        return NativeRun(self._calls, (batch, 1, self._calls[0].dim), self._dtype, states)

    def _fits(self, batch: int, states: Sequence[Any]) -> bool:
        for call, state in zip(self._calls, states, strict=True):
            shape = (batch, call.step.key_heads, call.step.M)
            fits = (
                state.S.dtype == state.z.dtype == self._dtype
                and state.position.dtype == torch.int64
                and state.S.shape == (*shape, call.step.E)
                and state.z.shape == shape
                and state.position.shape == (batch,)
            )
            if not fits:
                return False
        return True


class NativeRun:
    """Tokens one after another, x (batch, 1, dim) -> the same after the blocks.

    The states after a token go to one of two sets of memory that take turns, so that a token costs
    no allocation and no addresses are looked up anew. Those that it began with are only read.
    """

    def __init__(
        self,
        calls: ctypes.Array[BlockCall],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        states: tuple[AttentionState, ...],
    ) -> None:
        self._blocks, self._shape, self._dtype, self._begun = calls, shape, dtype, states
        self._sets = [[[t.contiguous() for t in (s.S, s.z, s.position)] for s in states]]
        self._calls: dict[tuple[int, int, int], ctypes.Array[BlockCall]] = {}
        self._now = 0  # the set that holds the states

    def __call__(self, x: Tensor) -> Tensor | None:
        """None where this token is not for the kernels; the states then are as before."""
        if x.dtype != self._dtype or x.shape != self._shape or not are_mere_numbers(x):
            return None
        x = x.clone(memory_format=torch.contiguous_format)
        to = 2 if self._now == 1 else 1
        key = (self._now, to, torch.get_num_threads())
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = self._make_calls(*key)
        address = x.data_ptr()
        for call in calls:
            call.x = address
        run_blocks(calls)
        self._now = to
        return x

    def _make_calls(self, old: int, new: int, threads: int) -> ctypes.Array[BlockCall]:
        if new == len(self._sets):
            self._sets.append([[torch.empty_like(t) for t in state] for state in self._sets[0]])
        calls = type(self._blocks).from_buffer_copy(self._blocks)
        for call, given, after in zip(calls, self._sets[old], self._sets[new], strict=True):
            step = call.step
            step.batch, step.threads = self._shape[0], threads
            step.S0, step.z0, step.position = (t.data_ptr() for t in given)
            step.S, step.z, step.next = (t.data_ptr() for t in after)
        return calls

    @property
    def states(self) -> tuple[AttentionState, ...]:
        """The layers' states after the last token; the second token from here overwrites them."""
        return tuple(
            state._replace(S=S, z=z, position=position)
            for state, (S, z, position) in zip(self._begun, self._sets[self._now], strict=True)
        )


def make_blocks(
    blocks: Sequence[Any], is_watched: Callable[[nn.Module], bool]
) -> NativeBlocks | None:
    """For blocks that `linear_rope.stepping` found plain; None if the kernels do not know them all.

    Args:
        is_watched: whether somebody wants to see a module's calls.
    """
    if not blocks or not native.is_ready():
        return None
    kept: list[Tensor] = []
    calls = [_call(block, is_watched, kept) for block in blocks]
    known = [call for call in calls if call is not None]
    dtypes = {block.attention.query.weight.dtype for block in blocks}
    if len(known) != len(calls) or len(dtypes) > 1 or len({call.dim for call in known}) > 1:
        return None
    return NativeBlocks(known, dtypes.pop(), kept)


def _call(
    block: Any, is_watched: Callable[[nn.Module], bool], kept: list[Tensor]
) -> BlockCall | None:
    layer, dtype = block.attention, block.attention.query.weight.dtype
    phi, rotary, decay = layer.feature_map, layer.rotary, layer.gate
    norms = [block.attention_norm, block.mlp_norm]
    linear: dict[str, Any] = {
        **{"query": layer.query, "key": layer.key, "value": layer.value, "out": layer.out},
        **{"up": block.up, "down": block.down, "mlp_gate": block.mlp_gate},
    }
    head_norms = {"query_norm": layer.query_norm, "key_norm": layer.key_norm}
    known = (
        all(module is None or type(module) is nn.Linear for module in linear.values())
        and type(norms[0]) is type(norms[1])
        and type(norms[0]) in (nn.LayerNorm, nn.RMSNorm)
        and all(tuple(norm.normalized_shape) == (block.up.in_features,) for norm in norms)
        and all(module is None or type(module) is nn.RMSNorm for module in head_norms.values())
        and (decay is None or type(decay) in (FixedDecay, LearnedDecay))
        and (layer.output_gate is None or type(layer.output_gate) is OutputGate)
        and type(phi) in NATIVE_MAPS
        and (rotary is None or layer.rotate == "after")
    )
    affine: dict[str, Any] = {
        **linear,
        **head_norms,
        **{"norm": norms[0], "mlp_norm": norms[1], "gate": layer.output_gate},
        "decay": decay if type(decay) is LearnedDecay else None,
    }
    modules = [module for module in (*affine.values(), decay) if module is not None]
    if not known or any(is_watched(module) for module in modules):
        return None
    dim, hidden = block.up.in_features, block.up.out_features
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    values, merged = layer.kv_heads * layer.value_dim, layer.heads * layer.value_dim
    # The kernels trust these: a weight of another shape, whoever put it there, is not for them.
    shapes: dict[str, tuple[int, ...]] = {
        **{"query": (queries, dim), "key": (keys, dim), "value": (values, dim)},
        **{"out": (dim, merged), "gate": (merged, dim), "decay": (layer.kv_heads, dim)},
        **{"up": (hidden, dim), "mlp_gate": (hidden, dim), "down": (dim, hidden)},
        **{"norm": (dim,), "mlp_norm": (dim,)},
        **{"query_norm": (layer.head_dim,), "key_norm": (layer.head_dim,)},
    }
    addresses: dict[str, Affine] = {}
    for name, module in affine.items():
        pair = []
        for part in ("weight", "bias"):
            tensor = getattr(module, part, None)
            shape = shapes[name] if part == "weight" else shapes[name][:1]
            if tensor is not None and not (_is_dense(tensor, dtype) and tensor.shape == shape):
                return None
            if tensor is None and part == "weight" and module is not None and len(shape) == 2:
                return None
            pair.append(None if tensor is None else tensor.data_ptr())
            kept += [] if tensor is None else [tensor]
        addresses[name] = Affine(*pair)
    call = BlockCall(dim=dim, hidden=hidden, **addresses)
    call.rms, call.output_norm = type(norms[0]) is nn.RMSNorm, layer.output_norm
    call.norm_eps, call.mlp_norm_eps = (_eps(norm, dtype) for norm in norms)
    call.head_eps = 1e-6
    if layer.query_norm is not None and {_eps(n, dtype) for n in head_norms.values()} != {1e-6}:
        return None
    if type(decay) is FixedDecay:
        rates = torch.tensor(decay.log_decay(), dtype=dtype)
        kept.append(rates)
        call.rates = rates.data_ptr()
    theta = None if rotary is None else frequencies_of(rotary, torch.device("cpu"))
    if theta is not None:
        kept.append(theta)
    call.step = StepCall(
        heads=layer.heads,
        key_heads=layer.kv_heads,
        M=layer.head_dim,
        E=layer.value_dim,
        pairs=0 if theta is None else theta.shape[0],
        phi=PHI[NATIVE_MAPS[type(phi)]],
        denominator=DENOMINATOR[layer.denominator],
        half=rotary is not None and rotary.pairing == "half",
        level=level(),
        wide=dtype == torch.float64,
        eps=getattr(phi, "eps", 0.0),
        multiplier=1.0 if rotary is None else rotary.multiplier,
        theta=None if theta is None else ctypes.c_void_p(theta.data_ptr()),
    )
    return call


def _is_dense(x: Tensor, dtype: torch.dtype) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"
    strided = plain and x.layout is torch.strided and not x.is_neg()
    return strided and x.dtype == dtype and x.is_contiguous()


def _eps(norm: Any, dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps if norm.eps is None else norm.eps)
