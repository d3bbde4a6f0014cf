"""What an objective means for training and evaluation: its model, its batches, its windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linear_rope.model import Config, LanguageModel

from .batches import WindowSampler, evaluation_windows
from .masked import MaskedModel, masked_batch, masked_evaluation
from .methods import PERFORMER
from .objectives import Objective
from .performer import PerformerConfig, PerformerModel

__all__ = [
    "Batch",
    "Model",
    "ModelConfig",
    "evaluation_batches",
    "make_config",
    "make_model",
    "training_batch",
]

Model = LanguageModel | MaskedModel | PerformerModel
ModelConfig = Config | PerformerConfig


@dataclass(frozen=True)
class Batch:
    """One global batch: inputs and targets, int64 (batch, time), and what `BatchHash` is told."""

    x: Tensor
    y: Tensor
    hashed: np.ndarray

    def share(self, rank: int, world: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one of ``world`` equal parts."""
        size = len(self.x) // world
        mine = slice(rank * size, (rank + 1) * size)
        return self.x[mine], self.y[mine]


def make_config(fields: Mapping[str, Any]) -> ModelConfig:
    """The config of these fields: `enwik8.presets.model_fields`, or the record of a run.

    Raises:
        ValueError: unknown fields, or values that do not fit.
    """
    kind = PerformerConfig if fields.get("attention") == PERFORMER else Config
    return kind.from_dict(dict(fields))


def make_model(config: ModelConfig, objective: Objective) -> Model:
    """The model that the objective trains, at the sizes and with the choices of ``config``."""
    if isinstance(config, PerformerConfig):
        if not objective.causal:
            raise ValueError(f"attention={PERFORMER!r} has a causal model only")
        return PerformerModel(config)
    return LanguageModel(config) if objective.causal else MaskedModel(config)


def training_batch(sampler: WindowSampler, step: int, objective: Objective) -> Batch:
    """The batch of a step: a function of the sampler's seed and the step, on every rank."""
    if objective.causal:
        windows = sampler.windows(step)
        tokens = torch.from_numpy(windows.astype(np.int64))
        return Batch(tokens[:, :-1], tokens[:, 1:], windows)
    x, y = masked_batch(sampler, step)
    hashed = np.stack([x, y]).astype("<i2")  # the masks too must be equal
    return Batch(torch.from_numpy(x), torch.from_numpy(y), hashed)


def evaluation_batches(
    data: np.ndarray, length: int, batch_size: int, limit: int | None, objective: Objective
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets that cover a split once; see `evaluation_windows`."""
    cover = evaluation_windows if objective.causal else masked_evaluation
    return cover(data, length, batch_size, limit)
