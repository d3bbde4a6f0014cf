"""`stream` and `generate` keep states in memory that is used again: nobody may notice."""

import judge
import pytest
import torch

from linear_rope import Config, LanguageModel, native_blocks
from linear_rope import model as model_module
from linear_rope.causal import native

SIZES = {"vocab_size": 19, "dim": 16, "layers": 2, "heads": 2}
PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = LanguageModel(Config(**SIZES, decay="learned")).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def native_taken(count_calls):
    """Of each token that went through all blocks in one native call, how many they were."""
    return count_calls(native_blocks, "run_blocks", len)


@pytest.fixture
def looks(count_calls):
    """How often it was looked whether the model is as it was."""
    return count_calls(model_module, "make_steps")


@torch.no_grad()
def one_by_one(model, prompt, new, change=lambda i: None):
    """Greedy tokens by whole forward passes with a state; `change(i)` before the i-th of them."""
    logits, state = model(prompt, return_state=True)
    tokens = []
    for i in range(new):
        tokens.append(logits[:, -1].argmax(-1))
        change(i)
        logits, state = model(tokens[-1][:, None], state=state, return_state=True)
    return torch.stack(tokens, 1)


def test_generate_looks_once_and_takes_the_kernels(model, looks, native_taken):
    made = model.generate(PROMPT, 12, temperature=0)
    assert torch.equal(made[:, 3:], one_by_one(model, PROMPT, 12))
    assert len(looks) == 1
    assert native_taken == ([2] * 11 if native.is_ready() else [])


def test_a_state_that_it_begins_with_stays_as_it_was(model):
    _, state = model.prefill(PROMPT)
    kept = [x.clone() for layer in state.layers for x in (layer.S, layer.z, layer.position)]
    once = model.generate(PROMPT, 9, state=state, temperature=0)
    assert torch.equal(once, model.generate(PROMPT, 9, state=state, temperature=0))
    now = [x for layer in state.layers for x in (layer.S, layer.z, layer.position)]
    assert all(torch.equal(x, y) for x, y in zip(now, kept, strict=True))


def test_two_streams_at_once_do_not_share_memory(model):
    first, second = (model.stream(p, temperature=0) for p in (PROMPT, PROMPT.flip(0)))
    pairs = [(next(first), next(second)) for _ in range(8)]
    want = one_by_one(model, PROMPT, 8)
    assert torch.equal(torch.stack([a for a, _ in pairs], 1), want)
    assert torch.equal(torch.stack([b for _, b in pairs], 1), want.flip(0))


CHANGES = {
    "weight replaced": lambda m: setattr(
        m.blocks[0].attention.key.weight, "data", m.blocks[0].attention.key.weight.data.flip(0)
    ),
    "weight in place": lambda m: m.blocks[1].up.weight.data.mul_(-1.0),
    "hook": lambda m: m.blocks[0].register_forward_hook(lambda _, __, out: (-out[0], out[1])),
    "threads": lambda m: torch.set_num_threads(3 - min(2, torch.get_num_threads())),
}


def change_at(at, name, model):
    return lambda i: CHANGES[name](model) if i == at else None


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_change_between_two_tokens_is_seen(model, name, at):
    threads = torch.get_num_threads()
    weights = {key: x.clone() for key, x in model.state_dict().items()}
    other = LanguageModel(Config(**SIZES, decay="learned")).double().eval()
    other.load_state_dict(weights)
    try:
        want = one_by_one(other, PROMPT, 10, change_at(at, name, other))
        changed, tokens = change_at(at, name, model), []
        for i, token in zip(range(10), model.stream(PROMPT, temperature=0), strict=False):
            tokens.append(token)
            changed(i)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.stack(tokens, 1), want)
    assert name == "threads" or not torch.equal(want, one_by_one_of(weights))


def one_by_one_of(weights):
    model = LanguageModel(Config(**SIZES, decay="learned")).double().eval()
    model.load_state_dict(weights)
    return one_by_one(model, PROMPT, 10)


def test_a_hook_may_change_the_model_within_generate(model, looks):
    """Then it is looked before every token, as `stream` does."""
    calls = []

    def flip(*_):
        calls.append(1)
        if len(calls) == 5:
            CHANGES["weight replaced"](model)

    weights = {key: x.clone() for key, x in model.state_dict().items()}
    model.norm.register_forward_hook(flip)
    made = model.generate(PROMPT, 10, temperature=0)[:, 3:]
    assert len(looks) == 9
    model.norm._forward_hooks.clear()
    model.load_state_dict(weights)
    # The fifth call of the norm is that of the fourth token after the prompt's.
    want = one_by_one(model, PROMPT, 10, change_at(4, "weight replaced", model))
    assert torch.equal(made, want)


def test_it_goes_on_without_the_kernels(model, monkeypatch, native_taken):
    """A token that is not for them, in the middle: the states come along."""
    want = one_by_one(model, PROMPT, 10)
    real, seen = native_blocks.are_mere_numbers, []

    def sometimes(*tensors):
        seen.append(len(tensors))
        return len(seen) not in (6, 7) and real(*tensors)

    monkeypatch.setattr(native_blocks, "are_mere_numbers", sometimes)
    assert torch.equal(model.generate(PROMPT, 10, temperature=0)[:, 3:], want)
    assert not native.is_ready() or (len(seen) > 6 and len(native_taken) == 8)


def test_stream_refuses_before_its_first_token(model):
    with pytest.raises(ValueError, match="temperature=-1"):
        model.stream(PROMPT, temperature=-1)  # nobody has asked for a token yet


def test_states_of_a_run_are_those_of_the_tokens(model):
    steps = model._steps(torch.device("cpu"))
    _, start = model.prefill(PROMPT)
    kept = [layer.S.clone() for layer in start.layers]
    run = model_module.Run(steps, 2, start.layers)
    state = start
    for token in torch.randint(19, (5, 2)):
        with torch.no_grad():
            run(model.embedding(token[:, None]))
        _, state = model.decode(token, state)
        for got, want in zip(run.states, state.layers, strict=True):
            assert judge.error(got.S, want.S) <= 1e-12
            assert judge.error(got.z, want.z) <= 1e-12
            assert torch.equal(got.position, want.position)
            assert torch.equal(got.made_by, want.made_by)
    assert all(torch.equal(layer.S, S) for layer, S in zip(start.layers, kept, strict=True))
