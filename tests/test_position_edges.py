"""Positions where there is next to nothing: calls and batches without a token, pads, no tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import judge
import pytest
import torch
from torch import Tensor

from linear_rope import (
    Config,
    Encoder,
    LanguageModel,
    Rotary,
    RotaryLinearAttention,
    SoftmaxAttention,
    linear_attention,
    make_feature_map,
    make_rotary,
)

PER_ROW = torch.tensor([[7], [9]])


def layer_of(kind: str) -> Any:
    if kind == "softmax":
        return SoftmaxAttention(8, 2, rotary_scaling="yarn:factor=2,original_length=4").double()
    options: dict[str, Any] = {"mixed": {"short_conv": 3, "local_heads": 1, "window": 3}}
    options["xpos"] = {"rotary_scaling": "xpos:scale_base=2"}
    return RotaryLinearAttention(8, 2, **options.get(kind, {})).double()


@pytest.mark.parametrize("first", [7, torch.tensor(7), PER_ROW])
@pytest.mark.parametrize("kind", ["linear", "softmax", "mixed", "xpos"])
def test_a_call_without_a_token_keeps_its_first_position(kind: str, first: int | Tensor) -> None:
    layer, x = layer_of(kind), torch.randn(2, 6, 8, dtype=torch.float64)
    want = torch.as_tensor(first).reshape(-1).expand(2)
    _, state = layer(x[:, :0], positions=first, return_state=True)
    assert state.position.tolist() == want.tolist()
    _, state = layer(x[:, :0], state=state, return_state=True)
    assert state.position.tolist() == want.tolist()
    # A state that is moved on without a token stands where ids would have moved it.
    _, state = layer(x[:, :3], return_state=True)
    _, state = layer(x[:, :0], state=state, positions=first, return_state=True)
    rest, state = layer(x[:, 3:], state=state, return_state=True)
    ids = torch.cat([torch.arange(3).expand(2, 3), want[:, None] + torch.arange(3)], 1)
    assert judge.error(rest, layer(x, positions=ids)[:, 3:]) <= 1e-12
    assert state.position.tolist() == (want + 3).tolist()


@pytest.mark.parametrize("position", ["rotary", "sinusoidal"])
def test_a_model_without_a_token_keeps_its_first_position(position: str) -> None:
    model = LanguageModel(Config(vocab_size=5, dim=8, layers=2, heads=2, position=position))
    tokens = torch.randint(5, (2, 4))
    _, state = model(tokens[:, :0], positions=PER_ROW, return_state=True)
    assert [layer.position.tolist() for layer in state.layers] == [[7, 9]] * 2
    got = model(tokens, state=state)
    assert judge.error(got, model(tokens, positions=PER_ROW)) <= 1e-6


def test_ids_of_no_token_say_nothing() -> None:
    x, ids = torch.randn(2, 2, 4, 4), torch.zeros(2, 0, dtype=torch.int64)
    _, state = linear_attention(x, x, x, return_state=True)
    empty = x[:, :, :0]
    for at in (ids, ids[0]):
        _, after = linear_attention(
            empty, empty, empty, positions=at, state=state, return_state=True
        )
        assert after.position.tolist() == [4, 4]


@pytest.mark.parametrize(
    "kind", ["dynamic", "dynamic softmax", "dynamic encoder", "cosformer", "cosformer context"]
)
def test_an_id_at_a_pad_may_be_anything(kind: str) -> None:
    """Rules that look at all positions of a call do not see those of pads."""
    options: dict[str, Any] = {"causal": kind.split()[-1] not in ("encoder", "context")}
    build: Any = SoftmaxAttention if "softmax" in kind else RotaryLinearAttention
    if kind.startswith("cosformer"):
        options |= {"rotary_scaling": "cosformer:max_length=20", "denominator": "rotated"}
        options["feature_map"] = "relu-expand"
    else:
        options["rotary_scaling"] = "dynamic:factor=4,original_length=4"
    layer = build(8, 2, **options).double()
    x, mask = torch.randn(1, 9, 8, dtype=torch.float64), torch.ones(1, 9, dtype=torch.bool)
    mask[0, [0, 1, 4, 8]] = False
    ids = torch.tensor([[99, 0, 10, 11, 88, 13, 15, 16, 77]])
    given: dict[str, Any] = {"key_mask": mask, "positions": ids}
    alone: dict[str, Any] = {"positions": ids[mask][None]}
    if "context" in kind:
        given |= {"query_mask": mask, "context": x, "context_positions": ids}
        alone |= {"context": x[:, mask[0]], "context_positions": ids[mask][None]}
    want = layer(x[:, mask[0]], **alone)
    assert judge.error(layer(x, **given)[:, mask[0]], want) <= 1e-12


@pytest.mark.parametrize("kind", ["linear", "softmax", "mixed", "xpos"])
def test_a_row_of_pads_stays_where_its_state_is(kind: str) -> None:
    """Row 0 goes on by ids; row 1 has ended, and its ids are whatever fills the batch."""
    layer, x = layer_of(kind), torch.randn(2, 8, 8, dtype=torch.float64)
    _, state = layer(x[:, :5], return_state=True)
    mask, ids = torch.tensor([[True] * 2, [False] * 2]), torch.tensor([[6, 9], [0, 0]])
    _, state = layer(x[:, 5:7], key_mask=mask, positions=ids, state=state, return_state=True)
    assert state.position.tolist() == [10, 5]
    got = layer(x[:, 7:], state=state)
    want = layer(torch.cat([x[1:, :5], x[1:, 7:]], 1))[:, 5:]
    assert judge.error(got[1:], want) <= 1e-12


def test_a_learned_table_is_not_asked_for_the_ids_of_pads() -> None:
    config = Config(vocab_size=5, dim=8, layers=1, heads=2, position="learned", max_length=6)
    model, tokens = Encoder(config), torch.randint(5, (1, 4))
    mask, ids = torch.tensor([[True, True, True, False]]), torch.tensor([3, 4, 5, 6])
    got = model(tokens, key_mask=mask, positions=ids)[:, :3]
    assert judge.error(got, model(tokens[:, :3], positions=ids[:3])) <= 1e-6
    with pytest.raises(ValueError, match="position 6 is beyond max_length=6"):
        model(tokens, positions=ids)


@pytest.mark.parametrize("scaling", [None, "xpos", "learned", "llama3:factor=8,original_length=8"])
@pytest.mark.parametrize("shape", [(0, 3), (0, 1), (2, 0), (1, 0)])
def test_no_row_and_no_token(scaling: str | None, shape: tuple[int, int]) -> None:
    layer, x = RotaryLinearAttention(8, 2, rotary_scaling=scaling), torch.zeros(*shape, 8)
    ids = torch.zeros(shape, dtype=torch.int64)
    rows = [{}, {"segment_ids": ids}, {"key_mask": ids.bool()}, {"positions": ids[:, :1] + 3}]
    if shape == (1, 0):
        rows += [{"cu_seqlens": torch.tensor(limits)} for limits in ([0, 0], [0, 0, 0])]
    for row in rows:
        if "positions" in row and shape[1] == 0:
            continue
        out, state = layer(x, return_state=True, **row)
        again, state = layer(x, state=state, return_state=True, **row)
        assert out.shape == again.shape == x.shape
        assert state.position.shape == shape[:1]
        step, _ = layer(torch.zeros(shape[0], 1, 8), state=state, return_state=True)
        assert step.shape == (shape[0], 1, 8)
        assert step.isfinite().all()


def test_models_decode_without_a_row() -> None:
    for attention in ("linear", "softmax"):
        model = LanguageModel(Config(vocab_size=5, dim=8, layers=2, heads=2, attention=attention))
        tokens = torch.zeros(0, 3, dtype=torch.int64)
        _, state = model.eval()(tokens, return_state=True)
        logits, state = model.decode(tokens[:, 0], state)
        assert logits.shape == (0, 5)
        assert model.generate(tokens, 2).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_state_of_another_precision_decodes(attention: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = Config(vocab_size=5, dim=8, layers=2, heads=2, kv_heads=1, attention=attention)
    model, tokens = LanguageModel(config).eval(), torch.randint(5, (2, 9))
    _, state = model.prefill(tokens[:, :7])
    state = state.to(dtype)
    for at in (7, 8):
        logits, state = model.decode(tokens[:, at], state)
        want = model(tokens[:, : at + 1])[:, -1]
        assert logits.dtype == torch.float32
        assert judge.error(logits, want) <= (1e-5 if dtype == torch.float64 else 5e-2)


def test_an_empty_document_leaves_no_trace_in_states() -> None:
    x = torch.randn(1, 2, 10, 4, dtype=torch.float64)
    options: dict[str, Any] = {"rotary": Rotary(4), "return_state": True}
    _, past = linear_attention(x, x, x, **options)
    results = [
        linear_attention(x, x, x, state=past, cu_seqlens=torch.tensor(limits), **options)
        for limits in ([0, 4, 10], [0, 0, 4, 4, 10, 10])
    ]
    assert judge.error(results[1][0], results[0][0]) == 0.0
    for got, want in zip(results[1][1], results[0][1], strict=True):
        assert torch.equal(got, want)
    assert results[1][1].position.tolist() == [6]


NO_TENSORS = [None, 3, [1.0], "x", torch.ones(1, 2, 3, 4).numpy(), torch.tensor(1.0)]


@pytest.mark.parametrize("wrong", NO_TENSORS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_heads_must_be_tensors_of_four_axes(name: str, wrong: Any) -> None:
    heads = {n: torch.randn(1, 2, 3, 4) for n in "qkv"} | {name: wrong}
    shaped = r"have shape \(batch, head, time, width\)" if isinstance(wrong, Tensor) else "be a ten"
    with pytest.raises(ValueError, match=f"^{name} must {shaped}"):
        linear_attention(**heads)
    _, state = linear_attention(*torch.randn(3, 1, 2, 3, 4), return_state=True)
    heads = {n: torch.randn(1, 2, 1, 4) for n in "qkv"} | {name: wrong}
    with pytest.raises(ValueError, match=f"^{name} must {shaped}"):
        linear_attention(**heads, state=state)


def test_other_inputs_must_be_what_they_are() -> None:
    x = torch.randn(1, 2, 1, 4)
    _, state = linear_attention(x, x, x, return_state=True)
    for options in ({}, {"state": state}):
        with pytest.raises(ValueError, match=r"log_decay must be a tensor, got <class 'float'>"):
            linear_attention(x, x, x, log_decay=-1.0, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"feature_map=3 must be a name, such as 'elu\+1'"):
            linear_attention(x, x, x, feature_map=3, **options)  # type: ignore[arg-type]
    encoder = RotaryLinearAttention(8, 2, causal=False)
    model = LanguageModel(Config(vocab_size=5, dim=8, layers=1, heads=2)).eval()
    _, state = model.prefill(torch.zeros(1, 2, dtype=torch.int64))
    for wrong in (None, [[1, 2]], "x"):
        with pytest.raises(ValueError, match="x must be a tensor"):
            encoder(wrong)
        if wrong is not None:
            with pytest.raises(ValueError, match="context must be a tensor"):
                encoder(torch.zeros(1, 2, 8), wrong)
        calls: tuple[Any, ...] = (model, model.prefill, partial(model.decode, state=state))
        for call in calls:
            with pytest.raises(ValueError, match=r"(tokens|prompt) must be a tensor"):
                call(wrong)


def test_cosformer_streams_as_its_formula_says() -> None:
    limit, width = 64, 5
    q, k, v = torch.randn(3, 2, 2, 50, width, dtype=torch.float64)
    at = torch.arange(7.0, 57.0, dtype=torch.float64)
    weights = judge.phi("relu", q) @ judge.phi("relu", k).mT
    weights = (weights * (torch.pi / 2 * (at[:, None] - at) / limit).cos()).tril()
    want = weights @ v / weights.sum(-1, keepdim=True)
    options: dict[str, Any] = {
        "feature_map": make_feature_map("relu-expand", width),
        "rotary": make_rotary(2 * width, scaling=f"cosformer:max_length={limit}"),
        "denominator": "rotated",
        "return_state": True,
    }
    for sizes in ([50], [1, 1, 28, 0, 20], [1] * 50):
        parts, state = [], None
        for x, y, z in zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), strict=True):
            first = 7 if state is None else None
            out, state = linear_attention(x, y, z, positions=first, state=state, **options)
            parts.append(out)
        assert judge.error(torch.cat(parts, 2), want) <= 1e-12
    with pytest.raises(ValueError, match="position 106 is beyond max_length=64"):
        linear_attention(q, k, v, state=state, **options)


@pytest.mark.parametrize("switch", ["short_conv", "token_shift", "local_heads"])
def test_an_empty_batch_with_a_mask_passes_what_looks_back(switch: str) -> None:
    on = True if switch == "token_shift" else 1
    layer = RotaryLinearAttention(8, 2, **{switch: on})  # type: ignore[arg-type]
    out = layer(torch.randn(0, 3, 8), key_mask=torch.ones(0, 3, dtype=torch.bool))
    assert out.shape == (0, 3, 8)


def test_a_chunk_is_a_whole_number_of_tokens() -> None:
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, and an integer"):
        linear_attention(x, x, x, chunk_size=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [RotaryLinearAttention, SoftmaxAttention, Config])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pairing", "zzz", r"pairing='zzz' is unknown; choose one of: interleaved, half"),
        ("rotary_scaling", "nonsense", r"'nonsense' is unknown; choose one of: linear, ntk"),
        ("rotary_scaling", "yarn:factr=2", r"does not know the option factr"),
        ("rotary_scaling", "selective:gates=head", r"does not know the option gates"),
        ("rotary_scaling", "ntk:factor=2", r"'ntk:factor=2' needs a rotation, got rotate='none'"),
        ("rotary_scaling", "selective", r"'selective' needs a rotation, got rotate='none'"),
        ("rotary_fraction", 9.0, r"fraction=9.0 must be in"),
        ("rotary_base", -1.0, r"base=-1.0 must be positive"),
    ],
)
def test_what_shapes_a_rotation_is_checked_without_one(
    make: Any, name: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(dim=16, heads=2, rotate="none", **{name: value})


def test_what_has_no_effect_changes_nothing() -> None:
    """As `Config` says, so that arms can differ in their position alone."""
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 16, "layers": 1, "heads": 2}
    turning: list[dict[str, Any]] = [
        {"rotate": "before"},
        {"pairing": "half", "rotary_base": 5.0, "rotary_fraction": 0.5},
        {"window": 3},
        {"max_length": 4},
    ]
    other: dict[str, Any] = {"feature_map": "relu", "denominator": "none", "chunk_size": 3}
    softmax: dict[str, Any] = {"attention": "softmax"}
    nothing: dict[str, Any] = {"position": "none"}
    tokens = torch.randint(11, (1, 9))
    for base, more in [(nothing, turning), (softmax, [other, *turning[2:]])]:
        plain = LanguageModel(Config(**sizes, **base))
        for changes in more:
            model = LanguageModel(Config(**sizes, **base, **changes))
            model.load_state_dict(plain.state_dict())
            assert torch.equal(model(tokens), plain(tokens)), changes
