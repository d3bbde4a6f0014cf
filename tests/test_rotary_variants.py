"""Rules for longer sequences and other rotations: values by hand, streaming, bad input."""

from __future__ import annotations

import math
import pickle
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from linear_rope import (
    Config,
    Encoder,
    LanguageModel,
    Rotary,
    RotaryLinearAttention,
    linear_attention,
)
from linear_rope import SoftmaxAttention as Softmax
from linear_rope.positions import resolve_positions
from linear_rope.rotary_variants import AxialRotary, LearnedRotary, grid_positions, make_rotary
from linear_rope.scaling import (
    SCALINGS,
    Dynamic,
    Linear,
    Llama3,
    Ntk,
    NtkByParts,
    Yarn,
    make_scaling,
)
from linear_rope.xpos import XPos

RULES = {
    "linear": Linear(4),
    "ntk": Ntk(4),
    "dynamic": Dynamic(2, 4),
    "ntk-by-parts": NtkByParts(4, 16),
    "yarn": Yarn(4, 16),
    "llama3": Llama3(8, 16),
}
STREAMABLE = {
    **{name: Rotary(8, scaling=rule) for name, rule in RULES.items() if name != "dynamic"},
    "partial": Rotary(8, fraction=0.5, scaling=Linear(2)),
    "half": Rotary(8, pairing="half", scaling=Ntk(2)),
    "learned": LearnedRotary(8),
    "xpos": XPos(8),
    "xpos, fast": XPos(8, scale_base=0.5),  # a piece is a few tokens long
    "xpos, partial, half": XPos(8, fraction=0.5, pairing="half", scale_base=0.5),
}


def heads(batch=2, head=2, time=12, width=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, head, time, width)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in "qkv"
    )


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert got.shape == want.shape
    assert float((got.double() - want.double()).detach().abs().max()) <= tolerance


def theta(j: int, d: int, base: float = 10000.0) -> float:
    return base ** (-2 * j / d)


# ---- Reference values, from the formulas


def by_parts(j: int, d: int, s: float, trained: int, fast: float, slow: float) -> float:
    """The ramp of the authors' code: in the index, between whole pairs."""

    def pair(turns: float) -> float:
        return d * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), d - 1)
    interpolate = min(max((j - low) / (high - low), 0.0), 1.0)
    return theta(j, d) * (1 - interpolate) + theta(j, d) / s * interpolate


def in_turns(j: int, d: int, s: float, trained: int, low: float, high: float, base: float) -> float:
    """The ramp in turns over the trained length, wavelength by wavelength, as Llama 3.1 has it."""
    t = theta(j, d, base)
    wavelength = 2 * math.pi / t
    if wavelength > trained / low:
        return t / s
    if wavelength < trained / high:
        return t
    smooth = (trained / wavelength - low) / (high - low)
    return (1 - smooth) * t / s + smooth * t


def test_frequencies_of_every_rule_are_those_of_its_formula():
    d, pairs = 64, range(32)
    want = {
        Linear(8): [theta(j, d) / 8 for j in pairs],
        Ntk(8): [theta(j, d, 10000 * 8 ** (64 / 62)) for j in pairs],
        NtkByParts(4, 2048): [by_parts(j, d, 4, 2048, 32, 1) for j in pairs],
        Yarn(16, 4096, beta_fast=20): [by_parts(j, d, 16, 4096, 20, 1) for j in pairs],
        NtkByParts(4, 2048, ramp="turns"): [in_turns(j, d, 4, 2048, 1, 32, 10000.0) for j in pairs],
        Dynamic(8, 64): [theta(j, d) for j in pairs],  # a length that was trained
    }
    for rule, expected in want.items():
        got = Rotary(d, scaling=rule).frequencies()
        assert got.tolist() == pytest.approx(expected, rel=1e-12), rule
    # Llama 3.1: d = 128, base 500000, s = 8, L_0 = 8192
    got = Rotary(128, 500000.0, scaling=Llama3(8, 8192)).frequencies()
    want_llama = [in_turns(j, 128, 8, 8192, 1, 4, 500000.0) for j in range(64)]
    assert got.tolist() == pytest.approx(want_llama, rel=1e-12)
    assert (
        sum(a == b for a, b in zip(got.tolist(), Rotary(128, 5e5).frequencies(), strict=True)) > 20
    )
    # The slowest pair of the NTK base is slowed by exactly s, the fastest not at all.
    ntk = Rotary(d, scaling=Ntk(8)).frequencies()
    assert float(ntk[-1] * 8) == pytest.approx(theta(31, d), rel=1e-12) and float(ntk[0]) == 1.0


def test_dynamic_bases_and_nothing_remembered():
    rule = Dynamic(factor=2, original_length=64)
    bases = [rule.scaled_base(10000.0, 64, length) for length in (32, 64, 128, 256)]
    assert bases == pytest.approx([10000, 10000, 31082.24, 74534.83], abs=5e-3)
    rotary = Rotary(64, scaling=rule)
    x = heads(1, 1, 256, 64)[0]
    for length in (256, 32, 128):
        base = rule.scaled_base(10000.0, 64, length)
        close(
            rotary(x[:, :, :length], torch.arange(length)),
            Rotary(64, base)(x[:, :, :length], torch.arange(length)),
        )
    # The length is the call's own: where it starts does not matter, nor do other rows.
    shifted, plain = (rotary.angles(torch.arange(128.0) + m) for m in (1000, 0))
    close(shifted - shifted[:1], plain, 1e-10)
    rows = torch.stack([torch.arange(128.0), torch.arange(128.0).clamp(max=40)])
    assert torch.equal(rotary.angles(rows)[0], plain)
    close(rotary.angles(rows)[1], Rotary(64).angles(rows[1]))


def test_dynamic_refuses_states_documents_and_two_clocks():
    q, k, v = heads()
    rotary, ids = Rotary(8, scaling=Dynamic(2, 4)), torch.zeros(2, 12, dtype=torch.int64)
    _, state = linear_attention(q, k, v, return_state=True)
    why = "angles depend on the length of the whole sequence.*already in the sum cannot be changed"
    for options in ({"state": state}, {"return_state": True}):
        with pytest.raises(ValueError, match=why):
            linear_attention(q, k, v, rotary=rotary, **options)
    with pytest.raises(ValueError, match="one sequence a row"):
        linear_attention(q, k, v, rotary=rotary, segment_ids=ids)
    with pytest.raises(ValueError, match="same positions"):
        linear_attention(q, k[:, :, :5], v[:, :, :5], rotary=rotary, causal=False)
    text = "dynamic:factor=2,original_length=4"
    layers = (
        RotaryLinearAttention(16, 2, rotary_scaling=text),
        Softmax(16, 2, rotary_scaling=text),
    )
    for layer in layers:
        with pytest.raises(ValueError, match=why):
            layer(torch.randn(1, 6, 16), return_state=True)
    model = LanguageModel(Config(dim=16, layers=1, heads=2, rotary_scaling=text))
    assert model(torch.zeros(1, 9, dtype=torch.int64)).isfinite().all()
    with pytest.raises(ValueError, match=why):
        model.generate(torch.zeros(1, 3, dtype=torch.int64), 2)


def test_yarn_multiplies_once():
    assert Yarn(4, 2048).multiplier == pytest.approx(1.138629, abs=5e-7)
    assert Yarn(128, 2048).multiplier == pytest.approx(1.485203, abs=5e-7)
    assert Yarn(1, 2048).multiplier == 1.0 and NtkByParts(4, 2048).multiplier == 1.0
    x, at = heads(time=20)[0], torch.arange(20)
    plain, yarn = Rotary(8, scaling=NtkByParts(4, 16)), Rotary(8, scaling=Yarn(4, 16))
    close(yarn(x, at), plain(x, at) * (0.1 * math.log(4) + 1))
    cos, sin = yarn.tables(at, torch.float64)
    close(cos.square() + sin.square(), torch.full_like(cos, yarn.multiplier**2))
    close(Rotary(8, scaling=Yarn(4, 16, attention_factor=1))(x, at), plain(x, at))


@pytest.mark.parametrize(
    ("options", "power"),
    [
        ({}, 2),
        ({"denominator": "none"}, 2),
        ({"denominator": "rotated", "backend": "reference"}, 0),
        ({"output_norm": True}, 0),
    ],
)
def test_yarn_temperature_is_a_gain_of_the_numerator(options, power):
    q, k, v = heads(time=6)
    plain, yarn = Rotary(8, scaling=NtkByParts(4, 16)), Rotary(8, scaling=Yarn(4, 16))
    want = linear_attention(q, k, v, rotary=plain, **options) * yarn.scaling.multiplier**power
    got = linear_attention(q, k, v, rotary=yarn, **options)
    close(got / want, torch.ones_like(want), 1e-5 if options.get("output_norm") else 1e-10)


# ---- What a rotation is


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_norms_are_kept_and_products_depend_on_the_distance(name, pairing):
    x, y, _ = heads(1, 1, 10)
    rotary, at = Rotary(8, pairing=pairing, scaling=RULES[name]), torch.arange(10)
    close(rotary(x, at).norm(dim=-1), x.norm(dim=-1) * rotary.multiplier)
    here, there = (rotary(x, at + m) @ rotary(y, at + m).mT for m in (0, 1000))
    close(here, there, 1e-10)


def test_values_stay_hashable_comparable_picklable_and_free_of_tables():
    for rule in RULES.values():
        rotary = Rotary(8, scaling=rule)
        assert hash(rotary) == hash(Rotary(8, scaling=type(rule)(**asdict(rule))))
        assert pickle.loads(pickle.dumps(rotary)) == rotary
        assert not [x for x in vars(rotary).values() if isinstance(x, Tensor)]
    assert Rotary(8, scaling=Linear(2)) != Rotary(8, scaling=Linear(3))
    assert hash(XPos(8)) != hash(XPos(8, gamma=0.5))
    assert set(RULES) == set(SCALINGS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", STREAMABLE)
def test_low_precision_rounds_once(name, dtype):
    rotary, at = STREAMABLE[name], torch.arange(5000, 5012)
    x = heads(dtype=dtype)[0]
    torch.set_default_dtype(dtype)
    got = rotary(x, at).detach()
    torch.set_default_dtype(torch.float32)
    assert got.dtype == dtype
    want = rotary(x.double(), at).detach()
    assert float(((got - want).abs() / (want.abs() + 1)).max()) < torch.finfo(dtype).eps


# ---- Streaming, sharing of heads, documents


@pytest.mark.parametrize("split", [[12], [5, 7], [1] * 12, [4, 1, 1, 6]])
@pytest.mark.parametrize("name", STREAMABLE)
def test_split_equals_whole(name, split):
    q, k, v = heads(head=4)
    k, v = k[:, :2], v[:, :2]
    decay = torch.nn.functional.logsigmoid(heads(seed=1)[0][..., 0])
    for options in (
        {},
        {"denominator": "rotated"},
        {"denominator": "none"},
        {"log_decay": decay},
        {"positions": torch.tensor([[3], [10**6]])},
    ):
        if "log_decay" in options:
            options = {**options, "feature_map": torch.exp}
        start = options.pop("positions", None)
        whole, last = linear_attention(
            q, k, v, rotary=STREAMABLE[name], positions=start, return_state=True, **options
        )
        state, outs, begin = None, [], 0
        for length in split:
            part = slice(begin, begin + length)
            if "log_decay" in options:
                options["log_decay"] = decay[:, :, part]
            out, state = linear_attention(
                q[:, :, part],
                k[:, :, part],
                v[:, :, part],
                rotary=STREAMABLE[name],
                positions=start if state is None else None,
                state=state,
                return_state=True,
                **options,
            )
            outs.append(out)
            begin += length
        close(torch.cat(outs, 2), whole, 1e-8)  # a rotated denominator comes near 0
        for a, b in zip(state, last, strict=True):
            close(a, b, 1e-10)


@pytest.mark.parametrize("name", STREAMABLE)
def test_documents_in_a_row_equal_documents_alone(name):
    q, k, v = heads(batch=1, time=17)
    lengths = [5, 1, 11]
    limits = torch.tensor([0, 5, 5, 6, 17])
    got, state = linear_attention(
        q, k, v, rotary=STREAMABLE[name], cu_seqlens=limits, return_state=True
    )
    alone = []
    for part in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True):
        out, last = linear_attention(*part, rotary=STREAMABLE[name], return_state=True)
        alone.append(out)
    close(got, torch.cat(alone, 2), 1e-11)
    for a, b in zip(state, last, strict=True):
        close(a, b, 1e-11)


# ---- xPos


def xpos_by_hand(q: Tensor, k: Tensor, v: Tensor, at: Tensor, rotary: XPos) -> Tensor:
    """elu+1 features; weights with their decay, pair by pair, from distances; quadratic."""
    phi_q, phi_k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    d, apart = rotary.width, (at[:, None] - at[None, :]).double()
    up = torch.zeros(*q.shape[:3], q.shape[2], dtype=torch.float64)
    down = up.clone()
    for j in range(d // 2):
        zeta = (2 * j / d + rotary.gamma) / (1 + rotary.gamma)
        fade = (zeta ** (apart.clamp(min=0) / rotary.scale_base)).tril()
        c, s = (apart * theta(j, d)).cos(), (apart * theta(j, d)).sin()
        (a, b), (x, y) = ((p[..., 2 * j], p[..., 2 * j + 1]) for p in (phi_q, phi_k))
        a, b, x, y = a[..., None], b[..., None], x[..., None, :], y[..., None, :]
        up += fade * (c * (a * x + b * y) + s * (b * x - a * y).neg())
        down += fade * (a * x + b * y)
    return up @ v / down.sum(-1, keepdim=True)


@pytest.mark.parametrize("rotary", [XPos(8), XPos(8, gamma=0.1, scale_base=0.7)])
def test_xpos_equals_its_definition(rotary):
    assert XPos(8).zeta().tolist() == pytest.approx([0.4 / 1.4, 0.65 / 1.4, 0.9 / 1.4, 1.15 / 1.4])
    assert XPos(8).reach == 3270 and XPos(8, scale_base=0.5).reach == 3
    q, k, v = heads(time=40)
    for at in (torch.arange(40), torch.arange(40) * 7 + 3, torch.arange(40) // 3 * 1000):
        got = linear_attention(q, k, v, rotary=rotary, positions=at)
        close(got, xpos_by_hand(q, k, v, at, rotary), 1e-10)


def test_xpos_fades_the_features_it_rotates_in_either_pairing():
    q, k, v = heads()
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # features 2j and 2j + 1 to j and j + 4
    half = XPos(8, pairing="half", scale_base=2.0)
    got = linear_attention(q[..., order], k[..., order], v, rotary=half)
    close(got, linear_attention(q, k, v, rotary=XPos(8, scale_base=2.0)))
    # Without a division, features add up: the first four turn and fade, the others do neither.
    part = XPos(8, fraction=0.5, scale_base=2.0)
    got = linear_attention(q, k, v, rotary=part, denominator="none")
    turned = linear_attention(
        q[..., :4], k[..., :4], v, rotary=XPos(4, scale_base=2.0), denominator="none"
    )
    close(got, turned + linear_attention(q[..., 4:], k[..., 4:], v, denominator="none"))


def test_xpos_far_out_in_float32_through_the_state_and_in_one_call():
    rotary = XPos(8)
    q, k, v = heads(batch=1, head=1, time=40, dtype=torch.float32)
    base = linear_attention(q.double(), k.double(), v.double(), rotary=rotary)
    far = linear_attention(q, k, v, rotary=rotary, positions=10**9)
    close(far, base, 2e-5)
    # 100 000 positions in one call: plain factors would reach e^245, beyond float32 and its zero.
    many = torch.ones(1, 1, 100_000, 8)
    out, state = linear_attention(many, many, many, rotary=rotary, return_state=True)
    assert out.isfinite().all() and state.S.isfinite().all() and state.z.min() > 0
    # Feature 0 of each key is 2; the state stands at the next token, one step beyond the last key.
    left = (0.4 / 1.4) ** (1 / 512)
    assert float(state.z[0, 0, 0]) == pytest.approx(2 * left / (1 - left), rel=1e-4)
    following = linear_attention(*heads(1, 1, 3, 8, torch.float32), rotary=rotary, state=state)
    assert following.isfinite().all()


def test_xpos_with_pads_jumps_and_rows_of_their_own():
    q, k, v = heads()
    rotary = XPos(8, scale_base=0.7)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :4], mask[1, 5:7] = False, False
    whole, last = linear_attention(q, k, v, rotary=rotary, key_mask=mask, return_state=True)
    junk = torch.where(mask, mask.cumsum(-1) - 1, 10**6)  # pads leave no trace, wherever they are
    got = linear_attention(q, k, v, rotary=rotary, key_mask=mask, positions=junk)
    real = mask[:, None, :, None]
    close(got * real, whole * real)
    for row in range(2):
        kept = [x[row : row + 1, :, mask[row]] for x in (q, k, v)]
        alone, state = linear_attention(*kept, rotary=rotary, return_state=True)
        close(whole[row : row + 1, :, mask[row]], alone)
        for a, b in zip(last.index_select(torch.tensor([row])), state, strict=True):
            close(a, b)
    # The state goes on where it stands, also after a jump.
    at = torch.cat([torch.arange(5), torch.arange(7) + 50_000])
    whole = linear_attention(q, k, v, rotary=rotary, positions=at)
    _, state = linear_attention(*(x[:, :, :5] for x in (q, k, v)), rotary=rotary, return_state=True)
    rest = linear_attention(
        *(x[:, :, 5:] for x in (q, k, v)), rotary=rotary, positions=50_000, state=state
    )
    close(rest, whole[:, :, 5:])


def test_xpos_gradients_flow_through_pieces_and_states():
    rotary = XPos(2, scale_base=0.5)  # pieces of 3
    q, k, v = (x.requires_grad_() for x in heads(1, 1, 5, 2))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, state = linear_attention(
            *(x[:, :, :4] for x in (q, k, v)), rotary=rotary, return_state=True
        )
        return torch.cat(
            [
                first,
                linear_attention(*(x[:, :, 4:] for x in (q, k, v)), rotary=rotary, state=state),
            ],
            dim=2,
        )

    assert torch.autograd.gradcheck(run, (q, k, v))


def test_xpos_refuses_what_it_cannot_do():
    q, k, v = heads()
    with pytest.raises(ValueError, match="needs causal=True"):
        linear_attention(q, k, v, rotary=XPos(8), causal=False)
    with pytest.raises(ValueError, match='needs rotate="after"'):
        linear_attention(q, k, v, rotary=XPos(8), rotate="before")
    for build in (
        lambda: RotaryLinearAttention(16, 2, rotary_scaling="xpos", causal=False),
        lambda: RotaryLinearAttention(16, 2, rotary_scaling="xpos", rotate="before"),
        lambda: Encoder(Config(dim=16, layers=1, heads=2, rotary_scaling="xpos")),
    ):
        with pytest.raises(ValueError, match="xPos needs"):
            build()
    with pytest.raises(ValueError, match="must not descend"):
        linear_attention(q, k, v, rotary=XPos(8), positions=torch.arange(12).flip(0))
    _, state = linear_attention(q, k, v, rotary=XPos(8), return_state=True)
    with pytest.raises(ValueError, match="before the state's"):
        linear_attention(q, k, v, rotary=XPos(8), state=state, positions=3)
    with pytest.raises(ValueError, match="needs linear attention"):
        Softmax(16, 2, rotary_scaling="xpos")
    for options in ({"gamma": 0.0}, {"scale_base": -1.0}, {"gamma": math.inf}):
        with pytest.raises(ValueError, match="positive number"):
            XPos(8, **options)


# ---- Learned frequencies


def test_learned_frequencies_start_fixed_learn_and_stay_wide():
    learned, at = LearnedRotary(8, scaling=Yarn(4, 16)), torch.arange(500, 512)
    q, k, v = heads()
    close(learned(q, at), Rotary(8, scaling=Yarn(4, 16))(q, at), 2e-4)  # float32 logarithms
    assert learned.log_frequencies.dtype == torch.float32
    linear_attention(q, k, v, rotary=learned).square().sum().backward()
    grad = learned.log_frequencies.grad
    assert grad is not None and (grad != 0).all() and grad.isfinite().all()
    wide = LearnedRotary(8).double()

    def run(log: Tensor) -> Tensor:
        return torch.func.functional_call(wide, {"log_frequencies": log}, (q, torch.arange(12)))

    assert torch.autograd.gradcheck(run, (wide.log_frequencies.detach().requires_grad_(),))
    before = learned.log_frequencies.detach().clone()
    for narrow in (learned.half(), learned.to(torch.bfloat16)):
        assert torch.equal(narrow.log_frequencies, before)
    assert learned(q.half(), at).dtype == torch.float16


def test_learned_frequencies_in_a_model():
    config = Config(dim=16, layers=2, heads=2, rotary_scaling="learned")
    model, tokens = LanguageModel(config), torch.arange(20)[None]
    names = [name for name, _ in model.named_parameters() if "frequencies" in name]
    assert names == [f"blocks.{i}.attention.rotary.log_frequencies" for i in range(2)]
    fixed = LanguageModel(Config(dim=16, layers=2, heads=2))
    model.initialize(3)
    fixed.initialize(3)
    close(model(tokens), fixed(tokens), 1e-5)
    with torch.device("meta"):
        built = LanguageModel(config)
    built = built.to_empty(device="cpu")
    built.load_state_dict(model.state_dict())
    assert torch.equal(built(tokens), model(tokens))
    built = built.to_empty(device="cpu")
    built.initialize(3)
    assert torch.equal(built(tokens), model(tokens))
    model(tokens).square().mean().backward()
    assert all((block.attention.rotary.log_frequencies.grad != 0).any() for block in model.blocks)


# ---- Axial positions


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_axial_turns_half_by_row_and_half_by_column(pairing):
    rotary, at = AxialRotary(8, 100.0, pairing=pairing), grid_positions(3, 5)
    assert at.tolist()[:6] == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4], [1, 0]]
    cos, _ = rotary.tables(at, torch.float64)
    for n, (row, column) in enumerate(at.tolist()):
        angles = [row * 1.0, row * 0.1, column * 1.0, column * 0.1]  # 100^(-2j/4)
        assert cos[n].tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-12)
    x, y, v = heads(time=15)
    close(rotary(x, at).norm(dim=-1), x.norm(dim=-1))
    here, there = (
        rotary(x, at + move) @ rotary(y, at + move).mT
        for move in (torch.tensor([0, 0]), torch.tensor([7, 30]))
    )
    close(here, there, 1e-11)
    assert not torch.allclose(rotary(x, at.flip(-1)), rotary(x, at))
    # Through the whole: a shift of the image changes nothing; a row may have its own grid.
    out = linear_attention(x, y, v, rotary=rotary, causal=False, positions=at)
    moved = at + torch.tensor([2, 9])
    close(linear_attention(x, y, v, rotary=rotary, causal=False, positions=moved), out, 1e-11)
    both = torch.stack([at, at.flip(0)])
    rows = linear_attention(x, y, v, rotary=rotary, causal=False, positions=both)
    close(rows[0], out[0])
    assert not torch.allclose(rows[1], out[1])
    # Cross-attention: keys with a grid of their own.
    cross = linear_attention(
        x[:, :, :4], y, v, rotary=rotary, causal=False, positions=at[:4], key_positions=at
    )
    close(cross, out[:, :, :4])


def test_axial_in_layers_and_an_encoder_and_what_it_refuses():
    at = grid_positions(2, 3)
    for layer in (
        RotaryLinearAttention(16, 2, causal=False, rotary_scaling="axial"),
        Softmax(16, 2, causal=False, rotary_scaling="axial"),
    ):
        x = torch.randn(2, 6, 16)
        close(layer(x, positions=at), layer(x, positions=at.expand(2, -1, -1) + 5), 1e-5)
        with pytest.raises(ValueError, match=r"\(time, 2\) = \(6, 2\)"):
            layer(x)
    encoder = Encoder(Config(dim=16, layers=2, heads=2, rotary_scaling="axial"))
    tokens = torch.arange(12).reshape(2, 6)
    close(encoder(tokens, positions=at), encoder(tokens, positions=at + 3), 1e-5)
    q, k, v = heads(time=6)
    with pytest.raises(ValueError, match="axial positions cannot take or return a state"):
        linear_attention(q, k, v, rotary=AxialRotary(8), positions=at, return_state=True)
    for wrong in (3, at[:, 0], at[:5], at.expand(3, -1, -1), torch.zeros((), dtype=torch.int64)):
        with pytest.raises(ValueError, match="positions of 2 axes"):
            resolve_positions(6, wrong, batch=2, axes=2)
    with pytest.raises(ValueError, match="must be integers"):
        resolve_positions(6, at.float(), axes=2)
    with pytest.raises(ValueError, match="must not be negative"):
        resolve_positions(6, at - 1, axes=2)
    with pytest.raises(ValueError, match="multiple of 4"):
        AxialRotary(6)
    with pytest.raises(ValueError, match="no dynamic scaling"):
        AxialRotary(8, scaling=Dynamic(2, 4))


# ---- By name


def test_rotations_by_name():
    made = make_rotary(8, 500.0, 0.5, "half", "yarn:factor=4, original_length=16")
    assert made == Rotary(8, 500.0, 0.5, "half", Yarn(4, 16))
    assert make_rotary(
        8, scaling="ntk-by-parts:factor=2.5,original_length=16,ramp=turns"
    ) == Rotary(8, scaling=NtkByParts(2.5, 16, ramp="turns"))
    assert make_rotary(8) == Rotary(8) and make_rotary(8, scaling=Ntk(2)).scaling == Ntk(2)
    assert make_rotary(8, scaling="xpos:scale_base=64") == XPos(8, scale_base=64)
    assert make_rotary(8, scaling="axial") == AxialRotary(8)
    assert isinstance(make_rotary(8, scaling="learned"), LearnedRotary)
    assert make_scaling("llama3", factor=8, original_length=8192) == Llama3(8, 8192)
    config = Config(dim=16, layers=1, heads=2, rotary_scaling="linear:factor=4")
    assert Config.from_dict(asdict(config)) == config and hash(config)
    for attention in ("linear", "softmax"):
        model = LanguageModel(Config(**{**asdict(config), "attention": attention}))
        assert model.blocks[0].attention.rotary.scaling == Linear(4)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("longer", "unknown; choose one of: linear, ntk, dynamic, .*xpos, axial, learned"),
        ("yarn:factor=4", "needs the option original_length"),
        ("linear:factor=4,speed=2", "does not know the option speed; its options are: factor"),
        ("axial:factor=4", "does not know the option factor; its options are: none"),
        ("linear:factor", "must be NAME or NAME:OPTION=VALUE"),
        ("linear:factor=2,factor=3", "each option once"),
        ("linear:factor=0.5", r"factor=0.5 must be a number at least 1"),
        ("linear:factor=nan", "factor=nan must be a number"),
        ("linear:factor=two", "factor='two' must be a number"),
        ("dynamic:factor=2,original_length=0", "original_length=0 must be an integer"),
        ("yarn:factor=2,original_length=9.5", "original_length=9.5 must be an integer"),
        ("yarn:factor=2,original_length=9,beta_fast=1", "beta_fast=1 must be a number above 1"),
        ("yarn:factor=2,original_length=9,ramp=up", "choose one of: index, turns"),
        ("yarn:factor=2,original_length=9,attention_factor=0", "attention_factor=0 must be"),
        ("llama3:factor=2,original_length=9,low_freq_factor=5", "high_freq_factor=4.0 must be"),
        (7, "must be a text"),
    ],
)
def test_bad_scalings_are_refused_by_name(scaling, message):
    with pytest.raises(ValueError, match=message):
        make_rotary(8, scaling=scaling)
    with pytest.raises(ValueError, match=message if isinstance(scaling, str) else "in a config"):
        Config(rotary_scaling=scaling)


def test_other_bad_input():
    with pytest.raises(ValueError, match="choose one of: linear, ntk"):
        make_scaling("longer")
    with pytest.raises(ValueError, match="must be a rule"):
        Rotary(8, scaling="yarn")
    with pytest.raises(ValueError, match="must exceed 1"):
        Rotary(8, base=1.0, scaling=Yarn(2, 16)).frequencies()
    with pytest.raises(ValueError, match="no dynamic scaling"):
        LearnedRotary(8, scaling=Dynamic(2, 16))
    with pytest.raises(ValueError, match="needs position='rotary'"):
        Config(position="none", rotary_scaling="xpos")
    with pytest.raises(ValueError, match="made for width 8"):
        LearnedRotary(8)(torch.randn(1, 1, 3, 6), torch.arange(3))
