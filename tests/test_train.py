"""Training one arm: resumed equals uninterrupted, accumulation is a mean, nothing is ever lost."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from run_files import tiny_run

from enwik8 import checkpoint, metrics, run_folder
from enwik8 import run as running
from enwik8 import train as training
from enwik8.errors import UserError
from enwik8.evaluate import load_model
from enwik8.interrupt import Interrupted, Lock
from enwik8.objectives import CAUSAL, objective_named
from enwik8.optimizer import learning_rate, make_optimizer
from enwik8.presets import PRESETS, Settings, model_fields
from enwik8.progress import ProgressBar
from enwik8.run import accumulate_gradient
from enwik8.tasks import make_model
from enwik8.train import train
from linear_rope.model import Config, LanguageModel

TIMING = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    words = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as"]
    path.write_text(" ".join(random.Random(0).choices(words, k=4000)))
    return path


@pytest.fixture
def tiny(text: Path) -> Settings:
    return dataclasses.replace(tiny_run(str(text)), layers=2, checkpoint_every=5)


def change(settings: Settings, **values: Any) -> Settings:
    return dataclasses.replace(settings, **values)


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        found = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in TIMING} for row in found]


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Do something inside the training step of that number."""
    real = training.Run.train_step

    def train_step(self: training.Run) -> dict[str, str]:
        row = real(self)
        if self.step == step:
            action()
        return row

    monkeypatch.setattr(training.Run, "train_step", train_step)


def kill(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


def same_state(a: Path, b: Path) -> None:
    """Bit-equal weights, buffers, optimizer, counters and random state of two checkpoints."""
    one, two = (torch.load(folder / checkpoint.NAME) for folder in (a, b))
    for name, value in one["model"].items():
        assert torch.equal(value, two["model"][name]), name
    for index, state in one["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, two["optimizer"]["state"][index][name]), (index, name)
    for name in ("step", "tokens", "batch_hash"):
        assert one[name] == two[name], name
    assert torch.equal(one["torch_rng"], two["torch_rng"])


# --- resume -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "objective"),
    [
        ("elu-none", "causal"),
        ("elu-rope-decay", "causal"),
        ("favor-rope", "causal"),
        ("softmax-rope", "causal"),
        ("favor-rope", "mlm"),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch, arm: str, objective: str
) -> None:
    settings = change(
        tiny, steps=40, dropout=0.1, features=8, redraw_interval=30, objective=objective
    )
    train(settings, arm, tmp_path / "whole")
    with monkeypatch.context() as patch:
        at_step(patch, 20, kill(signal.SIGTERM))
        with pytest.raises(Interrupted, match="step 20 of 40"):
            train(settings, arm, tmp_path / "parts")
    torch.manual_seed(12345)  # what another process would start with
    train(settings, arm, tmp_path / "parts", resume=True)
    same_state(tmp_path / "whole", tmp_path / "parts")
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert [int(row["step"]) for row in rows(tmp_path / "parts")] == list(range(1, 41))
    if arm == "favor-rope":
        buffers = torch.load(tmp_path / "parts" / checkpoint.NAME)["model"]
        fresh = make_model(
            Config(**model_fields(settings, training.find(arm))),  # type: ignore[arg-type]
            objective_named(objective),
        )
        fresh.initialize(settings.seeds["init"])
        changed = [
            name
            for name, value in fresh.named_buffers()
            if name in buffers
            and value.is_floating_point()
            and not torch.equal(value, buffers[name])
        ]
        assert changed, "no random features were redrawn: the test shows nothing"


def test_rows_after_the_checkpoint_are_trained_again_and_appear_once(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise MemoryError

    train(tiny, "elu-rope", tmp_path / "whole")
    with monkeypatch.context() as patch:
        at_step(patch, 9, crash)
        with pytest.raises(MemoryError):
            train(tiny, "elu-rope", tmp_path / "parts")
    assert [int(row["step"]) for row in rows(tmp_path / "parts")] == list(range(1, 9))
    with open(tmp_path / "parts" / "metrics.csv", "a") as file:
        file.write("9,576,4.1")  # cut short by the crash
    train(tiny, "elu-rope", tmp_path / "parts", resume=True)
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    same_state(tmp_path / "whole", tmp_path / "parts")


def test_log_that_lacks_rows_of_the_checkpoint_is_refused(tmp_path: Path, tiny: Settings) -> None:
    train(tiny, "elu-rope", tmp_path)
    lines = (tmp_path / "metrics.csv").read_text().splitlines(keepends=True)
    short = "".join(lines[:4] + lines[5:])
    (tmp_path / "metrics.csv").write_text(short)
    with pytest.raises(UserError, match="does not hold the rows"):
        train(tiny, "elu-rope", tmp_path, resume=True)
    assert (tmp_path / "metrics.csv").read_text() == short


@pytest.fixture
def own_precision() -> Iterator[None]:
    """accelerate keeps one precision for a process; that of a test is not that of the next."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("own_precision")
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"threads": 2}])
def test_resume_goes_on_alike_where_bits_may_differ(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Threads or half precision: the same batches, and losses that are equal to rounding."""
    settings = change(tiny, steps=20, **options)
    train(settings, "elu-rope", tmp_path / "whole")
    with monkeypatch.context() as patch:
        at_step(patch, 10, kill(signal.SIGTERM))
        with pytest.raises(Interrupted):
            train(settings, "elu-rope", tmp_path / "parts")
    train(settings, "elu-rope", tmp_path / "parts", resume=True)
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row["batch_hash"] for row in whole] == [row["batch_hash"] for row in parts]
    name = "train_bits_per_byte"
    for row, other in zip(whole, parts, strict=True):
        assert float(row[name]) == pytest.approx(float(other[name]), abs=2e-3), row["step"]


def test_resume_with_another_configuration_names_the_differences(
    tmp_path: Path, tiny: Settings
) -> None:
    train(tiny, "elu-rope", tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(UserError) as refused:
        train(change(tiny, learning_rate=1e-3, dim=32), "elu-none", tmp_path, resume=True)
    message = str(refused.value)
    for part in ("arm was 'elu-rope', is 'elu-none'", "learning_rate was 0.002, is 0.001"):
        assert part in message
    assert "dim was 16, is 32" in message and "threads" not in message
    with pytest.raises(UserError, match="steps was 12, is 20"):
        train(change(tiny, steps=20), "elu-rope", tmp_path, resume=True)
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    free = change(tiny, checkpoint_every=3, evaluate_every=4)
    assert train(free, "elu-rope", tmp_path, resume=True).step == 12


def test_a_run_from_before_there_was_a_choice_of_objective_goes_on(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny, "elu-rope", tmp_path / "whole")
    with monkeypatch.context() as patch:
        at_step(patch, 6, kill(signal.SIGTERM))
        with pytest.raises(Interrupted):
            train(tiny, "elu-rope", tmp_path / "old")
    path = tmp_path / "old" / checkpoint.NAME
    state = torch.load(path)
    for record in (state["config"], json.loads((tmp_path / "old" / "config.json").read_text())):
        del record["training"]["objective"], record["model"]["kv_heads"]
        (tmp_path / "old" / "config.json").write_text(json.dumps(record))
    torch.save(state, path)
    assert load_model(tmp_path / "old").objective is CAUSAL
    with pytest.raises(UserError, match="objective was 'causal', is 'mlm'"):
        train(change(tiny, objective="mlm"), "elu-rope", tmp_path / "old", resume=True)
    train(tiny, "elu-rope", tmp_path / "old", resume=True)
    assert rows(tmp_path / "whole") == rows(tmp_path / "old")
    same_state(tmp_path / "whole", tmp_path / "old")


def test_another_text_is_another_configuration(tmp_path: Path, tiny: Settings, text: Path) -> None:
    train(tiny, "elu-rope", tmp_path / "run")
    (tmp_path / "moved.txt").write_bytes(text.read_bytes())
    moved = change(tiny, corpus=str(tmp_path / "moved.txt"))
    assert train(moved, "elu-rope", tmp_path / "run", resume=True).step == 12
    (tmp_path / "moved.txt").write_bytes(text.read_bytes() + b"!")
    with pytest.raises(UserError, match="corpus sha256"):
        train(moved, "elu-rope", tmp_path / "run", resume=True)


def test_resume_before_the_first_checkpoint_starts_at_step_1(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        at_step(patch, 3, crash)
        with pytest.raises(MemoryError):
            train(tiny, "elu-rope", tmp_path)
    assert not (tmp_path / checkpoint.NAME).exists()
    with pytest.raises(UserError, match="another configuration"):
        train(change(tiny, seed=1), "elu-rope", tmp_path, resume=True)
    train(tiny, "elu-rope", tmp_path, resume=True)
    assert len(rows(tmp_path)) == 12


# --- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_the_first_evaluation(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    old = signal.getsignal(signum)
    at_step(monkeypatch, 3, kill(signum))
    with pytest.raises(Interrupted, match="--resume") as stopped:
        train(tiny, "elu-rope", tmp_path)
    assert stopped.value.exit_code == 128 + signum
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]
    assert checkpoint.load(tmp_path / checkpoint.NAME)["step"] == 3
    assert signal.getsignal(signum) is old


def test_signal_during_a_save(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint._Recorder.write
    sent: list[int] = []

    def write(self: checkpoint._Recorder, data: Any) -> int:
        if not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, data)

    monkeypatch.setattr(checkpoint._Recorder, "write", write)
    with pytest.raises(Interrupted):
        train(tiny, "elu-rope", tmp_path)
    assert checkpoint.load(tmp_path / checkpoint.NAME)["step"] == 5
    train(tiny, "elu-rope", tmp_path, resume=True)
    assert len(rows(tmp_path)) == 12


def test_signal_during_an_evaluation_leaves_no_hole(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny, "elu-rope", tmp_path / "whole")
    real = training.Run.validate

    def validate(self: training.Run, interrupt: Any, report: Any) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return real(self, interrupt, report)

    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "validate", validate)
        with pytest.raises(Interrupted):
            train(tiny, "elu-rope", tmp_path / "parts")
    assert rows(tmp_path / "parts")[-1]["validation_bits_per_byte"] == ""
    train(tiny, "elu-rope", tmp_path / "parts", resume=True)
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    evaluated = [r["step"] for r in rows(tmp_path / "parts") if r["validation_bits_per_byte"]]
    assert evaluated == ["5", "10", "12"]


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    real, calls = running.accumulate_gradient, 0

    def accumulate(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = real(*args)
        return loss * bad if calls == 7 else loss

    monkeypatch.setattr(running, "accumulate_gradient", accumulate)
    with pytest.raises(UserError, match=r"loss of step 7.*checkpoint of step 5 is kept"):
        train(tiny, "elu-rope", tmp_path)
    assert checkpoint.load(tmp_path / checkpoint.NAME)["step"] == 5
    assert rows(tmp_path)[-1]["train_bits_per_byte"] == str(bad)


def test_gradient_that_is_not_finite_never_reaches_the_weights(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = running.accumulate_gradient
    models: list[torch.nn.Module] = []

    def accumulate(accelerator: Any, model: torch.nn.Module, *args: Any) -> torch.Tensor:
        loss = real(accelerator, model, *args)
        models.append(model)
        next(model.parameters()).grad[0] = math.nan  # type: ignore[index]
        return loss

    monkeypatch.setattr(running, "accumulate_gradient", accumulate)
    with pytest.raises(UserError, match=r"gradient of step 1 .*no checkpoint yet"):
        train(tiny, "elu-rope", tmp_path)
    assert all(bool(p.isfinite().all()) for p in models[0].parameters())


def test_failed_save_stops_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: checkpoint._Recorder, data: Any) -> int:
        self.error = OSError(28, "No space left on device")
        raise self.error

    at_step(monkeypatch, 8, lambda: monkeypatch.setattr(checkpoint._Recorder, "write", fail))
    with pytest.raises(UserError, match=r"No space left.*intact"):
        train(tiny, "elu-rope", tmp_path)
    assert checkpoint.load(tmp_path / checkpoint.NAME)["step"] == 5
    monkeypatch.undo()
    assert train(tiny, "elu-rope", tmp_path, resume=True).step == 12
    assert len(rows(tmp_path)) == 12


def test_unwritable_folder_is_noticed_before_training(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Below a regular file: even the superuser cannot make a folder there.
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(training.Run, "train_step", lambda self: pytest.fail("trained"))
    with pytest.raises(UserError, match=r"cannot be written.*--out"):
        train(tiny, "elu-rope", tmp_path / "file" / "run")


def test_folder_with_a_run_is_refused_unless_told(tmp_path: Path, tiny: Settings) -> None:
    train(tiny, "elu-rope", tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"--resume.*--overwrite"):
        train(tiny, "elu-rope", tmp_path)
    with pytest.raises(UserError, match="exclude each other"):
        train(tiny, "elu-rope", tmp_path, resume=True, overwrite=True)
    train(change(tiny, steps=3), "elu-none", tmp_path, overwrite=True)
    assert len(rows(tmp_path)) == 3
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_two_runs_in_one_folder(tmp_path: Path, tiny: Settings) -> None:
    pytest.importorskip("fcntl")
    with Lock(tmp_path), pytest.raises(UserError, match="another run is working"):
        train(tiny, "elu-rope", tmp_path)
    train(change(tiny, steps=1), "elu-rope", tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_lock_left_by_a_killed_run_locks_nothing(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with Lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lock_on_a_removed_file_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last holder ends, and so removes its file, between our open and our lock.
    fcntl = pytest.importorskip("fcntl")
    real, calls = fcntl.flock, 0

    def flock(file: Any, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            (tmp_path / ".lock").unlink()
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Lock(tmp_path):
        assert calls == 2
        with pytest.raises(UserError, match="another run is working"), Lock(tmp_path):
            pass


def test_the_bar_moves_during_an_evaluation(
    tmp_path: Path,
    tiny: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = ProgressBar.validating

    def at_once(self: ProgressBar, share: float) -> None:
        self._interval = 0.0
        real(self, share)

    monkeypatch.setattr(ProgressBar, "validating", at_once)
    # Windows of 16 bytes, 4 at once: 64, 96 and the last 4 of 100.
    train(change(tiny, steps=1), "elu-rope", tmp_path)
    shown = re.findall(r"validating (\d+) %", capsys.readouterr().err)
    assert list(dict.fromkeys(shown)) == ["64", "96", "100"]


def test_part_files_of_a_killed_run_are_removed(tmp_path: Path, tiny: Settings) -> None:
    (tmp_path / "checkpoint.pt.1234.part").write_bytes(b"half")
    train(tiny, "elu-rope", tmp_path)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"heads": 3}, "--heads"),
        ({"steps": 0}, "--steps"),
        ({"batch_size": 0}, "--batch-size"),
        ({"dropout": 1.0}, "--dropout"),
        ({"init_std": 0.0}, "--init-std"),
        ({"init_std": math.inf}, "--init-std"),
        ({"learning_rate": math.nan}, "--learning-rate"),
        ({"clip": -1.0}, "--clip"),
        ({"validation_bytes": 0}, "--validation-bytes"),
        ({"final_learning_rate": 2.0}, "--final-learning-rate"),
        ({"objective": "mlmm"}, "--objective"),
    ],
)
def test_impossible_settings_name_their_flag(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} .*(got|known)"):
        Settings(**values).check()


def test_corpus_shorter_than_the_window(tmp_path: Path, tiny: Settings) -> None:
    (tmp_path / "short.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 2)
    with pytest.raises(ValueError, match="length"):
        train(
            change(tiny, corpus=str(tmp_path / "short.txt"), length=64), "elu-rope", tmp_path / "r"
        )
    assert not (tmp_path / "r").exists()


# --- accumulation, optimizer, schedule ----------------------------------------------------------


def _gradients(micro: int | None) -> tuple[list[torch.Tensor], float]:
    model = LanguageModel(Config(dim=16, layers=2, heads=2))
    model.initialize(0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (8, 17), generator=generator)
    accelerator = Accelerator(cpu=True)
    loss = accumulate_gradient(accelerator, model, tokens[:, :-1], tokens[:, 1:], micro)
    return [p.grad for p in model.parameters() if p.grad is not None], float(loss)


@pytest.mark.parametrize("micro", [2, 3, 1, 8, 100])
def test_micro_batches_give_the_mean_gradient_and_loss(micro: int) -> None:
    whole, loss = _gradients(None)
    parts, mean = _gradients(micro)
    assert len(whole) == len(parts) > 0
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert mean == pytest.approx(loss, abs=1e-6)


def test_training_does_not_depend_on_the_micro_batch_size(tmp_path: Path, tiny: Settings) -> None:
    settings = change(tiny, batch_size=7, steps=3)
    train(settings, "elu-rope", tmp_path / "whole")
    train(change(settings, micro_batch_size=4), "elu-rope", tmp_path / "parts")
    for a, b in zip(rows(tmp_path / "whole"), rows(tmp_path / "parts"), strict=True):
        assert a["batch_hash"] == b["batch_hash"]
        for name in ("train_bits_per_byte", "gradient_norm"):
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-5)
    one, two = (torch.load(tmp_path / n / checkpoint.NAME)["model"] for n in ("whole", "parts"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=1e-4)


def test_weight_decay_is_for_matrices_only(tiny: Settings) -> None:
    model = LanguageModel(Config(dim=16, layers=1, heads=2, bias=True, decay="learned"))
    decayed, plain = make_optimizer(model, tiny).param_groups
    assert all(p.ndim >= 2 for p in decayed["params"]) and decayed["weight_decay"] == 0.1
    assert all(p.ndim == 1 for p in plain["params"]) and plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_weight_decay_spares_what_feature_maps_and_rotations_learn(tiny: Settings) -> None:
    model = LanguageModel(
        Config(dim=16, layers=1, heads=2, feature_map="hedgehog", rotary_scaling="learned")
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, tiny)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # nothing but the decay
    kept = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    norms = {"blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight", "norm.weight"}
    assert kept - norms == {
        "blocks.0.attention.feature_map.weight",
        "blocks.0.attention.rotary.log_frequencies",
    }
    model = LanguageModel(
        Config(dim=16, layers=1, heads=2, short_conv=3, rotary_scaling="selective")
    )
    decayed = {id(p) for p in make_optimizer(model, tiny).param_groups[0]["params"]}
    spared = {name for name, p in model.named_parameters() if id(p) not in decayed}
    assert "blocks.0.attention.convolution.weight" in spared
    rotation = {n for n, _ in model.named_parameters() if "attention.rotary." in n}
    assert rotation and rotation <= spared


def test_schedule() -> None:
    settings = Settings(steps=100, warmup=10, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(step, settings) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[54] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert learning_rate(1, Settings(steps=1, warmup=0)) > 0


def test_seeds_are_apart(tmp_path: Path, tiny: Settings) -> None:
    def run(name: str, **seeds: int) -> tuple[dict[str, str], str]:
        result = train(change(tiny, steps=1, dropout=0.2, **seeds), "elu-rope", tmp_path / name)
        return result.config["initial_parameters"], result.batch_hash

    def loss(name: str) -> str:
        return rows(tmp_path / name)[0]["train_bits_per_byte"]

    initial, batches = run("base")
    assert run("data", data_seed=1) == (initial, run("data2", data_seed=1)[1])
    assert run("data3", data_seed=1)[1] != batches
    other_initial, same_batches = run("init", init_seed=1)
    assert other_initial != initial and same_batches == batches
    assert run("dropout", dropout_seed=1) == (initial, batches)
    assert loss("dropout") != loss("base") and loss("data") == loss("data2")


def test_random_features_have_a_seed_of_their_own(tmp_path: Path, tiny: Settings) -> None:
    runs = {
        name: train(change(tiny, steps=1, **seeds), "favor-rope", tmp_path / name)
        for name, seeds in {
            "base": {},
            "same": {"features_seed": 0},
            "other": {"features_seed": 1},
        }.items()
    }
    losses = {name: rows(tmp_path / name)[0]["train_bits_per_byte"] for name in runs}
    assert losses["base"] == losses["same"] != losses["other"]
    starts = {name: run.config["initial_parameters"] for name, run in runs.items()}
    assert starts["base"] == starts["same"] == starts["other"]


# --- the record ---------------------------------------------------------------------------------


def test_config_and_log_are_the_contract(tmp_path: Path, tiny: Settings) -> None:
    result = train(tiny, "favor-learned", tmp_path, command="python -m enwik8 train ...")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == result.config
    for name in ("arm", "model", "training", "corpus", "parameters", "versions", "command"):
        assert config[name], name
    assert config["training"]["tokens"] == 12 * 4 * 16
    assert config["model"]["max_length"] == 16 and config["threads"] == 1
    with open(tmp_path / "metrics.csv") as file:
        assert file.readline().strip() == ",".join(metrics.column_names())
    last = rows(tmp_path)[-1]
    assert last["tokens"] == "768" and len(last["batch_hash"]) == 16
    assert run_folder.differences(config, config) == []


def test_presets_are_sizes_of_the_papers() -> None:
    paper = PRESETS["paper"].settings
    assert (paper.layers, paper.dim, paper.heads, paper.length) == (12, 768, 12, 1024)
    assert (paper.batch_size, paper.learning_rate) == (128, 1e-4)
    small = PRESETS["small"].settings
    assert small.steps * small.batch_size * small.length == 2_048_000


@pytest.mark.parametrize("name", ["demo", "small"])
def test_evaluations_cost_less_than_the_training(name: str) -> None:
    # On a text of any length: at most a forward pass for each trained token, which costs about a
    # third of its training.
    settings = PRESETS[name].settings
    assert settings.validation_bytes is not None
    evaluations = math.ceil(settings.steps / settings.evaluate_every)
    trained = settings.steps * settings.batch_size * settings.length
    assert evaluations * settings.validation_bytes <= trained
