"""Loss by position: every byte once, the same as reading the window whole, honest refusals."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from enwik8.batches import bits_per_byte
from enwik8.corpus import load_corpus
from enwik8.errors import UserError
from enwik8.evaluate import load_model, split_bits_per_byte
from enwik8.presets import Settings
from enwik8.train import train
from enwik8.windows import evaluate_windows, losses_by_position
from linear_rope import Config, LanguageModel


def text_of(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(97, 123, size).astype(np.uint8)


@pytest.mark.parametrize(
    "choices",
    [
        {"position": "rotary"},
        {"position": "sinusoidal", "decay": "learned"},
        {"attention": "softmax", "position": "rotary"},
    ],
)
@pytest.mark.parametrize(("length", "piece"), [(24, 24), (24, 7), (40, 8), (1, 1)])
def test_pieces_give_the_losses_of_the_whole_window(
    choices: dict[str, str], length: int, piece: int
) -> None:
    model = LanguageModel(Config(dim=16, heads=2, layers=2, **choices)).double()  # type: ignore[arg-type]
    data = text_of(0, 4 * length + length // 2 + 1)  # the last window is shorter
    found, counts = losses_by_position(model, data, length, piece, batch_size=3)
    expected, times = np.zeros(length), np.zeros(length, dtype=int)
    tokens = torch.from_numpy(data.astype(np.int64))
    for start in range(0, len(data) - 1, length):
        window = tokens[start : start + length + 1]
        with torch.no_grad():
            logits = model(window[None, :-1])[0]
        nats = F.cross_entropy(logits, window[1:], reduction="none").numpy()
        expected[: len(nats)] += nats
        times[: len(nats)] += 1
    assert (counts == times).all() and counts.sum() == len(data) - 1
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert model.training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("windows")
    words = ["the", "of", "and", "to", "in", "is", "was", "for"]
    (out / "text.txt").write_text(" ".join(random.Random(0).choices(words, k=4000)))
    settings = Settings(
        corpus=str(out / "text.txt"),
        **{"layers": 1, "dim": 16, "heads": 2, "length": 16, "batch_size": 4, "steps": 3},  # type: ignore[arg-type]
        **{"warmup": 1, "validation_bytes": 100, "threads": 1, "cpu": True},  # type: ignore[arg-type]
    )
    for arm in ("elu-rope", "elu-learned"):
        train(settings, arm, out / arm)
    return out


def test_one_length_is_what_the_training_logged(folder: Path) -> None:
    (row,) = evaluate_windows(folder / "elu-rope", [1], limit=100)
    logged = (folder / "elu-rope" / "metrics.csv").read_text().splitlines()[-1].split(",")[3]
    assert row["bits_per_byte"] == pytest.approx(float(logged), rel=1e-6)
    assert row["bytes"] == 100


def test_bins_hold_all_positions(folder: Path) -> None:
    rows = evaluate_windows(folder / "elu-rope", [1, 2, 8], limit=500)
    data = load_corpus(folder / "text.txt").valid[:501]  # type: ignore[arg-type]
    model = load_model(folder / "elu-rope").model
    for row in rows:
        assert row["edges"][0] == 0 and row["edges"][-1] == row["length"] == 16 * row["factor"]
        assert all(low < high for low, high in zip(row["edges"], row["edges"][1:], strict=False))
        assert len(row["bits"]) == len(row["edges"]) - 1
        whole = split_bits_per_byte(model, data, row["length"], 4)
        assert row["bits_per_byte"] == pytest.approx(whole, rel=1e-5)
    nats, counts = losses_by_position(model, data, 16, 16, 4)  # type: ignore[arg-type]
    assert rows[0]["bits"][-1] == pytest.approx(bits_per_byte(nats[-1] / counts[-1]), rel=1e-6)


def test_what_an_arm_cannot_read_says_why(folder: Path) -> None:
    one, two, long = evaluate_windows(folder / "elu-learned", [1, 2, 1000], limit=500)
    assert "bits" in one and "reason" not in one
    assert ("bits" not in two and "max_length" in two["reason"]) or "16" in two["reason"]
    assert long["reason"] == "500 bytes of text are fewer than a window"


def test_another_text_is_refused(folder: Path) -> None:
    path = folder / "text.txt"
    before = path.read_text()
    try:
        path.write_text(before[:-7])
        with pytest.raises(UserError, match="SHA-256"):
            evaluate_windows(folder / "elu-rope", [1], limit=100)
    finally:
        path.write_text(before)
