"""The native form: what is special about C++ kernels. Tests of all fused forms are elsewhere."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import judge
import pytest
import torch
from torch import Tensor

import linear_rope
from linear_rope import Rotary, causal_product
from linear_rope.causal import native as module
from linear_rope.causal.native import native
from linear_rope.causal.native_calls import LEVELS

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
DTYPES = tuple(TOLERANCE)
DOCUMENTS = (0, 3, 4, 40, 70)  # where they begin: of one token, of less and more than a chunk


@pytest.fixture
def library() -> Any:
    """Compiled before the tests start; where that failed, tests are skipped and say why."""
    if reason := module.why_not():
        pytest.skip(reason)
    return module._Found.library


# ---- Against the judge ---------------------------------------------------------------------------


def make(
    *,
    batch: int = 2,
    heads: int = 2,
    keys: int = 1,
    length: int = 75,
    width: int = 16,
    values: int = 8,
    dtype: torch.dtype = torch.float32,
    decay: bool = False,
    state: bool = False,
) -> dict[str, Tensor]:
    """Tensors that get gradients."""
    work = torch.promote_types(dtype, torch.float32)
    x = {
        "q": torch.randn(batch, heads, length, width).to(dtype),
        "k": torch.randn(batch, keys, length, width).to(dtype),
        "v": torch.randn(batch, keys, length, values).to(dtype),
    }
    if decay:
        x["g"] = -0.3 * torch.rand(batch, keys, length, dtype=work)
    if state:
        x["S0"] = torch.randn(batch, keys, width, values, dtype=work)
        x["z0"] = width * torch.rand(batch, keys, width, dtype=work)
    return x


def documents(batch: int, length: int) -> Tensor:
    """The rows differ: the last one is a single document that goes on from the state."""
    fresh = torch.zeros(batch, length, dtype=torch.bool)
    fresh[0, [t for t in DOCUMENTS if t < length]] = True
    return fresh


def judged(x: dict[str, Tensor], rotary: Rotary | None, fresh: Tensor | None) -> list[Tensor]:
    """out, S, z in float64, by the lines of the judge."""
    q, k, v = (x[name] for name in "qkv")
    q, k, v = q.double(), k.double(), v.double()
    g = x["g"].double() if "g" in x else torch.zeros(k.shape[:3], dtype=torch.float64)
    if fresh is not None:
        g = g.masked_fill(fresh[:, None], -torch.inf)
    below = [judge.phi("elu+1", q), judge.phi("elu+1", k)]
    above = below
    if rotary is not None:
        at, options = torch.arange(q.shape[2]), (rotary.base, rotary.rotated_width, rotary.pairing)
        above = [judge.turn(f, at, *options) for f in below]
    groups = q.shape[1] // k.shape[1]

    def product(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        state = None if state is None else state.repeat_interleave(groups, 1)
        out, last = judge.product(q, *(y.repeat_interleave(groups, 1) for y in (k, v, g)), state)
        return out, last[:, ::groups]

    num, S = product(*above, v, x.get("S0"))
    z0 = x["z0"].unsqueeze(-1) if "z0" in x else None
    den, z = product(*below, torch.ones_like(v[..., :1]), z0)
    return [num / den, S, z.squeeze(-1)]


def check(
    x: dict[str, Tensor],
    rotary: Rotary | None = None,
    fresh: Tensor | None = None,
    *,
    tolerance: float | None = None,
    chunk: int = 0,
) -> None:
    """Outputs, states and the gradients of everything; a gradient an element of each result."""
    dtype = x["q"].dtype
    work = torch.promote_types(dtype, torch.float32)
    tolerance = tolerance or TOLERANCE[dtype]
    x = {name: y.detach().requires_grad_() for name, y in x.items()}
    cos, sin = None, None
    if rotary is not None:
        cos, sin = rotary.tables(torch.arange(x["q"].shape[2]), work)
    got = native(
        **x,
        cos=cos,
        sin=sin,
        fresh=fresh,
        pairing="interleaved" if rotary is None else rotary.pairing,
        phi="elu+1",
        denominator="unrotated",
        chunk=chunk,
    )
    exact = {name: y.detach().double().requires_grad_() for name, y in x.items()}
    want = judged(exact, rotary, fresh)
    weights = [torch.randn(y.shape, dtype=torch.float64).to(y.dtype) for y in got]
    grads = torch.autograd.grad(got, list(x.values()), weights)
    wanted = torch.autograd.grad(
        want, list(exact.values()), [w.double() for w in weights], materialize_grads=True
    )
    assert got[0].dtype == dtype and got[1].dtype == got[2].dtype == work
    for name, a, b in zip(("out", "S", "z", *x), [*got, *grads], [*want, *wanted], strict=True):
        assert judge.error(a, b) < tolerance, name


@pytest.mark.parametrize("values", [1, 17, 64, 100])
@pytest.mark.parametrize("width", [1, 3, 17, 64, 65, 100, 256])
def test_widths(library: Any, width: int, values: int) -> None:
    rotary = Rotary(width, pairing="half") if width % 2 == 0 else None
    check(make(batch=1, length=70, width=width, values=values, state=True), rotary)


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 63, 64, 65, 129, 1000])
def test_lengths(library: Any, length: int, decay: bool) -> None:
    check(make(batch=1, length=length, decay=decay, state=decay), Rotary(16))
    check(make(length=length, keys=2, decay=decay, state=True), None, documents(2, length))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_token_in_any_dtype(library: Any, dtype: torch.dtype) -> None:
    check(make(length=0, dtype=dtype, decay=True, state=True), Rotary(16), documents(2, 0))
    check(make(length=0, dtype=dtype), Rotary(16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_dtypes(library: Any, dtype: torch.dtype, pairing: str) -> None:
    x = make(heads=4, keys=2, length=140, width=50, values=20, dtype=dtype, decay=True, state=True)
    check(x, Rotary(50, fraction=0.7, pairing=pairing), documents(2, 140))


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 37, 64, 1000])
def test_chunk_lengths(library: Any, chunk: int) -> None:
    x = make(length=150, dtype=torch.float64, decay=True, state=True)
    check(x, Rotary(16), documents(2, 150), chunk=chunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(library: Any, dtype: torch.dtype) -> None:
    def heads_in_time(h: int, w: int) -> Tensor:
        return torch.randn(2, 70, h, w).to(dtype).transpose(1, 2)

    apart = torch.randn(2, 2, 70, 30).to(dtype)[..., ::2]  # every other number
    across = torch.randn(2, 2, 12, 70).to(dtype).mT  # time innermost
    shared = torch.randn(1, 1, 70, 12).to(dtype).expand(2, 2, -1, -1)
    check({"q": heads_in_time(4, 12), "k": heads_in_time(2, 12), "v": heads_in_time(2, 15)})
    check({"q": across, "k": shared, "v": apart}, Rotary(12))
    check({"q": shared, "k": across, "v": apart[..., :1].expand(-1, -1, -1, 9)}, Rotary(12))


def test_results_lie_in_memory_as_the_inputs_do(library: Any) -> None:
    q, k, v = (torch.randn(2, 50, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    out, _, _ = native(q, k, v)
    out.sum().backward()
    for x in (out, q.grad, k.grad, v.grad):
        assert x is not None and x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("batch", "keys"), [(1, 1), (3, 1), (2, 4)])
def test_threads_and_segments_of_time(library: Any, batch: int, keys: int, threads: int) -> None:
    """With fewer heads than threads time is cut, and each part gets the states around it."""
    torch.set_num_threads(threads)
    sizes: dict[str, Any] = {"batch": batch, "heads": 2 * keys, "keys": keys, "length": 900}
    fresh = documents(batch, 900)
    fresh[0, 850] = True
    for decay in (False, True):
        check(make(**sizes, state=True, decay=decay), Rotary(16))
        check(make(**sizes, state=True, decay=decay), None, fresh)


@pytest.mark.parametrize("level", list(LEVELS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_instruction_set(
    library: Any, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if LEVELS[level] > library.linear_rope_level():
        pytest.skip(f"this processor has no {level}")
    monkeypatch.setenv("LINEAR_ROPE_NATIVE_LEVEL", level)
    for width, values in ((1, 1), (6, 65), (64, 17), (66, 7)):
        x = make(keys=2, width=width, values=values, dtype=dtype, decay=True, state=True)
        check(x, Rotary(width) if width > 1 else None, documents(2, 75))
        x = make(length=40, width=width, values=values, dtype=dtype)
        check(x, Rotary(width, pairing="half") if width > 1 else None)


def test_an_unknown_instruction_set(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEAR_ROPE_NATIVE_LEVEL", "mmx")
    with pytest.raises(ValueError, match="'mmx' is unknown; choose one of: plain, avx2, avx512"):
        native(*make(keys=2).values())


# ---- Numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", list(LEVELS))
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, -30.0), (torch.float64, -300.0)])
def test_exponential(
    library: Any, dtype: torch.dtype, least: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """elu+1 to a few units in the last place, down to its floor, and not a number stays one."""
    monkeypatch.setenv("LINEAR_ROPE_NATIVE_LEVEL", level)
    x = torch.cat([torch.linspace(1.2 * least, 20.0, 5000), torch.tensor([0.0, -0.0, least])])
    x = x.to(dtype).requires_grad_()
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    _, S, _ = native(torch.ones_like(x)[None, None, None], x[None, None, None], one, phi="elu+1")
    (slope,) = torch.autograd.grad(S.sum(), x)
    exact = x.detach().double()
    want = exact.clamp(least, 0.0).exp() + exact.relu()
    unit = torch.finfo(dtype).eps
    assert ((S.flatten().double() - want) / want).abs().max() < 4 * unit
    below = exact < least
    assert (slope[below] == 0).all()
    assert ((slope.double() / want.clamp(max=1.0))[~below][:-1] - 1).abs().max() < 4 * unit
    bad = torch.full((1, 1, 1, 4), torch.nan, dtype=dtype)
    assert native(bad, bad, one, phi="elu+1")[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_read_exactly_and_written_to_the_nearest(
    library: Any, dtype: torch.dtype
) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)  # all there are
    v = every.reshape(1, 1, 1, -1)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    out, _, _ = native(one, one, v)
    assert torch.equal(out.nan_to_num(nan=0.5), v.float().nan_to_num(nan=0.5))
    # Written: the gradient of v is that of the output.
    near = every.float()
    near = torch.cat([near, near * (1 + 2**-9), near * (1 + 2**-12), near * 1.0001, near + 3e-8])
    near = near[near.isfinite()]  # among them numbers beyond the range of float16
    v = torch.zeros(1, 1, 1, len(near), dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(native(one, one, v, wide=True)[0], v, near[None, None, None])
    assert torch.equal(grad.flatten(), near.to(dtype))


def test_float16_is_clamped_and_has_no_gradient_there(library: Any) -> None:
    q = torch.tensor([[-9.0, 9.0], [1.0, 1.0]], dtype=torch.float16)[None, :, None]
    k = torch.tensor([[-9.0, -9.0], [1.0, 1.0]], dtype=torch.float16)[None, :, None]
    v = torch.full((1, 2, 1, 3), 60000.0, dtype=torch.float16, requires_grad=True)
    z0 = torch.full((1, 2, 2), -1e-4)  # smaller than its keys' share of the numerator: weights > 1
    out, _, _ = native(q, k, v, z0=z0, phi="elu+1", denominator="unrotated")
    assert (out[0, 0].abs() == 65504).all() and (out[0, 1].abs() < 65504).all()
    (grad,) = torch.autograd.grad(out.float().sum(), v)
    assert (grad[0, 0] == 0).all() and (grad[0, 1] != 0).all()


def test_documents_do_not_see_each_other_even_where_one_is_broken(library: Any) -> None:
    """Forgetting is exact: not a factor of 0, which would turn infinity into not a number."""
    x = {name: y.requires_grad_() for name, y in make(keys=2, length=60, decay=True).items()}
    fresh = torch.zeros(2, 60, dtype=torch.bool)
    fresh[:, 25] = True
    broken = {name: y.detach().clone() for name, y in x.items()}
    for name in "qkv":
        broken[name][:, :, :25] = torch.inf
    broken = {name: y.requires_grad_() for name, y in broken.items()}
    alone = {name: y.detach()[:, :, 25:].clone().requires_grad_() for name, y in x.items()}
    options: dict[str, Any] = {"phi": "elu+1", "denominator": "unrotated"}
    out, S, z = native(**broken, fresh=fresh, **options)
    want, S_alone, z_alone = native(**alone, **options)
    assert judge.error(out[:, :, 25:], want) < 1e-6
    assert judge.error(S, S_alone) < 1e-6 and judge.error(z, z_alone) < 1e-6
    grads = torch.autograd.grad(out[:, :, 25:].sum() + S.sum(), list(broken.values()))
    wanted = torch.autograd.grad(want.sum() + S_alone.sum(), list(alone.values()))
    for name, a, b in zip(x, grads, wanted, strict=True):
        b = b if name != "g" else torch.cat([torch.zeros_like(b[..., :1]), b[..., 1:]], -1)
        assert judge.error(a[:, :, 25:], b) < 1e-5, name


@pytest.mark.parametrize("length", [0, 1, 33, 700])
def test_all_results_are_written(library: Any, poisoned: None, length: int) -> None:
    x = {name: y.requires_grad_() for name, y in make(length=length, decay=True).items()}
    for denominator in ("none", "unrotated"):
        results = native(**x, denominator=denominator)
        grads = torch.autograd.grad(sum(y.sum() for y in results), list(x.values()))
        assert not any(y.isnan().any() for y in (*results, *grads))


def test_nothing_is_read_of_the_workspace_that_was_not_written(library: Any) -> None:
    """It is kept between calls: here a call of nothing but NaN leaves it behind, each time."""
    for dtype in DTYPES:
        for length, width, values in ((1, 2, 3), (31, 18, 1), (150, 6, 17)):
            for plain in (False, True):
                spoil(dtype)
                x = make(length=length, width=width, values=values, dtype=dtype, keys=2)
                if not plain:
                    x = make(
                        length=length,
                        width=width,
                        values=values,
                        dtype=dtype,
                        decay=True,
                        state=True,
                    )
                check(x, Rotary(width), None if plain else documents(2, length))


def spoil(dtype: torch.dtype) -> None:
    """Both passes with everything there is, larger than what follows, of NaN alone."""
    x = make(keys=2, length=200, width=70, values=70, dtype=dtype, decay=True, state=True)
    x = {name: torch.full_like(y, torch.nan).requires_grad_() for name, y in x.items()}
    cos, sin = Rotary(70).tables(torch.arange(200), torch.promote_types(dtype, torch.float32))
    results = native(**x, cos=cos, sin=sin, phi="elu+1", denominator="unrotated")
    grads = torch.autograd.grad(sum(y.double().sum() for y in results), list(x.values()))
    assert all(y.isnan().any() for y in (*results, *grads))


# ---- Compiling, finding, doing without -----------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, as a process sees it that has not looked yet; a compiler that copies."""
    made = None if module.why_not() else module._find()
    monkeypatch.setenv("LINEAR_ROPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LINEAR_ROPE_NATIVE", raising=False)
    monkeypatch.setattr(module._Found, "library", None)
    monkeypatch.setattr(module._Found, "reason", None)

    def copy(folder: Path, verbose: bool) -> None:
        if made is None:
            pytest.skip("there is no library to copy")
        shutil.copy(made, folder / "linear_rope_native.so")

    monkeypatch.setattr(module, "_run_compiler", copy)
    return tmp_path / "cache"


def never(folder: Path, verbose: bool) -> None:
    raise AssertionError("compiled unasked")


def test_nothing_is_compiled_unasked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run_compiler", never)
    reason = linear_rope.backends()["native"]
    assert reason.startswith("not compiled; call linear_rope.build_native() once")
    x = make(keys=2)
    with pytest.raises(ValueError, match='backend="native" cannot be used: not compiled'):
        causal_product(x["q"], x["k"], x["v"], backend="native")
    out, _ = causal_product(x["q"], x["k"], x["v"])  # pure torch
    assert judge.error(out, judge.product(x["q"], x["k"], x["v"])[0]) < 1e-5
    assert not cache.exists()


def test_a_library_in_the_cache_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = linear_rope.build_native()
    assert [path] == list(cache.iterdir())  # no folder of the build is left
    assert linear_rope.build_native() == path and linear_rope.backends()["native"] == ""
    monkeypatch.setattr(module, "_run_compiler", never)
    monkeypatch.setattr(module._Found, "library", None)
    monkeypatch.setattr(module._Found, "reason", None)
    assert linear_rope.backends()["native"] == ""
    x = make(keys=2)
    out, _ = causal_product(x["q"], x["k"], x["v"], backend="native")
    assert judge.error(out, judge.product(x["q"], x["k"], x["v"])[0]) < 1e-5


def test_two_builds_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = module._run_compiler
    other: list[Path] = []

    def interrupted(folder: Path, verbose: bool) -> None:
        if not other:  # while this one compiles, another process does the same from end to end
            other.append(folder)
            other[0] = module._compile(verbose=False)
        copy(folder, verbose)

    monkeypatch.setattr(module, "_run_compiler", interrupted)
    assert linear_rope.build_native() == other[0]
    assert list(cache.iterdir()) == other


def test_the_environment_asks_and_forbids(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEAR_ROPE_NATIVE", "1")
    assert module.why_not() == "" and len(list(cache.glob("native-*.so"))) == 1
    monkeypatch.setattr(module._Found, "reason", None)
    monkeypatch.setenv("LINEAR_ROPE_NATIVE", "0")
    assert module.why_not() == "switched off by LINEAR_ROPE_NATIVE=0"


@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_a_damaged_library(
    cache: Path, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is never opened (to run a file that was cut short is a crash), and renewed when asked."""
    path = linear_rope.build_native()
    whole = path.read_bytes()
    broken = {"cut": whole[:5000], "empty": b"", "changed": whole[:-1] + bytes([whole[-1] ^ 1])}
    path.unlink()  # the file that is in use keeps its content
    path.write_bytes(broken[damage])
    monkeypatch.setattr(module._Found, "library", None)
    monkeypatch.setattr(module._Found, "reason", None)
    with caplog.at_level(logging.WARNING, logger="linear_rope"):
        assert module.why_not().startswith("not compiled")
    assert "is damaged and not used; linear_rope.build_native() renews it" in caplog.text
    assert linear_rope.build_native() == path and path.read_bytes() == whole


def test_what_is_no_library_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(folder: Path, verbose: bool) -> None:
        (folder / "a.so").write_text("no library")

    monkeypatch.setattr(module, "_run_compiler", nonsense)
    with pytest.raises(RuntimeError, match=r"cannot be loaded .*; delete it"):
        linear_rope.build_native()
    assert "cannot be loaded" in linear_rope.backends()["native"]


def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(RuntimeError, match="choose a folder with LINEAR_ROPE_CACHE"):
        linear_rope.build_native()


def test_a_changed_source_or_flag_is_another_library(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear_rope.build_native()
    changed = tmp_path / "native.cpp"
    changed.write_text(module.SOURCE.read_text() + "// changed\n")
    with monkeypatch.context() as patch:
        patch.setattr(module, "SOURCE", changed)
        assert module._find() is None
    monkeypatch.setenv("LINEAR_ROPE_NATIVE_FLAGS", "-g")
    assert module._find() is None


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


REPORT = """
import linear_rope, torch
print(linear_rope.backends()["native"])
print(linear_rope.causal_product(*torch.ones(3, 1, 1, 70, 4))[0][0, 0, -1, -1].item())
try:
    linear_rope.build_native()
except RuntimeError as error:
    print(error)
"""


def test_without_a_compiler_everything_runs_and_one_sentence_says_why(tmp_path: Path) -> None:
    run = run_python(
        REPORT, LINEAR_ROPE_CACHE=str(tmp_path), LINEAR_ROPE_NATIVE="1", CXX="no-such-compiler"
    )
    why = "the C++ compiler 'no-such-compiler' is not installed, so nothing was compiled"
    assert run.stdout.splitlines() == [why, "280.0", why] and run.stderr == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="no compiler")
def test_a_failed_compilation_is_one_sentence(tmp_path: Path) -> None:
    flags = "-DLINEAR_ROPE_BYTES=64"  # as if the first part of the file were not there
    run = run_python(
        REPORT,
        LINEAR_ROPE_CACHE=str(tmp_path),
        LINEAR_ROPE_NATIVE="1",
        LINEAR_ROPE_NATIVE_FLAGS=flags,
    )
    first, result, again = run.stdout.splitlines()
    assert first == again and result == "280.0"
    assert first.startswith("compiling the native kernels failed (") and "error:" in first
    assert first.endswith("; linear_rope.build_native(verbose=True) shows all of it")
    assert not list(tmp_path.iterdir())


def test_import_neither_looks_nor_compiles(tmp_path: Path) -> None:
    run = run_python(
        "import linear_rope, linear_rope.causal.native as n; print(n._Found.reason)",
        LINEAR_ROPE_CACHE=str(tmp_path / "none"),
        LINEAR_ROPE_NATIVE="1",
    )
    assert run.stdout == "None\n" and run.stderr == "" and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_first_use_inside_a_compiled_graph(library: Any) -> None:
    """The look into the cache is no part of the graph."""
    code = """
import linear_rope, torch
from linear_rope.causal import native
product = torch.compile(linear_rope.causal_product, fullgraph=True, backend="eager")
q, k, v = torch.randn(3, 1, 2, 70, 8)
print(native._Found.reason, torch.allclose(product(q, k, v)[0], (q @ k.mT).tril() @ v, atol=1e-4))
print(native._Found.library is not None)
"""
    run = run_python(code)
    assert run.stdout.split() == ["None", "True", "True"], run.stderr


def test_other_devices_are_refused(library: Any) -> None:
    x = [y.to("meta") for y in make(keys=2).values()]
    with pytest.raises(ValueError, match='runs on the CPU, but q is on meta; use backend="auto"'):
        module._forward(*x, *(None,) * 6, "none", 0.0, "interleaved", "none", False, 0)
