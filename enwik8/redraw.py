"""What a trained FAVOR+ model rests on: the kernel that its features estimate, or their draw.

    python -m enwik8.redraw RUN ... --features 64 256 1024 --out results/small

measures each run on its validation split as it was trained, and again with other random features,
of the same number and of more. FAVOR+ estimates the kernel exp(q . k / sqrt(D)) without bias
(arXiv 2009.14794, lemma 1), and more features estimate it better. So a model that uses the kernel
bears another draw, and does not lose by more features; a model that has learned to use the very
features it was given loses by either.

With x' = x / D^(1/4), the estimate's relative variance grows like exp(|q' + k'|^2) / M, so the mean
of |q'|^2 + |k'|^2, which independent directions make of the exponent, stands beside it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from linear_rope.feature_maps import SoftmaxRandomFeatures
from linear_rope.model import LanguageModel

from .corpus import Corpus, load_corpus
from .errors import UserError
from .evaluate import load_language_model, split_bits_per_byte
from .plot import write_whole

__all__ = ["Redrawn", "measure", "redrawn"]


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
        module.reset(seed * 100_003 + number)
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


def measure(
    run: Path, features: Sequence[int], limit: int | None, corpora: dict[str, Corpus]
) -> Redrawn:
    """Measure one run folder on the first ``limit`` bytes of its validation split.

    Args:
        corpora: texts read so far, by their names.

    Raises:
        UserError: no checkpoint, no FAVOR+ features, or another text than in training.
    """
    loaded = load_language_model(run, "cpu", "be measured with other features")
    model, config = loaded.model, loaded.config
    if not _random_features(model):
        raise UserError(
            f"{run} is a run of {config['arm']}, which has no FAVOR+ features; give runs of arms "
            "such as favor-rope"
        )
    training = config["training"]
    name = training["corpus"]
    if name not in corpora:
        corpora[name] = load_corpus(name, data_dir=training["data_dir"])
    if corpora[name].sha256 != config["corpus"]["sha256"]:
        raise UserError(f"{name} is not the text that {run} was trained on (its SHA-256 differs)")

    def bits(model: LanguageModel) -> float:
        value = split_bits_per_byte(model, corpora[name].valid, training["length"], 16, limit=limit)
        assert value is not None  # nothing stops it
        return value

    with _squares(model) as found:
        trained = bits(model)
    try:
        others = {m: bits(redrawn(model, m, training["seed"] + 1)) for m in features}
    except ValueError as error:  # a number of features that the model cannot have
        raise UserError(str(error)) from error
    square = 2 * float(torch.stack(found).mean())  # as many of queries as of keys
    init_std = training.get("init_std")
    return Redrawn(config["arm"], init_std, training["seed"], square, trained, others)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m enwik8.redraw",
        description="Measure trained FAVOR+ models again with other random features.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument(
        "--features", nargs="+", type=int, default=[64, 256, 1024], help="numbers of features"
    )
    parser.add_argument("--bytes", type=int, default=65_536, help="bytes to measure on")
    parser.add_argument("--threads", type=int, help="CPU threads of PyTorch")
    parser.add_argument("--out", type=Path, help="folder to write redraw.csv to (none: print it)")
    options = parser.parse_args(arguments)
    for flag, value in (
        *(("--features", m) for m in options.features),
        ("--bytes", options.bytes),
        ("--threads", options.threads),
    ):
        if value is not None and value < 1:
            parser.error(f"{flag} must be at least 1, got {value}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    corpora: dict[str, Corpus] = {}
    try:
        rows = [
            measure(run, options.features, options.bytes, corpora)
            for run in tqdm(options.runs, unit="run", desc="redraw")
        ]
        table = _csv(rows, options.features)
        if options.out is not None:
            write_whole(options.out / "redraw.csv", table.encode())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
