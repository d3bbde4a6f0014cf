"""torch.compile of a decoding step: one graph, compiled once, that decodes as the model does."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from linear_rope import Config, LanguageModel, RotaryLinearAttention
from linear_rope.recipes import best
from linear_rope.states import MixedState

SIZES: dict[str, Any] = {"vocab_size": 13, "dim": 16, "layers": 1, "heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "elu+1": {},
    "favor+": {"feature_map": "favor+"},
    "decay": {"decay": "learned", "rotate": "before", "kv_heads": 1},
    "short convolution": {"short_conv": 3},
    "learned table": {"position": "learned", "max_length": 40},
}


def build(kind: str) -> LanguageModel:
    config = best(**SIZES) if kind == "best" else Config(**SIZES, **KINDS[kind])
    return LanguageModel(config).eval()


def flat(state: Any) -> list[Tensor]:
    parts = state if isinstance(state, tuple) else (state,)
    if any(x is None or isinstance(x, tuple) for x in parts):
        return [x for part in parts if part is not None for x in flat(part)]
    return list(parts)


class Counting:
    """A backend of torch.compile that counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        torch._dynamo.reset()
        self.compile = torch._dynamo.lookup_backend("aot_eager")

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.compile(graph, inputs)


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decodes_alike(model: LanguageModel, batch: int, backend: Any) -> None:
    """Five tokens, each way from its own states, after a padded prompt."""
    mask = torch.arange(6) >= torch.arange(batch).unsqueeze(1)
    _, state = model.prefill(torch.randint(13, (batch, 6)), key_mask=mask)
    decode = torch.compile(model.decode, fullgraph=True, backend=backend)
    other = state
    for token in torch.randint(13, (5, batch)):
        want, state = model.decode(token, state)
        got, other = decode(token, other)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert not got.requires_grad
    for a, b in zip(flat(other), flat(state), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
    # and it can go on without the compiler
    torch.testing.assert_close(
        model.decode(token, other)[0], model.decode(token, state)[0], atol=1e-5, rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [*KINDS, "best"])
def test_decode_compiles_into_one_graph_for_all_tokens(kind: str, batch: int) -> None:
    counting = Counting()
    decodes_alike(build(kind), batch, counting)
    assert counting.graphs == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [{}, {"decay": "learned", "short_conv": 3}], ids=str)
def test_a_step_of_a_layer_compiles_with_its_gradient(options: Any, batch: int) -> None:
    layer = RotaryLinearAttention(16, 2, output_norm=True, **options)
    x = torch.randn(8, batch, 1, 16)
    with torch.no_grad():
        _, state = layer(torch.randn(batch, 5, 16), return_state=True)
    assert isinstance(state, MixedState) == ("short_conv" in options)
    counting = Counting()
    step = torch.compile(layer, fullgraph=True, backend=counting)
    wanted, outs, other = [], [], state
    for token in x:
        want, state = layer(token, state=state, return_state=True)
        out, other = step(token, state=other.detach(), return_state=True)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        wanted.append(want)
        outs.append(out)
        state = state.detach()
    assert counting.graphs == 1
    parameters = list(layer.parameters())
    grads = [
        torch.autograd.grad(sum(y.square().sum() for y in ys), parameters) for ys in (outs, wanted)
    ]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("LINEAR_ROPE_TEST_INDUCTOR") != "1" or shutil.which("g++") is None,
    reason="the default compiler takes a minute: set LINEAR_ROPE_TEST_INDUCTOR=1",
)
@pytest.mark.usefixtures("_fresh_compiler")
def test_decode_runs_through_the_default_compiler() -> None:
    decodes_alike(build("best"), 2, "inductor")


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_shapes_are_checked_when_a_graph_is_made() -> None:
    model = build("elu+1")
    _, state = model.prefill(torch.randint(13, (2, 4)))
    decode = torch.compile(model.decode, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="state must be the AttentionState that this layer"):
        decode(torch.zeros(3, dtype=torch.int64), state)
