"""The arms of the comparison, as data: feature map x position method (x learned decay).

An arm is a name and the fields of ``linear_rope.model.Config`` that it sets. Everything else (size,
length, dropout, ...) is shared by all arms and comes from the settings of the run. To add an arm,
add a row to one of the tables below, or a whole ``Method`` to ``METHODS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["DEFAULT_ARMS", "METHODS", "Method", "find"]


@dataclass(frozen=True)
class Method:
    """One arm: what it is called, what it is, and the model's fields that make it."""

    name: str
    description: str
    overrides: Mapping[str, object] = field(default_factory=dict)

    @property
    def random_features(self) -> bool:
        """Whether the feature map is made of random projections (FAVOR+)."""
        return str(self.overrides.get("feature_map", "")).startswith("favor")

    @property
    def needs_causal(self) -> bool:
        """Whether it makes sense in a causal model only: decay follows the order of a state."""
        return self.overrides.get("decay", "none") != "none"


# Attention: name -> (description, fields).
_ATTENTION: dict[str, tuple[str, dict[str, object]]] = {
    "elu": ("linear attention, elu(x)+1 features", {"feature_map": "elu+1"}),
    "relu": ("linear attention, relu features", {"feature_map": "relu"}),
    "favor": ("linear attention, FAVOR+ features of the softmax kernel", {"feature_map": "favor+"}),
}

# Positions of linear attention: name -> (description, fields).
_POSITIONS: dict[str, tuple[str, dict[str, object]]] = {
    "none": ("no positions", {"position": "none"}),
    "sinusoidal": ("sinusoidal positions added to the input", {"position": "sinusoidal"}),
    "learned": ("learned positions added to the input", {"position": "learned"}),
    "rope-before": (
        "RoPE on queries and keys before the feature map",
        {"position": "rotary", "rotate": "before"},
    ),
    "rope": (
        "RoPE after the feature map, denominator unrotated (RoFormer, eq. 19)",
        {"position": "rotary", "rotate": "after", "denominator": "unrotated"},
    ),
}

# Softmax attention has no feature map, so RoPE has one place only.
_SOFTMAX_POSITIONS: dict[str, tuple[str, dict[str, object]]] = {
    **{name: _POSITIONS[name] for name in ("none", "sinusoidal", "learned")},
    "rope": ("RoPE on queries and keys (RoFormer, eq. 16)", {"position": "rotary"}),
}


def _methods() -> dict[str, Method]:
    rows: list[Method] = []
    for attention, (what, fields) in _ATTENTION.items():
        for position, (where, more) in _POSITIONS.items():
            linear = {"attention": "linear", **fields, **more}
            rows.append(Method(f"{attention}-{position}", f"{what}; {where}", linear))
            rows.append(
                Method(
                    f"{attention}-{position}-decay",
                    f"{what}; {where}; learned decay per head and token",
                    {**linear, "decay": "learned"},
                )
            )
    for position, (where, more) in _SOFTMAX_POSITIONS.items():
        rows.append(
            Method(
                f"softmax-{position}",
                f"softmax attention; {where}",
                {"attention": "softmax", **more},
            )
        )
    return {row.name: row for row in rows}


METHODS: Mapping[str, Method] = MappingProxyType(_methods())
DEFAULT_ARMS: tuple[str, ...] = ("elu-none", "elu-rope")


def find(name: str) -> Method:
    """The arm of that name; a ``ValueError`` that lists the known ones otherwise."""
    if name not in METHODS:
        raise ValueError(f"arm {name!r} is unknown; known arms: {', '.join(METHODS)}")
    return METHODS[name]
