"""Trained FAVOR+ models measured with other random features."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import pytest
import torch

from enwik8 import redraw
from enwik8.__main__ import main
from enwik8.evaluate import evaluate
from enwik8.presets import Settings
from enwik8.train import train
from linear_rope import Config, LanguageModel, Rotary, make_feature_map
from linear_rope.feature_maps import SoftmaxRandomFeatures

CONFIG = Config(
    vocab_size=17, dim=16, layers=2, heads=2, feature_map="favor+", features=8, init_std=0.1
)
TOKENS = torch.randint(0, 17, (2, 24), generator=torch.Generator().manual_seed(0))


def model_of(config: Config = CONFIG) -> LanguageModel:
    model = LanguageModel(config)
    model.initialize(5)
    return model.eval()


def maps(model: LanguageModel) -> list[SoftmaxRandomFeatures]:
    return [m for m in model.modules() if isinstance(m, SoftmaxRandomFeatures)]


@torch.no_grad()
def test_another_draw_leaves_all_that_was_learned() -> None:
    model = model_of()
    twin = redraw.redrawn(model, 8, seed=2**63)
    for (name, mine), (_, other) in zip(
        model.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert torch.equal(mine, other), name
    drawn = [m.projection for m in maps(twin)]
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.allclose(model(TOKENS), twin(TOKENS), atol=1e-3)
    for mine, other in zip(maps(model), maps(twin), strict=True):
        assert not torch.equal(mine.projection, other.projection)
        other.projection.copy_(mine.projection)
    assert torch.equal(model(TOKENS), twin(TOKENS))


@torch.no_grad()
def test_more_features_come_to_one_model() -> None:
    """Two draws of many features differ less than two draws of few: both near the kernel."""

    def apart(features: int) -> float:
        first, second = (redraw.redrawn(model_of(), features, seed)(TOKENS) for seed in (1, 2))
        return float((first - second).abs().mean())

    few, many = apart(8), apart(8 * 256)
    assert 0 < many < few / 8  # 16 for independent features


@torch.no_grad()
def test_the_squared_norms_are_those_of_scaled_queries_and_keys() -> None:
    model = model_of(dataclasses.replace(CONFIG, layers=1))
    with redraw._squares(model) as found:
        model(TOKENS)
    attention = model.blocks[0].attention
    x = model.blocks[0].attention_norm(model.embedding(TOKENS)).double()
    for got, layer in zip(found, (attention.query, attention.key), strict=True):
        heads = (x @ layer.weight.double().T).unflatten(-1, (2, 8))
        want = (heads**2).sum(-1).mean() / 8**0.5  # |x'|^2 = |x|^2 / sqrt(D)
        assert float(got) == pytest.approx(float(want), rel=1e-5)
    model(TOKENS)
    assert len(found) == 2  # nothing is collected afterwards


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("redraw")
    text = folder / "text"
    text.write_bytes(bytes(range(32, 96)) * 60)
    settings = Settings(
        corpus=str(text), layers=1, dim=16, heads=2, features=8, length=16, batch_size=2, steps=2,
        warmup=1, evaluate_every=2, seed=3, threads=1,
    )  # fmt: skip
    for arm in ("favor-rope", "elu-rope"):
        train(settings, arm, folder / arm)
    return folder


def test_the_command(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs / "favor-rope")
    command = ["redraw", run, "--features", "8", "32", "--limit", "100", "--out", str(runs / "out")]
    assert main(command) == 0
    written = (runs / "out" / "redraw.csv").read_text()
    assert written == capsys.readouterr().out
    [row] = csv.DictReader(written.splitlines())
    assert (row["arm"], row["init_std"], row["seed"]) == ("favor-rope", "", "3")
    assert float(row["as_trained"]) == pytest.approx(evaluate(Path(run), limit=100), rel=1e-5)
    assert len({row["as_trained"], row["redrawn_8"], row["redrawn_32"]}) == 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["favor-rope", "elu-rope"], "a run of elu-rope, which has no FAVOR+ features"),
        (["nowhere"], "nowhere"),
        (["favor-rope", "--features", "7"], "--features must be even (they turn in pairs), got 7"),
        (["favor-rope", "--features", "0"], "--features must be at least 1, got 0"),
        (["favor-rope", "--limit", "-1"], "--limit must be at least 1, got -1"),
        (["favor-rope", "--threads", "10000000"], "--threads must be at most 1024"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str], command: list[str], message: str
) -> None:
    out = runs / "nothing"
    paths = [str(runs / c) if c in ("favor-rope", "elu-rope", "nowhere") else c for c in command]
    try:
        code = main(["redraw", *paths, "--out", str(out)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_rotated_favor_features_estimate_the_kernel_times_a_function_of_distance() -> None:
    """E[phi(q)^T R_d phi(k)] = exp(q . k / sqrt(D)) mean_i cos(d theta_i), over the draws."""
    width, features, distance = 16, 32, 7
    q, k = 0.3 * torch.randn(2, 1, 1, 1, width, generator=torch.Generator().manual_seed(0))
    rotary = Rotary(features)
    found = []
    for seed in range(400):
        phi = make_feature_map("favor+", width, features=features, seed=seed)
        here, there = (rotary(phi(x), torch.tensor([p])) for x, p in ((q, 0), (k, distance)))
        found.append(float((here * there).sum()))
    values = torch.tensor(found, dtype=torch.float64)
    angles = distance * 10000.0 ** (-2 * torch.arange(features // 2) / features)
    want = math.exp(float((q * k).sum()) / width**0.5) * float(angles.cos().mean())
    error = float(values.std()) / len(found) ** 0.5
    assert error < 0.05 * want
    assert float(values.mean()) == pytest.approx(want, abs=4 * error)
