"""Fixed and learned decay: rates and time-scales by hand, and what they do in the equation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from judge import attention, error
from torch import Tensor, nn

from linear_rope import LanguageModel, RotaryLinearAttention, linear_attention
from linear_rope.causal import causal_product
from linear_rope.decays import BIAS, FixedDecay, LearnedDecay, bias_of, retnet_rates, spread
from linear_rope.mixing import OutputGate
from linear_rope.recipes import best

DIM = 6


def inputs(time: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, time, DIM, generator=generator, dtype=torch.float64)


def test_retnet_rates_by_hand() -> None:
    g = FixedDecay(4, retnet_rates(4))(torch.zeros(2, 3, DIM).double())
    assert g.shape == (2, 4, 3)
    # 1 - 1/32, 1 - 1/64, 1 - 1/128, 1 - 1/256
    want = torch.tensor([0.96875, 0.984375, 0.9921875, 0.99609375], dtype=torch.float64)
    torch.testing.assert_close(g.exp(), want[:, None].expand(2, 4, 3))
    assert retnet_rates(8) == (5.0, 12.0)
    named = RotaryLinearAttention(8, 4, decay="retnet").gate
    assert isinstance(named, FixedDecay) and named.exponents == (5.0, 8.0)
    with pytest.raises(ValueError, match="does not know the option first"):
        RotaryLinearAttention(8, 4, decay="retnet:first=3")


def test_rates_between_two_exponents() -> None:
    rates = [math.exp(g) for g in FixedDecay(4, (2, 5)).log_decay()]
    assert rates == pytest.approx([0.75, 0.875, 0.9375, 0.96875], rel=1e-15)
    assert FixedDecay(1, (3, 9)).log_decay() == [math.log(0.875)]
    # Far heads keep their digits: log(1 - 2^-60) is -2^-60, not log(1) = 0.
    assert FixedDecay(2, (1, 60)).log_decay()[1] == pytest.approx(-(2.0**-60), rel=1e-12, abs=0)
    assert not FixedDecay(4).state_dict() and not list(FixedDecay(4).parameters())


def test_time_scales_in_equal_ratios() -> None:
    assert spread(4, 4, 500) == pytest.approx([4, 20, 100, 500])
    assert spread(1, 4, 100) == pytest.approx([20])
    for tau in (0.5, 4.0, 4096.0, 1e9):
        # sigmoid(b) = exp(-1/tau)
        g = F.logsigmoid(torch.tensor(bias_of(tau), dtype=torch.float64))
        assert float(g) == pytest.approx(-1 / tau, rel=1e-12)
    assert bias_of(-1 / math.log(1 / (1 + math.exp(-3)))) == pytest.approx(3.0)


def test_learned_decay_starts_at_its_time_scales() -> None:
    decay = LearnedDecay(DIM, 4, time_scales=(4, 500))
    nn.init.zeros_(decay.weight)
    g = decay(inputs().float())
    assert g.shape == (2, 4, 40)
    want = torch.tensor([-1 / 4, -1 / 20, -1 / 100, -1 / 500])
    torch.testing.assert_close(g, want[:, None].expand_as(g))
    nn.init.normal_(decay.bias)
    decay.reset_bias()
    torch.testing.assert_close(decay(inputs().float()), g)
    assert decay.weight.abs().max() == 0
    decay.reset_parameters()
    assert decay.weight.abs().max() > 0


def test_tokens_spread_around_the_time_scales_and_their_mean_is_shorter() -> None:
    """On normed noise, with W x a standard normal variable."""
    decay = LearnedDecay(64, 4, time_scales=(4, 4096))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        decay.weight.copy_(F.normalize(torch.randn(4, 64, generator=generator), dim=-1))
        g = decay(F.rms_norm(torch.randn(1, 20_000, 64, generator=generator), (64,)))[0].double()
    tau = torch.tensor(spread(4, 4, 4096), dtype=torch.float64)
    torch.testing.assert_close(-1 / g.median(-1).values, tau, rtol=0.06, atol=0)
    low, high = (-1 / torch.quantile(g, p, dim=-1) for p in (0.1587, 0.8413))  # one sigma
    torch.testing.assert_close(low[1:], tau[1:] / math.e, rtol=0.06, atol=0)
    torch.testing.assert_close(high[1:], tau[1:] * math.e, rtol=0.06, atol=0)
    mean = -1 / g.mean(-1)
    torch.testing.assert_close(mean[1:], tau[1:] / math.e**0.5, rtol=0.06, atol=0)
    assert 2.8 < mean[0] < 3.1


@pytest.mark.parametrize("tau", [4096, 10_000])
def test_the_recurrent_form_does_not_drift(tau: int) -> None:
    """A constant factor is rounded the same way at each step: 1e-4 over 4096 tokens."""
    generator = torch.Generator().manual_seed(2)
    length = 16_384
    q, k, v = (torch.rand(1, 1, length, 4, generator=generator) for _ in range(3))
    g = torch.full((1, 1, length), -1 / tau)
    g[..., 9000] = -0.6  # on the other side of where `factors` parts strong decays from weak ones
    got, state = causal_product(q, k, v, log_decay=g, backend="recurrent")
    wide = [x.double() for x in (q, k, v)]
    back = g.double().flip(-1).cumsum(-1).flip(-1) - g.double()  # from each key to the end
    want_state = (wide[1] * back.exp().unsqueeze(-1)).mT @ wide[2]
    assert error(state, want_state) <= 1e-5
    rows = torch.tensor([0, 1, 4096, length - 1])
    for i in rows.tolist():
        left = (back[0, 0, : i + 1] - back[0, 0, i]).exp()
        want = (wide[1][0, 0, : i + 1] @ wide[0][0, 0, i] * left) @ wide[2][0, 0, : i + 1]
        assert error(got[0, 0, i], want) <= 1e-5


def test_the_gradients_of_the_recurrent_form_do_not_drift() -> None:
    generator = torch.Generator().manual_seed(3)
    length = 2048
    q, k, v = (torch.rand(1, 1, length, 4, generator=generator) for _ in range(3))
    narrow = [x.requires_grad_() for x in (q, k, v, torch.full((1, 1, length), -1 / 4096))]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    got, _ = causal_product(*narrow[:3], log_decay=narrow[3], backend="recurrent")
    total = wide[3].cumsum(-1)
    left = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    want = ((wide[0] @ wide[1].mT) * left) @ wide[2]
    weights = torch.rand(want.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad((got * weights).sum(), narrow)
    for grad, wanted in zip(grads, torch.autograd.grad((want * weights).sum(), wide), strict=True):
        assert error(grad, wanted) <= 5e-6


def test_without_time_scales_it_is_the_linear_layer_of_old_bit_by_bit() -> None:
    torch.manual_seed(5)
    old = nn.Linear(DIM, 4)
    nn.init.constant_(old.bias, 3.0)
    after_old = torch.rand(())
    torch.manual_seed(5)
    new = LearnedDecay(DIM, 4)
    assert torch.equal(torch.rand(()), after_old)  # as many random numbers
    assert list(new.state_dict()) == ["weight", "bias"]
    assert torch.equal(new.weight, old.weight) and new.bias.tolist() == [BIAS] * 4
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = inputs().to(dtype)
        old, new = old.to(dtype), new.to(dtype)
        logits = old(x)
        wide = torch.promote_types(dtype, torch.float32)
        want = F.logsigmoid(logits.to(wide)).transpose(1, 2)
        assert new(x).dtype == wide and torch.equal(new(x), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert new.float()(inputs().float()).dtype == torch.float32


def gpt2(module: nn.Module) -> None:
    """GPT-2's initialization as it is commonly written."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def test_the_initialization_of_linear_layers_leaves_gates_alone() -> None:
    layer: Any = RotaryLinearAttention(16, 4, decay="learned", output_gate=True, bias=True)
    models: list[Any] = [layer, LanguageModel(best(dim=16, heads=4, layers=2))]
    for model in models:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.apply(gpt2)
        for name, p in model.named_parameters():
            gate = ".gate." in f".{name}" or "output_gate." in name
            assert torch.equal(p, before[name]) == (gate or "norm" in name or "emb" in name), name
    scales = -1 / F.logsigmoid(layer.gate.bias.double())
    assert scales.tolist() == pytest.approx([4.0, 40.3175, 406.375, 4096.0], rel=1e-3)


def test_a_gate_starts_as_a_linear_layer_does_bit_by_bit() -> None:
    for bias in (False, True):
        torch.manual_seed(5)
        old = nn.Linear(DIM, 7, bias=bias)
        after_old = torch.rand(())
        torch.manual_seed(5)
        new = OutputGate(DIM, 7, bias=bias)
        assert torch.equal(torch.rand(()), after_old)
        assert list(new.state_dict()) == list(old.state_dict())
        assert all(torch.equal(p, old.state_dict()[name]) for name, p in new.named_parameters())
        x, heads = inputs().float(), torch.randn(2, 40, 7)
        assert torch.equal(new(heads, x), heads * F.silu(old(x)))


@pytest.mark.parametrize("kind", ["fixed", "learned"])
def test_the_equation_decays_as_the_judge_does(kind: str) -> None:
    module: Any = FixedDecay(2, (1, 9)) if kind == "fixed" else LearnedDecay(DIM, 2, (1, 1000))
    module = module.double()
    x = inputs().requires_grad_()
    q, k, v = (torch.randn(2, 2, 40, 4, dtype=torch.float64) for _ in range(3))
    got = linear_attention(q, k, v, log_decay=module(x))
    # The gate anew, in plain lines.
    if kind == "fixed":
        rates = torch.tensor([1 - 2.0**-1, 1 - 2.0**-9], dtype=torch.float64)
        g = rates.log()[:, None].expand(2, 2, 40)
    else:
        g = -(1 + (-(x @ module.weight.T + module.bias)).exp()).log().mT
    want = attention(q, k, v, log_decay=g, rotate="none")
    assert error(got, want) < 1e-12
    if kind == "learned":
        weight = torch.randn_like(want)
        for parameter in (x, module.weight, module.bias):
            one, other = (
                torch.autograd.grad((y * weight).sum(), parameter, retain_graph=True)[0]
                for y in (got, want)
            )
            assert error(one, other) < 1e-10


def test_both_build_on_meta_and_empty_sequences() -> None:
    for module in (FixedDecay(3), LearnedDecay(DIM, 3, (4, 4096))):
        assert module(torch.zeros(2, 0, DIM)).shape == (2, 3, 0)
        module.reset_parameters()
    with torch.device("meta"):
        assert LearnedDecay(DIM, 3, (4, 4096))(torch.zeros(2, 5, DIM)).shape == (2, 3, 5)
        assert FixedDecay(3)(torch.zeros(2, 5, DIM)).device.type == "meta"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FixedDecay(0), "heads=0"),
        (lambda: FixedDecay(2, (0, 3)), r"exponents=\(0, 3\) must be two positive"),
        (lambda: FixedDecay(2, (1, 2, 3)), "must be two positive"),
        (lambda: LearnedDecay(DIM, 0), "heads=0"),
        (lambda: LearnedDecay(DIM, 2, (0, 3)), "time-scale of 0 tokens"),
        (lambda: LearnedDecay(DIM, 2, (1, math.inf)), "time-scale of inf tokens"),
        (lambda: spread(0, 1, 2), "heads=0"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
