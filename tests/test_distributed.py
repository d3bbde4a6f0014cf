"""Training by several real processes: the run of one process, resumable, and ended together."""

from __future__ import annotations

import builtins
import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from accelerate import Accelerator
from ranks import before_step, engine, terminate_me, tiny, write_text
from torch.testing._internal.distributed.fake_pg import FakeStore

import linear_rope
from enwik8 import __main__ as command_line
from enwik8 import train as training
from enwik8.errors import UserError
from enwik8.interrupt import Interrupted
from enwik8.run import accumulate_gradient, make_sampler
from enwik8.train import train

ROOT = Path(__file__).resolve().parent.parent
ARM = "favor-rope"
LOSSES = ("train_bits_per_byte", "validation_bits_per_byte", "gradient_norm")
# Two processes add up halves of a batch: the order of the sums differs, in float32.
TOLERANCE = 1e-5


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def parameters(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "checkpoint.pt")["model"])


def assert_same_run(folder: Path, other: Path, tolerance: float) -> None:
    """Rows, parameters and moments agree, to a tolerance (0: bit by bit)."""
    mine, theirs = rows(folder), rows(other)
    assert [row["batch_hash"] for row in mine] == [row["batch_hash"] for row in theirs]
    for name in LOSSES:
        for a, b in zip(mine, theirs, strict=True):
            assert (a[name] == "") == (b[name] == "")
            if a[name]:
                assert float(a[name]) == pytest.approx(float(b[name]), rel=tolerance, abs=0), name
    one, two = (torch.load(path / "checkpoint.pt") for path in (folder, other))
    assert one["optimizer"]["param_groups"] == two["optimizer"]["param_groups"]
    pairs = [(one["model"], two["model"])]
    pairs += [(m, two["optimizer"]["state"][i]) for i, m in one["optimizer"]["state"].items()]
    for a, b in pairs:
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert type(value) is torch.Tensor and value.shape == b[name].shape, name
            off = (value.double() - b[name].double()).abs().max()
            assert float(off) <= tolerance * max(1.0, float(b[name].abs().max())), name


# ---- What each process does


def dense(rank: int, folder: Path, text: Path) -> None:
    """A whole run; then one that a signal to the second process ends, and its second half."""
    opened: list[str] = []
    drawn: list[torch.Tensor] = []
    plain_open, plain_advance = builtins.open, linear_rope.advance_random_features

    def watched_open(file: Any, mode: str = "r", *args: Any, **given: Any) -> Any:
        if set(mode) & set("wax+"):
            opened.append(str(file))
        return plain_open(file, mode, *args, **given)

    def watched_advance(model: torch.nn.Module) -> None:
        plain_advance(model)
        drawn.append(next(x.clone() for n, x in model.named_buffers() if "projection" in n))

    builtins.open, linear_rope.advance_random_features = watched_open, watched_advance
    with engine():
        train(tiny(text), ARM, folder / "dense")
    builtins.open, linear_rope.advance_random_features = plain_open, plain_advance
    torch.save({"opened": opened, "drawn": drawn}, folder / f"seen-{rank}.pt")
    with engine(ACCELERATE_DYNAMO_BACKEND="EAGER"):
        train(tiny(text), ARM, folder / "compiled")
    with engine(), before_step(3, terminate_me if rank == 1 else lambda: None):
        with pytest.raises(Interrupted) as ended:
            train(tiny(text), ARM, folder / "halves")
        assert "after step 3 of 6" in str(ended.value)
    if rank == 0:  # only this one has saved for sure
        assert torch.load(folder / "halves" / "checkpoint.pt")["step"] == 3
    torch.distributed.barrier()
    with engine():
        train(tiny(text), ARM, folder / "halves", resume=True)
    ranks.late_evaluation(rank, text, ARM, folder / "late")
    with engine():
        averaged(rank, folder)


def averaged(rank: int, folder: Path) -> None:
    """The gradient of two micro batches a process, of which the last is smaller."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7))
    model = accelerator.prepare(module)
    x, y = torch.randint(7, (2, 6, 4)).unbind(0)
    mine = slice(3 * rank, 3 * rank + 3)
    loss = accumulate_gradient(accelerator, model, x[mine], y[mine], 2)
    loss = accelerator.reduce(loss, "mean")
    whole = torch.nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten())
    want = torch.autograd.grad(whole, list(module.parameters()))
    assert torch.allclose(loss, whole, atol=1e-6)
    for p, gradient in zip(module.parameters(), want, strict=True):
        assert p.grad is not None and torch.allclose(p.grad, gradient, atol=1e-6)


def apart(rank: int, folder: Path, text: Path) -> None:
    """One of the processes does not see the checkpoint that the other goes on from."""
    out = folder / "halves" if rank == 0 else folder / "elsewhere"
    plain = training.checkpoint.load

    def earlier(path: Path) -> Any:
        state = plain(path)
        state["step"] = 2
        state["batch_hash"] = rows(out)[1]["batch_hash"]
        return state

    training.checkpoint.load = earlier  # type: ignore[assignment]
    with engine(), pytest.raises(UserError, match="at the steps 0 to 2"):
        train(tiny(text), ARM, out, resume=True)


def vanish(rank: int, folder: Path, text: Path) -> None:
    """One process is gone in the middle of a step, without a word."""

    def gone() -> None:
        if rank == 1:
            os._exit(9)

    with engine(), before_step(4, gone), pytest.raises((UserError, RuntimeError)):
        train(tiny(text), ARM, folder / "vanished")
    os._exit(0)  # without waiting for the connection to be closed from both sides


# ---- The tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two processes, and `one`, by this process alone."""
    folder = tmp_path_factory.mktemp("distributed")
    text = write_text(folder)
    train(tiny(text), ARM, folder / "one")
    ranks.start(dense, folder, text)
    return folder


@pytest.mark.parametrize("run", ["dense", "compiled"])
def test_two_processes_train_as_one(folder: Path, run: str) -> None:
    assert_same_run(folder / run, folder / "one", TOLERANCE)


def test_a_signal_to_one_process_ends_both_and_the_run_goes_on_bit_by_bit(folder: Path) -> None:
    assert_same_run(folder / "halves", folder / "dense", 0.0)


def test_a_signal_in_an_evaluation_that_was_due_before_hangs_nobody(folder: Path) -> None:
    assert_same_run(folder / "late", folder / "dense", 0.0)


def test_random_features_agree_over_ranks_and_only_the_first_process_writes(folder: Path) -> None:
    first, second = (torch.load(folder / f"seen-{rank}.pt") for rank in range(2))
    assert len(first["drawn"]) == 6
    changed = [
        not torch.equal(a, b) for a, b in zip(first["drawn"], first["drawn"][1:], strict=False)
    ]
    assert changed == [False, True, False, False, True]  # at the steps 3 and 6
    for a, b in zip(first["drawn"], second["drawn"], strict=True):
        assert torch.equal(a, b)
    assert any("metrics.csv" in name for name in first["opened"])
    assert [name for name in second["opened"] if str(folder) in name] == []
    assert sorted(p.name for p in (folder / "dense").iterdir() if p.name[0] != ".") == [
        *("checkpoint.pt", "config.json", "metrics.csv"),
    ]


def test_another_number_of_processes_is_refused(folder: Path) -> None:
    text = folder / "text.txt"
    before = (folder / "dense" / "checkpoint.pt").read_bytes()
    with pytest.raises(UserError, match="processes was 2, is 1"):
        train(tiny(text), ARM, folder / "dense", resume=True)
    assert (folder / "dense" / "checkpoint.pt").read_bytes() == before
    with pytest.raises(ValueError, match="choose a multiple of 2"):
        make_sampler(tiny(text, batch_size=3), training.load_corpus(str(text)), rank=0, world=2)


def test_processes_at_different_steps_are_refused(folder: Path) -> None:
    ranks.start(apart, folder, folder / "text.txt")


def test_the_end_of_one_process_ends_the_other(folder: Path) -> None:
    ranks.start(vanish, folder, folder / "text.txt", ends=(0, 9), limit=60.0)
    assert torch.load(folder / "vanished" / "checkpoint.pt")["step"] == 2
    assert len(rows(folder / "vanished")) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_ends_all_resumably(folder: Path, signum: int) -> None:
    out, never = folder / f"signal-{signum}", "1000000"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", "0", "--standalone"),
            *("-m", "enwik8", "train", "--out", str(out), "--arm", ARM),
            *("--corpus", str(folder / "text.txt"), "--cpu", "--threads", "1"),
            *("--layers", "1", "--dim", "16", "--heads", "2", "--length", "16"),
            *("--batch-size", "2", "--steps", never, "--evaluate-every", never),
            *("--checkpoint-every", never),
        ],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    log = out / "metrics.csv"
    deadline = time.monotonic() + 90
    while not (log.exists() and log.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "--resume goes on" in errors
    assert len(rows(out)) == torch.load(out / "checkpoint.pt")["step"] >= 3


@pytest.mark.parametrize(
    "backend, failed, stays",
    [
        ("gloo", False, False),
        ("gloo", True, False),
        ("fake", False, False),
        ("fake", True, True),
    ],
)
def test_a_command_closes_its_connection(
    backend: str, failed: bool, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = (
        {"init_method": f"file://{tmp_path}/meet"} if backend == "gloo" else {"store": FakeStore()}
    )
    dist.init_process_group(backend, rank=0, world_size=1, **where)
    try:
        command_line._leave_the_others(failed)
        assert dist.is_initialized() is stays
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
