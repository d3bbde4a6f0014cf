"""What config.json says of a run: enough to repeat it and to compare it with others."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from typing import Any

import accelerate
import torch
from torch import nn

import linear_rope

from .corpus import Corpus
from .methods import find
from .presets import Settings
from .tasks import ModelConfig

__all__ = ["fingerprints", "make_record", "training_record", "versions"]


def make_record(
    settings: Settings,
    arm: str,
    config: ModelConfig,
    corpus: Corpus,
    module: nn.Module,
    *,
    processes: int,
    device: str,
    command: str,
) -> dict[str, Any]:
    """The content of config.json. ``module`` must have its initial values still."""
    record = {
        "arm": arm,
        "description": find(arm).description,
        "model": dataclasses.asdict(config),
        "training": training_record(settings),
        "corpus": corpus.record(),
        "parameters": sum(p.numel() for p in module.parameters()),
        "initial_parameters": fingerprints(module),
        "processes": processes,
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "command": command,
    }
    # As it will be read again: a run's record can then be compared with one from a file.
    return dict(json.loads(json.dumps(record)))


def training_record(settings: Settings) -> dict[str, Any]:
    """The settings, and what follows from them."""
    return {
        **dataclasses.asdict(settings),
        "seeds": settings.seeds,
        "tokens": settings.steps * settings.batch_size * settings.length,
        "optimizer": "AdamW",
        "schedule": "linear warm-up, cosine decay",
    }


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "linear_rope": getattr(linear_rope, "__version__", "unknown"),
    }


def fingerprints(module: nn.Module) -> dict[str, str]:
    """Shape and SHA-256 (16 digits) of each parameter: equal where the values are equal."""
    prints = {}
    for name, parameter in module.named_parameters():
        values = parameter.detach().to("cpu", torch.float32).contiguous().numpy()
        shape = "x".join(map(str, parameter.shape))
        prints[name] = f"{shape} {hashlib.sha256(values.tobytes()).hexdigest()[:16]}"
    return prints
