"""The layers by themselves: against the equation called by hand, against softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope import (
    FEATURE_MAPS,
    Rotary,
    RotaryLinearAttention,
    SoftmaxAttention,
    linear_attention,
    make_feature_map,
)
from linear_rope.decays import LearnedDecay
from linear_rope.states import signature

B, T, DIM, HEADS = 2, 7, 12, 3

LAYERS = {
    "linear": RotaryLinearAttention,
    "softmax": SoftmaxAttention,
}


def split(x: Tensor, heads: int) -> Tensor:
    """(batch, time, heads * width) -> (batch, head, time, width), by hand."""
    return torch.stack(x.chunk(heads, dim=-1), dim=1)


def join(x: Tensor) -> Tensor:
    return torch.cat(list(x.unbind(1)), dim=-1)


def turn(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Interleaved rotation, a pair at a time, in float64: written from eq. 15 of the paper."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    for j in range(width // 2):
        angle = positions.double() * base ** (-2 * j / width)
        a, b = x[..., 2 * j], x[..., 2 * j + 1]
        out[..., 2 * j] = a * angle.cos() - b * angle.sin()
        out[..., 2 * j + 1] = b * angle.cos() + a * angle.sin()
    return out


# ---- The linear layer is the equation between projections ---------------------------------------


@pytest.mark.parametrize("rotate", ["after", "before", "none"])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_linear_layer_is_projections_around_the_equation(feature_map: str, rotate: str) -> None:
    layer = RotaryLinearAttention(
        DIM, HEADS, feature_map=feature_map, rotate=rotate, decay="learned", bias=True
    ).double()
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    q, k, v = (
        split(F.linear(x, p.weight, p.bias), HEADS) for p in (layer.query, layer.key, layer.value)
    )
    gate = layer.gate
    assert isinstance(gate, LearnedDecay)
    log_decay = F.logsigmoid(F.linear(x, gate.weight.float().double(), gate.bias)).mT
    width = layer.feature_map.feature_dim if rotate == "after" else DIM // HEADS
    heads = linear_attention(
        q,
        k,
        v,
        feature_map=layer.feature_map,
        rotary=None if rotate == "none" else Rotary(width),
        rotate=rotate,
        log_decay=log_decay,
    )
    want = F.linear(join(heads), layer.out.weight, layer.out.bias)
    torch.testing.assert_close(layer(x), want, atol=1e-7, rtol=1e-6)  # the gate is in float32


@pytest.mark.parametrize("causal", [True, False])
def test_linear_layer_against_the_sum_written_out(causal: bool) -> None:
    layer = RotaryLinearAttention(DIM, HEADS, causal=causal).double()
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    q, k, v = (split(F.linear(x, p.weight), HEADS) for p in (layer.query, layer.key, layer.value))
    phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
    at = torch.arange(T)
    turned_q, turned_k = turn(phi_q, at), turn(phi_k, at)
    want = torch.empty_like(q)
    for m in range(T):
        seen = range(m + 1 if causal else T)
        num = sum((turned_q[:, :, m] * turned_k[:, :, n]).sum(-1, True) * v[:, :, n] for n in seen)
        den = sum((phi_q[:, :, m] * phi_k[:, :, n]).sum(-1, True) for n in seen)
        want[:, :, m] = num / den
    torch.testing.assert_close(layer(x), join(want) @ layer.out.weight.mT, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("denominator", ["unrotated", "rotated", "none"])
@pytest.mark.parametrize("output_norm", [False, True])
def test_switches_of_the_equation_reach_it(denominator: str, output_norm: bool) -> None:
    options: dict[str, Any] = {"denominator": denominator, "output_norm": output_norm}
    layer = RotaryLinearAttention(DIM, HEADS, value_dim=5, **options).double()
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    q, k, v = (split(F.linear(x, p.weight), HEADS) for p in (layer.query, layer.key, layer.value))
    want = linear_attention(q, k, v, rotary=Rotary(DIM // HEADS), **options)
    torch.testing.assert_close(layer(x), layer.out(join(want)))
    plain = linear_attention(q, k, v, rotary=Rotary(DIM // HEADS))
    assert (denominator == "unrotated" and not output_norm) == torch.allclose(want, plain)


@pytest.mark.parametrize("kind", LAYERS)
def test_rotation_options_reach_the_rotation(kind: str) -> None:
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    layer = LAYERS[kind](DIM, HEADS).double()
    plain = layer(x)
    for option in ({"rotary_base": 100.0}, {"rotary_fraction": 0.5}, {"pairing": "half"}):
        other = LAYERS[kind](DIM, HEADS, **option).double()
        other.load_state_dict(layer.state_dict())
        assert not torch.allclose(other(x), plain, atol=1e-4), option


def test_the_decay_gate_starts_at_sigmoid_of_three_and_reads_its_token() -> None:
    layer = RotaryLinearAttention(DIM, HEADS, rotate="none", decay="learned:bias=3").double()
    assert isinstance(layer.gate, LearnedDecay)
    assert torch.equal(layer.gate.bias, torch.full((HEADS,), 3.0, dtype=torch.float64))
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.query.weight.zero_()
        layer.key.weight.zero_()  # all features 1: weights are powers of the decay
    x = torch.randn(1, T, DIM, dtype=torch.float64)
    v, keep = layer.value(x), 1 / (1 + math.exp(-3.0))
    weights = torch.tensor([keep ** (T - 1 - n) for n in range(T)], dtype=torch.float64)
    want = layer.out((weights[:, None] * v[0]).sum(0) / weights.sum())
    torch.testing.assert_close(layer(x)[0, -1], want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_acts_in_training_only(kind: str) -> None:
    layer = LAYERS[kind](DIM, HEADS, dropout=0.5)
    x = torch.randn(B, T, DIM)
    assert not torch.equal(layer(x), layer(x))
    assert (layer(x) == 0).float().mean() > 0.2
    layer.eval()
    assert torch.equal(layer(x), layer(x))


# ---- Softmax attention --------------------------------------------------------------------------


def softmax_by_hand(
    layer: SoftmaxAttention, x: Tensor, context: Tensor, at_q: Tensor, at_k: Tensor, seen: Tensor
) -> Tensor:
    q = split(F.linear(x, layer.query.weight), HEADS)
    k, v = (split(F.linear(context, p.weight), HEADS) for p in (layer.key, layer.value))
    if layer.rotary is not None:
        q, k = turn(q, at_q), turn(k, at_k)
    scores = torch.einsum("bhmd,bhnd->bhmn", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~seen, -math.inf).exp()
    heads = torch.einsum("bhmn,bhne->bhme", weights / weights.sum(-1, keepdim=True), v)
    return F.linear(join(heads), layer.out.weight)


@pytest.mark.parametrize("rotate", ["before", "none"])
@pytest.mark.parametrize("causal", [True, False])
def test_softmax_layer_against_softmax_written_out(causal: bool, rotate: str) -> None:
    layer = SoftmaxAttention(DIM, HEADS, causal=causal, rotate=rotate).double()
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    seen = torch.ones(T, T, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    at = torch.arange(T)
    want = softmax_by_hand(layer, x, x, at, at, seen)
    torch.testing.assert_close(layer(x), want, atol=1e-12, rtol=1e-12)
    mask = torch.ones(B, T, dtype=torch.bool)
    torch.testing.assert_close(layer(x, key_mask=mask), want, atol=1e-12, rtol=1e-12)
    mask[1, 4:] = False
    want = softmax_by_hand(layer, x, x, at, at, seen & mask[:, None, None, :])
    got = layer(x, key_mask=mask)[mask]  # pads have no position of their own
    torch.testing.assert_close(got, want[mask], atol=1e-12, rtol=1e-12)


def test_softmax_rotates_the_same_for_after_and_before() -> None:
    x = torch.randn(B, T, DIM)
    layers = [SoftmaxAttention(DIM, HEADS, rotate=rotate) for rotate in ("after", "before")]
    layers[1].load_state_dict(layers[0].state_dict())
    assert torch.equal(layers[0](x), layers[1](x))


# ---- Cross-attention and encoders ---------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_softmax_cross_attention(masked: bool) -> None:
    layer = SoftmaxAttention(DIM, HEADS, causal=False).double()
    x = torch.randn(B, 4, DIM, dtype=torch.float64)
    context = torch.randn(B, T, DIM, dtype=torch.float64)
    mask = torch.ones(B, T, dtype=torch.bool)
    if masked:
        mask[0, 5:] = False
    want = softmax_by_hand(
        layer, x, context, 3 + torch.arange(4), torch.arange(T), mask[:, None, None]
    )
    got = layer(x, context, positions=3, key_mask=mask if masked else None)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_linear_cross_attention(feature_map: str, masked: bool) -> None:
    layer = RotaryLinearAttention(DIM, HEADS, feature_map=feature_map, causal=False).double()
    x = torch.randn(B, 4, DIM, dtype=torch.float64)
    context = torch.randn(B, T, DIM, dtype=torch.float64)
    mask = torch.ones(B, T, dtype=torch.bool)
    if masked:
        mask[0, 5:] = False
    q = split(layer.query(x), HEADS)
    k, v = split(layer.key(context), HEADS), split(layer.value(context), HEADS)
    phi_q, phi_k = layer.feature_map(q), layer.feature_map(k)
    at_q, at_k = 3 + torch.arange(4), torch.arange(T)
    weights = torch.einsum("bhmd,bhnd->bhmn", turn(phi_q, at_q), turn(phi_k, at_k))
    den = torch.einsum("bhmd,bhnd->bhmn", phi_q, phi_k) * mask[:, None, None]
    heads = (weights * mask[:, None, None]) @ v / den.sum(-1, keepdim=True)
    got = layer(x, context, positions=3, key_mask=mask if masked else None)
    torch.testing.assert_close(got, layer.out(join(heads)), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", LAYERS)
def test_context_positions_shift_the_keys(kind: str) -> None:
    layer = LAYERS[kind](DIM, HEADS, causal=False).double()
    x = torch.randn(B, 4, DIM, dtype=torch.float64)
    context = torch.randn(B, T, DIM, dtype=torch.float64)
    base = layer(x, context, positions=5, context_positions=2)
    both = layer(x, context, positions=9, context_positions=6)
    torch.testing.assert_close(base, both, atol=1e-12, rtol=1e-12)  # only differences count
    assert not torch.allclose(base, layer(x, context, positions=5), atol=1e-4)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_on_both_sides_of_cross_attention(kind: str, side: str) -> None:
    layer = LAYERS[kind](DIM, HEADS, causal=False).double()
    x = torch.randn(B, 4, DIM, dtype=torch.float64)
    context = torch.randn(B, T, DIM, dtype=torch.float64)
    lengths, key_lengths = (4, 2), (5, 7)
    query_mask = torch.stack([torch.arange(4) < n for n in lengths])
    key_mask = torch.stack([torch.arange(T) < n for n in key_lengths])
    if side == "left":
        query_mask, key_mask = query_mask.flip(1), key_mask.flip(1)
    start = torch.tensor([[3], [8]])
    options = {"key_mask": key_mask, "query_mask": query_mask, "positions": start}
    got = layer(x, context, **options)
    for row in range(B):
        alone = layer(
            x[row][query_mask[row]][None],
            context[row][key_mask[row]][None],
            positions=start[row : row + 1],
        )
        torch.testing.assert_close(got[row][query_mask[row]], alone[0], atol=1e-12, rtol=1e-12)
    if side == "left":  # without it, the padded row would count its pads
        del options["query_mask"]
        assert not torch.allclose(layer(x, context, **options)[1, 2:], got[1, 2:], atol=1e-4)


@pytest.mark.parametrize("feature_map", [*FEATURE_MAPS, "softmax"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("content", [0.0, 1e4])
def test_pads_count_in_no_sum_and_get_no_gradient(
    feature_map: str, causal: bool, content: float
) -> None:
    if feature_map == "softmax":
        layer: nn.Module = SoftmaxAttention(DIM, HEADS, causal=causal)
    else:
        layer = RotaryLinearAttention(DIM, HEADS, feature_map=feature_map, causal=causal)
    real = torch.randn(1, T, DIM)
    want = layer(real)
    for pads_left in (5, 0, 2):  # the others are on the right
        x = torch.full((1, T + 5, DIM), content)
        x[:, pads_left : pads_left + T] = real
        x.requires_grad_()
        mask = torch.zeros(1, T + 5, dtype=torch.bool)
        mask[:, pads_left : pads_left + T] = True
        before = x.detach().clone()
        out = layer(x, key_mask=mask)[:, pads_left : pads_left + T]
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        (out * torch.randn_like(out)).sum().backward()
        assert torch.equal(x.grad[~mask], torch.zeros(5, DIM))  # type: ignore[index]
        assert x.grad[mask].abs().sum() > 0  # type: ignore[index]
        assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_row_of_pads_only_is_finite_forward_and_backward(kind: str) -> None:
    layer = LAYERS[kind](DIM, HEADS)
    x = torch.randn(B, T, DIM, requires_grad=True)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0] = False
    out = layer(x, key_mask=mask)
    out.square().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()  # type: ignore[union-attr]
    assert all(p.grad.isfinite().all() for p in layer.parameters())  # type: ignore[union-attr]
    assert torch.equal(out[0], torch.zeros(T, DIM))


# ---- State --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
def test_a_state_is_a_value(kind: str) -> None:
    layer = LAYERS[kind](DIM, HEADS)
    x = torch.randn(B, T, DIM)
    _, state = layer(x[:, :4], return_state=True)
    copy = [part.clone() for part in state]
    first, _ = layer(x[:, 4:], state=state, return_state=True)
    second, _ = layer(x[:, 4:], state=state, return_state=True)
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(copy, state, strict=True))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_state_keeps_each_rows_own_position(kind: str) -> None:
    layer = LAYERS[kind](DIM, HEADS).double()
    x = torch.randn(B, T, DIM, dtype=torch.float64)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :3] = False
    _, state = layer(x, key_mask=mask, return_state=True)
    assert state.position.tolist() == [4, 7]
    new = torch.randn(B, 2, DIM, dtype=torch.float64)
    got = layer(new, state=state)
    for row, pads in ((0, 3), (1, 0)):
        alone = layer(torch.cat([x[row : row + 1, pads:], new[row : row + 1]], dim=1))
        torch.testing.assert_close(got[row], alone[0, -2:], atol=1e-12, rtol=1e-12)


# ---- Sizes, names, bad input --------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 32, 48, 64, 96, 128, 256])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_default_features_build_and_run_rotated_at_every_usual_width(
    width: int, feature_map: str
) -> None:
    layer = RotaryLinearAttention(8, 1, head_dim=width, feature_map=feature_map)
    features = layer.feature_map.feature_dim
    assert features % 2 == 0
    if feature_map.startswith("favor"):
        # int(d ln d) is 185 and 621 and 1419 for some: rounded up to even
        assert features - int(width * math.log(width)) in (0, 1)
    assert layer(torch.randn(1, 3, 8)).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dim": 10},
            r"heads=4 does not divide dim=10; choose a divisor, or give the layer head_dim",
        ),
        ({"heads": 0}, r"heads=0 .*at least 1"),
        ({"dim": -8}, r"dim=-8 .*at least 1"),
        ({"head_dim": 0}, r"head_dim=0 .*at least 1"),
        ({"value_dim": -1}, r"value_dim=-1 .*at least 1"),
        ({"head_dim": 65}, r"width=65 must be an even number.*use 66"),
        ({"dropout": 1.0}, r"dropout=1.0 must be in \[0, 1\)"),
        ({"rotate": "sideways"}, r"rotate='sideways' is unknown.*after, before, none"),
        ({"pairing": "odd"}, r"pairing='odd' is unknown.*interleaved, half"),
        ({"rotary_fraction": 1.5}, r"fraction=1.5 must be in \(0, 1\]"),
        ({"rotary_base": 0.0}, r"base=0.0 must be positive"),
    ],
)
@pytest.mark.parametrize("kind", LAYERS)
def test_what_both_layers_refuse(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LAYERS[kind](**{"dim": 16, "heads": 4, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "cosine"}, r"feature_map='cosine' is unknown.*elu\+1, relu, favor\+"),
        ({"denominator": "l2"}, r"denominator='l2' is unknown.*unrotated, rotated, none"),
        ({"decay": "falling"}, r"decay='falling' is unknown.*none, fixed, retnet, learned"),
        ({"backend": "gpu-only"}, r"backend='gpu-only' is unknown.*auto, .*chunked"),
        ({"feature_map": "favor+", "features": 185}, r"width=185 must be an even.*use 186"),
        ({"feature_map": "elu+1", "features": 8}, r"'elu\+1' does not take.*features"),
        ({"feature_map": "favor+", "features": 0}, r"features=0 .*at least 1"),
        ({"decay": "learned", "causal": False}, r"decay='learned' needs causal=True"),
        ({"feature_map": make_feature_map("relu", 6)}, r"made for heads of width 4, got"),
        ({"feature_map": torch.exp}, r"feature_map must be a name or a FeatureMap"),
        ({"feature_map": make_feature_map("relu", 4), "features": 4}, r"features must be given to"),
    ],
)
def test_what_the_linear_layer_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryLinearAttention(16, 4, **options)


def test_an_odd_number_of_features_is_welcome_without_rotation_after() -> None:
    for options in ({"rotate": "none"}, {"rotate": "before"}):
        layer = RotaryLinearAttention(16, 4, feature_map="favor+", features=185, **options)
        assert layer(torch.randn(1, 3, 16)).shape == (1, 3, 16)


@pytest.mark.parametrize("kind", LAYERS)
def test_bad_calls_name_the_argument_and_the_remedy(kind: str) -> None:
    layer, other = LAYERS[kind](16, 4), LAYERS["linear" if kind == "softmax" else "softmax"](16, 4)
    cross = LAYERS[kind](16, 4, causal=False)
    x = torch.randn(2, 5, 16)
    mask = torch.ones(2, 5, dtype=torch.bool)
    state, foreign = (m(x, return_state=True)[1] for m in (layer, other))
    name = type(state).__name__
    for call, message in (
        (lambda: layer(x[0]), r"x must have shape \(batch, time, 16\), got \(5, 16\)"),
        (lambda: layer(x[..., :8]), r"x must have shape \(batch, time, 16\), got \(2, 5, 8\)"),
        (lambda: layer(x.long()), r"x is torch.int64 but the layer is torch.float32"),
        (lambda: layer(x.double()), r"x is torch.float64 but the layer is torch.float32; convert"),
        (lambda: layer(x.to("meta")), r"x is on meta but the layer is on cpu; move one"),
        (lambda: cross(x, x[..., :8]), r"context must have shape \(batch, time, 16\)"),
        (lambda: cross(x, x[:1]), r"context has 1 rows but x has 2"),
        (lambda: layer(x, x), r"a context needs causal=False"),
        (lambda: layer(x, context_positions=1), r"context_positions needs a context"),
        (lambda: layer(x, query_mask=mask), r"query_mask needs a context; use key_mask"),
        (lambda: cross(x, x[:, :3], query_mask=mask[:, :3]), r"query_mask.*\(2, 5\).*\(2, 3\)"),
        (lambda: cross(x, x, query_mask=mask.long()), r"query_mask must be bool.*int64"),
        (
            lambda: cross(x, x, segment_ids=torch.zeros(2, 5, dtype=torch.int64)),
            r"segment_ids and cu_seqlens need self-attention",
        ),
        (lambda: layer(x, key_mask=mask.float()), r"key_mask must be bool.*\(2, 5\).*float32"),
        (lambda: layer(x, key_mask=mask.long()), r"key_mask must be bool.*\(2, 5\).*int64"),
        (lambda: cross(x, key_mask=mask.float()), r"key_mask must be bool.*float32"),
        (lambda: layer(x, key_mask=mask[:, :1]), r"key_mask.*\(2, 5\).*got .*\(2, 1\)"),
        (lambda: layer(x, key_mask=mask[:, 1:]), r"key_mask.*\(2, 5\).*got .*\(2, 4\)"),
        (lambda: layer(x, key_mask=mask[:1]), r"key_mask.*\(2, 5\).*got .*\(1, 5\)"),
        (lambda: layer(x, key_mask=mask[0]), r"key_mask.*\(2, 5\).*got .*\(5,\)"),
        (lambda: cross(x, x[:, :3], key_mask=mask), r"key_mask.*\(2, 3\).*got .*\(2, 5\)"),
        (lambda: layer(x, positions=-1), r"positions must not be negative, got -"),
        (lambda: layer(x, positions=1.5), r"positions=1.5 must be an integer"),
        (lambda: layer(x, positions=torch.arange(5.0)), r"positions must be integers.*float32"),
        (lambda: layer(x, positions=torch.arange(4)), r"positions must be .*\(5,\).*got \(4,\)"),
        (
            lambda: layer(x, state=foreign),
            rf"state must be the {name} .*got {type(foreign).__name__}",
        ),
        (lambda: layer(x, state=x), rf"state must be the {name} .*got Tensor"),
        (
            lambda: layer(x[:1], state=state),
            rf"state must be the {name} .*\(1, 4\), got .*\(2, 4\)",
        ),
        (lambda: cross(x, state=state), r"causal=True"),
        (lambda: cross(x, return_state=True), r"causal=True"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("kind", LAYERS)
def test_bad_documents_are_refused_by_layers(kind: str) -> None:
    x = torch.randn(1, 6, 16)
    mask = torch.ones(1, 6, dtype=torch.bool)
    mask[0, 4:] = False
    limits = torch.tensor([0, 3, 6])
    for layer in (LAYERS[kind](16, 4), LAYERS[kind](16, 4, causal=False)):
        for options, message in (
            ({"segment_ids": torch.zeros(1, 6)}, r"segment_ids must be integers"),
            ({"segment_ids": torch.tensor([[0, 0, 1, 1, 0, 0]])}, r"must be contiguous"),
            ({"cu_seqlens": torch.tensor([1, 6])}, r"start at 0 and end at time = 6, got 1"),
            ({"cu_seqlens": torch.tensor([0, 5])}, r"start at 0 and end at time = 6, got 0 and 5"),
            ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, r"must ascend, got \[0, 4, 2, 6\]"),
            (
                {"cu_seqlens": limits, "key_mask": mask},
                r"key_mask contradicts cu_seqlens: it hides 2 of the 3 tokens of document 1",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                layer(x, **options)
        q = x.unflatten(-1, (4, 4)).transpose(1, 2)
        with pytest.raises(ValueError, match="key_mask contradicts cu_seqlens"):
            linear_attention(q, q, q, causal=layer.causal, cu_seqlens=limits, key_mask=mask)
        # Documents of padding alone contradict nothing, nor does an empty one.
        padded = {"cu_seqlens": torch.tensor([0, 4, 4, 6]), "key_mask": mask}
        torch.testing.assert_close(layer(x, **padded)[:, :4], layer(x[:, :4]))


STATES: dict[str, dict[str, Any]] = {
    "map": {"feature_map": "relu"},
    "random map": {"feature_map": "favor+", "features": 4},
    "base": {"rotary_base": 100.0},
    "pairing": {"pairing": "half"},
    "rule": {"rotary_scaling": "linear:factor=2"},
    "xpos": {"rotary_scaling": "xpos"},
    "learned": {"rotary_scaling": "learned"},
    "no rotation": {"rotate": "none"},
    "rotation before": {"rotate": "before"},
    "denominator": {"denominator": "rotated"},
    "fixed decay": {"decay": "fixed"},
    "learned decay": {"decay": "learned"},
    "normed keys": {"qk_norm": True},
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_another_map_or_rotation_is_refused(name: str) -> None:
    """Of the same sizes, so that only the state's mark tells."""
    x = torch.randn(2, 5, 16)
    layer, other = RotaryLinearAttention(16, 4), RotaryLinearAttention(16, 4, **STATES[name])
    state, foreign = (m(x, return_state=True)[1] for m in (layer, other))
    assert [a.shape for a in state] == [b.shape for b in foreign]
    message = (
        r"state is of another feature map, rotation, denominator or decay: its mark is \d+, .*\(E"
    )
    for one in (foreign, foreign.clone(), foreign.index_select(torch.tensor([1, 1]))):
        with pytest.raises(ValueError, match=message):
            layer(x, state=one)
    # A layer of the same choices takes it, in another process and dtype too.
    twin = RotaryLinearAttention(16, 4, backend="reference").double()
    assert twin(x.double(), state=state.to(torch.float64)).shape == x.shape
    assert layer.made_by == twin.made_by and signature("x", 1) == 4088948477241581166
    # So is what a bare function made: it may know more.
    bare = state._replace(made_by=torch.tensor(0))
    assert torch.equal(layer(x, state=bare), layer(x, state=state))


def test_a_cache_of_another_rotation_is_refused() -> None:
    x = torch.randn(2, 5, 16)
    for options in ({"rotary_base": 100.0}, {"rotate": "none"}, {"rotary_scaling": "ntk:factor=2"}):
        _, state = SoftmaxAttention(16, 4, **options)(x, return_state=True)
        with pytest.raises(ValueError, match=r"state is of another .*rotation.*Rotary\(width=4"):
            SoftmaxAttention(16, 4)(x, state=state)


def test_descending_positions_are_refused_where_an_order_is_needed() -> None:
    layer = RotaryLinearAttention(16, 4, rotary_scaling="xpos")
    x = torch.randn(1, 4, 16)
    for at in (torch.tensor([0, 2, 1, 3]), torch.tensor([[5, 4, 3, 2]])):
        with pytest.raises(ValueError, match="positions must not descend under xPos"):
            layer(x, positions=at)
        assert RotaryLinearAttention(16, 4)(x, positions=at).isfinite().all()
    _, state = layer(x, return_state=True)
    with pytest.raises(ValueError, match=r"nor begin before the state's.*step of -2"):
        layer(x, state=state, positions=2)


def test_a_state_of_another_width_is_refused() -> None:
    x = torch.randn(2, 5, 16)
    _, state = RotaryLinearAttention(16, 4, value_dim=3)(x, return_state=True)
    with pytest.raises(
        ValueError, match=r"state.* must have shape \(2, 4, 4, 4\).*got \(2, 4, 4, 3\)"
    ):
        RotaryLinearAttention(16, 4)(x, state=state)
