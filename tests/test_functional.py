"""The equation: every switch against the judge, known values, masks, states, bad input."""

from __future__ import annotations

import functools
import itertools

import judge
import pytest
import torch
from forms import BACKENDS
from torch import Tensor

from linear_rope import (
    FEATURE_MAPS,
    AttentionState,
    FeatureMap,
    Rotary,
    RotaryLinearAttention,
    linear_attention,
    make_feature_map,
)
from linear_rope.functional import DENOMINATORS, ROTATE

MAPS = list(FEATURE_MAPS)
FORMS_AND_CHUNKS = [("auto", None), ("reference", None), ("recurrent", None)]
FORMS_AND_CHUNKS += [("chunked", c) for c in (1, 7, 64, 5000)]
FORMS_AND_CHUNKS += [(name, c) for name in BACKENDS if name == "native" for c in (1, 7, 64, 5000)]
assert {f for f, _ in FORMS_AND_CHUNKS} == {"auto", *BACKENDS}


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def build(name: str, width: int, features: int = 10, seed: int = 0) -> FeatureMap:
    options = {"features": features, "seed": seed} if name.startswith("favor") else {}
    return make_feature_map(name, width, **options)


def rotation(phi: FeatureMap, width: int, rotate: str = "after", **options) -> Rotary:
    return Rotary(phi.feature_dim if rotate == "after" else width, **options)


def inputs(length: int, batch: int = 2, heads: int = 2, width: int = 6, value: int = 5):
    q, k = double(2, batch, heads, length, width)
    return q, k, double(batch, heads, length, value)


def judged(q, k, v, phi: FeatureMap, name: str, **options) -> Tensor:
    return judge.attention(
        q, k, v, feature_map=name, projection=getattr(phi, "projection", None), **options
    )


def backward(run, leaves, cotangent) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = run(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out.dtype)))


# ---- Known values -------------------------------------------------------------------------------


def test_known_values_of_the_normalizer():
    q = torch.tensor([[1.0, 0], [0, 1], [1, 1]])[None, None]
    k = torch.tensor([[0.0, 1], [1, 0], [2, -1]])[None, None]
    v = torch.tensor([1.0, 10, 100])[None, None, :, None]
    plain = linear_attention(q, k, v)[0, 0, :, 0]
    assert judge.error(plain, torch.tensor([1, 5, 39.474029])) <= 1e-6
    turned = linear_attention(q, k, v, rotary=Rotary(2))[0, 0, :, 0]
    assert judge.error(turned, torch.tensor([1, 4.744612, 36.747181])) <= 1e-6
    # without rotation weights sum to 1
    assert judge.error(linear_attention(q, k, v + 3)[0, 0, :, 0], plain + 3) <= 1e-6
    assert judge.error(judge.attention(q, k, v)[0, 0, :, 0], turned) <= 1e-6


def test_the_denominator_is_not_rotated_and_no_bound():
    zero, one = torch.zeros(1, 1, 9, 2), torch.ones(1, 1, 9, 1)
    got = linear_attention(zero, zero, one, rotary=Rotary(2))[0, 0, :, 0]
    want = [1, 0.770151, 0.374718, 0.033541, -0.103896, -0.039303, 0.103479, 0.184782, 0.148084]
    assert judge.error(got, torch.tensor(want)) <= 1e-5
    rotated = linear_attention(zero, zero, one, rotary=Rotary(2), denominator="rotated")
    assert judge.error(rotated, one) <= 1e-5
    q = torch.tensor([0, -6.907755]).expand(1, 1, 3, 2)
    got = linear_attention(q, q.flip(-1), one[:, :, :3], rotary=Rotary(2))[0, 0, :, 0]
    for value, want in zip(got.tolist(), (1, 211.138, 292.169), strict=True):
        assert value == pytest.approx(want, rel=2e-3)


def test_the_sum_of_weights_falls_with_the_position():
    """For keys that are alike the rotations cancel: about 0.53 at 100 and 0.21 at 2000."""
    q, k = torch.randn(2, 8, 1, 2001, 64)
    rotary, ones = Rotary(64), torch.ones(8, 1, 2001, 1)
    sums = linear_attention(q, k, ones, rotary=rotary)[:, 0, :, 0]
    assert judge.error(sums[:, 0], torch.ones(8)) <= 1e-5
    # what is left of a constant key: the mean over frequencies of a running mean of cosines
    theta = 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    angles = torch.arange(2001).double()[:, None] * theta
    want = (angles.cos().cumsum(0) / torch.arange(1, 2002)[:, None]).mean(-1)
    for position, about in ((100, 0.5), (2000, 0.2)):
        near = slice(position - 10, position + 1)
        assert float(want[position]) == pytest.approx(about, abs=0.05)
        assert float(sums[:, near].mean()) == pytest.approx(float(want[near].mean()), abs=0.04)
    unturned = linear_attention(q, k, ones)[..., 0]
    assert judge.error(unturned, torch.ones(8, 1, 2001)) <= 1e-5
    # the output norm undoes the shrinking
    v = torch.randn(8, 1, 2001, 16)
    out = linear_attention(q, k, v, rotary=rotary, output_norm=True)
    assert float(out.square().mean()) == pytest.approx(1, abs=0.05)
    raw = linear_attention(q, k, v, rotary=rotary)
    rms = raw.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    assert judge.error(out, raw / rms) <= 1e-5


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("offset", [0, 1, 77, 100_000])
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)],
)
def test_row_zero_is_the_first_value(name, offset, dtype, tolerance):
    phi = build(name, 8, 16)
    for size in (0.1, 1, 3):
        q, k, v = (size * torch.randn(2, 3, 5, 8)).to(dtype), *torch.randn(2, 2, 3, 5, 8).to(dtype)
        for backend in BACKENDS:
            out = linear_attention(
                q, k, v, feature_map=phi, rotary=rotation(phi, 8), backend=backend, positions=offset
            )
            assert out.dtype == dtype
            assert judge.error(out[:, :, 0], v[:, :, 0]) <= tolerance


# ---- Against the judge --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 129, 300, 513, 913])
def test_any_length_in_every_form(length):
    q, k, v = inputs(length, width=16, value=24)
    cotangent = double(*v.shape)
    want = backward(judge.attention, (q, k, v), cotangent)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        for backend, chunk in FORMS_AND_CHUNKS:
            junk = [torch.full((2, 2, length, n), torch.nan).to(dtype) for n in (1, 16, 24, 25)]
            del junk
            run = functools.partial(
                linear_attention, rotary=Rotary(16), backend=backend, chunk_size=chunk
            )
            got = backward(run, [x.to(dtype) for x in (q, k, v)], cotangent)
            off = [judge.error(a, b) for a, b in zip(got, want, strict=True)]
            assert max(off) <= tolerance, (backend, chunk, dtype, off)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("rotate", ROTATE)
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("causal", [True, False])
def test_every_switch_agrees_with_the_judge(name, rotate, denominator, causal):
    """Outputs and all gradients: plain, with a mask, with decay, with both, and odd positions."""
    length = 21
    q, k, v = (0.7 * x for x in inputs(length))
    phi = build(name, 6).double()
    mask = torch.rand(2, length) < 0.6
    mask[:, 0] = torch.tensor([True, False])
    mask[:, 1] = True
    decay = -double(2, 2, length).square()
    positions = torch.randint(0, 50, (2, length))
    cotangent = double(*v.shape)
    for (pairing, fraction), options, decays in itertools.product(
        (("interleaved", 1.0), ("half", 0.5)),
        ({}, {"key_mask": mask}, {"positions": positions}),
        (False, True) if causal else (False,),
    ):
        if pairing == "half" and rotate == "after" and "expand" in name:
            continue  # refused, see test_feature_maps.py
        rotary = rotation(phi, 6, rotate, pairing=pairing, fraction=fraction)
        same = {"rotate": rotate, "causal": causal, **options}
        extra = {"phi": phi, "name": name, "pairing": pairing, "fraction": fraction}

        def ours(q, k, v, g=None, same=same, rotary=rotary):
            return linear_attention(
                q, k, v, log_decay=g, feature_map=phi, rotary=rotary, denominator=denominator,
                chunk_size=8, **same,
            )  # fmt: skip

        def theirs(q, k, v, g=None, same=same, extra=extra, denominator=denominator):
            return judged(q, k, v, log_decay=g, denominator=denominator, **same, **extra)

        leaves = (q, k, v, decay) if decays else (q, k, v)
        keep = torch.ones_like(v)
        if denominator == "rotated" and rotate == "after":
            # It passes through 0, where no two ways agree: look where it is not small.
            below = theirs(q, k, keep, *leaves[3:], denominator="none")
            keep = (below.abs() > 0.05 * below.abs().amax()).double()
        got, want = (
            backward(lambda *x, f=f, keep=keep: f(*x) * keep, leaves, cotangent)
            for f in (ours, theirs)
        )
        off = [judge.error(a, b) for a, b in zip(got, want, strict=True)]
        assert max(off) <= 1e-10, (options, decays, off)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("rotate", ROTATE)
def test_cross_attention(name, rotate):
    phi = build(name, 6).double()
    q, (_, k, v) = double(2, 2, 4, 6), inputs(9)
    mask = torch.rand(2, 9) < 0.6
    mask[0] = True
    mask[1, 4:] = False
    for options in (
        {},
        {"key_mask": mask},
        {"positions": torch.arange(5, 9), "key_positions": torch.arange(3, 12)},
    ):
        run = functools.partial(
            linear_attention, feature_map=phi, rotary=rotation(phi, 6, rotate), rotate=rotate,
            causal=False, **options,
        )  # fmt: skip
        judging = functools.partial(
            judged, phi=phi, name=name, rotate=rotate, causal=False, **options
        )
        cotangent = double(2, 2, 4, 5)
        got, want = (backward(f, (q, k, v), cotangent) for f in (run, judging))
        assert max(map(judge.error, got, want)) <= 1e-10


def test_a_function_serves_as_a_feature_map():
    q, k, v = inputs(9)

    def squares(x):
        return torch.cat([x.square(), torch.ones_like(x[..., :2])], -1)

    out = linear_attention(q, k, v, feature_map=squares, rotary=Rotary(8))
    fq, fk = squares(q), squares(k)
    at = torch.arange(9)
    num = (judge.turn(fq, at) @ judge.turn(fk, at).mT).tril() @ v
    assert judge.error(out, num / (fq @ fk.mT).tril().sum(-1, keepdim=True)) <= 1e-12


@pytest.mark.parametrize("name", MAPS)
def test_the_same_number_added_to_all_positions_changes_nothing(name):
    q, k, v = inputs(12)
    phi = build(name, 6).double()
    run = functools.partial(linear_attention, feature_map=phi, rotary=rotation(phi, 6))
    want = run(q, k, v)
    for shift in (1, 64, 5000):
        assert judge.error(run(q, k, v, positions=shift), want) <= 1e-11
        single = [x.float() for x in (q, k, v)]
        phi.float()
        assert judge.error(run(*single, positions=shift), run(*single)) <= 5e-6
        phi.double()
    assert judge.error(run(q, k, v, positions=2 * torch.arange(12)), want) > 1e-3


# ---- Causality ----------------------------------------------------------------------------------


def leak(run, phi: FeatureMap, length: int = 96, width: int = 6) -> float:
    """How far earlier outputs move when all that comes later turns wild."""
    q, k, v = torch.randn(3, 2, 2, length, width)
    # the keys of the largest exponential features: those along the projection
    loud = getattr(phi, "projection", torch.ones(10, width))[torch.arange(length) % 10]
    out, worst = run(q, k, v), 0.0
    for cut in (1, 64, 95):
        for size in (0.0, 5.0, 1e3, "loud"):
            k2, v2, q2 = k.clone(), v.clone(), q.clone()
            for x in (q2, k2, v2):
                new = torch.randn(2, 2, length - cut, width)
                x[:, :, cut:] = 2 * width**0.25 * loud[cut:] if size == "loud" else size * new
            worst = max(worst, judge.error(run(q2, k2, v2)[:, :, :cut], out[:, :, :cut]))
    return worst


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("backend, chunk", FORMS_AND_CHUNKS)
def test_the_future_does_not_move_the_past_by_a_single_bit(name, denominator, backend, chunk):
    phi = build(name, 6)
    run = functools.partial(
        linear_attention, feature_map=phi, rotary=rotation(phi, 6), denominator=denominator,
        backend=backend, chunk_size=chunk,
    )  # fmt: skip
    assert leak(run, phi) == 0.0


def test_the_causality_test_sees_a_maximum_over_all_keys():
    phi = build("favor+", 6)

    def stabilized(q, k, v, eps):
        fq, fk = phi.log_features(q), phi.log_features(k)
        fq, fk = fq - fq.amax(-1, keepdim=True), fk - fk.amax((-1, -2), keepdim=True)
        weights = ((fq.exp() + eps) @ (fk.exp() + eps).mT).tril()
        return weights @ v / weights.sum(-1, keepdim=True)

    assert leak(functools.partial(stabilized, eps=1e-4), phi) > 1e-4


@pytest.mark.parametrize("name", MAPS)
def test_rows_and_heads_do_not_see_each_other(name):
    phi = build(name, 6)
    q, k, v = torch.randn(3, 3, 2, 40, 6)
    run = functools.partial(linear_attention, feature_map=phi, rotary=rotation(phi, 6))
    out = run(q, k, v)
    for x in (q, k, v):
        x[1:] *= 100
        x[0, 1] *= 100
    assert torch.equal(run(q, k, v)[0, 0], out[0, 0])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_flows_from_the_future(name, backend):
    phi = build(name, 6)
    q, k, v = (x.requires_grad_() for x in inputs(7))
    out = linear_attention(q, k, v, feature_map=phi, rotary=rotation(phi, 6), backend=backend)
    for grad in torch.autograd.grad(out[:, :, 2].sum(), (q, k, v)):
        assert (grad[:, :, 3:] == 0).all() and (grad[:, :, :3] != 0).any()


# ---- Numbers that are hard to hold --------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, value", [(torch.float32, -20.0), (torch.float16, -10.0), (torch.bfloat16, -7.0)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_ordinary_negative_inputs_keep_the_denominator_alive(dtype, value, causal):
    x = torch.full((1, 1, 4, 8), value, dtype=dtype, requires_grad=True)
    v = torch.tensor([1.0, 2, 3, 4], dtype=dtype).reshape(1, 1, 4, 1).requires_grad_()
    out = linear_attention(x, x, v, causal=causal)
    want = [1, 1.5, 2, 2.5] if causal else [2.5] * 4
    assert judge.error(out[0, 0, :, 0], torch.tensor(want)) <= 1e-6
    out.sum().backward()
    assert x.grad.isfinite().all()
    share = torch.tensor([25 / 12, 13 / 12, 7 / 12, 1 / 4] if causal else [1.0] * 4)
    assert judge.error(v.grad[0, 0, :, 0], share) <= 8e-3


@pytest.mark.parametrize("size", [1, 3, 10, 30])
@pytest.mark.parametrize("how", ["float32", "bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("turned", [True, False])
def test_exponential_features_of_large_inputs_stay_finite(size, how, turned):
    rotary = Rotary(128) if turned else None
    dtype = torch.float32 if how == "autocast" else getattr(torch, how)
    for seed in range(5):
        torch.manual_seed(seed)
        phi = make_feature_map("favor+", 64, features=128)
        q, k = (size * torch.randn(2, 2, 2, 16, 64)).to(dtype)
        leaves = [x.requires_grad_() for x in (q, k, torch.randn(2, 2, 16, 64).to(dtype))]
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            out = linear_attention(*leaves, feature_map=phi, rotary=rotary)
        assert out.dtype == dtype and out.isfinite().all()
        assert judge.error(out[:, :, 0], leaves[2][:, :, 0]) <= (
            1e-3 if dtype == torch.float32 else 2e-2
        )
        grads = torch.autograd.grad(out, leaves, torch.randn(out.shape).to(dtype))
        if turned and dtype == torch.float16:
            # Weights reach 1e6 here, and so do gradients: float16 says inf, as a loss scaler needs
            assert not any(g.isnan().any() for g in grads)
        else:
            assert all(g.isfinite().all() for g in grads)


def test_exponential_features_are_exact_where_plain_ones_overflow():
    """Stabilized float32 against plain float64, for inputs whose features span e^100."""
    phi = make_feature_map("favor+", 8, features=16)
    q, k, v = 4 * torch.randn(1, 2, 50, 8), 4 * torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 3)
    spread = phi.log_features(k).amax(-1)
    assert float(spread.max() - spread.min()) > 30
    got = linear_attention(q, k, v, feature_map=phi)
    want = judged(q, k, v, phi, "favor+", rotate="none")
    assert judge.error(got, want) <= 1e-4


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_inputs_dtype_and_sums_are_wider(name, dtype):
    phi = build(name, 8)
    q, k, v = torch.randn(3, 2, 2, 300, 8).to(dtype)
    rotary = rotation(phi, 8)
    out, state = linear_attention(q, k, v, feature_map=phi, rotary=rotary, return_state=True)
    assert out.dtype == dtype and state.S.dtype == state.z.dtype == torch.float32
    want = judged(q, k, v, phi, name)
    rounding = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert judge.error(out, want) <= rounding
    with torch.autocast("cpu", torch.bfloat16):
        again = linear_attention(q, k, v, feature_map=phi, rotary=rotary)
    assert torch.equal(again, out)


def test_float16_saturates_where_weights_exceed_its_range():
    q = torch.tensor([0, -20.0]).expand(1, 1, 3, 2).half()
    v = torch.full((1, 1, 3, 1), 6e4, dtype=torch.float16)
    assert linear_attention(q, q.flip(-1), v, rotary=Rotary(2)).isfinite().all()


# ---- Masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("rotate", ROTATE)
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("where", ["left", "right", "holes"])
def test_pads_change_nothing(name, rotate, denominator, causal, where):
    """Against the unpadded run: outputs, gradients, state; for pads of zeros and of 1e4."""
    length, pads = 7, 5
    real = {
        "left": range(pads, pads + length),
        "right": range(length),
        "holes": (0, 3, 4, 6, 8, 9, 11),
    }
    mask = torch.zeros(1, length + pads, dtype=torch.bool)
    mask[:, list(real[where])] = True
    phi = build(name, 8, 12).double()
    q, k, v = double(3, 1, 2, length, 8)
    decay = -double(1, 2, length).square() if causal else None
    options = {
        "feature_map": phi, "rotary": rotation(phi, 8, rotate), "rotate": rotate,
        "denominator": denominator, "causal": causal,
    }  # fmt: skip
    cotangent = double(1, 2, length, 8)
    leaves = (q, k, v) if decay is None else (q, k, v, decay)

    def plain(q, k, v, g=None):
        return linear_attention(q, k, v, log_decay=g, **options)

    want = backward(plain, leaves, cotangent)
    for fill in (0.0, 1e4, "loud") if phi.log_space else (0.0, 1e4):
        loud, fill = fill == "loud", 1.0 if fill == "loud" else fill
        padded = [x.new_full((1, 2, length + pads, *x.shape[3:]), fill) for x in leaves]
        if decay is not None:
            padded[3] = -padded[3]
        if loud:  # the pads' exponential features are larger than any real key's
            if name == "exp":
                padded[1][:] = 9.0
            else:
                padded[1][:] = phi.projection[phi.projection.norm(dim=-1).argmax()] * 8**0.25
        for x, y in zip(padded, leaves, strict=True):
            x[:, :, mask[0]] = y
        wide = torch.zeros(1, 2, length + pads, 8, dtype=torch.float64)
        wide[:, :, mask[0]] = cotangent
        kept = [x.clone() for x in padded]

        def run(q, k, v, g=None):
            return linear_attention(q, k, v, log_decay=g, key_mask=mask, **options)

        out, *grads = backward(run, padded, wide)
        assert all(map(torch.equal, padded, kept))  # not changed in place
        if denominator != "none" or fill == 0:
            assert out.isfinite().all()
        assert judge.error(out[:, :, mask[0]], want[0]) <= 1e-10
        for got, exact in zip(grads, want[1:], strict=True):
            assert (got[:, :, ~mask[0]] == 0).all()
            assert judge.error(got[:, :, mask[0]], exact) <= 1e-9
        if causal:
            _, state = linear_attention(
                *padded[:3], log_decay=padded[3], key_mask=mask, return_state=True, **options
            )
            _, exact_state = linear_attention(
                q, k, v, log_decay=decay, return_state=True, **options
            )
            for got, exact in zip(state, exact_state, strict=True):
                assert judge.error(got, exact) <= 1e-10


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_row_without_any_real_key_gives_zero_and_finite_gradients(name, denominator, causal):
    phi = build(name, 8)
    leaves = [torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([[False] * 6, [False, False, True, True, False, True]])
    out = linear_attention(
        *leaves, feature_map=phi, rotary=rotation(phi, 8), key_mask=mask, causal=causal,
        denominator=denominator,
    )  # fmt: skip
    assert (out[0] == 0).all() and out.isfinite().all()
    if causal:
        assert (out[1, :, :2] == 0).all()
    grads = torch.autograd.grad(out, leaves, torch.randn(out.shape))
    assert all(g.isfinite().all() for g in grads)
    assert all((g[0] == 0).all() for g in grads)


def test_a_layer_with_learned_decay_and_padding():
    """Pads do not decay, and padded rows in a batch equal single rows."""
    layer = RotaryLinearAttention(16, 2, decay="learned", feature_map="favor+", features=12)
    lengths, longest = (9, 4, 6), 9
    rows = [torch.randn(1, n, 16) for n in lengths]
    for side in ("left", "right"):
        x, mask = torch.full((3, longest, 16), 1e4), torch.zeros(3, longest, dtype=torch.bool)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            at = slice(longest - n, None) if side == "left" else slice(0, n)
            x[i, at], mask[i, at] = row[0], True
        out = layer(x, key_mask=mask)
        for i, row in enumerate(rows):
            assert judge.error(out[i, mask[i]], layer(row)[0]) <= 1e-5
        one, its_mask = x[1:2], mask[1:2]  # and a batch of one, no shortcut
        assert judge.error(layer(one, key_mask=its_mask)[:, its_mask[0]], layer(rows[1])) <= 1e-5


# ---- States -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("rotate", ROTATE)
def test_split_and_resume_and_step_by_step(name, denominator, rotate):
    """With decay, and a mask with holes, outputs and gradients: in pieces as in one go."""
    length = 12
    phi = build(name, 6).double()
    q, k, v = inputs(length)
    if phi.log_space:
        k[:, :, 6] = (
            phi.projection[0] if name == "favor+" else 4.0
        )  # the stabilizer moves on in the middle
    decay = -double(2, 2, length).square()
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :2], mask[1, 4:7], mask[0, 9], mask[1, -1] = False, False, False, False
    options = {
        "feature_map": phi, "rotary": rotation(phi, 6, rotate), "rotate": rotate,
        "denominator": denominator, "return_state": True,
    }  # fmt: skip
    leaves = [x.requires_grad_() for x in (q, k, v, decay)]
    for masked in (False, True):
        hide = mask if masked else None
        # what a pad asks for has no position, and no meaning
        real = mask[:, None, :, None] if masked else torch.ones(1, dtype=torch.bool)
        cotangent = double(*v.shape) * real
        out, end = linear_attention(q, k, v, log_decay=decay, key_mask=hide, **options)
        want = torch.autograd.grad(out, leaves, cotangent)
        assert end.position.tolist() == (mask.sum(-1).tolist() if masked else [length] * 2)
        for cuts in ([5, 7], [1] * length, [0, 4, 1, 7, 0]):
            state, outs = None, []
            for start, n in zip([sum(cuts[:i]) for i in range(len(cuts))], cuts, strict=True):
                at = slice(start, start + n)
                part, state = linear_attention(
                    q[:, :, at], k[:, :, at], v[:, :, at], log_decay=decay[:, :, at],
                    key_mask=mask[:, at] if masked else None, state=state, **options,
                )  # fmt: skip
                outs.append(part)
            pieces = torch.cat(outs, 2)
            assert judge.error(pieces * real, out * real) <= 1e-10, cuts
            for got, exact in zip(state, end, strict=True):
                assert judge.error(got, exact) <= 1e-10
            got = torch.autograd.grad(pieces, leaves, cotangent)
            assert max(map(judge.error, got, want)) <= 1e-9, cuts


def test_single_precision_decoding_does_not_drift():
    for name in MAPS:
        phi = build(name, 8, 16)
        q, k, v = torch.randn(3, 1, 2, 200, 8)
        rotary = rotation(phi, 8)
        whole = linear_attention(q, k, v, feature_map=phi, rotary=rotary)
        state, steps = None, []
        for t in range(200):
            one = slice(t, t + 1)
            out, state = linear_attention(
                q[:, :, one], k[:, :, one], v[:, :, one], feature_map=phi, rotary=rotary,
                state=state, return_state=True,
            )  # fmt: skip
            steps.append(out)
        assert judge.error(torch.cat(steps, 2), whole) <= 2e-5
        assert sum(x.numel() for x in state) < 2 * 8 * (16 + 2) * 16  # constant in size


def test_a_state_is_a_value_and_explicit_positions_replace_its_own():
    q, k, v = inputs(8)
    options = {"rotary": Rotary(6), "return_state": True}
    _, state = linear_attention(q, k, v, positions=10, **options)
    assert state.position.tolist() == [18, 18]
    kept = AttentionState(*(x.clone() for x in state))
    first, _ = linear_attention(q, k, v, state=state, **options)
    assert all(map(torch.equal, state, kept))
    again, _ = linear_attention(q, k, v, state=state, **options)
    assert torch.equal(first, again)
    explicit, later = linear_attention(q, k, v, state=state, positions=18, **options)
    assert torch.equal(first, explicit) and later.position.tolist() == [26, 26]
    other, _ = linear_attention(q, k, v, state=state, positions=0, **options)
    assert judge.error(other, first) > 1e-3


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("length", [1, 5, 33])
def test_gradcheck_with_states_in_and_out(name, length):
    phi = build(name, 4, 4).double()
    q, k, v = inputs(length, 1, 1, 4, 2)
    decay = -double(1, 1, length).square() - 0.1
    options = {"feature_map": phi, "rotary": rotation(phi, 4), "return_state": True}
    _, state = linear_attention(q + 1, k, v, **options)

    def run(q, k, v, g, S, z):
        # A new maximum rescales the state in steps, which finite differences do not see: the
        # keys stay below the one in the state.
        past = AttentionState(S, z, state.stabilizer + 10, state.position)
        out, end = linear_attention(q, k, v, log_decay=g, state=past, **options)
        # The sums are in units of exp(stabilizer), which sinks with the decay.
        unit = (end.stabilizer - past.stabilizer).exp()[..., None]
        return out, end.S * unit[..., None], end.z * unit

    leaves = [x.requires_grad_() for x in (q, k, v, decay, state.S.detach(), state.z.detach())]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=length > 5, atol=1e-6)


# ---- Shapes and layouts -------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch, length", [(2, 0), (0, 3), (0, 0)])
def test_nothing_in_nothing_out(name, causal, batch, length):
    phi = build(name, 6)
    leaves = [x.requires_grad_() for x in inputs(length, batch)]
    out = linear_attention(*leaves, feature_map=phi, rotary=rotation(phi, 6), causal=causal)
    assert out.shape == (batch, 2, length, 5)
    out.sum().backward()
    mask = torch.ones(batch, length, dtype=torch.bool)
    out = linear_attention(*leaves, feature_map=phi, causal=causal, key_mask=mask)
    assert out.shape == (batch, 2, length, 5)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [True, False])
def test_views_and_expanded_tensors_are_the_same_as_copies(name, causal):
    phi = build(name, 6).double()
    q = double(2, 30, 3, 6).transpose(1, 2)  # as from a projection
    k = double(2, 1, 30, 6).expand(2, 3, 30, 6)  # one head of keys for all
    v = double(2, 3, 30, 11)[..., 1::2]
    run = functools.partial(
        linear_attention, feature_map=phi, rotary=rotation(phi, 6), causal=causal
    )
    for cotangent in (double(2, 30, 3, 5).transpose(1, 2), double(1, 3, 1, 5).expand(2, 3, 30, 5)):
        got = backward(run, (q, k, v), cotangent)
        want = backward(
            run,
            [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)],
            cotangent.clone(memory_format=torch.contiguous_format),
        )
        assert max(map(judge.error, got, want)) <= 1e-12


# ---- Bad input ----------------------------------------------------------------------------------

Q, V = torch.ones(2, 3, 4, 6), torch.ones(2, 3, 4, 5)
G = -torch.ones(2, 3, 4)
MASK = torch.ones(2, 4, dtype=torch.bool)


def broken(field: str, value) -> dict[str, AttentionState]:
    _, state = linear_attention(Q, Q, V, return_state=True)
    return {"state": state._replace(**{field: value(getattr(state, field))})}


@pytest.mark.parametrize(
    "args, options, words",
    [
        ((Q, Q, V), {"feature_map": "gelu"}, ["feature_map='gelu'", *MAPS]),
        ((Q, Q, V), {"feature_map": "favor+"}, ["'favor+'", "make_feature_map", "module"]),
        ((Q, Q, V), {"feature_map": build("favor+", 8)}, ["width 8", "width 6"]),
        ((Q, Q, V), {"rotate": "middle"}, ["rotate='middle'", ", ".join(ROTATE)]),
        ((Q, Q, V), {"denominator": "abs"}, ["denominator='abs'", ", ".join(DENOMINATORS)]),
        ((Q, Q, V), {"backend": "cuda"}, ["backend='cuda'", "auto", *BACKENDS]),
        ((Q, Q, V), {"backend": "cuda", "causal": False}, ["backend='cuda'", "auto", *BACKENDS]),
        ((Q, Q, V), {"chunk_size": 0}, ["chunk_size", "0", "at least 1"]),
        ((Q, Q, V), {"rotary": Rotary(8)}, ["width 8", "6 features", "Rotary(6)"]),
        ((Q, Q, V), {"rotary": Rotary(8), "rotate": "before"}, ["width 6", "width 8"]),
        ((Q[0], Q, V), {}, ["q", "(batch, head, time, width)", "(3, 4, 6)"]),
        ((Q, Q, V[0]), {}, ["v", "(batch, head, time, width)", "(3, 4, 5)"]),
        ((Q, Q[:1], V), {}, ["agree in batch", "k (1, 3, 4, 6)"]),
        ((Q, Q[..., :4], V), {}, ["q has head width 6", "k has 4", "equal"]),
        ((Q, Q, V[:, :, :3]), {}, ["4 keys", "3 values", "equal"]),
        ((Q[:, :, :3], Q, V), {}, ["causal", "3 and 4", "causal=False", "state"]),
        ((Q, Q.double(), V), {}, ["k is torch.float64", "q is torch.float32", ".to()"]),
        ((Q, Q, V.half()), {}, ["v is torch.float16", "q is torch.float32", ".to()"]),
        ((Q, Q, V.to("meta")), {}, ["v is", "on meta", "on cpu", ".to()"]),
        ((Q.to("meta"), Q, V), {}, ["k is", "on meta", "on cpu", ".to()"]),
        ((Q.long(), Q.long(), V.long()), {}, ["q", "floating-point", "int64"]),
        ((Q, Q, V), {"key_mask": MASK[:, :3]}, ["key_mask", "(2, 4)", "(2, 3)"]),
        ((Q, Q, V), {"key_mask": MASK.long()}, ["key_mask", "bool", "int64"]),
        ((Q, Q, V), {"key_mask": MASK[:, None]}, ["key_mask", "(2, 4)", "(2, 1, 4)"]),
        ((Q, Q, V), {"key_mask": MASK.to("meta")}, ["key_mask", "on meta", "on cpu"]),
        ((Q, Q, V), {"log_decay": G[..., :3]}, ["log_decay", "(2, 3, 4)", "(2, 3, 3)"]),
        ((Q, Q, V), {"log_decay": -0.5 * G}, ["log_decay", "<= 0", "0.5", "logsigmoid"]),
        ((Q, Q, V), {"log_decay": G, "causal": False}, ["log_decay", "causal=True"]),
        ((Q, Q, V), {"log_decay": G.to("meta")}, ["log_decay", "meta", "cpu"]),
        (
            (Q, Q, V),
            {"log_decay": G.to("meta"), "key_mask": MASK},
            ["log_decay", "meta", "cpu"],
        ),
        ((Q, Q, V), {"return_state": True, "causal": False}, ["state", "causal=True"]),
        ((Q, Q, V), {"state": torch.ones(2, 3, 6, 5)}, ["state", "AttentionState", "Tensor"]),
        ((Q, Q, V), broken("S", lambda x: x[:1]), ["state.S", "(2, 3, 6, 5)", "(1, 3, 6, 5)"]),
        ((Q, Q, V), broken("S", lambda x: x[..., :4]), ["state", "(2, 3, 6, 5)", "(2, 3, 6, 4)"]),
        ((Q, Q, V), broken("z", lambda x: x[..., :4]), ["state", "(2, 3, 6)", "(2, 3, 4)"]),
        (
            (Q, Q, V),
            {**broken("z", lambda x: x[..., :4]), "rotary": Rotary(6)},
            ["state", "(2, 3, 6)", "(2, 3, 4)"],
        ),
        ((Q, Q, V), broken("stabilizer", lambda x: x[:, :1]), ["state", "(2, 3)", "(2, 1)"]),
        ((Q, Q, V), broken("position", lambda x: x[:1]), ["state", "(2,)", "(1,)"]),
        ((Q, Q, V), broken("position", lambda x: x.float()), ["state", "int", "float32"]),
        ((Q, Q, V), broken("S", lambda x: x.to("meta")), ["state", "meta", "cpu"]),
        ((Q, Q, V), broken("stabilizer", lambda x: x.to("meta")), ["state", "meta", "cpu"]),
        ((Q, Q, V), {"positions": -3}, ["positions", "-3", "count from 0"]),
        ((Q, Q, V), {"positions": torch.arange(4.0)}, ["positions", "float32", "int64"]),
        ((Q, Q, V), {"positions": torch.arange(3)}, ["positions", "(4,)", "(3,)"]),
        ((Q, Q, V), {"key_positions": -1, "causal": False}, ["positions", "-1", "from 0"]),
    ],
)
def test_bad_input_is_refused(args, options, words):
    with pytest.raises(ValueError) as refusal:
        linear_attention(*args, **options)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_forward_pass_on_the_meta_device_gives_shapes():
    q, v = Q.to("meta"), V.to("meta")
    out, state = linear_attention(
        q, q, v, rotary=Rotary(6), log_decay=G.to("meta"), return_state=True
    )
    assert out.shape == V.shape and out.device.type == "meta"
    assert state.S.shape == (2, 3, 6, 5)


@pytest.mark.parametrize("backend", ["reference", "chunked", "recurrent"])
@pytest.mark.parametrize("rotary", [None, Rotary(2)])
@pytest.mark.parametrize("level", [-22.0, -25.0, -29.0, -31.0, -200.0])
def test_gradients_through_the_smallest_denominators(level, rotary, backend):
    """The inverse of such a denominator is a number in float32, its square is not."""
    for length in (1, 2, 5):
        q = torch.full((1, 1, length, 2), level, requires_grad=True)
        k = torch.full((1, 1, length, 2), level, requires_grad=True)
        out = linear_attention(q, k, torch.ones(1, 1, length, 2), rotary=rotary, backend=backend)
        grads = torch.autograd.grad(out.sum(), (q, k))
        assert all(g.isfinite().all() for g in grads)
        if length == 1:  # with one key the output is its value, whatever the query
            assert all(g.abs().max() < 1e-3 for g in grads)


@pytest.mark.parametrize("seed", [3, 8, 23])
@pytest.mark.parametrize("scale", [1.5, 2.0, 3.0])
def test_far_apart_features_keep_their_kernel_in_float32(scale, seed):
    """The largest features of q and k lie far apart: the floor must be below their products."""
    phi = make_feature_map("favor+", 64, features=64, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, 1, 40, 64, dtype=torch.float64, generator=generator) * s
        for s in (scale, scale, 1.0)
    )
    got = linear_attention(q.float(), k.float(), v.float(), feature_map=phi)
    want = linear_attention(q, k, v, feature_map=phi.double())
    assert (got.double() - want).abs().max() < 2e-4


@pytest.mark.parametrize("forget", [-float("inf"), -60.0])
def test_a_forgotten_loud_key_does_not_press_on_later_ones(forget):
    phi = make_feature_map("favor+", 64, features=64, seed=1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 40, 64, generator=generator) * s for s in (0.5, 0.5, 1.0))
    k[0, 0, 0] = phi.projection[0] / phi.scale  # a log feature of about 30
    decay = torch.full((1, 1, 40), -0.01)
    decay[0, 0, 1] = forget
    options = {"feature_map": phi, "return_state": True}
    got, state = linear_attention(q, k, v, log_decay=decay, **options)
    q, k, v, decay = (x[:, :, 1:] for x in (q, k, v, decay.clamp(min=-1.0)))
    want, fresh = linear_attention(q, k, v, log_decay=decay, **options)
    torch.testing.assert_close(got[:, :, 1:], want, atol=1e-5, rtol=0)
    torch.testing.assert_close(state.stabilizer, fresh.stabilizer, atol=1e-4, rtol=0)


def test_a_new_state_shares_no_memory_with_the_old_one():
    x = torch.randn(2, 2, 3, 4)
    _, state = linear_attention(x, x, x, return_state=True)
    _, after = linear_attention(
        x[:, :, :0], x[:, :, :0], x[:, :, :0], state=state, return_state=True
    )
    kept = [part.clone() for part in state]
    for part in after[:4]:  # the fifth is a constant, 0: no layer made it
        part.add_(1)  # raises where one number stands for all rows
    assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))
