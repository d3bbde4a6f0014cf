"""The native form: the kernels of native.cpp, compiled on request, called on tensors' addresses.

The fastest form on a CPU, and never needed: without a compiler everything runs in pure torch.
Nothing is compiled unasked. `build_native()` compiles, once, into a cache; so does the first use if
the environment has LINEAR_ROPE_NATIVE=1. A library that is in the cache is found at first use.

| Variable | |
|---|---|
| LINEAR_ROPE_NATIVE | 1: compile at first use if need be; 0: do not use what is there either |
| LINEAR_ROPE_CACHE | where libraries are kept (default: linear_rope in the user's cache folder) |
| LINEAR_ROPE_NATIVE_LEVEL | `plain`, `avx2` or `avx512`: at most that instruction set |
| LINEAR_ROPE_NATIVE_FLAGS | further compiler flags, such as -fsanitize=address,undefined |

A library's name carries a hash of what it was made of (source, flags, versions) and one of its own
bytes, and it appears under that name by one renaming. So two processes may build at once, a changed
source finds no stale library, and a damaged file is not loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from linear_rope.causal.native_calls import (
    DENOMINATOR,
    GRADIENTS,
    INPUTS,
    PHI,
    RESULTS,
    TYPES,
    Array,
    BlockCall,
    Call,
    StepCall,
    level,
)
from linear_rope.causal.operator import empty_gradients, empty_results, make_form

__all__ = ["build_native", "is_ready", "library", "native", "why_not"]

SOURCE = Path(__file__).with_name("native.cpp")
HEADER = SOURCE.with_name("native_block.h")
FLAGS = ("-O3", "-ffp-contract=fast", "-Wno-psabi")

logger = logging.getLogger("linear_rope")


# ---- The library ---------------------------------------------------------------------------------


class _Found:
    """What this process has found out: the library, or why there is none (None: not looked yet)."""

    library: ctypes.CDLL | None = None
    reason: str | None = None


def build_native(*, verbose: bool = False) -> Path:
    """Compile the native kernels unless the cache has them, and use them from now on.

    It takes about half a minute, a C++ compiler (GCC or clang) and ninja.

    Args:
        verbose: show the compiler's output.

    Returns:
        The library's path in the cache.

    Raises:
        RuntimeError: no compiler, no place to write, or a compilation that failed; one sentence.
    """
    path = _find() or _compile(verbose)
    if _Found.library is None:
        _Found.library = _load(path)
    _Found.reason = ""
    return path


def why_not() -> str:
    """Why `backend="native"` cannot be used, in one sentence; "" if it can.

    The first call looks into the cache, and compiles if LINEAR_ROPE_NATIVE=1.
    """
    if _Found.reason is None:
        _Found.reason = _first_look()
        if _Found.reason:
            logger.debug("native kernels: %s", _Found.reason)
    return _Found.reason


def is_ready() -> bool:
    """Whether `backend="native"` can be used; see `why_not`."""
    return not why_not()


# As torch.compiler.assume_constant_result does, which would load the compiler: graphs ask once, and
# take the answer for a constant.
is_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def library() -> ctypes.CDLL:
    """The kernels.

    Raises:
        ValueError: there are none here, and why.
    """
    if (reason := why_not()) or _Found.library is None:
        raise ValueError(f'backend="native" cannot be used: {reason}')
    return _Found.library


def _first_look() -> str:
    asked = os.environ.get("LINEAR_ROPE_NATIVE", "")
    if asked == "0":
        return "switched off by LINEAR_ROPE_NATIVE=0"
    try:
        if asked == "1":
            build_native()
        elif path := _find():
            _Found.library = _load(path)
        else:
            return "not compiled; call linear_rope.build_native() once, or set LINEAR_ROPE_NATIVE=1"
    except RuntimeError as error:
        return str(error)
    return ""


def _cache() -> Path:
    if chosen := os.environ.get("LINEAR_ROPE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "linear_rope"


def _flags() -> list[str]:
    return [*FLAGS, *os.environ.get("LINEAR_ROPE_NATIVE_FLAGS", "").split()]


def _key() -> str:
    parts = [torch.__version__, platform.machine(), sys.platform, os.environ.get("CXX", "")]
    made_of = SOURCE.read_bytes() + HEADER.read_bytes() + "\0".join([*parts, *_flags()]).encode()
    return hashlib.sha256(made_of).hexdigest()[:16]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _find() -> Path | None:
    """The library in the cache; a file that is not what its name says is passed over."""
    try:
        for path in sorted(_cache().glob(f"native-{_key()}-*.so")):
            if path.stem.endswith(_digest(path)):
                return path
            logger.warning("%s is damaged and not used; linear_rope.build_native() renews it", path)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        logger.warning("the cache of native kernels cannot be read: %s", error)
    return None


def _compile(verbose: bool) -> Path:
    try:
        cache = _cache()
        cache.mkdir(parents=True, exist_ok=True)
        # A folder of this build's own: nothing half done is ever seen, and no lock is left behind.
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=cache))
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"the cache of native kernels cannot be written ({error}); "
            "choose a folder with LINEAR_ROPE_CACHE"
        ) from None
    try:
        _run_compiler(folder, verbose)
        built = next(folder.glob("*.so"))
        path = cache / f"native-{_key()}-{_digest(built)}.so"
        for old in cache.glob(f"native-{_key()}-*.so"):
            if not old.stem.endswith(_digest(old)):  # damaged
                old.unlink(missing_ok=True)
        os.replace(built, path)
    except OSError as error:
        raise RuntimeError(f"the cache of native kernels cannot be written ({error})") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _run_compiler(folder: Path, verbose: bool) -> None:
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise RuntimeError(f"torch's extension loader lacks a package: {error}") from None
    compiler = os.environ.get("CXX") or "c++"  # as the loader chooses it
    for what, program in (("C++ compiler", compiler.split()[0]), ("build program", "ninja")):
        if shutil.which(program) is None:
            raise RuntimeError(f"the {what} {program!r} is not installed, so nothing was compiled")
    sanitizers = [flag for flag in _flags() if flag.startswith("-fsanitize")]
    # torch's libraries, which the loader links, are not called.
    unused = ["-Wl,--as-needed"] if sys.platform == "linux" else []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a compiler that torch was not tested with
            cpp_extension.load(
                name="linear_rope_native",
                sources=[str(SOURCE)],
                extra_cflags=_flags(),
                extra_ldflags=[*unused, *sanitizers],
                build_directory=str(folder),
                is_python_module=False,
                verbose=verbose,
            )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        first = next((line for line in lines if "error:" in line), lines[0]).strip()
        raise RuntimeError(
            f"compiling the native kernels failed ({first}); "
            "linear_rope.build_native(verbose=True) shows all of it"
        ) from None


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        names = ("call", "step", "block")
        sizes = [getattr(library, f"linear_rope_{name}_size")() for name in names]
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{path} cannot be loaded ({error}); delete it") from None
    if sizes != [ctypes.sizeof(kind) for kind in (Call, StepCall, BlockCall)]:
        raise RuntimeError(f"{path} is not of this version; delete it")
    library.linear_rope_run.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.linear_rope_step.argtypes = [ctypes.c_void_p]
    library.linear_rope_blocks.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library


# ---- A call --------------------------------------------------------------------------------------


def _plan(k: Tensor, v: Tensor, chunk: int) -> tuple[int, int]:
    """Tokens a chunk, and tokens a block.

    Short chunks do less of what is quadratic in them, long ones add to a large state less often. A
    block is long enough for its state to be a few percent of what its tokens read and write.
    """
    M, E = k.shape[-1], v.shape[-1]
    chunk = max(1, min(chunk or (32 if M * E <= 128**2 else 64), k.shape[2]))
    return chunk, chunk * -(-max(256, 16 * M * E // (M + E)) // chunk)


def _starts(
    q: Tensor, k: Tensor, v: Tensor, denominator: str, chunk: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the states before each block."""
    _, block = _plan(k, v, chunk)
    z = (max(1, -(-k.shape[2] // block)), *k.shape[:2], k.shape[3])
    return (*z, v.shape[3]), z


def _strides(name: str, x: Tensor) -> tuple[int, ...]:
    """Those of the axes (batch, head, time, width), 0 for an axis that is not there."""
    s = x.stride()
    if name in ("cos", "sin"):
        return (s[0] if x.ndim == 3 else 0, 0, s[-2], s[-1])
    if name == "fresh":
        return (s[0], 0, s[1], 0)
    if name in ("g", "den", "dg"):
        return (*s, 0)
    return s


def _run(
    names: list[str],
    tensors: tuple[Tensor | None, ...],
    options: tuple[str, float, str, str, int],
    backward: bool,
) -> None:
    phi, eps, pairing, denominator, chunk = options
    given = {n: x for n, x in zip(names, tensors, strict=True) if x is not None and x.ndim > 1}
    q, k, v = given["q"], given["k"], given["v"]
    if q.device.type != "cpu":
        raise ValueError(
            f'backend="native" runs on the CPU, but q is on {q.device}; use backend="auto"'
        )
    kernels = library()
    (batch, heads, length, M), E = q.shape, v.shape[3]
    pairs = given["cos"].shape[-1] if "cos" in given else 0
    call = Call(
        *(batch, heads, k.shape[1], length, M, E, pairs, PHI[phi], DENOMINATOR[denominator]),
        *(pairing == "half", *_plan(k, v, chunk), torch.get_num_threads(), level(), eps),
    )
    for name, x in given.items():
        if name.endswith(("S", "z", "S0", "z0")):  # states are dense, one after another
            given[name] = x = x.contiguous()  # kept here until the call is over
            strides: tuple[int, ...] = (0, M * E if "S" in name else M)
        else:
            strides = _strides(name, x)
        setattr(call, name, Array(x.data_ptr(), TYPES[x.dtype], (ctypes.c_int64 * 4)(*strides)))
    if kernels.linear_rope_run(ctypes.byref(call), backward):
        raise MemoryError("the native kernels found no memory for their workspace")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    g: Tensor | None,
    fresh: Tensor | None,
    S0: Tensor | None,
    z0: Tensor | None,
    phi: str,
    eps: float,
    pairing: str,
    denominator: str,
    wide: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    results = empty_results(q, k, v, denominator, wide, _starts(q, k, v, denominator, chunk))
    _run(
        [*INPUTS, *RESULTS],
        (q, k, v, cos, sin, g, fresh, S0, z0, *results),
        (phi, eps, pairing, denominator, chunk),
        backward=False,
    )
    return results


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    g: Tensor | None,
    fresh: Tensor | None,
    out: Tensor,
    den: Tensor,
    starts_S: Tensor,
    starts_z: Tensor,
    d_out: Tensor,
    dS: Tensor,
    dz: Tensor,
    phi: str,
    eps: float,
    pairing: str,
    denominator: str,
    chunk: int,
    want_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = empty_gradients(q, k, v, want_dg)
    saved = (q, k, v, cos, sin, g, fresh, out, den, starts_S, starts_z, d_out, dS, dz)
    _run(
        [*INPUTS[:7], "out", "den", "starts_S", "starts_z", *GRADIENTS],
        (*saved, *gradients),
        (phi, eps, pairing, denominator, chunk),
        backward=True,
    )
    return gradients


native = make_form("native", _forward, _backward, _starts)
