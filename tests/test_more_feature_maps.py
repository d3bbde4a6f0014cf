"""Feature maps beyond elu+1, relu and FAVOR+: their formulas, every form, expansion, cosFormer."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from forms import BACKENDS
from torch import Tensor

from linear_rope import (
    FEATURE_MAPS,
    Config,
    FeatureMap,
    LanguageModel,
    Rotary,
    RotaryLinearAttention,
    SoftmaxAttention,
    advance_random_features,
    feature_maps,
    linear_attention,
    make_feature_map,
)
from linear_rope.cosformer import CosFormer
from linear_rope.feature_maps import Expand, Hedgehog
from linear_rope.functional import DENOMINATORS

NAMES = ("exp", "hedgehog", "taylor", "dpfp", "elu+1-expand", "relu-expand")
LOW = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def build(name: str, width: int) -> FeatureMap:
    """The map, with weights that are not the identity any more."""
    phi = make_feature_map(name, width)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in phi.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=draw)
    return phi


def inputs(length: int = 9, width: int = 6, value: int = 5, scale: float = 1.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(length + width)
    sizes = (width, width, value)
    q, k, v = (torch.randn(2, 2, length, n, generator=draw, dtype=torch.float64) for n in sizes)
    return [scale * q, scale * k, v]


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    worst = (got.detach().double() - want.detach()).abs().max() / want.detach().abs().clamp(1).max()
    return float(worst) if worst == worst else math.inf


# ---- The judge: the papers' formulas and quadratic sums in float64 -------------------------------


def features(name: str, x: Tensor, weight: Tensor | None = None) -> Tensor:
    x = x.double()
    d = x.shape[-1]
    columns = list(x.unbind(-1))
    if name == "exp":
        return x.exp()
    if name == "hedgehog":
        y = x @ weight.double().T
        return torch.cat([torch.softmax(y, -1), torch.softmax(-y, -1)], -1)
    if name == "taylor":
        out = [torch.ones_like(columns[0])] + [c / d**0.25 for c in columns]
        out += [c * c / math.sqrt(2 * d) for c in columns]
        met = set()
        for shift in range(1, d):
            for i in range(d):
                pair = frozenset((i, (i + shift) % d))
                if pair not in met:
                    met.add(pair)
                    out.append(columns[i] * columns[(i + shift) % d] / math.sqrt(d))
        return torch.stack(out + [0 * out[0]] * (len(out) % 2), -1)
    if name == "dpfp":
        r = [c.clamp(min=0) for c in [*columns, *(-c for c in columns)]]
        return torch.stack([r[i] * r[(i + 1) % (2 * d)] for i in range(2 * d)], -1) + 1e-3
    plain = x.clamp(min=0) + 1e-3
    if name == "elu+1-expand":
        plain = torch.where(x > 0, x + 1, x.clamp(max=0).exp())
    return torch.stack([e for f in plain.unbind(-1) for e in (f, torch.zeros_like(f))], -1)


def turn(x: Tensor, theta: list[float]) -> Tensor:
    """Pair j of token m turns by m theta_j."""
    m = torch.arange(x.shape[-2], dtype=torch.float64)
    out = []
    for j, angle in enumerate(theta):
        c, s = (m * angle).cos(), (m * angle).sin()
        a, b = x[..., 2 * j], x[..., 2 * j + 1]
        out += [a * c - b * s, a * s + b * c]
    return torch.stack(out, -1)


def judge(q, k, v, name, weight=None, rotate="after", denominator="unrotated", causal=True):
    def turned(x):
        return turn(x, [10000.0 ** (-2 * j / x.shape[-1]) for j in range(x.shape[-1] // 2)])

    if rotate == "before":
        q, k = turned(q), turned(k)
    below_q, below_k = features(name, q, weight), features(name, k, weight)
    above_q, above_k = (
        (turned(below_q), turned(below_k)) if rotate == "after" else (below_q, below_k)
    )
    if denominator == "rotated":
        below_q, below_k = above_q, above_k
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.float64)
    seen = seen.tril() if causal else seen
    out = ((above_q @ above_k.mT) * seen) @ v
    if denominator == "none":
        return out
    return out / ((below_q @ below_k.mT) * seen).sum(-1, keepdim=True)


def rotation(phi: FeatureMap, rotate: str) -> Rotary | None:
    if rotate == "none":
        return None
    return Rotary(phi.feature_dim if rotate == "after" else phi.head_dim)


# ---- The maps -----------------------------------------------------------------------------------


def test_all_new_maps_are_tested_here():
    assert set(FEATURE_MAPS) == {"elu+1", "relu", "favor+", "favor+relu", *NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [1, 2, 7, 16])
def test_formula_width_precision_and_sign(name, width):
    phi = build(name, width)
    x = torch.randn(2, 3, 5, width, generator=torch.Generator().manual_seed(width))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        y = phi(x.to(dtype))
        assert y.shape == (2, 3, 5, phi.feature_dim)
        assert y.dtype == torch.promote_types(dtype, torch.float32)
        want = features(name, x.to(dtype), getattr(phi, "weight", None))
        assert error(y, want) <= (1e-12 if dtype == torch.float64 else 5e-6)
        assert phi.non_negative == (name != "taylor")
        assert not phi.non_negative or (y >= 0).all()
    assert phi(x[:, :, :0]).shape == (2, 3, 0, phi.feature_dim)
    if phi.log_space:
        assert error(phi.log_features(x).exp(), phi(x).double()) <= 1e-6
    else:
        with pytest.raises(TypeError, match="not an exponential"):
            phi.log_features(x)


def test_widths_are_those_of_the_table():
    table = {"exp": 64, "hedgehog": 128, "taylor": 2146, "dpfp": 128}
    table |= {"elu+1-expand": 128, "relu-expand": 128}
    assert {name: make_feature_map(name, 64).feature_dim for name in NAMES} == table
    rows = [row for row in (feature_maps.__doc__ or "").splitlines() if row.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(FEATURE_MAPS)
    for row in rows:
        name, width = row.split("`")[1], int(row.split("|")[4])
        assert make_feature_map(name, 64).feature_dim == width, name
    assert make_feature_map("dpfp", 64, nu=3).feature_dim == 384


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_maps(name):
    phi = build(name, 4).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x.requires_grad_()
    assert torch.autograd.gradcheck(phi, x)
    assert torch.autograd.gradgradcheck(phi, x)


def test_taylor_is_the_second_order_of_exp_and_positive():
    draw = torch.Generator().manual_seed(0)
    for width in (1, 2, 3, 8, 16):
        phi = make_feature_map("taylor", width)
        q, k = 3 * torch.randn(2, 500, width, dtype=torch.float64, generator=draw)
        k[:100] = -q[:100] * math.sqrt(width) / q[:100].square().sum(-1, keepdim=True)  # s = -1
        s = (q * k).sum(-1) / math.sqrt(width)
        kernel = (phi(q) * phi(k)).sum(-1)
        assert error(kernel, 1 + s + s * s / 2) <= 1e-12
        assert float(kernel.min()) >= 0.5 - 1e-9
        assert float(kernel[:100].max()) == pytest.approx(0.5)  # the bound is met
        assert (phi(q) < 0).any()


def test_dpfp_shifts_and_options():
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    r = torch.cat([x.relu(), (-x).relu()], -1)
    phi = make_feature_map("dpfp", 3, nu=5, eps=0.25)
    want = [r[:, i] * r[:, (i + j) % 6] for j in range(1, 6) for i in range(6)]
    assert error(phi(x), torch.stack(want, -1) + 0.25) <= 1e-15
    for nu in (0, 6, -1):
        with pytest.raises(ValueError, match=rf"nu={nu} must be between 1 and 2 D - 1 = 5"):
            make_feature_map("dpfp", 3, nu=nu)
    with pytest.raises(ValueError, match="does not take these options"):
        make_feature_map("taylor", 3, nu=1)


# ---- Every map in every form --------------------------------------------------------------------


@pytest.mark.parametrize("rotate", ["after", "before", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_every_form_against_the_judge_with_gradients(name, rotate):
    phi = build(name, 6).double()
    weight = getattr(phi, "weight", None)
    leaves = [x.requires_grad_() for x in inputs()] + list(phi.parameters())
    denominators = ("unrotated", "none") if rotate != "after" else DENOMINATORS
    for denominator in denominators:
        want = judge(*leaves[:3], name, weight, rotate, denominator)
        if denominator == "rotated":  # near its zeros rounding decides: keep away from them
            base = judge(*leaves[:3], name, weight, rotate, "none") / want
            assert float(base.detach().abs().min()) > 1e-5
        pull = torch.randn(
            want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
        )
        want_grads = torch.autograd.grad(want, leaves, pull)
        for backend in BACKENDS:
            out = linear_attention(
                *leaves[:3], feature_map=phi, rotary=rotation(phi, rotate), rotate=rotate,
                denominator=denominator, backend=backend, chunk_size=4,
            )  # fmt: skip
            assert error(out, want) <= 1e-9, (denominator, backend)
            for got, right in zip(torch.autograd.grad(out, leaves, pull), want_grads, strict=True):
                assert error(got, right) <= 1e-8, (denominator, backend)
    out = linear_attention(
        *leaves[:3], feature_map=phi, rotary=rotation(phi, rotate), rotate=rotate, causal=False
    )
    assert error(out, judge(*leaves[:3], name, weight, rotate, causal=False)) <= 1e-9


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", NAMES)
def test_first_row_is_the_first_value_and_low_precision_is_close(name, dtype):
    phi = build(name, 6)
    q, k, v = (x.to(dtype) for x in inputs(40))
    out = linear_attention(q, k, v, feature_map=phi, rotary=rotation(phi, "after"))
    assert out.dtype == dtype
    assert error(out[:, :, 0], v[:, :, 0].double()) <= LOW[dtype]
    want = judge(q.double(), k.double(), v.double(), name, getattr(phi, "weight", None))
    assert error(out, want) <= LOW[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_splits_equal_the_whole_and_no_token_sees_the_future(name):
    phi = build(name, 6).double()
    q, k, v = inputs(12)
    run = {"feature_map": phi, "rotary": rotation(phi, "after"), "return_state": True}
    whole, end = linear_attention(q, k, v, **run)
    for split in ([5, 7], [1] * 12, [4, 1, 1, 6]):
        state, parts = None, []
        for a, b, c in zip(q.split(split, 2), k.split(split, 2), v.split(split, 2), strict=True):
            out, state = linear_attention(a, b, c, state=state, **run)
            parts.append(out)
        assert error(torch.cat(parts, 2), whole) <= 1e-10
        assert error(state.S, end.S) <= 1e-10 and error(state.z, end.z) <= 1e-10
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 8:] = 50 * k2[:, :, 8:] + 20  # large enough to move any maximum
    v2[:, :, 8:] = -7
    changed, _ = linear_attention(q, k2, v2, **run)
    assert torch.equal(changed[:, :, :8], whole[:, :, :8])
    assert not torch.equal(changed[:, :, 8:], whole[:, :, 8:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", LOW)
def test_large_inputs_stay_finite_in_range_and_differentiable(name, dtype):
    phi = build(name, 6)
    for scale in (1.0, 3.0, 10.0, 30.0):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs(20, scale=scale))
        out = linear_attention(q, k, v, feature_map=phi)
        out.float().sum().backward()
        assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))
        if name != "taylor" or scale < 30:  # where its terms cancel beyond float32
            assert error(out[:, :, 0], v[:, :, 0].double()) <= LOW[dtype]
            assert out.abs().max() <= 1.01 * v.abs().max()


def test_exp_is_exact_far_beyond_the_range_of_exp():
    q, k, v = inputs(20, scale=2.0)
    q, k = q - 300.0, k + torch.linspace(-400, 500, 20, dtype=torch.float64)[:, None]
    log = torch.logsumexp(q.unsqueeze(3) + k.unsqueeze(2), -1)  # of the weights
    want = torch.softmax(log.masked_fill(torch.ones(20, 20).tril() == 0, -math.inf), -1) @ v
    q, k, v = (x.float() for x in (q, k, v))
    for backend in BACKENDS:
        out = linear_attention(q, k, v, feature_map="exp", backend=backend, chunk_size=6)
        assert error(out, want) <= 2e-4, backend  # k + 500 in float32: 3e-5 an exponent


# ---- Hedgehog's weights -------------------------------------------------------------------------


def test_hedgehog_starts_at_the_identity_and_keeps_its_weight():
    phi = make_feature_map("hedgehog", 5)
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(phi.weight, torch.eye(5))
    assert error(phi(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], -1).double()) <= 1e-6
    trained = build("hedgehog", 5)
    for twin in (copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        assert torch.equal(twin(x), trained(x)) and twin.weight is not trained.weight
    phi.load_state_dict(trained.state_dict())
    assert torch.equal(phi(x), trained(x))
    with torch.device("meta"):
        ghost = make_feature_map("hedgehog", 5, heads=3)
    assert ghost.weight.device.type == "meta"
    ghost = ghost.to_empty(device="cpu")
    ghost.reset_parameters()
    assert torch.equal(ghost.weight, torch.eye(5).expand(3, 5, 5))
    with pytest.raises(ValueError, match="holds weights"):
        linear_attention(x, x, x, feature_map="hedgehog")


def test_hedgehog_with_weights_a_head_and_shared_keys():
    phi = make_feature_map("hedgehog", 5, heads=2)
    assert isinstance(phi, Hedgehog)
    with torch.no_grad():
        phi.weight += torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))
    q, k, v = torch.randn(1, 4, 7, 5), torch.randn(1, 2, 7, 5), torch.randn(1, 2, 7, 3)
    out = linear_attention(q, k, v, feature_map=phi, rotary=Rotary(10))
    for head in range(4):
        one = make_feature_map("hedgehog", 5)
        one.load_state_dict({"weight": phi.weight[head // 2]})
        kv = slice(head // 2, head // 2 + 1)
        want = linear_attention(
            q[:, head : head + 1], k[:, kv], v[:, kv], feature_map=one, rotary=Rotary(10)
        )
        assert error(out[:, head : head + 1], want.double()) <= 1e-5
    assert phi(k.squeeze(0)).shape == (2, 7, 10)
    for wrong in (torch.randn(1, 3, 7, 5), torch.randn(7, 5)):
        with pytest.raises(ValueError, match=r"weights for 2 heads and needs \(\.\.\., head"):
            phi(wrong)
    with pytest.raises(ValueError, match="heads=0 must be at least 1"):
        make_feature_map("hedgehog", 5, heads=0)


def test_a_layer_has_a_hedgehog_map_for_every_key_head():
    for options, heads in (({}, 4), ({"kv_heads": 2}, 2), ({"kv_heads": 1}, 1)):
        layer = RotaryLinearAttention(16, 4, feature_map="hedgehog", **options)
        assert layer.feature_map.weight.shape == (heads, 4, 4)
        layer(torch.randn(1, 6, 16)).square().sum().backward()
        grad = layer.feature_map.weight.grad
        assert grad.isfinite().all() and (grad.abs().amax((1, 2)) > 0).all()
    shared = RotaryLinearAttention(16, 4, feature_map=make_feature_map("hedgehog", 4))
    assert shared.feature_map.weight.shape == (4, 4)
    config = Config(vocab_size=11, dim=16, layers=2, heads=4, kv_heads=2, feature_map="hedgehog")
    model, twin = LanguageModel(config), LanguageModel(config)
    name = "blocks.1.attention.feature_map.weight"
    assert model.state_dict()[name].shape == (2, 4, 4)
    with torch.no_grad():
        model.blocks[1].attention.feature_map.weight.add_(torch.randn(2, 4, 4))
    twin.load_state_dict(model.state_dict(), strict=True)
    tokens = torch.randint(11, (2, 9))
    assert torch.equal(twin(tokens), model(tokens))
    model.initialize(3)
    assert torch.equal(model.state_dict()[name], torch.eye(4).expand(2, 4, 4))


# ---- Expansion ----------------------------------------------------------------------------------


def expansions(width: int) -> list[Expand]:
    bases = [make_feature_map(n, width) for n in ("elu+1", "relu", "exp", "hedgehog", "dpfp")]
    bases += [make_feature_map("favor+", width, features=9, seed=0)]
    return [Expand(base) for base in bases]


def test_expanded_weights_are_bounded_by_the_unrotated_ones_and_outputs_by_the_values():
    q, k, v = inputs(60, width=5, scale=1.5)
    each = torch.eye(60, dtype=torch.float64).expand(2, 2, 60, 60)  # values that show the weights
    for phi in expansions(5):
        rotary = Rotary(phi.feature_dim)
        plain = linear_attention(q, k, each, feature_map=phi.base)
        still = linear_attention(q, k, each, feature_map=phi)
        turned = linear_attention(q, k, each, feature_map=phi, rotary=rotary)
        assert error(still, plain) <= 1e-12, phi
        assert (turned.abs() <= plain + 1e-12).all(), phi
        assert (turned.abs().sum(-1) <= 1 + 1e-12).all(), phi
        assert (turned < plain - 1e-3).any(), phi  # and they do turn
        for causal in (True, False):
            out = linear_attention(q, k, v, feature_map=phi, rotary=rotary, causal=causal)
            assert (out.abs() <= v.abs().amax(2, keepdim=True) + 1e-12).all(), phi
        low = linear_attention(
            q.float(), k.float(), v.float(), feature_map=phi, rotary=rotary, positions=10**6
        )
        assert (low.abs() <= v.abs().amax(2, keepdim=True) + 1e-4).all(), phi


def test_without_expansion_the_bound_fails():
    """What expansion is for: so that the test above is known to be able to fail."""
    q, k, _ = inputs(60, width=6, scale=1.5)
    each = torch.eye(60, dtype=torch.float64).expand(2, 2, 60, 60)
    plain = linear_attention(q, k, each, feature_map="relu")
    turned = linear_attention(q, k, each, feature_map="relu", rotary=Rotary(6))
    assert (turned.abs() > plain + 1e-3).any()
    assert float(turned.abs().sum(-1).max()) > 1.01


def test_expansion_refuses_the_pairing_that_breaks_its_bound():
    q, k, _ = inputs(60, width=6, scale=1.5)
    each = torch.eye(60, dtype=torch.float64).expand(2, 2, 60, 60)
    phi = make_feature_map("relu-expand", 6)
    plain = linear_attention(q, k, each, feature_map=phi)
    with pytest.raises(ValueError, match="use pairing='interleaved'"):
        RotaryLinearAttention(12, 2, feature_map="relu-expand", pairing="half")
    with pytest.raises(ValueError, match="use pairing='interleaved'"):
        RotaryLinearAttention(
            12, 2, feature_map="elu+1-expand", pairing="half", rotary_scaling="xpos"
        )
    with pytest.raises(ValueError, match="use pairing='interleaved'"):
        linear_attention(q, k, each, feature_map=phi, rotary=Rotary(12, pairing="half"))
    # The reason: features meet as they do without expansion.
    turned = phi(q), phi(k)
    turned = (Rotary(12, pairing="half")(x, torch.arange(60)) for x in turned)
    weights = torch.matmul(*(x if n == 0 else x.mT for n, x in enumerate(turned))).tril()
    assert (weights.abs() > plain * (phi(q) @ phi(k).mT).tril().sum(-1, keepdim=True) + 1e-3).any()
    # A fraction keeps pairs whole, and before the map heads are not doubled yet.
    for options in ({"rotary_fraction": 0.5}, {"pairing": "half", "rotate": "before"}):
        layer = RotaryLinearAttention(16, 2, feature_map="relu-expand", **options)
        assert layer(torch.randn(1, 5, 16)).isfinite().all()


def test_expand_takes_odd_bases_and_keeps_their_weights():
    with pytest.raises(ValueError, match="has negative features"):
        Expand(make_feature_map("taylor", 4))
    with pytest.raises(ValueError, match="must be a FeatureMap"):
        Expand(torch.exp)
    phi = Expand(make_feature_map("favor+", 4, features=5, redraw_interval=1, seed=0))
    assert (phi.head_dim, phi.feature_dim, phi.log_space) == (4, 10, True)
    assert set(phi.state_dict()) == {"base.projection", "base.steps", "base.seed"}
    x = torch.randn(2, 4)
    assert (phi(x)[:, 1::2] == 0).all() and torch.equal(phi(x)[:, ::2], phi.base(x))
    assert error(phi.log_features(x).exp(), phi(x).double()) <= 1e-6
    before = phi(x)
    advance_random_features(phi)
    assert not torch.equal(phi(x), before)


# ---- cosFormer ----------------------------------------------------------------------------------


def reweighted(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    m = torch.arange(q.shape[2], dtype=torch.float64)
    weight = ((q.relu() + 1e-3) @ (k.relu() + 1e-3).mT) * (
        math.pi / 2 * (m[:, None] - m) / length
    ).cos()
    return weight.tril() / weight.tril().sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("length", [20, 21, 1000])
def test_cosformer_is_its_direct_formula(length):
    leaves = [x.requires_grad_() for x in inputs(20, width=5)]
    rotary = CosFormer(10, length)
    run = {"feature_map": "relu-expand", "rotary": rotary, "denominator": "rotated"}
    want = reweighted(*leaves, length)
    pull = torch.ones_like(want) + want.detach()
    right = torch.autograd.grad(want, leaves, pull)
    for backend in BACKENDS:
        out = linear_attention(*leaves, backend=backend, chunk_size=7, **run)
        assert error(out, want) <= 1e-9, backend
        for got, grad in zip(torch.autograd.grad(out, leaves, pull), right, strict=True):
            assert error(got, grad) <= 1e-8, backend
    q, k, v = (x.detach() for x in leaves)
    each = torch.eye(20, dtype=torch.float64).expand(2, 2, 20, 20)
    weights = linear_attention(q, k, each, **run)
    assert (weights >= -1e-12).all() and error(weights.sum(-1), torch.ones(2, 2, 20)) <= 1e-12
    assert error(out[:, :, 0], v[:, :, 0]) <= 1e-12
    state, parts = None, []
    for split in (slice(0, 7), slice(7, 8), slice(8, 20)):
        part, state = linear_attention(
            q[:, :, split], k[:, :, split], v[:, :, split], state=state, return_state=True, **run
        )
        parts.append(part)
    assert error(torch.cat(parts, 2), want.detach()) <= 1e-10
    for dtype, tolerance in LOW.items():
        low = [x.to(dtype) for x in (q, k, v)]
        exact = reweighted(*(x.double() for x in low), length)
        assert error(linear_attention(*low, **run), exact) <= tolerance


def test_cosformer_turns_all_pairs_alike_by_relative_positions():
    rotary = CosFormer(6, 100)
    cos, sin = rotary.tables(torch.tensor([[0, 25, 50, 99]]))
    assert cos.shape == sin.shape == (1, 4, 3) and cos.dtype == torch.float32
    want = [1, math.cos(math.pi / 8), math.cos(math.pi / 4), math.cos(math.pi / 2 * 0.99)]
    assert error(cos[0, :, 2], torch.tensor(want, dtype=torch.float64)) <= 1e-7
    assert rotary.tables(torch.arange(3), torch.float64)[0].dtype == torch.float64
    q, k, v = inputs(9, width=3)
    run = {"feature_map": "relu-expand", "rotary": rotary, "denominator": "rotated"}
    here = linear_attention(q, k, v, **run)
    rows = torch.stack([torch.arange(9), torch.arange(9) + 91])
    assert error(linear_attention(q, k, v, positions=rows, **run), here) <= 1e-12


def test_cosformer_refuses_what_does_not_fit():
    q, k, v = inputs(9, width=3)
    run = {"feature_map": "relu-expand", "rotary": CosFormer(6, 9), "denominator": "rotated"}
    _, state = linear_attention(q, k, v, return_state=True, **run)
    for more in ({"positions": 1}, {"state": state}):
        with pytest.raises(ValueError, match=r"position \d+ is beyond max_length=9"):
            linear_attention(q, k, v, **more, **run)
    for width in (0, 5):
        with pytest.raises(ValueError, match=f"cosformer width={width} must be an even number"):
            CosFormer(width, 9)
    for length in (0, 2.5):
        with pytest.raises(ValueError, match=f"max_length={length} must be an integer"):
            CosFormer(6, length)
    with pytest.raises(ValueError, match=r"x has width 4 but .* width 6"):
        CosFormer(6, 9)(torch.randn(1, 1, 2, 4), torch.arange(2))
    with pytest.raises(ValueError, match="width 6 but the feature map gives 3"):
        linear_attention(q, k, v, feature_map="relu", rotary=CosFormer(6, 9))


def test_cosformer_in_a_layer_and_what_it_refuses():
    layer = RotaryLinearAttention(
        8, 2, feature_map="relu-expand", rotary_scaling="cosformer:max_length=30",
        denominator="rotated",
    ).double()  # fmt: skip
    assert layer.rotary == CosFormer(8, 30)
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    q, k, v = (
        f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (layer.query, layer.key, layer.value)
    )
    want = layer.out(reweighted(q, k, v, 30).transpose(1, 2).flatten(2))
    assert error(layer(x), want) <= 1e-12
    for options, message in (
        ({"feature_map": "relu"}, r"use feature_map='relu-expand' or .*got Relu and 'after'"),
        ({"feature_map": "relu-expand", "rotate": "before"}, r"rotate='after', got .*'before'"),
        ({"feature_map": "relu-expand", "pairing": "half"}, r"leave rotary_base.*'half'"),
        ({"feature_map": "relu-expand", "rotary_fraction": 0.5}, r"leave rotary_base.*0\.5"),
        ({"feature_map": "relu-expand", "rotary_base": 100.0}, r"leave rotary_base.*100\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            RotaryLinearAttention(8, 2, rotary_scaling="cosformer:max_length=30", **options)
    with pytest.raises(ValueError, match="needs the option max_length"):
        RotaryLinearAttention(8, 2, feature_map="relu-expand", rotary_scaling="cosformer")
    with pytest.raises(ValueError, match="'cosformer' needs linear attention"):
        SoftmaxAttention(8, 2, rotary_scaling="cosformer:max_length=30")


# ---- torch's features, layers and models --------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_maps_compile_without_a_break_and_copy(name):
    phi = build(name, 4)
    torch._dynamo.reset()
    x = torch.randn(2, 2, 6, 4, requires_grad=True)
    compiled = torch.compile(phi, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (want,) = torch.autograd.grad(phi(x).square().sum(), x)
    assert error(compiled(x), phi(x).double()) <= 1e-5 and error(got, want.double()) <= 1e-4
    for twin in (copy.deepcopy(phi), pickle.loads(pickle.dumps(phi))):
        assert torch.equal(twin(x), phi(x))
    fresh = make_feature_map(name, 4)
    fresh.load_state_dict(phi.state_dict())
    assert torch.equal(fresh(x), phi(x))
    assert torch.equal(torch.func.vmap(phi, in_dims=1, out_dims=1)(x), phi(x))


@pytest.mark.parametrize("name", NAMES)
def test_models_learn_and_decode_with_every_map(name):
    torch.manual_seed(0)
    model = LanguageModel(Config(vocab_size=11, dim=8, layers=2, heads=2, feature_map=name))
    tokens = torch.randint(11, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        got = model.generate(tokens[:, :3], 5, temperature=0.0)
        want = tokens[:, :3]
        for _ in range(5):
            want = torch.cat([want, model(want)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(got, want)
