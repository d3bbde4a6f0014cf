"""What a model is trained to predict, as data: names, units, and the words about them.

Bits per byte (of the next byte, from those before it) and bits per masked byte (of a hidden one,
whose neighbors on both sides are seen) are different quantities. Each objective therefore has
columns of its own in the log, and no table or figure takes runs of two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CAUSAL", "MLM", "OBJECTIVES", "Objective", "objective_named"]


@dataclass(frozen=True)
class Objective:
    """One objective.

    Attributes:
        name: as ``--objective`` takes it.
        description: one sentence.
        unit: of its losses, in logs, tables and on axes.
        models: what its models are called in titles.
        vocab_size: symbols that its models read: the 256 bytes, and perhaps a mask.
        causal: whether its models see only what comes before.
    """

    name: str
    description: str
    unit: str
    models: str
    vocab_size: int
    causal: bool

    @property
    def train_column(self) -> str:
        """The training loss in the log, such as ``train_bits_per_byte``."""
        return f"train_{self.unit.replace(' ', '_')}"

    @property
    def validation_column(self) -> str:
        """The validation loss in the log, such as ``validation_bits_per_byte``."""
        return f"validation_{self.unit.replace(' ', '_')}"

    @property
    def per(self) -> str:
        """What the unit is a share of: "byte" or "masked byte"."""
        return self.unit.removeprefix("bits per ")


CAUSAL = Objective(
    name="causal",
    description="Each byte is predicted from those before it.",
    unit="bits per byte",
    models="Byte-level language models",
    vocab_size=256,
    causal=True,
)
MLM = Objective(
    name="mlm",
    description="15 % of the bytes are hidden and predicted from both sides.",
    unit="bits per masked byte",
    models="Byte-level masked language models",
    vocab_size=257,
    causal=False,
)
OBJECTIVES: Mapping[str, Objective] = MappingProxyType({o.name: o for o in (CAUSAL, MLM)})


def objective_named(name: str) -> Objective:
    """The objective of that name; a ``ValueError`` that lists the known ones otherwise."""
    if name not in OBJECTIVES:
        raise ValueError(f"--objective {name!r} is unknown; known ones: {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
