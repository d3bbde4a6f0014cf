"""Checkpoints that are either the old one or the new one, never half of one.

A checkpoint is written to a part file in the same folder, flushed to the disk, and then renamed
over the old one, which POSIX does in one step. Whatever goes wrong before the rename (no space, a
kill, a power cut) leaves the old checkpoint as it was. Contents are tensors and plain Python
values only, so ``torch.load`` opens them with its safe default ``weights_only=True``.

The newest checkpoint of a run is ``checkpoint.pt``; where more are kept, the older ones are
``checkpoint-STEP.pt`` beside it. An old one goes only after a new one is on the disk.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .errors import UserError

__all__ = [
    "NAME",
    "fsync_folder",
    "latest",
    "load",
    "older",
    "remove_part_files",
    "replace_file",
    "resolve",
    "save",
]

NAME = "checkpoint.pt"
_PART = ".part"
_OLDER = re.compile(r"checkpoint-([0-9]+)\.pt")


class _Recorder:
    """A file that remembers why a write failed; ``torch.save`` hides the reason."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}{_PART}")


def save(path: Path, contents: dict[str, Any], *, keep: int = 1, previous: int = 0) -> None:
    """Write ``contents`` to ``path`` in one step; the old file stays until the new one is whole.

    Args:
        keep: how many checkpoints to keep, this one among them.
        previous: the step of the checkpoint that is in ``path`` now; 0: there is none.

    Raises:
        UserError: the file could not be written, with the reason. The old file is untouched.
    """
    part = _part(path)
    recorder: _Recorder | None = None
    try:
        # Unbuffered, so that the write that fails is the write that tells.
        with open(part, "wb", buffering=0) as file:
            recorder = _Recorder(file)
            torch.save(contents, recorder)  # type: ignore[arg-type]
            os.fsync(file.fileno())
        if keep > 1 and previous and path.exists():
            _keep(path, path.with_name(f"checkpoint-{previous}.pt"))
        os.replace(part, path)
        fsync_folder(path.parent)
    except (OSError, RuntimeError, pickle.PicklingError) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        reason = (recorder.error if recorder is not None else None) or error
        kept = f"the previous checkpoint {path} is intact" if path.exists() else "none is saved yet"
        raise UserError(f"the checkpoint could not be written ({reason}); {kept}") from error
    there = [old for step, old in older(path.parent) if step < contents["step"]]
    for old in there[: max(len(there) - (keep - 1), 0)]:
        with contextlib.suppress(OSError):  # one too many is no reason to stop
            old.unlink()


def _keep(path: Path, name: Path) -> None:
    """Give the file at ``path`` a second name, without a copy."""
    name.unlink(missing_ok=True)  # of a training that went another way, or of a kill just here
    try:
        os.link(path, name)
    except OSError:  # a file system without links: `latest` finds it under its new name only
        os.replace(path, name)


def older(folder: Path) -> list[tuple[int, Path]]:
    """The kept checkpoints but the newest, as (step, file), by their steps."""
    found = ((_OLDER.fullmatch(path.name), path) for path in folder.glob("checkpoint-*.pt"))
    return sorted((int(match[1]), path) for match, path in found if match)


def latest(folder: Path) -> Path | None:
    """The checkpoint that a run goes on from; None where the folder has none.

    Without ``checkpoint.pt`` (moved away since it was damaged, say) it is the newest of the others.
    """
    if (folder / NAME).exists():
        return folder / NAME
    kept = older(folder)
    return kept[-1][1] if kept else None


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file in one step, as ``save`` does; text as UTF-8.

    Raises:
        UserError: the file could not be written, with the reason. The old file is untouched.
    """
    part = _part(path)
    try:
        with open(part, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written ({error})") from error


def fsync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` survive a power cut, where the system can."""
    with contextlib.suppress(OSError):  # Windows cannot open folders; some file systems refuse.
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_part_files(folder: Path) -> None:
    """Remove what killed writers left behind. Call it only while holding the run's lock."""
    for part in folder.glob(f"*{_PART}"):
        with contextlib.suppress(OSError):
            part.unlink()


def resolve(path: Path) -> Path:
    """The checkpoint file for the path of a run folder or of a checkpoint."""
    file = (latest(path) or path / NAME) if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no checkpoint at {file}; give a run folder that `train` has written")
    return file


def load(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint with torch's safe loading, tensors on ``device``.

    Raises:
        UserError: the file is missing, damaged, or not a checkpoint of this program.
    """
    try:
        _check_sums(path)
        contents = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"no checkpoint at {path}") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} is damaged or is not a checkpoint; it was left untouched ({_remedy(path)})"
        ) from error
    if not isinstance(contents, dict) or not {"model", "step", "config"} <= contents.keys():
        raise UserError(f"{path} is not a checkpoint of `python -m enwik8`")
    return contents


def _check_sums(path: Path) -> None:
    """``torch.load`` does not look at the checksums of the archive that a checkpoint is, so that a
    flipped bit in a tensor would pass."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever damaged bytes make of names, sizes and offsets
        raise RuntimeError(f"not a whole archive: {error}") from error
    if wrong is not None:
        raise RuntimeError(f"the checksum of {wrong} is wrong")


def _remedy(path: Path) -> str:
    others = [other for _, other in older(path.parent) if other != path]
    if others and (path.name == NAME or _OLDER.fullmatch(path.name)):
        return f"move it away, and --resume goes on from {others[-1].name}"
    return "--overwrite starts the run again"
