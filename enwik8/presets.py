"""Settings of a run, and the presets, as data.

``Settings`` is the one list of everything that a run can be told. A preset is an instance of it; a
flag of the command line replaces one field. Which fields must stay equal when a run is resumed
says ``FREE_ON_RESUME``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from .flags import MOST_THREADS, check_seed, check_sizes, flag
from .methods import DEFAULT_ARMS, Method
from .objectives import objective_named

__all__ = ["FREE_ON_RESUME", "PRESETS", "Preset", "Settings", "model_fields"]


@dataclass(frozen=True)
class Settings:
    """Everything that a run can be told, apart from its arm and its folder."""

    corpus: str = "wiki-sample"
    """Text to train on: enwik8, wiki-sample, or the path of a file (raw, .gz, .xz or .zip)."""
    data_dir: str | None = None
    """Folder that downloaded corpora are kept in (none: ./data)."""
    objective: Literal["causal", "mlm"] = "causal"
    """causal: predict the next byte; mlm: predict hidden bytes from both sides, as BERT does."""

    layers: int = 4
    """Number of transformer blocks."""
    dim: int = 128
    """Width of the model."""
    heads: int = 4
    """Attention heads per block; must divide the width."""
    features: int | None = None
    """Random features per head (FAVOR+ arms only; none: the library's default)."""
    redraw_interval: int | None = None
    """Steps between redraws of the random features (FAVOR+ arms only; none: never)."""
    init_std: float | None = None
    """Standard deviation of the initial linear layers (none: 1/sqrt(fan in); GPT-2 has 0.02)."""
    dropout: float = 0.0
    """Probability of dropping an activation in training."""

    length: int = 256
    """Bytes in a training window."""
    batch_size: int = 16
    """Windows in one optimizer step, over all micro-batches and processes."""
    micro_batch_size: int | None = None
    """Windows computed at once; smaller needs less memory, same gradient (none: all)."""
    steps: int = 500
    """Optimizer steps. Tokens trained on = steps x batch size x length."""

    learning_rate: float = 2e-3
    """Highest learning rate, reached after the warm-up."""
    warmup: int = 50
    """Steps of linear warm-up."""
    final_learning_rate: float = 0.1
    """End of the cosine decay, as a fraction of the highest learning rate."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay; matrices only, never biases and norms."""
    beta1: float = 0.9
    """AdamW's decay rate of the gradient's running mean."""
    beta2: float = 0.95
    """AdamW's decay rate of the squared gradient's running mean."""
    clip: float = 1.0
    """Largest gradient norm; larger gradients are scaled down (0: no clipping)."""

    evaluate_every: int = 50
    """Steps between evaluations on the validation split (the last step is always evaluated)."""
    validation_bytes: int | None = None
    """Evaluate on that many first bytes of the validation split (none: all of it)."""
    checkpoint_every: int = 100
    """Steps between checkpoints (the last step, and an interrupted one, are always saved)."""
    keep_checkpoints: int = 1
    """Checkpoints to keep: the newest, checkpoint.pt, and those before it, checkpoint-STEP.pt."""
    tensorboard: bool = False
    """Write curves and samples of text for TensorBoard too, into the run's folder tensorboard."""

    seed: int = 0
    """Seed of everything random that has no seed of its own below."""
    data_seed: int | None = None
    """Seed of the order of the batches, and of what mlm hides (none: --seed)."""
    init_seed: int | None = None
    """Seed of the initial values (none: --seed)."""
    features_seed: int | None = None
    """Seed of the random features, FAVOR+ arms only (none: that of the initial values)."""
    dropout_seed: int | None = None
    """Seed of dropout (none: --seed)."""

    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision; no: float32."""
    cpu: bool = False
    """Stay on the CPU although an accelerator is there."""
    threads: int | None = None
    """CPU threads of PyTorch (none: as PyTorch chooses). 1 makes runs repeat bit by bit."""

    def check(self) -> None:
        """Refuse impossible values with a ``ValueError`` that names the flag.

        Not done at construction: the command line builds these objects while it parses, and would
        wrap the sentence into a report of its own.
        """
        objective_named(self.objective)
        counts = (
            *("layers", "dim", "heads", "features", "redraw_interval"),
            *("length", "batch_size", "micro_batch_size", "steps"),
            *("evaluate_every", "validation_bytes", "checkpoint_every"),
            "keep_checkpoints",
        )
        check_sizes(**{name: getattr(self, name) for name in counts})
        check_sizes(most=MOST_THREADS, threads=self.threads)
        if self.layers * self.dim**2 > 2**40:
            raise ValueError(
                f"--layers {self.layers} and --dim {self.dim} make a model of more than 10**12 "
                "parameters; choose smaller ones"
            )
        check_seed("seed" if self.data_seed is None else "data_seed", self.seeds["data"])
        if self.dim % self.heads:
            raise ValueError(
                f"--heads must divide --dim, got {self.heads} heads for width {self.dim}"
            )
        if self.init_std is not None and not 1e-30 <= self.init_std <= 1e30:
            raise ValueError(
                f"--init-std must lie in [1e-30, 1e30], what float32 can hold, got {self.init_std}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout must lie in [0, 1), got {self.dropout}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--learning-rate must be positive, got {self.learning_rate}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} must lie in [0, 1), got {getattr(self, name)}")
        if not 0 <= self.final_learning_rate <= 1:
            raise ValueError(
                "--final-learning-rate is a fraction of the highest rate and must lie in [0, 1], "
                f"got {self.final_learning_rate}"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"--weight-decay must not be negative, and finite, got {self.weight_decay}"
            )
        for name in ("warmup", "clip"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{flag(name)} must not be negative, got {getattr(self, name)}")

    @property
    def seeds(self) -> dict[str, int]:
        """The seeds in force, kept apart: ``data``, ``init``, ``features``, ``dropout``."""

        def own(seed: int | None) -> int:
            return self.seed if seed is None else seed

        initial = own(self.init_seed)
        return {
            "data": own(self.data_seed),
            "init": initial,
            "features": initial if self.features_seed is None else self.features_seed,
            "dropout": own(self.dropout_seed),
        }


# May differ when a run is resumed: they change how the run is watched or where it runs, not what
# is trained. (The text itself is compared by its SHA-256, so its path may change. The number of
# threads changes the last bits only, as another machine does.)
FREE_ON_RESUME = frozenset(
    {
        *("corpus", "data_dir", "evaluate_every", "checkpoint_every", "keep_checkpoints"),
        *("tensorboard", "cpu", "threads"),
    }
)


def model_fields(settings: Settings, method: Method) -> dict[str, object]:
    """Fields of an arm's config at the size of the settings, see `enwik8.tasks.make_config`.

    Raises:
        ValueError: the objective has no causal model, and the arm needs one.
    """
    objective = objective_named(settings.objective)
    if method.needs_causal and not objective.causal:
        raise ValueError(
            f"arm {method.name!r} cannot be trained with --objective {objective.name}: it "
            "follows the order of the tokens, and this objective sees both sides; use an arm "
            "without decay, convolution, shift, local heads and selective rotation, such as "
            "'elu-rope'"
        )
    fields: dict[str, object] = {
        "vocab_size": objective.vocab_size,
        "layers": settings.layers,
        "dim": settings.dim,
        "heads": settings.heads,
        "dropout": settings.dropout,
        "init_std": settings.init_std,
        **method.overrides,
    }
    if method.needs_length:
        fields["max_length"] = settings.length
    if method.random_features:
        fields["features"] = settings.features
        fields["redraw_interval"] = settings.redraw_interval
    return fields


@dataclass(frozen=True)
class Preset:
    """A named set of settings, and the arms that ``compare`` runs with it."""

    description: str
    settings: Settings
    arms: tuple[str, ...] = DEFAULT_ARMS


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "demo": Preset(
            "Two arms on the Wikipedia sample in a few minutes on two CPU cores.",
            Settings(
                steps=300,
                warmup=30,
                evaluate_every=25,
                validation_bytes=65_536,
            ),
        ),
        "small": Preset(
            "2.05 million tokens per arm, validated on the first 200,000 bytes of the split: ten "
            "arms in about an hour on a CPU.",
            # All 5 million bytes of enwik8's split, ten times over, would outlast the training.
            Settings(corpus="enwik8", steps=500, validation_bytes=200_000),
        ),
        "paper": Preset(
            "The size of RoFormer, section 4.4 (Performer on enwik8); needs an accelerator.",
            Settings(
                corpus="enwik8",
                layers=12,
                dim=768,
                heads=12,
                redraw_interval=1000,
                length=1024,
                batch_size=128,
                micro_batch_size=16,
                steps=100_000,
                learning_rate=1e-4,
                warmup=2000,
                evaluate_every=1000,
                checkpoint_every=1000,
                precision="bf16",
            ),
        ),
        "performer-example": Preset(
            "The size of performer-pytorch's enwik8 example; needs an accelerator.",
            Settings(
                corpus="enwik8",
                layers=6,
                dim=512,
                heads=8,
                redraw_interval=1000,
                length=4096,
                batch_size=16,
                micro_batch_size=4,
                steps=100_000,
                learning_rate=1e-4,
                warmup=1000,
                clip=0.5,
                evaluate_every=500,
                checkpoint_every=500,
                precision="bf16",
            ),
            arms=("favor-none", "favor-rope"),
        ),
    }
)
