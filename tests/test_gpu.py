"""The passes around the product on a GPU, as far as a CPU can tell.

Plain torch against the judge; the Triton kernels, run by Triton's interpreter, against plain
torch; and whether the compiler takes them. The rest is `benchmarks/gpu.py`, whose own code is run
here too.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import conftest
import forms
import judge
import pytest
import torch
from forms import HAS_TRITON
from torch import Tensor

from benchmarks import _gpu_checks, _gpu_times, gpu
from linear_rope import Rotary
from linear_rope.causal import around

needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed (make test-triton)"
)

MAPS = ("none", "elu+1", "relu")
PAIRINGS = ("interleaved", "half")
LOW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *LOW)
# (batch, heads, time, width), pairs
SHAPES = [((2, 3, 5, 2), 1), ((1, 2, 70, 6), 2), ((2, 1, 1, 96), 48), ((1, 3, 9, 250), 101)]
SHAPES += [((2, 2, 7, 5), 0), ((1, 1, 0, 4), 2), ((0, 2, 3, 4), 1), ((1, 5, 5, 256), 128)]
EPS = 1e-3


def work(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def drawn(shape, dtype=torch.float64, spread=6.0, seed=0, inside=True) -> Tensor:
    """(batch, head, time, width), in memory with the heads inside time, or as the axes say."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=generator) * spread
    x = x.to(dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if inside else x


def tables(shape, pairs: int, dtype, by_row: bool) -> tuple[Tensor | None, Tensor | None]:
    if not pairs:
        return None, None
    batch, _, time, _ = shape
    rows = (batch, time, pairs) if by_row else (time, pairs)
    angles = torch.randn(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) * 9
    return (angles.cos() * 1.25).to(dtype), (angles.sin() * 1.25).to(dtype)  # YaRN has a factor


def same(got: Tensor | None, want: Tensor | None, terms: float = 4.0) -> bool:
    """Whether they differ by roundings only: `terms` in the work dtype, one in a narrower result.

    A rounding in the work dtype is relative to the largest value, since a rotation subtracts.
    """
    if want is None or got is None:
        return got is None and want is None
    assert got.dtype == want.dtype and got.shape == want.shape
    if not want.numel():
        return True
    size = want.double().abs()
    allowed = terms * torch.finfo(work(want.dtype)).eps * size.max().clamp(min=1.0)
    if want.dtype in LOW:
        allowed = allowed + torch.finfo(want.dtype).eps * size
    return bool(((got.double() - want.double()).abs() <= allowed).all())


# ---- Plain torch against the judge --------------------------------------------------------------


@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_features_are_the_map_and_its_rotation(phi, pairing):
    at = torch.arange(1000, 1040)
    for width, fraction in ((2, 1.0), (34, 1.0), (50, 0.5)):
        rotary = Rotary(width, fraction=fraction, pairing=pairing)
        cos, sin = rotary.tables(at, torch.float64)
        x = drawn((2, 3, 40, width)).requires_grad_()
        below, above = around.features(
            x, cos, sin, phi=phi, eps=EPS, pairing=pairing, dtype=x.dtype, both=True
        )
        y = drawn((2, 3, 40, width)).requires_grad_()
        want = y if phi == "none" else judge.phi(phi, y)
        turned = judge.turn(want, at, width=rotary.rotated_width, pairing=pairing)
        assert judge.error(below, want) <= 1e-14 and judge.error(above, turned) <= 1e-13
        d = [drawn(x.shape, seed=s) for s in (1, 2)]
        (got,) = torch.autograd.grad([below, above], x, d)
        (grad,) = torch.autograd.grad([want, turned], y, d)
        assert judge.error(got, grad) <= 1e-13
        # one of the two gradients alone
        below, above = around.features(
            x, cos, sin, phi=phi, eps=EPS, pairing=pairing, dtype=x.dtype, both=True
        )
        (got,) = torch.autograd.grad(above, x, d[1])
        want = y if phi == "none" else judge.phi(phi, y)
        turned = judge.turn(want, at, width=rotary.rotated_width, pairing=pairing)
        assert judge.error(got, torch.autograd.grad(turned, y, d[1])[0]) <= 1e-13


def test_features_are_those_of_the_library_at_its_floor_and_at_not_a_number():
    from linear_rope.feature_maps import EluPlusOne, Relu

    x = torch.tensor([-torch.inf, -31.0, -30.0, -29.0, -0.0, 0.0, 1e-9, 5.0, torch.inf, torch.nan])
    for dtype in (torch.float32, torch.float64):
        for phi, module in (("elu+1", EluPlusOne(10)), ("relu", Relu(10, EPS))):
            for factor in (1.0, 10.0):
                y = (x.to(dtype) * factor)[None, None, None].requires_grad_()
                got, _ = around.features(
                    y, None, None, phi=phi, eps=EPS, pairing="half", dtype=dtype, both=True
                )
                want = module(y)
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
                (slope,) = torch.autograd.grad(got.sum(), y)
                (expected,) = torch.autograd.grad(want.sum(), y)
                real = ~y.detach().isnan()
                torch.testing.assert_close(slope[real], expected[real], rtol=1e-7, atol=0)


@pytest.mark.parametrize("signed", [False, True])
def test_division_and_its_gradient(signed):
    num, den = drawn((2, 3, 7, 5)), drawn((2, 7, 3), seed=3).transpose(1, 2)
    den[0, 0, :4] = torch.tensor([0.0, 1e-9, -1e-9, -0.5])
    leaves = num.requires_grad_(), den.requires_grad_()
    got = around.divide(*leaves, signed=signed, dtype=torch.float64)
    by = torch.where(den == 0, torch.inf, den)
    if signed:
        by = torch.where(den < 0, den.clamp(max=-1e-6), den.clamp(min=1e-6))
    want = num / by.unsqueeze(-1)
    assert judge.error(got, want) <= 1e-15
    d = drawn(num.shape, seed=9)
    for a, b in zip(
        torch.autograd.grad(got, leaves, d), torch.autograd.grad(want, leaves, d), strict=True
    ):
        assert judge.error(a, b) <= 1e-13
    assert got[0, 0, 0].abs().max() == 0 or signed


def test_float16_is_clamped_and_passes_no_gradient_there():
    num = torch.tensor([1e6, -1e6, 2.0])[:, None].expand(1, 1, 3, 1).clone().requires_grad_()
    den = torch.ones(1, 1, 3, requires_grad=True)
    out = around.divide(num, den, signed=False, dtype=torch.float16)
    assert out.flatten().tolist() == [65504.0, -65504.0, 2.0]
    d_num, d_den = torch.autograd.grad(out.float().sum(), (num, den))
    assert d_num.flatten().tolist() == [0, 0, 1] and d_den.flatten().tolist() == [0, 0, -2]


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_rounds_once(dtype):
    x = drawn((1, 2, 65, 34), dtype, spread=2.0)
    cos, sin = tables(x.shape, 17, torch.float32, False)
    for phi in MAPS:
        options = {"phi": phi, "eps": EPS, "pairing": "half", "both": True}
        wide = around.features(x.double(), cos.double(), sin.double(), dtype=x.dtype, **options)
        for got, want in zip(
            around.features(x, cos, sin, dtype=x.dtype, **options), wide, strict=True
        ):
            assert same(got, want)


def test_results_lie_with_the_heads_inside_time():
    x = drawn((2, 3, 7, 4), inside=False)
    cos, sin = tables(x.shape, 2, x.dtype, False)
    below, above = around.features(
        x, cos, sin, phi="relu", eps=0.0, pairing="half", dtype=x.dtype, both=True
    )
    out = around.divide(x, x[..., 0], signed=False, dtype=x.dtype)
    for y in (below, above, out):
        assert y.transpose(1, 2).is_contiguous()


def test_a_second_derivative_is_refused():
    x = drawn((1, 1, 3, 2)).requires_grad_()
    one, den = x * 1, x[..., 0] * 1
    below, _ = around.features(
        one, None, None, phi="elu+1", eps=0.0, pairing="half", dtype=x.dtype, both=True
    )
    out = around.divide(one, den, signed=False, dtype=x.dtype)
    for y in (below, out, around.once(one)):
        (d,) = torch.autograd.grad(y.square().sum(), x, create_graph=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            d.sum().backward()


def test_the_header_names_what_is_skipped(monkeypatch):
    for triton, fla in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(forms, "HAS_TRITON", triton)
        monkeypatch.setattr(forms, "HAS_FLA", fla)
        lines = [x for x in conftest.pytest_report_header() if "make test-triton" in x]
        assert all(line.startswith("not tested: ") for line in lines)
        assert [any(word in x for x in lines) for word in ("Triton kernels", "stand-in")] == [
            not triton,
            not fla,
        ]


# ---- Triton's kernels against plain torch -------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch) -> ModuleType:
    """The kernels, made for Triton's interpreter: it is chosen when they are first imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return importlib.import_module("linear_rope.causal.triton_kernels")


def plain(function, *args):
    """The torch lines, whatever the environment says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return function(*args)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_feature_kernels(kernels, pairing, phi, dtype):
    assert around.kernels(torch.ones(1)) is kernels
    for number, (shape, pairs) in enumerate(SHAPES):
        narrow = torch.float32 if dtype == torch.float16 else dtype
        x = drawn(shape, dtype, inside=number % 2 == 0)
        if number % 3 == 1:  # strided in the last axis too, and expanded over heads
            x = drawn((*shape[:3], 2 * shape[3]), dtype)[..., ::2][:, :1].expand(shape)
        for both in (True, False):
            cos, sin = tables(shape, pairs, work(dtype), by_row=both == (number % 2 == 0))
            # No `eps` of 0: what a masked load puts there must not be seen.
            args = (x, cos, sin, phi, EPS, pairing)
            got = kernels.features_forward(*args, narrow, both)
            want = plain(around.features_forward, *args, narrow, both)
            assert all(map(same, got, want))
            d = [None if y is None else drawn(shape, narrow, seed=s) for s, y in enumerate(want, 5)]
            if both and pairs:
                d[0] = drawn(shape, narrow, seed=8, inside=False)
            back = (x, cos, sin, *d, phi, pairing)
            dx = kernels.features_backward(*back)
            assert same(dx, plain(around.features_backward, *back))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("signed", [False, True])
def test_division_kernels(kernels, signed, dtype):
    most = torch.finfo(dtype).max if dtype == torch.float16 else 0.0
    for number, (shape, _) in enumerate(SHAPES):
        num = drawn(shape, work(dtype), inside=number % 2 == 0)
        if number == 1 and dtype == torch.float16:
            num[0, 0, :9] *= 1e6
        den = drawn(shape[:3], work(dtype), seed=3, inside=number % 2 == 1) + 8
        if den.numel() > 4:
            den.select(2, 0)[0] = 0.0
            den.select(2, -1)[0] = -1e-9
        args = (num, den, signed, 1e-6)
        out = kernels.divide_forward(*args, dtype, most)
        assert same(out, plain(around.divide_forward, *args, dtype, most))
        d = drawn(shape, dtype, seed=4, inside=number % 2 == 1)
        back = (out, den, d, signed, 1e-6, num.dtype, most)
        got, want = kernels.divide_backward(*back), plain(around.divide_backward, *back)
        assert all(same(a, b, terms=30.0) for a, b in zip(got, want, strict=True))


@needs_triton
def test_kernels_at_the_floor_and_at_not_a_number(kernels):
    x = torch.tensor([torch.nan, -torch.inf, -31.0, -29.0, -0.0, 0.0, 1.0, torch.inf])
    x = x[None, None, None]
    for phi in MAPS:
        args = (x, None, None, phi, EPS, "half", torch.float32, True)
        got, want = kernels.features_forward(*args), plain(around.features_forward, *args)
        torch.testing.assert_close(got[0], want[0], equal_nan=True)
        back = (x, None, None, torch.ones_like(x), None, phi, "half")
        got, want = kernels.features_backward(*back), plain(around.features_backward, *back)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)


COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from linear_rope.causal import triton_kernels as kernels

class Driver:  # a GPU that is not there: enough of one to compile for
    get_current_target = staticmethod(lambda: GPUTarget("cuda", int(sys.argv[1]), 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

class Compile:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *args, **options: made.append(
            self.kernel.warmup(*args, grid=grid, **options).asm["cubin"])

made = []
driver.set_active(Driver())
for name in ("_features_forward", "_features_backward", "_divide_forward", "_divide_backward"):
    setattr(kernels, name, Compile(getattr(kernels, name)))
wide = torch.float32
for dtype, pairing, width, pairs in (
    (torch.bfloat16, "interleaved", 64, 32), (torch.float16, "half", 90, 20), (wide, "half", 7, 0)):
    x = torch.zeros(1, 8, 2, width, dtype=dtype).transpose(1, 2)
    cos = sin = torch.zeros(8, pairs) if pairs else None
    for phi in ("none", "elu+1") if pairs else ("relu",):
        y = kernels.features_forward(x, cos, sin, phi, 1e-3, pairing, wide, True)
        kernels.features_backward(x, cos, sin, *y, phi, pairing)
    most = 65504.0 if dtype == torch.float16 else 0.0
    out = kernels.divide_forward(x, x[..., 0], pairs > 20, 1e-6, dtype, most)
    kernels.divide_backward(out, x[..., 0], out, pairs > 20, 1e-6, wide, most)
print(len(made), min(map(len, made)) > 1000)
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_kernels_compile_for_a_gpu_that_is_not_there(architecture, tmp_path):
    """The interpreter takes more than the compiler does."""
    script = tmp_path / "compile.py"  # Triton reads the sources of what it compiles
    script.write_text(COMPILE)
    root = str(Path(__file__).parent.parent)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), architecture],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["16", "True"]


# ---- The script for whoever has a GPU -----------------------------------------------------------


@pytest.mark.slow
def test_a_dry_run_of_the_script_on_a_cpu(tmp_path):
    assert gpu.main(["--cpu-dry-run", "--workers", "0", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["skipped"] == [] and all(check["passed"] for check in found["checks"])
    groups = {check["group"] for check in found["checks"] if check["errors"]}
    assert {"chunked float32", "chunked bfloat16", "chunked float16", "passes"} <= groups
    assert all(timed["milliseconds"] > 0 for timed in found["times"])
    jobs = {timed["job"] for timed in found["times"]}
    assert {"forward", "forward + backward", "one token"} < jobs
    report = (tmp_path / "gpu.md").read_text()
    assert "WRONG" not in report and "ours, chunked, rotary" in report and "absent: fla" in report


def test_no_time_is_said_and_nothing_runs(tmp_path):
    options = ["--cpu-dry-run", "--minutes", "1e-9", "--workers", "1", "--out", str(tmp_path)]
    assert gpu.main(options) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["checks"] == [] and {t["milliseconds"] for t in found["times"]} == {None}
    assert "chunked float32" in found["skipped"]
    assert any(name.startswith("forward, softmax") for name in found["skipped"])
    assert "skipped for lack of time: passes" in (tmp_path / "gpu.md").read_text()


def test_a_wrong_result_is_found(monkeypatch):
    right = _gpu_checks.linear_attention

    def wrong(*args, **options):
        out, state = right(*args, **options)
        return out * 1.001, state

    monkeypatch.setattr(_gpu_checks, "linear_attention", wrong)
    monkeypatch.setattr(_gpu_checks, "_model", lambda *_: {"logits": 0.0})
    monkeypatch.setattr(gpu, "groups", lambda device: ["chunked float32"])
    checks = _gpu_checks.run_group("chunked float32", "cpu", 20)
    assert [c["name"] for c in checks if c["passed"]] == ["language model"]
    assert "**WRONG**" in gpu._check_line(checks[0])


@pytest.mark.slow
def test_a_part_in_its_own_process_that_works_fails_or_takes_too_long():
    options = gpu._options(["--cpu-dry-run"])
    (check, *_) = gpu._child("passes", 120.0, options)
    assert check["passed"] and check["errors"]
    (check,) = gpu._child("nonsense float32", 120.0, options)
    assert not check["passed"] and "KeyError" in check["note"]
    (check,) = gpu._child("passes", 0.01, options)
    assert check["passed"] and check["note"] == "no time left"


def test_the_peers_on_a_gpu_compute_what_they_are_timed_for(monkeypatch):
    """flash-linear-attention's functions, by stand-ins with their layout and defaults."""

    def product(q, k, v, scale=None):
        out, _ = judge.product(*(x.transpose(1, 2) for x in (q * (scale or 0.1), k, v)))
        return out.transpose(1, 2), None

    def normalized(q, k, v, scale=None):
        ones = torch.ones_like(v[..., :1])
        return product(q, k, v, scale)[0] / product(q, k, ones, scale)[0], None

    for name, function in (("simple_gla", product), ("linear_attn", normalized)):
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, f"chunk_{name}", function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    q, k, v = (drawn((1, 2, 9, 4), seed=s, spread=1.0) for s in range(3))
    assert judge.error(_gpu_times._fla_product(q, k, v), judge.product(q, k, v)[0]) <= 1e-12
    want = judge.attention(q, k, v, rotate="none")
    assert judge.error(_gpu_times._fla_normalized(q, k, v), want) <= 1e-12
    monkeypatch.setattr(_gpu_times, "unready", lambda device: {})
    assert {job for job, _ in _gpu_times.contestants("cuda").values()} == {
        *("rotary", "attention", "product", "softmax", "softmax-rotary")
    }
