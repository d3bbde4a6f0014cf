"""Damaged files are named and left as they are; what is kept beside them goes on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from run_files import same_runs, tiny_run
from study_files import make_text

from enwik8 import checkpoint
from enwik8.curves import load_runs
from enwik8.errors import UserError
from enwik8.evaluate import load_model
from enwik8.presets import Settings
from enwik8.sample import stream_text
from enwik8.train import train


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_text(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture
def tiny(text: str) -> Settings:
    return tiny_run(text)


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("metrics.csv", lambda b: b.replace(b"\n4,", b"\n4\0,"), "metrics.csv"),
        (
            "metrics.csv",
            lambda b: b.replace(b"\n4,", b"\n4" + 200_000 * b"4"),
            ", line 5, is damaged",
        ),
        ("metrics.csv", lambda b: b[: len(b) // 2], "does not hold the rows"),
        ("metrics.csv", lambda b: b.replace(b"\n4,", b"\nfour,"), "does not hold the rows"),
        ("metrics.csv", lambda b: b.replace(b"step,", b"stop,"), "columns"),
        ("metrics.csv", lambda b: b"", "does not hold the rows"),
        ("checkpoint.pt", lambda b: b[:-1000], "checkpoint.pt is damaged"),
        ("checkpoint.pt", lambda b: b[:2000] + bytes(500) + b[2500:], "checkpoint.pt"),
        ("checkpoint.pt", lambda b: b"", "checkpoint.pt is damaged"),
    ],
)
def test_damaged_files_are_named_and_left_untouched(
    tmp_path: Path, tiny: Settings, name: str, damage: Any, named: str
) -> None:
    train(tiny, "elu-rope", tmp_path)
    whole = (tmp_path / name).read_bytes()
    damaged = damage(whole)
    assert damaged != whole
    (tmp_path / name).write_bytes(damaged)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UserError, match=named) as refused:
        train(tiny, "elu-rope", tmp_path, resume=True)
    assert str(tmp_path / name) in str(refused.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


# --- several checkpoints --------------------------------------------------------------------------


def steps_kept(folder: Path) -> list[int]:
    """The steps inside the kept checkpoints, the newest last; their names say the same."""
    for step, path in checkpoint.older(folder):
        assert checkpoint.load(path)["step"] == step
    paths = [path for _, path in checkpoint.older(folder)] + [folder / checkpoint.NAME]
    return [checkpoint.load(path)["step"] for path in paths]


@pytest.mark.parametrize("links", [True, False])
def test_the_last_checkpoints_are_kept(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    run = tmp_path / "run"
    train(dataclasses.replace(tiny, keep_checkpoints=3), "elu-rope", run)
    assert steps_kept(run) == [6, 9, 12]
    assert not list(run.glob("*.part"))
    train(dataclasses.replace(tiny, keep_checkpoints=9), "elu-rope", run, overwrite=True)
    assert steps_kept(run) == [3, 6, 9, 12]
    train(tiny, "elu-rope", tmp_path / "one")
    assert steps_kept(tmp_path / "one") == [12]
    # Started again, nothing is left of the run before, and nothing else is touched.
    (run / "notes.txt").write_text("mine")
    train(dataclasses.replace(tiny, steps=2), "elu-rope", run, overwrite=True)
    assert steps_kept(run) == [2] and (run / "notes.txt").exists()


def test_a_damaged_checkpoint_leaves_the_one_before(tmp_path: Path, tiny: Settings) -> None:
    settings = dataclasses.replace(tiny, keep_checkpoints=2)
    train(settings, "elu-rope", tmp_path / "whole")
    train(settings, "elu-rope", tmp_path / "run")
    newest = tmp_path / "run" / checkpoint.NAME
    newest.write_bytes(newest.read_bytes()[:-1000])
    remedy = r"checkpoint\.pt is damaged.*move it away, and --resume goes on from checkpoint-9\.pt"
    with pytest.raises(UserError, match=remedy):
        train(settings, "elu-rope", tmp_path / "run", resume=True)
    newest.rename(tmp_path / "damaged.pt")
    assert load_model(tmp_path / "run").step == 9
    with pytest.raises(UserError, match="holds a run already"):
        train(settings, "elu-rope", tmp_path / "run")
    train(settings, "elu-rope", tmp_path / "run", resume=True)
    same_runs(tmp_path / "whole", tmp_path / "run")
    assert steps_kept(tmp_path / "run") == [9, 12]


def test_an_old_checkpoint_goes_only_after_the_new_one_is_there(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.replace, 0

    def replace(source: Any, target: Any) -> None:
        nonlocal calls
        if Path(target).name == checkpoint.NAME:
            calls += 1
            if calls == 4:
                raise OSError("Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UserError, match="is intact"):
        train(dataclasses.replace(tiny, keep_checkpoints=2), "elu-rope", tmp_path)
    # The third has its second name already, and the second one is still there.
    assert steps_kept(tmp_path) == [6, 9, 9]


def test_the_log_of_another_run_is_refused(tmp_path: Path, tiny: Settings) -> None:
    """One with the same steps, but of other batches."""
    train(tiny, "elu-rope", tmp_path / "a")
    train(dataclasses.replace(tiny, seed=1), "elu-rope", tmp_path / "b")
    log = tmp_path / "a" / "metrics.csv"
    log.write_bytes(other := (tmp_path / "b" / "metrics.csv").read_bytes())
    with pytest.raises(UserError, match=r"metrics.csv is the log of other batches.*left untouched"):
        train(tiny, "elu-rope", tmp_path / "a", resume=True)
    assert log.read_bytes() == other


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: None, "its record is no table"),
        (lambda c: {**c, "training": None}, "no training"),
        (lambda c: {k: v for k, v in c.items() if k != "arm"}, "no arm"),
        (lambda c: {**c, "corpus": 5}, "no corpus"),
        (lambda c: {**c, "training": {**c["training"], "length": "x"}}, "no training length"),
    ],
)
def test_a_checkpoint_without_a_whole_record_is_refused(
    tmp_path: Path, tiny: Settings, change: Any, named: str
) -> None:
    train(tiny, "elu-rope", tmp_path)
    contents = checkpoint.load(tmp_path / checkpoint.NAME)
    checkpoint.save(tmp_path / "other.pt", {**contents, "config": change(contents["config"])})
    with pytest.raises(UserError, match=f"does not hold a model .*{named}"):
        load_model(tmp_path / "other.pt")


def test_a_model_that_diverged_draws_nothing(tmp_path: Path, tiny: Settings) -> None:
    train(tiny, "elu-rope", tmp_path)
    contents = checkpoint.load(tmp_path / checkpoint.NAME)
    contents["model"]["norm.weight"].fill_(float("nan"))
    checkpoint.save(tmp_path / "other.pt", contents)
    with pytest.raises(UserError, match="outputs are not finite"):
        list(stream_text(tmp_path / "other.pt", "a", 3))


def test_a_study_is_not_drawn_as_a_run(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text("")
    with pytest.raises(UserError, match=r"holds a study: .*--report-only"):
        load_runs(tmp_path)
