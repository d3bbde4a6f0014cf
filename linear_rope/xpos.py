"""xPos: rotation with a decay of its own for each pair of features, and how it streams.

    weight(m, n) ~ sum_j zeta_j^((m - n)/512) (R_m q_m)_j . (R_n k_n)_j,   0 < zeta_j < 1

The paper gives queries zeta^(m/512) and keys zeta^(-n/512), which overflows far from position 0.
Only m - n matters, so here both count from a nearby origin: a call is cut into pieces over which
exponents stay small, and the state is scaled from the origin of one piece to that of the next.
A state always stands at its own `position`, so that nothing needs to be added to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_rope.causal import checked_product
from linear_rope.positions import can_read, has_values
from linear_rope.rotary import Rotary

__all__ = ["XPos", "fade_clock", "fading_product"]

# Keys grow by at most e^8 within a piece: far from overflow, and some 3000 positions.
EXPONENT = 8.0


@dataclass(frozen=True)
class XPos(Rotary):
    """Rotation whose pairs also fade with distance, pair j by zeta_j^(1/scale_base) a position.

        zeta_j = (2j/d + gamma) / (1 + gamma),   d = rotated width

    In `linear_attention` only, causal, and after the feature map: the decay is applied there, to
    the features above and below the line alike (as `log_decay` is), so that an unrotated
    denominator stays the sum of what the numerator weighs, and outputs do not vanish as the context
    grows. Calling an `XPos` itself only rotates. Features that are not rotated do not fade.

    Args:
        gamma: above 0; the fastest pair has zeta_0 = gamma / (1 + gamma).
        scale_base: positions over which pair j fades by zeta_j.
        others: see `Rotary`.

    Source: Sun et al. 2022, arXiv 2212.10554, section 2.3 and algorithm 1 (gamma 0.4, base 512).
    """

    gamma: float = 0.4
    scale_base: float = 512.0

    # Positions over which the fastest pair fades by about e^-8; as a number, see `rotated_width`.
    reach: int = field(init=False, repr=False, compare=False)

    title: ClassVar[str] = "xPos"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "scale_base"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value} of xPos must be a positive number")
        reach = EXPONENT * self.scale_base / -math.log(self.gamma / (1 + self.gamma))
        object.__setattr__(self, "reach", max(1, round(reach)))

    def zeta(self, device: torch.device | str | None = None) -> Tensor:
        """zeta_j, float64, (rotated width / 2,)."""
        j = torch.arange(0, self.rotated_width, 2, dtype=torch.float64, device=device)
        return (j / self.rotated_width + self.gamma) / (1 + self.gamma)

    def log_fade(self) -> Tensor:
        """What each feature's logarithm loses a position (<= 0), float64 on the CPU, (width,)."""
        log = self.zeta("cpu").log() / self.scale_base
        log = log.repeat(2) if self.pairing == "half" else log.repeat_interleave(2)
        return F.pad(log, (0, self.width - self.rotated_width))


def fade_clock(
    positions: Tensor,
    *,
    batch: int,
    start: Tensor | None,
    after: Tensor,
    key_mask: Tensor | None,
    fresh: Tensor | None,
    title: str = XPos.title,
) -> Tensor:
    """How far each row has come since its state, at each token and at its end: (batch, time + 1).

    It only grows: it stands still at pads, whatever their position is, and where a document begins
    (there the state is forgotten, and distances to what is before it mean nothing).

    Args:
        positions: (time,) or (batch, time); start, after: (batch,), the positions at which the
            given state (None: none) and the returned one stand.
        key_mask: (batch, time), True at real tokens; fresh: the same shape, True where a document
            begins.
        title: what fades, for errors.

    Raises:
        ValueError: positions that go back within a document.
    """
    at = positions.expand(batch, -1)
    begin = torch.zeros_like(after) if start is None else start
    line = torch.cat([begin[:, None], at, after[:, None]], dim=1)
    real = torch.ones_like(at, dtype=torch.bool) if key_mask is None else key_mask
    real = F.pad(real, (1, 1), value=True)
    order = torch.arange(line.shape[1], device=line.device)
    last = torch.where(real, order, 0).cummax(-1).values[:, :-1]  # the real token before each
    steps = line[:, 1:] - line.gather(1, last)
    counts = real[:, 1:]
    if fresh is not None and fresh.shape[1]:
        document = fresh.cumsum(-1)
        document = torch.cat([torch.zeros_like(document[:, :1]), document, document[:, -1:]], 1)
        counts = counts & (document[:, 1:] == document.gather(1, last))
    steps = torch.where(counts, steps, 0)
    if can_read(steps) and steps.numel() and int(steps.min()) < 0:
        raise ValueError(
            f"positions must not descend under {title} (nor begin before the state's): keys would "
            f"grow with their distance; found a step of {int(steps.min())}"
        )
    return steps.clamp(min=0).cumsum(-1)


def fading_product(
    rotary: XPos,
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
    """`causal_product` with a fixed decay for each feature.

        o_t = sum_{n<=t} sum_f exp(fade_f (c_t - c_n)) q_tf k_nf v_n,   fade = rotary.log_fade()

    Args:
        clock: c, see `fade_clock`.
        others: see `causal_product`. The state stands at the clock's 0 before, at its end after.
    """
    wide = torch.float32 if q.device.type == "mps" else torch.float64
    fade, clock = rotary.log_fade().to(q.device, wide), clock.to(wide)

    def faded(distance: Tensor) -> Tensor:  # (batch, time) -> (batch, 1, time, features)
        return (distance.unsqueeze(-1) * fade).exp().to(q.dtype).unsqueeze(1)

    outs, begin, stands = [], 0, torch.zeros_like(clock[:, :1])
    for length in _pieces(clock, rotary.reach):
        part = slice(begin, begin + length)
        origin = clock[:, begin : begin + 1]
        if state is not None:
            state = state * faded(origin - stands).mT
        out, state = checked_product(
            q[:, :, part] * faded(clock[:, part] - origin),
            k[:, :, part] * faded(origin - clock[:, part]),
            v[:, :, part],
            state=state,
            log_decay=None if log_decay is None else log_decay[:, :, part],
            fresh=None if fresh is None else fresh[:, part],
            **form,
        )
        outs.append(out)
        begin, stands = begin + length, origin
    assert state is not None
    return torch.cat(outs, dim=2), state * faded(clock[:, -1:] - stands).mT


def _pieces(clock: Tensor, limit: int) -> list[int]:
    """Numbers of tokens that add up to all; no row's clock moves by `limit` within one piece."""
    time = clock.shape[1] - 1
    if time == 1:
        return [1]  # there is nothing to cut, and a GPU need not be waited for
    if time == 0 or clock.shape[0] == 0 or not has_values(clock):
        # Without values (a trace) steps are taken to be 1, as they are unless ids were given.
        return [min(limit, time - i) for i in range(0, time, limit)] or [0]
    travelled = F.pad(clock[:, :-1].diff(dim=1).amax(0).cumsum(0), (1, 0))
    number = (travelled / limit).floor()
    return torch.unique_consecutive(number, return_counts=True)[1].tolist()
