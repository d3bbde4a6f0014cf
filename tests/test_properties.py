"""The invariants as properties over shapes, dtypes, maps and options, searched by hypothesis."""

from __future__ import annotations

import functools
from itertools import pairwise

import judge
import pytest
import torch
from forms import BACKENDS
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from linear_rope import FEATURE_MAPS, Expand, Rotary, causal_product, linear_attention
from linear_rope.feature_maps import RandomFeatures, make_feature_map
from linear_rope.functional import DENOMINATORS, ROTATE
from linear_rope.rotary import PAIRINGS

SEEDS = st.integers(0, 2**31)
DTYPES = st.sampled_from([torch.float64, torch.float32])
EXACT = {torch.float64: 1e-11, torch.float32: 2e-5}
# The same examples in every run: what a run finds is found again.
shared = settings(deadline=None, max_examples=25, derandomize=True)
few = settings(shared, max_examples=10)  # for each map and form


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
def rotations(draw, phi, rotate):
    """A rotation that goes with the map."""
    pairing = draw(st.sampled_from(PAIRINGS))
    if isinstance(phi, Expand) and rotate == "after":
        pairing = "interleaved"
    width = phi.feature_dim if rotate == "after" else phi.head_dim
    fraction = draw(st.sampled_from([1.0, 0.6]))
    return Rotary(width, fraction=fraction if width * fraction >= 2 else 1.0, pairing=pairing)


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
    rotary = draw(rotations(phi, rotate))
    q, k = 0.7 * torch.randn(2, batch, heads, length, width, dtype=torch.float64)
    v = torch.randn(batch, heads, length, value, dtype=torch.float64)
    same = {"rotate": rotate, "denominator": denominator}
    if draw(st.booleans()):
        same["key_mask"] = torch.rand(batch, length) < draw(st.sampled_from([0.0, 0.5, 0.9]))
    if draw(st.booleans()):
        same["log_decay"] = -torch.rand(batch, heads, length, dtype=torch.float64)
    ours = {"feature_map": phi, "rotary": rotary, "chunk_size": chunk, **same}
    theirs = {
        "feature_map": name,
        "projection": getattr(phi, "projection", None),
        "fraction": rotary.fraction,
        "pairing": rotary.pairing,
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


# ---- Rows of several documents, with padding, from any position on -------------------------------

FORMS = [*BACKENDS, "non-causal"]


@st.composite
def batches(draw, name, causal, longest=24):
    """Tensors in float64, options for linear_attention but for what describes the rows.

    Also the rows themselves: limits of each row's documents (some empty), True at real tokens.
    """
    torch.manual_seed(draw(SEEDS))
    batch, key_heads, groups = (draw(st.integers(1, n)) for n in (3, 2, 2))
    length, width, value = draw(st.integers(0, longest)), 2 * draw(st.integers(1, 3)), 3
    random = issubclass(FEATURE_MAPS[name], RandomFeatures)
    phi = make_feature_map(name, width, **({"features": 8, "seed": 0} if random else {})).double()
    rotate = draw(st.sampled_from(ROTATE))

    def normal(heads, *sizes):
        return torch.randn(batch, heads, length, *sizes, dtype=torch.float64)

    tensors = [0.7 * normal(key_heads * groups, width), 0.7 * normal(key_heads, width)]
    tensors.append(normal(key_heads, value))
    if causal and draw(st.booleans()):
        tensors.append(-normal(key_heads).square())
    options = {
        "feature_map": phi,
        "rotary": draw(rotations(phi, rotate)),
        "rotate": rotate,
        "denominator": draw(st.sampled_from(["unrotated", "none"])),
        "chunk_size": draw(st.sampled_from([1, 3, 16, None])),
    }
    cuts = st.lists(st.integers(0, length), max_size=5).map(sorted)
    one = draw(cuts)
    limits = [[0, *one, length]] + [[0, *draw(cuts), length] for _ in range(batch - 1)]
    real = torch.ones(batch, length, dtype=torch.bool)
    for row in range(batch):
        side = draw(st.sampled_from(["none", "left", "right", "middle", "anywhere"]))
        start, end = sorted(draw(st.tuples(*2 * [st.integers(0, length)])))
        begin, stop = {"left": (0, end), "right": (start, length), "middle": (start, end)}.get(
            side, (0, 0)
        )
        real[row, begin:stop] = False
        if side == "anywhere":
            real[row] = torch.rand(length) < 0.6
    return tensors, options, limits, real


def document_ids(borders):
    return torch.arange(len(borders) - 1).repeat_interleave(torch.tensor(borders).diff())


def one_by_one(name, tensors, options, limits, real, offsets, causal):
    """The judge on the real tokens of each document alone, put where they are in the rows."""
    q, *shared_by_groups = tensors
    groups = q.shape[1] // shared_by_groups[0].shape[1]
    k, v, *g = (x.repeat_interleave(groups, 1) for x in shared_by_groups)
    phi, rotary = options["feature_map"], options["rotary"]
    out = q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * q.sum()  # in the graph, also if empty
    for row, borders in enumerate(limits):
        first = True
        for start, end in pairwise(borders):
            at = start + real[row, start:end].nonzero()[:, 0]
            origin = offsets[row] if first else 0  # a row's first document goes on from there
            first = first and start == end
            if not len(at):
                continue
            part = judge.attention(
                *(x[row : row + 1, :, at] for x in (q, k, v)),
                feature_map=name,
                projection=getattr(phi, "projection", None),
                rotate=options["rotate"],
                denominator=options["denominator"],
                causal=causal,
                log_decay=g[0][row : row + 1, :, at] if g else None,
                positions=origin + torch.arange(len(at)),
                fraction=rotary.fraction,
                pairing=rotary.pairing,
            )
            heads = torch.arange(q.shape[1])[:, None]
            out = out.index_put((torch.tensor(row), heads, at), part[0])
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FEATURE_MAPS)
@few
@given(data=st.data())
def test_rows_are_what_the_judge_says_of_each_document_alone(name, form, data):
    causal = form != "non-causal"
    tensors, options, limits, real = data.draw(batches(name, causal))
    batch, length = real.shape
    layout = data.draw(st.sampled_from(["one document", "segment_ids", "cu_seqlens"]))
    given_rows: dict = {"key_mask": real, "causal": causal}
    if layout == "one document":
        limits = [[0, length]] * batch
    elif layout == "segment_ids":
        ids = [
            torch.arange(len(row) - 1).repeat_interleave(torch.tensor(row).diff()) for row in limits
        ]
        given_rows["segment_ids"] = torch.stack(ids)
    else:  # a flat row: documents are real or not as a whole
        batch, limits = 1, limits[:1]
        tensors, real = [x[:1] for x in tensors], real[:1].clone()
        for start, end in pairwise(limits[0]):
            real[:, start:end] = real[:, start:end].any()
        given_rows |= {"key_mask": real, "cu_seqlens": torch.tensor(limits[0])}
    offsets = data.draw(st.lists(st.integers(0, 10**6), min_size=batch, max_size=batch))
    given_rows["positions"] = torch.tensor(offsets)[:, None]
    if causal:
        given_rows["backend"] = form
    leaves = [x.requires_grad_() for x in tensors]
    want = one_by_one(name, leaves, options, limits, real, offsets, causal)
    q, k, v, *g = leaves
    got = linear_attention(q, k, v, log_decay=g[0] if g else None, **options, **given_rows)
    seen = real[:, None, :, None]
    assert judge.error(got * seen, want) <= 1e-9
    pull = torch.randn_like(want) * seen
    for one, other in zip(
        torch.autograd.grad(got, leaves, pull, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(want, leaves, pull, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        assert judge.error(one, other) <= 1e-7
    q, k, v, *g = (x.detach().float() for x in leaves)
    options["feature_map"].float()
    low = linear_attention(q, k, v, log_decay=g[0] if g else None, **options, **given_rows)
    assert low.dtype == torch.float32 and judge.error(low * seen, want) <= 3e-4


@pytest.mark.parametrize("form", BACKENDS)
@pytest.mark.parametrize("name", FEATURE_MAPS)
@few
@given(data=st.data())
def test_any_split_of_such_rows_is_what_the_judge_says(name, form, data):
    tensors, options, limits, real = data.draw(batches(name, True))
    batch, length = real.shape
    borders = limits[0] if data.draw(st.booleans()) else [0, length]
    ids = document_ids(borders)
    offsets = batch * [0]
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=5)))
    if data.draw(st.booleans()):  # a first position belongs to a first token
        offsets = data.draw(st.lists(st.integers(0, 10**6), min_size=batch, max_size=batch))
        real[:, :1] = True
        cuts = [cut for cut in cuts if cut]
    want = one_by_one(name, tensors, options, [borders] * batch, real, offsets, True)
    seen = real[:, None, :, None]
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 3e-4)):
        options["feature_map"].to(dtype)
        state, parts = None, []
        for start, end in pairwise([0, *cuts, length]):
            if start in borders[1:-1] and start < length:
                state = None  # what comes is a new document
            q, k, v, *g = (x[:, :, start:end].to(dtype) for x in tensors)
            out, state = linear_attention(
                q,
                k,
                v,
                log_decay=g[0] if g else None,
                key_mask=real[:, start:end],
                segment_ids=ids[start:end],
                positions=torch.tensor(offsets)[:, None] if start == 0 and any(offsets) else None,
                state=state,
                return_state=True,
                backend=form,
                **options,
            )
            parts.append(out)
        assert judge.error(torch.cat(parts, 2) * seen, want) <= tolerance


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
