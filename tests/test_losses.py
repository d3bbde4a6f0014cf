"""The chunked loss equals the one that forms all logits, and never holds them."""

import pytest
import torch
import torch.nn.functional as F

from linear_rope import Config, LanguageModel
from linear_rope.losses import linear_cross_entropy


def inputs(dtype=torch.float64, tokens=(3, 7), dim=5, vocabulary=11):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*tokens, dim, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, tokens, generator=generator)
    targets[..., 0] = -100
    return hidden, weight, bias, targets


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_size", [1, 4, 21, 100, None])
def test_it_equals_the_loss_of_whole_logits(reduction, chunk_size):
    hidden, weight, bias, targets = inputs()
    got = linear_cross_entropy(
        hidden, weight, targets, bias=bias, reduction=reduction, chunk_size=chunk_size
    )
    whole = F.linear(hidden, weight, bias)
    want = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction=reduction)
    torch.testing.assert_close(got.flatten(), want.flatten(), atol=1e-12, rtol=1e-12)
    cotangent = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(
        torch.autograd.grad((got * cotangent).sum(), (hidden, weight, bias)),
        torch.autograd.grad((want.view(got.shape) * cotangent).sum(), (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


def test_low_precision_is_summed_in_float32():
    hidden, weight, _, targets = inputs(torch.bfloat16, (1, 64), 8, 256)
    got = linear_cross_entropy(hidden, weight, targets, chunk_size=16)
    want = F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), targets.flatten())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_second_derivatives():
    hidden, weight, bias, targets = inputs(tokens=(4,), dim=3, vocabulary=5)

    def loss(h, w, b):
        return linear_cross_entropy(h, w, targets, bias=b, chunk_size=3)

    assert torch.autograd.gradgradcheck(loss, (hidden, weight, bias))


def test_no_tensor_as_large_as_the_logits_is_made():
    """Every tensor that an operator returns, in both passes, is measured."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes())
            return out

    hidden, weight, bias, targets = inputs(torch.float32, (1, 1000), 4, 512)
    with Watch():
        linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_size=10).backward()
    assert 10 * 512 * 4 <= largest < 1000 * 512 * 4 / 10


def test_without_tokens_a_sum_is_zero():
    loss = linear_cross_entropy(
        torch.zeros(0, 3), torch.zeros(5, 3), torch.zeros(0, dtype=torch.int64), reduction="sum"
    )
    assert loss.item() == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "median"}, "reduction='median'"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets must have the shape"),
        ({"targets": torch.zeros(3, 7)}, "targets must be int64"),
        ({"weight": torch.zeros(11, 4)}, "weight must have shape"),
    ],
)
def test_bad_arguments_are_named(change, message):
    hidden, weight, bias, targets = inputs()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias} | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_has_the_loss_of_its_logits(tied):
    config = Config(vocab_size=20, dim=8, layers=1, heads=2, tie_embeddings=tied, bias=True)
    model = LanguageModel(config).double()
    tokens = torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = model(tokens[:, :-1])
    want = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model.loss(tokens), want, atol=1e-12, rtol=0)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2]]).expand(2, -1)
    logits = model(tokens, segment_ids=documents)
    targets = tokens.roll(-1, 1)
    targets[:, [1, 5, 8]] = -100  # the last token of a document has no successor
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    got = model.loss(tokens, targets, segment_ids=documents)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    with pytest.raises(TypeError, match="not mask"):
        model.loss(tokens, mask=None)
