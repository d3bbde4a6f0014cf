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
    segments,
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


PADDED: dict[str, dict[str, Any]] = {
    **{name: MODELS[name] for name in ("elu+1", "favor+, one key head, decay", "softmax")},
    "learned": MODELS["learned"],
    "mixing": {"short_conv": 3, "token_shift": True, "local_heads": 2, "window": 4},
    "selective": {"rotary_scaling": "selective:gate=head,bias=1"},
    "xpos": {"rotary_scaling": "xpos", "decay": "learned"},
    "permute": {"position": "permute", "denominator": "rotated"},
    "alibi": {"attention": "softmax", "position": "alibi"},
    "relu": {"feature_map": "relu", "kv_heads": 2},
}
# Real tokens of three rows: documents of ids 3, 1 and 2; pads on the right, on the left, anywhere.
PAD = 9
AT_PADS = torch.tensor([
    [3, 3, 3, 1, 1, 2, 2, 2, PAD, PAD, PAD],
    [PAD, PAD, 3, 3, 3, 3, 1, 2, 2, 2, 2],
    [PAD, 3, 3, PAD, 3, 1, PAD, 2, PAD, 2, PAD],
])  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("name", PADDED)
def test_ids_at_pads_may_be_anything(name: str, backend: str) -> None:
    """The first document goes on from a state, whatever the id of pads before it; the new state is
    that of the last document, whatever stands behind it. A call of pads alone changes nothing."""
    options = {**PADDED[name]}
    if options.get("attention") == "softmax":
        if backend != "auto":
            pytest.skip("the form is that of torch")
    else:
        options["backend"] = backend
    model = LanguageModel(Config(layers=2, dim=32, heads=4, vocab_size=31, **options)).double()
    model.initialize(5)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    tokens, mask = torch.randint(31, AT_PADS.shape), AT_PADS != PAD
    before = torch.randint(31, (3, 5))
    _, past = model(before, return_state=True)
    got, state = model(tokens, key_mask=mask, segment_ids=AT_PADS, state=past, return_state=True)
    nothing = torch.zeros_like(mask)
    _, same = model(tokens, key_mask=nothing, segment_ids=AT_PADS, state=state, return_state=True)
    step = torch.randint(31, (3,))
    after, kept = model.decode(step, state)[0], model.decode(step, same)[0]
    for row in range(3):
        real, ids = tokens[row][mask[row]], AT_PADS[row][mask[row]]
        parts = [torch.cat([before[row], real[ids == 3]]), real[ids == 1], real[ids == 2]]
        want = torch.cat([model(part[None])[0] for part in parts])[5:]
        torch.testing.assert_close(got[row][mask[row]], want, atol=1e-9, rtol=0)
        last = torch.cat([parts[-1], step[row, None]])
        want = model(last[None])[0, -1]
        torch.testing.assert_close(after[row], want, atol=1e-9, rtol=0)
        torch.testing.assert_close(kept[row], want, atol=1e-9, rtol=0)
    assert state.position.tolist() == same.position.tolist() == [3, 4, 2]


def test_a_document_of_padding_alone_is_none() -> None:
    model = model_of("grouped, normed")
    tokens, mask = torch.randint(31, (1, 8)), torch.arange(8)[None] < 5
    _, want = model(tokens[:, :5], cu_seqlens=torch.tensor([0, 2, 5]), return_state=True)
    _, state = model(
        tokens, key_mask=mask, cu_seqlens=torch.tensor([0, 2, 5, 8]), return_state=True
    )
    for got, one in zip(state.layers, want.layers, strict=True):
        torch.testing.assert_close(got.S, one.S, atol=1e-12, rtol=0)
        assert got.position.tolist() == one.position.tolist() == [3]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"short_conv": 3, "token_shift": True, "local_heads": 1, "rotary_scaling": "selective"},
     {"attention": "softmax"}],
)  # fmt: skip
def test_ids_are_looked_at_once_a_call(options: Any, masked: bool, count_calls: Any) -> None:
    """Not in each layer, and in it at each part, and there in each row."""
    model = LanguageModel(Config(layers=3, dim=16, heads=2, vocab_size=31, **options))
    looks, fills = (count_calls(segments, name) for name in ("_check_contiguous", "fill_pads"))
    ids = torch.arange(6).repeat_interleave(2).expand(5, -1)
    mask = torch.rand(5, 12) < 0.7 if masked else None
    model(ids, segment_ids=ids, key_mask=mask)
    assert len(looks) == 1 and len(fills) == masked
    model(ids, segment_ids=ids, key_mask=torch.ones(5, 12, dtype=torch.bool))
    assert len(looks) == 2  # what is the caller's is looked at each time
    with pytest.raises(ValueError, match="must be contiguous, but in row 3 an id comes back"):
        model(ids, segment_ids=torch.where(torch.arange(5)[:, None] == 3, ids.flip(1) % 3, ids))
