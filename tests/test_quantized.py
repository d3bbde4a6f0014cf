"""Models whose linear layers torch has quantized: their weights are no tensors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from linear_rope import Config, LanguageModel, RotaryLinearAttention, SoftmaxAttention
from linear_rope.recipes import best

try:
    from torch.ao.quantization import quantize_dynamic
except ImportError:  # it moves to a package of its own
    pytest.skip("torch.ao.quantization is not there", allow_module_level=True)

if torch.backends.quantized.engine == "none":
    pytest.skip("no engine of quantized products is there", allow_module_level=True)

SIZES: dict[str, Any] = {"vocab_size": 19, "dim": 32, "layers": 2, "heads": 4}
CONFIGS = {
    "plain": Config(**SIZES, tie_embeddings=False),
    "best": best(**SIZES),
    "softmax": Config(**SIZES, attention="softmax"),
    "favor+, convolution": Config(**SIZES, feature_map="favor+", short_conv=3),
}


def quantized(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it moves
        made = quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(part) is nn.Linear for part in made.modules())
    return made


@torch.no_grad()
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_quantized_model_reads_decodes_and_generates(kind: str) -> None:
    exact = LanguageModel(CONFIGS[kind]).eval()
    with torch.no_grad():
        exact.embedding.weight.mul_(30)  # so that the layers matter
    model = quantized(exact)
    tokens = torch.randint(19, (2, 12))
    want = exact(tokens)
    scale = float(want.std())
    got = model(tokens)
    assert 0 < (got - want).abs().max() < 0.2 * scale
    logits, state = model.prefill(tokens[:, :8])
    for t in range(8, 12):
        # Inputs are quantized by the range of each call, so that pieces differ a little.
        assert (logits - got[:, t - 1]).abs().max() < 0.2 * scale
        logits, state = model.decode(tokens[:, t], state)
    assert (logits - got[:, -1]).abs().max() < 0.2 * scale
    assert model.generate(tokens, 3).shape == (2, 15)
    loss = exact.loss(tokens)
    assert 0 < abs(float(model.loss(tokens) - loss)) < 0.05 * float(loss)


@pytest.mark.parametrize("kind", [RotaryLinearAttention, SoftmaxAttention])
def test_a_quantized_layer_still_checks_shapes(kind: Any) -> None:
    layer, x = kind(32, 4), torch.randn(2, 5, 32)
    small = quantized(layer)
    torch.testing.assert_close(small(x), layer(x), atol=0.05, rtol=0.05)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, time, 32\)"):
        small(x[..., :16])
