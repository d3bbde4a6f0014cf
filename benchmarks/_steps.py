"""One attention step after n tokens, of ours and of others, each with a float64 judge."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._judge import relative_error, turned
from linear_rope import AttentionState, Rotary, linear_attention
from linear_rope.causal import native

__all__ = ["Sizes", "Stepper", "find_steppers", "without_kernels"]


def without_kernels() -> AbstractContextManager[Any]:
    """Inside it the native kernels count as not compiled, as after a plain installation."""
    return patch.object(native, "is_ready", lambda: False)


@dataclass(frozen=True)
class Sizes:
    """Heads, width of queries, keys and values, tokens to draw, seed."""

    heads: int
    width: int
    tokens: int
    seed: int

    def draw(self, *shape: int, seed: int = 0) -> Tensor:
        """Standard normal float32 numbers; the same for the same shape and seed."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed + seed))


class Stepper:
    """Tokens one after another from the state after `context` tokens.

    Subclasses say what a state is, make a step with it, and repeat that step in float64.
    """

    constant = True  # whether the state's size does not depend on the context

    def __init__(self, sizes: Sizes, context: int) -> None:
        self.sizes, self.context = sizes, context
        drawn = sizes.draw(3, sizes.tokens, 1, sizes.heads, 1, sizes.width)
        self.tokens = [(q, k, v) for q, k, v in drawn.unbind(1)]

    def start(self) -> Any:
        """A fresh state after `context` tokens."""
        raise NotImplementedError

    def step(self, i: int, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Token number i, counted from the first new one; q, k, v are (1, heads, 1, width)."""
        raise NotImplementedError

    def want(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
        """The output of step 0 in float64, (heads, width); q, k, v (heads, width)."""
        raise NotImplementedError

    def tensors(self, state: Any) -> list[Tensor]:
        """What has to be kept for the next step."""
        raise NotImplementedError

    def run(self, count: int) -> Tensor:
        """`count` steps from the start; this is what is timed."""
        with torch.no_grad():
            state = self.start()
            for i in range(count):
                out, state = self.step(i, *self.tokens[i], state)
            return out

    def judge(self) -> float:
        """The relative error of one step."""
        q, k, v = (x[0, :, 0].double() for x in self.tokens[0])
        want = self.want(q, k, v, self.start())
        return relative_error(self.run(1).reshape(want.shape), want)

    def state_bytes(self) -> int:
        """Bytes kept after `context` tokens."""
        return sum(x.nbytes for x in self.tensors(self.start()))


class Ours(Stepper):
    """`linear_attention` with a state."""

    def __init__(
        self,
        sizes: Sizes,
        context: int,
        rotation: bool = True,
        compiled: bool = False,
        kernels: bool = True,
    ) -> None:
        super().__init__(sizes, context)
        self.rotary = Rotary(sizes.width) if rotation else None
        H, D = sizes.heads, sizes.width
        self.state = AttentionState(
            math.sqrt(context) * sizes.draw(1, H, D, D, seed=1),
            context * (1 + 0.1 * sizes.draw(1, H, D, seed=2).abs()),
            torch.zeros(1, H),
            torch.tensor([context]),
        )
        self.attend: Callable[..., Any] = linear_attention
        if compiled:
            self.attend = torch.compile(linear_attention)
        self.around: Callable[[], AbstractContextManager[Any]] = (
            nullcontext if kernels else without_kernels
        )

    def run(self, count: int) -> Tensor:
        with self.around():
            return super().run(count)

    def start(self) -> AttentionState:
        return self.state  # a value: no step changes it

    def step(self, i: int, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, state = self.attend(q, k, v, rotary=self.rotary, state=state, return_state=True)
        return out, state

    def want(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        z = state.z[0].double() + k
        below = (q * z).sum(-1, keepdim=True)
        if self.rotary is not None:
            at = torch.full((1,), self.context)
            q, k = turned(q[:, None], at)[:, 0], turned(k[:, None], at)[:, 0]
        S = state.S[0].double() + k[:, :, None] * v[:, None, :]
        return torch.einsum("hd,hde->he", q, S) / below

    def tensors(self, state: Any) -> list[Tensor]:
        return [state.S, state.z, state.stabilizer, state.position]


class FastTransformers(Stepper):
    """The recurrent step of pytorch-fast-transformers, which updates its state in place."""

    def __init__(self, sizes: Sizes, context: int) -> None:
        super().__init__(sizes, context)
        package = "fast_transformers.recurrent.attention.self_attention.linear_attention"
        module = importlib.import_module(package).RecurrentLinearAttention(sizes.width)
        module.feature_map.new_feature_map(torch.device("cpu"))
        self.attend = module.eval()
        self.ours = Ours(sizes, context, rotation=False)
        self.tokens = [(q[:, :, 0], k[:, :, 0], v[:, :, 0]) for q, k, v in self.tokens]

    def start(self) -> list[Tensor]:
        return [self.ours.state.S.clone(), self.ours.state.z.clone()]

    def step(self, i: int, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, state = self.attend(q, k, v, state)
        return out, state

    def judge(self) -> float:
        q, k, v = (x[0].double() for x in self.tokens[0])
        want = self.ours.want(q, k, v, self.ours.state)
        return relative_error(self.run(1).reshape(want.shape), want)

    def tensors(self, state: Any) -> list[Tensor]:
        return list(state)


class SoftmaxCache(Stepper):
    """Softmax attention with rotation over a cache that has room for the tokens to come."""

    constant = False

    def __init__(self, sizes: Sizes, context: int) -> None:
        super().__init__(sizes, context)
        room = (2, 1, sizes.heads, context + sizes.tokens, sizes.width)
        self.cache = sizes.draw(*room, seed=3)  # of keys that are rotated already, and values
        pairs = sizes.width // 2
        theta = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        angle = (context + torch.arange(sizes.tokens)).double()[:, None] * theta
        self.table = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)

    def start(self) -> Tensor:
        return self.cache  # its first `context` rows stay, later ones are written before read

    def step(self, i: int, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        end = self.context + i
        qk = torch.view_as_complex(torch.cat([q, k]).unflatten(-1, (-1, 2))) * self.table[i]
        q, k = torch.view_as_real(qk).flatten(-2).split(1)
        state[0][:, :, end : end + 1] = k
        state[1][:, :, end : end + 1] = v
        keys, values = state[:, :, :, : end + 1]
        return F.scaled_dot_product_attention(q, keys, values), state

    def want(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
        at = torch.full((1,), self.context)
        q, k = turned(q[:, None], at)[:, 0], turned(k[:, None], at)[:, 0]
        keys, values = state[:, 0, :, : self.context].double()
        keys = torch.cat([keys, k[:, None]], 1)
        values = torch.cat([values, v[:, None]], 1)
        weights = (torch.einsum("hd,hnd->hn", q, keys) / q.shape[-1] ** 0.5).softmax(-1)
        return torch.einsum("hn,hne->he", weights, values)

    def tensors(self, state: Any) -> list[Tensor]:
        return [state[:, :, :, : self.context]]


def find_steppers(
    sizes: Sizes, *, compiled: bool = False
) -> tuple[dict[str, Callable[[int], Stepper]], dict[str, str]]:
    """What makes a stepper after n tokens, by name, and who is absent and why."""
    makers: dict[str, Callable[[int], Stepper]] = {
        "linear_rope, rotation": lambda context: Ours(sizes, context),
        "linear_rope, no rotation": lambda context: Ours(sizes, context, rotation=False),
        "fast-transformers, no rotation": lambda context: FastTransformers(sizes, context),
        "softmax cache, rotation": lambda context: SoftmaxCache(sizes, context),
    }
    if native.is_ready():
        makers["linear_rope, rotation, in torch"] = lambda n: Ours(sizes, n, kernels=False)
    if compiled:
        makers["linear_rope, rotation, compiled"] = lambda n: Ours(sizes, n, compiled=True)
    present, absent = {}, {}
    for name, make in makers.items():
        try:
            make(1)
            present[name] = make
        except Exception as error:  # whatever an old package does when it is imported
            absent[name] = f"{type(error).__name__}: {error}"
    return present, absent
