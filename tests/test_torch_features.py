"""What torch offers around a module: compile, autocast, checkpointing, torch.func, pickling."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forms import BACKENDS
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from linear_rope import (
    FEATURE_MAPS,
    Config,
    Encoder,
    LanguageModel,
    Rotary,
    RotaryLinearAttention,
    SoftmaxAttention,
    linear_attention,
    make_feature_map,
)

ROOT = Path(__file__).resolve().parent.parent

KINDS: dict[str, dict[str, Any]] = {
    "elu+1": {},
    "relu": {"feature_map": "relu"},
    "favor+": {"feature_map": "favor+"},
    "favor+relu": {"feature_map": "favor+relu"},
    "decay": {"decay": "learned"},
    "favor+, decay": {"feature_map": "favor+", "decay": "learned"},
    "before": {"rotate": "before"},
    "rotated": {"feature_map": "relu", "denominator": "rotated"},
    "no denominator": {"denominator": "none", "output_norm": True},
    "sinusoidal": {"position": "sinusoidal"},
    "learned": {"position": "learned", "max_length": 40},
    "softmax": {"attention": "softmax"},
}
# Traces forward and backward as the default compiler does, with its decompositions and its
# partition, and then runs the graphs with torch's own kernels: seconds, and no C++ compiler.
BACKEND = "aot_eager_decomp_partition"
COMPILED = ("elu+1", "favor+", "decay", "softmax")


def build(kind: str, **options: Any) -> LanguageModel:
    sizes = {"vocab_size": 13, "dim": 16, "layers": 2, "heads": 2, "tie_embeddings": False}
    return LanguageModel(Config(**{**sizes, **KINDS[kind], **options}))


def random_tokens(batch: int = 2, time: int = 9) -> Tensor:
    return torch.randint(13, (batch, time))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].flatten(0, -2).float(), tokens[..., 1:].flatten())


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, values = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, values, allow_unused=True)
    return {n: g for n, g in zip(names, found, strict=True) if g is not None}


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert set(got) == set(want) and len(got) > 0
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# ---- torch.compile ------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("kind", COMPILED)
def test_the_language_model_compiles_into_one_graph_with_its_gradient(kind: str) -> None:
    model = build(kind, layers=1)
    tokens = random_tokens()
    want = model(tokens)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    got = compiled(tokens)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    close(gradients(model, loss_of(got, tokens)), gradients(model, loss_of(want, tokens)), 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("kind", ["decay", "softmax"])
def test_a_masked_step_from_a_state_compiles(kind: str) -> None:
    options: dict[str, Any] = {"decay": "learned"} if kind == "decay" else {}
    layer = (SoftmaxAttention if kind == "softmax" else RotaryLinearAttention)(16, 2, **options)
    x, mask = torch.randn(2, 9, 16), torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    _, state = layer(x, key_mask=mask, return_state=True)
    want, after = layer(x, key_mask=mask, state=state, return_state=True)
    compiled = torch.compile(layer, fullgraph=True, backend=BACKEND)
    got, got_after = compiled(x, key_mask=mask, state=state, return_state=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert type(got_after) is type(after)
    torch.testing.assert_close(list(got_after), list(after), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_fresh_compiler")
def test_layers_that_turn_other_shares_compile_one_by_one() -> None:
    """The second one's share would become a symbol, of which no size can be made."""
    x = torch.randn(2, 9, 16)
    for fraction in (1.0, 0.5):
        layer = RotaryLinearAttention(16, 2, rotary_fraction=fraction)
        got = torch.compile(layer, backend=BACKEND)(x)
        torch.testing.assert_close(got, layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "options",
    [{"rotary_fraction": 0.5, "pairing": "half"}, {"local_heads": 1, "window": 5}, {"kv_heads": 1}],
    ids=str,
)
def test_a_model_compiles_for_lengths_that_change(options: dict[str, Any]) -> None:
    config = Config(vocab_size=11, dim=16, heads=2, layers=1, decay="learned", **options)
    model = LanguageModel(config)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=True)
    for batch, time in ((2, 40), (3, 31), (1, 150)):
        tokens = torch.randint(11, (batch, time))
        got, want = compiled(tokens), model(tokens)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        close(gradients(model, loss_of(got, tokens)), gradients(model, loss_of(want, tokens)), 1e-5)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("LINEAR_ROPE_TEST_INDUCTOR") != "1" or shutil.which("g++") is None,
    reason="the default compiler takes a minute: set LINEAR_ROPE_TEST_INDUCTOR=1",
)
@pytest.mark.usefixtures("_fresh_compiler")
def test_the_layer_runs_through_the_default_compiler() -> None:
    layer = RotaryLinearAttention(8, 1, decay="learned")
    x = torch.randn(1, 70, 8)  # a whole chunk and a short one
    want, cotangent = layer(x), torch.randn(1, 70, 8)
    got = torch.compile(layer, fullgraph=True)(x)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    close(
        gradients(layer, (got * cotangent).sum()), gradients(layer, (want * cotangent).sum()), 1e-4
    )


# ---- Autocast and other dtypes ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_is_finite_close_and_trains(kind: str) -> None:
    model = build(kind)
    tokens = random_tokens()
    want = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(tokens)
        loss = loss_of(got, tokens)
    assert got.dtype == torch.bfloat16
    # a rotated denominator passes near 0 and multiplies what rounding is there
    torch.testing.assert_close(
        got.float(), want, atol=0.5 if kind == "rotated" else 0.08, rtol=0.08
    )
    exact = gradients(model, loss_of(want, tokens))
    for name, g in gradients(model, loss).items():
        assert g.dtype == torch.float32 and g.isfinite().all(), name
        if kind != "rotated":
            error = (g - exact[name]).norm() / exact[name].norm().clamp(min=1e-3)
            assert error < 0.2, (name, error)


@pytest.mark.parametrize("backend", [*BACKENDS, "not causal"])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_autocast_reaches_nothing_inside_the_equation(feature_map: str, backend: str) -> None:
    q, k, v = torch.randn(3, 2, 2, 70, 8).requires_grad_().unbind(0)
    options: dict[str, Any] = {"feature_map": make_feature_map(feature_map, 8)}
    options["rotary"] = Rotary(options["feature_map"].feature_dim)
    options |= {"causal": False} if backend == "not causal" else {"backend": backend}
    want = linear_attention(q, k, v, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_attention(q, k, v, **options)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    cotangent = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, (q, k, v), cotangent),
        torch.autograd.grad(want, (q, k, v), cotangent),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("how", ["autocast", "cast"])
@pytest.mark.parametrize("causal", [True, False])
def test_sums_are_in_float32_whatever_the_module_is_in(how: str, causal: bool) -> None:
    """1 + 1 + ... stops at 256 in bfloat16; a mean over 3000 tokens then is far off."""
    layer = RotaryLinearAttention(4, 1, rotate="none", causal=causal)
    with torch.no_grad():
        for p in (layer.query, layer.key):
            p.weight.zero_()  # all features 1
        for p in (layer.value, layer.out):
            p.weight.copy_(torch.eye(4))
    x = torch.ones(1, 3000, 4)
    x[:, :1500] = 0.5
    if how == "cast":
        layer, x = layer.bfloat16(), x.bfloat16()
        got = layer(x)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = layer(x)
    torch.testing.assert_close(got[0, -1].float(), torch.full((4,), 0.75), atol=0.004, rtol=0)
    if causal:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            _, state = layer(x, return_state=True)
        assert state.S.dtype == state.z.dtype == torch.float32
        assert torch.equal(state.z, torch.full((1, 1, 4), 3000.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    model = build(kind)
    tokens = random_tokens()
    want = model(tokens)
    model.to(dtype)
    got, state = model(tokens, return_state=True)
    assert got.dtype == dtype and got.isfinite().all()
    tolerance = {torch.float16: 0.02, torch.bfloat16: 0.12, torch.float64: 2e-5}[dtype]
    if kind != "rotated" or dtype == torch.float64:
        torch.testing.assert_close(got.to(want.dtype), want, atol=tolerance, rtol=tolerance)
    if kind != "softmax":
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert state.layers[0].S.dtype == state.layers[0].z.dtype == wide
    for g in gradients(model, loss_of(got, tokens)).values():
        assert g.dtype == dtype and g.isfinite().all()
    # a step of decoding
    step = model(tokens[:, :1], state=state)
    assert step.dtype == dtype and step.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_construction_under_a_default_dtype_of_bfloat16(kind: str) -> None:
    want = build(kind)
    want.initialize(3)
    torch.set_default_dtype(torch.bfloat16)
    model = build(kind)
    model.initialize(3)
    tokens = random_tokens(1, 40)
    got = model(tokens)
    assert got.dtype == torch.bfloat16
    torch.set_default_dtype(torch.float32)
    # the same as a float32 model that was cast: no table was formed in bfloat16
    assert torch.equal(got, want.bfloat16()(tokens))
    # and the rotation is exact far out, although everything was built in bfloat16
    if kind not in ("learned", "sinusoidal", "rotated", "before"):
        far = model(tokens, positions=100_000)
        torch.testing.assert_close(far, got, atol=0.15, rtol=0.1)


# ---- Activation checkpointing, torch.func -------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_no_gradient(kind: str) -> None:
    model = build(kind, dropout=0.2).train()
    tokens = random_tokens()

    def run(through: Callable[..., Any]) -> dict[str, Tensor]:
        torch.manual_seed(1)  # the same dropout
        x = model.embedding(tokens)
        for block in model.blocks:
            x = through(block, x)
        return gradients(model, x.square().sum())

    want = run(lambda block, x: block(x))
    got = run(lambda block, x: checkpoint(block, x, use_reentrant=False))
    assert set(got) == set(want) and all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_per_sample_gradients_by_vmap_of_grad(kind: str) -> None:
    model = build(kind)
    tokens = random_tokens(3)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :3] = False
    buffers = dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], row: Tensor, keep: Tensor) -> Tensor:
        logits = functional_call(
            model, {**parameters, **buffers}, (row[None],), {"key_mask": keep[None]}
        )
        return loss_of(logits[0], row)

    parameters = dict(model.named_parameters())
    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, tokens, mask)
    for i in range(3):
        logits = model(tokens[i : i + 1], key_mask=mask[i : i + 1])
        want = gradients(model, loss_of(logits[0], tokens[i]))
        close({n: each[n][i] for n in want}, want, 1e-4 if kind == "rotated" else 1e-5)


def test_vmap_over_models() -> None:
    models = [build("decay") for _ in range(3)]
    tokens = random_tokens()
    stacked, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    got = vmap(lambda p, b: functional_call(models[0], {**p, **b}, (tokens,)))(stacked, buffers)
    for i, model in enumerate(models):
        torch.testing.assert_close(got[i], model(tokens), atol=1e-5, rtol=1e-5)


def test_second_derivatives_are_refused_or_right_but_never_wrong() -> None:
    x = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    for backend in ("reference", "recurrent"):
        layer = RotaryLinearAttention(8, 2, backend=backend).double()
        assert torch.autograd.gradgradcheck(layer, (x,))
    chunked = RotaryLinearAttention(8, 2, backend="chunked").double()
    (first,) = torch.autograd.grad(chunked(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiable once.*reference"):
        first.sum().backward()


def test_forward_mode_works_where_the_backend_is_plain_torch() -> None:
    layer = RotaryLinearAttention(8, 2, backend="reference").double()
    x, direction = torch.randn(2, 1, 5, 8, dtype=torch.float64).unbind(0)
    _, got = jvp(layer, (x,), (direction,))
    step = 1e-6
    want = (layer(x + step * direction) - layer(x - step * direction)) / (2 * step)
    torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-6)


# ---- Copies and files ---------------------------------------------------------------------------


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state_dict(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = type(model)(model.config)  # type: ignore[call-arg,arg-type]
    other.load_state_dict(torch.load(file), strict=True)  # with safe loading, the default
    return other


@pytest.mark.parametrize(
    "through", [copy.deepcopy, through_pickle, through_torch_save, through_state_dict]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_every_bit(kind: str, through: Callable[[nn.Module], nn.Module]) -> None:
    models: list[nn.Module] = [build(kind)]
    if "decay" not in KINDS[kind]:
        models.append(Encoder(models[0].config))  # type: ignore[arg-type]
    for model in models:
        tokens = random_tokens()
        model(tokens)  # nothing that a forward pass leaves behind is in the way
        assert torch.equal(through(model)(tokens), model(tokens))


# ---- A bare machine -----------------------------------------------------------------------------


@pytest.mark.slow
def test_all_paths_run_without_gpu_compiler_or_triton(tmp_path: Path) -> None:
    """Own process, PATH empty, CUDA hidden; and nothing is printed or warned at import."""
    script = textwrap.dedent(
        """
        import shutil, sys, warnings
        import torch
        assert shutil.which("g++") is shutil.which("gcc") is shutil.which("cc") is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            import linear_rope as lr
        assert not torch.cuda.is_available() and "triton" not in sys.modules
        tokens = torch.arange(14).reshape(2, 7) % 13
        sizes = dict(vocab_size=13, dim=16, layers=1, heads=2)
        arms = [dict(attention="softmax")]
        for feature_map in lr.FEATURE_MAPS:
            for decay in ("none", "learned"):
                arms += [dict(feature_map=feature_map, decay=decay)]
        arms += [dict(backend=name) for name in ("auto", "reference", "chunked", "recurrent")]
        for arm in arms:
            model = lr.LanguageModel(lr.Config(**sizes, **arm))
            model(tokens).square().mean().backward()
            assert model.generate(tokens, 2).shape == (2, 9)
            if "decay" not in arm or arm["decay"] == "none":
                assert lr.Encoder(lr.Config(**sizes, **arm))(tokens).isfinite().all()
        try:
            lr.LanguageModel(lr.Config(**sizes, backend="my-gpu-kernel"))
        except ValueError as error:
            print(error)
        """
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "LD_LIBRARY_PATH")},
        "PATH": str(empty),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    sentence = done.stdout.strip()
    assert sentence.startswith("backend='my-gpu-kernel' is unknown; choose one of: auto, ")
    assert "\n" not in sentence and "NoneType" not in sentence
