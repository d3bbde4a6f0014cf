"""Fused forms: feature map, rotation, product and division in one pass, against the judge."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import judge
import pytest
import torch
from forms import BACKENDS
from torch import Tensor

from linear_rope import Rotary
from linear_rope.causal import FUSED, blocks
from linear_rope.elementwise import elu_plus_one, relu, write_features, write_gradient
from linear_rope.feature_base import log_floor

FORMS = [name for name in BACKENDS if name in FUSED]
EPS = 1e-3

# A gradient in 16 bits comes from an output in 16 bits.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 6e-3,
}


class Case(NamedTuple):
    """One choice of everything; see CHOICES."""

    dtype: torch.dtype
    phi: str
    rotation: str  # "none", or pairing and the share of the features that turns
    denominator: str
    decay: str
    documents: str  # a name of BEGINNINGS
    state: bool
    final: bool  # whether the states after the last token get a gradient
    groups: int  # query heads a key head
    time: int
    chunk: int
    layout: str
    wide: bool


CHOICES: dict[str, list[Any]] = {
    "dtype": list(TOLERANCE),
    "phi": ["none", "elu+1", "relu"],
    "rotation": ["none", "interleaved 1", "half 1", "interleaved 0.5", "half 0.3", "a row its own"],
    "denominator": ["unrotated", "rotated", "none"],
    "decay": ["none", "mild", "strong"],
    "documents": ["none", "scattered"],
    "state": [False, True],
    "final": [False, True],
    "groups": [1, 3],
    "time": [1, 5, 63, 64, 97, 150],
    "chunk": [0, 1, 16, 50],
    "layout": ["plain", "heads inside", "every other", "expanded"],
    "wide": [False, True],
}


def every_pair(seed: int = 0) -> list[Case]:
    """Cases in which any two choices of two different fields meet."""
    rng, names = random.Random(seed), list(CHOICES)
    missing = {
        (a, x, b, y)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for x in range(len(CHOICES[a]))
        for y in range(len(CHOICES[b]))
    }
    cases = []
    while missing:
        drafts = []
        for _ in range(60):
            draft = {name: rng.randrange(len(CHOICES[name])) for name in names}
            draft |= dict(zip(*[iter(rng.choice(sorted(missing)))] * 2, strict=True))
            met = {
                (a, draft[a], b, draft[b]) for i, a in enumerate(names) for b in names[i + 1 :]
            } & missing
            drafts.append((len(met), draft, met))
        _, draft, met = max(drafts, key=lambda x: x[0])
        missing -= met
        cases.append(Case(**{name: CHOICES[name][at] for name, at in draft.items()}))
    return cases


BATCH, KEYS, WIDTH, VALUES = 2, 2, 20, 7

# Where documents begin in either row, seen from chunks of 16 tokens in blocks of two.
BEGINNINGS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "none": ((), ()),
    "nowhere": ((), ()),  # the same, said in so many words
    "scattered": ((0, 3, 4, 40, 96), ()),
    "first tokens": ((16, 32, 80), (64,)),
    "last tokens": ((15, 63), (31, 95)),
    "several in a chunk": ((33, 34, 40, 47), (40,)),
    "each chunk": (range(7, 97, 16), range(0, 97, 16)),
    "each token": (range(97), (1, 96)),
    "every other chunk": (range(3, 97, 32), range(20, 97, 32)),
    "one block": ((), (50,)),
}


def drawn(case: Case, seed: int = 0) -> dict[str, Tensor | None]:
    """q, k, v, g, S0, z0, fresh, at in float64, with what 16 bits cannot hold rounded away."""
    draw = functools.partial(
        torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    heads, time = KEYS * case.groups, case.time
    q, k = draw(BATCH, heads, time, WIDTH), draw(BATCH, KEYS, time, WIDTH)
    if case.phi == "none":
        q, k = q.abs() + 0.1, k.abs() + 0.1  # features are not negative
    rest = {
        "v": draw(BATCH, KEYS, time, VALUES),
        "g": -0.3 * draw(BATCH, KEYS, time).square(),
        "S0": draw(BATCH, KEYS, WIDTH, VALUES),
        "z0": draw(BATCH, KEYS, WIDTH).abs() + 1.0,
    }
    if case.layout == "expanded":  # one head's keys, and one row's values, for all
        k, rest["v"] = k[:, :1].expand_as(k), rest["v"][:1].expand_as(rest["v"])
    if case.decay == "strong":  # what counts are small differences of large sums
        tokens = torch.arange(time)
        rest["g"] = (
            rest["g"].masked_fill(tokens % 5 == 3, -50.0).masked_fill(tokens % 11 == 7, -1e3)
        )
    fresh = torch.zeros(BATCH, time, dtype=torch.bool)
    for row, tokens in zip(fresh, BEGINNINGS[case.documents], strict=True):
        row[[t for t in tokens if t < time]] = True
    at = torch.arange(time)
    if case.rotation == "a row its own":
        at = torch.stack([at, 3 * at + 2])
    return {
        **{name: x.to(case.dtype).double() for name, x in {"q": q, "k": k, "v": rest["v"]}.items()},
        "g": rest["g"].float().double() if case.decay != "none" else None,
        "S0": rest["S0"].float().double() if case.state else None,
        "z0": rest["z0"].float().double() if case.state else None,
        "fresh": None if case.documents == "none" else fresh,
        "at": at,
    }


def rotation(case: Case) -> Rotary | None:
    if case.rotation == "none":
        return None
    pairing, _, share = case.rotation.partition(" ")
    if case.rotation == "a row its own":
        pairing, share = "interleaved", "1"
    return Rotary(WIDTH, base=50.0, fraction=float(share), pairing=pairing)


def judged(case: Case, x: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, S, z and the denominators, by the judge's lines, in float64."""
    q, k, v = x["q"], x["k"], x["v"]
    below = [y if case.phi == "none" else judge.phi(case.phi, y) for y in (q, k)]
    above, rotary = below, rotation(case)
    if rotary is not None:
        options = (rotary.base, rotary.rotated_width, rotary.pairing)
        above = [judge.turn(f, x["at"], *options) for f in below]
    if case.denominator == "rotated":
        below = above
    g = torch.zeros_like(v[..., 0]) if x["g"] is None else x["g"]
    left = judge.left_over(g, k)  # (batch, key head, T, 1 + T)
    if x["fresh"] is not None:
        document = x["fresh"].cumsum(-1)
        before = torch.cat([torch.zeros_like(document[:, :1]), document], 1)
        left = left * (document[:, :, None] == before[:, None, :])[:, None]

    def product(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        last, each = left[:, :, -1], left.repeat_interleave(case.groups, 1)
        final = (k * last[..., 1:, None]).mT @ v
        k, v = (y.repeat_interleave(case.groups, 1) for y in (k, v))
        out = ((q @ k.mT) * each[..., 1:]) @ v
        if state is not None:
            out = out + each[..., :1] * (q @ state.repeat_interleave(case.groups, 1))
            final = final + last[..., :1, None] * state
        return out, final

    num, S = product(*above, v, x["S0"])
    if case.denominator == "none":
        return num, S, torch.zeros_like(S[..., 0]), torch.ones_like(num[..., :1])
    z0 = None if x["z0"] is None else x["z0"].unsqueeze(-1)
    den, z = product(*below, torch.ones_like(v[..., :1]), z0)
    return num / den, S, z.squeeze(-1), den


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x  # "expanded" was made so


def poison(dtype: torch.dtype) -> None:
    """Fill memory with NaN and free it, so that what is never written is likely to be NaN."""
    junk = [torch.full((n,), torch.nan, dtype=dtype) for n in (10**3, 10**4, 10**5) * 4]
    del junk


def fused(form: str, case: Case, x: dict[str, Any], **options: Any) -> tuple[Tensor, ...]:
    cos, sin = None, None
    if (rotary := rotation(case)) is not None:
        cos, sin = rotary.tables(x["at"], torch.promote_types(case.dtype, torch.float32))
    poison(case.dtype)
    return FUSED[form](
        **{name: x[name] for name in ("q", "k", "v", "g", "S0", "z0", "fresh")},
        **{"cos": cos, "sin": sin, "phi": case.phi, "eps": EPS, "denominator": case.denominator},
        pairing="interleaved" if rotary is None else rotary.pairing,
        wide=case.wide,
        chunk=case.chunk,
        **options,
    )


LEAVES = ("q", "k", "v", "g", "S0", "z0")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number, case", list(enumerate(every_pair())))
def test_any_two_choices_agree_with_the_judge(form: str, number: int, case: Case) -> None:
    agrees_with_the_judge(form, number, case)


def agrees_with_the_judge(form: str, number: int, case: Case) -> None:
    """Outputs, states, and the gradients of everything."""
    exact = drawn(case, seed=number)
    work = torch.promote_types(case.dtype, torch.float32)
    given = dict(exact)
    for name in LEAVES:
        if (y := exact[name]) is not None:
            given[name] = laid_out(y.to(case.dtype if name in "qkv" else work), case.layout)
    leaves = [name for name in LEAVES if exact[name] is not None]
    for x in (exact, given):
        x.update({name: x[name].detach().requires_grad_() for name in leaves})
    *want, den = judged(case, exact)
    got = fused(form, case, given)

    # Denominators of rotated features pass through 0, where no two ways agree.
    keep = den.abs() > 0.2 * den.abs().amax() if case.denominator == "rotated" else den == den
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(number))
    cotangents = [draw(y.shape).double() for y in want]
    cotangents[0] = laid_out(cotangents[0] * keep, ["heads inside", "every other", ""][number % 3])
    if number % 4 == 3 and case.denominator != "rotated":
        cotangents[0] = cotangents[0][:, :1, :, :1].expand(want[0].shape)
    if not case.final:
        cotangents[1:] = [torch.zeros_like(c) for c in cotangents[1:]]
    both = []
    for x, results in ((given, got), (exact, want)):
        pulled = [c.to(y.dtype) for c, y in zip(cotangents, results, strict=True)]
        used = [i for i, y in enumerate(results) if y.requires_grad and (case.final or i == 0)]
        grads = torch.autograd.grad(
            [results[i] for i in used],
            [x[name] for name in leaves],
            [pulled[i] for i in used],
            materialize_grads=True,
        )
        both.append([results[0] * keep, *results[1:], *grads])
    assert got[0].dtype == (work if case.wide or case.denominator == "none" else case.dtype)
    assert got[1].dtype == got[2].dtype == work
    off = {
        name: judge.error(a, b)
        for name, a, b in zip(("out", "S", "z", *leaves), *both, strict=True)
    }
    assert max(off.values()) <= TOLERANCE[case.dtype], off


# A case to start from, for what is to be looked at alone.
PLAIN = Case(
    torch.float64, "elu+1", "interleaved 1", "unrotated", "none", "none", False, False, 1, 97, 16,
    "plain", False,
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", ["none", "mild"])
@pytest.mark.parametrize("rotation", ["interleaved 1", "none"])
@pytest.mark.parametrize("documents", BEGINNINGS)
def test_documents_begin_anywhere(
    form: str, documents: str, rotation: str, decay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks with a boundary are gone about otherwise than those around them in their block."""
    case = PLAIN._replace(rotation=rotation, decay=decay, documents=documents, groups=3)
    monkeypatch.setattr(blocks, "NUMBERS", BATCH * KEYS * case.groups * 16 * WIDTH * 2)
    monkeypatch.setattr(blocks, "SPARSE", 0)
    for number, denominator in enumerate(CHOICES["denominator"]):
        for state in (False, True):
            agrees_with_the_judge(
                form, number, case._replace(denominator=denominator, state=state, final=state)
            )


@pytest.mark.parametrize("form", FORMS)
def test_results_lie_in_memory_as_the_inputs_do(form: str) -> None:
    """Heads of a projection lie inside time, and merging them back needs no copy."""
    x = drawn(PLAIN)
    for inside in (True, False):
        q, k, v = (laid_out(x[n], "heads inside" if inside else "plain") for n in "qkv")
        leaves = [y.detach().requires_grad_() for y in (q, k, v)]
        out, *_ = fused(form, PLAIN, {**x, **dict(zip("qkv", leaves, strict=True))})
        for y in (out, *torch.autograd.grad(out.sum(), leaves)):
            assert (y.transpose(1, 2) if inside else y).is_contiguous()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("denominator", ["unrotated", "rotated", "none"])
def test_without_a_token_states_pass_through(form: str, denominator: str) -> None:
    case = PLAIN._replace(time=0, state=True, final=True, denominator=denominator)
    for batch in (BATCH, 0):
        x = {n: y if y is None or n == "at" else y[:batch] for n, y in drawn(case).items()}
        x.update({n: x[n].detach().requires_grad_() for n in LEAVES if x[n] is not None})
        out, S, z = fused(form, case, x)
        assert out.shape == (batch, KEYS, 0, VALUES)
        assert torch.equal(S, x["S0"])
        wanted = [x[n] for n in ("q", "S0", "z0")]
        *_, dS, dz = torch.autograd.grad(
            (3 * S).sum() + (2 * z).sum(), wanted, materialize_grads=True
        )
        assert (dS == 3).all() and (dz == (0 if denominator == "none" else 2)).all()
        assert torch.equal(z, torch.zeros_like(z) if denominator == "none" else x["z0"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("denominator", ["unrotated", "none"])
def test_documents_know_nothing_of_each_other(form: str, denominator: str) -> None:
    """Not by a bit, even beside huge numbers; nor does a gradient cross their limits."""
    case = PLAIN._replace(decay="mild", documents="scattered", denominator=denominator, state=True)
    for dtype in (torch.float64, torch.float32):
        case = case._replace(dtype=dtype)
        x = {
            n: y if y is None or n in ("at", "fresh") else y.to(dtype)
            for n, y in drawn(case).items()
        }
        x.update({n: x[n].detach().requires_grad_() for n in LEAVES})
        out, S, z = fused(form, case, x)
        loud = dict(x)
        loud["k"], loud["v"] = x["k"].detach().clone(), x["v"].detach().clone()
        loud["k"][0, :, :40] = 1e3
        loud["v"][0, :, :40] = 1e18
        loud["g"] = x["g"].detach().clone()
        loud["g"][0, :, :41] = -900.0  # the first token's own does not count either
        again, S2, z2 = fused(form, case, loud)
        assert torch.equal(again[0, :, 40:], out[0, :, 40:])
        assert torch.equal(S2, S) and torch.equal(z2, z)
        *early, dS = torch.autograd.grad(out[0, :, 40:].sum(), [x[n] for n in (*"kvg", "S0")])
        assert all((d[0, :, :40] == 0).all() for d in early) and (dS == 0).all()
        assert (early[2][:, :, :41] == 0).all() and (early[2][0, :, 41:96] != 0).any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_floor_of_the_features_is_flat(form: str, dtype: torch.dtype) -> None:
    """elu+1 is at least exp(-30) (float64: exp(-300)); where it is flat there is no gradient."""
    low = log_floor(torch.promote_types(dtype, torch.float32))
    case = PLAIN._replace(dtype=dtype, rotation="none", wide=True)
    x = drawn(case)
    q = torch.full_like(x["q"], 1.5 * low).to(dtype).requires_grad_()
    out, _, z = fused(form, case, {**x, "q": q, "k": q, "v": x["v"].to(dtype)})
    count = torch.arange(1, case.time + 1)[:, None]
    mean = x["v"].to(dtype).double().cumsum(2) / count
    assert judge.error(out, mean) <= {torch.float64: 1e-12}.get(dtype, 2e-6)
    assert torch.allclose(
        z.double(), torch.tensor(case.time).double() * torch.tensor(low).exp().double()
    )
    (dq,) = torch.autograd.grad(out.square().sum(), q)
    assert (dq == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_what_float16_cannot_hold_is_its_largest_number_without_a_gradient(form: str) -> None:
    case = PLAIN._replace(dtype=torch.float16, time=5)
    x = drawn(case)
    # Weights of opposite features exceed 1 by orders of magnitude (see the README).
    q = torch.tensor([0.0, -6.9] * (WIDTH // 2)).expand(BATCH, KEYS, 5, WIDTH)
    v = torch.full((BATCH, KEYS, 5, VALUES), 6e4)
    v[..., 1] = 1.0
    leaves = [y.half().requires_grad_() for y in (q, q.flip(-1), v)]
    out, *_ = fused(form, case, {**x, **dict(zip("qkv", leaves, strict=True))})
    over = out.abs() == torch.finfo(torch.float16).max
    assert out.isfinite().all() and over.any() and not over[..., 1].any()
    (dv,) = torch.autograd.grad(out.float()[..., 0].sum(), leaves[2])
    assert (dv[..., 0][:, :, -1] == 0).all() == bool(over[:, :, -1, 0].all())
    grads = torch.autograd.grad(
        fused(form, case, {**x, **dict(zip("qkv", leaves, strict=True))})[0], leaves, over.half()
    )
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("form", FORMS)
def test_where_there_is_nothing_to_divide_by_the_output_is_zero(form: str) -> None:
    case = PLAIN._replace(phi="none", decay="mild")
    x = drawn(case)
    k = x["k"].clone()
    k[:, :, :10] = 0.0
    leaves = [y.detach().requires_grad_() for y in (x["q"], k, x["v"], x["g"])]
    out, *_ = fused(form, case, {**x, **dict(zip("qkvg", leaves, strict=True))})
    assert (out[:, :, :10] == 0).all() and (out[:, :, 10:] != 0).any()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :, :10] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_rotated_denominator_keeps_its_distance_from_zero(form: str) -> None:
    """Below 1e-6 it counts as that, with its sign, and has no gradient."""
    case = PLAIN._replace(phi="none", denominator="rotated", state=True)
    x = drawn(case)
    x["q"], x["S0"], x["z0"] = 1e-9 * x["q"].sign() * x["q"], 1e3 * x["S0"], -x["z0"]
    leaves = [x[n].detach().requires_grad_() for n in LEAVES if n != "g"]
    names = [n for n in LEAVES if n != "g"]
    got, *_ = fused(form, case, {**x, **dict(zip(names, leaves, strict=True))})
    num, *_, ones = judged(case._replace(denominator="none"), dict(x))
    *_, den = judged(case, dict(x))
    assert (den.abs() < 1e-6).all() and (den > 0).any() and (den < 0).any() and (ones == 1).all()
    assert judge.error(got, num / den.sign() / 1e-6) <= 1e-11
    cotangent = torch.randn_like(got)
    grads = torch.autograd.grad(got, leaves, cotangent)
    exact = [y.detach().requires_grad_() for y in leaves]
    judging = {**x, **dict(zip(names, exact, strict=True))}
    num, *_ = judged(case._replace(denominator="none"), judging)
    want = torch.autograd.grad(
        num, exact, cotangent / den.detach().sign() / 1e-6, materialize_grads=True
    )
    assert max(map(judge.error, grads, want)) <= 1e-11


# ---- What torch offers around an operator -------------------------------------------------------


def everything(dtype: torch.dtype = torch.float64) -> tuple[Case, dict[str, Any]]:
    case = PLAIN._replace(
        decay="mild", documents="scattered", state=True, groups=3, time=40, dtype=dtype,
        rotation="a row its own",
    )  # fmt: skip
    return case, drawn(case)


def as_function(form: str, case: Case, x: dict[str, Any]) -> Any:
    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        return fused(form, case, {**x, **dict(zip(LEAVES, leaves, strict=True))})

    return run


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("denominator", ["unrotated", "rotated", "none"])
def test_gradcheck_of_everything_at_once(form: str, denominator: str) -> None:
    case, x = everything()
    run = as_function(form, case._replace(denominator=denominator), x)
    leaves = [x[name].requires_grad_() for name in LEAVES]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", ["shared", "their own"])
@pytest.mark.parametrize("denominator", ["unrotated", "none"])
def test_vmap_of_grad(form: str, rows: str, denominator: str) -> None:
    """Each row by itself, with a table for all of them or one each."""
    case, x = everything()
    case = case._replace(denominator=denominator)
    table = x["at"] if rows == "their own" else x["at"][0]
    cos, sin = Rotary(WIDTH, base=50.0).tables(table, torch.float64)
    leaves = [x[name] for name in LEAVES]
    cotangent = torch.randn(BATCH, KEYS * case.groups, case.time, VALUES, dtype=torch.float64)

    def loss(q, k, v, g, S0, z0, fresh, cos, sin, c):
        out, S, z = FUSED[form](
            q[None], k[None], v[None], g=g[None], S0=S0[None], z0=z0[None], fresh=fresh[None],
            cos=cos, sin=sin, phi="elu+1", denominator=denominator, chunk=16,
        )  # fmt: skip
        return (out[0] * c).sum() + S.square().sum() + z.sum()

    own = 0 if rows == "their own" else None
    in_dims = (0,) * 7 + (own, own, 0)
    got = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(6))), in_dims=in_dims)(
        *leaves, x["fresh"], cos, sin, cotangent
    )
    for i in range(BATCH):
        row = [y[i].clone().requires_grad_() for y in leaves]
        tables = [t[i] if own == 0 else t for t in (cos, sin)]
        want = torch.autograd.grad(
            loss(*row, x["fresh"][i], *tables, cotangent[i]), row, materialize_grads=True
        )
        for a, b in zip(got, want, strict=True):
            assert judge.error(a[i], b) <= 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_several_cotangents_at_once(form: str) -> None:
    """Backward over a batch of gradients: the forward pass had another batch."""
    case, x = everything()
    leaves = [x[name].requires_grad_() for name in LEAVES]
    out, *_ = as_function(form, case, x)(*leaves)
    many = torch.randn(5, *out.shape, dtype=torch.float64)
    got = torch.autograd.grad(out, leaves, many, is_grads_batched=True, retain_graph=True)
    for i in range(5):
        want = torch.autograd.grad(out, leaves, many[i], retain_graph=True)
        assert max(judge.error(a[i], b) for a, b in zip(got, want, strict=True)) <= 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trains", [True, False])
def test_it_compiles_into_one_graph(form: str, trains: bool) -> None:
    _, x = everything(torch.float32)
    x = {n: y.float() if n in LEAVES else y for n, y in x.items()}
    leaves = [
        laid_out(x[n], "heads inside" if n in "qkv" else "").requires_grad_(trains) for n in LEAVES
    ]
    cos, sin = Rotary(WIDTH).tables(x["at"])

    def run(q, k, v, g, S0, z0):
        return FUSED[form](
            q, k, v, g=g, S0=S0, z0=z0, fresh=x["fresh"], cos=cos, sin=sin, phi="relu", eps=EPS,
            denominator="unrotated",
        )  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager_decomp_partition")
    want, got = run(*leaves), compiled(*leaves)
    assert all(a.stride() == b.stride() for a, b in zip(got, want, strict=True))
    assert max(map(judge.error, got, want)) <= 1e-6
    if trains:
        grads = [torch.autograd.grad(sum(y.square().sum() for y in r), leaves) for r in (got, want)]
        assert max(map(judge.error, *grads)) <= 1e-5
    torch._dynamo.reset()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("denominator", ["unrotated", "none"])
def test_the_operators_keep_torchs_contract(form: str, denominator: str) -> None:
    """What compilers are told of shapes and strides is what the kernels return."""
    _, x = everything()
    tables = Rotary(WIDTH).tables(x["at"], torch.float64)
    inputs = [laid_out(x[n], "heads inside") for n in "qkv"] + [*tables, x["g"], x["fresh"]]
    options = ("elu+1", 0.0, "interleaved", denominator)
    operators = torch.ops.linear_rope
    forward, backward = (getattr(operators, f"{form}_{way}") for way in ("forward", "backward"))
    args = (*inputs, x["S0"], x["z0"], *options, False, 16)
    check = functools.partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    check(forward, args)
    out, den, S, z, *starts = forward(*args)
    for want_dg in (True, False):
        given = (torch.ones_like(out), torch.ones_like(S), torch.ones_like(z))
        check(backward, (*inputs, out, den, *starts, *given, *options, 16, want_dg))


@pytest.mark.parametrize("form", FORMS)
def test_shapes_without_values(form: str) -> None:
    case, x = everything()
    x = {n: None if y is None else y.to("meta") for n, y in x.items()}
    leaves = [x[name].requires_grad_() for name in LEAVES]
    out, S, z = as_function(form, case, x)(*leaves)
    assert out.shape == (BATCH, 3 * KEYS, 40, VALUES) and z.shape == (BATCH, KEYS, WIDTH)
    grads = torch.autograd.grad(out.sum() + S.sum(), leaves, materialize_grads=True)
    assert [g.shape for g in grads] == [x.shape for x in leaves]


@pytest.mark.parametrize("form", FORMS)
def test_a_second_derivative_is_refused(form: str) -> None:
    case, x = everything()
    leaves = [x[name].requires_grad_() for name in LEAVES]
    out, *_ = as_function(form, case, x)(*leaves)
    (dq,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r'differentiable once.*backend="reference"'):
        dq.sum().backward()


# ---- The parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", ["none", "elu+1", "relu"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_features_and_their_gradients_in_given_memory(phi: str, dtype: torch.dtype) -> None:
    work = torch.promote_types(dtype, torch.float32)
    edges = torch.tensor([0.0, -0.0, 1e-4, -1e-4, -29.0, -31.0, -299.0, -301.0, 80.0, -1e4, 1e4])
    x = torch.cat([edges, 3 * torch.randn(20_000)]).to(dtype).requires_grad_()
    want = {"none": lambda y: y, "elu+1": elu_plus_one, "relu": lambda y: relu(y, EPS)}[phi]
    f = want(x.to(work))
    cotangent = torch.randn_like(f)
    (dx,) = torch.autograd.grad(f, x, cotangent)
    features, spare = (torch.full_like(f, torch.nan) for _ in range(2))
    write_features(phi, EPS, x.detach(), features, spare)
    assert torch.equal(features, f.detach())
    got = torch.full_like(dx, torch.nan)
    write_gradient(phi, EPS, features, cotangent.clone(), got)
    torch.testing.assert_close(got, dx, rtol=2e-6 if work == dtype else 1e-2, atol=0)


@pytest.mark.parametrize("time", [0, 1, 63, 64, 65, 640, 1000, 100_000])
def test_forward_and_backward_cut_time_alike(time: int) -> None:
    """Backward may see another batch (vmap); the number of blocks says it all."""
    for batch, heads, features, values, chunk in (
        (1, 1, 8, 8, 0), (3, 8, 64, 64, 0), (64, 8, 64, 32, 0), (2, 4, 300, 5, 17), (0, 2, 4, 4, 7),
    ):  # fmt: skip
        q = torch.empty(batch, heads, time, features, device="meta")
        v = torch.empty(batch, heads, time, values, device="meta")
        plan = blocks.plan_of(q, q, v, chunk)
        cut = plan.blocks(time)
        assert len(cut) == plan.total and [b.number for b in cut] == list(range(len(cut)))
        assert [b.start for b in cut[1:]] == [b.start + b.chunks * b.length for b in cut[:-1]]
        assert sum(b.chunks * b.length for b in cut) == time
        for other in (1, 1000):
            wide = torch.empty(other, heads, time, features, device="meta")
            again = blocks.plan_of(wide, wide, v, chunk, plan.total)
            assert again.blocks(time) == cut
        # States that are kept: a sixteenth of the output and the gradients, and two.
        kept = plan.total * batch * heads * features * values
        assert kept <= batch * heads * (2 * features * values + time * (features + values) / 8)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_any_size_give_the_same(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, x = everything()
    leaves = [x[name].requires_grad_() for name in LEAVES]
    results = []
    for numbers, sparse in ((1, 0), (4000, 0), (20_000, 0), (1, 16), (10**7, 16)):
        monkeypatch.setattr(blocks, "NUMBERS", numbers)
        monkeypatch.setattr(blocks, "SPARSE", sparse)
        made = as_function(form, case, x)(*leaves)
        grads = torch.autograd.grad(sum(y.square().sum() for y in made), leaves)
        results.append([*made, *grads])
    for other in results[1:]:
        assert max(map(judge.error, other, results[0])) <= 1e-12
