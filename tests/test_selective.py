"""Selective rotation: against a loop and against fixed RoPE, far out, padded, packed, streamed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from judge import error, phi, turn
from torch import Tensor

from linear_rope import Config, LanguageModel, Rotary, linear_attention
from linear_rope.rotary import PAIRINGS
from linear_rope.selective import GivenRotation, SelectiveRotation, SelectiveState

DIM, HEADS, PAIRS = 12, 2, 3
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full rank, bias": {"rank": None, "bias": True},
    "gate a head, bias": {"gate": "head", "bias": True, "rank": 5},
    "gate a pair, full rank": {"gate": "pair", "rank": None},
    "random features": {"temperature": "random-features", "theta": 0.7, "temperature_max": 2.0},
    "one tap, short base": {"kernel": 1, "theta": 100.0, "gate": "pair", "rank": 2},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
PI = Fraction(314159265358979323846264338327950288419716939937510, 10**50)


def make(kind: str, dtype: torch.dtype = torch.float64) -> SelectiveRotation:
    """With large random parameters, so that angles pass a turn within some tokens."""
    module = SelectiveRotation(DIM, HEADS, PAIRS, **KINDS[kind])
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module.to(dtype)


def inputs(batch: int = 2, time: int = 11, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, time, DIM, generator=generator, dtype=torch.float64)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def loop(kind: str, module: SelectiveRotation, x: Tensor) -> Tensor:
    """Phases of one row (time, dim), as (head, time, pairs), number by number."""
    options, p = KINDS[kind], dict(module.named_parameters())
    kernel, width = options.get("kernel", 4), 2 * PAIRS
    numbers: list[Tensor] = []  # (head, pairs) a token
    out, phase = [], torch.zeros(HEADS, PAIRS, dtype=torch.float64)
    for token in x:
        slices = [token[6 * h : 6 * h + 6] for h in range(HEADS)]
        slices = [s / (s.pow(2).sum() + 1e-6).sqrt() for s in slices]
        unit = torch.cat(slices)
        if "full" in p:
            rows = []
            for h in range(HEADS):
                columns = p["full"][h] / p["full"][h].pow(2).sum(0).sqrt()
                rows.append(p["scale"][h] * (slices[h] @ columns))
            numbers.append(torch.stack(rows))
        else:
            numbers.append((p["up"] @ (p["down"] @ unit)).view(HEADS, PAIRS))
        filters = p["convolution.weight"].view(HEADS, PAIRS, kernel)
        step = sum(
            filters[..., kernel - 1 - j] * numbers[-1 - j] for j in range(min(kernel, len(numbers)))
        )
        if "beta" in p:
            step = step + p["beta"].exp()
        if "gate_up" in p:
            inner = p["gate_down"] @ unit if "gate_down" in p else unit
            gate = 1 / (1 + (-(p["gate_up"] @ inner + p["gate_bias"])).exp())
            step = step * gate.view(HEADS, -1)
        if kind == "random features":
            t = [j * 0.7 * math.pi / (PAIRS - 1) for j in range(PAIRS)]
            raw = [math.sqrt((1 - math.cos(a)) / (1 + math.cos(a))) for a in t]
            temperature = [2.0 * r / raw[-1] for r in raw]
        else:
            base = options.get("theta", 500000.0)
            temperature = [base ** (-2 * j / width) for j in range(PAIRS)]
        phase = phase + step * torch.tensor(temperature, dtype=torch.float64)
        out.append(phase)
    return torch.stack(out, 1) if out else x.new_zeros(HEADS, 0, PAIRS)


def grads(module: SelectiveRotation, cos: Tensor, sin: Tensor, x: Tensor) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    a, b = (torch.randn(cos.shape, generator=g, dtype=torch.float64) for _ in range(2))
    return list(torch.autograd.grad((cos * a + sin * b).sum(), [x, *module.parameters()]))


@every_kind
@pytest.mark.parametrize("time", [0, 1, 3, 30])
def test_tables_and_gradients_are_those_of_the_loop(kind: str, time: int) -> None:
    module, x = make(kind), inputs(time=time).requires_grad_()
    cos, sin = module(x)
    phase = torch.stack([loop(kind, module, row) for row in x])
    close(cos, phase.cos())
    close(sin, phase.sin())
    if time:
        want = grads(module, phase.cos(), phase.sin(), x)
        for one, other in zip(grads(module, cos, sin, x), want, strict=True):
            assert error(one, other) < 1e-12


@every_kind
def test_gradcheck_through_both_states(kind: str) -> None:
    module, x = make(kind), inputs(1, 4).requires_grad_()
    state = SelectiveState(
        torch.rand(1, HEADS, PAIRS, dtype=torch.float64).mul(6).requires_grad_(),
        torch.randn(1, module.kernel - 1, 6, dtype=torch.float64).requires_grad_(),
    )
    mask = torch.tensor([[True, False, True, True]])

    def call(*tensors: Tensor) -> Any:
        start = SelectiveState(tensors[1], tensors[2])
        cos, sin, after = module(tensors[0], key_mask=mask, state=start, return_state=True)
        return cos, sin, after.phase.cos(), after.recent

    # The fast mode: one random direction an input.
    assert torch.autograd.gradcheck(call, (x, *state, *module.parameters()), fast_mode=True)


def constant(base: float = 10000.0, pairs: int = 8) -> SelectiveRotation:
    """Increments of exp(0) = 1, whatever the input."""
    module = SelectiveRotation(DIM, HEADS, pairs, bias=True, theta=base)
    torch.nn.init.zeros_(module.up)
    return module


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_constant_increments_are_fixed_rope(pairing: str) -> None:
    cos, sin = constant()(inputs(time=300))
    want_cos, want_sin = Rotary(16).tables(torch.arange(1, 301), torch.float64)
    close(cos, want_cos.expand_as(cos))
    close(sin, want_sin.expand_as(sin))
    q, k, v = (torch.randn(2, HEADS, 300, 16, dtype=torch.float64) for _ in range(3))
    got = linear_attention(q, k, v, rotary=GivenRotation(cos, sin, pairing))
    close(got, linear_attention(q, k, v, rotary=Rotary(16, pairing=pairing)), 1e-10)
    # A gate of one half turns half as far.
    module = SelectiveRotation(DIM, HEADS, 8, bias=True, theta=10000.0, gate="head")
    torch.nn.init.zeros_(module.up)
    torch.nn.init.zeros_(module.gate_up)
    half = module(inputs(time=300))[0]
    close(half[:, :, 1::2], want_cos[:150].expand_as(half[:, :, 1::2]))


def test_it_starts_near_fixed_rope_with_bias_and_near_none_without() -> None:
    x, positions = inputs(time=100), torch.arange(1, 101)
    with torch.no_grad():
        cos, sin = SelectiveRotation(DIM, HEADS, 8, bias=True)(x)
        still = SelectiveRotation(DIM, HEADS, 8)(x)[1]
    want_cos, want_sin = Rotary(16, base=500000.0).tables(positions, torch.float64)
    assert 0 < float((cos - want_cos).abs().max()) < 0.1
    assert float((sin - want_sin).abs().max()) < 0.1
    assert 0 < float(still.abs().max()) < 0.1


def test_it_starts_as_its_authors_do_if_told_to() -> None:
    """Also in a model that draws all parameters anew, where the convolution is a part by itself."""
    scaling = "selective:convolution=normal"
    config = Config(vocab_size=5, dim=64, heads=2, layers=1, rotary_scaling=scaling)
    model, again = LanguageModel(config), LanguageModel(config)
    again.initialize(3)
    model.initialize(3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    drawn = [
        rotation.convolution.weight
        for rotation in (SelectiveRotation(512, 4, 64, convolution="normal"),)
    ]
    drawn += [
        part.convolution.weight for part in model.modules() if isinstance(part, SelectiveRotation)
    ]
    assert len(drawn) == 2
    for weight in drawn:
        assert 0.015 < float(weight.detach().std()) < 0.025
        assert abs(float(weight[:, -1].detach().mean())) < 0.02  # not the identity plus noise


def angle_of(cos: Tensor, sin: Tensor) -> list[float]:
    return torch.atan2(sin, cos).flatten().tolist()


def off(got: float, want: Fraction) -> float:
    """Distance of two angles on the circle."""
    turns = (Fraction(got) - want) / (2 * PI)
    return abs(float((turns - round(turns)) * 2 * PI))


def test_a_million_tokens_do_not_wear_out_the_phase() -> None:
    module = SelectiveRotation(2, 1, 2, rank=1, kernel=1, bias=True)
    torch.nn.init.zeros_(module.up)
    module.beta.data.fill_(0.3)
    increments = module.beta.detach().double().exp()[0] * module.temperatures()
    x = torch.zeros(1, 1_000_000, 2, dtype=torch.float64)
    with torch.no_grad():
        cos, sin, state = module(x, return_state=True)
        pieces = None
        for part in x.split(5000, dim=1):
            _, _, pieces = module(part, state=pieces, return_state=True)
    assert pieces is not None
    for j, increment in enumerate(increments.tolist()):
        want = Fraction(increment) * 1_000_000
        for phases in (state.phase, pieces.phase):
            assert 0 <= float(phases[0, 0, j]) <= 2 * math.pi
            assert off(float(phases[0, 0, j]), want) < 1e-9
        got = angle_of(cos[0, 0, -1, j], sin[0, 0, -1, j])[0]
        assert off(got, want) < 1e-9


def test_large_increments_wrap() -> None:
    module = constant(pairs=1)
    module.beta.data.fill_(math.log(1e6))
    increment = float(module.beta.detach()[0, 0].double().exp())
    cos, sin = module(inputs(1, 500))
    for t in (1, 7, 499):
        got = angle_of(cos[0, 0, t - 1], sin[0, 0, t - 1])[0]
        assert off(got, Fraction(increment) * t) < 1e-7


MASKS = {
    "left": torch.arange(11) >= 4,
    "right": torch.arange(11) < 7,
    "middle": torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1]).bool(),
    "none real": torch.zeros(11, dtype=torch.bool),
}


@every_kind
@pytest.mark.parametrize("side", MASKS)
def test_pads_advance_nothing(kind: str, side: str) -> None:
    module, real, x = make(kind), MASKS[side], inputs()
    mask = torch.stack([torch.ones(11, dtype=torch.bool), real])
    x[1, ~real] = 1e3
    x.requires_grad_()
    cos, sin, state = module(x, key_mask=mask, return_state=True)
    want_cos, want_sin, alone = module(x[1:, real], return_state=True)
    close(cos[1:, :, real], want_cos)
    close(sin[1:, :, real], want_sin)
    close(cos[:1], module(x[:1])[0])
    close(state.index_select(torch.tensor([1])).phase, alone.phase)
    close(state.recent[1:], alone.recent)
    gradient = torch.autograd.grad(cos[1].square().sum(), x)[0]
    assert not gradient[1, ~real].any()


@every_kind
def test_the_parts_equal_the_whole(kind: str) -> None:
    module, x = make(kind), inputs().requires_grad_()
    cos, sin, want = module(x, return_state=True)
    for cuts in ([4, 7], [1] * 11, [0, 3, 0, 8]):
        state, parts = None, []
        for part in x.split(cuts, dim=1):
            *tables, state = module(part, state=state, return_state=True)
            parts.append(torch.stack(tables))
        both = torch.cat(parts, dim=3)
        close(both, torch.stack([cos, sin]))
        assert state is not None
        close(state.phase, want.phase)
        close(state.recent, want.recent)
        for one, other in zip(
            grads(module, *both.unbind(0), x), grads(module, *module(x), x), strict=True
        ):
            assert error(one, other) < 1e-12


IDS = torch.tensor([[4, 4, 4, 1, 1, 7, 7, 7, 7, 7, 7], [2, 3, 3, 3, 3, 3, 3, 3, 3, 9, 9]])


@every_kind
@pytest.mark.parametrize("padded", [False, True])
def test_documents_start_again(kind: str, padded: bool) -> None:
    module, x = make(kind), inputs().requires_grad_()
    real = MASKS["middle"] if padded else torch.ones(11, dtype=torch.bool)
    *_, past = module(inputs(time=6, seed=1), return_state=True)
    cos, sin, state = module(
        x,
        segment_ids=IDS,
        key_mask=real.expand(2, 11) if padded else None,
        state=past,
        return_state=True,
    )
    for row in range(2):
        documents = IDS[row].unique_consecutive().tolist()
        for i, document in enumerate(documents):
            of = (IDS[row] == document) & real
            start = past.index_select(torch.tensor([row])) if i == 0 else None
            want_cos, want_sin, after = module(x[row : row + 1, of], state=start, return_state=True)
            close(cos[row : row + 1, :, of], want_cos)
            close(sin[row : row + 1, :, of], want_sin)
            if i == len(documents) - 1:
                close(state.phase[row : row + 1], after.phase)
                close(state.recent[row : row + 1], after.recent)
        last = (IDS[row] == documents[-1]) & real
        gradient = torch.autograd.grad(sin[row][:, last].sum(), x, retain_graph=True)[0]
        assert float(gradient[row, ~last].abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_reaches_neither_angles_nor_parameters(dtype: torch.dtype) -> None:
    module = make("gate a head, bias", torch.float32)
    x = inputs(time=2000).to(dtype)
    want_cos, want_sin = module(x.float())
    low = make("gate a head, bias", torch.float32).to(dtype)
    assert all(parameter.dtype == torch.float32 for parameter in low.parameters())
    assert torch.equal(low.up, module.up)
    cos, sin, state = low(x, return_state=True)
    assert torch.equal(cos, want_cos) and torch.equal(sin, want_sin)
    assert (cos.dtype, state.phase.dtype, state.recent.dtype) == (
        torch.float32,
        torch.float64,
        torch.float32,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x.float())[0], want_cos)
    # Increments are float32 and their sum is not: the error does not grow as one in float32 would.
    exact = make("gate a head, bias")(x.double())[0]
    assert error(cos, exact) < 1e-3


def test_query_heads_share_the_angles_of_their_key_head() -> None:
    """Eq. 19 with differences of phases for differences of positions, weight by weight."""
    module = make("plain")
    cos, sin = module(inputs(time=9))
    phases = torch.atan2(sin, cos)
    q = torch.randn(2, 4, 9, 6, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 9, 6, dtype=torch.float64) for _ in range(2))
    got = linear_attention(q, k, v, rotary=GivenRotation(cos, sin))
    fq, fk = phi("elu+1", q), phi("elu+1", k)
    for b, h, m in [(0, 0, 8), (0, 3, 5), (1, 1, 0), (1, 2, 7)]:
        above, below = torch.zeros(6, dtype=torch.float64), 0.0
        for n in range(m + 1):
            angle = phases[b, h // 2, m] - phases[b, h // 2, n]
            for j in range(PAIRS):
                query, key = fq[b, h, m, 2 * j : 2 * j + 2], fk[b, h // 2, n, 2 * j : 2 * j + 2]
                turned = turn(query, angle[j].view(1), base=1.0)  # R(angle) of one pair
                above = above + (turned.flatten() @ key) * v[b, h // 2, n]
                below = below + float(query @ key)
        close(got[b, h, m], above / below, 1e-10)


def test_reset_repeats_with_a_generator_and_names_are_stable() -> None:
    one = SelectiveRotation(DIM, HEADS, PAIRS, gate="pair", bias=True)
    two = SelectiveRotation(DIM, HEADS, PAIRS, gate="pair", bias=True)
    assert not torch.equal(one.up, two.up)
    for module in (one, two):
        module.beta.data.fill_(3.0)
        module.reset_parameters(torch.Generator().manual_seed(7))
    assert set(one.state_dict()) == {
        "down", "up", "convolution.weight", "beta", "gate_down", "gate_up", "gate_bias",
    }  # fmt: skip
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name])
    wide = SelectiveRotation(512, HEADS, PAIRS)
    assert 0.018 < float(wide.down.detach().std()) < 0.022
    assert set(SelectiveRotation(DIM, HEADS, PAIRS, rank=None).state_dict()) == {
        "full", "scale", "convolution.weight",
    }  # fmt: skip


def test_an_input_of_zeros_has_tables_and_finite_gradients() -> None:
    module, x = make("gate a pair, full rank"), torch.zeros(1, 5, DIM).double().requires_grad_()
    cos, sin = module(x)
    assert torch.equal(cos, torch.ones_like(cos))
    for gradient in grads(module, cos, sin, x):
        assert gradient.isfinite().all()


def test_a_state_is_saved_reordered_and_keeps_its_phase() -> None:
    module = make("plain", torch.float32)
    *_, state = module(inputs().float(), return_state=True)
    copy = state.clone()
    module(inputs().float(), state=state, return_state=True)
    assert all(torch.equal(a, b) for a, b in zip(state, copy, strict=True))
    file = io.BytesIO()
    torch.save(state.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    rows = torch.tensor([1, 1, 0])
    assert torch.equal(loaded.index_select(rows).phase, state.phase[rows])
    low = state.to(torch.bfloat16)
    assert torch.equal(low.phase, state.phase) and low.recent.dtype == torch.bfloat16
    for part in state:
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


X = torch.zeros(2, 5, DIM)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SelectiveRotation(DIM, HEADS, 0), "pairs=0 must be at least 1"),
        (lambda: SelectiveRotation(DIM, HEADS, 2, rank=0), "rank=0"),
        (lambda: SelectiveRotation(DIM, 5, 2), "heads=5 does not divide dim=12"),
        (lambda: SelectiveRotation(DIM, HEADS, 2, gate="no"), "gate='no' is unknown"),
        (lambda: SelectiveRotation(DIM, HEADS, 2, temperature="x"), "temperature='x' is unknown"),
        (lambda: SelectiveRotation(DIM, HEADS, 2, convolution="x"), "convolution='x' is unknown"),
        (lambda: SelectiveRotation(DIM, HEADS, 2, theta=0.5), "theta=0.5 does not fit"),
        (
            lambda: SelectiveRotation(DIM, HEADS, 2, temperature="random-features", theta=2.0),
            "theta=2.0 does not fit",
        ),
        (
            lambda: SelectiveRotation(DIM, HEADS, 1, temperature="random-features"),
            "needs 2 pairs",
        ),
        (lambda: SelectiveRotation(DIM, HEADS, 2, temperature_max=0.0), "temperature_max=0.0"),
        (lambda: make("plain")(X[..., :5]), r"x must be .* \(batch, time, 12\)"),
        (lambda: make("plain")(X.long()), "x must be floating-point"),
        (lambda: make("plain")(X, key_mask=torch.ones(2, 5)), "key_mask must be bool"),
        (lambda: make("plain")(X, segment_ids=torch.zeros(2, 4).long()), "segment_ids must be"),
        (lambda: make("plain")(X, state=X), "state must be the SelectiveState .* got Tensor"),
        (
            lambda: make("plain")(X, state=make("plain")(X[:1], return_state=True)[2]),
            r"got phases of shape \(1, 2, 3\)",
        ),
        (
            lambda: make("plain")(
                X, state=SelectiveState(torch.zeros(2, 2, 3), torch.zeros(2, 3, 6))
            ),
            "phase must be float64",
        ),
        (
            lambda: GivenRotation(torch.ones(1, 2, 5, 3), torch.ones(1, 2, 5, 3))(
                torch.ones(1, 3, 5, 6)
            ),
            r"x of shape \(1, 3, 5, 6\) does not fit tables",
        ),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
