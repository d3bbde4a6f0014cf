"""What the native kernels are called with: structures of addresses and sizes, as in native.cpp."""

from __future__ import annotations

import ctypes
import os

import torch

__all__ = [
    "DENOMINATOR",
    "GRADIENTS",
    "INPUTS",
    "LEVELS",
    "PHI",
    "RESULTS",
    "TYPES",
    "Affine",
    "Array",
    "BlockCall",
    "Call",
    "StepCall",
    "level",
]

LEVELS = {"plain": 0, "avx2": 1, "avx512": 2}
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}
PHI = {"none": 0, "elu+1": 1, "relu": 2}
DENOMINATOR = {"none": 0, "unrotated": 1, "rotated": 2}

NUMBERS = "batch heads key_heads length M E pairs phi denominator half chunk block threads level"
INPUTS = ["q", "k", "v", "cos", "sin", "g", "fresh", "S0", "z0"]
RESULTS = ["out", "den", "S", "z", "starts_S", "starts_z"]
GRADIENTS = ["d_out", "dS", "dz", "dq", "dk", "dv", "dg", "dS0", "dz0"]


class Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int64),
        ("stride", ctypes.c_int64 * 4),
    )


class Call(ctypes.Structure):
    """The same as `Call` in native.cpp, in the same order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in NUMBERS.split()),
        ("eps", ctypes.c_double),
        *((name, Array) for name in (*INPUTS, *RESULTS, *GRADIENTS)),
    )


class StepCall(ctypes.Structure):
    """The same as `Step` in native.cpp, in the same order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "M", "E", "pairs")),
        *((name, ctypes.c_int64) for name in ("phi", "denominator", "half", "threads", "level")),
        ("wide", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("eps", "multiplier")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "g", "S0", "z0", "position")),
        *((name, ctypes.c_void_p) for name in ("theta", "out", "S", "z", "next")),
    )


class Affine(ctypes.Structure):
    """The same as `Affine` in native_block.h."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class BlockCall(ctypes.Structure):
    """The same as `BlockStep` in native_block.h, in the same order."""

    _fields_ = (
        ("step", StepCall),
        *((name, ctypes.c_int64) for name in ("dim", "hidden", "rms", "output_norm")),
        *((name, ctypes.c_double) for name in ("norm_eps", "mlp_norm_eps", "head_eps")),
        ("rates", ctypes.c_void_p),
        *((name, Affine) for name in ("norm", "query", "key", "value", "decay", "gate", "out")),
        *((name, Affine) for name in ("query_norm", "key_norm", "mlp_norm", "up", "mlp_gate")),
        ("down", Affine),
        ("x", ctypes.c_void_p),
    )


def level() -> int:
    """The instruction set to use at most, as a number."""
    name = os.environ.get("LINEAR_ROPE_NATIVE_LEVEL", "avx512")
    if name not in LEVELS:
        raise ValueError(
            f"LINEAR_ROPE_NATIVE_LEVEL={name!r} is unknown; choose one of: {', '.join(LEVELS)}"
        )
    return LEVELS[name]
