"""Triton kernels around the causal product: one pass over memory each. Imports Triton.

What they compute, and the same in plain torch, is in `linear_rope.causal.around`, which is what to
call. A row is one token of one head. A block of rows covers all heads of its tokens, since heads
that come from a projection lie side by side inside a token; so blocks read whole lines of memory,
and a line of the tables serves all heads.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linear_rope.feature_base import log_floor

__all__ = ["divide_backward", "divide_forward", "features_backward", "features_forward"]

# Elements of a block: 16 for each thread of four warps.
BLOCK = 2048

_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


# ---- Features and rotation ----------------------------------------------------------------------


@triton.jit
def _feature(x, PHI: tl.constexpr, FLOOR: tl.constexpr, EPS: tl.constexpr):
    """phi(x); comparisons are such that NaN stays NaN."""
    if PHI == "elu+1":
        return tl.where(x > 0, x + 1.0, tl.exp(tl.where(x < FLOOR, FLOOR, x)))
    if PHI == "relu":
        return tl.where(x < 0, 0.0, x) + EPS
    return x


@triton.jit
def _slope(x, PHI: tl.constexpr, FLOOR: tl.constexpr):
    """phi'(x)."""
    if PHI == "elu+1":
        return tl.where(x > 0, 1.0, tl.where(x < FLOOR, 0.0, tl.exp(x)))
    if PHI == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    return x * 0.0 + 1.0


@triton.jit
def _rows(time, heads, ROWS: tl.constexpr):
    """Batch entry, tokens and heads of this program's rows, and which of them are there."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(time * heads, ROWS)
    row = (pid % blocks) * ROWS + tl.arange(0, ROWS)
    b = (pid // blocks).to(tl.int64)
    return b, (row // heads).to(tl.int64), (row % heads).to(tl.int64), row < time * heads


@triton.jit(do_not_specialize=["time", "heads"])
def _features_forward(
    x, cos, sin, plain, turned, time, heads,
    x_b, x_h, x_t, x_d, table_b, table_t, y_b, y_h, y_t,
    WIDTH: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, PHI: tl.constexpr, FLOOR: tl.constexpr, EPS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b, t, h, live = _rows(time, heads, ROWS)
    x_row = (x + b * x_b + t * x_t + h * x_h)[:, None]
    y_row = (b * y_b + t * y_t + h * y_h)[:, None]
    if TURNED > 0:
        j = tl.arange(0, PAIRS)[None, :]
        there = live[:, None] & (j < TURNED // 2)
        at = (b * table_b + t * table_t)[:, None] + j
        c = tl.load(cos + at, mask=there, other=0.0)
        s = tl.load(sin + at, mask=there, other=0.0)
        if INTERLEAVED:
            i = tl.arange(0, 2 * PAIRS)[None, :]
            there = live[:, None] & (i < TURNED)
            f = tl.load(x_row + i * x_d, mask=there, other=0.0).to(WIDE)
            f = _feature(f, PHI, FLOOR, EPS)
            if plain is not None:
                tl.store(plain + y_row + i, f, mask=there)
            p, q = tl.split(tl.reshape(f, (ROWS, PAIRS, 2)))
            f = tl.reshape(tl.join(p * c - q * s, q * c + p * s), (ROWS, 2 * PAIRS))
            tl.store(turned + y_row + i, f, mask=there)
        else:
            i = j + TURNED // 2
            p = tl.load(x_row + j * x_d, mask=there, other=0.0).to(WIDE)
            q = tl.load(x_row + i * x_d, mask=there, other=0.0).to(WIDE)
            p, q = _feature(p, PHI, FLOOR, EPS), _feature(q, PHI, FLOOR, EPS)
            if plain is not None:
                tl.store(plain + y_row + j, p, mask=there)
                tl.store(plain + y_row + i, q, mask=there)
            tl.store(turned + y_row + j, p * c - q * s, mask=there)
            tl.store(turned + y_row + i, q * c + p * s, mask=there)
    if TURNED < WIDTH:
        i = TURNED + tl.arange(0, REST)[None, :]
        there = live[:, None] & (i < WIDTH)
        f = tl.load(x_row + i * x_d, mask=there, other=0.0).to(WIDE)
        f = _feature(f, PHI, FLOOR, EPS)
        if plain is not None:
            tl.store(plain + y_row + i, f, mask=there)
        if turned is not None:
            tl.store(turned + y_row + i, f, mask=there)


@triton.jit(do_not_specialize=["time", "heads"])
def _features_backward(
    x, cos, sin, d_plain, d_turned, dx, time, heads,
    x_b, x_h, x_t, x_d, table_b, table_t, y_b, y_h, y_t, dx_b, dx_h, dx_t, dx_d,
    WIDTH: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, PHI: tl.constexpr, FLOOR: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b, t, h, live = _rows(time, heads, ROWS)
    x_row = (x + b * x_b + t * x_t + h * x_h)[:, None]
    dx_row = (dx + b * dx_b + t * dx_t + h * dx_h)[:, None]
    y_row = (b * y_b + t * y_t + h * y_h)[:, None]
    if TURNED > 0:
        j = tl.arange(0, PAIRS)[None, :]
        there = live[:, None] & (j < TURNED // 2)
        at = (b * table_b + t * table_t)[:, None] + j
        c = tl.load(cos + at, mask=there, other=0.0)
        s = tl.load(sin + at, mask=there, other=0.0)
        if INTERLEAVED:
            i = tl.arange(0, 2 * PAIRS)[None, :]
            there = live[:, None] & (i < TURNED)
            d = tl.load(d_turned + y_row + i, mask=there, other=0.0).to(WIDE)
            p, q = tl.split(tl.reshape(d, (ROWS, PAIRS, 2)))
            d = tl.reshape(tl.join(p * c + q * s, q * c - p * s), (ROWS, 2 * PAIRS))
            if d_plain is not None:
                d += tl.load(d_plain + y_row + i, mask=there, other=0.0).to(WIDE)
            if PHI != "none":
                f = tl.load(x_row + i * x_d, mask=there, other=0.0).to(WIDE)
                d *= _slope(f, PHI, FLOOR)
            tl.store(dx_row + i * dx_d, d, mask=there)
        else:
            i = j + TURNED // 2
            p = tl.load(d_turned + y_row + j, mask=there, other=0.0).to(WIDE)
            q = tl.load(d_turned + y_row + i, mask=there, other=0.0).to(WIDE)
            d, e = p * c + q * s, q * c - p * s
            if d_plain is not None:
                d += tl.load(d_plain + y_row + j, mask=there, other=0.0).to(WIDE)
                e += tl.load(d_plain + y_row + i, mask=there, other=0.0).to(WIDE)
            if PHI != "none":
                f = tl.load(x_row + j * x_d, mask=there, other=0.0).to(WIDE)
                d *= _slope(f, PHI, FLOOR)
                f = tl.load(x_row + i * x_d, mask=there, other=0.0).to(WIDE)
                e *= _slope(f, PHI, FLOOR)
            tl.store(dx_row + j * dx_d, d, mask=there)
            tl.store(dx_row + i * dx_d, e, mask=there)
    if TURNED < WIDTH:
        i = TURNED + tl.arange(0, REST)[None, :]
        there = live[:, None] & (i < WIDTH)
        d = tl.zeros((ROWS, REST), dtype=WIDE)
        if d_plain is not None:
            d += tl.load(d_plain + y_row + i, mask=there, other=0.0).to(WIDE)
        if d_turned is not None:
            d += tl.load(d_turned + y_row + i, mask=there, other=0.0).to(WIDE)
        if PHI != "none":
            f = tl.load(x_row + i * x_d, mask=there, other=0.0).to(WIDE)
            d *= _slope(f, PHI, FLOOR)
        tl.store(dx_row + i * dx_d, d, mask=there)


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
    """See `linear_rope.causal.around.features_forward`."""
    plain = _heads_inside(x, dtype) if both or cos is None else None
    turned = None if cos is None else _heads_inside(x, dtype)
    y = plain if turned is None else turned
    assert y is not None
    cos, sin, table = _tables(cos, sin)
    grid, shape = _tiles(x, cos, pairing)
    if grid[0]:
        with torch.cuda.device_of(x):
            _features_forward[grid](
                x, cos, sin, plain, turned, x.shape[2], x.shape[1],
                *_strides(x), x.stride(3), *table, *_strides(y),
                **shape, PHI=phi, FLOOR=_floor(x), EPS=eps, WIDE=_wide(x),
            )  # fmt: skip
    return plain, turned


def features_backward(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    d_plain: Tensor | None,
    d_turned: Tensor | None,
    phi: str,
    pairing: str,
) -> Tensor:
    """See `linear_rope.causal.around.features_backward`."""
    dx = torch.empty_like(x)
    d_plain, d_turned = _dense(d_plain), _dense(d_turned)
    y = d_plain if d_turned is None else d_turned
    assert y is not None
    cos, sin, table = _tables(cos, sin)
    grid, shape = _tiles(x, cos, pairing)
    if grid[0]:
        with torch.cuda.device_of(x):
            _features_backward[grid](
                x, cos, sin, d_plain, d_turned, dx, x.shape[2], x.shape[1],
                *_strides(x), x.stride(3), *table, *_strides(y), *_strides(dx), dx.stride(3),
                **shape, PHI=phi, FLOOR=_floor(x), WIDE=_wide(x),
            )  # fmt: skip
    return dx


# ---- Division -----------------------------------------------------------------------------------


@triton.jit
def _divisor(den, SIGNED: tl.constexpr, LEAST: tl.constexpr):
    """What to divide by, and whether den itself counts."""
    if SIGNED:
        by = tl.where(
            den < 0, tl.where(den > -LEAST, -LEAST, den), tl.where(den < LEAST, LEAST, den)
        )
        return by, by == den
    return den, den != 0


@triton.jit(do_not_specialize=["time", "heads"])
def _divide_forward(
    num, den, out, time, heads, n_b, n_h, n_t, n_e, d_b, d_h, d_t, y_b, y_h, y_t,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SIGNED: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b, t, h, live = _rows(time, heads, ROWS)
    i = tl.arange(0, COLUMNS)[None, :]
    there = live[:, None] & (i < WIDTH)
    d = tl.load(den + b * d_b + t * d_t + h * d_h, mask=live, other=1.0).to(WIDE)
    d, _ = _divisor(d, SIGNED, LEAST)
    x = tl.load(num + (b * n_b + t * n_t + h * n_h)[:, None] + i * n_e, mask=there, other=0.0)
    y = x.to(WIDE) / tl.where(d == 0, 1.0, d)[:, None]
    y = tl.where((d == 0)[:, None], 0.0, y)
    if MOST > 0:
        y = tl.where(y > MOST, MOST, tl.where(y < -MOST, -MOST, y))
    tl.store(out + (b * y_b + t * y_t + h * y_h)[:, None] + i, y, mask=there)


@triton.jit(do_not_specialize=["time", "heads"])
def _divide_backward(
    out, den, d_out, d_num, d_den, time, heads, d_b, d_h, d_t, y_b, y_h, y_t, e_b, e_h, e_t,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SIGNED: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b, t, h, live = _rows(time, heads, ROWS)
    i = tl.arange(0, COLUMNS)[None, :]
    there = live[:, None] & (i < WIDTH)
    at = (b * y_b + t * y_t + h * y_h)[:, None] + i
    d = tl.load(den + b * d_b + t * d_t + h * d_h, mask=live, other=1.0).to(WIDE)
    d, counts = _divisor(d, SIGNED, LEAST)
    y = tl.load(out + at, mask=there, other=0.0).to(WIDE)
    g = tl.load(d_out + at, mask=there, other=0.0).to(WIDE)
    if MOST > 0:
        g = tl.where((y >= MOST) | (y <= -MOST), 0.0, g)
    g = tl.where((d == 0)[:, None], 0.0, g / tl.where(d == 0, 1.0, d)[:, None])
    tl.store(d_num + at, g, mask=there)
    e = tl.where(counts, -tl.sum(g * y, axis=1), 0.0)
    tl.store(d_den + b * e_b + t * e_t + h * e_h, e, mask=live)


def divide_forward(
    num: Tensor, den: Tensor, signed: bool, least: float, dtype: torch.dtype, most: float
) -> Tensor:
    """See `linear_rope.causal.around.divide_forward`."""
    out = _heads_inside(num, dtype)
    grid, shape = _columns(num)
    if grid[0]:
        with torch.cuda.device_of(num):
            _divide_forward[grid](
                num, den, out, num.shape[2], num.shape[1],
                *_strides(num), num.stride(3), *_strides(den), *_strides(out),
                **shape, SIGNED=signed, LEAST=least, MOST=most, WIDE=_wide(den),
            )  # fmt: skip
    return out


def divide_backward(
    out: Tensor,
    den: Tensor,
    d_out: Tensor,
    signed: bool,
    least: float,
    dtype: torch.dtype,
    most: float,
) -> tuple[Tensor, Tensor]:
    """See `linear_rope.causal.around.divide_backward`."""
    d_num, d_den = _heads_inside(out, dtype), torch.empty_like(den)
    out, d_out = _need(_dense(out)), _need(_dense(d_out))
    grid, shape = _columns(out)
    if grid[0]:
        with torch.cuda.device_of(out):
            _divide_backward[grid](
                out, den, d_out, d_num, d_den, out.shape[2], out.shape[1],
                *_strides(den), *_strides(out), *_strides(d_den),
                **shape, SIGNED=signed, LEAST=least, MOST=most, WIDE=_wide(den),
            )  # fmt: skip
    return d_num, d_den


# ---- Shapes and places --------------------------------------------------------------------------


def _heads_inside(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for (batch, head, time, width) in which heads lie inside time: free to merge."""
    batch, heads, time, width = x.shape
    return x.new_empty(batch, time, heads, width, dtype=dtype).transpose(1, 2)


def _dense(x: Tensor | None) -> Tensor | None:
    """The same layout for tensors that come from elsewhere: a copy only if it differs."""
    return None if x is None else x.transpose(1, 2).contiguous().transpose(1, 2)


def _need(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _tables(
    cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor | None, Tensor | None, tuple[int, int]]:
    """The tables, dense, and their strides over batch and time."""
    if cos is None or sin is None:
        return None, None, (0, 0)
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (cos.stride(0) if cos.ndim == 3 else 0, cos.stride(-2))


def _tiles(x: Tensor, cos: Tensor | None, pairing: str) -> tuple[tuple[int], dict[str, Any]]:
    width = x.shape[3]
    turned = 0 if cos is None else 2 * cos.shape[-1]
    pairs = triton.next_power_of_2(max(1, turned // 2))
    rest = triton.next_power_of_2(max(1, width - turned))
    rows = max(1, BLOCK // max(2 * pairs, rest))
    shape = {
        "WIDTH": width,
        "TURNED": turned,
        "PAIRS": pairs,
        "REST": rest,
        "INTERLEAVED": pairing == "interleaved",
        "ROWS": rows,
    }
    return _grid(x, rows), shape


def _columns(x: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    columns = triton.next_power_of_2(max(1, x.shape[3]))
    rows = max(1, BLOCK // columns)
    return _grid(x, rows), {"WIDTH": x.shape[3], "COLUMNS": columns, "ROWS": rows}


def _grid(x: Tensor, rows: int) -> tuple[int]:
    batch, heads, time, _ = x.shape
    return (batch * triton.cdiv(time * heads, rows),)


def _wide(x: Tensor) -> Any:
    return _TYPES[torch.promote_types(x.dtype, torch.float32)]


def _floor(x: Tensor) -> float:
    return log_floor(torch.promote_types(x.dtype, torch.float32))
