"""What a sequence leaves behind: states are values, never changed in place.

Every kind offers the same operations, each returning a new state:
`detach()`, `clone()`, `to(device or dtype)`, `index_select(rows)` (for beam search: row i of the
result is row rows[i]; rows may repeat). They pickle, and `torch.save` / `torch.load` take them with
the safe default `weights_only=True`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["AttentionState", "KeyValueCache", "MixedState", "ModelState", "signature"]

UNMARKED = torch.tensor(0, device="cpu")


def signature(*parts: object) -> int:
    """A number of 62 bits that stands for how the parts print, the same in every process.

    Layers mark their states with that of their feature map, rotation, decay and whatever else their
    sums depend on but the weights, so that sums made with others are refused, where sizes alone
    would not tell.
    """
    digest = hashlib.sha256("\n".join(map(repr, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


class AttentionState(NamedTuple):
    """The past of linear attention, constant in size."""

    S: Tensor  # (batch, key head, features, value width): sum of k_n v_n^T, keys as above the line
    z: Tensor  # (batch, key head, features): sum of the keys as below it, in the denominator
    stabilizer: Tensor  # (batch, key head): running maximum of exponential keys' logarithms, which
    # `to` leaves in its dtype: of 60, bfloat16 knows but a quarter, a factor of e^(1/8) to the sums
    position: Tensor  # (batch,) int64: the position of each row's next token
    made_by: Tensor = UNMARKED  # (batch,) int64: its layer's `signature`; 0 (0-d): from a function

    def detach(self) -> AttentionState:
        return AttentionState(*(x.detach() for x in self))

    def clone(self) -> AttentionState:
        return AttentionState(*(x.clone() for x in self))

    def to(self, *args: Any, **kwargs: Any) -> AttentionState:
        """A dtype is for the sums: the stabilizer, a logarithm, keeps its own."""
        return AttentionState(*_to(self, *args, kept=self.stabilizer, **kwargs))

    def index_select(self, rows: Tensor) -> AttentionState:
        return AttentionState(*(x.index_select(0, rows) if x.ndim else x for x in self))


class KeyValueCache(NamedTuple):
    """The past of softmax attention: everything, one more row a token."""

    k: Tensor  # (batch, key head, past, head width), rotated
    v: Tensor  # (batch, key head, past, value width)
    mask: Tensor  # (batch, past) bool, True at keys that a next token may see
    position: Tensor  # (batch,) int64: the position of each row's next token
    made_by: Tensor = UNMARKED  # (batch,) int64: its layer's `signature`; 0 (0-d): from a function
    at: Tensor = UNMARKED  # (batch, past) int64: the keys' positions, for a bias; 0 (0-d): none

    def detach(self) -> KeyValueCache:
        return KeyValueCache(*(x.detach() for x in self))

    def clone(self) -> KeyValueCache:
        return KeyValueCache(*(x.clone() for x in self))

    def to(self, *args: Any, **kwargs: Any) -> KeyValueCache:
        return KeyValueCache(*_to(self, *args, **kwargs))

    def index_select(self, rows: Tensor) -> KeyValueCache:
        return KeyValueCache(*(x.index_select(0, rows) if x.ndim else x for x in self))


class MixedState(NamedTuple):
    """The past of a layer that looks back by more than attention: a part each, None where none."""

    attention: Any  # AttentionState or KeyValueCache
    shift: Tensor | None = None  # (batch, 1, dim): the last input of the token shift
    convolution: Tensor | None = None  # (batch, width - 1, channels): those of the convolution
    rotation: Any = None  # SelectiveState: phases of the selective rotation
    window: Any = None  # WindowCache: keys and values that local heads still see

    @property
    def position(self) -> Tensor:
        """(batch,) int64: the position of each row's next token."""
        position: Tensor = self.attention.position
        return position

    def detach(self) -> MixedState:
        return MixedState(*(x if x is None else x.detach() for x in self))

    def clone(self) -> MixedState:
        return MixedState(*(x if x is None else x.clone() for x in self))

    def to(self, *args: Any, **kwargs: Any) -> MixedState:
        """Each part as its own `to`: angles stay float64."""
        return MixedState(*(x if x is None else x.to(*args, **kwargs) for x in self))

    def index_select(self, rows: Tensor) -> MixedState:
        return MixedState(
            *(
                x.index_select(0, rows) if isinstance(x, Tensor) else x and x.index_select(rows)
                for x in self
            )
        )


class ModelState(NamedTuple):
    """The past of a model: the states of its layers, in order."""

    layers: tuple[Any, ...]

    @property
    def position(self) -> Tensor:
        """(batch,) int64: the position of each row's next token."""
        return self.layers[0].position

    def detach(self) -> ModelState:
        return ModelState(tuple(layer.detach() for layer in self.layers))

    def clone(self) -> ModelState:
        return ModelState(tuple(layer.clone() for layer in self.layers))

    def to(self, *args: Any, **kwargs: Any) -> ModelState:
        return ModelState(tuple(layer.to(*args, **kwargs) for layer in self.layers))

    def index_select(self, rows: Tensor) -> ModelState:
        return ModelState(tuple(layer.index_select(rows) for layer in self.layers))


def _to(
    tensors: Iterable[Tensor], *args: Any, kept: Tensor | None = None, **kwargs: Any
) -> Iterable[Tensor]:
    """Tensor.to for every tensor, a dtype only for the floating ones (as `nn.Module.to` does), and
    not for the one whose precision is to be kept."""
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    for x in tensors:
        changes = x.is_floating_point() and x is not kept
        yield x.to(device, dtype if changes else None, non_blocking)


torch.serialization.add_safe_globals([AttentionState, KeyValueCache, MixedState, ModelState])
