"""Documents packed in a row, padded prompts, grouped heads: equal to running each alone."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import pytest
import torch
from forms import BACKENDS
from torch import Tensor

from linear_rope import (
    Config,
    LanguageModel,
    ModelState,
    Rotary,
    RotaryLinearAttention,
    causal_product,
    linear_attention,
    make_feature_map,
)

LENGTHS = [3, 1, 0, 70, 5, 64, 1, 1, 20]  # an empty one, single tokens, one longer than a chunk
LIMITS = torch.tensor([0, *LENGTHS]).cumsum(0)
IDS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
TIME = int(LIMITS[-1])


def phi_of(name: str) -> Any:
    options = {"features": 16, "seed": 3} if name.startswith("favor") else {}
    return make_feature_map(name, 8, **options).double()


def inputs(heads: int, key_heads: int, decay: bool) -> list[Tensor]:
    g = torch.Generator().manual_seed(heads)
    shapes = [(1, heads, TIME, 8), (1, key_heads, TIME, 8), (1, key_heads, TIME, 5)]
    tensors = [torch.randn(s, generator=g, dtype=torch.float64) * 2 for s in shapes]
    if decay:
        tensors.append(-torch.rand(1, key_heads, TIME, generator=g, dtype=torch.float64))
    return [x.requires_grad_() for x in tensors]


def one_by_one(tensors: list[Tensor], **options: Any) -> Tensor:
    """Each document in a call of its own, with a key head for every query head."""
    q, *rest = tensors
    groups = q.shape[1] // rest[0].shape[1]
    k, v, *g = (x.repeat_interleave(groups, dim=1) for x in rest)
    parts = []
    for a, b in pairwise(LIMITS.tolist()):
        if a < b:
            decay = g[0][:, :, a:b] if g else None
            cut = (x[:, :, a:b] for x in (q, k, v))
            parts.append(linear_attention(*cut, log_decay=decay, **options))
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("backend", [*BACKENDS, "non-causal"])
@pytest.mark.parametrize("name", ["elu+1", "favor+"])
def test_packed_documents_equal_single_ones(name: str, backend: str, key_heads: int) -> None:
    causal = backend != "non-causal"
    tensors = inputs(4, key_heads, decay=causal)
    phi = phi_of(name)
    options = {"feature_map": phi, "rotary": Rotary(phi.feature_dim), "causal": causal}
    want = one_by_one(tensors, **options, backend="reference" if causal else "auto")
    cotangent = torch.randn(want.shape, dtype=torch.float64)
    want_grads = torch.autograd.grad((want * cotangent).sum(), tensors)
    q, k, v, *g = tensors
    for packing in ({"cu_seqlens": LIMITS}, {"segment_ids": IDS}, {"segment_ids": 7 * IDS[0]}):
        got = linear_attention(
            q,
            k,
            v,
            log_decay=g[0] if g else None,
            backend=backend if causal else "auto",
            **options,
            **packing,
        )
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
        grads = torch.autograd.grad((got * cotangent).sum(), tensors)
        for one, other in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_the_next_document_does_not_see_a_thing() -> None:
    q, k, v = (x.detach() for x in inputs(4, 4, decay=False))
    phi = phi_of("favor+")
    options: dict[str, Any] = {"feature_map": phi, "rotary": Rotary(16), "cu_seqlens": LIMITS}
    before = linear_attention(q, k, v, **options)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, :74], v2[:, :, :74] = 30 * k2[:, :, :74], 1e30  # the first four documents
    after = linear_attention(q, k2, v2, **options)
    torch.testing.assert_close(after[:, :, 74:], before[:, :, 74:], atol=1e-9, rtol=1e-9)
    assert not torch.allclose(after[:, :, :74], before[:, :, :74])


@pytest.mark.parametrize("backend", [*BACKENDS, "non-causal"])
def test_a_loud_document_does_not_flatten_a_quiet_one_in_float32(backend: str) -> None:
    """Features lie within exp(-40) of their maximum: it must be the document's own."""
    phi = make_feature_map("favor+", 128, features=32, seed=2)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 20, 128, generator=g) * s for s in (0.5, 0.5, 1.0))
    k[0, 0, 3] = phi.projection[0] / phi.scale  # a log feature of about 60
    options: dict[str, Any] = {"feature_map": phi, "causal": backend != "non-causal"}
    if backend != "non-causal":
        options["backend"] = backend
    got = linear_attention(q, k, v, cu_seqlens=torch.tensor([0, 8, 20]), **options)
    want = linear_attention(*(x[:, :, 8:] for x in (q, k, v)), **options)
    torch.testing.assert_close(got[:, :, 8:], want, atol=1e-5, rtol=0)


MODELS: dict[str, dict[str, Any]] = {
    "elu+1": {},
    "grouped, normed": {"kv_heads": 2, "qk_norm": True},
    "favor+, one key head, decay": {"kv_heads": 1, "decay": "learned", "feature_map": "favor+"},
    "before, output norm": {"rotate": "before", "output_norm": True},
    "softmax": {"attention": "softmax", "kv_heads": 2, "qk_norm": True},
    "learned": {"position": "learned", "max_length": 64},
    "softmax, sinusoidal": {"position": "sinusoidal", "attention": "softmax"},
}


def model_of(kind: str) -> LanguageModel:
    model = LanguageModel(Config(layers=2, dim=32, heads=4, vocab_size=31, **MODELS[kind]))
    model.initialize(5)
    return model.double().eval()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_generates_what_single_prompts_do(kind: str, side: str) -> None:
    model, lengths = model_of(kind), [9, 4, 6]
    prompts = torch.randint(31, (3, 9))
    mask = torch.stack([torch.arange(9) < n for n in lengths])
    mask = mask.flip(1) if side == "left" else mask
    got = model.generate(prompts, 5, key_mask=mask, temperature=0)
    for row, length in enumerate(lengths):
        whole = prompts[row][mask[row]][None]
        for _ in range(5):  # greedy decoding by full recomputation
            whole = torch.cat([whole, model(whole)[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert got[row, 9:].tolist() == whole[0, length:].tolist()


@pytest.mark.parametrize("kind", MODELS)
def test_a_packed_model_goes_on_with_the_last_document(kind: str) -> None:
    model = model_of(kind)
    tokens, limits = torch.randint(31, (1, 30)), [0, 7, 7, 8, 20, 30]
    want = torch.cat([model(tokens[:, a:b]) for a, b in pairwise(limits) if a < b], dim=1)
    got = model(tokens, cu_seqlens=torch.tensor(limits))
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
    ids = torch.tensor([[0] * 7 + [1] + [2] * 12 + [3] * 10])
    head, state = model(tokens[:, :15], segment_ids=ids[:, :15], return_state=True)
    assert state.position.tolist() == [7]
    tail = model(tokens[:, 15:], segment_ids=ids[:, 15:], state=state)
    torch.testing.assert_close(torch.cat([head, tail], dim=1), want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["favor+, one key head, decay", "softmax"])
def test_states_are_values(kind: str) -> None:
    model = model_of(kind)
    _, state = model.prefill(torch.randint(31, (2, 6)))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)  # with the safe default
    assert isinstance(loaded, ModelState)
    copy, step = state.clone(), torch.tensor([3, 4])
    want, _ = model.decode(step, state)
    for one in (loaded, copy, state.detach(), state.to("cpu"), state.to(torch.float64)):
        torch.testing.assert_close(model.decode(step, one)[0], want, atol=0, rtol=0)
    for layer, kept in zip(state.layers, copy.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer, kept, strict=True))
    swapped, _ = model.decode(step.flip(0), state.index_select(torch.tensor([1, 0])))
    torch.testing.assert_close(swapped, want.flip(0), atol=1e-12, rtol=0)
    assert state.to(torch.float32).layers[0].position.dtype == torch.int64


def test_a_group_keeps_one_state_and_fewer_parameters() -> None:
    layer = RotaryLinearAttention(32, 4, kv_heads=2, decay="learned")
    assert layer.key.weight.shape == (16, 32) and layer.value.weight.shape == (16, 32)
    _, state = layer(torch.randn(3, 5, 32), return_state=True)
    assert state.S.shape == (3, 2, 8, 8) and state.z.shape == (3, 2, 8)


def call(**options: Any) -> Tensor:
    x = torch.randn(options.pop("batch", 1), 2, 6, 4)
    return linear_attention(x, x, x, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_ids": torch.zeros(1, 6)}, r"segment_ids must be integers.*float32"),
        ({"segment_ids": torch.zeros(1, 5, dtype=torch.int64)}, r"segment_ids.*\(1, 6\).*\(1, 5\)"),
        ({"segment_ids": torch.tensor([[0, 0, 1, 1, 0, 0]])}, r"must be contiguous.*row 0"),
        ({"cu_seqlens": torch.tensor([1, 6])}, r"start at 0 and end at time = 6, got 1 and 6"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"start at 0 and end at time = 6, got 0 and 5"),
        ({"cu_seqlens": torch.tensor([0, 4, 2, 6])}, r"must ascend, got \[0, 4, 2, 6\]"),
        ({"cu_seqlens": torch.tensor([0])}, r"\(documents \+ 1,\)"),
        ({"cu_seqlens": torch.tensor([0, 6]), "batch": 2}, r"one flat row, but the batch is 2"),
        (
            {"cu_seqlens": torch.tensor([0, 6]), "segment_ids": torch.zeros(1, 6).long()},
            r"not both",
        ),
        ({"segment_ids": torch.zeros(1, 6).long(), "key_positions": 0}, r"need self-attention"),
        ({"segment_ids": [0] * 6}, r"segment_ids must be a tensor of integers, got .*list"),
        ({"cu_seqlens": [0, 6]}, r"cu_seqlens must be a tensor of integers, got .*list"),
        ({"key_mask": [[True] * 6]}, r"key_mask must be a tensor, got .*list"),
        ({"key_positions": -1, "causal": False}, r"^key_positions must not be negative, got -1"),
        ({"key_positions": torch.arange(4), "causal": False}, r"^key_positions must be a single"),
        ({"positions": 2**53}, r"^positions must be below 2\^53, got 9007199254740992"),
        ({"positions": torch.tensor([[2**62]])}, r"^positions must be below 2\^53"),
    ],
)
def test_bad_packing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**options)


@pytest.mark.parametrize("first", [7, torch.tensor(7), torch.tensor([[7], [7]])])
@pytest.mark.parametrize("packed", [False, True])
def test_a_call_of_padding_keeps_its_first_position(first: int | Tensor, packed: bool) -> None:
    """Row 0 has no real token in the first call, row 1 has one."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 9, 4, generator=g, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = mask[1, 1:4] = False
    options: dict[str, Any] = {"rotary": Rotary(4), "denominator": "rotated"}
    ids = torch.zeros(9, dtype=torch.int64) if packed else None
    whole = linear_attention(
        x, x, x, key_mask=mask, positions=first, segment_ids=ids, return_state=True, **options
    )
    head, tail = x[:, :, :4], x[:, :, 4:]
    ids = None if ids is None else ids[:4]
    rows, state = linear_attention(
        *(head,) * 3,
        key_mask=mask[:, :4],
        positions=first,
        segment_ids=ids,
        return_state=True,
        **options,
    )
    assert state.position.tolist() == [7, 8]
    rest, last = linear_attention(
        *(tail,) * 3, key_mask=mask[:, 4:], state=state, return_state=True, **options
    )
    torch.testing.assert_close(torch.cat([rows, rest], 2), whole[0], atol=1e-11, rtol=0)
    assert last.position.tolist() == whole[1].position.tolist() == [12, 13]


def test_a_model_keeps_the_first_position_of_a_call_of_padding() -> None:
    layer = RotaryLinearAttention(8, 2)
    x, nothing = torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.bool)
    _, state = layer(x, key_mask=nothing, positions=torch.tensor([[5], [9]]), return_state=True)
    assert state.position.tolist() == [5, 9]
    _, state = layer(x, key_mask=nothing, state=state, return_state=True)
    assert state.position.tolist() == [5, 9]


def test_the_next_position_follows_the_last_real_token_not_the_largest() -> None:
    x, ids = torch.randn(1, 2, 4, 4), torch.tensor([9, 5, 3, 7])
    for mask in ([1, 1, 1, 0], [0, 1, 1, 0]):
        _, state = linear_attention(
            x, x, x, positions=ids, key_mask=torch.tensor([mask]).bool(), return_state=True
        )
        assert state.position.tolist() == [4]


def test_bad_heads_and_prompts() -> None:
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 3, 6, 8)
    with pytest.raises(ValueError, match=r"4 heads of q must be a multiple.*3 and 3"):
        linear_attention(q, k, k)
    with pytest.raises(ValueError, match=r"kv_heads=3 does not divide heads=4"):
        RotaryLinearAttention(32, 4, kv_heads=3)
    mask = torch.tensor([[True, True], [False, False]])
    with pytest.raises(ValueError, match=r"key_mask must leave at least one real token"):
        model_of("elu+1").prefill(torch.zeros(2, 2, dtype=torch.int64), key_mask=mask)


@pytest.mark.parametrize(
    "fresh",
    [torch.zeros(1, 6), torch.zeros(2, 6, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.bool)],
)
def test_bad_fresh(fresh: Tensor) -> None:
    x = torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError, match=r"fresh must be bool of shape \(batch, time\) = \(1, 6\)"):
        causal_product(x, x, x, fresh=fresh)


def test_mixed_dtypes_of_the_product() -> None:
    x = torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError, match=r"share a dtype, got torch.float32, torch.float64"):
        causal_product(x, x.double(), x)
    with pytest.raises(ValueError, match=r"log_decay must be a floating-point tensor"):
        linear_attention(x, x, x, log_decay=torch.zeros(1, 2, 6, dtype=torch.int64))
