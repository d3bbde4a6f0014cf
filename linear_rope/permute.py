"""PermuteFormer's relative positions: features change places, where a rotation would turn them.

    weight(m, n) = r^(m - n) (P^m phi(q_m)) . (P^n phi(k_n)),   0 < r <= 1

with a permutation P of a head's features, and a ratio r of its own (Chen 2021, arXiv 2109.02377).
A permutation is orthogonal, so a weight depends on m - n only; and it makes nothing negative, so
the permuted features serve in the denominator too, as the paper has it (denominator="rotated"):

    permute = Permute(phi.feature_dim, heads)
    linear_attention(q, k, v, feature_map=phi, rotary=permute, denominator="rotated")

In a model it is `Config(position="permute", denominator="rotated")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from linear_rope.causal import checked_product
from linear_rope.positions import resolve_positions

__all__ = ["Permute", "ratio_product"]


@dataclass(frozen=True)
class Permute:
    """The permutations of PermuteFormer, in the place of a `Rotary`.

    A power of a permutation is looked up in its cycles: P^m moves a feature m places along its
    cycle, m modulo the cycle's length. So every position costs the same and none is too far.

    As with `XPos` the ratio is applied in `linear_attention`, causal only, above and below the line
    alike; it counts positions, not tokens. Calling a `Permute` itself only permutes.

    Args:
        width: features of the vectors to permute, from 1 up.
        heads: key heads, each with a permutation of its own; a vector may have a multiple of them
            (query head h belongs to key head h // (query heads / heads)).
        seed: of the permutations, which are drawn uniformly.
        ratio: r of all heads, in (0, 1]; 1 fades nothing. None is the authors' choice for causal
            models, r_h = sigmoid(2 + 3 h / heads): 8 to about 150 positions.

    Attributes:
        permutations: (heads, width) int64, (P x)_f = x_permutations[f].
        cycles: the same by cycles, (4, heads, width) int64, see `_cycles`.

    Raises:
        ValueError: a width or a number of heads below 1, a ratio outside of (0, 1].
    """

    width: int
    heads: int = 1
    seed: int = 0
    ratio: float | None = None
    # They follow from the others, which alone make two permutations equal.
    permutations: Tensor = field(init=False, repr=False, compare=False)
    cycles: Tensor = field(init=False, repr=False, compare=False)

    axes: ClassVar[int] = 1
    title: ClassVar[str] = "a permutation that fades"

    def __post_init__(self) -> None:
        for name in ("width", "heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} of a permutation must be an integer from 1 up")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r} of a permutation must be an integer")
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise ValueError(
                f"ratio={self.ratio} of a permutation must be in (0, 1]; 1 fades nothing"
            )
        draws = torch.Generator("cpu").manual_seed(self.seed)
        drawn = [
            torch.randperm(self.width, generator=draws, device="cpu") for _ in range(self.heads)
        ]
        object.__setattr__(self, "permutations", torch.stack(drawn))
        object.__setattr__(self, "cycles", torch.stack([_cycles(p.tolist()) for p in drawn], 1))

    @property
    def log_fade(self) -> tuple[float, ...] | None:
        """What each head's logarithm loses a position (<= 0); None where nothing fades."""
        if self.ratio == 1:
            return None
        if self.ratio is not None:
            return (math.log(self.ratio),) * self.heads
        return tuple(-math.log1p(math.exp(-2 - 3 * h / self.heads)) for h in range(self.heads))

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """P^m x for x (batch, head, time, width) at positions m, (time,) or (batch, time)."""
        if x.shape[-1] != self.width or x.shape[1] % self.heads:
            raise ValueError(
                f"x has {x.shape[1]} heads of width {x.shape[-1]} but this permutation was made "
                f"for width {self.width} and heads={self.heads} (or a multiple of them)"
            )
        at = resolve_positions(x.shape[2], positions, batch=x.shape[0])
        order, start, place, length = self.cycles.to(x.device).unsqueeze(2)  # (head, 1, width)
        at = at[..., None, :, None]  # ([batch,] 1, time, 1)
        moved = start + (place + at) % length  # ([batch,] head, time, width)
        source = order.expand_as(moved).gather(-1, moved)
        source = source.repeat_interleave(x.shape[1] // self.heads, dim=-3)
        return x.gather(-1, source.expand(x.shape))


def _cycles(permutation: list[int]) -> Tensor:
    """(4, width): the features, cycle after cycle; and of each feature f where its cycle begins in
    that order, f's place in the cycle, and how long it is."""
    order: list[int] = []
    about = [(0, 0, 0)] * len(permutation)
    seen: set[int] = set()
    for first in range(len(permutation)):
        cycle: list[int] = []
        feature = first
        while feature not in seen:
            seen.add(feature)
            cycle.append(feature)
            feature = permutation[feature]
        for place, feature in enumerate(cycle):
            about[feature] = (len(order), place, len(cycle))
        order += cycle
    return torch.tensor([order, *zip(*about, strict=True)], dtype=torch.int64, device="cpu")


def ratio_product(
    permute: Permute,
    clock: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: Tensor | None,
    log_decay: Tensor | None,
    fresh: Tensor | None,
    **form: Any,
) -> tuple[Tensor, Tensor]:
    """`causal_product` of features that fade by the ratio of their head.

        o_t = sum_{n<=t} r^(c_t - c_n) (q_t . k_n) v_n

    Args:
        clock: c, (batch, time + 1), see `linear_rope.xpos.fade_clock`.
        others: see `causal_product`. The state stands at the clock's 0 before, at its end after.
    """
    wide = torch.float32 if q.device.type == "mps" else torch.float64
    log = torch.tensor(permute.log_fade, dtype=wide, device=q.device)
    steps = clock.to(wide).diff(dim=1, prepend=torch.zeros_like(clock[:, :1], dtype=wide))
    fade = log.repeat_interleave(k.shape[1] // permute.heads)[:, None] * steps[:, None]
    ratio, last = fade[..., :-1].to(q.dtype), fade[..., -1:, None].exp()
    both = ratio if log_decay is None else ratio + log_decay
    out, after = checked_product(q, k, v, state=state, log_decay=both, fresh=fresh, **form)
    return out, after * last.to(after.dtype)
