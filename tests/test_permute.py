"""PermuteFormer's permutations: against powers by repetition and the weights written out."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import judge
import pytest
import torch
from forms import BACKENDS
from torch import Tensor

from linear_rope import (
    Config,
    Encoder,
    LanguageModel,
    Permute,
    RotaryLinearAttention,
    SoftmaxAttention,
    linear_attention,
    make_rotary,
)

TIME = 13


def power(permutation: Tensor, exponent: int) -> Tensor:
    """P^exponent by squaring, as indices: (P x)_f = x_permutation[f]."""
    result, factor = torch.arange(len(permutation)), permutation
    while exponent:
        if exponent % 2:
            result = result[factor]
        factor = factor[factor]
        exponent //= 2
    return result


def permuted(permute: Permute, x: Tensor, at: Tensor) -> Tensor:
    """Every row by itself, in float64 if x is; at is (batch, time)."""
    groups = x.shape[1] // permute.heads
    return torch.stack(
        [
            torch.stack(
                [
                    torch.stack(
                        [
                            x[b, h, t][power(permute.permutations[h // groups], int(at[b, t]))]
                            for t in range(x.shape[2])
                        ]
                    )
                    for h in range(x.shape[1])
                ]
            )
            for b in range(x.shape[0])
        ]
    )


def written_out(
    qkv: Sequence[Tensor],
    permute: Permute,
    at: Tensor,
    *,
    ratios: list[float],
    feature_map: str = "relu",
    denominator: str = "rotated",
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    log_decay: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """The module's docstring over all pairs of tokens; ratios are one a key head."""
    q, k, v = qkv
    groups = q.shape[1] // k.shape[1]
    at = at.expand(q.shape[0], q.shape[2])
    plain_q, plain_k = judge.phi(feature_map, q), judge.phi(feature_map, k)
    moved_q, moved_k = permuted(permute, plain_q, at), permuted(permute, plain_k, at)
    apart = (at[:, :, None] - at[:, None, :]).double()
    ratio = torch.tensor(ratios, dtype=torch.float64)[:, None, None]
    left = (ratio ** apart[:, None].clamp(min=0)).expand(-1, k.shape[1], -1, -1)
    if causal:
        left = left.tril()
    if mask is not None:
        left = left * mask[:, None, None]
    if documents is not None:
        left = left * (documents[:, :, None] == documents[:, None])[:, None]
    if log_decay is not None:
        left = left * judge.left_over(log_decay, k)[..., 1:]

    def weights(a: Tensor, b: Tensor) -> Tensor:
        return left.repeat_interleave(groups, 1) * (a @ b.repeat_interleave(groups, 1).mT)

    out = weights(moved_q, moved_k) @ v.double().repeat_interleave(groups, 1)
    below = {"rotated": (moved_q, moved_k), "unrotated": (plain_q, plain_k)}
    if denominator == "none":
        return out
    return out / weights(*below[denominator]).sum(-1, keepdim=True)


def inputs(
    heads: int = 2, kv_heads: int = 2, width: int = 5, time: int = TIME, seed: int = 0
) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, 3))
    return [
        torch.randn(2, h, time, w, generator=draws, dtype=torch.float64).requires_grad_()
        for h, w in shapes
    ]


def authors(heads: int) -> list[float]:
    """The ratios of the authors' language model: sigmoid(3 h / heads + 2)."""
    return [1 / (1 + math.exp(-(3 * h / heads + 2))) for h in range(heads)]


# ---- The permutation


@pytest.mark.parametrize(("width", "heads"), [(1, 1), (2, 3), (5, 2), (64, 4)])
def test_powers_by_cycles_are_powers(width: int, heads: int) -> None:
    permute = Permute(width, heads, seed=7)
    for permutation in permute.permutations:
        assert sorted(permutation.tolist()) == list(range(width))
    x = torch.randn(2, 2 * heads, TIME, width, dtype=torch.float64)
    for at in (torch.arange(TIME), torch.arange(TIME) * 10**14 + 3, torch.randint(99, (2, TIME))):
        assert torch.equal(permute(x, at), permuted(permute, x, at.expand(2, TIME)))
    assert torch.equal(permute(x, torch.zeros(TIME, dtype=torch.int64)), x)


def test_heads_and_seeds_have_permutations_of_their_own() -> None:
    permute = Permute(32, 4)
    assert len({tuple(row.tolist()) for row in permute.permutations}) == 4
    assert not torch.equal(Permute(32, 4, seed=1).permutations, permute.permutations)
    assert (
        Permute(32, 4) == permute == copy.deepcopy(permute) == pickle.loads(pickle.dumps(permute))
    )
    assert hash(Permute(32, 4)) == hash(permute) and Permute(32, 4, seed=1) != permute
    assert repr(permute) == "Permute(width=32, heads=4, seed=0, ratio=None)"
    with torch.device("meta"):  # it is the same wherever a model is described
        assert torch.equal(Permute(32, 4).permutations, permute.permutations)


def test_ratios_are_the_authors() -> None:
    fade = Permute(4, 5).log_fade
    assert fade is not None
    assert [math.exp(x) for x in fade] == pytest.approx(authors(5), rel=1e-14)
    assert Permute(4, 2, ratio=0.5).log_fade == (math.log(0.5),) * 2
    assert Permute(4, 2, ratio=1).log_fade is None


# ---- In linear attention


@pytest.mark.parametrize("denominator", ["rotated", "unrotated", "none"])
@pytest.mark.parametrize("ratio", [None, 0.7, 1])
def test_outputs_and_gradients_are_those_of_the_formula(
    denominator: str, ratio: float | None
) -> None:
    ratios = authors(2) if ratio is None else [float(ratio)] * 2
    for heads, kv_heads, width in ((2, 2, 5), (4, 2, 8), (2, 2, 1)):
        leaves = inputs(heads, kv_heads, width)
        gate = -torch.rand(2, kv_heads, TIME, dtype=torch.float64)
        leaves.append(gate.requires_grad_())
        permute = Permute(width, kv_heads, ratio=ratio)
        run: dict[str, Any] = {"denominator": denominator, "log_decay": gate}
        want = written_out(leaves[:3], permute, torch.arange(TIME), ratios=ratios, **run)
        pull = torch.randn_like(want)
        right = torch.autograd.grad(want, leaves, pull)
        for backend in BACKENDS:
            got = linear_attention(
                *leaves[:3],
                feature_map="relu",
                rotary=permute,
                backend=backend,
                chunk_size=4,
                **run,
            )
            assert judge.error(got, want) <= 1e-12, backend
            for one, other in zip(torch.autograd.grad(got, leaves, pull), right, strict=True):
                assert judge.error(one, other) <= 1e-10, backend


@pytest.mark.parametrize("feature_map", ["elu+1", "exp"])
def test_a_ratio_counts_positions_not_tokens(feature_map: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    permute = Permute(5, 2)
    run: dict[str, Any] = {
        "feature_map": feature_map, "rotary": permute, "denominator": "rotated",
    }  # fmt: skip
    ids = torch.stack([torch.arange(TIME) * 3, torch.arange(TIME) // 2 + 5])
    want = written_out([q, k, v], permute, ids, ratios=authors(2), feature_map=feature_map)
    assert judge.error(linear_attention(q, k, v, positions=ids, **run), want) <= 1e-12
    # Only distances count: far from 0 nothing changes.
    far = linear_attention(q, k, v, positions=ids + 10**12, **run)
    assert judge.error(far, want) <= 1e-12
    with pytest.raises(ValueError, match="must not descend under a permutation that fades"):
        linear_attention(q, k, v, positions=ids.flip(1), **run)


def test_any_split_is_the_whole() -> None:
    """With pads, a first position a row, ids, and calls without a token that move the position."""
    q, k, v = (x.detach() for x in inputs(4, 2))
    permute = Permute(5, 2)
    run: dict[str, Any] = {"feature_map": "relu", "rotary": permute, "denominator": "rotated"}
    mask = torch.ones(2, TIME, dtype=torch.bool)
    mask[0, :3] = mask[1, 5:8] = mask[1, 12:] = False
    first = torch.tensor([[4], [0]])
    at = (mask.long().cumsum(1) - 1).clamp(min=0) + first
    want = written_out([q, k, v], permute, at, ratios=authors(2), mask=mask)
    for split in ((TIME,), (5, 8), (1,) * TIME, (4, 0, 1, 1, 7)):
        state, parts, begin = None, [], 0
        for size in split:
            part = slice(begin, begin + size)
            out, state = linear_attention(
                q[:, :, part], k[:, :, part], v[:, :, part], key_mask=mask[:, part],
                positions=None if begin else first, state=state, return_state=True, **run,
            )  # fmt: skip
            parts.append(out)
            begin += size
        assert judge.error(torch.cat(parts, 2)[:, :, 3:5], want[:, :, 3:5]) <= 1e-12
        got = torch.cat(parts, 2).mT.masked_fill(~mask[:, None, None], 0)
        assert judge.error(got, want.nan_to_num().mT.masked_fill(~mask[:, None, None], 0)) <= 1e-12
    ids = torch.tensor([0, 1, 2, 3, 4, 9, 10, 20, 21, 22, 40, 41, 42])
    want = written_out([q, k, v], permute, ids, ratios=authors(2))
    state, parts = None, []
    for begin, end in ((0, 5), (5, 10), (10, 13)):
        part = slice(begin, end)
        none = slice(begin, begin)  # no token, but the position of the next
        _, state = linear_attention(
            q[:, :, none], k[:, :, none], v[:, :, none], positions=int(ids[begin]), state=state,
            return_state=True, **run,
        )  # fmt: skip
        out, state = linear_attention(
            q[:, :, part], k[:, :, part], v[:, :, part], positions=ids[part], state=state,
            return_state=True, **run,
        )  # fmt: skip
        parts.append(out)
    assert judge.error(torch.cat(parts, 2), want) <= 1e-12


def test_packed_documents_are_each_alone() -> None:
    leaves = inputs()
    permute = Permute(5, 2)
    run: dict[str, Any] = {"feature_map": "relu", "rotary": permute, "denominator": "rotated"}
    documents = torch.tensor([[0] * 4 + [1] + [2] * 8, [0] * 8 + [1] * 4 + [2]])
    at = torch.tensor([[*range(4), 0, *range(8)], [*range(8), *range(4), 0]])
    want = written_out(leaves, permute, at, ratios=authors(2), documents=documents)
    got, state = linear_attention(*leaves, segment_ids=documents, return_state=True, **run)
    assert judge.error(got, want) <= 1e-12
    pull = torch.randn_like(want)
    right = torch.autograd.grad(want, leaves, pull)
    for one, other in zip(torch.autograd.grad(got, leaves, pull), right, strict=True):
        assert judge.error(one, other) <= 1e-10
    assert state.position.tolist() == [8, 1]


def test_low_precision_is_close_and_dtypes_are_kept() -> None:
    permute = Permute(64, 2)
    for dtype, tolerance in {
        torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3,
    }.items():  # fmt: skip
        low = [x.detach().to(dtype) for x in inputs(width=64, time=40)]
        want = written_out(low, permute, torch.arange(40), ratios=authors(2))
        got = linear_attention(*low, feature_map="relu", rotary=permute, denominator="rotated")
        assert got.dtype == dtype and judge.error(got, want) <= tolerance


def test_without_an_order_nothing_fades() -> None:
    q, k, v = inputs()
    permute = Permute(5, 2, ratio=1)
    run: dict[str, Any] = {"feature_map": "relu", "denominator": "rotated", "causal": False}
    got = linear_attention(q, k, v, rotary=permute, **run)
    want = written_out([q, k, v], permute, torch.arange(TIME), ratios=[1.0, 1.0], causal=False)
    assert judge.error(got, want) <= 1e-12
    with pytest.raises(ValueError, match="a permutation that fades needs causal=True"):
        linear_attention(q, k, v, rotary=Permute(5, 2), **run)
    with pytest.raises(ValueError, match="needs rotate=\"after\", got 'before'"):
        linear_attention(q, k, v, rotary=Permute(5, 2), rotate="before")


# ---- In layers and models


def test_a_layer_has_a_permutation_for_each_key_head() -> None:
    options: dict[str, Any] = {"feature_map": "relu", "denominator": "rotated"}
    layer = RotaryLinearAttention(
        20, 4, kv_heads=2, rotary_scaling="permute:seed=3", **options
    ).double()
    assert layer.rotary == Permute(5, 2, seed=3)
    x = torch.randn(2, TIME, 20, dtype=torch.float64)
    q = layer.query(x).unflatten(-1, (4, 5)).transpose(1, 2)
    k, v = (f(x).unflatten(-1, (2, 5)).transpose(1, 2) for f in (layer.key, layer.value))
    want = written_out([q, k, v], layer.rotary, torch.arange(TIME), ratios=authors(2))
    assert judge.error(layer(x), layer.out(want.transpose(1, 2).flatten(2))) <= 1e-12
    assert RotaryLinearAttention(
        20, 4, rotary_scaling="permute:ratio=0.5", **options
    ).rotary == Permute(5, 4, ratio=0.5)
    # Without an order nothing fades, unless told to.
    assert RotaryLinearAttention(
        20, 4, rotary_scaling="permute", causal=False, **options
    ).rotary == Permute(5, 4, ratio=1)
    assert make_rotary(6, scaling="permute") == Permute(6)
    other = RotaryLinearAttention(20, 4, kv_heads=2, rotary_scaling="permute", **options).double()
    with pytest.raises(ValueError, match="state is of another feature map, rotation"):
        other(x, state=layer(x, return_state=True)[1])


def test_a_model_learns_streams_and_generates() -> None:
    torch.manual_seed(0)
    config = Config(
        vocab_size=11, dim=16, layers=2, heads=2, feature_map="relu", position="permute",
        denominator="rotated",
    )  # fmt: skip
    model = LanguageModel(config)
    tokens = torch.randint(11, (2, TIME))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = model.loss(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    model = model.double().eval()
    with torch.no_grad():
        whole, state, parts = model(tokens), None, []
        for part in tokens.split((5, 1, 7), 1):
            out, state = model(part, state=state, return_state=True)
            parts.append(out)
        assert judge.error(torch.cat(parts, 1), whole) <= 1e-12
        want = tokens[:, :4]
        for _ in range(5):
            want = torch.cat([want, model(want)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(model.generate(tokens[:, :4], 5, temperature=0.0), want)
    encoder = Encoder(config)
    assert encoder(tokens).isfinite().all()
    assert encoder.blocks[0].attention.rotary.ratio == 1  # type: ignore[union-attr]


def test_it_compiles_in_one_graph() -> None:
    layer = RotaryLinearAttention(
        8, 2, feature_map="relu", rotary_scaling="permute", denominator="rotated"
    )
    x = torch.randn(2, 6, 8)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert judge.error(compiled(x), layer(x)) <= 1e-6


# ---- What it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "width=0 of a permutation must be an integer from 1 up"),
        ((4, 0), "heads=0 of a permutation must be an integer from 1 up"),
        ((4, 2, 0.5), "seed=0.5 of a permutation must be an integer"),
        ((4, 2, 0, 0.0), r"ratio=0.0 of a permutation must be in \(0, 1\]"),
        ((4, 2, 0, 1.5), r"ratio=1.5 of a permutation must be in \(0, 1\]"),
    ],
)
def test_permutations_that_are_none(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Permute(*arguments)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"x has 2 heads of width 4 but .* width 5 and heads=2"):
        Permute(5, 2)(torch.randn(1, 2, 3, 4), torch.arange(3))
    with pytest.raises(ValueError, match=r"x has 2 heads of width 5 but .* heads=3"):
        linear_attention(q, k, v, feature_map="relu", rotary=Permute(5, 3))
    with pytest.raises(ValueError, match="rotary was made for width 6 but"):
        linear_attention(q, k, v, feature_map="relu", rotary=Permute(6, 2))
    with pytest.raises(ValueError, match="rotary_scaling='permute' needs linear attention"):
        SoftmaxAttention(8, 2, rotary_scaling="permute")
    with pytest.raises(ValueError, match=r"a permutation has no angles: leave .*'half'"):
        RotaryLinearAttention(8, 2, rotary_scaling="permute", pairing="half")
    with pytest.raises(ValueError, match="speed"):
        RotaryLinearAttention(8, 2, rotary_scaling="permute:speed=1")
    fields: dict[str, Any] = {"vocab_size": 5, "dim": 8, "heads": 2, "position": "permute"}
    for more in ({"attention": "softmax"}, {"rotate": "before"}):
        with pytest.raises(ValueError, match=r"position='permute' needs attention='linear' and"):
            Config(**{**fields, **more})
    with pytest.raises(ValueError, match="leave rotary_base"):
        Config(**fields, rotary_base=100.0)
    with pytest.raises(ValueError, match="needs position='rotary', got 'permute'"):
        Config(**fields, rotary_scaling="linear:factor=2")
