"""Who takes part: this library's forms and backends, and what a user would pick instead.

Every contestant computes one of the jobs of `_judge.JOBS` for q, k, v (batch, head, time, width).
Peers are composed as their users would: their own product and denominator, around it features and a
rotation in plain torch. Where torch has a fast way it is taken: the rotation is one complex product
with a table made beforehand, many times faster than sines and concatenated halves.

A peer that is not installed, or does not load, is left out and named with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import sysconfig
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import linear_rope
from linear_rope import BACKENDS, Rotary, causal_product, linear_attention

__all__ = ["NATIVE_PEER", "Contestant", "find_contestants", "ready_backends", "torch_rotation"]

FLOAT32 = ("float32",)
ALL_DTYPES = ("float32", "bfloat16", "float16", "float64")

# Where README.md of this folder puts the kernel of fast-transformers for the native processor.
NATIVE_PEER = Path("build/fast-transformers-native")

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
# From (time, width, dtype) to the call: tables may be made beforehand.
Prepare = Callable[[int, int, torch.dtype], Run]


@dataclass(frozen=True)
class Contestant:
    """A name and a way to do some of the jobs.

    Args:
        jobs: how to do each job that it can do.
        backend: of this library; None for a peer.
        rival: whether it is a linear attention that pip installs as it stands: what ours is
            compared with as "the best peer". (Softmax attention is compared with separately.)
        fast: whether it is meant to be; the quadratic form and the one token by token are not, and
            are timed at short lengths only.
        dtypes: what it takes; other inputs are not its own.
        time_first: it takes (batch, time, head, width), and is given memory in that order.
    """

    name: str
    jobs: Mapping[str, Prepare]
    backend: str | None = None
    rival: bool = False
    fast: bool = True
    dtypes: tuple[str, ...] = ALL_DTYPES
    time_first: bool = False


@dataclass
class Field:
    """All contestants by name, and who is absent and why."""

    present: dict[str, Contestant] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def find_contestants(native_peer: Path = NATIVE_PEER) -> Field:
    """This library's backends that are ready, and the peers that are installed."""
    found = Field()
    for backend, missing in ready_backends().items():
        name = f"linear_rope {backend}"
        if missing:
            found.absent[name] = missing
        else:
            found.present[name] = _ours(name, backend)
    for name, make in (
        ("fast-transformers", _fast_transformers),
        ("fast-transformers native", lambda name: _fast_transformers(name, native_peer)),
        ("fla naive chunk", _fla),
        ("performer-pytorch", _performer),
        ("softmax", _softmax),
    ):
        try:
            found.present[name] = make(name)
        except Exception as error:  # whatever an old package does when it is imported
            found.absent[name] = f"{type(error).__name__}: {error}"
    return found


# --- ours -----------------------------------------------------------------------------------------


def ready_backends() -> dict[str, str]:
    """Each backend of this version, and why it is not ready ("" if it is)."""
    ready = getattr(linear_rope, "backends", None)
    if ready is None:
        return dict.fromkeys(BACKENDS, "")
    return {name: "" if reason in (None, True) else str(reason) for name, reason in ready().items()}


def _ours(name: str, backend: str) -> Contestant:
    def product(time: int, width: int, dtype: torch.dtype) -> Run:
        return lambda q, k, v: causal_product(q, k, v, backend=backend)[0]

    def attention(time: int, width: int, dtype: torch.dtype) -> Run:
        return lambda q, k, v: linear_attention(q, k, v, backend=backend)

    def rotary(time: int, width: int, dtype: torch.dtype) -> Run:
        turn = Rotary(width)
        return lambda q, k, v: linear_attention(q, k, v, rotary=turn, backend=backend)

    jobs = {"product": product, "attention": attention, "rotary": rotary}
    fast = backend not in ("reference", "recurrent")
    return Contestant(name, jobs, backend=backend, fast=fast)


# --- around a peer's product ----------------------------------------------------------------------


def torch_rotation(time: int, width: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A rotation (..., time, width) by position in plain torch, its table made here, once."""
    pairs = width // 2
    theta = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.arange(time, dtype=torch.float64)[:, None] * theta
    table = torch.polar(torch.ones_like(angle), angle)
    if dtype in (torch.float32, torch.float64):
        table = table.to(torch.complex64 if dtype == torch.float32 else torch.complex128)

        def rotate(x: Tensor) -> Tensor:
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * table).flatten(-2)

        return rotate

    cos, sin = table.real.to(dtype), table.imag.to(dtype)  # no complex bfloat16

    def rotate_pairs(x: Tensor) -> Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    return rotate_pairs


def _composed(product: Run) -> dict[str, Prepare]:
    """The jobs around a bare product; the denominator as fast-transformers computes its own."""

    def inverse_sums(q: Tensor, k: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)  # bfloat16 cannot count to 1000
        below = torch.einsum("bhtd,bhtd->bht", q.to(wide), k.cumsum(2, dtype=wide)) + 1e-6
        return (1 / below)[..., None].to(q.dtype)

    def bare(time: int, width: int, dtype: torch.dtype) -> Run:
        return product

    def attention(time: int, width: int, dtype: torch.dtype) -> Run:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = F.elu(q) + 1, F.elu(k) + 1
            return product(q, k, v) * inverse_sums(q, k)

        return run

    def rotary(time: int, width: int, dtype: torch.dtype) -> Run:
        turn = torch_rotation(time, width, dtype)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = F.elu(q) + 1, F.elu(k) + 1
            return product(turn(q), turn(k), v) * inverse_sums(q, k)

        return run

    return {"product": bare, "attention": attention, "rotary": rotary}


# --- the peers ------------------------------------------------------------------------------------


def _fast_transformers(name: str, folder: Path | None = None) -> Contestant:
    """The compiled CPU kernel of pytorch-fast-transformers; as installed, or another build of it.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), github.com/idiap/fast-transformers.
    """
    if folder is None:
        product = importlib.import_module("fast_transformers.causal_product").causal_dot_product
        return Contestant(name, _composed(product), rival=True, dtypes=FLOAT32)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    path = folder / f"fast_transformers/causal_product/causal_product_cpu{suffix}"
    if not path.is_file():
        raise ImportError(f"no {path}; see benchmarks/README.md")
    spec = importlib.util.spec_from_file_location("causal_product_cpu", path)
    assert spec is not None and spec.loader is not None
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)

    class Product(torch.autograd.Function):
        """As the package wraps its kernel."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            out = q.new_zeros(v.shape)
            kernel.causal_dot_product(q.detach(), k.detach(), v.detach(), out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = ctx.saved_tensors
            grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            kernel.causal_dot_backward(q.detach(), k.detach(), v.detach(), grad, *grads)
            return grads

    return Contestant(name, _composed(Product.apply), dtypes=FLOAT32)


def _fla(name: str) -> Contestant:
    """The chunkwise reference in torch of flash-linear-attention.

    The package's kernels need Triton and a GPU, and so does the package's import; this file of it
    needs torch and einops alone, so it is loaded by itself.
    """
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise ImportError("No module named 'fla'")
    for place in package.submodule_search_locations:
        path = Path(place) / "ops/linear_attn/naive.py"
        spec = importlib.util.spec_from_file_location("fla_linear_attn_naive", path)
        if path.is_file() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            break
    else:
        raise ImportError("this version of fla has no ops/linear_attn/naive.py")
    chunk = 64  # fixed in that function, which takes whole chunks only

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        time = q.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if time % chunk:
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -time % chunk)) for x in (q, k, v))
        return module.naive_chunk_linear_attn(q, k, v, scale=1.0)[:, :time].transpose(1, 2)

    return Contestant(name, _composed(product), rival=True, time_first=True)


def _performer(name: str) -> Contestant:
    """The causal path of performer-pytorch on a CPU.

    It divides by a denominator of the same features, so it has no bare product, and cannot rotate
    the numerator alone.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports what torch and Python have deprecated
        module = importlib.import_module("performer_pytorch.performer_pytorch")
    causal = module.causal_linear_attention_noncuda

    def attention(time: int, width: int, dtype: torch.dtype) -> Run:
        return lambda q, k, v: causal(F.elu(q) + 1, F.elu(k) + 1, v)

    return Contestant(name, {"attention": attention}, rival=True)


def _softmax(name: str) -> Contestant:
    def plain(time: int, width: int, dtype: torch.dtype) -> Run:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def rotary(time: int, width: int, dtype: torch.dtype) -> Run:
        turn = torch_rotation(time, width, dtype)
        return lambda q, k, v: F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)

    return Contestant(name, {"softmax": plain, "softmax-rotary": rotary})
