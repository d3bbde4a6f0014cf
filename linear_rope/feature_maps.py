"""Feature maps phi: R^D -> R^M, the kernels phi(q) . phi(k) of linear attention.

| Name | phi(x) | Features M | D = 64 | Source (arXiv) |
|---|---|---|---|---|
| `elu+1` | x + 1 for x > 0, else exp(x) | D | 64 | 2006.16236, eq. 7 |
| `relu` | max(x, 0) + 0.001 | D | 64 | 2009.14794, no projection |
| `favor+` | exp(Wx' - x'.x'/2) / sqrt(M) | `features`, D ln D | 266 | 2009.14794, lemma 1 |
| `favor+relu` | max(Wx', 0) + 0.001 | `features`, D ln D | 266 | 2009.14794, sec. 2.2 |
| `exp` | exp(x) | D | 64 | 2402.04347 |
| `hedgehog` | softmax(Wx), softmax(-Wx), W learned | 2 D | 128 | 2402.04347 |
| `taylor` | 1, x', products x'_i x'_j: 1 + s + s^2/2 | 1 + D + D(D+1)/2 | 2146 | 2402.18668 |
| `dpfp` | r_i r_(i+j), r = max([x, -x], 0), j <= nu | 2 D nu | 128 | 2102.11174 |
| `elu+1-expand` | f -> (f, 0) for each f of `elu+1` | 2 D | 128 | see `Expand` |
| `relu-expand` | f -> (f, 0) for each f of `relu` | 2 D | 128 | see `Expand` |

x' = x / D^(1/4), s = q . k / sqrt(D). The state of a head is M x (E + 1) numbers for values of
width E, and time and memory grow with M; `exp` and `favor+` also carry a decay, their stabilizer.

A map is a module with `feature_dim` (M) and a `forward` that takes (..., D) and returns (..., M) in
at least float32. Maps whose features are exponentials set `log_space = True` and offer
`log_features`; `linear_rope.functional` then subtracts a running maximum before it takes exp.

To add one: a class here, a line in FEATURE_MAPS. The suite runs over that dict.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from linear_rope.elementwise import elu_plus_one, relu
from linear_rope.feature_base import FeatureMap, Map, full_precision, log_floor
from linear_rope.random_features import (
    RandomFeatures,
    ReluRandomFeatures,
    SoftmaxRandomFeatures,
    advance_random_features,
    orthogonal_gaussian,
)

__all__ = [
    "FEATURE_MAPS",
    "Dpfp",
    "EluPlusOne",
    "Exp",
    "Expand",
    "FeatureMap",
    "Hedgehog",
    "RandomFeatures",
    "Relu",
    "ReluRandomFeatures",
    "SoftmaxRandomFeatures",
    "Taylor",
    "advance_random_features",
    "full_precision",
    "log_floor",
    "make_feature_map",
    "orthogonal_gaussian",
    "resolve_feature_map",
]


class EluPlusOne(FeatureMap):
    """phi(x) = elu(x) + 1 = x + 1 for x > 0, exp(x) otherwise; M = D.

    Computed as exp(min(x, 0)) + max(x, 0): the textbook form exp(x) - 1 + 1 is exactly 0 below
    -16.6 in float32 (-8.3 in float16, -6.3 in bfloat16). Below `log_floor` (-30) the tail is flat
    at exp(-30), so a feature, and with it a denominator, cannot reach 0.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 7.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return elu_plus_one(full_precision(x))


class Relu(FeatureMap):
    """phi(x) = max(x, 0) + eps; M = D. eps (1e-3, as in Performer) keeps denominators above 0.

    Source: the ReLU kernel of Choromanski et al. 2020 (arXiv 2009.14794) without projection.
    """

    def __init__(self, head_dim: int, eps: float = 1e-3) -> None:
        super().__init__(head_dim, head_dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return relu(full_precision(x), self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps:g}"


class Exp(FeatureMap):
    """phi(x) = exp(x), feature by feature; M = D.

    `linear_attention` subtracts running maxima of x, so that any x is safe; features 30 below the
    largest one of a query, or of the keys so far, are flat there (`log_floor`). On its own,
    `forward` overflows above x = 88 in float32.

    Source: the exponential map studied by Zhang et al. 2024 (arXiv 2402.04347).
    """

    log_space = True

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)

    def log_features(self, x: Tensor) -> Tensor:
        return full_precision(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.log_features(x).exp()


class Hedgehog(FeatureMap):
    """phi(x) = [softmax(W x), softmax(-W x)], softmax over the features, W learned; M = 2 D.

    W is the identity at the start, and serves queries and keys alike. Logarithms are kept above
    `log_floor`, so that a denominator cannot reach 0. Fitting W to the weights of a softmax model
    (the paper's distillation) is up to the training loop.

    Args:
        head_dim: D.
        heads: None has one W for all heads, `weight` (D, D), and takes any (..., D). A number has
            one W a head as in the paper, `weight` (heads, D, D), and takes (..., head, time, D);
            with grouped-query attention give the number of key heads: the query heads that share
            a key head share its W. (`RotaryLinearAttention(feature_map="hedgehog")` does.)

    Raises:
        ValueError: heads below 1, or an input whose heads are no multiple of them.

    Source: Zhang et al. 2024 (Hedgehog, arXiv 2402.04347), without the bias.
    """

    per_head = True  # a layer that makes this map by its name gives it its number of key heads

    def __init__(self, head_dim: int, *, heads: int | None = None) -> None:
        super().__init__(head_dim, 2 * head_dim)
        if heads is not None and heads < 1:
            raise ValueError(f"heads={heads} must be at least 1; None shares one map")
        self.heads = heads
        each = () if heads is None else (heads,)
        self.weight = nn.Parameter(torch.empty(*each, head_dim, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W = identity."""
        with torch.no_grad():
            self.weight.copy_(torch.eye(self.head_dim, device=self.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        x = full_precision(x)
        weight = self.weight.to(x.dtype)
        if self.heads is not None:
            if x.ndim < 3 or x.shape[-3] == 0 or x.shape[-3] % self.heads:
                raise ValueError(
                    f"this map has weights for {self.heads} heads and needs (..., head, time, "
                    f"{self.head_dim}) with a multiple of them, got {tuple(x.shape)}; "
                    "make it with the heads of the keys, or with heads=None"
                )
            weight = weight.repeat_interleave(x.shape[-3] // self.heads, 0)
        y = x @ weight.mT
        log = torch.cat([y.log_softmax(-1), (-y).log_softmax(-1)], dim=-1)
        return log.clamp(min=log_floor(x.dtype)).exp()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.heads}"


class Taylor(FeatureMap):
    """phi(q) . phi(k) = 1 + s + s^2 / 2, s = q . k / sqrt(D): exp(s) to second order.

    Features, in this order: 1; x_i / D^(1/4); x_i^2 / sqrt(2 D); x_i x_(i+j) / sqrt(D) for the
    shifts j = 1 .. D/2 around the circle, which meet each pair once. That is 1 + D + D(D+1)/2 in
    place of the 1 + D + D^2 of all ordered pairs; a zero is added to an odd number, for rotation
    turns pairs.

    Single features may be negative (`non_negative` is False), yet the kernel is not: 1 + s + s^2/2
    = ((1 + s)^2 + 1) / 2 >= 1/2, so unrotated denominators are positive. Its terms cancel, which
    costs digits once |q|^2 |k|^2 / D approaches 1e6 in float32: normalize queries and keys.
    M grows with D^2; the paper uses D = 16 (M = 154).

    Source: Arora et al. 2024 (Based, arXiv 2402.18668).
    """

    non_negative = False

    def __init__(self, head_dim: int) -> None:
        real = 1 + head_dim + head_dim * (head_dim + 1) // 2
        super().__init__(head_dim, real + real % 2)
        self._padding = real % 2

    def forward(self, x: Tensor) -> Tensor:
        x = full_precision(x)
        D = self.head_dim
        y = x * D**-0.25
        squares = y.square() * 0.5**0.5
        # With an even D the last shift meets each of its pairs twice: the first half is enough.
        products = shifted_products(y, D // 2)[..., : D * (D - 1) // 2]
        parts = [torch.ones_like(x[..., :1]), y, squares, products]
        if self._padding:
            parts.append(torch.zeros_like(x[..., :1]))
        return torch.cat(parts, dim=-1)


class Dpfp(FeatureMap):
    """Deterministic parameter-free projection: r_i r_(i+j) + eps, r = max([x, -x], 0).

    i runs around the circle of the 2 D entries of r, j = 1 .. nu; M = 2 D nu. At most half of the
    entries of r are above 0, so features are sparse and two of them are often orthogonal; eps
    (1e-3, not in the paper) keeps denominators above 0.

    Args:
        head_dim: D.
        nu: shifts, 1 .. 2 D - 1: the more, the finer the products.
        eps: added to every feature.

    Source: Schlag et al. 2021 (DPFP, arXiv 2102.11174), without its sum normalization.
    """

    def __init__(self, head_dim: int, *, nu: int = 1, eps: float = 1e-3) -> None:
        super().__init__(head_dim, 2 * head_dim * max(1, nu))
        if not 1 <= nu < 2 * head_dim:
            raise ValueError(
                f"nu={nu} must be between 1 and 2 D - 1 = {2 * head_dim - 1} for heads of width "
                f"{head_dim}"
            )
        self.nu = nu
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = full_precision(x)
        return shifted_products(torch.cat([x.relu(), (-x).relu()], dim=-1), self.nu) + self.eps

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nu={self.nu}, eps={self.eps:g}"


def shifted_products(x: Tensor, shifts: int) -> Tensor:
    """x_i x_(i+j), i around the circle, for j = 1 .. shifts: (..., shifts * width), j outermost."""
    width = x.shape[-1]
    # Windows of the doubled vector are its rotations: a view, so one product does it all.
    around = torch.cat([x, x[..., :shifts]], dim=-1).unfold(-1, width, 1)[..., 1:, :]
    return (x.unsqueeze(-2) * around).flatten(-2)


class Expand(FeatureMap):
    """Each feature f of a non-negative map doubled into the pair (f, 0); M = 2 x the map's.

    The interleaved `Rotary` of width M turns the pair at position m into (f cos m theta, f sin m
    theta), so that a weight is

        sum_f  f(q_m) f(k_n) cos((m - n) theta_f)  <=  sum_f  f(q_m) f(k_n),  in magnitude too:

    no weight exceeds the unrotated one, their magnitudes sum to at most 1 over the unrotated
    denominator, and outputs stay within max |v|. In plain rotation features f and g of a pair also
    meet as f(q) g(k) sin, which this bound lacks. The price is the doubled state. The bound needs
    pairing="interleaved" and rotate="after"; a base of any width will do, odd ones too.

    Args:
        base: the map to double; it is a submodule, so its weights are saved and moved.

    Raises:
        ValueError: a base that is no `FeatureMap`, or one with negative features, where the bound
            does not hold.
    """

    def __init__(self, base: FeatureMap) -> None:
        if not isinstance(base, FeatureMap):
            raise ValueError(f"base={base!r} must be a FeatureMap, see make_feature_map")
        if not base.non_negative:
            raise ValueError(
                f"base={base!r} has negative features, whose rotated weights are not bounded by "
                "the unrotated ones; expand a non-negative map"
            )
        super().__init__(base.head_dim, 2 * base.feature_dim)
        self.base = base
        self.log_space = base.log_space

    def log_features(self, x: Tensor) -> Tensor:
        log = self.base.log_features(x)
        return torch.stack([log, torch.full_like(log, -math.inf)], dim=-1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        features = self.base(x)
        return torch.stack([features, torch.zeros_like(features)], dim=-1).flatten(-2)


class ExpandedEluPlusOne(Expand):
    """`Expand` of `EluPlusOne`."""

    def __init__(self, head_dim: int) -> None:
        super().__init__(EluPlusOne(head_dim))


class ExpandedRelu(Expand):
    """`Expand` of `Relu`: what `linear_rope.cosformer` re-weights."""

    def __init__(self, head_dim: int, eps: float = 1e-3) -> None:
        super().__init__(Relu(head_dim, eps))


FEATURE_MAPS: dict[str, Callable[..., FeatureMap]] = {
    "elu+1": EluPlusOne,
    "relu": Relu,
    "favor+": SoftmaxRandomFeatures,
    "favor+relu": ReluRandomFeatures,
    "exp": Exp,
    "hedgehog": Hedgehog,
    "taylor": Taylor,
    "dpfp": Dpfp,
    "elu+1-expand": ExpandedEluPlusOne,
    "relu-expand": ExpandedRelu,
}


def make_feature_map(name: str, head_dim: int, **options: object) -> FeatureMap:
    """Build the map called `name` for heads of width `head_dim`.

    Raises:
        ValueError: an unknown name (the message lists the known ones), or an option the map lacks.
    """
    if name not in FEATURE_MAPS:
        raise ValueError(
            f"feature_map={name!r} is unknown; choose one of: {', '.join(FEATURE_MAPS)}"
        )
    try:
        return FEATURE_MAPS[name](head_dim, **options)
    except TypeError as error:
        raise ValueError(f"feature map {name!r} does not take these options: {error}") from None


def resolve_feature_map(feature_map: str | Map, q: Tensor) -> Map:
    """The map that an argument means, for queries of that width.

    Raises:
        ValueError: it is no name of a map without weights and no function, or of another width.
    """
    if isinstance(feature_map, str):
        # Graphs do not see through a cache, and do not need it.
        by_name = _by_name if torch.compiler.is_compiling() else _by_name_once
        return by_name(feature_map, q.shape[-1])
    if not callable(feature_map):
        raise ValueError(
            f"feature_map={feature_map!r} must be a name, such as 'elu+1', a FeatureMap, or a "
            "function of (..., head width)"
        )
    if isinstance(feature_map, FeatureMap) and feature_map.head_dim != q.shape[-1]:
        raise ValueError(
            f"feature_map was made for heads of width {feature_map.head_dim}, "
            f"but q has width {q.shape[-1]}"
        )
    return feature_map


def _by_name(name: str, width: int) -> FeatureMap:
    phi = make_feature_map(name, width)
    if next(phi.buffers(), None) is not None or next(phi.parameters(), None) is not None:
        raise ValueError(
            f"feature_map={name!r} holds weights, which a function cannot keep: build it once with "
            f"make_feature_map({name!r}, {width}) and pass the module"
        )
    return phi


_by_name_once = lru_cache(maxsize=64)(_by_name)  # to make a module takes longer than a step
