"""One problem: its inputs, the calls that solve it, and how their results are judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._contestants import Contestant, find_contestants
from benchmarks._judge import relative_error, rows_of

__all__ = ["LAYOUTS", "TOLERANCE", "Case", "Errors", "Problem", "memory_task"]

LAYOUTS = ("own", "layer")
ROWS = 16  # judged of a head
# A result further from the judge is marked as wrong and its time counts for nothing.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2, "float64": 1e-9}


@dataclass(frozen=True)
class Case:
    """Sizes, dtype, and order in memory.

    Args:
        layout: "own": each contestant gets contiguous tensors in the order of axes that it takes;
            "layer": all get views of (batch, time, head, width), as a layer's projections give.
    """

    time: int
    batch: int
    heads: int
    width: int
    value_width: int
    dtype: str = "float32"
    layout: str = "own"
    seed: int = 0

    @property
    def shape(self) -> str:
        """The sizes but the time, as the command line writes them."""
        return f"{self.batch}x{self.heads}x{self.width}x{self.value_width}"

    @property
    def result_bytes(self) -> int:
        """Bytes of the output; with those of the three gradients see `gradient_bytes`."""
        item = getattr(torch, self.dtype).itemsize
        return int(self.batch * self.heads * self.time * self.value_width * item)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of q, k and v."""
        item = getattr(torch, self.dtype).itemsize
        columns = 2 * self.width + self.value_width
        return int(self.batch * self.heads * self.time * columns * item)


@dataclass(frozen=True)
class Errors:
    """Largest relative error of the output and of the gradients (None: forward only)."""

    out: float
    grad: float | None
    seconds: float

    def within(self, dtype: str) -> bool:
        """Whether the result counts; the formula of its errors is `_judge.relative_error`."""
        return max(self.out, self.grad or 0.0) <= TOLERANCE[dtype]


class Problem:
    """The tensors of a case, made when they are first needed, with the same values for all."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._made: dict[tuple[str, bool], Any] = {}

    @cached_property
    def _drawn(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, standard normal, (batch, head, time, width)."""
        c, generator = self.case, torch.Generator().manual_seed(self.case.seed)
        widths = (c.width, c.width, c.value_width, c.value_width)
        q, k, v, grad = (
            torch.randn(c.batch, c.heads, c.time, width, generator=generator) for width in widths
        )
        return q, k, v, grad

    def inputs(self, job: str, time_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as leaves; for the bare product q and k are features, elu(x) + 1."""
        kind, time_first = self._kind(job), time_first or self.case.layout == "layer"
        if (kind, time_first) not in self._made:
            q, k, v, _ = self._drawn
            if kind == "features":
                q, k = F.elu(q) + 1, F.elu(k) + 1
            dtype = getattr(torch, self.case.dtype)
            leaves = (_ordered(x, time_first, dtype).requires_grad_() for x in (q, k, v))
            self._made[kind, time_first] = tuple(leaves)
        return self._made[kind, time_first]

    def grad(self, dtype: torch.dtype, time_first: bool) -> Tensor:
        """A dense gradient of the output."""
        key = (f"grad {dtype}", time_first or self.case.layout == "layer")
        if key not in self._made:
            self._made[key] = _ordered(self._drawn[3], key[1], dtype)
        return self._made[key]

    @staticmethod
    def _kind(job: str) -> str:
        return "features" if job == "product" else "heads"

    def call(self, contestant: Contestant, job: str, backward: bool) -> Callable[[], object]:
        """What is timed: forward without a graph, or forward and the gradients of q, k and v."""
        run = self._run(contestant, job, self.case.time)
        leaves = self.inputs(job, contestant.time_first)
        if not backward:

            def forward() -> Tensor:
                with torch.no_grad():
                    return run(*leaves)

            return forward
        grad = self.grad(self._out_dtype(contestant, job), contestant.time_first)

        def both() -> tuple[Tensor, tuple[Tensor, ...]]:
            out = run(*leaves)
            return out, torch.autograd.grad(out, leaves, grad)

        return both

    def judge(self, contestant: Contestant, job: str, backward: bool) -> Errors:
        """Compare some rows of some heads, and the gradients that flow from them, in float64."""
        c, generator = self.case, torch.Generator().manual_seed(self.case.seed + 1)
        pairs = sorted({(0, 0), (c.batch - 1, c.heads - 1)})
        some = torch.randint(c.time, (ROWS,), generator=generator)
        rows = torch.cat([some, torch.tensor([0, c.time - 1])]).unique()
        run, leaves = self._run(contestant, job, c.time), self.inputs(job, contestant.time_first)
        with torch.set_grad_enabled(backward):
            start = time.perf_counter()
            out = run(*leaves)
            seconds = time.perf_counter() - start
        got_grads: tuple[Tensor, ...] = ()
        # Nothing but the judged rows has a gradient: their effect can then be told exactly.
        sparse = torch.zeros_like(out)
        for b, h in pairs:
            drawn = torch.randn(len(rows), c.value_width, generator=generator)
            sparse[b, h, rows] = drawn.to(out.dtype)
        if backward:
            start = time.perf_counter()
            got_grads = torch.autograd.grad(out, leaves, sparse)
            seconds += time.perf_counter() - start
        error, grad_error = 0.0, 0.0
        for b, h in pairs:
            heads = [x[b, h].detach().double().requires_grad_() for x in leaves]
            want = rows_of(job, heads[0], heads[1], heads[2], rows)
            error = max(error, relative_error(out[b, h, rows].detach(), want.detach()))
            wanted = torch.autograd.grad(want, heads, sparse[b, h, rows].double())
            for got, wanted_grad in zip(got_grads, wanted, strict=False):
                grad_error = max(grad_error, relative_error(got[b, h], wanted_grad))
        return Errors(error, grad_error if backward else None, seconds)

    def _run(self, contestant: Contestant, job: str, time: int) -> Callable[..., Tensor]:
        dtype = getattr(torch, self.case.dtype)
        return contestant.jobs[job](time, self.case.width, dtype)

    def _out_dtype(self, contestant: Contestant, job: str) -> torch.dtype:
        """Some widen their outputs; a few tokens tell."""
        few = min(self.case.time, 64)
        leaves = self.inputs(job, contestant.time_first)
        with torch.no_grad():
            out = self._run(contestant, job, few)(*(x[:, :, :few] for x in leaves))
        return out.dtype


def _ordered(x: Tensor, time_first: bool, dtype: torch.dtype) -> Tensor:
    """x (batch, head, time, width), its memory in that order or in (batch, time, head, width)."""
    if time_first:
        return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return x.to(dtype, copy=True)


_contestants = lru_cache(find_contestants)


def before_fork(*, native_peer: str, **_: Any) -> None:
    """Imports the peers, once for all processes that measure memory."""
    _contestants(Path(native_peer))


def memory_task(
    contestant: str, job: str, case: dict[str, Any], backward: bool, native_peer: str
) -> Callable[[], object]:
    """For `_memory.Meter`: the call, with its inputs made and nothing else held."""
    problem = Problem(Case(**case))
    who = _contestants(Path(native_peer)).present[contestant]
    call = problem.call(who, job, backward)
    if "_drawn" in vars(problem):
        del problem._drawn
    return call


def small(case: Case) -> Case:
    """The same problem for few tokens, to load code and start threads."""
    return replace(case, time=min(case.time, 128))
