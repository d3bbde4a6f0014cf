"""Synthetic tasks: sequences by hand, statistics of the draws, the grid, its figure and errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from enwik8.errors import UserError
from enwik8.methods import find
from enwik8.synthetic import grid
from enwik8.synthetic.__main__ import ARMS, main
from enwik8.synthetic.figure import draw, series
from enwik8.synthetic.tasks import (
    IGNORE,
    TASKS,
    arrange_recall,
    copying,
    counting,
    induction,
    recall,
)
from enwik8.synthetic.train import Cell, Result, Settings, config_of, train_cell

TINY = Settings(
    length=8,
    longer=(1, 2),
    pairs=(1, 2),
    vocab_size=8,
    dim=8,
    layers=1,
    steps=3,
    batch_size=4,
    examples=5,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- The sequences


def test_recall_is_arranged_as_in_the_paper() -> None:
    """The example of Zoology's data/multiquery_ar.py: 12 tokens, keys 2 and 4, values 8 and 7."""
    got = arrange_recall(
        torch.tensor([[2, 4]]),
        torch.tensor([[8, 7]]),
        torch.tensor([[4, 1]]),
        torch.zeros(1, 15, dtype=torch.int64),
    )
    assert got.inputs.tolist() == [[2, 8, 4, 7, 0, 0, 4, 0, 0, 0, 0, 0, 2, 0, 0]]
    none = IGNORE
    assert got.targets.tolist() == [[none] * 6 + [7] + [none] * 5 + [8] + [none] * 2]


def test_every_key_is_asked_once_for_its_value() -> None:
    inputs, targets = recall(200, 24, 20, seeded(), pairs=4)
    assert inputs.shape == targets.shape == (200, 24)
    assert int(inputs.min()) >= 0 and int(inputs.max()) < 20
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        keys, values = row[0:8:2], row[1:8:2]
        assert len(set(keys)) == 4 and all(1 <= key < 10 for key in keys)
        assert len(set(values)) == 4 and all(10 <= value < 20 for value in values)
        asked = {row[t]: wanted[t] for t in range(24) if wanted[t] != IGNORE}
        assert asked == dict(zip(keys, values, strict=True))
        assert all((t - 8) % 2 == 0 and t >= 8 for t in range(24) if wanted[t] != IGNORE)


def test_filler_is_any_token_or_zero() -> None:
    inputs, targets = recall(50, 40, 20, seeded(), pairs=2, random_filler=False)
    assert set(inputs[:, 4:][targets[:, 4:] == IGNORE].tolist()) == {0}
    inputs, targets = recall(200, 40, 20, seeded(), pairs=2)
    assert set(inputs[:, 4:][targets[:, 4:] == IGNORE].tolist()) == set(range(20))
    # Evenly, but for the row's own keys, which come once more each and no further time.
    keys = inputs[:, 0:4:2]
    assert all(
        row.count(key) == 2
        for row, pair in zip(inputs.tolist(), keys.tolist(), strict=True)
        for key in pair
    )
    inputs, _ = recall(20_000, 12, 8, seeded(), pairs=2)
    row = (inputs[:, 0] == 1) & (inputs[:, 2] == 3)
    shares = inputs[row, 4:].flatten().bincount(minlength=8) / inputs[row, 4:].numel()
    assert shares[[1, 3]].tolist() == [0.125, 0.125]
    assert float((shares[[0, 2, 4, 5, 6, 7]] - 0.125).abs().max()) < 0.01


@pytest.mark.parametrize(("power", "weights"), [(0.01, [1, 2**-0.99, 3**-0.99]), (1.0, [1, 1, 1])])
def test_gaps_follow_the_power_law(power: float, weights: list[float]) -> None:
    _, targets = recall(20_000, 8, 20, seeded(), pairs=1, power=power)
    slots = (targets != IGNORE).long().argmax(1).sub(2) // 2
    shares = slots.bincount(minlength=3) / 20_000
    want = torch.tensor(weights) / sum(weights)
    assert float((shares - want).abs().max()) < 0.015  # four standard deviations


def test_slots_are_drawn_without_repetition() -> None:
    _, targets = recall(300, 16, 20, seeded(), pairs=4)  # as many slots as pairs: all are taken
    assert (targets != IGNORE).sum(1).tolist() == [4] * 300
    assert (targets[:, 8::2] != IGNORE).all()


def test_copying_by_hand() -> None:
    inputs, targets = copying(3, 8, 5, seeded())
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        string = row[:4]
        assert 0 not in string and row[4:] == [0, *string[:3]]
        assert wanted == [IGNORE] * 4 + string


def test_induction_by_hand() -> None:
    inputs, targets = induction(300, 7, 5, seeded())
    places = set()
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert row.count(0) == 2 and row[-1] == 0
        places.add(row.index(0))
        assert wanted == [IGNORE] * 6 + [row[row.index(0) + 1]]
    assert places == set(range(5))


def test_counting_by_hand() -> None:
    inputs, targets = counting(50, 9, seeded())
    fives = counting(50, 9, seeded(), modulus=5).targets
    assert set(inputs.flatten().tolist()) == {0, 1}
    for row, parity, five in zip(inputs.tolist(), targets.tolist(), fives.tolist(), strict=True):
        assert parity == [sum(row[: t + 1]) % 2 for t in range(9)]
        assert five == [sum(row[: t + 1]) % 5 for t in range(9)]


def test_counting_of_the_grid_is_modulo_five_and_parity_modulo_two() -> None:
    for name, modulus in (("parity", 2), ("counting", 5)):
        inputs, targets = TASKS[name].make(20, 16, 0, 8, seeded())
        assert torch.equal(targets, inputs.cumsum(1) % modulus)
        assert len(set(targets.flatten().tolist())) == TASKS[name].answers(8) == modulus


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_one_set_of_sequences(name: str) -> None:
    def made(seed: int) -> list[Tensor]:
        return list(TASKS[name].make(6, 16, 3, 20, seeded(seed)))

    for one, other in zip(made(1), made(1), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(made(1)[0], made(2)[0])
    answers = made(1)[1]
    answers = answers[answers != IGNORE]
    assert answers.numel() and int(answers.min()) >= 0
    assert len(set(made(1)[1].flatten().tolist()) - {IGNORE}) <= TASKS[name].answers(20)


# ---- Training


def test_a_model_learns_and_then_stops() -> None:
    settings = Settings(
        length=2, longer=(1,), vocab_size=4, dim=16, layers=1, heads=1, steps=300, batch_size=32
    )
    (result,) = train_cell(Cell("copying", "elu-rope", 0), find("elu-rope").overrides, settings)
    assert result.accuracy == 1.0 and result.loss < 0.8 and 20 <= result.steps < 300


def test_accuracy_counts_answers_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always says 5 is right where 5 is asked for."""
    from enwik8.synthetic import train

    class Five(torch.nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(torch.full_like(tokens, 5), 8).double() * 50

    cell = Cell("recall", "elu-rope", 3)
    settings = Settings(length=8, vocab_size=8, batch_size=4, examples=11)
    got, loss = train.accuracy(Five(), cell, 2, 16, settings)  # type: ignore[arg-type]
    draws = train._generator(cell, "test 2 16")
    asked = right = 0
    for size in (2, 2, 2, 2, 2, 1):  # half as many as in a batch: they are twice as long
        targets = recall(size, 16, 8, draws, pairs=2).targets
        asked, right = asked + int((targets != IGNORE).sum()), right + int((targets == 5).sum())
    assert asked == 22 and got == right / asked
    assert loss == pytest.approx(50 * (1 - right / asked))


def test_all_arms_have_a_convolution_unless_they_say_otherwise() -> None:
    for arm, width in (("softmax-rope", 3), ("elu-none", 3), ("best-conv", 4)):
        assert config_of(find(arm).overrides, Settings()).short_conv == width
    assert config_of({}, Settings(short_conv=0)).short_conv == 0
    # What has a longest length is made for all that is measured.
    for arm in ("elu-learned", "cosformer"):
        assert config_of(find(arm).overrides, Settings()).max_length == 32 * 4


def test_arms_read_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Tensor]] = {}
    pairs: list[int] = []
    plain = TASKS["recall"].make
    for arm in ("elu-rope", "softmax-rope"):

        def spy(*arguments: Any, arm: str = arm) -> Any:
            made = plain(*arguments)
            seen.setdefault(arm, []).append(made.inputs)
            pairs.append(arguments[2])
            return made

        task = type(TASKS["recall"])("recall", "", spy, lambda vocab: vocab, True)
        monkeypatch.setattr("enwik8.synthetic.train.TASKS", {"recall": task})
        train_cell(Cell("recall", arm, 0), find(arm).overrides, TINY)
    assert len(seen["elu-rope"]) > 3
    for one, other in zip(*seen.values(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(seen["elu-rope"][0], seen["elu-rope"][1])
    assert pairs[: TINY.steps] == [2, 1, 2]  # in training each number of pairs in turn


# ---- The grid


def fields(*arms: str) -> dict[str, dict[str, Any]]:
    return {arm: dict(find(arm).overrides) for arm in arms}


def test_a_grid_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Cell] = []
    interrupted: list[Cell] = []

    def fake(cell: Cell, *_: Any) -> list[Result]:
        if len(trained) == 3 and not interrupted:
            interrupted.append(cell)
            raise KeyboardInterrupt
        trained.append(cell)
        return [Result(0, 8, 0.5, 1.0, 3, 0.1), Result(0, 16, 0.25, 2.0, 3, 0.1)]

    monkeypatch.setattr(grid, "train_cell", fake)
    arms = fields("elu-rope", "softmax-rope")
    axes: dict[str, Any] = {"tasks": ("recall", "parity"), "seeds": (0, 1)}
    with pytest.raises(KeyboardInterrupt):
        grid.run(tmp_path, TINY, arms, **axes)
    assert trained == [
        Cell("recall", "elu-rope", 0),
        Cell("recall", "softmax-rope", 0),
        Cell("parity", "elu-rope", 0),
    ]
    assert grid.read(tmp_path).keys() == set(trained)
    first, trained = list(trained), []
    table = grid.run(tmp_path, TINY, arms, **axes)
    assert len(table) == 8 and not set(first) & set(trained) and len(trained) == 5
    assert grid.read(tmp_path) == table
    trained = []
    grid.run(tmp_path, TINY, fields("elu-none"), tasks=("parity",))  # one more arm
    assert trained == [Cell("parity", "elu-none", 0)]
    assert set(json.loads((tmp_path / "config.json").read_text())["arms"]) == {
        "elu-rope", "softmax-rope", "elu-none",
    }  # fmt: skip
    assert not (tmp_path / ".lock").exists()


def test_other_settings_are_refused(tmp_path: Path) -> None:
    arms = fields("elu-rope")
    grid.run(tmp_path, TINY, arms, tasks=("parity",))
    before = (tmp_path / "results.csv").read_text()
    other = Settings(**{**vars(TINY), "steps": 4})
    with pytest.raises(UserError, match="steps was 3, is 4"):
        grid.run(tmp_path, other, arms, tasks=("parity",))
    with pytest.raises(UserError, match="arm elu-rope was"):
        grid.run(tmp_path, TINY, {"elu-rope": {"decay": "learned"}}, tasks=("parity",))
    assert (tmp_path / "results.csv").read_text() == before
    (tmp_path / "results.csv").write_text("task,pairs\nrecall,x\n")
    with pytest.raises(UserError, match="is damaged"):
        grid.read(tmp_path)


def test_the_command_line_writes_table_and_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "arms.json"
    file.write_text('{"mine": {"feature_map": "relu", "output_norm": true}}')
    flags = "--length 8 --longer 1 2 --vocab-size 8 --dim 8 --layers 1 --steps 2 --batch-size 4"
    arguments = [
        *("--out", str(tmp_path / "grid"), "--arms", "elu-rope", "mine", "--pairs", "1", "2"),
        *("--arms-file", str(file), "--examples", "4", "--tasks", "recall", "counting"),
        *flags.split(),
    ]
    assert main(arguments) == 0
    with open(tmp_path / "grid" / "results.csv") as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == 2 * (2 + 1) * 2  # arms, pairs or counting, lengths
    assert {row["length"] for row in rows} == {"8", "16"}
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    for name in ("accuracy.png", "accuracy.svg"):
        assert (tmp_path / "grid" / name).stat().st_size > 5000
        (tmp_path / "grid" / name).unlink()
    assert "recall, mine, seed 0: " in capsys.readouterr().out
    assert main(["--out", str(tmp_path / "grid"), "--draw-only"]) == 0
    assert (tmp_path / "grid" / "accuracy.png").exists()


def test_the_figure_shows_means_over_pairs_and_length(tmp_path: Path) -> None:
    table = {
        Cell("recall", "elu-rope", seed): [
            Result(pairs, length, accuracy + seed / 10, 1.0, 3, 0.1)
            for pairs, length, accuracy in ((2, 8, 0.8), (1, 8, 0.6), (2, 16, 0.4))
        ]
        for seed in (0, 1)
    }
    over_pairs = series(table, "recall", "elu-rope", pairs=None, length=8)
    assert list(over_pairs) == [1, 2]
    assert [value for values in over_pairs.values() for value in values] == pytest.approx(
        [0.6, 0.7, 0.8, 0.9]
    )
    over_length = series(table, "recall", "elu-rope", pairs=2, length=None)
    assert over_length == {8: [0.8, 0.9], 16: [0.4, 0.5]}
    assert [path.name for path in draw(table, TINY, tmp_path)] == ["accuracy.png", "accuracy.svg"]
    svg = (tmp_path / "accuracy.svg").read_text()
    assert "Multi-query associative recall" in svg and "elu-rope" in svg


def test_the_default_arms_are_arms_of_the_experiment() -> None:
    for arm in ARMS:
        find(arm)
    Settings()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "sums"], "task 'sums' is unknown; known tasks: recall, copying"),
        (["--arms", "elu"], "arm 'elu' is unknown; known arms: elu-none"),
        (["--pairs", "40"], "recall of --pairs 40 needs an even --length of at least 160"),
        (["--vocab-size", "6"], "--vocab-size 6 has 2 keys, too few for --pairs 4"),
        (["--length", "7", "--tasks", "copying"], "copying needs an even --length"),
        (["--length", "2", "--tasks", "induction"], "induction needs a --length of at least 3"),
        (["--heads", "3"], "--heads must divide --dim, got 3"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--steps", str(10**23)], "--steps must be at most"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--short-conv=-1"], "--short-conv must not be negative"),
        (["--longer", "0"], "--longer must be at least 1"),
        (["--learning-rate", "0"], "--learning-rate must be positive"),
        (["--learning-rate", "nan"], "--learning-rate must be positive"),
        (["--seeds"], "nothing to do"),
        (["--arms-file", "no.json"], "no.json cannot be read as JSON"),
        (["--draw-only"], "config.json cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "new"), *flags]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and not printed.out
    assert message in printed.err
    assert not (tmp_path / "new").exists()
