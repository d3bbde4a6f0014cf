"""What a trained FAVOR+ model rests on: the kernel that its features estimate, or their draw.

`python -m enwik8 redraw RUN ...` measures each run on its validation split as it was trained, and
again with other random features, of the same number and of more. FAVOR+ estimates the kernel
exp(q . k / sqrt(D)) without bias (arXiv 2009.14794, lemma 1), and more features estimate it better.
So a model that uses the kernel bears another draw, and does not lose by more features; a model that
has learned to use the very features it was given loses by either.

With x' = x / D^(1/4), the estimate's relative variance grows like exp(|q' + k'|^2) / M, so the mean
of |q'|^2 + |k'|^2, which independent directions make of the exponent, stands beside it.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from linear_rope.feature_maps import SoftmaxRandomFeatures
from linear_rope.model import LanguageModel

from .corpus import Corpus, load_corpus
from .distributed import refuse_several
from .errors import UserError
from .evaluate import TrainedLanguageModel, load_language_model, split_bits_per_byte
from .flags import MOST_THREADS, check_sizes
from .plot import write_whole
from .run_folder import make_writable

__all__ = ["Redrawn", "redraw", "redrawn"]


@dataclass(frozen=True)
class Redrawn:
    """One run. ``others``: bits per byte with that many features of another draw."""

    arm: str
    init_std: float | None
    seed: int
    square: float
    trained: float
    others: dict[int, float]


def redrawn(model: LanguageModel, features: int, seed: int) -> LanguageModel:
    """A copy of the model with other random features; all that was learned is equal.

    Args:
        features: M, random features a head.
        seed: of the new draw; each layer has one of its own.

    Raises:
        ValueError: the model has no random features of the softmax kernel.
    """
    if not _random_features(model):
        raise ValueError("the model has no FAVOR+ features that could be drawn again")
    twin = LanguageModel(dataclasses.replace(model.config, features=features))
    learned = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(learned[name])
    for number, module in enumerate(_random_features(twin)):
        module.reset((seed * 100_003 + number) % 2**62)
    return twin.train(model.training)


def _random_features(model: nn.Module) -> list[SoftmaxRandomFeatures]:
    return [module for module in model.modules() if isinstance(module, SoftmaxRandomFeatures)]


@contextmanager
def _squares(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the means of |q'|^2 and of |k'|^2 of every layer and batch, a pair in turn."""
    found: list[Tensor] = []
    hooks = []
    for module in model.modules():
        feature_map = getattr(module, "feature_map", None)
        if isinstance(feature_map, SoftmaxRandomFeatures):
            width, scale = feature_map.head_dim, feature_map.scale

            def note(
                _: nn.Module, __: object, y: Tensor, width: int = width, scale: float = scale
            ) -> None:
                heads = y.detach().double().unflatten(-1, (-1, width)) * scale
                found.append(heads.square().sum(-1).mean())

            hooks += [module.get_submodule(n).register_forward_hook(note) for n in ("query", "key")]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def redraw(
    runs: Sequence[Path],
    out: Path | None,
    features: Sequence[int],
    *,
    limit: int = 65_536,
    threads: int | None = None,
) -> list[Redrawn]:
    """Measure runs on the first ``limit`` bytes of their validation splits; print the table.

    Args:
        out: folder for redraw.csv, which is there after each run; None: nowhere.
        features: numbers of features to measure with.
        threads: of PyTorch, on the CPU; None: as it is.

    Raises:
        UserError: no FAVOR+ model, or another text than in training, before any run is measured.
        ValueError: impossible numbers.
    """
    refuse_several("redraw")
    check_sizes(limit=limit)
    check_sizes(threads=threads, most=MOST_THREADS)
    for number in features:
        check_sizes(features=number)
        if number % 2:
            raise ValueError(f"--features must be even (they turn in pairs), got {number}")
    if not runs:
        raise UserError("name a run folder to measure")
    if threads is not None:
        torch.set_num_threads(threads)
    corpora: dict[str, Corpus] = {}
    for run in runs:
        _text(_load(run), run, corpora)
    if out is not None:
        make_writable(out)
    rows: list[Redrawn] = []
    try:
        for run in tqdm(runs, unit="run", desc="redraw"):
            rows.append(_measure(run, features, limit, corpora))
            if out is not None:
                write_whole(out / "redraw.csv", _csv(rows, features).encode())
    finally:
        print(_csv(rows, features), end="")
    return rows


def _load(run: Path) -> TrainedLanguageModel:
    loaded = load_language_model(run, "cpu", "be measured with other features")
    if not _random_features(loaded.model):
        raise UserError(
            f"{run} is a run of {loaded.config['arm']}, which has no FAVOR+ features; give runs of "
            "arms such as favor-rope"
        )
    return loaded


def _text(loaded: TrainedLanguageModel, run: Path, corpora: dict[str, Corpus]) -> np.ndarray:
    """The validation split that the run had; ``corpora`` keeps what has been read."""
    training = loaded.config["training"]
    name = training["corpus"]
    if name not in corpora:
        corpora[name] = load_corpus(name, data_dir=training["data_dir"])
    if corpora[name].sha256 != loaded.config["corpus"]["sha256"]:
        raise UserError(f"{name} is not the text that {run} was trained on (its SHA-256 differs)")
    return corpora[name].valid


def _measure(run: Path, features: Sequence[int], limit: int, corpora: dict[str, Corpus]) -> Redrawn:
    loaded = _load(run)
    training, text = loaded.config["training"], _text(loaded, run, corpora)

    def bits(model: LanguageModel) -> float:
        value = split_bits_per_byte(model, text, training["length"], 16, limit=limit)
        assert value is not None  # nothing stops it
        return value

    with _squares(loaded.model) as found:
        trained = bits(loaded.model)
    others = {m: bits(redrawn(loaded.model, m, training["seed"] + 1)) for m in features}
    square = 2 * float(torch.stack(found).mean())  # as many of queries as of keys
    init_std = training.get("init_std")
    return Redrawn(loaded.config["arm"], init_std, training["seed"], square, trained, others)


def _csv(rows: Sequence[Redrawn], features: Sequence[int]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("arm", "init_std", "seed", "mean_squared_norms", "as_trained")
    writer.writerow([*names, *(f"redrawn_{m}" for m in features)])
    for row in rows:
        scale = "" if row.init_std is None else row.init_std
        values = [row.square, row.trained, *(row.others[m] for m in features)]
        writer.writerow([row.arm, scale, row.seed, *(f"{value:.6g}" for value in values)])
    return text.getvalue()
