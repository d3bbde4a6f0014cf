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
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        model.loss(tokens, mask=None)


MODELS = {
    "decay": {"decay": "learned", "short_conv": 3, "token_shift": True},
    "exponential": {"feature_map": "exp", "local_heads": 1, "window": 3},
    "softmax": {"attention": "softmax"},
}
LENGTHS = (9, 4, 2, 1)  # the last one predicts nothing


def small(**options):
    return LanguageModel(Config(vocab_size=20, dim=8, layers=2, heads=2, **options)).double()


def documents():
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(20, (length,), generator=generator) for length in LENGTHS]


def with_gradients(model, loss):
    return torch.cat([loss[None], *(x.flatten() for x in grads_of(model, loss))])


def grads_of(model, loss):
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def one_by_one(model):
    """The mean over all targets of documents that are each run alone."""
    losses = [model.loss(x[None]) * (len(x) - 1) for x in documents() if len(x) > 1]
    return with_gradients(model, sum(losses) / sum(n - 1 for n in LENGTHS))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("side", ["left", "right", "within"])
@pytest.mark.parametrize("name", MODELS)
def test_pads_are_no_targets_and_have_none(name, side, last):
    model, width = small(**MODELS[name]), 9 if side != "within" else 13
    rows = torch.randint(20, (len(LENGTHS), width))
    mask = torch.zeros_like(rows, dtype=torch.bool)
    for row, real, tokens in zip(rows, mask, documents(), strict=True):
        places = {
            "left": range(width - len(tokens), width),
            "right": range(len(tokens)),
            "within": sorted(torch.randperm(width - 2)[: len(tokens)].tolist()),
        }[side]
        row[list(places)], real[list(places)] = tokens, True
    got = with_gradients(model, model.loss(rows, key_mask=mask if last else mask[:, :-1]))
    torch.testing.assert_close(got, one_by_one(model), atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("layout", ["segment_ids", "row of ids", "cu_seqlens"])
@pytest.mark.parametrize("name", MODELS)
def test_a_document_does_not_predict_the_next(name, layout, last):
    model, tokens = small(**MODELS[name]), documents()
    if not last:  # without its last token the row must not end in a document of one
        tokens = tokens[::-1]
    lengths = torch.tensor([len(x) for x in tokens])
    if layout == "cu_seqlens":
        limits = torch.tensor([0, *lengths.cumsum(0)])
        packing = {"cu_seqlens": limits if last else limits.clamp(max=int(limits[-1]) - 1)}
    else:
        ids = torch.repeat_interleave(torch.arange(len(tokens)), lengths)
        ids = ids if last else ids[:-1]
        packing = {"segment_ids": ids if layout == "row of ids" else ids[None]}
    got = with_gradients(model, model.loss(torch.cat(tokens)[None], **packing))
    torch.testing.assert_close(got, one_by_one(model), atol=1e-10, rtol=1e-8)


def test_a_loss_in_pieces_is_that_of_the_whole():
    """Targets of one's own or by default; the state carries gradients until it is detached."""
    model = small(decay="learned", short_conv=3)
    tokens = torch.randint(20, (2, 13))
    want = with_gradients(model, model.loss(tokens))
    first, state = model.loss(tokens[:, :6], return_state=True)  # reads five
    assert state.position.tolist() == [5, 5]
    rest, state = model.loss(tokens[:, 5:12], tokens[:, 6:13], state=state, return_state=True)
    assert state.position.tolist() == [12, 12]
    got = with_gradients(model, (5 * first + 7 * rest) / 12)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-8)
    _, state = model.loss(tokens[:, :6], return_state=True)
    cut = with_gradients(model, model.loss(tokens[:, 5:], state=state.detach()))
    whole = with_gradients(model, model.loss(tokens[:, 5:], state=state))
    assert torch.equal(cut[0], whole[0]) and not torch.allclose(cut, whole)


def test_what_does_not_fit_the_tokens_is_refused():
    model, tokens = small(), torch.randint(20, (2, 6))
    with pytest.raises(ValueError, match=r"key_mask must be bool of shape .*\(2, 6\)"):
        model.loss(tokens, key_mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"segment_ids must have shape"):
        model.loss(tokens, segment_ids=torch.zeros(7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"end at time = 6, got 0 and 4"):
        model.loss(tokens[:1], cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"last_only=True needs logits"):
        model(tokens, targets=tokens, last_only=True)


def test_hooks_and_wrappers_take_part_in_a_loss():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **options):
            return self.module(*args, **options)

    model, tokens, seen = small(), torch.randint(20, (2, 6)), []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    want = model.loss(tokens)
    assert seen == ["before", "after"]
    wrapped = Wrapper(model)(tokens[:, :-1], targets=tokens[:, 1:])
    assert torch.equal(wrapped, want) and len(seen) == 4


class Adapted(torch.nn.Module):
    """A projection with something beside it, and no weight of its own."""

    def __init__(self, base, share):
        super().__init__()
        self.base, self.beside = base, torch.nn.Linear(base.in_features, base.out_features)
        if share:
            self.weight = base.weight

    def forward(self, x):
        return self.base(x) + self.beside(x)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ["query", "key", "value", "out", "head"])
def test_a_projection_may_be_wrapped(name, share):
    model = small(tie_embeddings=False).eval()
    owner = model if name == "head" else model.blocks[0].attention
    plain = getattr(owner, name)
    setattr(owner, name, Adapted(plain, share).double())
    merged = torch.nn.Linear(plain.in_features, plain.out_features).double()
    beside = getattr(owner, name).beside
    merged.weight.data, merged.bias.data = plain.weight + beside.weight, beside.bias.data
    tokens = torch.randint(20, (2, 6))
    got = [model(tokens), model.loss(tokens), model.generate(tokens, 4, temperature=0)]
    setattr(owner, name, merged)
    want = [model(tokens), model.loss(tokens), model.generate(tokens, 4, temperature=0)]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_transforms_differentiate_it():
    hidden, weight, bias, targets = inputs()

    def loss(weight, size=4):
        return linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_size=size)

    want = torch.autograd.grad(loss(weight), weight)[0]
    got = torch.func.grad(loss)(weight.detach())
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    twice = torch.func.vmap(torch.func.grad(loss))(torch.stack([weight, 2 * weight]).detach())
    torch.testing.assert_close(twice[0], want, atol=1e-12, rtol=0)
    tangent = torch.ones_like(weight)
    along = torch.func.jvp(loss, (weight.detach(),), (tangent,))[1]
    torch.testing.assert_close(along, want.sum(), atol=1e-12, rtol=0)
