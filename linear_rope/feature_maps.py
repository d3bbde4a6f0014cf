"""Feature maps phi: R^D -> R^M with phi(x) >= 0, the kernels of linear attention.

A map is a module with `feature_dim` (M) and a `forward` that takes (..., D) and returns (..., M) in
at least float32. Maps whose features are exponentials set `log_space = True` and offer
`log_features`; `linear_rope.functional` then subtracts a running maximum before it takes exp.

To add one: a class here, a line in FEATURE_MAPS. The suite runs over that dict.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = [
    "FEATURE_MAPS",
    "EluPlusOne",
    "FeatureMap",
    "RandomFeatures",
    "Relu",
    "ReluRandomFeatures",
    "SoftmaxRandomFeatures",
    "advance_random_features",
    "make_feature_map",
    "orthogonal_gaussian",
]


def log_floor(dtype: torch.dtype) -> float:
    """The smallest logarithm of an exponential feature: exp(-30) = 9.4e-14 in float32.

    A product of two such features (8.8e-27) is a normal number, and so is its inverse times any
    gradient, so a denominator made of them is never 0.
    """
    return -300.0 if dtype == torch.float64 else -30.0


def peak_floor(dtype: torch.dtype) -> float:
    """How far below its maximum an exponential feature may lie: exp(-40) = 4.2e-18 in float32.

    A query's largest feature is 1, so a denominator is not below this either. It must be low,
    because the largest features of a query and of a key can lie far apart and the kernel is then a
    sum of small terms; it cannot be lower, because the gradient of a quotient with rotated terms
    divides by the denominator twice.
    """
    return -300.0 if dtype == torch.float64 else -40.0


def full_precision(x: Tensor) -> Tensor:
    """x in at least float32: float16 reaches 65504 only, and its exp is 0 from -17.4 on."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class FeatureMap(nn.Module):
    """Base class: phi maps (..., head_dim) to (..., feature_dim), non-negative.

    Attributes:
        head_dim, feature_dim: D and M.
        log_space: True if phi is an exponential and `log_features` returns its logarithm.
    """

    log_space = False

    def __init__(self, head_dim: int, feature_dim: int) -> None:
        super().__init__()
        if head_dim < 1 or feature_dim < 1:
            raise ValueError(
                f"head_dim={head_dim} and features={feature_dim} must both be at least 1"
            )
        self.head_dim = head_dim
        self.feature_dim = feature_dim

    def log_features(self, x: Tensor) -> Tensor:
        """log phi(x), for maps with `log_space`."""
        raise TypeError(f"{type(self).__name__} is not an exponential feature map (log_space)")

    def extra_repr(self) -> str:
        return f"{self.head_dim} -> {self.feature_dim}"


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
        x = full_precision(x)
        return x.clamp(log_floor(x.dtype), 0.0).exp() + x.relu()


class Relu(FeatureMap):
    """phi(x) = max(x, 0) + eps; M = D. eps (1e-3, as in Performer) keeps denominators above 0.

    Source: the ReLU kernel of Choromanski et al. 2020 (arXiv 2009.14794) without projection.
    """

    def __init__(self, head_dim: int, eps: float = 1e-3) -> None:
        super().__init__(head_dim, head_dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return full_precision(x).relu() + self.eps


class RandomFeatures(FeatureMap):
    """Base of FAVOR+: a projection W (M, D) of orthogonal random directions.

    Args:
        head_dim: D.
        features: M; default int(D ln D) as in Performer, rounded up to even (rotation needs pairs).
        redraw_interval: steps between redraws of W; None never redraws.
        seed: makes the draws reproducible; None takes one from torch's global generator.

    W is redrawn only by `advance()` (or `advance_random_features(model)`), which the training loop
    calls once an optimizer step: with interval r, the calls r, 2r, 3r ... redraw. `forward` never
    draws and never counts, so evaluation, activation checkpointing and compiled graphs see a
    constant. W, the step count and the seed are in `state_dict`; draw number i is a function of
    (seed, i), so that replicas that share the seed (as after DistributedDataParallel's first
    broadcast; with broadcast_buffers=False give all of them one seed) and resumed runs redraw the
    same matrix.

    Source: Choromanski et al. 2020, arXiv 2009.14794, section 2.3-2.4.
    """

    projection: Tensor
    seed: Tensor
    steps: Tensor

    def __init__(
        self,
        head_dim: int,
        features: int | None = None,
        *,
        redraw_interval: int | None = None,
        seed: int | None = None,
    ) -> None:
        if features is None:
            features = max(2, int(head_dim * math.log(max(1, head_dim))))
            features += features % 2
        super().__init__(head_dim, features)
        if redraw_interval is not None and redraw_interval < 1:
            raise ValueError(
                f"redraw_interval={redraw_interval} must be at least 1 step; None never redraws"
            )
        self.redraw_interval = redraw_interval
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        here = torch.empty(0).device  # the meta device inside `with torch.device("meta")`
        self.register_buffer("projection", torch.empty(features, head_dim))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seed", torch.full((), seed, dtype=torch.int64))
        if here.type != "meta":
            self._draw(seed, 0)

    @property
    def scale(self) -> float:
        """D^(-1/4): phi(q) . phi(k) then estimates the kernel of q . k / sqrt(D)."""
        return self.head_dim**-0.25

    def reset(self, seed: int) -> None:
        """Start again from another seed: step 0, draw 0."""
        with torch.no_grad():
            self.steps.zero_()
            self.seed.fill_(seed)
        self._draw(seed, 0)

    def advance(self) -> None:
        """Count one optimizer step; redraw the projection when the schedule says so."""
        with torch.no_grad():
            self.steps += 1
        if self.redraw_interval is not None:
            draw, early = divmod(int(self.steps), self.redraw_interval)
            if not early:
                self._draw(int(self.seed), draw)

    def _draw(self, seed: int, number: int) -> None:
        # Mix the two numbers so that neighbouring seeds and draws do not share a stream.
        generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % (2**63))
        drawn = orthogonal_gaussian(self.feature_dim, self.head_dim, generator)
        with torch.no_grad():
            self.projection.copy_(drawn)

    def _project(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.projection.to(x.dtype).mT


class SoftmaxRandomFeatures(RandomFeatures):
    """FAVOR+: phi(x) = M^(-1/2) exp(W x' - |x'|^2 / 2), x' = x / D^(1/4).

    E[phi(q) . phi(k)] = exp(q . k / sqrt(D)), the kernel of softmax attention. The estimate's
    relative variance grows like exp(|q' + k'|^2): for unit-variance inputs of width 128 it is
    useless (about 150 % off with M = 1024), for small norms it is good.

    Source: Choromanski et al. 2020, arXiv 2009.14794, lemma 1 (positive features).
    """

    log_space = True

    def log_features(self, x: Tensor) -> Tensor:
        x = full_precision(x)
        half_square = x.square().sum(-1, keepdim=True) * (0.5 * self.scale**2)
        return self._project(x) - half_square - 0.5 * math.log(self.feature_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.log_features(x).exp()


class ReluRandomFeatures(RandomFeatures):
    """FAVOR+ with a generalised kernel: phi(x) = max(W x / D^(1/4), 0) + eps.

    Source: Choromanski et al. 2020, arXiv 2009.14794, section 2.2 and appendix B (Performer-ReLU);
    eps = 1e-3 as there keeps denominators above 0.
    """

    def __init__(
        self,
        head_dim: int,
        features: int | None = None,
        *,
        redraw_interval: int | None = None,
        seed: int | None = None,
        eps: float = 1e-3,
    ) -> None:
        super().__init__(head_dim, features, redraw_interval=redraw_interval, seed=seed)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self._project(full_precision(x)).relu() + self.eps


FEATURE_MAPS: dict[str, Callable[..., FeatureMap]] = {
    "elu+1": EluPlusOne,
    "relu": Relu,
    "favor+": SoftmaxRandomFeatures,
    "favor+relu": ReluRandomFeatures,
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


def orthogonal_gaussian(rows: int, width: int, generator: torch.Generator | None = None) -> Tensor:
    """`rows` random vectors, each N(0, I), orthogonal within each group of `width` of them.

    Directions are Haar-distributed (`torch.nn.init.orthogonal_`), lengths are those of independent
    Gaussian vectors (arXiv 2009.14794, section 2.4). float32 on the CPU, whatever the defaults.
    """
    blocks = []
    for start in range(0, rows, width):
        square = torch.empty(width, width, dtype=torch.float32, device="cpu")
        torch.nn.init.orthogonal_(square, generator=generator)
        blocks.append(square[: rows - start])
    gaussian = torch.randn(rows, width, dtype=torch.float32, device="cpu", generator=generator)
    return torch.cat(blocks) * gaussian.norm(dim=-1, keepdim=True)


def advance_random_features(model: nn.Module) -> None:
    """Count one optimizer step in every random feature map of `model`; redraw those that are due.

    Call it once after each optimizer step. Maps without `redraw_interval` keep their projection.
    """
    for module in model.modules():
        if isinstance(module, RandomFeatures):
            module.advance()
