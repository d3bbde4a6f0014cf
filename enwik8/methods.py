"""The arms of the comparison, as data: feature map x position method (x learned decay); recipes.

An arm is a name and the fields of ``linear_rope.model.Config`` that it sets. Everything else (size,
length, dropout, ...) is shared by all arms and comes from the settings of the run. To add an arm,
add a row to one of the tables below. (A model from elsewhere has a config of its own, which
`enwik8.tasks` tells by ``attention``: see `enwik8.performer`.)

Arms that have more than the plain ones have a narrower feed-forward layer (``mlp_ratio``), so that
all have the parameters of ``softmax-rope`` within 1 % at 4 layers, width 128, 4 heads. Exceptions
are a learned table of positions (`Method.has_table`): 4 % at 256 positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["DEFAULT_ARMS", "METHODS", "PERFORMER", "Method", "find"]

PERFORMER = "performer-pytorch"  # the ``attention`` of arms that are `enwik8.performer` models


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
    def has_table(self) -> bool:
        """Whether it learns a vector for each position of a window."""
        return self.overrides.get("position") == "learned" or self.overrides.get("rotary") is False

    @property
    def needs_length(self) -> bool:
        """Whether the model is made for a longest window (``max_length``)."""
        return (
            self.overrides.get("position") in ("learned", "cosformer")
            or self.overrides.get("attention") == PERFORMER
        )

    @property
    def needs_causal(self) -> bool:
        """Whether it makes sense in a causal model only: it follows the order of the tokens."""
        has = self.overrides.get
        if has("attention") == PERFORMER:
            return True
        looks_back = has("short_conv") or has("token_shift") or has("local_heads")
        decays = has("decay", "none") != "none"
        selective = str(has("rotary_scaling", "")).startswith("selective")
        return bool(looks_back) or decays or selective


# Attention: name -> (description, fields).
_ATTENTION: dict[str, tuple[str, dict[str, object]]] = {
    "elu": ("linear attention, elu(x)+1 features", {"feature_map": "elu+1"}),
    "relu": ("linear attention, relu features", {"feature_map": "relu"}),
    "favor": ("linear attention, FAVOR+ features of the softmax kernel", {"feature_map": "favor+"}),
}
_HEDGEHOG = "linear attention, Hedgehog's learned features (arXiv 2402.04347)"

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
    "alibi": ("a bias by distance (ALiBi, arXiv 2108.12409)", {"position": "alibi"}),
}

_ELU: dict[str, object] = {"attention": "linear", **_ATTENTION["elu"][1]}
_SOFTMAX: dict[str, object] = {"attention": "softmax", **_SOFTMAX_POSITIONS["rope"][1]}
# What the feed-forward layer gives up for the dim^2 weights of a gate; the dim (4 + 4 + 4) of a
# convolution over q, k and v; the projection of a selective rotation.
_GATE = {"output_gate": True, "mlp_ratio": 3.5}
_CONV = {"short_conv": 4}
# `linear_rope.recipes.BEST`, which is not imported, for listing the arms takes no torch; a test
# compares the two.
_BEST: dict[str, object] = {
    **_ELU,
    **_POSITIONS["rope"][1],
    "denominator": "none",
    "output_norm": True,
    "decay": "learned",
    **_GATE,
    "block": "llama",
}
_DENOMINATOR = {"denominator": "unrotated", "output_norm": False}

# eq. 19 with another denominator, each without and with an output norm; name -> (words, fields).
# The norm takes any positive factor out again, so that with it an unrotated denominator and none
# are one function, but for the norm's eps; a rotated one may still turn the sign.
_DIVISORS: dict[str, tuple[str, dict[str, object]]] = {
    "": ("denominator unrotated (RoFormer, eq. 19)", {}),
    "-rotated": ("denominator rotated too", {"denominator": "rotated"}),
    "-undivided": ("no denominator", {"denominator": "none"}),
}
# What the feed-forward layer gives up for Hedgehog's matrix a head.
_NARROW = {"mlp_ratio": 3.8984375}
_PERMUTE: dict[str, object] = {"position": "permute", "denominator": "rotated"}
_PERFORMER_LM = (
    "performer-pytorch's PerformerLM as shipped: FAVOR+ features of its own, biases, a causal sum "
    "that loops on a CPU"
)

# Methods of other papers and packages: name -> (description, fields).
_OTHERS: dict[str, tuple[str, dict[str, object]]] = {
    "elu-rope-expand": (
        "linear attention, elu(x)+1 features each doubled into (f cos, f sin); RoPE after the "
        "feature map, so that no weight exceeds the unrotated one",
        {**_ELU, **_POSITIONS["rope"][1], "feature_map": "elu+1-expand"},
    ),
    "cosformer": (
        "linear attention, relu features re-weighted by cos(pi/2 (m - n) / length) (cosFormer, "
        "arXiv 2202.08791)",
        {
            "attention": "linear",
            "feature_map": "relu-expand",
            "position": "cosformer",
            "denominator": "rotated",
        },
    ),
    "relu-permute": (
        "linear attention, relu features permuted by position, with a ratio (PermuteFormer, arXiv "
        "2109.02377)",
        {"attention": "linear", "feature_map": "relu", **_PERMUTE},
    ),
    "elu-permute": (
        "linear attention, elu(x)+1 features permuted by position, with a ratio (PermuteFormer, "
        "arXiv 2109.02377)",
        {**_ELU, **_PERMUTE},
    ),
    **{
        f"hedgehog-{position}": (
            f"{_HEDGEHOG}; {_POSITIONS[position][0]}",
            {
                "attention": "linear",
                "feature_map": "hedgehog",
                **_POSITIONS[position][1],
                **_NARROW,
            },
        )
        for position in ("none", "rope")
    },
    "performer-lm": (
        f"{_PERFORMER_LM}; RoPE before the feature map and sinusoids added to the input",
        {"attention": PERFORMER, "rotary": True},
    ),
    "performer-lm-learned": (
        f"{_PERFORMER_LM}; learned positions added to the input, no RoPE",
        {"attention": PERFORMER, "rotary": False},
    ),
}

# Recipes, and each with one thing changed: name -> (description, fields).
_RECIPES: dict[str, tuple[str, dict[str, object]]] = {
    "best": (
        "the recipe: elu(x)+1 features, RoPE after them, learned decay from 4 to 4096 tokens over "
        "the heads, an output norm instead of the denominator, output gate, LLaMA's block",
        _BEST,
    ),
    "best-no-rope": ("the recipe without rotation", {**_BEST, "position": "none"}),
    "best-no-decay": ("the recipe without decay", {**_BEST, "decay": "none"}),
    "best-no-gate": (
        "the recipe without output gate",
        {**_BEST, "output_gate": False, "mlp_ratio": 4.0},
    ),
    "best-rope-before": (
        "the recipe with RoPE before the feature map",
        {**_BEST, "rotate": "before"},
    ),
    "best-conv": (
        "the recipe with a convolution of 4 tokens on q, k and v",
        {**_BEST, **_CONV, "mlp_ratio": 3.453125},
    ),
    "best-shift": ("the recipe with token shift", {**_BEST, "token_shift": True}),
    "best-qk-norm": ("the recipe with normed queries and keys", {**_BEST, "qk_norm": True}),
    "best-selective": (
        "the recipe with selective rotation in place of RoPE",
        {**_BEST, "rotary_scaling": "selective", "mlp_ratio": 3.3984375},
    ),
    "best-selective-rope": (
        "the recipe with selective rotation that starts as RoPE",
        {**_BEST, "rotary_scaling": "selective:bias=1", "mlp_ratio": 3.3984375},
    ),
    "best-selective-gate": (
        "the recipe with selective rotation and its phase gate a head",
        {**_BEST, "rotary_scaling": "selective:gate=head", "mlp_ratio": 3.3984375},
    ),
    "best-selective-normal": (
        "the recipe with selective rotation that starts as its authors' does",
        {**_BEST, "rotary_scaling": "selective:convolution=normal", "mlp_ratio": 3.3984375},
    ),
    "best-bias": (
        "the recipe with all heads' decay from 21 bytes",
        {**_BEST, "decay": "learned:bias=3"},
    ),
    "best-fixed": (
        "the recipe with fixed decay, 1 - 2^-2 to 1 - 2^-5 over the heads",
        {**_BEST, "decay": "fixed"},
    ),
    "best-retnet": (
        "the recipe with RetNet's fixed decay, 1 - 2^-5 to 1 - 2^-8 over four heads",
        {**_BEST, "decay": "retnet"},
    ),
    "best-local": (
        "the recipe with one head of softmax attention to the last 64 bytes",
        {**_BEST, "local_heads": 1},
    ),
    "best-gpt": ("the recipe in GPT's block", {**_BEST, "block": "gpt"}),
    "best-both": (
        "the recipe with the denominator of eq. 19 under its output norm, which takes it out again",
        {**_BEST, "denominator": "unrotated"},
    ),
    "best-denominator": (
        "the recipe with the denominator of eq. 19 instead of the output norm",
        {**_BEST, **_DENOMINATOR},
    ),
    **{
        f"best-denominator-{name}": (
            f"the same {words}",
            {**_BEST, **_DENOMINATOR, **fields},
        )
        for name, words, fields in (
            ("no-rope", "without rotation", {"position": "none"}),
            ("no-decay", "without decay", {"decay": "none"}),
            ("rope-before", "with RoPE before the feature map", {"rotate": "before"}),
            ("gpt", "in GPT's block", {"block": "gpt"}),
        )
    },
    "elu-rope-fixed-decay": (
        f"{_ATTENTION['elu'][0]}; {_POSITIONS['rope'][0]}; fixed decay per head",
        {**_ELU, **_POSITIONS["rope"][1], "decay": "fixed"},
    ),
    "elu-none-fixed-decay": (
        f"{_ATTENTION['elu'][0]}; no positions; fixed decay per head",
        {**_ELU, **_POSITIONS["none"][1], "decay": "fixed"},
    ),
    "elu-rope-decay-spread": (
        f"{_ATTENTION['elu'][0]}; {_POSITIONS['rope'][0]}; learned decay from 4 to 4096 tokens "
        "over the heads",
        {**_ELU, **_POSITIONS["rope"][1], "decay": "learned"},
    ),
    "elu-selective-decay": (
        f"{_ATTENTION['elu'][0]}; selective rotation after the feature map; learned decay from 4 "
        "to 4096 tokens over the heads",
        {
            **_ELU,
            **_POSITIONS["rope"][1],
            "rotary_scaling": "selective",
            "decay": "learned",
            "mlp_ratio": 3.8984375,
        },
    ),
    "softmax-rope-llama": (
        "softmax attention; RoPE; LLaMA's block",
        {**_SOFTMAX, "block": "llama"},
    ),
    "softmax-rope-shift": (
        "softmax attention; RoPE; token shift",
        {**_SOFTMAX, "token_shift": True},
    ),
    "softmax-rope-qk-norm": (
        "softmax attention; RoPE; normed queries and keys",
        {**_SOFTMAX, "qk_norm": True},
    ),
    "softmax-rope-norm": (
        "softmax attention; RoPE; output norm",
        {**_SOFTMAX, "output_norm": True},
    ),
    "softmax-rope-gate": ("softmax attention; RoPE; output gate", {**_SOFTMAX, **_GATE}),
    **{
        f"softmax-rope-gate{name}-llama": (
            f"softmax attention; RoPE; output gate{words}; LLaMA's block",
            {**_SOFTMAX, **_GATE, "block": "llama", **fields},
        )
        for name, words, fields in (
            ("", "", {}),
            ("-norm", " and norm, as the recipe has them", {"output_norm": True}),
            ("-qk-norm", "; normed queries and keys", {"qk_norm": True}),
            ("-conv", "; a convolution of 4 tokens", {**_CONV, "mlp_ratio": 3.453125}),
        )
    },
    "softmax-rope-conv": (
        "softmax attention; RoPE; a convolution of 4 tokens on q, k and v",
        {**_SOFTMAX, **_CONV, "mlp_ratio": 3.953125},
    ),
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
                    f"{what}; {where}; learned decay per head and token, all heads from 21 bytes",
                    {**linear, "decay": "learned:bias=3"},
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
    for divisor, (how, more) in _DIVISORS.items():
        linear = {**_ELU, **_POSITIONS["rope"][1], **more}
        what = f"{_ATTENTION['elu'][0]}; RoPE after the feature map, {how}"
        if divisor:
            rows.append(Method(f"elu-rope{divisor}", what, linear))
        normed = {**linear, "output_norm": True}
        rows.append(Method(f"elu-rope{divisor}-norm", f"{what}; output norm", normed))
    for table in (_OTHERS, _RECIPES):
        rows += [Method(name, what, fields) for name, (what, fields) in table.items()]
    return {row.name: row for row in rows}


METHODS: Mapping[str, Method] = MappingProxyType(_methods())
DEFAULT_ARMS: tuple[str, ...] = ("elu-none", "elu-rope")


def find(name: str) -> Method:
    """The arm of that name; a ``ValueError`` that lists the known ones otherwise."""
    if name not in METHODS:
        raise ValueError(f"arm {name!r} is unknown; known arms: {', '.join(METHODS)}")
    return METHODS[name]
