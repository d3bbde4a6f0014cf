"""The models as a whole: checkpoints, pieces against the whole, padding, sampling, starts."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from linear_rope import FEATURE_MAPS, Config, Encoder, LanguageModel, ModelState
from linear_rope import model as model_module
from linear_rope.model import pick
from linear_rope.stack import sinusoidal

SIZES: dict[str, Any] = {"vocab_size": 13, "dim": 16, "layers": 2, "heads": 2}

# Every feature map, every position method, every denominator, decay and softmax: a row each.
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"feature_map": name} for name in FEATURE_MAPS},
    **{f"{name}, decay": {"feature_map": name, "decay": "learned"} for name in FEATURE_MAPS},
    "before": {"rotate": "before"},
    "favor+ before": {"feature_map": "favor+", "rotate": "before"},
    "half the features": {"rotary_fraction": 0.5, "pairing": "half"},
    "no position": {"position": "none"},
    "sinusoidal": {"position": "sinusoidal"},
    "learned": {"position": "learned", "max_length": 40},
    "rotated denominator": {"feature_map": "relu", "denominator": "rotated"},
    "no denominator": {"denominator": "none"},
    "favor+, no denominator": {"feature_map": "favor+", "denominator": "none"},
    "cosformer": {
        "position": "cosformer",
        "max_length": 40,
        "feature_map": "relu-expand",
        "denominator": "rotated",
    },
    "output norm": {"output_norm": True, "decay": "learned"},
    "grouped heads": {"heads": 4, "kv_heads": 2, "qk_norm": True, "decay": "learned"},
    "softmax": {"attention": "softmax"},
    "softmax, grouped heads": {"attention": "softmax", "heads": 4, "kv_heads": 1, "qk_norm": True},
    "softmax, no position": {"attention": "softmax", "position": "none"},
    "softmax, learned": {"attention": "softmax", "position": "learned", "max_length": 40},
    "softmax, output norm": {"attention": "softmax", "output_norm": True},
}
COSFORMER = KINDS["cosformer"]
BATCHED = ("elu+1", "favor+", "favor+, decay", "sinusoidal", "learned", "cosformer", "softmax")


def build(kind: str, **options: Any) -> LanguageModel:
    """A head of its own makes logits of size 1, so that absolute tolerances mean something."""
    return LanguageModel(Config(**{**SIZES, "tie_embeddings": False, **KINDS[kind], **options}))


def random_tokens(batch: int, time: int) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (batch, time))


# ---- Construction on the meta device, checkpoints -----------------------------------------------

META = ("elu+1", "relu", "favor+", "favor+relu", "learned", "sinusoidal", "elu+1, decay", "softmax")


@pytest.mark.parametrize("route", ["to_empty", "assign"])
@pytest.mark.parametrize("kind", META)
def test_a_model_built_on_the_meta_device_gives_the_same_logits(kind: str, route: str) -> None:
    ordinary = build(kind, max_length=64)
    tokens = random_tokens(2, 64)
    want = ordinary(tokens)
    with torch.device("meta"):
        model = build(kind, max_length=64)
    assert all(p.is_meta for p in (*model.parameters(), *model.buffers()))
    if route == "to_empty":
        model.to_empty(device="cpu")
        with torch.no_grad():  # memory that was never written holds anything
            for x in (*model.parameters(), *model.buffers()):
                x.fill_(77)
        model.load_state_dict(ordinary.state_dict(), strict=True)
    else:
        model.load_state_dict(ordinary.state_dict(), strict=True, assign=True)
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    torch.testing.assert_close(model(tokens), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", META)
def test_a_model_built_on_the_meta_device_can_be_initialized(kind: str) -> None:
    with torch.device("meta"):
        model = build(kind)
    model.to_empty(device="cpu").initialize(5)
    ordinary = build(kind)
    ordinary.initialize(5)
    tokens = random_tokens(2, 8)
    assert torch.equal(model(tokens), ordinary(tokens))


@pytest.mark.parametrize("kind", ["elu+1", "favor+", "sinusoidal", "softmax"])
@torch.no_grad()
def test_the_state_dict_knows_no_length(kind: str) -> None:
    def shapes() -> dict[str, tuple[int, ...]]:
        return {key: tuple(value.shape) for key, value in model.state_dict().items()}

    model = build(kind, dim=8, layers=1)
    before = shapes()
    model(random_tokens(1, 16))
    assert shapes() == before
    model(random_tokens(1, 4096))
    assert shapes() == before
    assert not any("cos" in key or "sin" in key or "freq" in key for key in before)
    # nothing of the maximum length is in it either
    build(kind, dim=8, layers=1, max_length=99).load_state_dict(model.state_dict(), strict=True)


def test_learned_positions_of_another_length_are_refused_aloud() -> None:
    saved = build("learned", max_length=16).state_dict()
    with pytest.raises(RuntimeError, match=r"position_embedding.weight.*16.*32"):
        build("learned", max_length=32).load_state_dict(saved)


def test_the_default_model_has_one_matrix_for_both_embeddings() -> None:
    tied, untied = LanguageModel(Config(**SIZES)), build("elu+1")
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.weight"}
    hidden: list[Tensor] = []
    tied.norm.register_forward_hook(lambda *args: hidden.append(args[-1]))
    logits = tied(random_tokens(1, 3))
    torch.testing.assert_close(logits, hidden[0] @ tied.embedding.weight.mT)


# ---- Pieces equal the whole ---------------------------------------------------------------------

SPLITS = ([5, 7], [1] * 12, [4, 1, 1, 6])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_equal_the_whole(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    if kind.startswith(("dpfp", "relu", "favor+relu")):
        tolerance *= 3  # products of features square what they are rounded by, and few are above 0
    model = build(kind).to(dtype)
    tokens = random_tokens(2, 12)
    weights = torch.randn(2, 12, 13, dtype=dtype)  # a random cotangent, not a plain sum
    whole, after = model(tokens, return_state=True)
    whole_grads = torch.autograd.grad((whole * weights).sum(), list(model.parameters()))
    assert whole.abs().max() > 0.5
    torch.testing.assert_close(model(tokens), whole, atol=tolerance, rtol=0)
    for split in SPLITS:
        state, pieces = None, []
        for piece in tokens.split(split, dim=1):
            logits, state = model(piece, state=state, return_state=True)
            pieces.append(logits)
            offsets = [entry.position.tolist() for entry in state.layers]
            assert offsets == [[sum(p.shape[1] for p in pieces)] * 2] * 2  # the same in both layers
        joined = torch.cat(pieces, dim=1)
        torch.testing.assert_close(joined, whole, atol=tolerance, rtol=0)
        for a, b in zip(state.layers, after.layers, strict=True):
            torch.testing.assert_close(list(a), list(b), atol=10 * tolerance, rtol=tolerance)
        grads = torch.autograd.grad((joined * weights).sum(), list(model.parameters()))
        for got, want in zip(grads, whole_grads, strict=True):
            # a rotated denominator passes near 0, which no rounding survives well
            wide = tolerance * (1000 if kind == "rotated denominator" else 30)
            torch.testing.assert_close(got, want, atol=wide, rtol=wide)


@pytest.mark.parametrize("kind", ["elu+1", "favor+", "elu+1, decay", "softmax", "learned"])
def test_empty_input_and_empty_pieces_are_no_exception(kind: str) -> None:
    model = build(kind)
    tokens = random_tokens(2, 6)
    assert model(tokens[:, :0]).shape == (2, 0, 13)
    assert model(tokens[:0]).shape == (0, 6, 13)
    _, state = model(tokens[:, :0], return_state=True)
    got, state = model(tokens, state=state, return_state=True)
    torch.testing.assert_close(got, model(tokens), atol=1e-6, rtol=0)
    nothing, state = model(tokens[:, :0], state=state, return_state=True)
    assert nothing.shape == (2, 0, 13) and state.position.tolist() == [6, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_does_not_reach_the_past(kind: str) -> None:
    model = build(kind).double()
    tokens = random_tokens(1, 12)
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1 + torch.randint(12, (1, 5))) % 13
    difference = (model(tokens) - model(other)).abs()
    assert difference[:, :7].max() < 1e-13 and difference[:, 7:].max() > 1e-3


@pytest.mark.parametrize("kind", ["elu+1", "relu", "favor+", "favor+relu", "softmax"])
def test_rotary_logits_depend_on_distances_only(kind: str) -> None:
    model = build(kind).double()
    tokens = random_tokens(2, 9)
    torch.testing.assert_close(model(tokens, positions=1000), model(tokens), atol=1e-9, rtol=0)
    ids = torch.arange(9) * 3
    assert not torch.allclose(model(tokens, positions=ids), model(tokens), atol=1e-3)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_absolute_positions_are_used(kind: str) -> None:
    model = build(kind).double()
    tokens = random_tokens(2, 9)
    shifted = model(tokens, positions=9)
    assert not torch.allclose(shifted, model(tokens), atol=1e-4)
    twice = model(torch.cat([tokens, tokens], 1), positions=torch.arange(9, 18).repeat(2))
    torch.testing.assert_close(twice[:, :9], shifted)


def test_the_sinusoids_are_those_of_the_paper_scaled_to_the_embeddings() -> None:
    table = sinusoidal(torch.arange(50), 6).double()
    for p in (0, 1, 49):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            for j, value in ((2 * i, math.sin(angle)), (2 * i + 1, math.cos(angle))):
                assert table[p, j].item() == pytest.approx(0.02 * math.sqrt(2) * value, abs=1e-8)
    assert sinusoidal(torch.arange(1000), 64).square().mean().sqrt() == pytest.approx(0.02)


# ---- Padding ------------------------------------------------------------------------------------


def left_padded(rows: list[Tensor], length: int) -> tuple[Tensor, Tensor]:
    tokens = random_tokens(len(rows), length)  # what pads hold must not matter
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, length - len(row) :], mask[i, length - len(row) :] = row, True
    return tokens, mask


@torch.no_grad()
def greedy(model: LanguageModel, tokens: Tensor, mask: Tensor | None, steps: int) -> Tensor:
    logits, state = model(tokens, key_mask=mask, return_state=True)
    new = [logits[:, -1].argmax(-1)]
    for _ in range(steps - 1):
        logits, state = model(new[-1][:, None], state=state, return_state=True)
        new.append(logits[:, -1].argmax(-1))
    return torch.stack(new, dim=1)


@pytest.mark.parametrize("kind", BATCHED)
def test_a_left_padded_batch_equals_its_rows_alone(kind: str) -> None:
    model = build(kind)
    rows = [random_tokens(1, n)[0] for n in (9, 4, 6)]
    for batch in (rows, rows[1:2]):  # and the one of 4 tokens alone with 5 pads
        tokens, mask = left_padded(batch, 9)
        logits = model(tokens, key_mask=mask)
        assert logits.isfinite().all()
        new = greedy(model, tokens, mask, 20)
        for i, row in enumerate(batch):
            alone = model(row[None])[0]
            torch.testing.assert_close(logits[i, -len(row) :], alone, atol=1e-5, rtol=0)
            assert torch.equal(new[i], greedy(model, row[None], None, 20)[0])
        assert torch.equal(new, model.generate(tokens, 20, key_mask=mask, temperature=0)[:, 9:])


@pytest.mark.parametrize("kind", BATCHED)
def test_a_right_padded_batch_equals_its_rows_alone_and_can_go_on(kind: str) -> None:
    model = build(kind)
    tokens, lengths = random_tokens(3, 9), (9, 4, 6)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    logits, state = model(tokens, key_mask=mask, return_state=True)
    more = random_tokens(3, 3)
    after = model(more, state=state)
    for i, n in enumerate(lengths):
        alone = model(torch.cat([tokens[i, :n], more[i]])[None])[0]
        torch.testing.assert_close(logits[i, :n], alone[:n], atol=1e-5, rtol=0)
        torch.testing.assert_close(after[i], alone[n:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", BATCHED)
def test_gradients_of_a_padded_batch_are_those_of_its_rows(kind: str) -> None:
    model = build(kind).double()
    rows = [random_tokens(1, n)[0] for n in (9, 4, 6)]
    tokens, mask = left_padded(rows, 9)
    weights = torch.randn(3, 9, 13, dtype=torch.float64) * mask.unsqueeze(-1)
    parameters = list(model.parameters())
    got = torch.autograd.grad((model(tokens, key_mask=mask) * weights).sum(), parameters)
    alone = [(model(row[None])[0] * weights[i, -len(row) :]).sum() for i, row in enumerate(rows)]
    want = torch.autograd.grad(torch.stack(alone).sum(), parameters)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)


ENCODERS = [k for k in KINDS if "decay" not in KINDS[k]]


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoder_pads_change_nothing(kind: str) -> None:
    encoder = Encoder(Config(**{**SIZES, **KINDS[kind]}))
    rows = [random_tokens(1, n)[0] for n in (9, 4)]
    tokens, mask = left_padded(rows, 9)
    hidden = encoder(tokens, key_mask=mask)
    assert hidden.shape == (2, 9, 16)
    other = torch.where(mask, tokens, (tokens + 5) % 13)
    torch.testing.assert_close(encoder(other, key_mask=mask)[mask], hidden[mask])
    for i, row in enumerate(rows):
        torch.testing.assert_close(
            hidden[i, -len(row) :], encoder(row[None])[0], atol=1e-5, rtol=1e-4
        )
    # it looks both ways
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 13
    assert (encoder(changed, key_mask=mask) - hidden)[0, 0].abs().max() > 1e-5


def test_encoder_and_decoder_share_their_parameters_names() -> None:
    encoder, decoder = Encoder(Config(**SIZES)), LanguageModel(Config(**SIZES))
    assert set(encoder.state_dict()) == set(decoder.state_dict())


# ---- Sampling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["elu+1", "favor+, decay", "before", "learned", "cosformer", "softmax"]
)
def test_greedy_generation_equals_recomputing_the_whole(kind: str) -> None:
    model = build(kind)
    prompt = random_tokens(3, 4)
    tokens = prompt
    for _ in range(15):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(prompt, 15, temperature=0), tokens)
    assert torch.equal(model.generate(prompt, 15, top_k=1), tokens)
    assert torch.equal(model.generate(prompt, 15, temperature=1e-40), tokens)


def test_a_generator_makes_sampling_reproducible_and_spares_the_global_one() -> None:
    model = build("elu+1")
    prompt = random_tokens(2, 3)

    def sample(seed: int) -> Tensor:
        return model.generate(prompt, 12, generator=torch.Generator().manual_seed(seed))

    before = torch.get_rng_state()
    assert torch.equal(sample(1), sample(1)) and not torch.equal(sample(1), sample(2))
    assert torch.equal(before, torch.get_rng_state())
    # one draw a token and none more: the first half is the same text
    generator = torch.Generator().manual_seed(1)
    half = model.generate(prompt, 6, generator=generator)
    torch.manual_seed(4)
    a = model.generate(prompt, 5)
    torch.manual_seed(4)
    assert torch.equal(a, model.generate(prompt, 5))
    assert torch.equal(sample(1)[:, :9], half)
    six_draws = torch.Generator().manual_seed(1)
    for _ in range(6):
        torch.multinomial(torch.ones(2, 13), 1, generator=six_draws)
    assert torch.equal(generator.get_state(), six_draws.get_state())


@pytest.mark.parametrize("training", [True, False])
def test_generation_runs_without_dropout_and_restores_the_mode(training: bool) -> None:
    model = build("elu+1", dropout=0.5).train(training)
    prompt = random_tokens(2, 3)
    first = model.generate(prompt, 10, temperature=0)
    assert torch.equal(first, model.generate(prompt, 10, temperature=0))
    assert all(m.training == training for m in model.modules())
    with pytest.raises(ValueError):
        model.generate(prompt + 100, 3)
    assert model.training == training
    assert not first.requires_grad and torch.is_grad_enabled()


def test_stream_yields_the_tokens_of_generate_one_by_one() -> None:
    model = build("favor+").train()
    prompt = random_tokens(2, 3)
    stream = model.stream(prompt, temperature=0)
    got = torch.stack([next(stream) for _ in range(6)], dim=1)
    stream.close()  # type: ignore[attr-defined]
    assert torch.equal(got, model.generate(prompt, 6, temperature=0)[:, 3:])
    assert model.training


def modes(model: torch.nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


@pytest.mark.parametrize("kind", ["elu+1", "softmax", "learned"])
def test_the_mode_is_the_callers_between_two_tokens(kind: str) -> None:
    """A stream that waits, or is closed, or is beside another, changes no mode; none drops out."""
    model, prompt = build(kind, dropout=0.5, max_length=64).train(), random_tokens(2, 3)
    model.blocks[0].eval()  # frozen
    model.blocks[1].dropout.eval()
    before = modes(model)
    model.generate(prompt, 3)
    assert modes(model) == before and set(before) == {True, False}
    one, other = (model.stream(prompt, temperature=0) for _ in range(2))
    got = []
    for step in range(6):
        got += [next(one)] if step % 2 else [next(other)] if step < 4 else []
        assert modes(model) == before
        if step == 3:
            other.close()  # type: ignore[attr-defined]
    got += [next(one) for _ in range(3)]
    want = model.eval().generate(prompt, 6, temperature=0)[:, 3:]
    assert torch.equal(torch.stack(got[:4], 1), want[:, :2].repeat_interleave(2, 1))
    assert torch.equal(torch.stack(got[4:], 1), want[:, 2:])
    # And what the caller changes meanwhile stays changed.
    model.train()
    next(one)
    model.eval()
    next(one)
    assert not any(modes(model))
    model.blocks[1].train()
    next(one)
    assert model.blocks[1].dropout.training and not model.training


def test_modules_hear_of_the_mode_and_errors_put_it_back() -> None:
    class Merging(torch.nn.Linear):
        """An adapter that adds itself to the weight for evaluation."""

        merged = False

        def train(self, mode: bool = True) -> Any:
            self.merged = not mode
            return super().train(mode)

    model = build("elu+1").train()
    model.blocks[0].up = up = Merging(*model.blocks[0].up.weight.shape[::-1])
    seen = []
    up.register_forward_hook(lambda module, *_: seen.append(up.merged))
    list(zip(range(3), model.stream(random_tokens(1, 3)), strict=False))
    model.generate(random_tokens(1, 3), 2)
    assert seen == [True] * 5 and not up.merged and all(modes(model))
    up.register_forward_hook(lambda *_: 1 / 0)
    before = modes(model)
    for call in (lambda p: model.generate(p, 2), lambda p: next(model.stream(p))):
        with pytest.raises(ZeroDivisionError):
            call(random_tokens(1, 3))
        assert modes(model) == before


@pytest.mark.parametrize("training", [True, False])
def test_the_modes_are_looked_at_once_a_call_or_not_at_all(training: bool, count_calls) -> None:  # type: ignore[no-untyped-def]
    """What looking costs is more than a token does, where a token is one native call."""
    model = build("elu+1").train(training)
    looks = count_calls(model_module, "evaluating")
    model.generate(random_tokens(1, 3), 9)
    assert len(looks) == 1
    stream = model.stream(random_tokens(1, 3))
    for _ in range(9):
        next(stream)
    assert len(looks) == (1 + 9 if training else 1 + 1)


@pytest.mark.parametrize("kind", ["learned", "cosformer"])
def test_generation_needs_no_position_that_it_does_not_read(kind: str) -> None:
    model = build(kind, max_length=6)
    # the seventh token is read by nobody
    assert model.generate(random_tokens(1, 3), 4).shape == (1, 7)
    with pytest.raises(ValueError, match=r"position 6 is beyond max_length=6"):
        model.generate(random_tokens(1, 3), 5)
    prompt = random_tokens(2, 3)
    assert torch.equal(model.generate(prompt, 0), prompt)


@pytest.mark.parametrize("kind", BATCHED)
def test_packed_prompts_become_rows_that_go_on_by_themselves(kind: str) -> None:
    model = build(kind).double()
    prompts = [random_tokens(1, n) for n in (5, 1, 9)]
    limits = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    logits, state = model.prefill(torch.cat(prompts, 1), cu_seqlens=limits)
    assert state.position.tolist() == [5, 1, 9]
    token = logits.argmax(-1)
    after, _ = model.decode(token, state)
    for row, prompt in enumerate(prompts):
        alone, own = model.prefill(prompt)
        torch.testing.assert_close(logits[row], alone[0], atol=1e-10, rtol=0)
        next_logits, _ = model.decode(token[row, None], own)
        torch.testing.assert_close(after[row], next_logits[0], atol=1e-10, rtol=0)
    # A document of padding alone leaves no row to go on with; one of no token neither.
    flat = torch.cat(prompts, 1)
    for bad, message in (
        ([0, 5, 5, 15], r"each prompt at least one token, got none in document 1"),
        ([0, 5, 14], r"start at 0 and end at time = 15, got 0 and 14"),
        ([1, 5, 15], r"start at 0 and end at time = 15, got 1"),
        ([0, 9, 5, 15], r"must ascend"),
    ):
        with pytest.raises(ValueError, match=message):
            model.prefill(flat, cu_seqlens=torch.tensor(bad))
    mask = torch.arange(15)[None] < 13
    with pytest.raises(ValueError, match=r"hides 2 of the 9 tokens of document 2"):
        model.prefill(flat, cu_seqlens=limits, key_mask=mask)
    with pytest.raises(ValueError, match=r"at least one real token in each row"):
        model.prefill(flat, cu_seqlens=torch.tensor([0, 5, 13, 15]), key_mask=mask)
    with pytest.raises(ValueError, match=r"one flat row, but the batch is 2"):
        model.prefill(random_tokens(2, 15), cu_seqlens=limits)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["elu+1", "favor+, decay", "no position"])
def test_the_linear_state_has_a_constant_size(kind: str) -> None:
    model = build(kind)

    def numbers(state: Any) -> int:
        return sum(x.untyped_storage().nbytes() for entry in state.layers for x in entry)

    logits, state = model(random_tokens(2, 100), return_state=True)
    sizes = {numbers(state)}  # the prompt itself is not kept
    for _ in range(50):
        logits, state = model(logits[:, -1:].argmax(-1), state=state, return_state=True)
        sizes.add(numbers(state))
    assert len(sizes) == 1  # in memory that is really held, not only in shape
    _, short = model(random_tokens(2, 1), return_state=True)
    assert [x.shape for e in short.layers for x in e] == [x.shape for e in state.layers for x in e]


# Powers of two: cumulative sums are exact. Tokens in no order of size.
PROBABILITIES = torch.tensor([0.125, 0.5, 0.0625, 0.25, 0.0625])


def support(**options: Any) -> set[int]:
    options = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
    many = PROBABILITIES.log().expand(4000, 5)
    return set(pick(many, **options, generator=torch.Generator().manual_seed(0)).tolist())


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, {1}),
        (0.5, {1}),  # exactly p is enough
        (0.51, {1, 3}),
        (0.75, {1, 3}),
        (0.76, {0, 1, 3}),
        (0.875, {0, 1, 3}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_nucleus_sampling_keeps_the_smallest_set_that_reaches_p(
    top_p: float, kept: set[int]
) -> None:
    assert support(top_p=top_p) == kept


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [(1, {1}), (2, {1, 3}), (3, {0, 1, 3}), (5, set(range(5))), (99, set(range(5)))],
)
def test_top_k_keeps_the_k_most_likely(top_k: int, kept: set[int]) -> None:
    assert support(top_k=top_k) == kept


def test_of_equally_likely_tokens_no_more_than_k_are_kept() -> None:
    equal = torch.zeros(1000, 7)
    for k in (1, 3):
        drawn = pick(equal, 1.0, k, None, torch.Generator().manual_seed(0))
        assert len(set(drawn.tolist())) == k


def test_top_p_is_taken_of_what_top_k_and_the_temperature_left() -> None:
    # of {1: 2/3, 3: 1/3} the first alone reaches 0.6
    assert support(top_k=2, top_p=0.6) == {1}
    assert support(top_p=0.6) == {1, 3}
    # at temperature 1/2 the probabilities are as the squares: 0.5 becomes 0.744
    assert support(temperature=0.5, top_p=0.7) == {1}
    assert support(temperature=0.5, top_p=0.75) == {1, 3}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_the_probabilities_of_the_temperature(temperature: float) -> None:
    many = PROBABILITIES.log().expand(40000, 5)
    drawn = pick(many, temperature, None, None, torch.Generator().manual_seed(0))
    want = PROBABILITIES ** (1 / temperature)
    got = drawn.bincount(minlength=5) / 40000
    torch.testing.assert_close(got, want / want.sum(), atol=0.01, rtol=0)


def test_rows_of_a_batch_have_their_own_nucleus() -> None:
    logits = torch.tensor([[0.0, -50.0, 0.0], [-50.0, 9.0, -50.0]]).repeat(500, 1)
    drawn = pick(logits, 1.0, None, 0.9, torch.Generator().manual_seed(0)).reshape(500, 2)
    assert set(drawn[:, 0].tolist()) == {0, 2} and set(drawn[:, 1].tolist()) == {1}


# ---- Initialization -----------------------------------------------------------------------------

ARMS = ("elu+1", "favor+", "elu+1, decay", "before", "sinusoidal", "learned", "softmax")


def test_arms_of_a_comparison_start_from_the_same_shared_values() -> None:
    arms = {kind: build(kind) for kind in ARMS}
    for arm in arms.values():
        arm.initialize(11)
    base = dict(arms["elu+1"].named_parameters())
    for kind, arm in arms.items():
        shared = dict(arm.named_parameters())
        assert set(base) <= set(shared), kind
        for name, value in base.items():
            assert torch.equal(shared[name], value), (kind, name)
    # random features are shared between the arms that have them
    a, b = build("favor+"), build("favor+ before")
    a.initialize(11)
    b.initialize(11)
    assert all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))


def test_names_and_seeds_have_values_of_their_own() -> None:
    model = build("favor+")
    model.initialize(1)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    matrices = [v for n, v in first.items() if v.ndim == 2]
    for i, a in enumerate(matrices):
        for b in matrices[:i]:
            if a.shape == b.shape:
                assert not torch.allclose(a / a.std(), b / b.std(), atol=0.1)
    model.initialize(2)
    for name, value in model.state_dict().items():
        if value.ndim == 2:
            assert not torch.allclose(value, first[name], atol=1e-3), name
    model.initialize(1)
    assert all(torch.equal(v, first[n]) for n, v in model.state_dict().items())


def test_construction_follows_the_global_seed_and_initialize_leaves_it_alone() -> None:
    torch.manual_seed(3)
    a = build("favor+").state_dict()
    torch.manual_seed(3)
    b = build("favor+")
    assert all(torch.equal(v, a[n]) for n, v in b.state_dict().items())
    before = torch.get_rng_state()
    b.initialize(1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("init_std", [None, 0.05])
def test_the_documented_standard_deviations_hold(init_std: float | None) -> None:
    config = Config(
        vocab_size=300, dim=192, layers=8, heads=2, decay="learned:bias=3", bias=True,
        max_length=200, position="learned", tie_embeddings=False, output_gate=True,
        init_std=init_std,
    )  # fmt: skip
    model = LanguageModel(config)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(p, torch.ones_like(p)), name
        elif name.endswith(".gate.bias"):
            assert torch.equal(p, torch.full_like(p, 3.0)), name
        elif name.endswith("bias"):
            assert torch.equal(p, torch.zeros_like(p)), name
        else:
            want = 0.02 if "embedding" in name else init_std or p.shape[1] ** -0.5
            if name.endswith(("attention.out.weight", "down.weight")):
                want /= math.sqrt(16)
            spread = 5 / math.sqrt(2 * p.numel())
            assert p.std().item() == pytest.approx(want, rel=spread), name
            assert abs(p.mean().item()) < 5 * want / math.sqrt(p.numel()), name


def test_initial_values_do_not_depend_on_the_default_dtype() -> None:
    model = build("favor+")
    model.initialize(1)
    torch.set_default_dtype(torch.bfloat16)
    half = build("favor+")
    half.initialize(1)
    for name, value in model.state_dict().items():
        got = half.state_dict()[name]
        assert torch.equal(got, value.to(got.dtype)), name


# ---- Copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_equal_and_independent(kind: str) -> None:
    model = build(kind)
    tokens = random_tokens(2, 8)
    want = model(tokens)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens), want) and twin.config == model.config
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    assert torch.equal(model(tokens), want)


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size=0 .*at least 1"),
        ({"dim": 0}, r"dim=0 .*at least 1"),
        ({"layers": 0}, r"layers=0 .*at least 1"),
        ({"layers": 1.5}, r"layers=1.5 must be an integer"),
        ({"heads": "two"}, r"heads='two' must be an integer"),
        ({"heads": 3}, r"heads=3 does not divide dim=16; choose a divisor"),
        ({"dim": 14}, r"width=7 must be an even number.*use 8"),
        ({"attention": "flash"}, r"attention='flash' is unknown; choose one of: linear, softmax"),
        ({"feature_map": "cos"}, r"feature_map='cos' is unknown.*elu\+1, relu, favor\+"),
        ({"position": "nope"}, r"position='nope' is unknown.*none, sinusoidal, learned, rotary"),
        ({"position": "cosformer"}, r"position='cosformer' needs max_length"),
        ({**COSFORMER, "feature_map": "relu"}, r"or feature_map='relu-expand', got 'relu'"),
        ({**COSFORMER, "feature_map": "elu+1"}, r"use .*feature_map='elu\+1-expand'.*got 'elu\+1'"),
        ({**COSFORMER, "denominator": "unrotated"}, r"use denominator='rotated', got 'unrotated'"),
        ({**COSFORMER, "rotate": "before"}, r"use rotate='after', got 'before'"),
        ({**COSFORMER, "attention": "softmax"}, r"use attention='linear', got 'softmax'"),
        ({**COSFORMER, "pairing": "half"}, r"leave rotary_base, .* as they are.*'half'"),
        ({**COSFORMER, "rotary_scaling": "ntk:factor=2"}, r"needs position='rotary'"),
        ({"feature_map": "relu-expand", "pairing": "half"}, r"use pairing='interleaved'"),
        ({"rotate": "x"}, r"rotate='x' is unknown.*after, before, none"),
        ({"denominator": "x"}, r"denominator='x' is unknown.*unrotated, rotated, none"),
        ({"decay": "x"}, r"decay='x' is unknown.*none, fixed, retnet, learned"),
        ({"pairing": "x"}, r"pairing='x' is unknown.*interleaved, half"),
        ({"backend": "x"}, r"backend='x' is unknown.*auto, "),
        ({"features": 185, "feature_map": "favor+"}, r"width=185 must be an even number.*use 186"),
        ({"redraw_interval": 3}, r"redraw_interval only fit a random feature map.*elu\+1"),
        ({"position": "learned"}, r"needs max_length"),
        ({"position": "learned", "max_length": -3}, r"max_length=-3 must be an integer"),
        ({"mlp_ratio": 0.0}, r"mlp_ratio=0.0 must leave"),
        ({"mlp_ratio": -1.0}, r"mlp_ratio=-1.0 must leave"),
        ({"init_std": 0.0}, r"init_std=0.0 must be positive and finite; omit it for 1/sqrt"),
        ({"init_std": math.nan}, r"init_std=nan must be positive"),
        ({"dropout": 1.0}, r"dropout=1.0 must be in \[0, 1\)"),
        ({"dropout": -0.1}, r"dropout=-0.1 must be in \[0, 1\)"),
        ({"attention": "softmax", "decay": "learned"}, r"decay='learned' needs attention='linear'"),
        # what softmax or "none" would ignore is still checked
        ({"attention": "softmax", "feature_map": "x"}, r"feature_map='x' is unknown"),
        ({"position": "none", "rotate": "x"}, r"rotate='x' is unknown"),
    ],
)  # fmt: skip
def test_bad_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageModel(Config(**{**SIZES, **options}))


def test_a_config_of_unknown_keys_is_refused_by_name() -> None:
    config = Config(**SIZES)
    assert Config.from_dict(vars(config)) == config
    with pytest.raises(ValueError, match=r"unknown config keys: depth, width"):
        Config.from_dict({**vars(config), "width": 3, "depth": 4})


@pytest.mark.parametrize("kind", ["elu+1", "softmax", "learned", "sinusoidal"])
def test_bad_calls(kind: str) -> None:
    model = build(kind)
    other = build("elu+1" if kind == "softmax" else "softmax")
    tokens = torch.arange(12).reshape(2, 6)  # 0 to 11
    mask = torch.ones(2, 6, dtype=torch.bool)
    _, state = model(tokens, return_state=True)
    _, foreign = other(tokens, return_state=True)
    # of the same sizes, but turned otherwise
    bases = {"position": "rotary", "rotary_base": 7.0}
    _, another = build(kind, **bases)(tokens, return_state=True)
    limits = torch.tensor([0, 4, 6])
    name = type(state.layers[0]).__name__
    for call, message in (
        (lambda: model(tokens + 13), r"tokens must be in \[0, vocab_size=13\), got 24"),
        (lambda: model(tokens - 13), r"tokens must be in \[0, vocab_size=13\), got -13"),
        (lambda: model(tokens.float()), r"tokens must be integers.*float32"),
        (lambda: model(tokens.bool()), r"tokens must be integers.*bool"),
        (lambda: model(tokens.to(torch.uint8)), r"tokens must be integers.*\.long\(\).*uint8"),
        (lambda: model(tokens[0]), r"tokens must be .*\(batch, time\), got .*\(6,\)"),
        (lambda: model(tokens, key_mask=mask.float()), r"key_mask must be bool.*float32"),
        (lambda: model(tokens, key_mask=mask[:, :1]), r"key_mask.*\(2, 6\).*got .*\(2, 1\)"),
        (lambda: model(tokens, key_mask=mask[:, 1:]), r"key_mask.*\(2, 6\).*got .*\(2, 5\)"),
        (lambda: model(tokens, key_mask=mask[:1]), r"key_mask.*\(2, 6\).*got .*\(1, 6\)"),
        (
            lambda: model(tokens, state=ModelState(state.layers[:1])),
            r"ModelState of 2 layers.*got ModelState of 1",
        ),
        (lambda: model(tokens, state=state.layers[0]), rf"ModelState of 2 layers.*got {name}"),
        (lambda: model(tokens, state=tokens), r"ModelState of 2 layers.*got Tensor"),
        (lambda: model(tokens, state=foreign), rf"state must be the {name} .*got "),
        (lambda: model(tokens[:1], state=state), rf"state must be the {name} .*\(1, 2\), got"),
        (lambda: model(tokens, state=another), r"state is of another .*rotation|state must be"),
        (lambda: model(tokens[0], cu_seqlens=limits), r"tokens must be .*\(batch, time\)"),
        (lambda: model(tokens, cu_seqlens=limits), r"one flat row, but the batch is 2"),
        (lambda: model(tokens[:1], cu_seqlens=limits[1:]), r"start at 0 .*= 6, got 4"),
        (lambda: model(tokens[:1], cu_seqlens=limits[:2]), r"end at time = 6, got 0 and 4"),
        (lambda: model(tokens[:1], cu_seqlens=limits.float()), r"cu_seqlens must be integers"),
        (
            lambda: model(tokens[:1], cu_seqlens=limits, key_mask=mask[:1] & (tokens[:1] != 1)),
            r"key_mask contradicts cu_seqlens: it hides 1 of the 4 tokens of document 0",
        ),
        (
            lambda: model(tokens[:1], cu_seqlens=limits, key_mask=mask[:1, :5]),
            r"key_mask.*\(1, 6\).*got .*\(1, 5\)",
        ),
        (lambda: model(tokens, segment_ids=mask), r"segment_ids must be integers"),
        (lambda: model(tokens, segment_ids=tokens % 2), r"segment_ids must be contiguous.*row 0"),
        (lambda: model(tokens, segment_ids=tokens[:, :5]), r"segment_ids.*\(2, 6\).*\(2, 5\)"),
        (lambda: model(tokens, positions=-2), r"positions must not be negative, got -"),
        (lambda: model(tokens, positions=torch.full((6,), -1)), r"must not be negative, got -1"),
        (lambda: model(tokens, positions=torch.rand(6)), r"positions must be integers"),
        (lambda: model.generate(tokens[0], 2), r"prompt must have shape \(batch, time\).*\(6,\)"),
        (lambda: model.generate(tokens[:, :0], 2), r"prompt.*at least one token"),
        (lambda: model.generate(tokens, -1), r"max_new_tokens=-1 must be an integer of at least 0"),
        (lambda: model.generate(tokens, 2.5), r"max_new_tokens=2.5 must be an integer"),
        (lambda: model.generate(tokens, "3"), r"max_new_tokens='3' must be an integer"),
        (lambda: model.generate(tokens, 2, top_k=2.5), r"top_k=2.5 must be an integer"),
        (lambda: model.generate(tokens, 2, temperature=-1.0), r"temperature=-1.0 .*at least 0"),
        (lambda: model.generate(tokens, 2, temperature=math.nan), r"temperature=nan"),
        (lambda: model.generate(tokens, 2, top_k=0), r"top_k=0 must be an integer of at least 1"),
        (lambda: model.generate(tokens, 2, top_p=0.0), r"top_p=0.0 must be in \(0, 1\]"),
        (lambda: model.generate(tokens, 2, top_p=1.5), r"top_p=1.5 must be in \(0, 1\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("kind", ["elu+1", "softmax", "learned", "sinusoidal", "cosformer"])
def test_bad_calls_of_an_encoder(kind: str) -> None:
    encoder = Encoder(Config(**{**SIZES, **KINDS[kind]}))
    tokens = torch.arange(12).reshape(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    limits = torch.tensor([0, 4, 6])
    for call, message in (
        (lambda: encoder(tokens + 13), r"tokens must be in \[0, vocab_size=13\), got 24"),
        (lambda: encoder(tokens.float()), r"tokens must be integers.*float32"),
        (lambda: encoder(tokens, key_mask=mask[:1]), r"key_mask.*\(2, 6\).*got .*\(1, 6\)"),
        (lambda: encoder(tokens, key_mask=mask.float()), r"key_mask must be bool.*float32"),
        (lambda: encoder(tokens, positions=torch.rand(6)), r"positions must be integers"),
        (lambda: encoder(tokens, positions=-1), r"positions must not be negative, got -"),
        (lambda: encoder(tokens, positions=torch.arange(5)), r"positions must be .*got \(5,\)"),
        (lambda: encoder(tokens, segment_ids=tokens % 2), r"segment_ids must be contiguous"),
        (lambda: encoder(tokens, cu_seqlens=limits), r"one flat row, but the batch is 2"),
        (lambda: encoder(tokens[:1], cu_seqlens=limits[1:]), r"start at 0"),
        (lambda: encoder(tokens[:1], cu_seqlens=limits[:2]), r"end at time = 6"),
        (lambda: encoder(tokens[:1], cu_seqlens=limits.flip(0)), r"start at 0 .*got 6 and 0"),
        (
            lambda: encoder(tokens[:1], cu_seqlens=limits, key_mask=mask[:1] & (tokens[:1] != 1)),
            r"key_mask contradicts cu_seqlens",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("kind", ["learned", "cosformer"])
def test_a_position_beyond_the_longest_is_refused_however_it_comes(kind: str) -> None:
    model = build(kind, max_length=6)
    _, state = model(random_tokens(2, 6), return_state=True)
    for call in (
        lambda: model(random_tokens(2, 7)),
        lambda: model(random_tokens(2, 1), positions=6),
        lambda: model(random_tokens(2, 1), positions=torch.tensor([[6], [0]])),
        lambda: model(random_tokens(2, 1), state=state),
    ):
        with pytest.raises(ValueError, match=r"position 6 is beyond max_length=6.*[Rr]otary"):
            call()
    assert model(random_tokens(2, 9), positions=torch.arange(9) % 6).shape == (2, 9, 13)
