"""performer-pytorch's own `PerformerLM` as an arm, as that package ships it.

Its rotation comes before its feature map, and numerator and denominator are of the same features.
What it has beside that, and the other arms have not:

- FAVOR+ features of its own (int(D ln D) a head, drawn anew every 1000 training steps), whose keys
  are divided by one maximum over all of a head's tokens, those to come included, with 1e-4 added;
- fixed sinusoids of size 1 added to the embeddings beside the rotation, or without rotation a
  learned table of positions, which ends at the training length;
- biases in the feed-forward layer and in the norms;
- on a CPU, and without pytorch-fast-transformers' kernel, a causal sum that loops over pieces and
  keeps a state for each token of one: slow, and much memory.

It keeps no state, so it reads no longer window than that of training. Initial values are drawn as
those of the other arms (`linear_rope.initialization`).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from linear_rope.initialization import initialize

from .errors import UserError
from .methods import PERFORMER

__all__ = ["PerformerConfig", "PerformerModel"]


@dataclass(frozen=True)
class PerformerConfig:
    """Sizes of a `PerformerModel`, under the names that `linear_rope.Config` has for them.

    Args:
        vocab_size, dim, layers, heads, dropout, init_std: as there.
        max_length: longest window, with or without rotation.
        rotary: rotation before the feature map, or none and a learned table of positions.
        attention: what marks such a config among others.
    """

    vocab_size: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    max_length: int = 256
    rotary: bool = True
    init_std: float | None = None
    attention: str = PERFORMER

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "max_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if self.dim % self.heads:
            raise ValueError(f"heads={self.heads} does not divide dim={self.dim}; choose a divisor")
        if self.dim % 2 or self.dim // self.heads % 2:
            raise ValueError(
                f"dim={self.dim} and its heads of width {self.dim // self.heads} must be even: "
                "sinusoids and rotations come in pairs"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PerformerConfig:
        """The config saved as a dict; unknown keys are refused by name."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown config keys: {', '.join(unknown)}")
        return cls(**values)


class PerformerModel(nn.Module):
    """`PerformerLM`: tokens (batch, time) -> logits (batch, time, vocab_size).

    Raises:
        UserError: performer-pytorch is not installed; when called, a window over `max_length`.
    """

    def __init__(self, config: PerformerConfig) -> None:
        super().__init__()
        self.config = config
        # It forms its projections on the CPU, whatever device a model is described on.
        device = torch.get_default_device()
        with torch.device("cpu"), contextlib.redirect_stdout(io.StringIO()):
            # (Each layer prints that it has no CUDA kernel.)
            self.inner = _performer_lm()(
                num_tokens=config.vocab_size,
                max_seq_len=config.max_length,
                dim=config.dim,
                depth=config.layers,
                heads=config.heads,
                dim_head=config.dim // config.heads,
                causal=True,
                tie_embed=True,  # as the other arms have it, for equal parameters
                rotary_position_emb=config.rotary,
                emb_dropout=config.dropout,
                ff_dropout=config.dropout,
                attn_dropout=config.dropout,
            )
        self.inner.to(device)

    def initialize(self, seed: int, features_seed: int | None = None) -> None:
        """Draw every parameter anew, from (seed, its name), and the random features, from
        (features_seed, or seed)."""
        initialize(self, seed, self.config.layers, init_std=self.config.init_std)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed if features_seed is None else features_seed)
            for module in self.modules():
                create: Any = getattr(module, "create_projection", None)
                if create is not None:  # drawn on the CPU: the same on every device
                    cast(Tensor, module.projection_matrix).copy_(create())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        if tokens.shape[1] > self.config.max_length:
            raise UserError(
                f"PerformerLM reads at most max_length={self.config.max_length} tokens, got "
                f"{tokens.shape[1]}; it has no state to go on from"
            )
        return cast(Tensor, self.inner(tokens))


def _performer_lm() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports what torch and Python have deprecated
            return importlib.import_module("performer_pytorch").PerformerLM
    except ImportError as error:
        raise UserError(
            f"this arm needs performer-pytorch ({error}): pip install 'linear_rope[performer]'"
        ) from error
