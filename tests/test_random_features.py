"""Random features over the life of a model: redraws on schedule, and never anywhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from linear_rope import (
    Config,
    LanguageModel,
    RotaryLinearAttention,
    advance_random_features,
    make_feature_map,
)
from linear_rope.feature_maps import RandomFeatures, orthogonal_gaussian

ROOT = Path(__file__).resolve().parent.parent
RANDOM_MAPS = ("favor+", "favor+relu")


def tiny(feature_map: str = "favor+", **options: object) -> LanguageModel:
    return LanguageModel(
        Config(vocab_size=13, dim=16, layers=2, heads=2, feature_map=feature_map, **options)  # type: ignore[arg-type]
    )


def projections(model: nn.Module) -> list[Tensor]:
    return [m.projection.clone() for m in model.modules() if isinstance(m, RandomFeatures)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def training_step(model: nn.Module, tokens: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    advance_random_features(model)


TOKENS = torch.arange(12).reshape(2, 6) % 13


# ---- The schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RANDOM_MAPS)
def test_interval_three_redraws_after_steps_three_and_six(name: str) -> None:
    model = tiny(name, redraw_interval=3).train()
    redrawn = []
    for step in range(1, 8):
        before = projections(model)
        training_step(model, TOKENS)
        after = projections(model)
        changed = [not torch.equal(x, y) for x, y in zip(before, after, strict=True)]
        assert all(changed) or not any(changed)  # all layers together
        if changed[0]:
            redrawn.append(step)
    assert redrawn == [3, 6]
    assert {int(m.steps) for m in model.modules() if isinstance(m, RandomFeatures)} == {7}


@pytest.mark.parametrize("name", RANDOM_MAPS)
def test_without_an_interval_the_projection_never_changes(name: str) -> None:
    model = tiny(name).train()
    before = projections(model)
    for _ in range(10):
        training_step(model, TOKENS)
    assert same(before, projections(model))


def test_every_draw_is_another_matrix_and_every_layer_has_its_own() -> None:
    model = tiny(redraw_interval=1)
    drawn = projections(model)
    for _ in range(4):
        advance_random_features(model)
        drawn += projections(model)
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert not torch.allclose(a, b, atol=0.1)


def test_neighbouring_seeds_and_draws_do_not_share_a_matrix() -> None:
    drawn = []
    for seed in range(4):
        phi = make_feature_map("favor+", 8, features=16, redraw_interval=1, seed=seed)
        for _ in range(4):
            drawn.append(phi.projection.clone())
            phi.advance()
    assert len({tuple(d.flatten().tolist()) for d in drawn}) == 16


def test_a_seed_makes_draws_reproducible_and_no_seed_follows_the_global_generator() -> None:
    def build(**options: object) -> Tensor:
        return make_feature_map("favor+", 8, **options).projection

    assert torch.equal(build(seed=5), build(seed=5))
    assert not torch.equal(build(seed=5), build(seed=6))
    torch.manual_seed(3)
    a, b = build(), build()
    torch.manual_seed(3)
    assert torch.equal(a, build()) and torch.equal(b, build()) and not torch.equal(a, b)


def test_a_redraw_leaves_the_global_generator_alone() -> None:
    model = tiny(redraw_interval=1)
    before = torch.get_rng_state()
    advance_random_features(model)
    assert torch.equal(before, torch.get_rng_state())


def test_a_redraw_changes_the_output_but_not_what_it_estimates() -> None:
    phi = make_feature_map("favor+", 16, features=4096, redraw_interval=1, seed=0).double()
    q, k = (0.5 * torch.randn(32, 16, dtype=torch.float64) for _ in range(2))
    exact = (q @ k.mT / 4.0).exp()
    estimates = []
    for _ in range(3):
        estimates.append(phi(q) @ phi(k).mT)
        assert ((estimates[-1] - exact).abs() / exact).mean() < 0.1
        phi.advance()
    assert not torch.allclose(estimates[0], estimates[1], rtol=1e-4)


# ---- Evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", RANDOM_MAPS)
def test_a_forward_pass_draws_nothing_and_changes_no_buffer(name: str, training: bool) -> None:
    model = tiny(name, redraw_interval=1).train(training)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    first = model(TOKENS)
    for _ in range(5):
        assert torch.equal(first, model(TOKENS))
    assert torch.equal(generator, torch.get_rng_state())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


@torch.no_grad()
def test_two_thousand_evaluations_do_not_reach_an_interval_of_a_thousand() -> None:
    layer = RotaryLinearAttention(
        4, 1, feature_map="favor+", features=2, redraw_interval=1000
    ).eval()
    x = torch.randn(1, 1, 4)
    before, first = projections(layer), layer(x)
    for _ in range(2000):  # the schedule counts optimizer steps only
        last = layer(x)
    assert torch.equal(first, last) and same(before, projections(layer))
    assert int(layer.feature_map.steps) == 0


def test_generation_changes_neither_buffers_nor_the_step_count() -> None:
    model = tiny(redraw_interval=2)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.generate(TOKENS, 5, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


# ---- Checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RANDOM_MAPS)
def test_a_fresh_model_loads_a_trained_one_before_any_forward(name: str) -> None:
    trained = tiny(name, redraw_interval=3)
    for _ in range(4):
        training_step(trained, TOKENS)
    saved = {key: value.clone() for key, value in trained.state_dict().items()}
    fresh = tiny(name, redraw_interval=3)
    assert not same(projections(fresh), projections(trained))
    fresh.load_state_dict(saved, strict=True)
    assert torch.equal(fresh.eval()(TOKENS), trained.eval()(TOKENS))
    # The counter came along: both redraw at step 6, and draw the same.
    for step in range(5, 10):
        before = projections(fresh)
        for model in (fresh, trained):
            training_step(model.train(), TOKENS)
        assert same(projections(fresh), projections(trained))
        assert same(before, projections(fresh)) == (step not in (6, 9))
        assert torch.equal(fresh(TOKENS), trained(TOKENS))


def test_the_state_dict_holds_the_projection_the_count_and_the_seed() -> None:
    keys = set(make_feature_map("favor+", 8).state_dict())
    assert keys == {"projection", "steps", "seed"}


def test_a_seed_of_62_bits_survives_saving_and_a_change_of_dtype() -> None:
    seed = 2**62 - 1
    phi = make_feature_map("favor+", 8, seed=seed).half().to(torch.bfloat16).double()
    assert int(phi.seed) == seed and phi.seed.dtype == phi.steps.dtype == torch.int64


def test_reset_starts_again_from_another_seed() -> None:
    phi = make_feature_map("favor+", 8, redraw_interval=1, seed=1)
    for _ in range(3):
        phi.advance()
    phi.reset(2)
    other = make_feature_map("favor+", 8, redraw_interval=1, seed=2)
    for _ in range(3):
        assert torch.equal(phi.projection, other.projection) and phi.steps == other.steps
        phi.advance()
        other.advance()


# ---- Dtype --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", RANDOM_MAPS)
def test_the_model_in_another_dtype(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, redraw_interval=1)
    want = model(TOKENS)
    model = model.to(dtype)
    got = model(TOKENS)
    assert got.dtype == dtype and got.isfinite().all()
    torch.testing.assert_close(got.float(), want, atol=0.02, rtol=0.05)
    advance_random_features(model)  # drawn in float32, kept in the module's dtype
    assert projections(model)[0].dtype == dtype
    assert model(TOKENS).isfinite().all()


def test_the_draw_does_not_depend_on_the_default_dtype() -> None:
    want = make_feature_map("favor+", 8, seed=3).projection
    torch.set_default_dtype(torch.float64)
    assert torch.equal(make_feature_map("favor+", 8, seed=3).projection.float(), want)
    torch.set_default_dtype(torch.bfloat16)
    assert torch.equal(make_feature_map("favor+", 8, seed=3).projection, want.bfloat16())


@pytest.mark.parametrize("width", [4, 7])
def test_directions_are_orthogonal_in_groups_and_lengths_are_gaussian(width: int) -> None:
    rows = orthogonal_gaussian(3 * width + 2, width, torch.Generator().manual_seed(0)).double()
    for start in range(0, len(rows), width):
        group = rows[start : start + width]
        cosines = nn.functional.normalize(group) @ nn.functional.normalize(group).mT
        assert (cosines - torch.eye(len(group))).abs().max() < 1e-6
    many = orthogonal_gaussian(4000, width, torch.Generator().manual_seed(1))
    assert many.norm(dim=-1).square().mean().item() == pytest.approx(width, rel=0.05)
    assert many.mean(0).abs().max() < 0.1  # Haar: no direction is preferred


# ---- Replicas -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_with_other_global_seeds_redraw_the_same_matrix(tmp_path: Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import torch
            import torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel
            from linear_rope import Config, LanguageModel, advance_random_features

            rank, folder = int(sys.argv[1]), sys.argv[2]
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
            )
            torch.manual_seed(100 + rank)
            config = Config(
                vocab_size=13, dim=16, layers=2, heads=2, feature_map="favor+", redraw_interval=3
            )
            results = {}
            for broadcast in (True, False):
                model = LanguageModel(config)
                phi = model.blocks[1].attention.feature_map
                alone = phi.projection.clone()
                if not broadcast:  # then equal starts are the caller's task
                    model.initialize(7)
                replica = DistributedDataParallel(model, broadcast_buffers=broadcast)
                optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
                drawn = []
                for step in range(5):
                    tokens = torch.randint(13, (2, 6))
                    replica(tokens).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    advance_random_features(replica)
                    # read before the next forward pass, which would broadcast
                    drawn.append(phi.projection.clone())
                state = model.state_dict()
                results[broadcast] = {"alone": alone, "drawn": drawn, "state": state}
            torch.save(results, f"{folder}/{rank}.pt")
            dist.destroy_process_group()
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    replicas = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for replica in replicas:
            output, _ = replica.communicate(timeout=600)
            assert replica.returncode == 0, output
    finally:
        for replica in replicas:
            replica.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for broadcast in (True, False):
        a, b = first[broadcast], second[broadcast]
        assert not torch.equal(a["alone"], b["alone"])  # they did start apart
        assert same(a["drawn"], b["drawn"])
        changed = [not torch.equal(x, y) for x, y in zip(a["drawn"][1:], a["drawn"], strict=False)]
        assert changed == [False, True, False, False]  # at step 3
        for key, value in a["state"].items():
            assert torch.equal(value, b["state"][key]), key


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_below_one_is_refused(interval: int) -> None:
    with pytest.raises(ValueError, match=rf"redraw_interval={interval} .* at least 1, or None"):
        make_feature_map("favor+", 8, redraw_interval=interval)


def test_options_that_a_map_lacks_are_refused_not_ignored() -> None:
    for option in ("features", "redraw_interval", "seed"):
        with pytest.raises(ValueError, match=rf"elu\+1.*{option}"):
            make_feature_map("elu+1", 8, **{option: 2})
