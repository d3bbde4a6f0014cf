"""FAVOR+: random feature maps, the schedule of their redraws, and orthogonal directions.

Source: Choromanski et al. 2020, arXiv 2009.14794.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from linear_rope.counts import check_counts
from linear_rope.feature_base import FeatureMap, full_precision

__all__ = [
    "RandomFeatures",
    "ReluRandomFeatures",
    "SoftmaxRandomFeatures",
    "advance_random_features",
    "orthogonal_gaussian",
]


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
    _known: tuple[Tensor, int, int] | None = None  # `steps`, its version, and its value at that

    def __init__(
        self,
        head_dim: int,
        features: int | None = None,
        *,
        redraw_interval: int | None = None,
        seed: int | None = None,
    ) -> None:
        check_counts(optional=True, features=features, redraw_interval=redraw_interval)
        if features is None:
            features = max(2, int(head_dim * math.log(max(1, head_dim))))
            features += features % 2
        super().__init__(head_dim, features)
        self.redraw_interval = redraw_interval
        here = torch.empty(0).device  # the meta device inside `with torch.device("meta")`
        if seed is None:  # on the meta device nothing is kept of it, so that nothing is drawn
            seed = 0 if here.type == "meta" else int(torch.randint(2**62, (), device="cpu"))
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
            before = 0 if self.redraw_interval is None else self._count()
            self.steps += 1
        if self.redraw_interval is not None:
            count = before + 1
            if not self.steps.is_inference():  # those have no version
                self._known = (self.steps, self.steps._version, count)
            draw, early = divmod(count, self.redraw_interval)
            if not early:
                self._draw(int(self.seed), draw)

    def _count(self) -> int:
        """`steps` as a number, from memory unless something else has written to the buffer or put
        another in its place: to read it would wait for a GPU at each optimizer step."""
        if self._known is not None:
            steps, version, count = self._known
            if steps is self.steps and steps._version == version:
                return count
        return int(self.steps)

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
