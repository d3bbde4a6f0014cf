"""ALiBi's bias by distance in softmax attention: against the softmax written out, in every form."""

from __future__ import annotations

from typing import Any

import judge
import pytest
import torch
from torch import Tensor

from linear_rope import Config, Encoder, LanguageModel, SoftmaxAttention

DIM, TIME = 12, 11
MASK = torch.ones(2, TIME, dtype=torch.bool)
MASK[0, :3] = MASK[1, 5:8] = MASK[1, 10:] = False  # left, middle, right
DOCUMENTS = torch.tensor([[0] * 4 + [1] + [2] * 6, [0] * 6 + [1] * 4 + [2]])


def build(causal: bool = True, heads: int = 3, kv_heads: int | None = None, **more: Any) -> Any:
    return SoftmaxAttention(
        DIM, heads, kv_heads=kv_heads, rotate="none", alibi=True, causal=causal, **more
    ).double()


def written_out(
    layer: Any,
    x: Tensor,
    at: Tensor,
    *,
    context: Tensor | None = None,
    at_k: Tensor | None = None,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """One query at a time, one head at a time."""
    context, at_k = x if context is None else context, at if at_k is None else at_k
    batch, groups = len(x), layer.heads // layer.kv_heads
    q = layer.query(x).unflatten(-1, (layer.heads, -1))
    k = layer.key(context).unflatten(-1, (layer.kv_heads, -1))
    v = layer.value(context).unflatten(-1, (layer.kv_heads, -1))
    at, at_k = at.expand(batch, -1), at_k.expand(batch, -1)
    rows = []
    for b in range(batch):
        for m in range(x.shape[1]):
            sees = torch.ones(context.shape[1], dtype=torch.bool)
            if layer.causal:
                sees[m + 1 :] = False
            if mask is not None:
                sees &= mask[b]
            if documents is not None:
                sees &= documents[b] == documents[b, m]
            for h in range(layer.heads):
                scores = (k[b, :, h // groups] @ q[b, m, h]) / layer.head_dim**0.5
                # (h counts from 1 in the paper)
                scores = scores - (at[b, m] - at_k[b]).abs().double() * 2 ** (
                    -8 * (h + 1) / layer.heads
                )
                if sees.any():
                    rows.append(scores[sees].softmax(0) @ v[b, sees, h // groups])
                else:
                    rows.append(torch.zeros(v.shape[-1], dtype=torch.float64))
    return layer.out(torch.stack(rows).reshape(batch, x.shape[1], -1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", ["plain", "mask", "packed", "both", "ids"])
def test_it_is_the_softmax_with_a_bias(causal: bool, rows: str) -> None:
    for heads, kv_heads in ((3, None), (4, 2), (1, None)):
        layer = build(causal, heads, kv_heads)
        x = torch.randn(2, TIME, DIM, dtype=torch.float64, requires_grad=True)
        mask = MASK if rows in ("mask", "both") else None
        documents = DOCUMENTS if rows in ("packed", "both") else None
        at = torch.arange(TIME)
        given: dict[str, Any] = {"key_mask": mask, "segment_ids": documents}
        if rows == "ids":  # in any order: nothing fades with them
            at = torch.stack([torch.randperm(TIME) * 3, torch.arange(TIME) // 2])
            given["positions"] = at
        elif documents is not None:
            real = torch.ones_like(MASK) if mask is None else mask
            counted = torch.zeros(2, TIME, dtype=torch.int64)
            for b in range(2):
                for number in DOCUMENTS[b].unique():
                    here = DOCUMENTS[b] == number
                    counted[b, here] = (real[b, here].long().cumsum(0) - 1).clamp(min=0)
            at = counted
        elif mask is not None:
            at = (mask.long().cumsum(1) - 1).clamp(min=0)
        got = layer(x, **given)
        want = written_out(layer, x, at, mask=mask, documents=documents)
        shown = torch.ones_like(MASK) if mask is None else mask
        assert judge.error(got[shown], want[shown]) <= 1e-12
        pull = torch.randn_like(want) * shown[..., None]
        leaves = [x, *layer.parameters()]
        right = torch.autograd.grad(want, leaves, pull)
        for one, other in zip(torch.autograd.grad(got, leaves, pull), right, strict=True):
            assert judge.error(one, other) <= 1e-10


@pytest.mark.parametrize("split", [(TIME,), (5, 6), (1,) * TIME, (4, 0, 1, 6)])
def test_any_split_is_the_whole(split: tuple[int, ...]) -> None:
    layer = build(heads=4, kv_heads=2)
    x = torch.randn(2, TIME, DIM, dtype=torch.float64)
    ids = torch.stack([torch.arange(TIME) * 3 + 7, torch.arange(TIME) ** 2])
    for mask, at in ((None, None), (MASK, None), (None, ids)):
        count = torch.arange(TIME) if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)
        want = written_out(layer, x, count if at is None else at, mask=mask)
        state, parts, begin = None, [], 0
        for size in split:
            part = slice(begin, begin + size)
            out, state = layer(
                x[:, part],
                key_mask=None if mask is None else mask[:, part],
                positions=None if at is None else at[:, part],
                state=state,
                return_state=True,
            )
            parts.append(out)
            # What can be done to a state on the way: rows back and forth, a copy.
            turned = state.clone().index_select(torch.tensor([1, 0])).to("cpu").detach()
            state = turned.index_select(torch.tensor([1, 0]))
            begin += size
        shown = torch.ones_like(MASK) if mask is None else mask
        assert judge.error(torch.cat(parts, 1)[shown], want[shown]) <= 1e-12


def test_a_packed_row_goes_on_with_its_last_document() -> None:
    layer = build()
    x = torch.randn(2, TIME + 2, DIM, dtype=torch.float64)
    _, state = layer(x[:, :TIME], segment_ids=DOCUMENTS, return_state=True)
    got = layer(x[:, TIME:], state=state)
    for row in range(2):
        last = int((DOCUMENTS[row] == 2).sum())
        alone = layer(x[row : row + 1, TIME - last :])
        assert judge.error(got[row : row + 1], alone[:, last:]) <= 1e-12


def test_cross_attention_takes_both_positions() -> None:
    layer = build(causal=False)
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    context = torch.randn(2, 7, DIM, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    got = layer(x, context, key_mask=mask, positions=3)
    at_k = torch.arange(7).expand(2, 7).clone()
    at_k[1, 4:] = 3
    want = written_out(layer, x, torch.arange(4) + 3, context=context, at_k=at_k, mask=mask)
    assert judge.error(got, want) <= 1e-12


def test_far_positions_and_low_precision_lose_nothing() -> None:
    layer = build()
    x = torch.randn(2, TIME, DIM, dtype=torch.float64)
    near = layer(x)
    assert judge.error(layer(x, positions=10**12), near) <= 1e-12
    single = layer.float()
    assert judge.error(single(x.float(), positions=10**12), near) <= 1e-5
    for dtype, tolerance in ((torch.bfloat16, 5e-2), (torch.float16, 5e-3)):
        low = layer.to(dtype)(x.to(dtype))
        assert low.dtype == dtype and judge.error(low, near) <= tolerance
        layer.double()


def test_empty_calls_and_rows_without_a_key() -> None:
    layer = build()
    x = torch.randn(2, TIME, DIM, dtype=torch.float64)
    out, state = layer(x[:, :0], positions=5, return_state=True)
    assert out.shape == (2, 0, DIM) and state.position.tolist() == [5, 5]
    none = torch.zeros(2, TIME, dtype=torch.bool)
    got = layer(x, key_mask=none)
    assert judge.error(got, torch.zeros_like(got)) == 0.0
    layer(x, key_mask=none).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_models_stream_generate_and_encode() -> None:
    config = Config(vocab_size=11, dim=16, layers=2, heads=4, attention="softmax", position="alibi")
    model = LanguageModel(config).double().eval()
    tokens = torch.randint(11, (2, TIME))
    with torch.no_grad():
        prompt = tokens[:, :5]
        got = model.generate(prompt, 6, temperature=0.0)
        want = prompt
        for _ in range(6):
            want = torch.cat([want, model(want)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(got, want)
    # The bias tells the tokens' order: without it, a set of keys is all that attention sees.
    swapped = tokens[:, [1, 0, *range(2, TIME)]]
    assert judge.error(model(swapped)[:, -1], model(tokens)[:, -1]) > 1e-6
    assert Encoder(config)(tokens).isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="alibi=True takes the place of a rotation"):
        SoftmaxAttention(8, 2, alibi=True)
    with pytest.raises(ValueError, match="position='alibi' is a bias inside a softmax"):
        Config(position="alibi")
    layer, x = build(), torch.randn(2, TIME, DIM, dtype=torch.float64)
    plain = SoftmaxAttention(DIM, 3, rotate="none").double()
    for one, other in ((layer, plain), (plain, layer)):
        with pytest.raises(ValueError, match="state is of another"):
            one(x, state=other(x, return_state=True)[1])
