"""From a pair of kernels to a fused causal form: derivative, vmap, compilers. Made once, here.

A fused form does feature map, rotation, causal product, denominator and division in one go. With
phi the map, R the rotation, and decay and document boundaries left out:

    num_t = sum_{n<=t} (R_t phi(q_t)) . (R_n phi(k_n)) v_n
    den_t = sum_{n<=t} phi(q_t) . phi(k_n),   out_t = num_t / den_t

To add one, write two plain functions of tensors and call `make_form` with them:

    def forward(q, k, v, cos, sin, g, fresh, S0, z0, phi, eps, pairing, denominator, wide, chunk):
        out, den, S, z, starts_S, starts_z = empty_results(q, k, v, denominator, wide, starts)
        ...                                    # write into them
        return out, den, S, z, starts_S, starts_z

    def backward(q, k, v, cos, sin, g, fresh, out, den, starts_S, starts_z, d_out, dS, dz,
                 phi, eps, pairing, denominator, chunk, want_dg):
        dq, dk, dv, dg, dS0, dz0 = empty_gradients(q, k, v, want_dg)
        ...
        return dq, dk, dv, dg, dS0, dz0

    form = make_form("my_kernels", forward, backward, starts)
    out, S, z = form(q, k, v, phi="elu+1", denominator="unrotated")

with the type hints of `linear_rope.causal.chunked`, from which the operators' schemas are read.
Tensors, with W the work dtype (`work_dtype`: float64 for float64, else float32):

    q (B, H, T, D); k (B, K, T, D); v (B, K, T, E); H a multiple of K; any strides; one dtype
    cos, sin (T, P) or (B, T, P) in W: the tables of `Rotary.tables`; None rotates nothing
    g (B, K, T) in W, log decay <= 0, at least -1000; None is no decay
    fresh (B, T) bool, True where a new document begins; None is one document a row
    S0 (B, K, D, E), z0 (B, K, D) in W: the state before the first token; None is zeros
    out (B, H, T, E): in W if `wide` or without denominator, else in q's dtype (float16 is clamped
        to its range); den (B, H, T) in W, or (0,) without denominator
    S, z: the state after the last token; z is zeros without denominator
    starts_S, starts_z: what backward needs to begin in the middle, of the shapes that
        `starts(q, k, v, denominator, chunk)` gives: the batch is the second axis, and the other
        axes must not depend on it (vmap folds into it)

and options: phi "none", "elu+1" or "relu" (with eps); pairing as in `rotate`; denominator
"unrotated", "rotated" or "none"; chunk, tokens a chunk, 0 to leave it to the kernels.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "FusedForm",
    "empty_gradients",
    "empty_results",
    "make_form",
    "new_like",
    "without_autocast",
    "work_dtype",
]

FusedForm = Callable[..., tuple[Tensor, Tensor, Tensor]]  # `form` in `make_form`
Starts = Callable[[Tensor, Tensor, Tensor, str, int], tuple[tuple[int, ...], tuple[int, ...]]]


def make_form(name: str, forward: Any, backward: Any, starts: Starts) -> FusedForm:
    """The form made of the kernels `forward` and `backward`, as at the top of this file.

    Args:
        name: that of the operators, torch.ops.linear_rope.NAME_forward and NAME_backward.
        starts: shapes of starts_S and starts_z.

    Returns:
        A function that takes q, k, v and the rest by name, and returns (out, S, z). It is
        differentiable once, in q, k, v, g, S0 and z0, and not in cos and sin; a second derivative
        is refused.
    """

    def forward_fake(*args: Any) -> Any:
        q, k, v, denominator, wide, chunk = *args[:3], *args[12:15]
        return empty_results(q, k, v, denominator, wide, starts(q, k, v, denominator, chunk))

    def backward_fake(*args: Any) -> Any:
        q, k, v, want_dg = *args[:3], args[-1]
        return empty_gradients(q, k, v, want_dg)

    _OPERATORS[name] = (
        _operator(f"{name}_forward", forward, forward_fake, (), _STARTS_OUT),
        _operator(f"{name}_backward", backward, backward_fake, _STARTS_IN, ()),
    )

    def form(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        g: Tensor | None = None,
        fresh: Tensor | None = None,
        S0: Tensor | None = None,
        z0: Tensor | None = None,
        phi: str = "none",
        eps: float = 0.0,
        pairing: str = "interleaved",
        denominator: str = "none",
        wide: bool = False,
        chunk: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, _, S, z, _, _ = _Fused.apply(
            name, q, k, v, cos, sin, g, fresh, S0, z0, phi, eps, pairing, denominator, wide, chunk
        )
        return out, S, z

    return form


class _Fused(torch.autograd.Function):
    """The derivative. For the sake of torch.compile, which traces neither classes made in functions
    nor `forward(*args)`, the kernels come by their name and arguments are spelled out."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        name: str, q: Any, k: Any, v: Any, cos: Any, sin: Any, g: Any, fresh: Any, S0: Any, z0: Any,
        phi: str, eps: float, pairing: str, denominator: str, wide: bool, chunk: int,
    ) -> Any:  # fmt: skip
        return _OPERATORS[name][0](
            q, k, v, cos, sin, g, fresh, S0, z0, phi, eps, pairing, denominator, wide, chunk
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name, q, k, v, cos, sin, g, fresh, S0, z0, *options = inputs
        ctx.phi, ctx.eps, ctx.pairing, ctx.denominator, _, ctx.chunk = options
        ctx.has_S0, ctx.has_z0 = S0 is not None, z0 is not None
        out, den, _, z, *begin = output
        if ctx.denominator == "none":
            ctx.mark_non_differentiable(den, z, *begin)
        else:
            ctx.mark_non_differentiable(den, *begin)
        kept = None if ctx.denominator == "none" else out  # only the division needs it
        ctx.save_for_backward(q, k, v, cos, sin, g, fresh, kept, den, *begin)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _: Any, dS: Tensor, dz: Tensor, *__: Any) -> Any:
        q, k, v, cos, sin, g, fresh, out, den, *begin = ctx.saved_tensors
        # A decay that no one trains (a stabilizer's) costs no gradient.
        want_dg = g is not None and ctx.needs_input_grad[6]
        out = d_out if out is None else out
        dq, dk, dv, dg, dS0, dz0 = _FusedBackward.apply(
            ctx.name, q, k, v, cos, sin, g, fresh, out, den, *begin, d_out, dS, dz,
            ctx.phi, ctx.eps, ctx.pairing, ctx.denominator, ctx.chunk, want_dg,
        )  # fmt: skip
        dg, dS0 = dg if want_dg else None, dS0 if ctx.has_S0 else None
        dz0 = dz0 if ctx.has_z0 else None
        return None, dq, dk, dv, None, None, dg, None, dS0, dz0, *(None,) * 6


class _FusedBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that a second one is refused aloud."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        name: str, q: Any, k: Any, v: Any, cos: Any, sin: Any, g: Any, fresh: Any, out: Any,
        den: Any, starts_S: Any, starts_z: Any, d_out: Any, dS: Any, dz: Any,
        phi: str, eps: float, pairing: str, denominator: str, chunk: int, want_dg: bool,
    ) -> Any:  # fmt: skip
        return _OPERATORS[name][1](
            q, k, v, cos, sin, g, fresh, out, den, starts_S, starts_z, d_out, dS, dz,
            phi, eps, pairing, denominator, chunk, want_dg,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"the {ctx.name} form is differentiable once; for second derivatives use "
            'backend="reference" or backend="recurrent", which are plain torch'
        )


_OPERATORS: dict[str, tuple[Any, Any]] = {}  # name: forward, backward

# `apply` asks for the signature at every call, and would find it out anew each time.
_FUNCTIONS: tuple[Any, ...] = (_Fused.forward, _FusedBackward.forward)
for _function in _FUNCTIONS:
    _function.__signature__ = inspect.signature(_function)


# ---- Where results go ---------------------------------------------------------------------------


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_like(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized (batch, head, time, width) tensor that lies in memory as x does.

    Heads that come from a projection lie inside time; results that do too merge without a copy.
    """
    batch, heads, time, width = shape
    if 0 < x.stride(1) < x.stride(2) and x.shape[1] > 1 and x.shape[2] > 1:
        new = x.new_empty(batch, time, heads, width, dtype=dtype).transpose(1, 2)
    else:
        new = x.new_empty(shape, dtype=dtype)
    _advise_huge_pages(new)
    return new


def _advise_huge_pages(x: Tensor) -> None:
    """Asks Linux to back a large new tensor by pages of 2 MB.

    Its first touch costs one fault and one clearing a page, and with pages of 4 KB that is more
    than all the work done on it: 24 ms instead of 12 for a copy into 33 MB. It is an
    advice only, for the default setting "madvise" of transparent huge pages.
    """
    advise = _madvise()
    if advise is None or type(x) is not Tensor or x.device.type != "cpu" or x.nbytes < LARGE:
        return
    page = 4096
    begin = -(-x.data_ptr() // page) * page
    advise(begin, (x.data_ptr() + x.nbytes - begin) // page * page, MADV_HUGEPAGE)


LARGE = 1 << 22
MADV_HUGEPAGE = 14


@cache
def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def empty_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    denominator: str,
    wide: bool,
    starts: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, den, S, z, starts_S, starts_z: uninitialized."""
    work, none = work_dtype(q.dtype), denominator == "none"
    (batch, keys, _, width), values = k.shape, v.shape[-1]
    out = new_like(q, (*q.shape[:3], values), work if wide or none else q.dtype)
    return (
        out,
        q.new_empty((0,) if none else q.shape[:3], dtype=work),
        q.new_empty((batch, keys, width, values), dtype=work),
        q.new_empty((batch, keys, width), dtype=work),
        q.new_empty(starts[0], dtype=work),
        q.new_empty(starts[1], dtype=work),
    )


def empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, want_dg: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg (of size 0 if unwanted), dS0, dz0: uninitialized."""
    work = work_dtype(q.dtype)
    dq, dk, dv = (new_like(x, tuple(x.shape), x.dtype) for x in (q, k, v))
    return (
        *(dq, dk, dv),
        q.new_empty(k.shape[:3] if want_dg else (0,), dtype=work),
        q.new_empty((*k.shape[:2], k.shape[3], v.shape[3]), dtype=work),
        q.new_empty((*k.shape[:2], k.shape[3]), dtype=work),
    )


def without_autocast(q: Tensor) -> torch.autocast:
    """Inside the operators products keep their inputs' dtype, whatever the caller's autocast."""
    return torch.autocast(q.device.type, enabled=False)


# ---- Operators: opaque to compilers, which need to know the shapes only --------------------------

_LIBRARY = torch.library.Library("linear_rope", "FRAGMENT")

# Positions of the arguments (and results) that have no batch axis in front.
_TABLES = (3, 4)  # cos, sin: with or without a batch
_STARTS_IN, _STARTS_OUT = (9, 10), (4, 5)  # the batch is the second axis


def _operator(
    name: str, kernel: Any, fake: Any, starts_in: tuple[int, ...], starts_out: tuple[int, ...]
) -> Any:
    """Registers a torch operator. `torch.library.custom_op` does the same with one line less, but
    loads the whole compiler at the first call (two seconds)."""

    def mapped(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        """torch.func.vmap: one more batch dimension, folded into the batch."""
        size, rows = info.batch_size, args[0].shape[0 if in_dims[0] != 0 else 1]
        results = run(
            *(
                _fold_table(x, dim, size, rows)
                if i in _TABLES
                else _fold(x, dim, size, axis=int(i in starts_in))
                for i, (x, dim) in enumerate(zip(args, in_dims, strict=True))
            )
        )
        dims = tuple(None if r.ndim == 1 else int(i in starts_out) for i, r in enumerate(results))
        return tuple(
            r if dim is None else r.unflatten(dim, (size, rows))
            for r, dim in zip(results, dims, strict=True)
        ), dims

    schema = name + torch.library.infer_schema(kernel, mutates_args=())
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linear_rope::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"linear_rope::{name}", mapped, lib=_LIBRARY)
    run = getattr(torch.ops.linear_rope, name)
    return run


def _fold(x: Any, dim: int | None, size: int, axis: int) -> Any:
    """The mapped dimension (a new one of that size, if x has none) goes into the batch axis."""
    if not isinstance(x, Tensor) or x.ndim == 1:  # of size 0: unwanted
        return x
    x = _repeated(x, axis, size) if dim is None else x.movedim(dim, axis)
    return x.flatten(axis, axis + 1)


def _fold_table(x: Tensor | None, dim: int | None, size: int, rows: int) -> Tensor | None:
    if x is None or (dim is None and x.ndim == 2):
        return x  # one table for all
    x = _repeated(x, 0, size) if dim is None else x.movedim(dim, 0)
    if x.ndim == 3:  # each mapped call has one table for its rows
        x = _repeated(x, 1, rows)
    return x.flatten(0, 1)


def _repeated(x: Tensor, axis: int, size: int) -> Tensor:
    return x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:])
