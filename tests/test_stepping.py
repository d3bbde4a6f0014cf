"""A token through the whole model at once equals a token through `Block.forward`."""

import copy
import gc
import logging
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import judge
import pytest
import torch

import linear_rope.model as model_module
from linear_rope import Config, LanguageModel, native_blocks, stepping
from linear_rope.causal import native, say_single_token

SIZES = {"vocab_size": 19, "dim": 16, "layers": 2, "heads": 4}
PLAIN = {
    "as it is": {},
    "groups": {"kv_heads": 2},
    "no position": {"position": "none"},
    "before": {"rotate": "before", "pairing": "half"},
    "relu": {"feature_map": "relu", "denominator": "rotated", "rotary_fraction": 0.5},
    "no denominator": {"denominator": "none", "output_norm": True},
    "other map": {"feature_map": "dpfp"},
    "yarn": {"rotary_scaling": "yarn:factor=4,original_length=8"},
    "biases": {"bias": True, "tie_embeddings": False, "qk_norm": True},
    "gates": {"decay": "learned", "output_gate": True},
    "fixed decay": {"decay": "fixed", "block": "llama"},
    "plain torch": {"backend": "recurrent"},
}
OTHERS = {
    "softmax": {"attention": "softmax"},
    "convolution": {"short_conv": 3},
    "token shift": {"token_shift": True},
    "selective": {"rotary_scaling": "selective"},
    "local": {"local_heads": 1, "window": 4},
    "learned table": {"position": "learned", "max_length": 64},
    "sinusoids": {"position": "sinusoidal"},
    "exponential": {"feature_map": "favor+"},
    "xpos": {"rotary_scaling": "xpos"},
    "chosen form": {"backend": "chunked"},
}


# Blocks of these are made of what the kernels of native_block.h know.
NATIVE = set(PLAIN) - {"before", "other map", "plain torch"}


@pytest.fixture
def native_taken(count_calls):
    """Of each token that went through all blocks in one native call, how many they were."""
    return count_calls(native_blocks, "run_blocks", len)


@pytest.fixture
def taken(count_calls):
    """How many tokens went the quick way."""
    return count_calls(model_module, "run_steps")


def run(model, by_itself):
    """Logits of five tokens after a padded prompt, and the states; `by_itself`: by `decode`."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(19, (3, 6), generator=generator)
    mask = torch.arange(6) >= torch.tensor([[0], [2], [5]])
    logits, state = model.prefill(prompt, key_mask=mask)
    rows = [logits]
    for token in torch.randint(19, (5, 3), generator=generator):
        if by_itself:
            logits, state = model.decode(token, state)
        else:
            with torch.no_grad():
                logits, state = model(token[:, None], state=state, return_state=True)
            logits = logits[:, 0]
        rows.append(logits)
    return torch.stack(rows), state


def leaves(state):
    if isinstance(state, torch.Tensor):
        return [state]
    return [] if state is None else [x for part in state for x in leaves(part)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_it_equals_the_long_way(name, dtype, taken, native_taken):
    torch.manual_seed(0)
    model = LanguageModel(Config(**SIZES, **(PLAIN | OTHERS)[name])).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    (out, state), (want, right) = run(model, True), run(model, False)
    assert len(taken) == (5 if name in PLAIN else 0)
    assert native_taken == ([2] * 5 if name in NATIVE and native.is_ready() else [])
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3 if name == "relu" else 2e-5
    assert judge.error(out, want) <= tolerance
    for got, wanted in zip(leaves(state), leaves(right), strict=True):
        assert got.dtype == wanted.dtype
        assert judge.error(got.double(), wanted.double()) <= tolerance


def test_the_log_says_what_decodes(caplog):
    say_single_token.cache_clear()
    auto, named = (LanguageModel(Config(**SIZES, backend=b)).eval() for b in ("auto", "recurrent"))
    name = "native" if native.is_ready() else "recurrent"
    with caplog.at_level(logging.INFO, logger="linear_rope"):
        for model, said in ((named, 0), (auto, 1)):
            model.generate(torch.zeros(1, 2, dtype=torch.int64), 4)
            lines = [r.getMessage() for r in caplog.records if "single" in r.getMessage()]
            assert lines == [f'backend="auto" is {name} for single tokens on cpu'] * said


def test_it_is_not_taken_where_someone_looks_or_drops(taken):
    model = LanguageModel(Config(**SIZES, dropout=0.5))
    run(model, True)  # in training: dropout
    model.eval()
    seen = []
    handle = model.blocks[1].attention.register_forward_hook(lambda *_: seen.append(1))
    run(model, True)
    assert not taken and len(seen) == 6
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        run(model, True)
    run(model.bfloat16(), True)
    assert not taken
    run(model.float(), True)
    assert len(taken) == 5


@pytest.mark.parametrize("rows", [1, 2, native_blocks.ROWS, native_blocks.ROWS + 1])
@pytest.mark.parametrize("options", [
    {"dim": 24, "heads": 3, "mlp_ratio": 1.125, "bias": True},  # widths that fill no vector
    {"dim": 128, "heads": 2, "kv_heads": 1, "mlp_ratio": 4},  # two threads have work
    {"dim": 136, "heads": 1, "block": "llama", "output_gate": True, "decay": "learned"},
])  # fmt: skip
@pytest.mark.parametrize("level", ["plain", "avx2", "avx512"])
def test_sizes_rows_and_instruction_sets(rows, options, level, native_taken, monkeypatch):
    """In float64, so that nothing hides behind rounding; the long way is judged elsewhere."""
    monkeypatch.setenv("LINEAR_ROPE_NATIVE_LEVEL", level)
    torch.manual_seed(1)
    model = LanguageModel(Config(vocab_size=19, layers=2, **options)).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    prompt = torch.randint(19, (rows, 5))
    _, state = model.prefill(prompt)
    for token in torch.randint(19, (3, rows)):
        want, right = model(token[:, None], state=state, return_state=True)
        before = [x.clone() for x in leaves(state)]
        logits, after = model.decode(token, state)
        assert judge.error(logits, want[:, 0]) <= 1e-12
        for got, wanted in zip(leaves(after), leaves(right), strict=True):
            assert judge.error(got.double(), wanted.double()) <= 1e-12
        for x, kept in zip(leaves(state), before, strict=True):
            assert torch.equal(x, kept)  # a state is a value
        state = after
    ready = native.is_ready() and rows <= native_blocks.ROWS
    assert native_taken == ([2] * 3 if ready else [])


def test_what_is_kept_is_made_anew_after_any_change(taken, native_taken):
    """Weights moved, replaced or retyped, settings, hooks: each is seen by the next token."""
    model = LanguageModel(Config(**SIZES, output_gate=True)).eval()
    layer = model.blocks[1].attention

    def agree(tolerance=2e-5):
        model.decode(torch.tensor([1]), model.prefill(torch.tensor([[1, 2]]))[1])
        (out, _), (want, _) = run(model, True), run(model, False)
        assert judge.error(out, want) <= tolerance

    agree()
    steps = model._steps(torch.device("cpu"))
    assert model._steps(torch.device("cpu")) is steps  # kept while nothing changes
    changes = [
        lambda: model.blocks[0].up.weight.data.mul_(3.0),  # in place: nothing to make anew
        lambda: setattr(layer.key.weight, "data", torch.randn(16, 16)),
        lambda: setattr(layer, "query", torch.nn.Linear(16, 16)),
        lambda: setattr(model.blocks[0].down, "weight", torch.nn.Parameter(torch.randn(16, 64))),
        lambda: setattr(layer, "denominator", "none"),
        lambda: setattr(model.blocks[0].mlp_norm, "eps", 1.0),
        lambda: setattr(layer, "output_gate", None),
        lambda: setattr(model, "blocks", torch.nn.ModuleList([model.blocks[0]])),
        lambda: model.double(),
    ]
    for change in changes:
        change()
        agree()
    assert len(taken) == 6 * (len(changes) + 1)
    assert len(native_taken) == (len(taken) if native.is_ready() else 0)
    copy.deepcopy(model), pickle.dumps(model)  # what is kept is not part of the model


def test_a_part_that_trains_takes_the_long_way(taken):
    """With its dropout; but for parts that compute the same in either mode."""
    model = LanguageModel(Config(**SIZES, dropout=0.5)).eval()
    _, state = model.prefill(torch.tensor([[1, 2]]))
    token = torch.tensor([3])
    want, _ = model.decode(token, state)
    model.blocks[1].attention.key.train()
    assert torch.equal(model.decode(token, state)[0], want) and len(taken) == 2
    for part in (model.dropout, model.blocks[0].dropout, model.blocks[1]):
        part.train()
        assert not torch.allclose(model.decode(token, state)[0], want)
        part.eval()
    assert len(taken) == 2
    assert torch.equal(model.decode(token, state)[0], want) and len(taken) == 3


@pytest.mark.parametrize("options", [{}, {"block": "llama"}])
def test_numbers_that_stay_in_place_but_are_read_otherwise(options):
    """Pruned, and transposed: `parameter.data` begins where it did."""
    model = LanguageModel(Config(**SIZES, **options)).eval()
    block = model.blocks[0]
    ups = [x.weight for x in (block.up, block.mlp_gate) if x is not None]

    def prune():
        for up in ups:
            up.data = up.data[:5]
        block.down.weight.data = block.down.weight.data[:, :5]

    def transpose():
        block.attention.value.weight.data = block.attention.value.weight.data.t()

    _, state = model.prefill(torch.tensor([[1, 2]]))
    token = torch.tensor([3])
    for change in (prune, transpose):
        before, _ = model.decode(token, state)
        change()
        with torch.no_grad():
            want = model(token[:, None], state=state)[:, -1]
        assert judge.error(model.decode(token, state)[0], want) <= 2e-5 < judge.error(before, want)


def test_what_is_kept_lives_as_long_as_the_model():
    def use():
        model = LanguageModel(Config(**SIZES)).eval()
        run(model, True)
        assert model in stepping._KEPT
        return weakref.ref(model)

    gone = use()
    gc.collect()
    assert gone() is None


def test_threads_may_share_a_model():
    model = LanguageModel(Config(**SIZES)).eval()
    prompts = torch.randint(19, (4, 6))
    alone = [model.generate(prompt[None], 40, temperature=0.0) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(
            pool.map(lambda prompt: model.generate(prompt[None], 40, temperature=0.0), prompts)
        )
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_it_hides_no_refusal():
    model = LanguageModel(Config(**SIZES)).eval()
    other = LanguageModel(Config(**SIZES, feature_map="relu")).eval()
    _, state = model.prefill(torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="state is of another feature map"):
        other.decode(torch.tensor([3]), state)
    with pytest.raises(ValueError, match=r"tokens must be in \[0, vocab_size=19\), got 19"):
        model.decode(torch.tensor([19]), state)
    with pytest.raises(ValueError, match="tokens must be integers"):
        model.decode(torch.tensor([1.0]), state)
    with pytest.raises(ValueError, match="state must be"):
        model.decode(torch.tensor([1, 2]), state)


@pytest.mark.parametrize("name", ["as it is", "groups", "other map", "gates", "softmax"])
def test_a_batch_may_be_empty(name):
    model = LanguageModel(Config(**SIZES, **(PLAIN | OTHERS)[name])).eval()
    assert model.generate(torch.zeros(0, 3, dtype=torch.int64), 4).shape == (0, 7)


def test_layers_of_ones_own_are_called():
    """An adapter in place of a projection takes part, as do its hooks."""

    class Twice(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = LanguageModel(Config(**SIZES)).eval()
    before = run(model, True)[0]
    adapted = Twice(16, 16, bias=False)
    adapted.load_state_dict(model.blocks[0].attention.value.state_dict())
    model.blocks[0].attention.value = adapted
    out, want = run(model, True)[0], run(model, False)[0]
    assert judge.error(out, want) <= 2e-5 < judge.error(out, before)


def test_a_prompt_may_come_in_pieces():
    """`generate` goes on from a state as if it had read all of the prompt itself."""
    model = LanguageModel(Config(**SIZES, decay="learned")).eval()
    prompt = torch.randint(19, (2, 9))
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1, :2] = False
    rest = torch.randint(19, (2, 4))
    whole = torch.cat([prompt, rest], 1)
    want = model.generate(whole, 6, temperature=0.0)
    _, state = model.prefill(prompt)
    assert torch.equal(model.generate(rest, 6, state=state, temperature=0.0)[:, 4:], want[:, 13:])
    padded = torch.cat([torch.ones_like(prompt, dtype=torch.bool), mask], 1)
    want = model.generate(whole, 6, key_mask=padded, temperature=0.0)
    out = model.generate(rest, 6, key_mask=mask, state=state, temperature=0.0)
    assert torch.equal(out[:, 4:], want[:, 13:])


def _own_forward(module):
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


CHANGES = {
    "state in another precision": lambda m, s: s._replace(z=s.z.double()),
    "narrow state": lambda m, s: s._replace(z=s.z.bfloat16()),
    "narrow position": lambda m, s: s._replace(position=s.position.int()),
    "one position for two rows": lambda m, s: s._replace(position=s.position[:1]),
    "another shape of state": lambda m, s: s._replace(S=s.S[:, :, :2]),
    "wider block": lambda m, s: m.blocks[1].double(),
    "another width inside": lambda m, s: [
        setattr(m.blocks[0].up.weight, "data", torch.randn(24, 16)),
        setattr(m.blocks[0].down.weight, "data", torch.randn(16, 24)),
    ],
    "narrow key": lambda m, s: setattr(m.blocks[0].attention.key.weight, "data", torch.ones(8, 16)),
    "short norm": lambda m, s: setattr(m.blocks[0].mlp_norm.weight, "data", torch.ones(8)),
    "bias for all": lambda m, s: setattr(m.blocks[0].up, "bias", torch.nn.Parameter(torch.ones(1))),
    "own forward": lambda m, s: _own_forward(m.blocks[0].down),
    "own forward of a layer": lambda m, s: setattr(
        m.blocks[0].attention, "forward", lambda x, **_: (x, s)
    ),
    "another class": lambda m, s: setattr(m.blocks[0].up, "__class__", Doubled),
    "sparse": lambda m, s: setattr(
        m.blocks[0].up, "weight", torch.nn.Parameter(m.blocks[0].up.weight.detach().to_sparse())
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("warm", [False, True])
def test_what_the_kernels_would_misread_is_not_for_them(name, warm, native_taken):
    """They trust sizes and types. Same logits, or the same kind of refusal, as the long way."""
    torch.manual_seed(2)
    model = LanguageModel(Config(**SIZES)).eval()
    _, state = model.prefill(torch.tensor([[1, 2], [3, 4]]))
    token = torch.tensor([5, 6])
    if warm:
        model.decode(token, state)
    before = len(native_taken)
    changed = CHANGES[name](model, state.layers[0])
    if isinstance(changed, type(state.layers[0])):
        state = state._replace(layers=(changed, *state.layers[1:]))

    def outcome(call):
        try:
            return call()
        except (ValueError, RuntimeError) as error:
            return type(error)

    with torch.no_grad():
        want = outcome(lambda: model(token[:, None], state=state, return_state=True)[0][:, 0])
    got = outcome(lambda: model.decode(token, state)[0])
    assert len(native_taken) == before
    if isinstance(want, torch.Tensor):
        assert judge.error(got, want) <= 2e-5
    else:
        assert isinstance(got, type), want
