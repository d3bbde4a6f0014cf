"""Recipes, and the arms of the comparison that are made of them: equal in size, as they say."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from enwik8.methods import METHODS, PERFORMER
from linear_rope import Config, Encoder, LanguageModel
from linear_rope.recipes import best, count_parameters, fit_parameters

CONTEST = [name for name in METHODS if name.startswith("best")] + [
    *("elu-none", "elu-rope", "elu-rope-before", "elu-none-decay", "elu-rope-decay"),
    *("elu-rope-fixed-decay", "elu-none-fixed-decay", "elu-selective-decay"),
    *(name for name in METHODS if name.startswith("softmax-rope")),
]
SMALL: dict[str, Any] = {"dim": 128, "layers": 4, "heads": 4}


def config_of(name: str, **sizes: Any) -> Config:
    return Config(**{**SMALL, **sizes, **METHODS[name].overrides})


@pytest.mark.parametrize("name", CONTEST)
def test_arms_of_the_contest_are_equal_in_size(name: str) -> None:
    for sizes in ({}, {"dim": 256, "heads": 8, "layers": 6}):
        want = count_parameters(config_of("softmax-rope", **sizes))
        got = count_parameters(config_of(name, **sizes))
        assert abs(got / want - 1) <= 0.01, (got, want)


def test_parameters_are_counted_as_the_model_has_them() -> None:
    for config in (Config(), Config(tie_embeddings=False), config_of("best-gpt")):
        model = LanguageModel(config)
        assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    # 4 blocks of four dim x dim, two dim x 4 dim, two norms; embedding; last norm.
    assert count_parameters(Config(**SMALL)) == 4 * (12 * 128**2 + 2 * 128) + 256 * 128 + 128


@pytest.mark.parametrize(
    "options",
    [
        {"output_gate": True, "decay": "learned", "mlp_ratio": 1.0},
        {"block": "llama", "short_conv": 4},
        {"bias": False, "dim": 96, "heads": 3, "layers": 2},
        {"bias": True, "dim": 96, "heads": 3, "layers": 2},
    ],
)
def test_models_are_fitted_to_a_number_of_parameters(options: dict[str, Any]) -> None:
    config = Config(**{**SMALL, **options})
    matrices = 3 if config.block == "llama" else 2
    unit = config.layers * (matrices * config.dim + config.bias)
    for target in (500_000, 500_100, 1_234_567):
        fitted = fit_parameters(config, target)
        assert abs(count_parameters(fitted) - target) <= unit / 2
        assert Config(**{**vars(fitted), "mlp_ratio": config.mlp_ratio}) == config
    least = count_parameters(config) - (config.hidden - 1) * unit
    assert fit_parameters(config, least).hidden == 1
    with pytest.raises(ValueError, match=rf"target=1000 parameters are too few.*has {least}"):
        fit_parameters(config, 1000)


def test_the_best_recipe_is_the_arm_of_that_name() -> None:
    assert best(128, 4, 4) == config_of("best")
    big = best(64, 2, layers=3, vocab_size=512, decay="none", dropout=0.1)
    assert (big.dim, big.heads, big.layers, big.vocab_size) == (64, 2, 3, 512)
    assert big.decay == "none" and big.output_gate and big.dropout == 0.1
    logits = LanguageModel(big)(torch.zeros(1, 3, dtype=torch.int64))
    assert logits.shape == (1, 3, 512)
    with pytest.raises(ValueError, match=r"unknown config keys: depth"):
        best(64, 2, depth=3)
    with pytest.raises(ValueError, match=r"heads=3 does not divide dim=64"):
        best(64, 3)


def test_each_ablation_of_the_recipe_changes_one_thing() -> None:
    recipe = METHODS["best"].overrides
    width = {"mlp_ratio"}
    changed = {
        "best-no-rope": {"position"},
        "best-no-decay": {"decay"},
        "best-no-gate": {"output_gate"},
        "best-both": {"denominator"},
        "best-rope-before": {"rotate"},
        "best-conv": {"short_conv"},
        "best-shift": {"token_shift"},
        "best-local": {"local_heads"},
        "best-gpt": {"block"},
        "best-qk-norm": {"qk_norm"},
        **{
            f"best-selective{name}": {"rotary_scaling"}
            for name in ("", "-rope", "-gate", "-normal")
        },
        **{f"best-{name}": {"decay"} for name in ("bias", "fixed", "retnet")},
    }
    divided = {
        "": set(),
        "-no-rope": {"position"},
        "-no-decay": {"decay"},
        "-rope-before": {"rotate"},
        "-gpt": {"block"},
    }
    for name, fields in divided.items():
        changed[f"best-denominator{name}"] = {"denominator", "output_norm", *fields}
    assert set(changed) == {name for name in METHODS if name.startswith("best-")}
    for name, fields in changed.items():
        other = METHODS[name].overrides
        differ = {f for f in {*recipe, *other} if recipe.get(f) != other.get(f)}
        assert differ - width == fields, name


def test_the_output_norm_takes_the_denominator_out() -> None:
    """Two arms, one function: but for the norm's eps, beside outputs that a denominator shrinks."""
    models = []
    for name in ("best", "best-both"):
        torch.manual_seed(0)
        models.append(LanguageModel(config_of(name, dim=32, heads=2, layers=2)).double())
    tokens = torch.randint(256, (2, 50))
    one, other = (model(tokens) for model in models)
    assert (one - other).abs().max() <= 1e-3 * one.abs().max()
    without = LanguageModel(config_of("best-denominator", dim=32, heads=2, layers=2)).double()
    without.load_state_dict(models[0].state_dict())
    assert (one - without(tokens)).abs().max() > 0.05 * one.abs().max()


def test_arms_that_follow_the_order_need_a_causal_model() -> None:
    for name, method in METHODS.items():
        if method.overrides.get("attention") == PERFORMER:
            assert method.needs_causal  # and its model refuses: see test_arms.py
            continue
        try:
            Encoder(Config(**{**SMALL, "max_length": 8, **method.overrides}))
            works = True
        except ValueError as error:
            assert "needs causal=True" in str(error), name
            works = False
        assert method.needs_causal == (not works), name
    both = {name for name, method in METHODS.items() if not method.needs_causal}
    assert {"best-no-decay", "softmax-rope-gate", "softmax-rope-llama"} <= both


def test_published_decay_arms_start_as_they_did() -> None:
    for name, method in METHODS.items():
        ours = name.startswith("best") or name.endswith(("fixed-decay", "selective-decay"))
        if name.endswith("-decay") and not ours:
            assert method.overrides["decay"] == "learned:bias=3", name


def test_listing_the_arms_takes_no_torch() -> None:
    code = "import sys, enwik8.methods; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["favor+", "favor+relu", "hedgehog"])
def test_to_count_draws_nothing(name: str) -> None:
    config = best(16, 2, 1, feature_map=name)
    state = torch.get_rng_state()
    assert count_parameters(config) > 0
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        model = LanguageModel(config)
    model.to_empty(device="cpu").initialize(3)
    assert model(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


def test_a_config_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    for name, method in METHODS.items():
        if method.overrides.get("attention") != PERFORMER:
            Config(**{**SMALL, "max_length": 8, **method.overrides})
            assert torch.equal(torch.get_rng_state(), before), name
