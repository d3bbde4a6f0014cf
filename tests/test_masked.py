"""The masked objective: what is hidden, what is measured, and that it meets no causal number."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from enwik8 import masked as masking
from enwik8.__main__ import main
from enwik8.batches import BatchHash, WindowSampler, evaluation_windows
from enwik8.compare import compare
from enwik8.curves import load_runs
from enwik8.errors import UserError
from enwik8.evaluate import load_model, split_bits_per_byte
from enwik8.masked import (
    IGNORED,
    MASK,
    MaskedModel,
    hide,
    masked_batch,
    masked_count,
    masked_evaluation,
)
from enwik8.methods import METHODS, find
from enwik8.objectives import CAUSAL, MLM, OBJECTIVES
from enwik8.plot import curves_figure, plot
from enwik8.presets import Settings, model_fields
from enwik8.summary import summarize, verdict
from enwik8.tasks import training_batch
from enwik8.train import train
from linear_rope.model import Config

ENCODER_ARMS = [name for name, method in METHODS.items() if not method.needs_causal]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    words = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as"]
    path.write_text(" ".join(random.Random(0).choices(words, k=4000)))
    return path


@pytest.fixture(scope="module")
def tiny(text: Path) -> Settings:
    return Settings(
        corpus=str(text),
        objective="mlm",
        layers=1,
        dim=16,
        heads=2,
        length=32,
        batch_size=4,
        steps=6,
        warmup=2,
        evaluate_every=3,
        validation_bytes=100,
        checkpoint_every=3,
        threads=1,
        cpu=True,
    )


@pytest.fixture(scope="module")
def compared(tiny: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small comparison with hidden bytes; tests must not change it."""
    out = tmp_path_factory.mktemp("compared")
    compare(tiny, out, arms=("elu-none", "softmax-rope"))
    return out


@pytest.fixture(scope="module")
def causal(tiny: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal run of the same size."""
    out = tmp_path_factory.mktemp("causal")
    train(dataclasses.replace(tiny, objective="causal"), "elu-none", out)
    return out


def letters(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(97, 123, size).astype(np.uint8)


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


# --- what is hidden -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "count"), [(1, 1), (3, 1), (6, 1), (10, 2), (20, 3), (100, 15), (256, 38)]
)
def test_each_window_hides_fifteen_percent_and_at_least_one(length: int, count: int) -> None:
    assert masked_count(length) == count
    windows = letters(50 * length).reshape(50, length)
    _, targets = hide(windows, (0, 1), ((i, 0) for i in range(50)))
    assert ((targets != IGNORED).sum(axis=1) == count).all()


def test_of_the_chosen_eight_tenths_are_masked_one_random_one_kept() -> None:
    windows = letters(2000 * 100).reshape(2000, 100)
    before = windows.copy()
    seen, targets = hide(windows, (7, 1), ((i, 3) for i in range(2000)))
    assert np.array_equal(windows, before), "the caller's bytes were changed"
    chosen = targets != IGNORED
    assert np.array_equal(targets[chosen], windows[chosen])
    assert np.array_equal(seen[~chosen], windows[~chosen])
    count = chosen.sum()
    assert count == 30_000
    masked, kept = seen[chosen] == MASK, seen[chosen] == windows[chosen]
    other = seen[chosen][~masked & ~kept]
    # Random bytes are uniform over all 256, so 1 of 256 equals the letter that was there. Bounds
    # are six standard deviations of binomials: 0.0139, 0.0105.
    assert abs(masked.mean() - 0.8) < 0.0139
    assert abs(kept.mean() - (0.1 + 0.1 / 256)) < 0.0105
    assert abs(len(other) / count - 0.1 * 255 / 256) < 0.0105
    assert other.min() == 0 and other.max() == 255 and len(np.unique(other)) == 256
    assert np.bincount(other, minlength=256).max() < 40  # 11.7 on average
    # Every place is chosen as often: 300 of 2000 times, six standard deviations are 96.
    assert np.abs(chosen.sum(axis=0) - 300).max() < 96
    # What is done with a place does not depend on where it is.
    assert abs((seen == MASK)[:, :50].sum() - (seen == MASK)[:, 50:].sum()) < 6 * 24_000**0.5


def test_masks_depend_on_seed_step_and_row_only() -> None:
    sampler = WindowSampler(letters(5000), 32, 8, seed=5)
    for step in range(20):
        masked_batch(sampler, step)
    torch.manual_seed(1)
    np.random.seed(1)  # the global generators must not matter
    fresh = WindowSampler(letters(5000), 32, 8, seed=5)
    for one, two in zip(masked_batch(sampler, 20), masked_batch(fresh, 20), strict=True):
        assert np.array_equal(one, two)
    # Another text in the same places has the same places hidden.
    other = WindowSampler(letters(5000, seed=1), 32, 8, seed=5)
    places = masked_batch(sampler, 20)[1] != IGNORED
    assert np.array_equal(places, masked_batch(other, 20)[1] != IGNORED)


def test_masks_of_other_seeds_steps_and_rows_differ() -> None:
    places = [
        (row != IGNORED).tobytes()
        for seed in (0, 1, 2, 2**63)
        for step in range(8)
        for row in masked_batch(WindowSampler(letters(5000), 256, 8, seed), step)[1]
    ]
    evaluation = masked_evaluation(letters(256 * 64 + 1), 256, 4)
    places += [(row != IGNORED).numpy().tobytes() for _, y in evaluation for row in y]
    assert len(places) == len(set(places)) == 4 * 8 * 8 + 64


def test_the_draws_are_those_of_every_other_machine() -> None:
    seen, targets = hide(np.arange(40, dtype=np.uint8)[None], (1, 1), [(2, 0)])
    chosen = np.flatnonzero(targets[0] != IGNORED)
    assert chosen.tolist() == [1, 5, 22, 34, 35, 36]
    assert seen[0, chosen].tolist() == [63, 256, 256, 256, 35, 256]


def test_windows_are_those_of_the_causal_objective() -> None:
    sampler = WindowSampler(letters(5000), 32, 8, seed=2)
    batch = training_batch(sampler, 4, MLM)
    plain = training_batch(sampler, 4, CAUSAL)
    chosen = batch.y != IGNORED
    assert torch.equal(torch.where(chosen, batch.y, batch.x), plain.x)
    assert torch.equal(plain.x[:, 1:], plain.y[:, :-1])
    # Masks are drawn under a key of their own, (seed, 1): that of the windows is (seed, 0).
    seen, targets = hide(plain.x.numpy(), (2, 1), ((i, 4) for i in range(8)))
    assert np.array_equal(seen, batch.x) and np.array_equal(targets, batch.y)
    parts = [batch.share(rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat([x for x, _ in parts]), batch.x)
    assert torch.equal(torch.cat([y for _, y in parts]), batch.y)


def test_the_hash_is_of_the_masks_too() -> None:
    sampler = WindowSampler(letters(5000), 32, 8, seed=2)
    batch = training_batch(sampler, 4, MLM)

    def digest(x: torch.Tensor, y: torch.Tensor) -> str:
        changed = dataclasses.replace(batch, hashed=np.stack([x.numpy(), y.numpy()]).astype("<i2"))
        return BatchHash("a").update(changed.hashed)

    told = BatchHash("a").update(batch.hashed)
    assert told == digest(batch.x, batch.y)
    place = tuple((batch.y != IGNORED).nonzero()[0].tolist())
    for values in ("x", "y"):
        other = {"x": batch.x.clone(), "y": batch.y.clone()}
        other[values][place] = 5
        assert digest(**other) != told
    assert told != BatchHash("a").update(sampler.windows(4))


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("limit", [None, 70, 1000])
def test_evaluation_hides_the_same_bytes_every_time(batch_size: int, limit: int | None) -> None:
    data = letters(333)
    size = 332 if limit is None else min(limit, 332)

    def flat(batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> tuple[np.ndarray, np.ndarray]:
        seen, targets = zip(*batches, strict=True)
        return tuple(torch.cat([t.flatten() for t in ts]).numpy() for ts in (seen, targets))  # type: ignore[return-value]

    torch.manual_seed(batch_size)
    seen, targets = flat(masked_evaluation(data, 16, batch_size, limit))
    assert len(seen) == size
    assert np.array_equal(np.where(targets != IGNORED, targets, seen), data[:size])
    whole_seen, whole_targets = flat(masked_evaluation(data, 16, 7))
    full = size // 16 * 16  # a shorter last window has masks of its own
    assert np.array_equal(seen[:full], whole_seen[:full])
    assert np.array_equal(targets[:full], whole_targets[:full])
    assert (targets != IGNORED).sum() == {332: 20 * 2 + 2, 70: 4 * 2 + 1}[size]


class _Constant(nn.Module):
    """The same logits everywhere."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


def test_the_loss_is_that_of_the_hidden_bytes_alone() -> None:
    data = letters(1000)
    log = torch.log_softmax(torch.arange(256.0).sin(), 0).double()
    hidden = np.concatenate(
        [y[y != IGNORED].numpy() for _, y in masked_evaluation(data, 64, 5, 900)]
    )
    assert len(hidden) == 14 * 10 + 1  # 14 windows of 64, and 4 bytes
    expected = -log[torch.from_numpy(hidden)].mean().item() / math.log(2)
    for batch_size in (1, 4, 100):
        value = split_bits_per_byte(
            _Constant(log.float()), data, 64, batch_size, objective=MLM, limit=900
        )
        assert value == pytest.approx(expected, rel=1e-6)
    assert split_bits_per_byte(_Constant(torch.zeros(256)), data, 64, 4, objective=MLM) == (
        pytest.approx(8.0, abs=1e-6)
    )


@pytest.mark.parametrize("micro", [None, 1, 3])
def test_the_logged_loss_is_the_mean_over_hidden_bytes(
    tmp_path: Path, tiny: Settings, micro: int | None
) -> None:
    settings = dataclasses.replace(tiny, steps=1, micro_batch_size=micro, batch_size=7)
    train(settings, "elu-rope", tmp_path)
    data = np.frombuffer(Path(tiny.corpus).read_bytes(), np.uint8)
    sampler = WindowSampler(data[: len(data) * 90 // 100], 32, 7, seed=0)
    x, y = (torch.from_numpy(part) for part in masked_batch(sampler, 1))
    model = MaskedModel(Config(**model_fields(settings, find("elu-rope"))))  # type: ignore[arg-type]
    model.initialize(0)
    with torch.no_grad():
        log = torch.log_softmax(model(x).double(), -1)
    expected = -log[y != IGNORED].gather(-1, y[y != IGNORED][:, None]).mean() / math.log(2)
    (row,) = rows(tmp_path)
    assert float(row["train_bits_per_masked_byte"]) == pytest.approx(float(expected), rel=1e-5)


# --- the model ------------------------------------------------------------------------------------


def test_every_arm_without_decay_has_an_encoder_with_shared_initial_values(tiny: Settings) -> None:
    reference: dict[object, torch.Tensor] = {}
    tokens = torch.randint(257, (2, 16))
    for name in ENCODER_ARMS:
        config = Config(**model_fields(tiny, find(name)))  # type: ignore[arg-type]
        model = MaskedModel(config)
        model.initialize(3)
        logits = model(tokens)
        assert logits.shape == (2, 16, 256) and bool(logits.isfinite().all()), name
        for parameter, value in model.named_parameters():
            same = reference.setdefault((parameter, value.shape), value.detach())
            assert torch.equal(same, value), (name, parameter)
        # It looks both ways: the last byte moves the first logits.
        other = tokens.clone()
        other[:, -1] = (other[:, -1] + 1) % 257
        assert not torch.equal(model(other)[:, 0], logits[:, 0]), name
    assert len(ENCODER_ARMS) == 3 * 5 + 5 + 5 + 9 + 6
    assert ("embedding.weight", torch.Size((257, 16))) in reference


@pytest.mark.parametrize("arm", ["elu-none", "favor-none", "softmax-none"])
def test_without_positions_an_encoder_knows_no_order(tiny: Settings, arm: str) -> None:
    """What bounds these arms: they see which bytes are around, not where."""
    model = MaskedModel(Config(**model_fields(tiny, find(arm))))  # type: ignore[arg-type]
    tokens, order = torch.randint(257, (1, 30)), torch.randperm(30)
    torch.testing.assert_close(model(tokens[:, order]), model(tokens)[:, order])
    rope = MaskedModel(Config(**model_fields(tiny, find(arm.replace("none", "rope")))))  # type: ignore[arg-type]
    assert not torch.allclose(rope(tokens[:, order]), rope(tokens)[:, order], atol=1e-3)


def test_hidden_bytes_are_learned_where_order_is_known(tmp_path: Path, tiny: Settings) -> None:
    """On a text in which the place says everything and the number of each byte nothing."""
    (tmp_path / "abcd.txt").write_text("abcd" * 1000)
    settings = dataclasses.replace(
        tiny,
        corpus=str(tmp_path / "abcd.txt"),
        dim=32,
        length=16,
        batch_size=16,
        steps=80,
        learning_rate=1e-2,
        evaluate_every=80,
    )
    final = {}
    for arm in ("softmax-none", "softmax-rope"):
        train(settings, arm, tmp_path / arm)
        final[arm] = float(rows(tmp_path / arm)[-1]["validation_bits_per_masked_byte"])
    assert final["softmax-rope"] < 1.0 < 1.8 < final["softmax-none"], final


# --- runs, comparisons, figures -------------------------------------------------------------------


def test_a_comparison_says_what_it_measured(compared: Path) -> None:
    merged = rows(compared)
    assert len(merged) == 12 and not {n for n in merged[0] if n.endswith("bits_per_byte")}
    assert [r["step"] for r in merged if r["validation_bits_per_masked_byte"]] == ["3", "6"] * 2
    hashes = {arm: [r["batch_hash"] for r in merged if r["arm"] == arm] for arm in
              ("elu-none", "softmax-rope")}  # fmt: skip
    assert hashes["elu-none"] == hashes["softmax-rope"] and len(set(hashes["elu-none"])) == 6
    record = json.loads((compared / "config.json").read_text())
    assert record["training"]["objective"] == "mlm"
    assert record["arms"]["elu-none"]["model"]["vocab_size"] == 257
    summary = (compared / "summary.md").read_text()
    assert "final validation bits per masked byte" in summary
    assert "perplexity per masked byte" in summary and "15 % of the bytes are hidden" in summary
    assert "Batches and masks: equal in all arms" in summary
    assert "bits per byte" not in summary.lower()
    assert verdict(compared)[0].startswith("Validation bits per masked byte: elu-none ")
    figure = curves_figure(load_runs(compared))
    assert figure.axes[0].get_ylabel() == "bits per masked byte"
    said = "\n".join(text.get_text() for text in figure.texts)
    assert "masked language models" in said and "15 % of the bytes are hidden" in said
    assert "bits per byte" not in said


def test_a_causal_run_is_named_as_before(causal: Path) -> None:
    assert "train_bits_per_byte" in rows(causal)[0]
    figure = curves_figure(load_runs(causal))
    assert figure.axes[0].get_ylabel() == "bits per byte"
    assert "mask" not in "\n".join(text.get_text() for text in figure.texts).lower()
    assert "mask" not in summarize(causal).lower()


def test_two_objectives_never_share_a_figure(
    tmp_path: Path, compared: Path, causal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folders in ([compared, causal], [causal, compared]):
        with pytest.raises(UserError, match=r"bits per (masked )?byte .*different quantities"):
            plot(folders, tmp_path)
    runs = [*load_runs(compared), *load_runs(causal)]
    for use in (curves_figure, verdict):
        with pytest.raises(UserError, match="different quantities"):
            use(runs)  # type: ignore[operator]
    assert main(["plot", str(causal), str(compared), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "--objective causal" in error and "--objective mlm" in error
    assert not list(tmp_path.iterdir())


def test_the_log_of_one_objective_is_no_log_of_the_other(
    tmp_path: Path, tiny: Settings, causal: Path
) -> None:
    train(tiny, "elu-none", tmp_path)
    (tmp_path / "metrics.csv").write_bytes((causal / "metrics.csv").read_bytes())
    with pytest.raises(UserError, match="not the columns of a run's metrics"):
        train(tiny, "elu-none", tmp_path, resume=True)


def test_a_comparison_is_not_resumed_with_the_other_objective(
    tmp_path: Path, tiny: Settings
) -> None:
    compare(tiny, tmp_path, arms=("elu-none",))
    other = dataclasses.replace(tiny, objective="causal")
    with pytest.raises(UserError, match="objective was 'mlm', is 'causal'"):
        compare(other, tmp_path, arms=("elu-none",), resume=True)


def test_other_masks_are_caught_as_other_batches(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = masking.hide, 0

    def faulty(windows: np.ndarray, key: tuple[int, int], *args: Any) -> Any:
        nonlocal calls
        calls += key[1] == 1  # training
        return real(windows, (key[0] + (calls > 8), key[1]), *args)

    monkeypatch.setattr(masking, "hide", faulty)
    with pytest.raises(UserError, match="not comparable: they were trained on different batches"):
        compare(tiny, tmp_path, arms=("elu-none", "elu-rope"))


@pytest.mark.parametrize("command", ["train", "compare"])
def test_arms_that_need_a_causal_model_are_refused_with_the_reason(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    arm = "--arm" if command == "train" else "--arms"
    arguments = [command, "--objective", "mlm", "--corpus", str(text), arm, "elu-rope-decay"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "it follows the order of the tokens" in error and "'elu-rope'" in error
    assert not (tmp_path / "out").exists()


def test_evaluate_repeats_the_logged_validation_and_names_its_unit(
    compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = compared / "runs" / "softmax-rope-seed0"
    logged = float(rows(run)[-1]["validation_bits_per_masked_byte"])
    for batch_size in ("1", "16"):
        assert main(["evaluate", str(run), "--limit", "100", "--batch-size", batch_size]) == 0
        said = capsys.readouterr().out
        assert f"{logged:.4f} bits per masked byte" in said and "15 % of them masked" in said


def test_sample_refuses_a_masked_model(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(compared / "runs" / "elu-none-seed0")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1
    assert "cannot continue a text" in said.err and not said.out


def test_a_trained_model_fills_a_gap(compared: Path) -> None:
    trained = load_model(compared / "runs" / "softmax-rope-seed0")
    assert trained.objective is MLM and isinstance(trained.model, MaskedModel)
    gap = torch.tensor([[*b"th", MASK, *b" of the "]])
    with torch.no_grad():
        chances = F.softmax(trained.model(gap)[0, 2], -1)
    assert chances.shape == (256,) and float(chances.sum()) == pytest.approx(1.0, abs=1e-5)


def test_objectives_are_the_choices_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert get_args(get_type_hints(Settings)["objective"]) == tuple(OBJECTIVES)
    assert Settings().objective == "causal"
    assert main(["arms"]) == 0
    shown = capsys.readouterr().out
    assert all(f"--objective {name}:" in shown for name in OBJECTIVES)
    assert len({o.train_column for o in OBJECTIVES.values()}) == len(OBJECTIVES)


def test_the_first_bytes_of_a_split_are_covered_alike_by_both_objectives() -> None:
    data = letters(100)
    plain = [x for x, _ in evaluation_windows(data, 16, 4)]
    hidden = list(masked_evaluation(data, 16, 4))
    assert len(plain) == len(hidden)
    for x, (seen, targets) in zip(plain, hidden, strict=True):
        assert torch.equal(torch.where(targets == IGNORED, seen, targets), x)
