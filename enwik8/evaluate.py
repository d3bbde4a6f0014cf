"""Bits per byte of a model: mean nats per byte / ln 2, each byte counted once and alike.

Of a masked model: per masked byte, with the same bytes hidden every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from linear_rope.model import LanguageModel
from linear_rope.modes import evaluating

from . import checkpoint
from .batches import bits_per_byte
from .corpus import load_corpus, read_corpus
from .distributed import refuse_several
from .errors import UserError
from .flags import check_sizes
from .masked import IGNORED
from .objectives import CAUSAL, Objective, objective_named
from .tasks import Model, evaluation_batches, make_config, make_model

__all__ = [
    "Trained",
    "TrainedLanguageModel",
    "evaluate",
    "load_language_model",
    "load_model",
    "longest_text",
    "split_bits_per_byte",
]


class Trained:
    """A model from a checkpoint, with the record of the run that made it."""

    def __init__(
        self, model: Model, objective: Objective, config: dict[str, Any], step: int
    ) -> None:
        self.model = model
        self.objective = objective
        self.config = config
        self.step = step


def load_model(path: Path, device: str | torch.device = "cpu") -> Trained:
    """The model of a run folder or checkpoint, in evaluation mode."""
    contents = checkpoint.load(checkpoint.resolve(path))
    try:
        config = _record(contents["config"])
        # Runs from before there was a choice were causal.
        objective = objective_named(config.get("training", {}).get("objective", CAUSAL.name))
        model = make_model(make_config(config["model"]), objective)
        model.load_state_dict(contents["model"])
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint of {path} does not hold a model ({error})") from error
    try:
        if torch.device(device).type == "meta":
            raise RuntimeError("it holds no numbers")
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise UserError(f"--device {device} cannot be used here ({error})") from error
    return Trained(model.eval(), objective, config, contents["step"])


def _record(config: Any) -> dict[str, Any]:
    """The record of a run, if it has what the commands ask of it.

    Raises:
        ValueError: what it lacks.
    """
    if not isinstance(config, dict):
        raise ValueError("its record is no table")
    wanted = {"arm": str, "model": dict, "training": dict, "corpus": dict}
    places: list[tuple[dict[str, Any], str, Any, str]] = [
        (config, name, kind, name) for name, kind in wanted.items()
    ]
    if isinstance(config.get("training"), dict):
        training = {"corpus": str, "data_dir": str | None, "length": int, "seed": int}
        places += [(config["training"], n, kind, f"training {n}") for n, kind in training.items()]
    for table, name, kind, words in places:
        if name not in table or not isinstance(table[name], kind):
            raise ValueError(f"its record has no {words}, or not of that kind")
    return config


def longest_text(model: LanguageModel) -> int | None:
    """Bytes that a model can read, where its positions end; None: any number."""
    config = model.config
    return config.max_length if config.position in ("learned", "cosformer") else None


class TrainedLanguageModel(Trained):
    """One whose model reads a text byte by byte."""

    model: LanguageModel


def load_language_model(
    path: Path, device: str | torch.device, purpose: str
) -> TrainedLanguageModel:
    """As `load_model`, for what only a causal model with a state can do.

    Raises:
        UserError: it is another kind of model. ``purpose`` says what it cannot do.
    """
    trained = load_model(path, device)
    model, objective = trained.model, trained.objective
    if not objective.causal:
        raise UserError(
            f"{path} was trained with --objective {objective.name}: it fills in masked bytes and "
            f"cannot {purpose}; give a run of --objective causal"
        )
    if not isinstance(model, LanguageModel):
        raise UserError(
            f"the model of {path}, a {type(model).__name__}, keeps no state and cannot {purpose}; "
            "give a run of another arm"
        )
    return TrainedLanguageModel(model, objective, trained.config, trained.step)


@torch.no_grad()
def split_bits_per_byte(
    model: nn.Module,
    data: np.ndarray,
    length: int,
    batch_size: int,
    *,
    objective: Objective = CAUSAL,
    limit: int | None = None,
    device: str | torch.device = "cpu",
    stop: Callable[[], bool] = lambda: False,
    report: Callable[[float], None] = lambda share: None,
    progress: bool = False,
) -> float | None:
    """Bits per byte over ``data``, cut into windows of ``length`` that each start afresh.

    Args:
        objective: what is measured. causal: all bytes but the first are targets. mlm: those that
            `masked_evaluation` hides among all bytes but the last; the result is in bits per
            masked byte.
        limit: stop after that many of these bytes; None: all.
        stop: asked before each batch; True abandons the evaluation, which then returns None.
        report: told the share that is done, in (0, 1], after each batch.
        progress: show a bar of its own.

    Changes neither the model nor any random state; the training mode of each part is put back.
    """
    windows = evaluation_batches(data, length, batch_size, limit, objective)
    nats, targets, done = 0.0, 0, 0
    total = min(len(data) - 1, limit or len(data))
    bar = tqdm(total=total, unit="byte", unit_scale=True, disable=not progress, desc="evaluating")
    with bar, evaluating(model):
        for x, y in windows:
            if stop():
                return None
            logits = model(x.to(device))
            losses = F.cross_entropy(
                logits.flatten(0, 1).float(),
                y.to(device).flatten(),
                ignore_index=IGNORED,
                reduction="none",
            )
            # A sum of many float32 losses would lose the digits that arms differ in.
            nats += losses.cpu().double().sum().item()
            targets += int((y != IGNORED).sum())
            done += y.numel()
            report(done / total)
            bar.update(y.numel())
            now = bits_per_byte(nats / targets)
            bar.set_postfix_str(f"{now:.4f} bits/{objective.per}", refresh=False)
    return bits_per_byte(nats / targets)


def evaluate(
    run: Path,
    *,
    split: Literal["train", "valid", "test"] = "valid",
    corpus: str | None = None,
    data_dir: Path | None = None,
    file: Path | None = None,
    length: int | None = None,
    batch_size: int = 16,
    limit: int | None = None,
    device: str = "cpu",
) -> float:
    """Bits per byte of a trained model on a split of its corpus, or on a whole file; prints it.

    Of a run with ``--objective mlm``: bits per masked byte.

    Args:
        run: run folder or checkpoint.
        split: part of the corpus.
        corpus: name or path; None: the one that the run was trained on, which must have the same
            SHA-256 as then.
        file: a file to measure whole, instead of a split.
        length: bytes in a window; None: as in training.

    Raises:
        UserError: the run, the corpus or the file cannot be read or is another one, or the text is
            shorter than 2 bytes.
        ValueError: a number that cannot be.
    """
    refuse_several("evaluate")
    check_sizes(length=length, batch_size=batch_size, limit=limit)
    trained = load_model(run, device)
    training = trained.config["training"]
    if file is not None:
        data, what = np.frombuffer(read_corpus(file)[1], dtype=np.uint8), str(file)
    else:
        loaded = load_corpus(
            corpus or training["corpus"], data_dir=data_dir or training["data_dir"]
        )
        if corpus is None and loaded.sha256 != trained.config["corpus"]["sha256"]:
            raise UserError(
                f"{training['corpus']} is not the text that {run} was trained on (its SHA-256 "
                "differs); name the text to measure with --corpus or --file"
            )
        data, what = getattr(loaded, split), f"{split} split of {loaded.name}"
    if len(data) < 2:
        raise UserError(
            f"{what} has {len(data)} byte, and a text is predicted from its second byte on only; "
            "name one of at least 2 bytes"
        )
    value = split_bits_per_byte(
        trained.model,
        data,
        training["length"] if length is None else length,
        batch_size,
        objective=trained.objective,
        limit=limit,
        device=device,
        progress=True,
    )
    assert value is not None  # nothing stops it
    counted = min(len(data) - 1, limit or len(data))
    hidden = "" if trained.objective.causal else ", 15 % of them masked"
    print(
        f"{trained.config['arm']} at step {trained.step}: {value:.4f} {trained.objective.unit} "
        f"({value * math.log(2):.4f} nats) over {counted:,} bytes of {what}{hidden}"
    )
    return value
