"""The comparison is fair by construction, checked, resumable, and complete on the disk."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import tiny_run
from study_files import make_text

from enwik8 import compare as comparison
from enwik8 import train as training
from enwik8.compare import check_fair, compare
from enwik8.errors import UserError
from enwik8.interrupt import Interrupted
from enwik8.methods import METHODS, find
from enwik8.objectives import CAUSAL
from enwik8.presets import PRESETS, Settings, model_fields
from enwik8.tasks import make_config, make_model
from enwik8.train import RunResult


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    settings = tiny_run(make_text(tmp_path_factory.mktemp("corpus") / "text.txt"))
    return dataclasses.replace(settings, steps=6, warmup=2, evaluate_every=3)


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_every_arm_builds_runs_and_shares_initial_values(tiny: Settings) -> None:
    reference: dict[object, torch.Tensor] = {}
    tokens = torch.randint(256, (2, 16))
    for name, method in METHODS.items():
        model = make_model(make_config(model_fields(tiny, method)), CAUSAL)
        model.initialize(3)
        assert bool(model(tokens).isfinite().all()), name
        for parameter, value in model.named_parameters():
            # Feed-forward layers differ in width, learned decays and the convolutions of selective
            # rotations in where they start.
            start: object = ""
            if parameter.endswith("attention.gate.bias"):
                start = method.overrides["decay"]
            elif parameter.endswith("rotary.convolution.weight"):
                start = "convolution=normal" in str(method.overrides["rotary_scaling"])
            same = reference.setdefault((parameter, value.shape, start), value.detach())
            assert torch.equal(same, value), (name, parameter)
    assert len(METHODS) == 3 * 5 * 2 + 5 + 5 + 8 + 37


def test_unknown_arm_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'elu-rop' is unknown; known arms: elu-none, .*softmax"):
        find("elu-rop")


def test_arms_of_presets_exist() -> None:
    for preset in PRESETS.values():
        assert all(arm in METHODS for arm in preset.arms)
        for arm in preset.arms:
            make_config(model_fields(preset.settings, find(arm)))


def test_comparison_end_to_end(
    tmp_path: Path, tiny: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = ("elu-none", "elu-rope", "favor-learned-decay")
    results = compare(tiny, tmp_path, arms=arms, seeds=(0, 1), command="the command")
    assert len(results) == 6
    for name in ("config.json", "metrics.csv", "summary.md", "curves.png", "curves.svg"):
        assert (tmp_path / name).stat().st_size > 0, name
    assert not list(tmp_path.rglob(".*")), "no lock or part of a file is left behind"
    # 5 % of the text; how much of it was evaluated is said.
    valid = Path(tiny.corpus).stat().st_size * 5 // 100
    summary = (tmp_path / "summary.md").read_text()
    assert f"first 100 of the {valid:,} bytes of the validation split only" in summary
    merged = rows(tmp_path)
    assert list(merged[0])[:3] == ["arm", "seed", "step"] and len(merged) == 36
    for arm in arms:
        for seed in (0, 1):
            own = rows(tmp_path / "runs" / f"{arm}-seed{seed}")
            part = [r for r in merged if (r["arm"], r["seed"]) == (arm, str(seed))]
            assert [{k: r[k] for k in own[0]} for r in part] == own

    # Same batches and tokens for all arms of a seed at every step, other ones for another seed.
    for seed in ("0", "1"):
        by_step: dict[str, set[tuple[str, str]]] = {}
        for row in merged:
            if row["seed"] == seed:
                by_step.setdefault(row["step"], set()).add((row["batch_hash"], row["tokens"]))
        assert all(len(kinds) == 1 for kinds in by_step.values()) and len(by_step) == 6
    record = json.loads((tmp_path / "config.json").read_text())
    hashes, shared = record["checks"]["batch_hash"], record["checks"]["shared_initial_parameters"]
    assert hashes["0"] != hashes["1"]
    assert shared["0"]["tensors"] >= 8 and shared["0"]["hash"] != shared["1"]["hash"]
    assert record["corpus"]["sha256"] and record["command"] == "the command"
    printed = capsys.readouterr().out
    assert "curves.png" in printed and "bits per byte" in printed


def test_finished_arms_are_skipped_and_interrupted_ones_resumed(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(tiny, tmp_path / "whole")
    real, steps = training.Run.train_step, []

    def train_step(self: training.Run) -> dict[str, str]:
        row = real(self)
        steps.append(self.step)
        if len(steps) == 8:  # the second arm's second step
            os.kill(os.getpid(), signal.SIGINT)
        return row

    monkeypatch.setattr(training.Run, "train_step", train_step)
    with pytest.raises(Interrupted, match="elu-rope, seed 0: stopped after step 2") as stopped:
        compare(tiny, tmp_path / "parts")
    assert stopped.value.exit_code == 130
    assert len(rows(tmp_path / "parts")) == 8
    with pytest.raises(UserError, match="--resume"):
        compare(tiny, tmp_path / "parts")
    compare(tiny, tmp_path / "parts", resume=True)
    assert len(steps) == 12
    timing = ("seconds", "tokens_per_second")
    whole, parts = (
        [{k: v for k, v in row.items() if k not in timing} for row in rows(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert whole == parts
    compare(tiny, tmp_path / "parts", resume=True, arms=("elu-none", "elu-rope", "relu-rope"))
    assert len(steps) == 18 and len(rows(tmp_path / "parts")) == 18


def test_other_settings_are_refused_and_overwrite_clears_only_our_files(
    tmp_path: Path, tiny: Settings
) -> None:
    compare(tiny, tmp_path, arms=("elu-none",))
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    other = dataclasses.replace(tiny, learning_rate=1e-3)
    with pytest.raises(UserError, match=r"learning_rate was 0\.002, is 0\.001"):
        compare(other, tmp_path, arms=("elu-none",), resume=True)
    compare(other, tmp_path, arms=("elu-rope",), overwrite=True)
    assert {row["arm"] for row in rows(tmp_path)} == {"elu-rope"}
    assert not (tmp_path / "runs" / "elu-none-seed0" / "checkpoint.pt").exists()
    assert (tmp_path / "runs" / "notes.txt").read_text() == "mine"


def test_unfair_comparisons_fail_loudly(tmp_path: Path, tiny: Settings) -> None:
    results = compare(tiny, tmp_path)
    check_fair(results)

    def tampered(**values: Any) -> list[RunResult]:
        return [results[0], dataclasses.replace(results[1], **values)]

    with pytest.raises(UserError, match="different batches"):
        check_fair(tampered(batch_hash="0" * 16))
    with pytest.raises(UserError, match="different batches"):
        check_fair(tampered(step=5))
    prints = {**results[1].config["initial_parameters"], "embedding.weight": "256x16 0"}
    with pytest.raises(UserError, match=r"different values: embedding\.weight"):
        check_fair(tampered(config={**results[1].config, "initial_parameters": prints}))


def test_another_order_of_the_batches_is_caught(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = comparison.train

    def train(settings: Settings, arm: str, *args: Any, **more: Any) -> RunResult:
        seed = 5 if arm == "elu-rope" else None
        return real(dataclasses.replace(settings, data_seed=seed), arm, *args, **more)

    monkeypatch.setattr(comparison, "train", train)
    with pytest.raises(UserError, match=r"elu-none and elu-rope .*different batches"):
        compare(tiny, tmp_path)


def test_nothing_runs_when_an_arm_is_impossible(tmp_path: Path, tiny: Settings) -> None:
    with pytest.raises(ValueError, match="unknown"):
        compare(tiny, tmp_path / "out", arms=("elu-none", "elu-bogus"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [-1, 0, 1000])
def test_validation_on_the_whole_split_is_not_called_a_part(
    tmp_path: Path, tiny: Settings, more: int
) -> None:
    valid = Path(tiny.corpus).stat().st_size * 5 // 100
    settings = dataclasses.replace(tiny, validation_bytes=valid + more, steps=1)
    compare(settings, tmp_path, arms=("elu-none",))
    assert "validation split only" not in (tmp_path / "summary.md").read_text()
