"""Tiny runs for the tests, and what their folders hold."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from enwik8 import checkpoint
from enwik8.presets import Settings

TIMING = ("seconds", "tokens_per_second")


def tiny_run(corpus: str) -> Settings:
    """Twelve steps, evaluations at 5, 10 and 12, checkpoints at 3, 6, 9 and 12."""
    return Settings(
        corpus=corpus,
        layers=1,
        dim=16,
        heads=2,
        length=16,
        batch_size=4,
        steps=12,
        warmup=3,
        evaluate_every=5,
        validation_bytes=100,
        checkpoint_every=3,
        threads=1,
        cpu=True,
    )


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMING} for row in csv.DictReader(file)]


def same_runs(whole: Path, parts: Path) -> None:
    """Bit-equal logs (but for times), weights, optimizer states and counters."""
    assert rows(whole) == rows(parts)
    one, two = (torch.load(folder / checkpoint.NAME) for folder in (whole, parts))
    for name in ("step", "tokens", "batch_hash"):
        assert one[name] == two[name], name
    for name, value in one["model"].items():
        assert torch.equal(value, two["model"][name]), name
    for index, state in one["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, two["optimizer"]["state"][index][name]), (index, name)
