"""A run's folder: made, refused, cleared, and compared with what is to be resumed in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from linear_rope.model import Config

from . import checkpoint, tensorboard
from .errors import UserError
from .presets import FREE_ON_RESUME, Settings

__all__ = ["FILES", "check_new", "clear", "differences", "make_writable", "read_config"]

FILES = ("config.json", "metrics.csv", checkpoint.NAME)
_BESIDE = ("checkpoint-[0-9]*.pt", f"{tensorboard.FOLDER}/events.out.tfevents.*")


def check_new(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds a run, unless it is said what to do with it."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other; give one of them")
    there = any((folder / name).exists() for name in FILES) or checkpoint.latest(folder)
    if there and not (resume or overwrite):
        raise UserError(
            f"{folder} holds a run already; --resume goes on with it, --overwrite starts it again"
        )


def make_writable(folder: Path, remedy: str = "choose another with --out") -> None:
    """Make the folder and prove that it can be written, before hours are spent on training."""
    probe = folder / f".writable.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        if folder.exists() and not folder.is_dir():
            raise UserError(
                f"the output folder {folder} cannot be written: it is a file; {remedy}"
            ) from error
        raise UserError(
            f"the output folder {folder} cannot be written ({error.strerror or error}); {remedy}"
        ) from error


def clear(folder: Path, files: Iterable[str] | None = None) -> None:
    """Remove a run's own files (or ``files``), and nothing else."""
    paths = [folder / name for name in (FILES if files is None else files)]
    if files is None:
        paths += [path for pattern in _BESIDE for path in folder.glob(pattern)]
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path} cannot be removed ({error.strerror})") from error


def read_config(folder: Path) -> dict[str, Any] | None:
    """The run's config.json; None where there is none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}); it was left untouched (--overwrite starts again)"
        ) from error
    parts = ("model", "training", "corpus")
    if not isinstance(config, dict) or not all(isinstance(config.get(p, {}), dict) for p in parts):
        raise UserError(f"{path} is not a configuration (--overwrite starts again)")
    return config


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What keeps a run from being resumed, as ``name: there, now``; empty where nothing does."""

    def relevant(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        yield "arm", config.get("arm")
        for part, kind in (("model", Config), ("training", Settings)):
            if part not in config:
                continue
            # What a run of an earlier version could not be told was as it is by default now.
            for name, value in {**asdict(kind()), **config[part]}.items():
                if part == "model" or name not in FREE_ON_RESUME:
                    yield name, value
        for name in ("sha256", "splits"):
            yield f"corpus {name}", config.get("corpus", {}).get(name)
        yield "processes", config.get("processes")

    old, new = dict(relevant(there)), dict(relevant(now))
    return [
        f"{name} was {old.get(name)!r}, is {new.get(name)!r}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]
