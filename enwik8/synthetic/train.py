"""One cell: a small model, one task, trained on fresh sequences, measured on others."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_rope import Config, LanguageModel, advance_random_features

from ..flags import check_sizes, flag
from .tasks import IGNORE, TASKS

__all__ = ["Cell", "Result", "Settings", "accuracy", "config_of", "train_cell"]

# A model whose last batches were this good on average has solved the task: training ends there.
SOLVED, BATCHES = 0.995, 20


@dataclass(frozen=True)
class Settings:
    """What all cells of a grid share."""

    length: int = 32
    """Tokens of a training sequence."""
    longer: tuple[int, ...] = (1, 2, 4)
    """Lengths to measure at, as multiples of the training length."""
    pairs: tuple[int, ...] = (2, 4, 8)
    """Key-value pairs of recall: training takes them in turn, each is measured."""
    vocab_size: int = 64
    """Tokens there are."""
    dim: int = 64
    """Model width."""
    layers: int = 2
    """Number of layers."""
    heads: int = 2
    """Number of heads."""
    short_conv: int = 3
    """Tokens of a causal convolution on q, k and v, in all arms that do not say otherwise, as
    Zoology's experiments have one of 3 before every mixer (0: none)."""
    steps: int = 600
    """Optimizer steps at most; a model that has solved its task stops earlier."""
    batch_size: int = 64
    """Sequences a step."""
    learning_rate: float = 5e-3
    """Peak learning rate of AdamW, reached after a tenth of the steps, then falling to a tenth."""
    examples: int = 256
    """Sequences to measure on."""

    def check(self) -> None:
        """Refuses numbers that do not fit, with a `ValueError`."""
        counts = (
            "length",
            "vocab_size",
            "dim",
            "layers",
            "heads",
            "steps",
            "batch_size",
            "examples",
        )
        check_sizes(**{name: getattr(self, name) for name in counts})
        for name in ("longer", "pairs"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{flag(name)} must have at least one number")
            for value in values:
                check_sizes(**{name: value})
        if self.dim % self.heads:
            raise ValueError(f"--heads must divide --dim, got {self.heads} heads for {self.dim}")
        if self.short_conv < 0:
            raise ValueError(f"--short-conv must not be negative, got {self.short_conv}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"--learning-rate must be positive and finite, got {self.learning_rate}"
            )


@dataclass(frozen=True)
class Cell:
    """One model to train: a task, an arm, a seed."""

    task: str
    arm: str
    seed: int


@dataclass(frozen=True)
class Result:
    """Accuracy and loss of a cell for one number of pairs (0 where there are none) and one length;
    steps and seconds of its training."""

    pairs: int
    length: int
    accuracy: float
    loss: float
    steps: int
    seconds: float


def config_of(fields: Mapping[str, Any], settings: Settings) -> Config:
    """The model of an arm. Sequences this short are quickest in the quadratic form, unless the arm
    says otherwise."""
    names = ("vocab_size", "dim", "layers", "heads", "short_conv")
    sizes = {name: getattr(settings, name) for name in names}
    if fields.get("position") in ("learned", "cosformer"):
        sizes["max_length"] = settings.length * max(settings.longer)
    return Config.from_dict({**sizes, "backend": "reference", **fields})


def train_cell(
    cell: Cell,
    fields: Mapping[str, Any],
    settings: Settings,
    progress: Callable[[int, float, float], None] = lambda step, loss, accuracy: None,
) -> list[Result]:
    """Train a model and measure it for every number of pairs and every length.

    Arms of one seed see the same batches and start from the same values where they share
    parameters.

    Args:
        fields: fields of `linear_rope.Config` that make the arm; sizes come from the settings.
        progress: called after each step with its number, loss and accuracy.

    Raises:
        ValueError: fields or sizes that do not fit.
    """
    task, s = TASKS[cell.task], settings
    model = LanguageModel(config_of(fields, s))
    model.initialize(cell.seed)
    draws = _generator(cell, "train")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    began, recent = time.monotonic(), [0.0] * BATCHES
    step = 0
    for step in range(1, s.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate * _rate(step, s.steps)
        pairs = task.pairs(s.pairs)[step % len(task.pairs(s.pairs))]
        inputs, targets = task.make(s.batch_size, s.length, pairs, s.vocab_size, draws)
        loss, right = _measure(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        advance_random_features(model)
        recent = [*recent[1:], right]
        progress(step, float(loss.detach()), right)
        if sum(recent) / BATCHES >= SOLVED:
            break
    seconds = time.monotonic() - began
    return [
        Result(pairs, length, *accuracy(model, cell, pairs, length, s), step, seconds)
        for pairs in task.pairs(s.pairs)
        for length in (s.length * factor for factor in s.longer)
    ]


@torch.no_grad()
def accuracy(
    model: LanguageModel, cell: Cell, pairs: int, length: int, settings: Settings
) -> tuple[float, float]:
    """Share of right answers, and the mean loss in nats, on sequences of draws of their own."""
    draws, s = _generator(cell, f"test {pairs} {length}"), settings
    model.eval()
    total = right = asked = 0.0
    # About as many tokens at once as in training, so that long sequences need no more memory.
    for size in _parts(s.examples, max(1, s.batch_size * s.length // length)):
        inputs, targets = TASKS[cell.task].make(size, length, pairs, s.vocab_size, draws)
        loss, share = _measure(model, inputs, targets)
        count = int((targets != IGNORE).sum())
        total, right, asked = total + float(loss) * count, right + share * count, asked + count
    model.train()
    return right / asked, total / asked


def _measure(model: LanguageModel, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Mean loss and share of right answers, where something is asked."""
    asked = targets != IGNORE
    logits, answers = model(inputs)[asked], targets[asked]
    right = (logits.detach().argmax(-1) == answers).double().mean()
    return F.cross_entropy(logits, answers), float(right)


def _rate(step: int, steps: int) -> float:
    warmup = max(1, steps // 10)
    if step <= warmup:
        return step / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _parts(total: int, size: int) -> Sequence[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def _generator(cell: Cell, purpose: str) -> torch.Generator:
    """Draws that depend on everything but the arm."""
    text = f"{cell.seed}:{cell.task}:{purpose}"
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 2)
