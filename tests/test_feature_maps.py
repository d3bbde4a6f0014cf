"""The feature maps: formulas, tails, random features and their schedule, and FAVOR+'s peer."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings

import judge
import pytest
import torch
import torch.nn.functional as F

from linear_rope import FEATURE_MAPS, FeatureMap, advance_random_features, make_feature_map
from linear_rope.feature_maps import RandomFeatures, orthogonal_gaussian
from linear_rope.functional import linear_attention

NAMES = list(FEATURE_MAPS)
RANDOM = [name for name in NAMES if issubclass(FEATURE_MAPS[name], RandomFeatures)]


def projection_of(phi: FeatureMap) -> torch.Tensor | None:
    return getattr(phi, "projection", None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [1, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_maps_are_the_formulas_of_the_papers(name, head_dim, dtype):
    phi = make_feature_map(name, head_dim)
    x = torch.randn(2, 3, 5, head_dim).to(dtype)
    y = phi(x)
    assert y.shape == (2, 3, 5, phi.feature_dim)
    assert y.dtype == torch.promote_types(dtype, torch.float32)
    assert not phi.non_negative or (y >= 0).all()
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    assert judge.error(y, judge.phi(name, x, projection_of(phi))) <= tolerance
    assert phi(x[:, :, :0]).shape == (2, 3, 0, phi.feature_dim)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_denominators_stay_alive_far_out_and_gradients_finite(name, dtype):
    phi = make_feature_map(name, 8)
    for value in (-1e4, -100.0, -20.0, -7.0, 0.0, 20.0):
        x = torch.full((1, 1, 4, 8), value, dtype=dtype, requires_grad=True)
        if not phi.log_space:  # exponentials get their maximum subtracted by linear_attention
            assert (phi(x).square().sum(-1) > 0).all()
        v = torch.tensor([1.0, 2, 3, 4], dtype=dtype).reshape(1, 1, 4, 1)
        out = linear_attention(x, x, v, feature_map=phi)
        out.float().sum().backward()
        assert out.isfinite().all() and x.grad.isfinite().all()
        # all keys are alike, so that the output is the running mean
        want = torch.tensor([1, 1.5, 2, 2.5], dtype=torch.float64)
        assert judge.error(out[0, 0, :, 0], want) <= (1e-5 if dtype != torch.bfloat16 else 8e-3)


def test_the_tail_of_elu_is_smooth_where_the_textbook_form_is_zero():
    phi = make_feature_map("elu+1", 1)
    x = torch.tensor([[-7.0], [-10.0], [-17.0], [-29.0]])
    assert judge.error(phi(x).log(), x) <= 1e-6
    assert (F.elu(x) + 1).eq(0).any()  # what this guards against
    assert (phi(torch.tensor([[-1e30]])) > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_maps(name):
    phi = make_feature_map(name, 4, **({"features": 6} if name in RANDOM else {})).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(phi, x)


# ---- Random features ----------------------------------------------------------------------------


def test_blocks_of_the_projection_are_orthogonal_and_rows_gaussian():
    W = orthogonal_gaussian(2048 + 3, 8, torch.Generator().manual_seed(0)).double()
    assert W.shape == (2051, 8)
    for start in (0, 8, 2040):
        block = F.normalize(W[start : start + 8], dim=-1)
        assert judge.error(block @ block.T, torch.eye(8)) <= 1e-6
    # rows are N(0, I): mean, covariance, and the squared length's mean D and variance 2 D
    assert W.mean(0).abs().max() < 0.1
    assert judge.error(W.T @ W / len(W), torch.eye(8)) < 0.1
    length = W.square().sum(-1)
    assert float(length.mean()) == pytest.approx(8, abs=0.4)
    assert float(length.var()) == pytest.approx(16, rel=0.25)
    again = orthogonal_gaussian(2048 + 3, 8, torch.Generator().manual_seed(0)).double()
    assert torch.equal(W, again)


@pytest.mark.parametrize("name", RANDOM)
def test_default_number_of_features_is_even_and_that_of_the_paper(name):
    for head_dim, want in zip(
        (1, 2, 16, 32, 48, 64, 96, 128, 256), (2, 2, 44, 110, 186, 266, 438, 622, 1420), strict=True
    ):
        phi = make_feature_map(name, head_dim)
        assert phi.feature_dim == want == phi(torch.ones(1, head_dim)).shape[-1]


@pytest.mark.parametrize("name", RANDOM)
def test_forward_never_draws_counts_or_touches_the_global_generator(name):
    phi = make_feature_map(name, 4, redraw_interval=1000)
    x = torch.randn(1, 1, 3, 4)
    before, generator = copy.deepcopy(phi.state_dict()), torch.get_rng_state()
    for training in (False, True):
        phi.train(training)
        first = linear_attention(x, x, x, feature_map=phi)
        for _ in range(2000 if not training else 10):
            y = phi(x)
        assert torch.equal(y, phi(x))
        assert torch.equal(linear_attention(x, x, x, feature_map=phi), first)
    assert torch.equal(torch.get_rng_state(), generator)
    after = phi.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("name", RANDOM)
def test_redraws_come_at_the_documented_steps_only(name):
    phi = make_feature_map(name, 4, features=6, redraw_interval=3, seed=5)
    never = make_feature_map(name, 4, features=6, seed=5)
    assert torch.equal(phi.projection, never.projection)  # the seed decides
    generator = torch.get_rng_state()
    model, changed = torch.nn.ModuleList([phi, never]), []
    start = never.projection.clone()
    for step in range(1, 8):
        old = phi.projection.clone()
        advance_random_features(model)
        if not torch.equal(old, phi.projection):
            changed.append(step)
    assert changed == [3, 6]
    assert torch.equal(never.projection, start)
    assert int(phi.steps) == int(never.steps) == 7
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("name", RANDOM)
def test_draws_depend_on_seed_and_count_alone_so_resume_and_replicas_agree(name):
    options = {"features": 6, "redraw_interval": 2}
    torch.manual_seed(1)
    one = make_feature_map(name, 4, **options)
    torch.manual_seed(2)
    two = make_feature_map(name, 4, **options)
    assert not torch.equal(one.projection, two.projection)
    one.advance()
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.projection, two.projection) and int(two.steps) == 1
    for _ in range(5):
        one.advance()
        torch.randn(3)  # somebody else draws in between
        two.advance()
        assert torch.equal(one.projection, two.projection)
    seeds = [make_feature_map(name, 4, features=6, seed=s).projection for s in (0, 1)]
    assert not torch.equal(*seeds)
    one.reset(0)
    assert torch.equal(one.projection, seeds[0]) and int(one.steps) == 0
    one.advance(), one.advance()
    assert not torch.equal(one.projection, seeds[1])  # draw 1 of seed 0 is not draw 0 of seed 1


@pytest.mark.parametrize("name", RANDOM)
def test_random_maps_change_dtype_and_start_on_the_meta_device(name):
    phi = make_feature_map(name, 8, seed=3)
    x = torch.randn(2, 8, dtype=torch.float64)
    assert copy.deepcopy(phi).to(torch.float64)(x).dtype == torch.float64
    assert phi(x).dtype == torch.float64
    with torch.device("meta"):
        ghost = make_feature_map(name, 8, seed=9)
    assert ghost.projection.device.type == "meta"
    ghost.to_empty(device="cpu").load_state_dict(phi.state_dict())
    assert torch.equal(ghost(x), phi(x))


def softmax_error(width: int, size: float, features: int, seed: int) -> float:
    torch.manual_seed(seed)
    q, k = size * torch.randn(2, 1, 1, 24, width, dtype=torch.float64)
    v = torch.randn(1, 1, 24, width, dtype=torch.float64)
    phi = make_feature_map("favor+", width, features=features, seed=seed)
    got = linear_attention(q, k, v, feature_map=phi, causal=False)
    want = F.scaled_dot_product_attention(q, k, v)
    return float((got - want).abs().sum() / want.abs().sum())


def test_favor_approximates_softmax_attention():
    errors = [softmax_error(32, 0.5, 2048, seed) for seed in range(16)]
    assert sum(errors) / 16 <= 0.12


def test_favor_comes_closer_with_more_features():
    table = {32: 0.15, 64: 0.09, 256: 0.06, 512: 0.045, 2048: 0.017}
    for features, about in table.items():
        mean = sum(softmax_error(64, 0.25, features, seed) for seed in range(8)) / 8
        assert about / 2 <= mean <= 1.6 * about, (features, mean)


# ---- The peer -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def performer():
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("performer_pytorch.performer_pytorch")


@pytest.mark.parametrize("head_dim, features", [(8, 12), (16, 45), (4, 3)])
def test_favor_features_are_those_of_performer(performer, head_dim, features):
    """Performer scales by exp(-max): for a query each, over all keys. Undone, both must agree."""
    phi = make_feature_map("favor+", head_dim, features=features).double()
    W = performer.gaussian_orthogonal_random_matrix(features, head_dim)
    phi.projection.copy_(W)
    x = torch.randn(2, 3, 7, head_dim, dtype=torch.float64)
    along = (x / head_dim**0.25) @ phi.projection.T
    for is_query, peak in (
        (True, along.amax(-1, keepdim=True)),
        (False, along.amax((-1, -2))[..., None, None]),
    ):
        theirs = performer.softmax_kernel(
            x, projection_matrix=phi.projection, is_query=is_query, eps=0.0
        )
        assert judge.error(phi(x), theirs * peak.exp()) <= 1e-12
    # their eps, 1e-4 / sqrt(M) on every feature, is not in ours
    with_eps = performer.softmax_kernel(x, projection_matrix=phi.projection, is_query=False)
    assert judge.error(with_eps - theirs, torch.full_like(theirs, 1e-4 / features**0.5)) <= 1e-12


@pytest.mark.parametrize("head_dim, features", [(8, 12), (16, 45), (4, 3)])
def test_generalized_features_are_those_of_performer(performer, head_dim, features):
    phi = make_feature_map("favor+relu", head_dim, features=features).double()
    x = torch.randn(2, 3, 7, head_dim, dtype=torch.float64)
    theirs = performer.generalized_kernel(x, projection_matrix=phi.projection)
    assert judge.error(phi(x), theirs) <= 1e-12
    plain = make_feature_map("relu", head_dim)(x)
    theirs = performer.generalized_kernel(x, projection_matrix=None, normalize_data=False)
    assert judge.error(plain, theirs) <= 1e-12


def test_attention_is_that_of_performer(performer):
    phi = make_feature_map("favor+", 8, features=32).double()
    q, k, v = 0.5 * torch.randn(3, 2, 2, 9, 8, dtype=torch.float64)
    options = {"projection_matrix": phi.projection, "eps": 0.0}
    fq = performer.softmax_kernel(q, is_query=True, **options)
    fk = performer.softmax_kernel(k, is_query=False, **options)
    got = linear_attention(q, k, v, feature_map=phi, causal=False)
    assert judge.error(got, performer.linear_attention(fq, fk, v)) <= 1e-12
    got = linear_attention(q, k, v, feature_map=phi)
    want = performer.causal_linear_attention_noncuda(fq, fk, v, eps=0.0, chunk_size=2)
    assert judge.error(got, want) <= 1e-12


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, words",
    [
        (
            lambda: make_feature_map("gelu", 8),
            ["feature_map='gelu'", "choose one of", *FEATURE_MAPS],
        ),
        (lambda: make_feature_map("elu+1", 8, features=16), ["'elu+1'", "features"]),
        (lambda: make_feature_map("favor+", 8, nb_features=16), ["'favor+'", "nb_features"]),
        (lambda: make_feature_map("elu+1", 0), ["head_dim=0", "at least 1"]),
        (lambda: make_feature_map("favor+", 8, features=0), ["features=0", "at least 1"]),
        (lambda: make_feature_map("favor+", 0), ["head_dim=0", "at least 1"]),
        (
            lambda: make_feature_map("favor+", 8, redraw_interval=0),
            ["redraw_interval=0", "at least 1", "or None"],
        ),
    ],
)
def test_bad_maps_are_refused(build, words):
    with pytest.raises(ValueError) as refusal:
        build()
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_only_exponential_maps_have_log_features():
    with pytest.raises(TypeError, match="EluPlusOne"):
        make_feature_map("elu+1", 8).log_features(torch.ones(8))
    assert math.isclose(
        float(make_feature_map("favor+", 4, features=2, seed=0).log_features(torch.zeros(4))[0]),
        -0.5 * math.log(2),
        rel_tol=1e-6,
    )
