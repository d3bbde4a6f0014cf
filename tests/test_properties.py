"""The invariants as properties over shapes, dtypes, maps and options, searched by hypothesis."""

from __future__ import annotations

import functools

import judge
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from linear_rope import BACKENDS, FEATURE_MAPS, Rotary, causal_product, linear_attention
from linear_rope.feature_maps import RandomFeatures, make_feature_map
from linear_rope.functional import DENOMINATORS, ROTATE
from linear_rope.rotary import PAIRINGS

SEEDS = st.integers(0, 2**31)
DTYPES = st.sampled_from([torch.float64, torch.float32])
EXACT = {torch.float64: 1e-11, torch.float32: 2e-5}
shared = settings(deadline=None, max_examples=25)


@st.composite
def sizes(draw, longest: int = 90):
    """batch, heads, time, features, value width, chunk."""
    small = st.integers(1, 3)
    return (
        draw(small),
        draw(small),
        draw(st.integers(0, longest)),
        2 * draw(st.integers(1, 5)),
        draw(st.integers(1, 9)),
        draw(st.sampled_from([1, 2, 5, 16, 64, 1000])),
    )


@st.composite
def problems(draw, longest: int = 60):
    """q, k, v in float64, options for linear_attention, options for the judge."""
    batch, heads, length, width, value, chunk = draw(sizes(longest))
    torch.manual_seed(draw(SEEDS))
    name, rotate = draw(st.sampled_from(list(FEATURE_MAPS))), draw(st.sampled_from(ROTATE))
    random = issubclass(FEATURE_MAPS[name], RandomFeatures)
    phi = make_feature_map(name, width, **({"features": 8, "seed": 0} if random else {}))
    # A rotated denominator can be anything, also 0: there are no two ways to be close to it.
    denominator = draw(st.sampled_from([d for d in DENOMINATORS if d != "rotated"]))
    pairing = draw(st.sampled_from(PAIRINGS))
    fraction = draw(st.sampled_from([1.0, 0.6]))
    rotated = phi.feature_dim if rotate == "after" else width
    if rotated * fraction < 2:
        fraction = 1.0
    q, k = 0.7 * torch.randn(2, batch, heads, length, width, dtype=torch.float64)
    v = torch.randn(batch, heads, length, value, dtype=torch.float64)
    same = {"rotate": rotate, "denominator": denominator}
    if draw(st.booleans()):
        same["key_mask"] = torch.rand(batch, length) < draw(st.sampled_from([0.0, 0.5, 0.9]))
    if draw(st.booleans()):
        same["log_decay"] = -torch.rand(batch, heads, length, dtype=torch.float64)
    rotary = Rotary(rotated, fraction=fraction, pairing=pairing)
    ours = {"feature_map": phi, "rotary": rotary, "chunk_size": chunk, **same}
    theirs = {
        "feature_map": name,
        "projection": getattr(phi, "projection", None),
        "fraction": fraction,
        "pairing": pairing,
        **same,
    }
    return (q, k, v), ours, theirs


@shared
@given(problems(), st.sampled_from(["auto", *BACKENDS]), DTYPES)
def test_attention_is_what_the_judge_says(problem, backend, dtype):
    inputs, ours, theirs = problem
    got = linear_attention(*(x.to(dtype) for x in inputs), backend=backend, **ours)
    assert got.dtype == dtype
    assert judge.error(got, judge.attention(*inputs, **theirs)) <= 10 * EXACT[dtype]


@shared
@given(sizes(), st.sampled_from(list(BACKENDS)), DTYPES, st.booleans(), st.booleans(), SEEDS)
def test_products_and_all_their_gradients_are_what_the_judge_says(
    size, backend, dtype, decays, resumes, seed
):
    batch, heads, length, width, value, chunk = size
    torch.manual_seed(seed)
    draw = functools.partial(torch.randn, batch, heads, dtype=torch.float64)
    leaves = {"q": draw(length, width), "k": draw(length, width), "v": draw(length, value)}
    if decays:
        leaves["log_decay"] = -draw(length).square()
    if resumes:
        leaves["state"] = draw(width, value)
    cotangents = draw(length, value), draw(width, value)

    def gradients(run, dtype, **options):
        x = {n: y.detach().to(dtype).requires_grad_() for n, y in leaves.items()}
        out = run(**x, **options)
        grads = torch.autograd.grad(
            out, list(x.values()), [c.to(dtype) for c in cotangents], materialize_grads=True
        )
        return *out, *grads

    got = gradients(causal_product, dtype, backend=backend, chunk_size=chunk)
    want = gradients(judge.product, torch.float64)
    off = [judge.error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(off) <= EXACT[dtype], off


@shared
@given(problems(), st.data())
def test_the_size_of_a_chunk_does_not_matter(problem, data):
    inputs, ours, _ = problem
    chunk = data.draw(st.integers(1, 100))
    want = linear_attention(*inputs, **ours)
    assert judge.error(linear_attention(*inputs, **{**ours, "chunk_size": chunk}), want) <= 1e-11


@shared
@given(problems(), st.data())
def test_split_and_resume_is_the_same_as_one_pass(problem, data):
    (q, k, v), ours, _ = problem
    length = q.shape[2]
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    whole, end = linear_attention(q, k, v, return_state=True, **ours)
    mask, decay = ours.get("key_mask"), ours.get("log_decay")
    state, parts = None, []
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        at = slice(start, stop)
        piece = {
            **ours,
            "key_mask": None if mask is None else mask[:, at],
            "log_decay": None if decay is None else decay[:, :, at],
        }
        out, state = linear_attention(
            q[:, :, at], k[:, :, at], v[:, :, at], state=state, return_state=True, **piece
        )
        parts.append(out)
    real = 1.0 if mask is None else mask[:, None, :, None]  # a pad's own query has no position
    assert judge.error(torch.cat(parts, 2) * real, whole * real) <= 1e-10
    for got, want in zip(state, end, strict=True):
        lost = want == -torch.inf  # no real key so far
        assert torch.equal(got == -torch.inf, lost)
        assert judge.error(got.masked_fill(lost, 0), want.masked_fill(lost, 0)) <= 1e-10


@shared
@given(problems(), st.data())
def test_what_comes_later_does_not_move_a_bit(problem, data):
    inputs, ours, _ = problem
    length = inputs[0].shape[2]
    cut = data.draw(st.integers(0, length))
    size = data.draw(st.sampled_from([0.0, 3.0, 1e3]))
    want = linear_attention(*inputs, **ours)
    others = [x.clone() for x in inputs]
    for x in others:
        x[:, :, cut:] = size * torch.randn_like(x[:, :, cut:])
    if "log_decay" in ours:
        decay = ours["log_decay"].clone()
        decay[:, :, cut:] *= 7
        ours = {**ours, "log_decay": decay}
    assert torch.equal(linear_attention(*others, **ours)[:, :, :cut], want[:, :, :cut])


@shared
@given(problems(), st.integers(0, 10**6))
def test_only_differences_of_positions_matter(problem, shift):
    inputs, ours, _ = problem
    # A feature map between the rotation and the product spoils it: no such promise for "before".
    assume(ours["rotate"] == "after")
    want = linear_attention(*inputs, **ours)
    assert judge.error(linear_attention(*inputs, positions=shift, **ours), want) <= 1e-8


@shared
@given(
    problems(),
    st.integers(0, 10**6),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_row_zero_is_the_first_value(problem, offset, dtype):
    inputs, ours, _ = problem
    if not inputs[0].shape[2]:
        return
    ours = {**ours, "denominator": "unrotated", "key_mask": None}
    out = linear_attention(*(x.to(dtype) for x in inputs), positions=offset, **ours)
    tolerance = max(1e-4 if dtype != torch.float64 else 1e-12, torch.finfo(dtype).eps)
    assert judge.error(out[:, :, 0], inputs[2][:, :, 0].to(dtype)) <= tolerance


@shared
@given(
    st.integers(1, 20),
    st.sampled_from(PAIRINGS),
    st.floats(0.1, 1.0),
    st.floats(1.5, 1e6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_rotations_are_orthogonal_and_relative(pairs, pairing, fraction, base, m, n):
    width = 2 * pairs
    if int(width * fraction + 1e-9) < 2:
        return
    rotary = Rotary(width, base, fraction, pairing)
    eye = torch.eye(width, dtype=torch.float64)[None, None]

    def matrix(position):
        return rotary(eye, torch.full((width,), position))[0, 0]

    assert judge.error(matrix(m) @ matrix(m).T, eye[0, 0]) <= 1e-13
    assert judge.error(matrix(m) @ matrix(n), matrix(m + n)) <= 1e-8
    low, high = sorted((m, n))
    assert judge.error(matrix(high) @ matrix(low).T, matrix(high - low)) <= 1e-8


@shared
@given(
    st.sampled_from(list(FEATURE_MAPS)),
    st.integers(1, 24),
    st.floats(-30, 30),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    SEEDS,
)
def test_features_are_non_negative_and_as_many_as_declared(name, width, center, dtype, seed):
    torch.manual_seed(seed)
    phi = make_feature_map(name, width)
    x = (center + torch.randn(2, 3, width)).to(dtype)
    y = phi(x)
    assert y.shape == (2, 3, phi.feature_dim) and phi.feature_dim >= 1
    assert (not phi.non_negative or (y >= 0).all()) and y.isfinite().all()
    assert y.dtype == torch.promote_types(dtype, torch.float32)
