"""TensorBoard gets each step once, whatever happened to the run; training does not notice."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_files import tiny_run
from study_files import make_text

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from enwik8 import checkpoint
from enwik8 import train as training
from enwik8.errors import UserError
from enwik8.interrupt import Interrupt
from enwik8.objectives import CAUSAL
from enwik8.presets import Settings
from enwik8.tensorboard import FOLDER, TensorBoard, continuation
from enwik8.train import train
from linear_rope.model import Config, LanguageModel

SCALARS = {
    *("train_bits_per_byte", "validation_bits_per_byte"),
    *("learning_rate", "gradient_norm", "tokens_per_second"),
}


@pytest.fixture
def tiny(tmp_path: Path) -> Settings:
    settings = tiny_run(make_text(tmp_path / "text.txt"))
    return dataclasses.replace(settings, dropout=0.1, checkpoint_every=5, tensorboard=True)


def events(run: Path) -> EventAccumulator:
    """What TensorBoard itself would show."""
    read = EventAccumulator(str(run / FOLDER), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return read


def points(run: Path) -> dict[str, list[tuple[int, float]]]:
    read = events(run)
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def logged(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The same from the run's log."""
    with open(run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        tag: [(int(row["step"]), float(np.float32(row[tag]))) for row in rows if row[tag]]
        for tag in SCALARS
    }


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    real = training.Run.train_step

    def train_step(self: training.Run) -> dict[str, str]:
        if self.step == step:
            raise MemoryError
        return real(self)

    monkeypatch.setattr(training.Run, "train_step", train_step)


def test_curves_are_those_of_the_log(tmp_path: Path, tiny: Settings) -> None:
    train(tiny, "elu-rope", tmp_path / "run")
    assert points(tmp_path / "run") == logged(tmp_path / "run")
    texts = events(tmp_path / "run").Tensors("sample/text_summary")
    assert [text.step for text in texts] == [5, 10, 12]
    shown = texts[-1].tensor_proto.string_val[0].decode()
    valid = (tmp_path / "text.txt").read_bytes()
    assert all(line.startswith("    ") for line in shown.splitlines())
    assert shown[4:40].encode() in valid and len(shown) > 200

    # The run itself is the same without it.
    train(dataclasses.replace(tiny, tensorboard=False), "elu-rope", tmp_path / "plain")
    assert not (tmp_path / "plain" / FOLDER).exists()
    one, two = (torch.load(tmp_path / name / checkpoint.NAME) for name in ("run", "plain"))
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())


def test_a_resumed_run_has_each_point_once(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for step in (3, 9):  # before the first checkpoint, and after it: steps 6 to 9 come twice
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(MemoryError):
                train(tiny, "elu-rope", run, resume=True)
    assert len(points(run)["learning_rate"]) == 9
    train(tiny, "elu-rope", run, resume=True)
    assert points(run) == logged(run)
    assert len(list((run / FOLDER).iterdir())) == 3
    train(tiny, "elu-rope", run, overwrite=True)
    assert points(run) == logged(run) and len(list((run / FOLDER).iterdir())) == 1


def test_an_evaluation_that_was_interrupted_is_added(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enwik8.interrupt import Interrupted

    real = training.Run.validate

    def validate(self: training.Run, interrupt: Interrupt, report: Any) -> str:
        interrupt.signum = 15
        return real(self, interrupt, report)

    with monkeypatch.context() as patch:
        patch.setattr(training.Run, "validate", validate)
        with pytest.raises(Interrupted):
            train(tiny, "elu-rope", tmp_path / "run")
    assert "validation_bits_per_byte" not in points(tmp_path / "run")
    train(tiny, "elu-rope", tmp_path / "run", resume=True)
    assert points(tmp_path / "run") == logged(tmp_path / "run")


def test_points_before_a_checkpoint_survive_a_kill(tmp_path: Path, tiny: Settings) -> None:
    settings = dataclasses.replace(tiny, evaluate_every=100)  # no pause before the checkpoint
    program = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from enwik8 import checkpoint, train as training\n"
        "from enwik8.presets import Settings\n"
        "from tensorboard.summary.writer.record_writer import RecordWriter\n"
        "write = RecordWriter.write\n"
        "def slowly(*args):\n"  # the writer's thread: without a flush, points wait in its queue
        "    time.sleep(0.05)\n"
        "    write(*args)\n"
        "RecordWriter.write = slowly\n"
        "real = checkpoint.save\n"
        "def save(*args, **options):\n"
        "    real(*args, **options)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.save = save\n"
        f"training.train({settings!r}, 'elu-rope', Path(sys.argv[1]))\n"
    )
    run = tmp_path / "run"
    # It takes seconds, most of them to import; but minutes have been seen on a busy machine.
    done = subprocess.run(
        [sys.executable, "-c", program, str(run)], cwd=Path(__file__).parent.parent, timeout=600
    )
    assert done.returncode == -9
    expected = {tag: found for tag, found in logged(run).items() if found}
    assert points(run) == expected and len(expected["learning_rate"]) == 5


def test_without_the_package_nothing_is_begun(
    tmp_path: Path, tiny: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith(("tensorboard", "torch.utils.tensorb"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"needs the package tensorboard.*\[tensorboard\]"):
        train(tiny, "elu-rope", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER).touch()
    with pytest.raises(UserError, match=f"{FOLDER} could not be written"):
        TensorBoard(tmp_path, 0, CAUSAL)


def test_samples_fit_into_learned_positions_and_are_any_bytes() -> None:
    data = np.array([0xFF, 0x00, *b"abc"] * 20, dtype=np.uint8)
    for longest in (1, 2, 9, 1000):
        config = Config(dim=16, layers=1, heads=2, position="learned", max_length=longest)
        text = continuation(LanguageModel(config), data, "cpu")
        assert text is not None and text.startswith("�")
    assert continuation(torch.nn.Linear(1, 1), data, "cpu") is None


def test_samples_have_random_numbers_of_their_own() -> None:
    model = LanguageModel(Config(dim=16, layers=1, heads=2, dropout=0.5)).train()
    before = torch.get_rng_state()
    text = continuation(model, np.array([65], dtype=np.uint8), "cpu")
    assert torch.equal(torch.get_rng_state(), before) and model.training
    torch.manual_seed(7)
    assert continuation(model, np.array([65], dtype=np.uint8), "cpu") == text
