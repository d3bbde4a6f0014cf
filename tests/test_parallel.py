"""Sequence parallel attention: real processes over gloo, each judged against one on the whole."""

from __future__ import annotations

import copy
import datetime
import traceback
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from judge import attention, error
from torch import Tensor

from linear_rope import (
    Config,
    CosFormer,
    Encoder,
    LanguageModel,
    LearnedRotary,
    Rotary,
    RotaryLinearAttention,
    SoftmaxAttention,
    XPos,
    linear_attention,
    make_feature_map,
    parallel,
)

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}

# Lengths of the ranks' pieces: ragged, even, empty ones at every place, fewer tokens than ranks.
SPLITS = {
    2: ((5, 12), (16, 16), (0, 9), (9, 0), (1, 0), (0, 0), (70, 1)),
    4: ((3, 0, 7, 1), (8, 8, 8, 8), (0, 0, 5, 2), (6, 2, 0, 0), (1, 0, 1, 0), (0, 2, 0, 0)),
}

# What the quadratic judge knows of these choices.
JUDGED = ("denominator", "causal", "decay")

CASES: dict[str, dict[str, Any]] = {
    "elu+1": {},
    "no rotation": {"rotate": "none"},
    "before": {"rotate": "before"},
    "rotated denominator": {"denominator": "rotated"},
    "no denominator": {"denominator": "none"},
    "decay": {"decay": 1.0},
    "strong decay": {"decay": 300.0},
    "forget": {"decay": float("inf")},
    "groups": {"heads": 4, "decay": 1.0},
    "output norm": {"output_norm": True},
    "half": {"rotary": Rotary(8, fraction=0.5, pairing="half")},
    "cosformer": {
        "rotary": CosFormer(16, max_length=100),
        "feature_map": "relu-expand",
    },
    "learned": {"rotary": "learned"},
    "exp": {"feature_map": "exp"},
    "loud exp": {"feature_map": "exp", "loud": True},
    "exp, decay": {"feature_map": "exp", "loud": True, "decay": 1.0},
    "exp, no denominator": {"feature_map": "exp", "denominator": "none", "decay": 1.0},
    "favor+": {"feature_map": "favor+", "decay": 1.0, "heads": 4},
    "hedgehog": {"feature_map": "hedgehog"},
    "mask": {"mask": True, "decay": 1.0},
    "mask, favor+": {"mask": True, "feature_map": "favor+"},
    "from a position": {"first": 1000},
    "past": {"past": 6, "decay": 1.0},
    "past, exp": {"past": 6, "feature_map": "exp", "loud": True, "mask": True},
    "chunks": {"backend": "chunked", "chunk_size": 3},
    "reference": {"backend": "reference", "decay": 1.0},
    "both sides": {"causal": False},
    "both sides, exp": {"causal": False, "feature_map": "exp", "loud": True, "heads": 4},
    "both sides, mask": {"causal": False, "feature_map": "favor+", "mask": True},
    "both sides, rotated": {"causal": False, "denominator": "rotated"},
}


def draw(case: dict[str, Any], length: int, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs of the whole sequence, the same on every rank."""
    given = dict(case)
    generator = torch.Generator().manual_seed(length)
    batch, heads, keys, width, value = 2, given.pop("heads", 2), 2, 8, 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    loud = 1.0
    if given.pop("loud", False):  # the largest key anywhere: stabilizers differ from rank to rank
        loud = 1.0 + 8.0 * torch.rand(batch, keys, length, 1, generator=generator).double()
    q = normal(batch, heads, length, width).to(dtype)
    k = (loud * normal(batch, keys, length, width)).to(dtype)
    v = normal(batch, keys, length, value).to(dtype)
    name = given.pop("feature_map", "elu+1")
    torch.manual_seed(5)
    phi = make_feature_map(name, width)
    phi = phi.double() if dtype == torch.float64 else phi
    given["feature_map"] = phi
    rotary: Any = given.setdefault("rotary", "plain")
    if rotary == "plain":
        given["rotary"] = Rotary(width if given.get("rotate") == "before" else phi.feature_dim)
    elif rotary == "learned":
        given["rotary"] = LearnedRotary(phi.feature_dim)
    decay = given.pop("decay", None)
    log_decay = None
    if decay is not None:
        log_decay = -torch.rand(batch, keys, length, generator=generator, dtype=torch.float64)
        if decay == float("inf"):  # forgets all at some tokens, nothing at others
            log_decay = torch.where(log_decay < -0.7, -torch.inf, 0.0).double()
        else:
            log_decay = log_decay * decay
        log_decay = log_decay.to(torch.promote_types(dtype, torch.float32))
    mask = None
    if given.pop("mask", False):
        mask = torch.rand(batch, length, generator=generator) > 0.4
    given.update(q=q, k=k, v=v, log_decay=log_decay, key_mask=mask)
    past = given.pop("past", 0)
    if past:
        inputs = draw({"feature_map": name}, past, dtype)
        given["state"] = linear_attention(**inputs, return_state=True)[1].detach()
    return given


def results(function: Any, given: dict[str, Any], part: slice, share: float) -> dict[str, Tensor]:
    """Output, last state and gradients of a loss of all of them; `share` of the state's loss."""
    causal = given.get("causal", True)
    out = function(**given, return_state=causal)
    out, state = out if causal else (out, None)
    generator = torch.Generator().manual_seed(1)
    shape = (*out.shape[:2], 200, out.shape[3])
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)[:, :, part]
    if given["key_mask"] is not None:  # nothing relies on the rows of pads
        weights = weights * given["key_mask"][:, None, :, None]
    found, loss = {"out": out * (weights != 0)}, (out * weights).sum()
    if state is not None:
        found.update(S=state.S, z=state.z, position=state.position)
        found["stabilizer"] = state.stabilizer.nan_to_num(neginf=-1e3)
        loss = loss + share * (state.S.double().sum() + state.z.double().sum())
    leaves = {name: given[name] for name in ("q", "k", "v", "log_decay")}
    if "state" in given:
        leaves.update({"past S": given["state"].S, "past z": given["state"].z})
    if isinstance(given["rotary"], LearnedRotary):
        leaves["frequencies"] = next(given["rotary"].parameters())
    leaves = {name: x for name, x in leaves.items() if x is not None}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        assert gradient is not None or name not in ("k", "v"), f"no gradient of {name}"
        found[f"d {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


def cut(given: dict[str, Any], part: slice, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """A part of the inputs as leaves of their own, maybe in another dtype."""
    mine = {**given, "feature_map": copy.deepcopy(given["feature_map"])}
    for name in ("q", "k", "v", "log_decay"):
        if given[name] is not None:
            mine[name] = given[name].detach()[:, :, part].to(dtype, copy=True).requires_grad_()
    if dtype is not None:
        mine["feature_map"].to(dtype)
    if given["key_mask"] is not None:
        mine["key_mask"] = given["key_mask"][:, part]
    if "state" in given:
        state = given["state"].detach().to(dtype).clone() if dtype else given["state"].clone()
        mine["state"] = state._replace(S=state.S.requires_grad_(), z=state.z.requires_grad_())
    if "first" in given:
        mine["positions"] = mine.pop("first") + part.start
    return mine


def check(case: dict[str, Any], split: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """Output, state and all gradients of this rank against one process, and against float64.

    Rounding may differ by the tolerance, and by a few times what one process itself is off.
    """
    rank, length = dist.get_rank(), sum(split)
    given = draw(case, length, dtype)
    first, last = list(pairwise(accumulate(split, initial=0)))[rank]
    part, everything = slice(first, last), slice(0, length)
    # Each rank takes a share of the loss of the last state, which is the same on all.
    share = 0.5**rank if rank else 0.5 ** (len(split) - 1)
    got = results(parallel.linear_attention, cut(given, part), part, share)
    one = results(linear_attention, cut(given, everything), everything, 1.0)
    exact = one
    if dtype != torch.float64:
        exact = results(linear_attention, cut(given, everything, torch.float64), everything, 1.0)
    faults = []
    if dtype == torch.float64 and length and set(case) <= {"feature_map", *JUDGED}:
        options = {name: case[name] for name in JUDGED[:2] if name in case}
        name = case.get("feature_map", "elu+1")
        if name in ("elu+1", "exp"):
            inputs = {name: given[name].detach() for name in "qkv"}
            judged = attention(**inputs, **options, feature_map=name, log_decay=given["log_decay"])
            faults += _same("out before the judge", got["out"], judged[:, :, part])
    for name, mine in got.items():
        want, judge = one[name], exact[name]
        if name in ("out", "d q", "d k", "d v", "d log_decay"):
            want, judge = want[:, :, part], judge[:, :, part]
        elif name.startswith("d "):
            dist.all_reduce(mine)
        own = error(want, judge)
        off = error(mine, judge)
        if not off <= TOLERANCE.get(mine.dtype, 0.0) + 4 * own:
            faults.append(f"{name} is off by {off:.1e}, one process by {own:.1e}")
    return faults


# ---- What the processes do


def all_cases(rank: int, world: int) -> list[str]:
    faults = []
    # All cases with ragged pieces; with each other split a fifth of them, in turn.
    ragged, *others = SPLITS[world]
    work = [(ragged, name, torch.float64) for name in CASES]
    work += [(ragged, name, torch.float32) for name in list(CASES)[:: world - 1]]
    for i, split in enumerate(others):
        work += [(split, name, torch.float64) for name in list(CASES)[i % 5 :: 5]]
    work += [(ragged, name, torch.bfloat16) for name in ("decay", "exp", "both sides")]
    for split, name, dtype in work:
        for fault in check(CASES[name], split, dtype):
            faults.append(f"rank {rank}, {split}, {name}, {dtype}: {fault}")
    return faults


def _same(name: str, got: Tensor, want: Tensor, tolerance: float = 1e-12) -> list[str]:
    off = error(got, want)
    return [] if off <= tolerance else [f"{name} is off by {off:.1e}"]


def models(rank: int, world: int) -> list[str]:
    """A language model and an encoder, with masks and states, and the gradients of parameters."""
    faults = []
    split = SPLITS[world][0]
    first, last = list(pairwise(accumulate(split, initial=0)))[rank]
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(13, (2, sum(split) + 1), generator=generator)
    mask = torch.rand(2, sum(split), generator=generator) > 0.3
    for choices in (
        {"feature_map": "favor+", "decay": "learned", "kv_heads": 1, "position": "rotary"},
        {"position": "learned", "max_length": 100},
        {"position": "sinusoidal", "output_gate": True, "qk_norm": True},
    ):
        config = Config(**{"vocab_size": 13, "dim": 16, "layers": 2, "heads": 2, **choices})
        model = LanguageModel(config).double()
        model.initialize(7)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        whole = model(inputs)
        want = model.loss(inputs, targets)
        gradients = torch.autograd.grad(want, list(model.parameters()))
        with parallel.sequence_parallel(model):
            mine = model(inputs[:, first:last])
            loss = model.loss(inputs[:, first:last], targets[:, first:last].contiguous())
            # Its share of the mean over all; the mean of no token is not a number.
            loss = loss * ((last - first) / inputs.shape[1]) if last > first else mine.sum()
            masked = model(inputs[:, first:last], key_mask=mask[:, first:last])
            _, state = model(inputs[:, first:last], return_state=True)
            on = model(tokens[:, first:last], state=state)
        faults += _same("logits", mine, whole[:, first:last])
        got = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for (name, p), one, other in zip(model.named_parameters(), got, gradients, strict=True):
            summed = torch.zeros_like(p) if one is None else one.clone()
            dist.all_reduce(summed)
            faults += _same(f"gradient of {name}", summed, other)
        real = mask[:, first:last]
        want = model(inputs, key_mask=mask)[:, first:last]
        faults += _same("masked logits", masked[real], want[real])
        want_state = model(inputs, return_state=True)[1]
        for layer, other in zip(state.layers, want_state.layers, strict=True):
            for x, y in zip(layer, other, strict=True):
                faults += _same("state", x.double(), y.double())
        want = model(tokens[:, : inputs.shape[1]], state=want_state)[:, first:last]
        faults += _same("logits that go on from a state", on, want)
        faults += _same("logits afterwards", model(inputs), whole)
        step = model.decode(tokens[:, -1], state)[0]
        faults += _same("a step from the state", step, model.decode(tokens[:, -1], want_state)[0])
    encoder = Encoder(Config(vocab_size=13, dim=16, layers=2, heads=2, feature_map="exp")).double()
    encoder.initialize(7)
    want = encoder(tokens[:, :-1], key_mask=mask)[:, first:last]
    layer = RotaryLinearAttention(16, 2, decay="fixed").double()
    torch.manual_seed(1)
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, sum(split), 16, generator=generator, dtype=torch.float64)
    with parallel.sequence_parallel(encoder):
        mine = encoder(tokens[:, first:last], key_mask=mask[:, first:last])
    faults += _same("encoder", mine[real], want[real])
    whole = layer(x)[:, first:last]
    with parallel.sequence_parallel(layer):
        faults += _same("layer", layer(x[:, first:last]), whole)
    return faults


def refusals(rank: int, world: int) -> list[str]:
    faults = []

    def refused(what: str, function: Any, *words: str) -> None:
        try:
            function()
        except ValueError as problem:
            missing = [word for word in words if word not in str(problem)]
            if missing:
                faults.append(f"{what}: {problem} does not name {missing}")
        else:
            faults.append(f"{what} was not refused")

    def call(**given: Any) -> Any:
        x = torch.randn(1, 2, 6, 8)
        return parallel.linear_attention(x, x, x, **given)

    refused("xpos", lambda: call(rotary=XPos(8)), "XPos", "Rotary")
    refused("decay", lambda: call(log_decay=torch.ones(1, 2, 6)), "log_decay", "<= 0")
    x = torch.randn(1, 2, 6, 8)

    def cross() -> None:
        parallel.linear_attention(x, x[:, :, 1:], x[:, :, 1:], causal=False)

    refused("cross-attention", cross, "6", "5")

    def of_another_width() -> None:
        y = torch.randn(1, 2, 6, 8 + 2 * rank)
        parallel.linear_attention(y, y, y)

    refused("widths", of_another_width, "width", "10")

    def in_another_type(what: Any) -> None:
        for odd in (torch.float64, torch.bfloat16):
            types = ("float32", str(odd)[6:])
            mine = odd if rank == world - 1 else torch.float32
            refused(f"{what} in {odd}", lambda mine=mine: what(mine), "element type", *types)

    def plain(dtype: torch.dtype) -> None:
        parallel.linear_attention(*[x.to(dtype)] * 3)

    def a_layer(dtype: torch.dtype) -> None:
        layer = RotaryLinearAttention(8, 2).to(dtype)
        with parallel.sequence_parallel(layer):
            layer(x[0].to(dtype))

    def a_model(dtype: torch.dtype) -> None:
        model = LanguageModel(Config(vocab_size=13, dim=16, layers=1, heads=2)).to(dtype)
        with parallel.sequence_parallel(model):
            model(torch.zeros(1, 4, dtype=torch.int64))

    for what in (plain, a_layer, a_model):
        in_another_type(what)
    other = dist.new_group([world - 1])
    if rank < world - 1:
        refused("another group", lambda: call(group=other), "not in the given group")
    return faults


def counted_bytes(rank: int, world: int) -> list[str]:
    """What leaves a rank does not depend on the length, and is what the docstring says."""
    sizes: dict[int, list[int]] = {}
    gather, exchange = dist.all_gather, dist.all_to_all_single
    sent: list[int] = []

    def counting_gather(parts: Any, x: Any, group: Any = None) -> None:
        sent.append(x.numel() * x.element_size())  # to each of the others
        gather(parts, x, group=group)

    def counting_exchange(wanted: Any, x: Any, group: Any = None) -> None:
        sent.append(x[0].numel() * x.element_size())
        exchange(wanted, x, group=group)

    dist.all_gather, dist.all_to_all_single = counting_gather, counting_exchange
    try:
        for length in (8, 80):
            q = torch.randn(3, 4, length, 8, requires_grad=True)
            k, v = torch.randn(3, 2, length, 8), torch.randn(3, 2, length, 5, requires_grad=True)
            parallel.linear_attention(q, k, v, rotary=Rotary(8)).sum().backward()
            sizes[length] = list(sent)
            sent.clear()
    finally:
        dist.all_gather, dist.all_to_all_single = gather, exchange
    state = 3 * 2 * (8 * (5 + 1) + 2) * 4
    want = [7 * 8, state, state]
    return [f"{n} tokens: {sent}, not {want}" for n, sent in sizes.items() if sent != want]


WORK = {"cases": all_cases, "models": models, "refusals": refusals, "bytes": counted_bytes}


def process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    results: dict[str, list[str]] = {}
    for name, work in WORK.items():
        try:
            results[name] = work(rank, world)
        except Exception:
            results[name] = [traceback.format_exc()]
            break  # ranks may no longer agree
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


# ---- The tests


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_together_are_one_process(world: int, tmp_path: Path) -> None:
    """All that they can do, in one test: the processes are started once."""
    mp.spawn(process, (world, str(tmp_path)), nprocs=world)
    for rank in range(world):
        found: dict[str, list[str]] = torch.load(tmp_path / f"{rank}.pt")
        assert found == {part: [] for part in WORK}


def test_without_processes_it_says_what_to_do() -> None:
    x = torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match="init_process_group"):
        parallel.linear_attention(x, x, x)


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        (RotaryLinearAttention(16, 2, short_conv=4), "short_conv"),
        (RotaryLinearAttention(16, 2, token_shift=True), "token_shift"),
        (RotaryLinearAttention(16, 2, local_heads=1), "local_heads"),
        (RotaryLinearAttention(16, 2, rotary_scaling="selective"), "Selective"),
        (RotaryLinearAttention(16, 2, rotary_scaling="xpos"), "XPos"),
        (SoftmaxAttention(16, 2), "softmax"),
        (torch.nn.Linear(2, 2), "Linear"),
    ],
)
def test_layers_that_need_their_neighbors_are_refused(alone: None, layer: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word), parallel.sequence_parallel(layer):
        pass


def test_documents_and_contexts_are_refused_and_the_layer_is_put_back(alone: None) -> None:
    layer, x = RotaryLinearAttention(16, 2), torch.randn(1, 6, 16)
    before = set(vars(layer))
    want = layer(x)
    with parallel.sequence_parallel(layer):
        assert torch.allclose(layer(x), want, atol=1e-6)
        with pytest.raises(ValueError, match="segment_ids"):
            layer(x, segment_ids=torch.tensor([[0, 0, 0, 1, 1, 1]]))
        with pytest.raises(ValueError, match="context"):
            layer(x, context=x)
        with pytest.raises(ValueError, match="on already"), parallel.sequence_parallel(layer):
            pass
    assert set(vars(layer)) == before
