"""What goes around the causal product on a GPU: features with their rotation, and the division.

    features:  x -> phi(x), R phi(x)             (below the line and above it, eq. 19)
    divide:    num, den -> num / den

Each is one pass over memory forward and one backward: Triton kernels for CUDA tensors
(`linear_rope.causal.triton_kernels`), or the plain torch lines in this file, which mean the same
and are what the kernels are tested against. Sums and features are in W, the work dtype: float64 for
float64 inputs, else float32.

Results lie in memory as (batch, time, head, width), whatever the order of the axes says, so that
merging heads and flash-linear-attention's kernels need no copy.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from linear_rope.causal.division import ROTATED_FLOOR
from linear_rope.elementwise import elu_plus_one, relu
from linear_rope.feature_base import log_floor
from linear_rope.rotary import rotate

__all__ = ["divide", "features", "kernels", "once"]

Maybe = TypeVar("Maybe", Tensor, Tensor | None)

TWICE = (
    "this form is differentiable once; for second derivatives use "
    'backend="reference" or backend="recurrent", which are plain torch'
)


def features(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    phi: str,
    eps: float,
    pairing: str,
    dtype: torch.dtype,
    both: bool,
) -> tuple[Tensor, Tensor]:
    """phi(x) and R phi(x), differentiable once in x.

    Args:
        x: (batch, head, time, width), any strides.
        cos, sin: tables in W, (time, pairs) or (batch, time, pairs), 2 pairs <= width; None rotates
            nothing. No gradient flows to them.
        phi: "none" (phi(x) = x), "elu+1" (`EluPlusOne`), "relu" (max(x, 0) + eps).
        pairing: as in `linear_rope.rotary.rotate`.
        dtype: of the results; they are computed in W and rounded once.
        both: phi(x) is needed beside R phi(x); else R phi(x) stands in its place.

    Returns:
        phi(x) and R phi(x), which are one tensor without tables.
    """
    if phi == "none" and cos is None:
        return x.to(dtype), x.to(dtype)
    plain, turned = _Features.apply(x, cos, sin, phi, eps, pairing, dtype, both)
    return turned if plain is None else plain, plain if turned is None else turned


def divide(num: Tensor, den: Tensor, *, signed: bool, dtype: torch.dtype) -> Tensor:
    """num / den, and 0 where den is 0 (no key, no feature); differentiable once in both.

    Args:
        num: (batch, head, time, width). den: (batch, head, time). Any strides.
        signed: den may pass through 0: its magnitude is kept at least 1e-6, its sign kept.
        dtype: of the result; float16 is clamped to its range, and passes no gradient there.
    """
    most = torch.finfo(dtype).max if dtype == torch.float16 else 0.0
    return _Divide.apply(num, den, signed, ROTATED_FLOOR, dtype, most)


def once(x: Maybe) -> Maybe:
    """x itself, but a second derivative that passes here is refused instead of being wrong.

    For inputs of functions whose own backward pass is not differentiable and does not say so.
    """
    return x if x is None or not x.requires_grad else _Once.apply(x)


def kernels(x: Tensor) -> ModuleType | None:
    """The Triton kernels, if x is where they run; else None, and plain torch runs.

    They run on CUDA tensors, and under Triton's interpreter (the environment variable
    TRITON_INTERPRET=1, set before Triton is imported) on the CPU.
    """
    if x.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return _triton_kernels()
    return None


@cache
def _triton_kernels() -> ModuleType | None:
    try:
        from linear_rope.causal import triton_kernels
    except ImportError:
        return None
    return triton_kernels


# ---- Plain torch, and the choice ----------------------------------------------------------------


def _work(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _inside(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in that dtype, heads inside time in memory."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _over_heads(table: Tensor) -> Tensor:
    return table.unsqueeze(1) if table.ndim == 3 else table


def features_forward(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    phi: str,
    eps: float,
    pairing: str,
    dtype: torch.dtype,
    both: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """phi(x) and R phi(x), see `features`; what is not there is None."""
    if fast := kernels(x):
        return fast.features_forward(x, cos, sin, phi, eps, pairing, dtype, both)
    f = x.to(_work(x))
    if phi == "elu+1":
        f = elu_plus_one(f)
    elif phi == "relu":
        f = relu(f, eps)
    if cos is None or sin is None:
        return _inside(f, dtype), None
    turned = rotate(f, _over_heads(cos), _over_heads(sin), pairing)
    return _inside(f, dtype) if both else None, _inside(turned, dtype)


def features_backward(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    d_plain: Tensor | None,
    d_turned: Tensor | None,
    phi: str,
    pairing: str,
) -> Tensor:
    """dx = phi'(x) (d_plain + R^T d_turned), in x's dtype; an absent gradient is None."""
    if fast := kernels(x):
        return fast.features_backward(x, cos, sin, d_plain, d_turned, phi, pairing)
    work = _work(x)
    d = torch.zeros((), dtype=work, device=x.device)
    if d_turned is not None:
        d = d_turned.to(work)
        if cos is not None and sin is not None:
            d = rotate(d, _over_heads(cos), -_over_heads(sin), pairing)
    if d_plain is not None:
        d = d + d_plain.to(work)
    f = x.to(work)
    if phi == "elu+1":
        below = torch.where(f < log_floor(work), 0.0, f.clamp(max=0.0).exp())
        d = d * torch.where(f > 0, 1.0, below)
    elif phi == "relu":
        d = d * (f > 0)
    return torch.empty_like(x).copy_(d)


def _divisor(den: Tensor, signed: bool, least: float) -> tuple[Tensor, Tensor]:
    """What to divide by, and whether den itself counts."""
    if signed:
        by = torch.where(den < 0, den.clamp(max=-least), den.clamp(min=least))
        return by, by == den
    return den.masked_fill(den == 0, torch.inf), den != 0


def divide_forward(
    num: Tensor, den: Tensor, signed: bool, least: float, dtype: torch.dtype, most: float
) -> Tensor:
    """See `divide`; `most` is where the result is clamped, 0 for nowhere."""
    if fast := kernels(num):
        return fast.divide_forward(num, den, signed, least, dtype, most)
    by, _ = _divisor(den.to(_work(den)), signed, least)
    out = num.to(by.dtype) / by.unsqueeze(-1)
    return _inside(out.clamp(-most, most) if most else out, dtype)


def divide_backward(
    out: Tensor,
    den: Tensor,
    d_out: Tensor,
    signed: bool,
    least: float,
    dtype: torch.dtype,
    most: float,
) -> tuple[Tensor, Tensor]:
    """d_num = d_out / den, in `dtype`, and d_den = -(d_num . out): no square of a small den."""
    if fast := kernels(out):
        return fast.divide_backward(out, den, d_out, signed, least, dtype, most)
    by, counts = _divisor(den.to(_work(den)), signed, least)
    y, d = out.to(by.dtype), d_out.to(by.dtype)
    if most:
        d = d.masked_fill(y.abs() >= most, 0.0)
    d = d / by.unsqueeze(-1)
    d_den = (-(d * y).sum(-1)).masked_fill(~counts, 0.0)
    return _inside(d, dtype), d_den.to(den.dtype)


# ---- Derivatives: each backward pass is a function of its own, so that a second is refused -------


class _Refusing(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(TWICE)


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Any, sin: Any, phi: str, *options: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.options = phi, options[1]
        ctx.save_for_backward(x, cos, sin)
        return features_forward(x, cos, sin, phi, *options)

    @staticmethod
    def backward(ctx: Any, d_plain: Tensor | None, d_turned: Tensor | None) -> Any:
        dx = None
        if d_plain is not None or d_turned is not None:
            dx = _FeaturesBackward.apply(*ctx.saved_tensors, d_plain, d_turned, *ctx.options)
        return dx, *(None,) * 7


class _FeaturesBackward(_Refusing):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return features_backward(*args)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num: Tensor, den: Tensor, *options: Any) -> Tensor:
        signed, least, _, most = options
        ctx.options = signed, least, num.dtype, most
        out = divide_forward(num, den, *options)
        ctx.save_for_backward(out, den)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        out, den = ctx.saved_tensors
        return *_DivideBackward.apply(out, den, d_out, *ctx.options), None, None, None, None


class _DivideBackward(_Refusing):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        return divide_backward(*args)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        return _OnceBackward.apply(d, *ctx.saved_tensors)


class _OnceBackward(_Refusing):
    @staticmethod
    def forward(ctx: Any, d: Tensor, x: Tensor) -> Tensor:
        return d.view_as(d)
