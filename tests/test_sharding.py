"""FSDP2: parameters in parts on several processes; checkpoints are those of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from ranks import FSDP, before_step, engine, terminate_me, tiny, write_text
from test_distributed import ARM, ROOT, TOLERANCE, assert_same_run, rows
from torch.distributed.tensor import DTensor

from enwik8.errors import UserError
from enwik8.evaluate import load_model, split_bits_per_byte
from enwik8.interrupt import Interrupted
from enwik8.run import Run
from enwik8.train import load_corpus, train


def sharded(rank: int, folder: Path, text: Path) -> None:
    """A whole run, one in two halves, and one that begins in parts and ends undivided."""
    seen: list[bool] = []
    plain = Run.state

    def watched(self: Any) -> Any:
        names = [name for name, _ in self.module.named_parameters()]
        parts = self.module.state_dict()
        seen.append(all(isinstance(parts[name], DTensor) for name in names))
        units = [type(block).__name__ for block in self.module.blocks]
        seen.append(all(name.startswith("FSDP") for name in units))
        return plain(self)

    Run.state = watched  # type: ignore[method-assign]
    with engine(**FSDP):
        train(tiny(text), ARM, folder / "parts")
    Run.state = plain  # type: ignore[method-assign]
    assert seen == [True] * 6, seen
    for name, first, second in (("halves", FSDP, FSDP), ("mixed", FSDP, {}), ("turned", {}, FSDP)):
        stop = before_step(3, terminate_me if rank == 1 else lambda: None)
        with engine(**first), stop, pytest.raises(Interrupted):
            train(tiny(text), ARM, folder / name)
        torch.distributed.barrier()  # the first one has written it
        assert torch.load(folder / name / "checkpoint.pt")["step"] == 3
        with engine(**second):
            train(tiny(text), ARM, folder / name, resume=True)
    with engine(**FSDP, ACCELERATE_DYNAMO_BACKEND="EAGER"):
        train(tiny(text), ARM, folder / "compiled parts")
    ranks.late_evaluation(rank, text, ARM, folder / "late", **FSDP)
    old, refused = {**FSDP, "FSDP_VERSION": "1"}, pytest.raises(UserError, match="fsdp_version 2")
    with engine(**old), refused:
        train(tiny(text), ARM, folder / "old")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharding")
    text = write_text(folder)
    train(tiny(text), ARM, folder / "one")
    ranks.start(sharded, folder, text)
    return folder


@pytest.mark.parametrize("run", ["parts", "halves", "mixed", "turned", "compiled parts"])
def test_parts_train_as_one_process_also_after_a_signal(folder: Path, run: str) -> None:
    assert_same_run(folder / run, folder / "one", TOLERANCE)


@pytest.mark.parametrize("run", ["halves", "late"])
def test_two_halves_are_the_whole_bit_by_bit(folder: Path, run: str) -> None:
    assert_same_run(folder / run, folder / "parts", 0.0)


def test_one_process_reads_the_checkpoint(folder: Path) -> None:
    trained, text = load_model(folder / "parts"), folder / "text.txt"
    valid = load_corpus(str(text)).valid
    value = split_bits_per_byte(trained.model, valid, 32, 4, limit=500)
    assert value == pytest.approx(float(rows(folder / "parts")[-1]["validation_bits_per_byte"]))
    assert trained.model.generate(torch.zeros(1, 1, dtype=torch.int64), 5).shape == (1, 6)


@pytest.mark.slow
def test_accelerate_launch_is_enough(folder: Path) -> None:
    out = folder / "launched"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"),
            *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
            *("--use_fsdp", "--fsdp_version", "2", "--main_process_port", "0"),
            *("-m", "enwik8", "train", "--out", str(out), "--arm", ARM),
            *("--corpus", str(folder / "text.txt"), "--threads", "1", "--layers", "2"),
            *("--dim", "16", "--heads", "2", "--length", "32", "--batch-size", "4"),
            *("--steps", "6", "--warmup", "2", "--evaluate-every", "3", "--checkpoint-every", "2"),
            *("--validation-bytes", "500", "--redraw-interval", "3"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(out, folder / "one", TOLERANCE)


def test_a_compiled_run_is_an_ordinary_one(folder: Path) -> None:
    """As `accelerate launch --dynamo_backend` asks for; stopped, and gone on with uncompiled."""
    text, out = folder / "text.txt", folder / "compiled"
    with engine(ACCELERATE_DYNAMO_BACKEND="EAGER"):
        run = Run(tiny(text), ARM, load_corpus(str(text)), "")
        assert run.model is not run.module
        with before_step(3, terminate_me), pytest.raises(Interrupted):
            train(tiny(text), ARM, out)
    train(tiny(text), ARM, out, resume=True)
    assert_same_run(out, folder / "one", TOLERANCE)
    assert load_model(out).model.generate(torch.zeros(1, 1, dtype=torch.int64), 5).shape == (1, 6)
