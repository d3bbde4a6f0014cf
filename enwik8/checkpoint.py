"""Checkpoints that are either the old one or the new one, never half of one.

A checkpoint is written to a part file in the same folder, flushed to the disk, and then renamed
over the old one, which POSIX does in one step. Whatever goes wrong before the rename (no space, a
kill, a power cut) leaves the old checkpoint as it was. Contents are tensors and plain Python
values only, so ``torch.load`` opens them with its safe default ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .errors import UserError

__all__ = ["NAME", "fsync_folder", "load", "remove_part_files", "replace_file", "resolve", "save"]

NAME = "checkpoint.pt"
_PART = ".part"


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


def save(path: Path, contents: dict[str, Any]) -> None:
    """Write ``contents`` to ``path`` in one step; the old file stays until the new one is whole.

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
        os.replace(part, path)
        fsync_folder(path.parent)
    except (OSError, RuntimeError, pickle.PicklingError) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        reason = (recorder.error if recorder is not None else None) or error
        kept = f"the previous checkpoint {path} is intact" if path.exists() else "none is saved yet"
        raise UserError(f"the checkpoint could not be written ({reason}); {kept}") from error


def replace_file(path: Path, text: str) -> None:
    """Write a text file in one step, as ``save`` does.

    Raises:
        UserError: the file could not be written, with the reason. The old file is untouched.
    """
    part = _part(path)
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
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
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no checkpoint at {file}; give a run folder that `train` has written")
    return file


def load(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint with torch's safe loading, tensors on ``device``.

    Raises:
        UserError: the file is missing, damaged, or not a checkpoint of this program.
    """
    try:
        contents = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"no checkpoint at {path}") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} is damaged or is not a checkpoint; it was left untouched "
            "(--overwrite starts the run again)"
        ) from error
    if not isinstance(contents, dict) or not {"model", "step", "config"} <= contents.keys():
        raise UserError(f"{path} is not a checkpoint of `python -m enwik8`")
    return contents
