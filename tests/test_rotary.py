"""The rotation: exact angles, the two pairings, positions in every form, and bad input."""

from __future__ import annotations

import math

import judge
import pytest
import torch

from linear_rope import Config, LanguageModel, Rotary, RotaryLinearAttention, rotate
from linear_rope.positions import resolve_positions
from linear_rope.rotary import PAIRINGS


def unit_vectors(length: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """First member of each pair 1, second 0: rotating them reads off cosines and sines."""
    x = torch.zeros(1, 1, length, width, dtype=dtype)
    x[..., 0::2] = 1
    return x


def exact_angles(length: int, width: int) -> torch.Tensor:
    theta = torch.tensor(
        [10000.0 ** (-2 * j / width) for j in range(width // 2)], dtype=torch.float64
    )
    return torch.arange(length, dtype=torch.float64)[:, None] * theta


def built(how: str) -> Rotary:
    if how == "default bfloat16":
        torch.set_default_dtype(torch.bfloat16)
    layer = RotaryLinearAttention(64, heads=2)
    torch.set_default_dtype(torch.float32)
    if how == "half":
        layer = layer.half()
    if how == "bfloat16":
        layer = layer.to(torch.bfloat16)
    assert layer.rotary is not None
    return layer.rotary


@pytest.mark.parametrize("how", ["as built", "half", "bfloat16", "default bfloat16"])
def test_angles_are_exact_whatever_the_dtype_of_the_module(how):
    rotary = built(how)
    for length in (2048, 4096):  # the longer one afterwards
        angles = exact_angles(length, 32)
        for dtype, tolerance in ((torch.float32, 2e-7), (torch.bfloat16, 4e-3)):
            out = rotary(unit_vectors(length, 32, dtype), torch.arange(length))[0, 0]
            assert out.dtype == dtype
            assert judge.error(out[:, 0::2], angles.cos()) <= tolerance
            assert judge.error(out[:, 1::2], angles.sin()) <= tolerance
    assert exact_angles(1858, 32)[1857, 1] == pytest.approx(1044.26784, abs=1e-5)
    at_1857 = rotary(unit_vectors(1, 32), torch.tensor([1857]))[0, 0, 0, 2]
    assert float(at_1857) == pytest.approx(0.306693, abs=1e-6)


def test_angles_are_exact_inside_a_default_dtype_and_autocast_and_far_out():
    rotary, position = Rotary(32), 10_000_019
    want = math.cos(position * 10000 ** (-2 * 3 / 32))
    torch.set_default_dtype(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = rotary(unit_vectors(1, 32), torch.tensor([position]))
    assert out.dtype == torch.float32
    assert float(out[0, 0, 0, 6]) == pytest.approx(want, abs=3e-7)


def test_nothing_goes_stale_between_calls_with_other_offsets_and_dtypes():
    rotary, x = Rotary(16), torch.randn(1, 1, 13, 16)
    head = x[:, :, :8]
    first = rotary(head, torch.arange(8))
    fifth = rotary(x[:, :, 5:13], torch.arange(5, 13))
    assert judge.error(fifth, rotary(x, torch.arange(13))[:, :, 5:]) <= 1e-6
    assert torch.equal(rotary(head, torch.arange(8)), first)
    at, shorter = torch.arange(2, 8), x[:, :, :6]
    assert judge.error(rotary(shorter, at), judge.turn(shorter, at)) <= 1e-6
    double = rotary(head.double(), torch.arange(8))
    assert double.dtype == torch.float64
    assert judge.error(double, judge.turn(head, torch.arange(8))) <= 1e-12


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("width, fraction, turned", [(2, 1, 2), (10, 0.7, 6), (64, 0.5, 32)])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_rotation_is_a_product_with_two_by_two_matrices(pairing, width, fraction, turned, base):
    rotary = Rotary(width, base, fraction, pairing)
    assert rotary.rotated_width == turned
    x = torch.randn(2, 3, 9, width, dtype=torch.float64)
    at = torch.randint(0, 5000, (2, 9))
    got = rotary(x, at)
    assert judge.error(got, judge.turn(x, at, base, turned, pairing)) <= 1e-12
    assert torch.equal(got[..., turned:], x[..., turned:])


def test_the_two_pairings_have_their_documented_values():
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    one = torch.tensor([1])
    for pairing, want in (
        ("interleaved", [-1.1426397, 1.9220756, 2.9598507, 4.0297995]),
        ("half", [-1.9841106, 1.9599007, 2.4623779, 4.0197997]),
    ):
        got = Rotary(4, pairing=pairing)(x, one)[0, 0, 0]
        assert judge.error(got, torch.tensor(want)) <= 1e-6


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 2e-15), (torch.float32, 1e-6)])
@pytest.mark.parametrize("seed", range(5))
def test_dot_products_depend_on_the_difference_of_positions_only(pairing, dtype, tolerance, seed):
    torch.manual_seed(seed)
    rotary = Rotary(16, pairing=pairing)
    x, y = torch.nn.functional.normalize(torch.randn(2, 1, 1, 1, 16, dtype=dtype), dim=-1)
    m, n = 3, 11

    def score(shift):
        return (rotary(x, torch.tensor([m + shift])) * rotary(y, torch.tensor([n + shift]))).sum()

    assert abs(float(score(7) - score(0))) <= tolerance
    assert abs(float(score(0) - (x * y).sum())) > 1e-3  # and it does depend on the difference


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotations_are_orthogonal_and_add_up(pairing):
    rotary, eye = Rotary(12, pairing=pairing), torch.eye(12, dtype=torch.float64)[None, None]

    def matrix(position):
        return rotary(eye, torch.full((12,), position))[0, 0]

    for position in (0, 1, 17, 4095):
        assert judge.error(matrix(position) @ matrix(position).T, eye[0, 0]) <= 1e-14
    assert torch.equal(matrix(0), eye[0, 0])
    assert judge.error(matrix(5) @ matrix(9), matrix(14)) <= 1e-14
    x = torch.randn(1, 1, 50, 12)
    got = rotary(x, torch.arange(50))
    assert judge.error(got.norm(dim=-1), x.norm(dim=-1)) <= 1e-6


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradients_views_empty_input_and_the_form_that_compiles(pairing, monkeypatch):
    rotary = Rotary(6, fraction=0.7, pairing=pairing)
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64).transpose(1, 2).requires_grad_()
    at = torch.arange(4, 9)
    assert torch.autograd.gradcheck(lambda x: rotary(x, at), x)
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    assert torch.equal(rotary(x, at), rotary(copy, at))
    assert torch.equal(x, copy)  # not in place
    assert rotary(torch.ones(2, 1, 0, 6), torch.arange(0)).shape == (2, 1, 0, 6)
    assert rotary(torch.ones(0, 1, 2, 6), torch.arange(2)).shape == (0, 1, 2, 6)
    want = rotary(x, at)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert judge.error(rotary(x, at), want) <= 1e-15


def test_rotate_with_tables_of_ones_own():
    angle = torch.tensor([[math.pi / 2]])
    out = rotate(torch.tensor([[3.0, 4.0, 5.0]]), angle.cos(), angle.sin())
    assert judge.error(out, torch.tensor([[-4.0, 3.0, 5.0]])) <= 1e-6


# ---- Positions ----------------------------------------------------------------------------------


def test_positions_in_every_form():
    def ids(*args, **options):
        return resolve_positions(*args, batch=2, **options).expand(2, -1).tolist()

    assert ids(3) == [[0, 1, 2]] * 2
    assert ids(3, 5) == ids(3, torch.tensor(5)) == [[5, 6, 7]] * 2
    assert ids(3, torch.tensor([[5], [0]])) == [[5, 6, 7], [0, 1, 2]]
    assert ids(3, torch.tensor([4, 4, 9], dtype=torch.int32)) == [[4, 4, 9]] * 2
    assert ids(2, torch.tensor([[4, 2], [0, 9]])) == [[4, 2], [0, 9]]
    assert ids(2, start=torch.tensor([3, 8])) == [[3, 4], [8, 9]]
    assert ids(2, 1, start=torch.tensor([3, 8])) == [[1, 2]] * 2
    assert ids(0) == [[], []]
    mask = torch.tensor([[0, 0, 1, 1], [1, 0, 1, 0]]).bool()
    assert ids(4, key_mask=mask) == [[0, 0, 0, 1], [0, 0, 1, 1]]
    assert ids(4, 7, key_mask=mask) == [[7, 7, 7, 8], [7, 7, 8, 8]]
    at = torch.tensor([8, 3, 5, 9])  # a pad's is that of the real token before it, or of the first
    assert ids(4, at, key_mask=mask) == [[5, 5, 5, 9], [8, 8, 5, 5]]
    assert ids(4, at, key_mask=mask & mask[:1]) == [[5, 5, 5, 9], [5, 5, 5, 5]]
    none = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    assert ids(4, at, key_mask=none) == [[8] * 4, [3] * 4]
    assert ids(4, at, key_mask=none, start=torch.tensor([7, 7])) == [[7] * 4, [3] * 4]


@pytest.mark.parametrize(
    "positions, words",
    [
        (-1, ["positions", "-1", "count from 0"]),
        (1.5, ["positions", "1.5", "integer"]),
        (True, ["positions", "True", "integer"]),
        (torch.arange(4.0), ["positions", "float32", "int64"]),
        (torch.ones(4, dtype=torch.bool), ["positions", "bool", "int64"]),
        (torch.tensor([0, 1, -3, 2]), ["positions", "-3", "from 0"]),
        (torch.arange(5), ["positions", "(5,)", "(time,) = (4,)"]),
        (torch.zeros(3, 4, dtype=torch.long), ["positions", "(3, 4)", "(2, 4)"]),
        (torch.zeros(3, 1, dtype=torch.long), ["positions", "(3, 1)", "(2, 1)"]),
        (torch.zeros(1, 2, 4, dtype=torch.long), ["positions", "(1, 2, 4)", "(2, 4)"]),
    ],
)
def test_bad_positions_are_refused(positions, words):
    with pytest.raises(ValueError) as refusal:
        resolve_positions(4, positions, batch=2)
    assert all(word in str(refusal.value) for word in words), refusal.value


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: Rotary(9), ["width=9", "even", "use 10"]),
        (lambda: Rotary(0), ["width=0", "even", "use 2"]),
        (lambda: Rotary(8, fraction=0.0), ["fraction=0.0", "(0, 1]", "none"]),
        (lambda: Rotary(8, fraction=0.2), ["fraction=0.2", "pair", "none"]),
        (lambda: Rotary(8, fraction=1.5), ["fraction=1.5", "(0, 1]"]),
        (lambda: Rotary(8, base=-1.0), ["base=-1.0", "positive", "10000"]),
        (lambda: Rotary(8, pairing="neox"), ["pairing='neox'", "interleaved, half"]),
        (lambda: Rotary(8)(torch.ones(1, 1, 2, 6), torch.arange(2)), ["width 6", "width 8"]),
        # elu+1 with an odd head width, FAVOR+ with an odd number of features
        (lambda: RotaryLinearAttention(130, 2), ["width=65", "even"]),
        (
            lambda: RotaryLinearAttention(96, 2, feature_map="favor+", features=185),
            ["width=185", "even", "use 186"],
        ),
        (
            lambda: LanguageModel(Config(dim=96, heads=2, feature_map="favor+", features=185)),
            ["185", "even"],
        ),
    ],
)
def test_bad_rotations_are_refused_at_once(build, words):
    with pytest.raises(ValueError) as refusal:
        build()
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_scaling_rule_that_is_not_offered_is_refused():
    with pytest.raises(ValueError, match=r"scaling='bigger' must be a rule"):
        Rotary(64, scaling="bigger")
    for build in (RotaryLinearAttention, lambda dim, **options: Config(dim=dim, **options)):
        with pytest.raises(ValueError, match=r"bigger.*linear.*ntk.*dynamic.*yarn.*llama3"):
            build(64, rotary_scaling="bigger:factor=4")


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("name", ["favor+", "favor+relu"])
def test_every_default_number_of_features_rotates(head_dim, name):
    layer = RotaryLinearAttention(head_dim, 1, feature_map=name)
    assert layer.rotary.width == layer.feature_map.feature_dim
    assert 0 <= layer.rotary.width - int(head_dim * math.log(head_dim)) <= 1
    assert layer(torch.randn(1, 3, head_dim)).isfinite().all()


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor([0.0, 0.5, 1.0]), r"positions must be integers.*float32"),
        (torch.arange(3).bfloat16(), r"positions must be integers.*bfloat16"),
        (torch.tensor([-1, 0, 1]), r"must not be negative, got -1"),
        (torch.arange(4), r"\(time,\) = \(3,\).*got \(4,\)"),
        (torch.tensor(3), r"one integer a token.*time = 3, got shape \(\)"),
        (torch.tensor([[3]]), r"one integer a token.*time = 3, got shape \(1, 1\)"),
        (torch.arange(3, device="meta"), r"positions are on meta but x is on cpu"),
    ],
)
def test_the_rotation_itself_refuses_bad_positions(positions, message):
    with pytest.raises(ValueError, match=message):
        Rotary(4)(torch.randn(1, 2, 3, 4), positions)
