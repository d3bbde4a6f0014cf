"""Checkpoints survive full disks, kills and damage: the old one or the new one, never a half."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from enwik8 import checkpoint
from enwik8.errors import UserError


def _contents(marker: int) -> dict:
    return {
        "config": {"arm": "elu-rope"},
        "step": marker,
        "model": {f"w{i}": torch.full((40, 50), float(marker)) for i in range(5)},
    }


def _whole(path: Path) -> int:
    """The marker of a checkpoint whose parts all belong together."""
    contents = checkpoint.load(path)
    marker = contents["step"]
    assert all(
        torch.equal(w, torch.full((40, 50), float(marker))) for w in contents["model"].values()
    )
    return marker


def test_loads_with_the_safe_default_of_torch(tmp_path: Path) -> None:
    path = tmp_path / checkpoint.NAME
    checkpoint.save(path, _contents(7))
    assert torch.load(path)["step"] == 7
    checkpoint.save(path, _contents(8))
    assert _whole(path) == 8
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.NAME]


@pytest.mark.parametrize("room", [0, 1, 3, 10])
def test_full_disk_keeps_the_old_checkpoint_and_tells_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    path = tmp_path / checkpoint.NAME
    checkpoint.save(path, _contents(1))
    real, writes = checkpoint._Recorder.write, 0

    def write(self: checkpoint._Recorder, data: object) -> int:
        nonlocal writes
        writes += 1
        if writes > room:
            self.error = OSError(errno.ENOSPC, "No space left on device")
            raise self.error
        return real(self, data)

    monkeypatch.setattr(checkpoint._Recorder, "write", write)
    with pytest.raises(UserError, match=r"No space left.*is intact"):
        checkpoint.save(path, _contents(2))
    assert writes > room
    assert _whole(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint.NAME]


def test_failure_of_torch_save_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / checkpoint.NAME

    def fail(contents: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(UserError, match="none is saved yet"):
        checkpoint.save(path, _contents(2))
    assert not list(tmp_path.iterdir())


_KILLER = """
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    from enwik8 import checkpoint
    torch.set_num_threads(1)
    path = Path(sys.argv[1]) / checkpoint.NAME
    def contents(marker):
        return {"config": {}, "step": marker,
                "model": {f"w{i}": torch.full((40, 50), float(marker)) for i in range(5)}}
    checkpoint.save(path, contents(0))
    randomness, last, stale = random.Random(0), 0, 0
    attempt = 0
    # At least 60 kills; on a slow machine more, until one has hit a save in the middle.
    while attempt < 60 or (not stale and attempt < 400):
        attempt += 1
        child = os.fork()
        if child == 0:
            marker = last
            while True:
                marker += 1
                checkpoint.save(path, contents(marker))
        time.sleep(randomness.uniform(0.002, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = checkpoint.load(path)
        assert all(bool((w == found["step"]).all()) for w in found["model"].values()), attempt
        assert found["step"] >= last, (found["step"], last)
        last = found["step"]
        stale += len(list(path.parent.glob("*.part")))
        checkpoint.remove_part_files(path.parent)
    print(last, stale, len(list(path.parent.iterdir())))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_kills_at_random_moments_of_a_save(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_KILLER), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    saves, stale, files = map(int, done.stdout.split())
    assert saves > 0 and files == 1
    assert stale > 0, "no kill hit a save: the test shows nothing"


@pytest.mark.parametrize("keep", [0, 10, 1000])
def test_damaged_checkpoint_is_named_and_left_untouched(tmp_path: Path, keep: int) -> None:
    path = tmp_path / checkpoint.NAME
    checkpoint.save(path, _contents(1))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"checkpoint\.pt is damaged"):
        checkpoint.load(path)
    assert path.stat().st_size == keep


def test_what_is_no_checkpoint_of_ours(tmp_path: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="not a checkpoint of"):
        checkpoint.load(tmp_path / "other.pt")
    with pytest.raises(UserError, match="no checkpoint at"):
        checkpoint.resolve(tmp_path)


def test_text_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    checkpoint.replace_file(path, "old\n")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match="No space left"):
        checkpoint.replace_file(path, "new\n")
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_flipped_bit_in_a_tensor_is_found(tmp_path: Path) -> None:
    """torch.load alone would give the other number and say nothing."""
    path = tmp_path / checkpoint.NAME
    weights = torch.arange(1000, dtype=torch.float32)
    checkpoint.save(path, {"model": {"w": weights}, "step": 1, "config": {}})
    whole = path.read_bytes()
    at = whole.index(weights.numpy().tobytes()) + 2001
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    loaded = torch.load(path, weights_only=True)
    assert not torch.equal(loaded["model"]["w"], weights)
    with pytest.raises(UserError, match=r"checkpoint\.pt is damaged"):
        checkpoint.load(path)
