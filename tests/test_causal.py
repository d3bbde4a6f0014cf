"""The causal product: every backend against the judge, outputs and all gradients."""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import judge
import pytest
import torch
from forms import BACKENDS
from torch import Tensor

from linear_rope import Rotary, causal_product, linear_attention
from linear_rope import causal as module
from linear_rope.causal import FUSED, blocks

FORMS = ["auto", *BACKENDS]
FORMS_AND_CHUNKS = [(f, None) for f in FORMS] + [("chunked", c) for c in (1, 7, 64, 5000)]
LENGTHS = [1, 63, 64, 65, 127, 129, 300, 513, 913]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}


class Case(NamedTuple):
    inputs: tuple[Tensor, ...]  # q, k, v, log_decay, state; float64
    cotangents: tuple[Tensor, Tensor]
    out: Tensor
    final: Tensor
    grads: tuple[Tensor, ...]


def gradients(run, inputs, cotangents) -> tuple[Tensor, ...]:
    """Output, final state, and the gradients of all inputs for the given cotangents."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = run(*leaves)
    pulled = [c.to(r.dtype) for c, r in zip(cotangents, results, strict=True)]
    grads = torch.autograd.grad(results, leaves, pulled, materialize_grads=True)
    return (*(r.detach() for r in results), *grads)


def random_inputs(length, batch=2, heads=2, features=16, width=24, decay="mild", seed=0):
    draw = functools.partial(
        torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    q, k = draw(batch, heads, length, features), draw(batch, heads, length, features)
    v, state = draw(batch, heads, length, width), draw(batch, heads, features, width)
    g = -0.3 * draw(batch, heads, length).square()
    if decay == "strong":
        t = torch.arange(length)
        g = torch.full_like(g, -0.01).masked_fill(t % 5 == 3, -50.0).masked_fill(t % 11 == 7, -1e30)
    inputs = (q / features**0.5, k, v, g, state)
    return inputs, (draw(*v.shape), draw(*state.shape))


@functools.cache
def judged(length: int, **options) -> Case:
    inputs, cotangents = random_inputs(length, **options)
    out, final, *grads = gradients(judge.product, inputs, cotangents)
    return Case(inputs, cotangents, out, final, tuple(grads))


def poison(length: int) -> None:
    """Fill memory with NaN and free it, so that what is never written is likely to be NaN."""
    junk = [torch.full((2, 2, length, n), torch.nan, dtype=torch.float64) for n in (8, 16, 24) * 3]
    del junk


def agrees(case: Case, got, tolerance: float) -> None:
    want = (case.out, case.final, *case.grads)
    names = ("out", "final", "dq", "dk", "dv", "dlog_decay", "dstate")
    off = {n: judge.error(a, b) for n, a, b in zip(names, got, want, strict=True)}
    assert max(off.values()) <= tolerance, off


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_form_agrees_with_the_judge(length, dtype):
    case = judged(length)
    inputs = [x.to(dtype) for x in case.inputs]
    for form, chunk in FORMS_AND_CHUNKS:
        poison(length)

        def run(q, k, v, g, state, form=form, chunk=chunk):
            return causal_product(q, k, v, log_decay=g, state=state, backend=form, chunk_size=chunk)

        results = gradients(run, inputs, case.cotangents)
        assert all(r.dtype == dtype for r in results)
        agrees(case, results, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form, chunk", FORMS_AND_CHUNKS)
def test_without_decay_and_without_state(form, chunk, dtype):
    for length, features, width in ((1, 1, 1), (65, 5, 3), (130, 2, 40)):
        inputs, cotangents = random_inputs(length, features=features, width=width)
        want = gradients(judge.product, inputs[:3], cotangents)
        options = {"backend": form, "chunk_size": chunk}
        poison(length)
        got = gradients(
            lambda *x, o=options: causal_product(*x, **o),
            [x.to(dtype) for x in inputs[:3]],
            cotangents,
        )
        assert max(map(judge.error, got, want)) <= TOLERANCE[dtype]
        # one of the two alone
        q, k, v, g, state = (x.to(dtype) for x in inputs)
        for some in ({"log_decay": g}, {"state": state}):
            got = causal_product(q, k, v, **some, **options)
            want_some = judge.product(*inputs[:3], **{n: x.double() for n, x in some.items()})
            assert max(map(judge.error, got, want_some)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 5e-6)])
@pytest.mark.parametrize("form, chunk", FORMS_AND_CHUNKS)
def test_strong_decays_forget_exactly_and_do_not_spoil_mild_ones(form, chunk, dtype, tolerance):
    """-50 and -1e30 among -0.01: sums of decays grow, what counts are their differences."""
    case = judged(300, decay="strong")
    for forget in (-1e30, -torch.inf):
        q, k, v, g, state = (x.to(dtype) for x in case.inputs)
        g = g.masked_fill(g < -1e20, forget)

        def run(*x):
            return causal_product(
                *x[:3], log_decay=x[3], state=x[4], backend=form, chunk_size=chunk
            )

        agrees(case, gradients(run, (q, k, v, g, state), case.cotangents), tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_forgetting_is_the_same_as_starting_anew(form):
    (q, k, v, _, state), _ = random_inputs(70)
    g = torch.zeros(2, 2, 70, dtype=torch.float64)
    g[..., 31] = -torch.inf
    out, final = causal_product(q, k, v, log_decay=g, state=state, backend=form)
    part = [x[:, :, 31:] for x in (q, k, v)]
    anew, anew_final = causal_product(*part, backend=form)
    assert judge.error(out[:, :, 31:], anew) <= 1e-13
    assert judge.error(final, anew_final) <= 1e-13


@pytest.mark.parametrize("form", [form for form in FORMS if form != "reference"])
def test_strong_decays_over_65536_tokens(form):
    """Sums of decays grow large in every chunk; in float32 their differences must not suffer."""
    length, rows = 1 << 16, [0, 63, 64, 1010, 1019, 32_767, 32_768, 65_535]  # 1006 forgets all
    (q, k, v, _, _), _ = random_inputs(length, 1, 1, 8, 4)
    g = torch.full((1, 1, length), -0.01, dtype=torch.float64)
    g[..., ::7] = -60.0
    g[..., 5::1001] = -torch.inf
    g[..., 32_700:] = -1e-4  # and a long memory at last
    q, k, v, g = wide = [x.requires_grad_(form != "recurrent") for x in (q, k, v, g)]
    want = []
    for i in rows:
        # Sums from the row back to each key, so that nothing is a difference of large numbers.
        back = g[0, 0, 1 : i + 1].flip(0).cumsum(0).flip(0)
        left = torch.cat([back, back.new_zeros(1)]).exp()
        want.append((k[0, 0, : i + 1] @ q[0, 0, i] * left) @ v[0, 0, : i + 1])
    want = torch.stack(want)
    narrow = [x.detach().float().requires_grad_(form != "recurrent") for x in wide]
    out, _ = causal_product(*narrow[:3], log_decay=narrow[3], backend=form)
    got = out[0, 0, rows]
    for row, want_row in zip(got, want, strict=True):  # some are 100 times as large as others
        assert judge.error(row, want_row) <= 1e-5
    if form == "recurrent":
        return  # its graph over so many tokens would take gigabytes; see tests/test_decays.py
    cotangent = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, wide, cotangent)
    grads = torch.autograd.grad(got, narrow, cotangent.float())
    for grad, want_grad in zip(grads, want_grads, strict=True):
        assert judge.error(grad, want_grad) <= 2e-5


def test_a_long_sequence_against_rows_of_the_judge():
    length, rows = 20_000, [0, 63, 64, 8191, 16384, 19_999]
    (q, k, v, g, state), _ = random_inputs(length, 1, 1, 8, 4)
    g = g / 1000  # a memory of some thousand tokens
    before = g[0, 0].cumsum(-1)
    out, final = causal_product(
        *(x.float() for x in (q, k, v)), log_decay=g.float(), state=state.float()
    )
    for i in rows:
        left = (before[i] - before[: i + 1]).exp()
        want = (k[0, 0, : i + 1] @ q[0, 0, i] * left) @ v[0, 0, : i + 1]
        want = want + before[i].exp() * q[0, 0, i] @ state[0, 0]
        assert judge.error(out[0, 0, i], want) <= 2e-5
    left = (before[-1] - before).exp()[:, None]
    want = (k[0, 0] * left).T @ v[0, 0] + before[-1].exp() * state[0, 0]
    assert judge.error(final[0, 0], want) <= 2e-5


# ---- Gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", BACKENDS)
@pytest.mark.parametrize(
    "length, heads, features, width", [(1, 2, 3, 2), (5, 2, 2, 3), (65, 1, 2, 2)]
)
def test_gradcheck_with_states_in_and_out(form, length, heads, features, width):
    inputs, _ = random_inputs(length, 1, heads, features, width)

    def run(q, k, v, g, state):
        return causal_product(q, k, v, log_decay=g, state=state, backend=form, chunk_size=16)

    assert torch.autograd.gradcheck(
        run, [x.requires_grad_() for x in inputs], fast_mode=length > 5, atol=1e-7
    )


@pytest.mark.parametrize("form", BACKENDS)
def test_views_and_expanded_cotangents_are_the_same_as_copies(form):
    (q, *_, g, state), (d_out, d_final) = random_inputs(70, 2, 3, 4, 6)
    wide = torch.randn(2, 3, 70, 14, dtype=torch.float64)
    views = (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        wide[..., 2:6],
        wide[..., 3::2],
        g.transpose(-1, -2).contiguous().transpose(-1, -2),
        state.mT.contiguous().mT,
    )
    for cotangents in (
        (d_out.transpose(1, 2).contiguous().transpose(1, 2), d_final.mT.contiguous().mT),
        (d_out[:1, :, :1].expand(2, 3, 70, 6), d_final[:, :1].expand(2, 3, 4, 6)),
        (d_out.flip(2)[..., :1].expand_as(d_out), torch.ones(()).double().expand_as(d_final)),
    ):

        def run(q, k, v, g, state):
            return causal_product(q, k, v, log_decay=g, state=state, backend=form, chunk_size=16)

        given = gradients(run, views, cotangents)
        copies = gradients(
            run,
            [x.clone(memory_format=torch.contiguous_format) for x in views],
            [x.clone(memory_format=torch.contiguous_format) for x in cotangents],
        )
        assert max(map(judge.error, given, copies)) <= 1e-12
        assert max(map(judge.error, given, gradients(judge.product, views, cotangents))) <= 1e-12


@pytest.mark.parametrize("form", BACKENDS)
def test_expanded_inputs_have_the_gradients_of_what_they_are_made_of(form):
    """One query for all tokens, one head's keys for all, one row's values, one decay."""
    (q, k, v, g, state), cotangents = random_inputs(70, 2, 3, 4, 6)
    narrow = (q[:, :, :1], k[:, :1], v[:1], g[..., :1], state[:1, :1])

    def bare(*given):
        q0, k0, v0, g0, S0 = (
            x.expand_as(y) for x, y in zip(given, (q, k, v, g, state), strict=True)
        )
        return causal_product(q0, k0, v0, log_decay=g0, state=S0, backend=form, chunk_size=16)

    def exactly(*given):
        wide = [x.expand_as(y) for x, y in zip(given, (q, k, v, g, state), strict=True)]
        return judge.product(*(x.clone(memory_format=torch.contiguous_format) for x in wide))

    got, want = (gradients(run, narrow, cotangents) for run in (bare, exactly))
    assert [x.shape for x in got[2:]] == [x.shape for x in narrow]
    assert max(map(judge.error, got, want)) <= 1e-12

    def whole(q0, k0, v0, g0):
        wide = [x.expand_as(y) for x, y in zip((q0, k0, v0, g0), (q, k, v, g), strict=True)]
        rotary = Rotary(4)
        return (linear_attention(*wide[:3], log_decay=wide[3], rotary=rotary, backend=form),)

    def whole_exactly(q0, k0, v0, g0):
        wide = [x.expand_as(y).clone() for x, y in zip((q0, k0, v0, g0), (q, k, v, g), strict=True)]
        return (judge.attention(*wide[:3], log_decay=wide[3]),)

    got, want = (gradients(run, narrow[:4], cotangents[:1]) for run in (whole, whole_exactly))
    assert max(map(judge.error, got, want)) <= 1e-11


@pytest.mark.parametrize("form", BACKENDS)
def test_each_input_may_be_the_only_one_that_needs_a_gradient(form):
    inputs, cotangents = random_inputs(20, 1, 1, 3, 2)
    want = gradients(judge.product, inputs, cotangents)[2:]

    def run(q, k, v, g, state):
        return causal_product(q, k, v, log_decay=g, state=state, backend=form, chunk_size=8)

    for i, x in enumerate(inputs):
        leaf = x.clone().requires_grad_()
        results = run(*inputs[:i], leaf, *inputs[i + 1 :])
        used = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
        (got,) = torch.autograd.grad([r for r, _ in used], leaf, [c for _, c in used])
        assert judge.error(got, want[i]) <= 1e-12


@pytest.mark.parametrize("form", BACKENDS)
@pytest.mark.parametrize("which", [0, 1])
def test_each_result_may_be_the_only_one_that_is_used(form, which):
    inputs, cotangents = random_inputs(20, 1, 1, 3, 2)
    zero = [c if n == which else torch.zeros_like(c) for n, c in enumerate(cotangents)]
    want = gradients(judge.product, inputs, zero)[2:]

    def run(q, k, v, g, state):
        both = causal_product(q, k, v, log_decay=g, state=state, backend=form, chunk_size=8)
        return (both[which],)

    got = gradients(run, inputs, [cotangents[which]])[1:]
    assert max(map(judge.error, got, want)) <= 1e-12


@pytest.mark.parametrize("form, chunk", FORMS_AND_CHUNKS)
def test_no_gradient_flows_from_the_future(form, chunk):
    (q, k, v, g, _), _ = random_inputs(9, 1, 1, 3, 2)
    leaves = [x.requires_grad_() for x in (q, k, v, g)]
    out, _ = causal_product(*leaves[:3], log_decay=g, backend=form, chunk_size=chunk)
    for grad in torch.autograd.grad(out[:, :, 2].sum(), leaves):
        assert (grad[:, :, 3:] == 0).all() and (grad[:, :, :3] != 0).any()


@pytest.mark.parametrize("form", BACKENDS)
def test_second_derivatives_are_right_or_refused_aloud(form):
    inputs, (d_out, _) = random_inputs(5, 1, 1, 2, 2)
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    out, _ = causal_product(q, k, v, backend=form)
    (dq,) = torch.autograd.grad(out, q, d_out, create_graph=True)
    if form in FUSED:
        with pytest.raises(RuntimeError, match=r'differentiable once.*backend="reference"'):
            torch.autograd.grad(dq.sum(), k)
        return
    (got,) = torch.autograd.grad(dq.sum(), k)
    a, b, c = (x.detach().requires_grad_() for x in inputs[:3])
    (da,) = torch.autograd.grad(judge.product(a, b, c)[0], a, d_out, create_graph=True)
    assert judge.error(got, torch.autograd.grad(da.sum(), b)[0]) <= 1e-12


# ---- Shapes, dtypes, values ---------------------------------------------------------------------


@pytest.mark.parametrize("form, chunk", FORMS_AND_CHUNKS)
@pytest.mark.parametrize("batch, length", [(2, 0), (0, 5), (0, 0)])
def test_nothing_in_nothing_out(form, chunk, batch, length):
    inputs, cotangents = random_inputs(length, batch, 2, 3, 4)

    def run(q, k, v, g, state):
        return causal_product(q, k, v, log_decay=g, state=state, backend=form, chunk_size=chunk)

    out, final, *grads = gradients(run, inputs, cotangents)
    assert out.shape == (batch, 2, length, 4) and final.shape == (batch, 2, 3, 4)
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    if not length:
        assert torch.equal(final, inputs[4])  # the state passes through, and so does its gradient
        assert torch.equal(grads[4], cotangents[1])
        empty, zero = causal_product(*inputs[:3], backend=form, chunk_size=chunk)
        assert empty.shape == out.shape and (zero == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(form, dtype):
    inputs, _ = random_inputs(200)
    q, k, v, g, state = (x.to(dtype) for x in inputs)
    out, final = causal_product(q, k, v, log_decay=g, state=state, backend=form)
    assert out.dtype == final.dtype == torch.float32
    want = judge.product(q, k, v, g, state)
    assert max(map(judge.error, (out, final), want)) <= 5e-6
    # sums beyond float16's 65504 are in order here
    big = torch.full((1, 1, 40, 4), 100.0, dtype=dtype)
    out, _ = causal_product(big, big, big, backend=form)
    assert judge.error(out, judge.product(big, big, big)[0]) <= 5e-6
    with torch.autocast("cpu", torch.bfloat16):
        again, _ = causal_product(q, k, v, log_decay=g, state=state, backend=form)
    if form in ("auto", "chunked"):
        assert judge.error(again, want[0]) <= 5e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("length", [0, 1, 70])
def test_half_precision_with_all_gradients(form, dtype, tolerance, length):
    inputs, _ = random_inputs(length, width=5)
    leaves = [x.to(dtype) for x in inputs[:3]] + [inputs[3].float()]
    cotangent = torch.randn(2, 2, length, 5).to(dtype)

    def run(q, k, v, g):
        out = linear_attention(q, k, v, log_decay=g, rotary=Rotary(16), backend=form)
        return (out,)

    def exactly(q, k, v, g):
        return (judge.attention(q, k, v, log_decay=g),)

    got = gradients(run, leaves, [cotangent])
    assert [x.dtype for x in got] == [dtype] * 4 + [torch.float32]
    want = gradients(exactly, [x.double() for x in leaves], [cotangent])
    off = [judge.error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(off) <= tolerance, off


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_documents_in_half_precision(form, dtype, tolerance, decay):
    """By the product's `fresh` and by the layers' `segment_ids`, with all gradients."""
    inputs, cotangents = random_inputs(70, width=5)
    leaves = [x.to(dtype) for x in inputs[:3]] + [inputs[3].float()] * decay
    ends = ((0, 33, 34, 69), (5, 64))  # where documents begin, of each row
    fresh = torch.zeros(2, 70, dtype=torch.bool)
    for row, tokens in zip(fresh, ends, strict=True):
        row[list(tokens)] = True
    ids = fresh.long().cumsum(1)

    def bare(q, k, v, *g):
        options = {"log_decay": g[0] if g else None, "backend": form}
        return causal_product(q, k, v, fresh=fresh, state=inputs[4].float(), **options)

    def bare_exactly(q, k, v, *g):
        g = g[0] if g else torch.zeros(k.shape[:3], dtype=torch.float64)
        return judge.product(q, k, v, g.masked_fill(fresh[:, None], -torch.inf), inputs[4])

    def whole(q, k, v, *g):
        options = {"log_decay": g[0] if g else None, "backend": form}
        return (linear_attention(q, k, v, segment_ids=ids, rotary=Rotary(16), **options),)

    def whole_exactly(q, k, v, *g):
        rows = []
        for row, number in enumerate(ids):
            cuts = [(number == n).nonzero()[:, 0] for n in number.unique()]
            parts = ([x[row : row + 1, :, cut] for x in (q, k, v, *g)] for cut in cuts)
            done = [judge.attention(*x[:3], log_decay=x[3] if g else None) for x in parts]
            rows.append(torch.cat(done, 2))
        return (torch.cat(rows),)

    exact = [x.double() for x in leaves]
    rounded = [c.to(dtype) for c in cotangents]
    for run, exactly, pulled in (
        (bare, bare_exactly, rounded),
        (whole, whole_exactly, rounded[:1]),
    ):
        got, want = gradients(run, leaves, pulled), gradients(exactly, exact, pulled)
        off = [judge.error(a, b) for a, b in zip(got, want, strict=True)]
        assert max(off) <= tolerance, off


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [0, 1, 33, 700])
def test_all_results_are_written(form, length):
    inputs, cotangents = random_inputs(length, batch=1)

    def bare(q, k, v, g, state):
        return causal_product(q, k, v, log_decay=g, state=state, backend=form)

    def whole(q, k, v, g):
        out, state = linear_attention(
            q, k, v, log_decay=g, rotary=Rotary(16), backend=form, return_state=True
        )
        return out, state.S

    for dtype in TOLERANCE:
        given = [x.to(dtype) for x in inputs]
        for run, leaves in ((bare, given), (whole, given[:4])):
            results = gradients(run, leaves, cotangents)
            assert not any(x.isnan().any() for x in results)


def test_the_log_says_once_what_auto_is(caplog):
    module._say.cache_clear()
    q = torch.randn(1, 1, 3, 2)
    with caplog.at_level(logging.INFO, logger="linear_rope"):
        for _ in range(2):
            causal_product(q, q, q, backend="auto")
        causal_product(q, q, q, backend="chunked")
        module.say_single_token.cache_clear()
        for backend in ("auto", "auto", "recurrent"):
            causal_product(q[:, :, :1], q[:, :, :1], q[:, :, :1], backend=backend)
    name = "native" if "native" in BACKENDS else "chunked"
    said = [r.getMessage() for r in caplog.records if r.name == "linear_rope"]
    assert said == [
        f'backend="auto" is {name} for tensors on cpu',
        'backend="auto" is recurrent for single tokens on cpu',
    ]


@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_values_and_so_are_results(form):
    for length in (0, 1, 70):
        inputs, _ = random_inputs(length)
        q, k, v, g, state = inputs
        kept = [x.clone() for x in inputs]
        for decay in (g, None):
            out, final = causal_product(q, k, v, log_decay=decay, state=state, backend=form)
            final.add_(1), out.add_(1)
            assert all(map(torch.equal, inputs, kept))


@pytest.mark.parametrize("form", FORMS)
def test_heads_and_rows_do_not_see_each_other(form):
    (q, k, v, g, state), _ = random_inputs(66, 3, 2)
    run = functools.partial(causal_product, backend=form)
    out, final = run(q, k, v, log_decay=g, state=state)
    for b, h in ((0, 1), (2, 0)):
        at = (slice(b, b + 1), slice(h, h + 1))
        part, part_final = run(q[at], k[at], v[at], log_decay=g[at], state=state[at])
        assert judge.error(part, out[at]) <= 1e-13
        assert judge.error(part_final, final[at]) <= 1e-13


def test_many_rows_and_several_blocks_of_time(monkeypatch):
    """The work is cut into blocks of heads x tokens; the seams must not show."""
    case = judged(300, batch=5)
    monkeypatch.setattr(blocks, "SPARSE", 0)  # nothing asks for long blocks
    for numbers in (1, 2000, 5000, 30_000, 100_000, 500_000):
        monkeypatch.setattr(blocks, "NUMBERS", numbers)

        def run(q, k, v, g, state):
            return causal_product(
                q, k, v, log_decay=g, state=state, backend="chunked", chunk_size=16
            )

        agrees(case, gradients(run, case.inputs, case.cotangents), 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_split_and_resume_in_any_pieces(form):
    case = judged(129)
    for cuts in ([5, 0, 59, 1, 64], [128, 1], [0, 129]):
        leaves = [x.detach().requires_grad_() for x in case.inputs]
        carry, outs = leaves[4], []
        for parts in zip(*(x.split(cuts, 2) for x in leaves[:4]), strict=True):
            out, carry = causal_product(*parts[:3], log_decay=parts[3], state=carry, backend=form)
            outs.append(out)
        results = (torch.cat(outs, 2), carry)
        grads = torch.autograd.grad(results, leaves, case.cotangents)
        agrees(case, (*results, *grads), 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_grad_and_vmap_of_torch_func(form):
    inputs, (d_out, _) = random_inputs(40, 2, 2, 3, 2)
    q, k, v, g, state = inputs

    def loss(q, k, v, g, state, d_out):
        out, final = causal_product(
            q[None], k[None], v[None], log_decay=g[None], state=state[None], backend=form,
            chunk_size=16,
        )  # fmt: skip
        return (out[0] * d_out).sum() + final.sum()

    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3, 4)))
    got = per_sample(q, k, v, g, state, d_out)
    want = gradients(judge.product, inputs, (d_out, torch.ones_like(state)))[2:]
    assert max(map(judge.error, got, want)) <= 1e-12


# ---- Bad input ----------------------------------------------------------------------------------

Q, V = torch.ones(2, 3, 4, 6), torch.ones(2, 3, 4, 5)


@pytest.mark.parametrize(
    "args, options, words",
    [
        ((Q[0], Q, V), {}, ["(batch, head, time, width)", "(3, 4, 6)"]),
        ((Q[:, :, :2], Q, V), {}, ["q and k", "(2, 3, 2, 6)", "causal=False"]),
        ((Q[..., :4], Q, V), {}, ["q has 4", "k has 6", "same width"]),
        ((Q, Q, V[:, :1]), {}, ["v must agree", "(2, 1, 4, 5)"]),
        ((Q, Q, V), {"log_decay": -Q[..., 0, 0]}, ["log_decay", "(2, 3, 4)", "(2, 3)"]),
        ((Q, Q, V), {"log_decay": -Q}, ["log_decay", "(2, 3, 4)", "(2, 3, 4, 6)"]),
        ((Q, Q, V), {"log_decay": Q[..., 0]}, ["log_decay must be <= 0", "logsigmoid"]),
        ((Q, Q, V), {"state": torch.ones(2, 3, 5, 6)}, ["state", "(2, 3, 6, 5)", "(2, 3, 5, 6)"]),
        ((Q, Q, V), {"state": torch.ones(1, 3, 6, 5)}, ["state", "(2, 3, 6, 5)", "(1, 3, 6, 5)"]),
        ((Q, Q.to("meta"), V), {}, ["k is on meta", "q is on cpu", "one device"]),
        ((Q, Q, V.to("meta")), {}, ["v is on meta", "q is on cpu", "one device"]),
        ((Q, Q, V), {"log_decay": -Q[..., 0].to("meta")}, ["log_decay is on meta", "one device"]),
        ((Q, Q, V), {"state": torch.ones(2, 3, 6, 5, device="meta")}, ["state is on meta"]),
        ((Q.long(), Q, V), {}, ["q", "floating-point", "int64"]),
        ((Q, Q, V.bool()), {}, ["v", "floating-point", "bool"]),
        ((Q, Q, V), {"backend": "triton"}, ["backend='triton'", "auto, " + ", ".join(BACKENDS)]),
        ((Q, Q, V), {"chunk_size": 0}, ["chunk_size", "at least 1", "0"]),
        ((Q, Q, V), {"chunk_size": -64}, ["chunk_size", "at least 1", "-64"]),
    ],
)
def test_bad_input_is_refused(args, options, words):
    with pytest.raises(ValueError) as refusal:
        causal_product(*args, **options)
    assert all(word in str(refusal.value) for word in words), refusal.value
