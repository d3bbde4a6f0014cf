"""What a run will cost: parameters, tokens, time and memory, and where the guess comes from."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..corpus import Corpus
from ..curves import read_metrics
from ..methods import find
from ..objectives import objective_named
from ..presets import Settings, model_fields
from ..tasks import make_config, make_model
from ..train import train
from .plan import RunSpec

__all__ = ["Cost", "cost", "parameters", "same_work", "timed"]

_PROCESS = 260e6  # bytes of a process that has imported torch and trained nothing
# Numbers a token, layer and unit of width, at the peak of a training step. A plain block keeps 17
# for the backward pass (Korthikanti et al., arXiv 2205.05198, equation 1, without the part of
# softmax); gradients, what attention keeps of its own and the allocator's gaps come on top: on a
# CPU 36 to 40 were seen, at widths 128 and 256, 4 and 6 layers, softmax and linear attention.
_NUMBERS = 38


@dataclass(frozen=True)
class Cost:
    """Costs of one run; ``seconds`` and ``memory`` (bytes) with the word on where they are from."""

    parameters: int
    tokens: int
    seconds: float | None
    timed_by: str
    memory: float
    memory_by: str


def parameters(run: RunSpec) -> int:
    """Trained numbers of the run's model, counted without making it."""
    config = make_config(model_fields(run.settings, find(run.arm)))
    with torch.device("meta"):
        model = make_model(config, objective_named(run.settings.objective))
    return sum(p.numel() for p in model.parameters())


def same_work(run: RunSpec) -> tuple[object, ...]:
    """What a step's time depends on, apart from the arm."""
    s = run.settings
    size = (s.layers, s.dim, s.heads, s.features, s.objective)
    return (*size, s.length, s.batch_size, s.micro_batch_size, s.precision, s.threads, s.cpu)


def cost(
    run: RunSpec,
    validation: int,
    speeds: Mapping[tuple[object, ...], Sequence[float]],
    peaks: Mapping[tuple[object, ...], float],
    word: str = "finished runs",
) -> Cost:
    """The cost of a whole run.

    Args:
        validation: bytes of one evaluation.
        speeds: training tokens a second seen at (arm, *same_work), or at same_work of other arms.
        peaks: bytes seen there.
    """
    s, key = run.settings, same_work(run)
    count, tokens = parameters(run), s.steps * s.batch_size * s.length
    seconds, by = None, "not known: finish a run, or give --time-steps"
    for known, whose in (((run.arm, *key), ""), (key, " of other arms")):
        if speeds.get(known):
            rate = statistics.median(speeds[known])
            # Forward alone is about a third of a training step.
            evaluations = -(-s.steps // s.evaluate_every)
            seconds, by = (tokens + evaluations * validation / 3) / rate, f"{word}{whose}"
            break
    for known in ((run.arm, *key), key):
        if known in peaks:
            return Cost(count, tokens, seconds, by, peaks[known], "finished runs")
    return Cost(count, tokens, seconds, by, _memory(s, count), "formula")


def _memory(settings: Settings, count: int) -> float:
    """Bytes, roughly: weights, gradients and AdamW's two means; activations; and the logits, their
    logarithms and gradients."""
    rows = settings.micro_batch_size or settings.batch_size
    tokens = rows * settings.length
    width = 2 if settings.precision != "no" else 4
    activations = tokens * (settings.layers * _NUMBERS * width * settings.dim + 3 * 4 * 256)
    return _PROCESS + 16 * count + activations


def timed(run: RunSpec, steps: int, corpus: Corpus) -> float:
    """Tokens a second in ``steps`` training steps of the run, in a folder that is thrown away."""
    short = dataclasses.replace(
        run.settings,
        steps=steps + 1,  # the first warms up and does not count
        warmup=0,
        evaluate_every=steps + 1,
        checkpoint_every=steps + 1,
        validation_bytes=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(short, run.arm, Path(folder) / "run", corpus=corpus)
        rates = read_metrics(Path(folder) / "run" / "metrics.csv")["tokens_per_second"]
    return float(statistics.median(rates[1:].tolist()))
