"""The form on flash-linear-attention's kernels, without a GPU.

The kernels do not run on a CPU. In their place stands the judge's product, behind a function with
their layout that refuses what they refuse; where the package is installed, that function is itself
compared with the package's slow one.
"""

from __future__ import annotations

import importlib
import inspect
import sys

import judge
import pytest
import torch
from forms import HAS_FLA
from torch import Tensor

from linear_rope import Rotary

FLA = importlib.import_module("linear_rope.causal.fla")  # not the function of that name
fla = FLA.fla
needs_fla = pytest.mark.skipif(
    not HAS_FLA, reason="flash-linear-attention is not installed (make test-triton)"
)

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 8e-2, torch.float16: 5e-3}


def stand_in(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False):
    """chunk_simple_gla as it documents itself: (batch, time, head, width), scale, a state."""
    assert q.dtype == k.dtype == v.dtype and q.dtype != torch.float16
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] and q.shape[1] > 0
    if q.element_size() == 2:
        assert q.shape[-1] % 2 == 0 and v.shape[-1] % 2 == 0, "even widths in 16 bits"
    wide = torch.promote_types(q.dtype, torch.float32)
    assert g is None or (g.shape == q.shape[:3] and g.dtype == wide)
    batch, _, heads, width = k.shape
    if initial_state is not None:
        assert initial_state.shape == (batch, heads, width, v.shape[-1])
        assert initial_state.dtype == wide
    scale = width**-0.5 if scale is None else scale
    turned = [x.transpose(1, 2) for x in (q * scale, k, v)]
    decay = None if g is None else g.transpose(1, 2)
    if decay is not None and wide == torch.float32:  # exp in float32
        decay = decay.masked_fill(decay.exp() == 0, -torch.inf)
    out, final = judge.product(*turned, decay, initial_state)
    return out.transpose(1, 2).to(q.dtype), final.to(wide) if output_final_state else None


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(FLA, "_kernel", lambda q: stand_in)


def drawn(batch=2, heads=4, keys=2, time=37, width=6, values=5, dtype=torch.float64, seed=0):
    """q, k, v, g, S0, z0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    wide = torch.promote_types(dtype, torch.float32)
    q = normal(batch, time, heads, width).transpose(1, 2)
    k, v = (normal(batch, time, keys, n).transpose(1, 2) for n in (width, values))
    g = -0.3 * normal(batch, keys, time).square()
    S0, z0 = normal(batch, keys, width, values), normal(batch, keys, width).abs()
    return [x.to(dtype) for x in (q, k, v)] + [x.to(wide) for x in (g, S0, z0)]


def judged(q, k, v, g, S0, z0, *, phi, rotary, denominator, fresh=None):
    """The same by the judge's lines: features, rotation, two products, a quotient."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    if fresh is not None:
        g = (torch.zeros_like(k[..., 0]) if g is None else g.double()).masked_fill(
            fresh[:, None], -torch.inf
        )
    k, v, g, S0, z0 = (
        None if x is None else x.double().repeat_interleave(groups, 1) for x in (k, v, g, S0, z0)
    )
    below = (q, k) if phi == "none" else (judge.phi(phi, q), judge.phi(phi, k))
    above = below
    if rotary is not None:
        at, width = torch.arange(q.shape[2]), rotary.rotated_width
        above = tuple(judge.turn(x, at, width=width, pairing=rotary.pairing) for x in below)
    if denominator == "rotated":
        below = above
    num, S = judge.product(*above, v, g, S0)
    if denominator == "none":
        return num, S[:, ::groups], torch.zeros_like(S[:, ::groups, :, 0])
    z0 = None if z0 is None else z0.unsqueeze(-1)
    den, z = judge.product(*below, torch.ones_like(v[..., :1]), g, z0)
    return num / den, S[:, ::groups], z[:, ::groups, :, 0]


def both(inputs, *, rotary=None, **options):
    """Results and gradients of the form and of the judge, for the same inputs."""
    pulls = torch.Generator().manual_seed(5)
    found = []
    weights: list[Tensor] = []
    for form in (fla, judged):
        leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
        if form is judged:
            results = judged(*leaves, rotary=rotary, **options)
            weights = [w.double() for w in weights]
        else:
            q, k, v, g, S0, z0 = leaves
            turn = {}
            if rotary is not None:
                cos, sin = rotary.tables(torch.arange(q.shape[2]), q.dtype)
                turn = {"cos": cos, "sin": sin, "pairing": rotary.pairing}
            results = fla(q, k, v, g=g, S0=S0, z0=z0, eps=1e-3, **turn, **options)
            weights = [
                torch.randn(r.shape, dtype=torch.float64, generator=pulls).to(r.dtype)
                for r in results
            ]
        wanted = [x for x in leaves if x is not None]
        pulled = [(r, w) for r, w in zip(results, weights, strict=True) if r.requires_grad]
        grads = torch.autograd.grad(
            [r for r, _ in pulled], wanted, [w for _, w in pulled], materialize_grads=True
        )
        found.append((*(r.detach() for r in results), *grads))
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("denominator", ["unrotated", "rotated", "none"])
@pytest.mark.parametrize("pairing", ["interleaved", "half", None])
def test_the_form_agrees_with_the_judge(on_cpu, pairing, denominator, dtype):
    rotary = None if pairing is None else Rotary(6, fraction=0.7, pairing=pairing)
    if rotary is not None and denominator == "rotated":
        rotary = Rotary(6, base=1e9, fraction=0.4, pairing=pairing)  # hardly turns: far from 0
    for decay, state, keys in ((True, True, 2), (False, False, 4), (True, False, 1)):
        inputs = drawn(keys=keys, dtype=dtype)
        if not decay:
            inputs[3] = None
        if not state:
            inputs[4:] = None, None
        got, want = both(inputs, phi="elu+1", rotary=rotary, denominator=denominator)
        assert max(map(judge.error, got, want)) <= TOLERANCE[dtype]
        wide = torch.promote_types(dtype, torch.float32)
        assert got[0].dtype == (wide if denominator == "none" else dtype)
        assert got[1].dtype == got[2].dtype == wide


@pytest.mark.parametrize("phi", ["none", "relu"])
def test_other_maps_one_of_the_states_alone_and_a_wide_result(on_cpu, phi):
    q, k, v, g, S0, z0 = drawn()
    q, k = q.abs(), k.abs()
    for some in ((S0, None), (None, z0)):
        for rotary in (None, Rotary(6)):
            got, want = both((q, k, v, g, *some), phi=phi, rotary=rotary, denominator="unrotated")
            assert max(map(judge.error, got, want)) <= 1e-11
    narrow = [x.bfloat16() for x in (q, k, v)]
    assert fla(*narrow, phi=phi, denominator="unrotated", wide=True)[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_documents_are_as_if_each_was_alone(on_cpu, dtype):
    """With and without a decay; whatever is before a boundary, a number too large included."""
    q, k, v, g, S0, z0 = drawn(keys=4, dtype=dtype)
    fresh = torch.zeros(2, 37, dtype=torch.bool)
    fresh[0, [0, 5, 6, 30]] = True
    fresh[1, 36] = True
    rotary, options = Rotary(6), {"phi": "elu+1", "denominator": "unrotated"}
    for decay in (None, g):
        got, want = both((q, k, v, decay, S0, z0), fresh=fresh, rotary=rotary, **options)
        assert max(map(judge.error, got, want)) <= TOLERANCE[dtype]
    q, k, v = q.float(), k.float(), v.float()
    loud = v.clone()
    loud[0, :, :30] = 1e30
    cos, sin = rotary.tables(torch.arange(37), q.dtype)
    out, _, _ = fla(q, k, v, cos=cos, sin=sin, fresh=fresh, **options)
    same, _, _ = fla(q, k, loud, cos=cos, sin=sin, fresh=fresh, **options)
    assert torch.equal(out[0, :, 30:], same[0, :, 30:])


def test_the_strongest_decays_forget_as_weaker_ones_do(on_cpu):
    """exp(-110) is 0 in float32, so that clamping there changes nothing."""
    assert torch.tensor(FLA.FORGET).exp() == 0 and torch.tensor(FLA.FORGET / 2).exp() > 0
    q, k, v, g, _, _ = drawn(keys=4, dtype=torch.float32)
    g[:, :, ::7] = -1000.0
    got = fla(q, k, v, g=g)[0]
    g[:, :, ::7] = -torch.inf
    assert torch.equal(got, fla(q, k, v, g=g)[0])


def test_a_sequence_in_parts_is_the_sequence(on_cpu):
    q, k, v, g, _, _ = drawn()
    cos, sin = Rotary(6).tables(torch.arange(37), q.dtype)
    options = {"phi": "elu+1", "denominator": "unrotated"}
    whole = fla(q, k, v, cos=cos, sin=sin, g=g, **options)
    S = z = None
    outs = []
    for part in (slice(0, 1), slice(1, 20), slice(20, 20), slice(20, 37)):
        rows = [x[:, :, part] for x in (q, k, v)]
        turn = {"cos": cos[part], "sin": sin[part]}
        out, S, z = fla(*rows, g=g[:, :, part], S0=S, z0=z, **turn, **options)
        outs.append(out)
    parts = (torch.cat(outs, 2), S, z)
    assert max(map(judge.error, parts, whole)) <= 1e-12


def test_without_a_token_the_state_stays_and_gradients_are_zero(on_cpu):
    leaves = [x.requires_grad_() for x in drawn(time=0)]
    q, k, v, g, S0, z0 = leaves
    out, S, z = fla(q, k, v, g=g, S0=S0, z0=z0, phi="elu+1", denominator="unrotated")
    assert out.shape == (2, 4, 0, 5) and torch.equal(S, S0) and torch.equal(z, z0)
    grads = torch.autograd.grad((out.sum() + S.sum() + z.sum()), [q, k, v, S0, z0])
    assert [float(x.sum()) for x in grads] == [0, 0, 0, S0.numel(), z0.numel()]
    out, S, z = fla(q, k, v)
    assert S.shape == (2, 2, 6, 5) and z.shape == (2, 2, 6) and not S.any() and not z.any()


@pytest.mark.parametrize("width, values", [(5, 7), (5, 4), (4, 7)])
def test_odd_widths_in_sixteen_bits(on_cpu, width, values):
    inputs = drawn(width=width, values=values, dtype=torch.bfloat16)
    for rotary in (None, Rotary(4)) if width == 4 else (None,):
        got, want = both(inputs, phi="elu+1", denominator="unrotated", rotary=rotary)
        assert max(map(judge.error, got, want)) <= TOLERANCE[torch.bfloat16]


def test_heads_of_a_projection_reach_the_kernels_without_a_copy(monkeypatch):
    seen = []

    def watching(q, k, v, **options):
        seen.extend((q, k, v))
        return stand_in(q, k, v, **options)

    monkeypatch.setattr(FLA, "_kernel", lambda q: watching)
    q, k, v, _, _, _ = drawn(keys=4)
    cos, sin = Rotary(6).tables(torch.arange(37), q.dtype)
    out, _, _ = fla(q, k, v, cos=cos, sin=sin, phi="elu+1", denominator="unrotated")
    assert len(seen) == 6 and all(x.is_contiguous() for x in seen[:5])
    assert seen[2].data_ptr() == v.data_ptr()
    assert out.transpose(1, 2).is_contiguous()


def test_a_second_derivative_is_refused(on_cpu):
    for options in ({}, {"phi": "elu+1", "denominator": "unrotated"}):
        q, k, v, g, S0, z0 = leaves = [x.requires_grad_() for x in drawn()]
        out = fla(q, k, v, g=g, S0=S0, z0=z0, **options)[0]
        used = leaves if options else leaves[:5]
        for d in torch.autograd.grad(out.square().sum(), used, create_graph=True):
            with pytest.raises(RuntimeError, match="differentiable once"):
                torch.autograd.grad(d.sum(), q, retain_graph=True)


# ---- What is refused, and what is relied on -----------------------------------------------------


def test_a_cpu_tensor_and_float64_are_refused_in_a_sentence():
    q, k, v, *_ = drawn(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"backend='fla' runs on CUDA GPUs and q is on cpu: move"):
        fla(q, k, v)
    with pytest.raises(ValueError, match="no float64 kernels"):
        FLA._kernel(Elsewhere(torch.float64))


class Elsewhere:
    """As much of a CUDA tensor as is looked at."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device("cuda"), dtype


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "fla"] + ["fla"]:
        monkeypatch.setitem(sys.modules, name, None)
    FLA._chunk_simple_gla.cache_clear()
    with pytest.raises(ValueError, match=r"needs flash-linear-attention .*pip install fla-core"):
        FLA._kernel(Elsewhere(torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "pip install fla-core" in FLA.why_not()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA GPU" in FLA.why_not()


@needs_fla
def test_the_package_has_the_function_and_its_slow_one_means_the_same():
    from fla.ops.simple_gla import chunk_simple_gla
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    used = inspect.signature(stand_in).parameters
    assert set(used) <= set(inspect.signature(chunk_simple_gla).parameters)
    q, k, v, g, S0, _ = drawn(keys=4, dtype=torch.float32)
    rows = [x.transpose(1, 2) for x in (q, k, v, g)]
    options = {"scale": 1.0, "initial_state": S0, "output_final_state": True}
    for got, want in zip(
        stand_in(*rows, **options), naive_recurrent_simple_gla(*rows, **options), strict=True
    ):
        assert judge.error(got, want) <= 1e-5
