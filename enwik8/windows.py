"""Loss by position in the window, also in windows longer than those of training.

A long window is read recurrently: pieces of the training length, each from the state that the one
before left. That is how a model with a state of constant size meets a long text, and it shows
whether the loss goes on falling (the model uses the context), stays, or rises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from linear_rope.model import LanguageModel
from linear_rope.modes import evaluating

from .batches import bits_per_byte, evaluation_windows
from .corpus import load_corpus
from .errors import UserError
from .evaluate import load_model

__all__ = ["evaluate_windows", "losses_by_position"]

BINS = 40


@torch.no_grad()
def losses_by_position(
    model: LanguageModel, data: np.ndarray, length: int, piece: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Nats and targets at each position of windows of ``length`` that cover ``data``.

    Args:
        data: (bytes,) uint8; every byte but the first is a target once.
        length: bytes in a window; each window starts afresh.
        piece: bytes that are read at once, from the state of the piece before.
        batch_size: windows read at once; does not change the result.

    Returns:
        sums (length,) float64 of the nats, and how many targets each is over, (length,) int64. The
        last window may be shorter, so the counts may differ by one.
    """
    device = next(model.parameters()).device
    nats, counts = np.zeros(length), np.zeros(length, dtype=np.int64)
    with evaluating(model):
        for x, y in evaluation_windows(data, length, batch_size):
            state = None
            for start in range(0, x.shape[1], piece):
                here = slice(start, min(start + piece, x.shape[1]))
                logits, state = model(x[:, here].to(device), state=state, return_state=True)
                losses = F.cross_entropy(
                    logits.transpose(1, 2).float(), y[:, here].to(device), reduction="none"
                )
                nats[here] += losses.double().sum(0).cpu().numpy()
                counts[here] += len(x)
    return nats, counts


def evaluate_windows(
    run: Path,
    factors: Sequence[int],
    *,
    limit: int,
    batch_size: int | None = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Measure a finished run in windows of ``factors`` times its training length.

    The targets are the same ``limit`` first bytes of the validation split for every factor.

    Returns:
        One object a factor: ``factor``, ``length``, ``bits_per_byte``, ``bytes``, and the loss by
        position, ``bits`` (bits per byte) between ``edges`` (positions, from 0); or ``reason``, why
        there is none.

    Raises:
        UserError: the checkpoint or the corpus cannot be read, or is not that of the training.
    """
    trained = load_model(run, device)
    model, training = trained.model, trained.config["training"]
    if not isinstance(model, LanguageModel):
        return [
            {"factor": f, "reason": "this model keeps no state to read a window in pieces by"}
            for f in factors
        ]
    corpus = load_corpus(training["corpus"], data_dir=training["data_dir"])
    if corpus.sha256 != trained.config["corpus"]["sha256"]:
        raise UserError(
            f"{training['corpus']} is not the text that {run} was trained on (its SHA-256 "
            "differs); put that text back"
        )
    data, short = corpus.valid[: limit + 1], training["length"]
    windows = batch_size or training["micro_batch_size"] or training["batch_size"]
    found: list[dict[str, Any]] = []
    for factor in factors:
        length = factor * short
        row: dict[str, Any] = {"factor": factor, "length": length}
        found.append(row)
        if len(data) - 1 < length:
            row["reason"] = f"{len(data) - 1:,} bytes of text are fewer than a window"
            continue
        try:
            nats, counts = losses_by_position(model, data, length, short, windows)
        except ValueError as error:  # a table of learned positions has an end
            row["reason"] = str(error)
            continue
        row["bytes"] = int(counts.sum())
        row["bits_per_byte"] = bits_per_byte(float(nats.sum()) / row["bytes"])
        row["edges"], row["bits"] = _binned(nats, counts)
    return found


def _binned(nats: np.ndarray, counts: np.ndarray) -> tuple[list[int], list[float]]:
    """Means over bins that grow with the position: single bytes first, where the loss falls."""
    edges = np.unique(np.round(np.geomspace(1, len(nats) + 1, BINS + 1)).astype(int)) - 1
    first = edges[:-1]
    means = np.add.reduceat(nats, first) / np.add.reduceat(counts, first) / math.log(2)
    return edges.tolist(), means.tolist()
