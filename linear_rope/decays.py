"""How fast a head forgets: log decays for `linear_attention`, fixed or learned from the input.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,        g_t <= 0, one number a head and token

A head of constant decay g has the time-scale tau = -1/g tokens: what it holds is worth 1/e after
tau tokens. Both modules map (batch, time, dim) to g as (batch, head, time), in float32 at least;
the sums over time belong to `linear_rope.causal`, which takes differences before exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope.feature_base import full_precision
from linear_rope.projection import Projection
from linear_rope.rotary_variants import parse
from linear_rope.scaling import build

__all__ = [
    "BIAS",
    "DECAYS",
    "FixedDecay",
    "LearnedDecay",
    "bias_of",
    "make_decay",
    "retnet_rates",
    "spread",
]

DECAYS = ("none", "fixed", "retnet", "learned")

# sigmoid(3) = 0.953: a time-scale of 20.6 tokens.
BIAS = 3.0

# Where learned decays start unless told otherwise: tokens, the first and the last head.
TIME_SCALES = (4.0, 4096.0)

# A shorter time-scale keeps nothing that a number could hold: exp(-1 / 0.01) is 4e-44.
SHORTEST = 0.01


def spread(heads: int, first: float, last: float) -> list[float]:
    """Time-scales in tokens, a head each, from `first` to `last` in equal ratios.

    A single head gets their geometric mean.

    Raises:
        ValueError: no head, or a time-scale below `SHORTEST` or not finite.
    """
    if heads < 1:
        raise ValueError(f"heads={heads} must be at least 1")
    for tau in (first, last):
        if not SHORTEST <= tau < math.inf:
            raise ValueError(
                f"a time-scale of {tau} tokens must be finite and at least {SHORTEST}: exp(-1/tau) "
                "is what is left after a token"
            )
    if heads == 1:
        return [math.sqrt(first * last)]
    return [first * (last / first) ** (h / (heads - 1)) for h in range(heads)]


def retnet_rates(heads: int) -> tuple[float, float]:
    """First and last exponent of RetNet's rates: 5 and 4 + heads (arXiv 2307.08621, eq. 8)."""
    return 5.0, 4.0 + heads


def bias_of(tau: float) -> float:
    """The b with sigmoid(b) = exp(-1/tau): the gate's bias for a time-scale of tau tokens."""
    # log(p / (1 - p)) with p = exp(-1/tau); expm1 keeps its digits where p is close to 1.
    return -math.log(math.expm1(1.0 / tau))


class FixedDecay(nn.Module):
    """gamma_h = 1 - 2^(-e_h), the same for every token: g = log(gamma_h) (RetNet's decay).

    RetNet has e_h = 5 + h (arXiv 2307.08621, eq. 8): `exponents=retnet_rates(heads)`, or
    decay="retnet". A rate of exponent e is a time-scale of about 2^e tokens, so the longest grows
    with the number of heads, and the shortest is 31. Nothing here is learned, and nothing enters
    `state_dict`.

    Args:
        heads: key heads.
        exponents: of the first and of the last head, the others in equal steps between them. The
            default, 2 to 5, remembers 3.5 to 31 tokens. On bytes that was better than RetNet's
            rates: in the recipe, after 0.82 million tokens, 2.749 bits per byte against 3.001 for
            5 to 8 (one seed; results/mixing).

    Raises:
        ValueError: no head, or an exponent that is not positive (2^-0 = 1 would keep nothing).
    """

    def __init__(self, heads: int, exponents: Sequence[float] = (2.0, 5.0)) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads={heads} must be at least 1")
        if len(exponents) != 2 or not all(0.0 < e < math.inf for e in exponents):
            raise ValueError(
                f"exponents={tuple(exponents)} must be two positive numbers, those of the first "
                "and of the last head, such as (5, 8)"
            )
        first, last = (float(e) for e in exponents)
        self.heads, self.exponents = heads, (first, last)

    def log_decay(self) -> list[float]:
        """log(1 - 2^(-e_h)), a head each."""
        first, last = self.exponents
        step = (last - first) / (self.heads - 1) if self.heads > 1 else 0.0
        return [math.log1p(-(2.0 ** -(first + step * h))) for h in range(self.heads)]

    def reset_parameters(self) -> None:
        """There are none: for callers that reset whatever module they find."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, dim) -> g (batch, head, time); of x only its shape, dtype and device."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        # Made where it is needed: numbers from the host would make a GPU wait for them.
        exponents = torch.linspace(*self.exponents, self.heads, dtype=dtype, device=x.device)
        g = torch.log1p(-torch.exp2(-exponents))
        return g[:, None].expand(x.shape[0], self.heads, x.shape[1])

    def extra_repr(self) -> str:
        return f"heads={self.heads}, exponents={self.exponents}"


class LearnedDecay(Projection):
    """g = logsigmoid(W x + b), a scalar a head and token (gated as in arXiv 2312.06635, where it is
    a vector).

    A `Projection` whose bias starts at given time-scales; its parameters are `weight` and `bias`.
    With time_scales = (tau_0, tau_1), head h starts at sigmoid(b_h) = exp(-1/tau_h), the tau_h in
    equal ratios from tau_0 to tau_1. With None every head starts at b = 3, which is 20.6 tokens.

    With normed inputs and weights of standard deviation 1/sqrt(dim), W x is about a standard normal
    variable, so that single tokens spread around a head's time-scale by factors of e and 1/e. The
    time-scale of the mean g is shorter, for long ones by sqrt(e), since a mean is ruled by the
    tokens that forget most: 3.0 to 2480 tokens for 4 to 4096. (With `nn.Linear`'s own weights, of
    standard deviation 1/sqrt(3 dim), by exp(1/6): 3.6 to 3470.)

    In the runs named at `FixedDecay`, heads from 4 to 4096 tokens and b = 3 were not told apart
    (2.734 and 2.729 bits per byte). The longest heads are there for longer windows.

    The product W x + b is in the layer's dtype (bfloat16 keeps a bias of 7, tau = 1100, to 0.016,
    1.6 % of tau), the logarithm in float32 at least.

    Args:
        dim: width of x. heads: key heads.
        time_scales: of the first and of the last head, in tokens, or None.
        bias: where all heads start without time-scales.

    Raises:
        ValueError: sizes below 1, time-scales that are not positive, a bias that is not finite.
    """

    bias: nn.Parameter

    def __init__(
        self,
        dim: int,
        heads: int,
        time_scales: tuple[float, float] | None = None,
        *,
        bias: float = BIAS,
    ) -> None:
        if dim < 1 or heads < 1:
            raise ValueError(f"dim={dim} and heads={heads} must both be at least 1")
        if not math.isfinite(bias):
            raise ValueError(f"bias={bias} of a decay must be finite")
        # Before the projection is made, for it resets its parameters itself.
        self.biases = [float(bias)] * heads
        # As floats, so that equal ones print alike: the marks of states are made of that.
        self.time_scales = None if time_scales is None else tuple(map(float, time_scales))
        if time_scales is not None:
            self.biases = [bias_of(tau) for tau in spread(heads, *time_scales)]
        super().__init__(dim, heads)

    def reset_parameters(self) -> None:
        """Weights as in `nn.Linear`, drawn from the global generator; then `reset_bias`."""
        super().reset_parameters()
        self.reset_bias()

    def reset_bias(self) -> None:
        """The bias back to where it starts; for callers that draw the weights themselves."""
        with torch.no_grad():
            self.bias.copy_(torch.tensor(self.biases, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, dim) -> g (batch, head, time), in float32 at least."""
        return F.logsigmoid(full_precision(super().forward(x))).transpose(1, 2)

    def extra_repr(self) -> str:
        start = f"bias={self.biases[0]}" if self.time_scales is None else self.time_scales
        return f"{self.in_features}, heads={self.out_features}, start={start}"


def make_decay(text: str, dim: int, heads: int) -> FixedDecay | LearnedDecay | None:
    """A decay from what a configuration can hold.

    Args:
        text: "none"; "fixed" (`FixedDecay`; options first and last: the exponents of the first and
            of the last head); "retnet" (the same with RetNet's own exponents, `retnet_rates`, and
            no options); or "learned" (`LearnedDecay`; options first and last: their
            time-scales in tokens, 4 and 4096 by default; or bias: where all heads start alike, such
            as bias=3): NAME or NAME:OPTION=VALUE,OPTION=VALUE, like "learned:first=4,last=4096".
        dim: width of the layer's input. heads: key heads.

    Raises:
        ValueError: an unknown name or option, a value that does not fit.
    """
    try:
        name, options = parse(text)
    except ValueError:
        raise ValueError(
            f"decay={text!r} must be a text, NAME or NAME:OPTION=VALUE,OPTION=VALUE, each option "
            "once, such as 'learned:first=4,last=4096'"
        ) from None
    words = [f"{key}={value!r}" for key, value in options.items() if isinstance(value, str)]
    if words:
        raise ValueError(f"decay={text!r} has {words[0]}, which must be a number")

    def fixed(first: float = 2.0, last: float = 5.0) -> FixedDecay:
        return FixedDecay(heads, (first, last))

    def learned(
        first: float | None = None, last: float | None = None, bias: float | None = None
    ) -> LearnedDecay:
        if bias is not None and (first, last) != (None, None):
            raise ValueError(
                f"decay={text!r} says twice where the heads start; give bias, or first and last"
            )
        if bias is not None:
            return LearnedDecay(dim, heads, None, bias=bias)
        longest, shortest = TIME_SCALES[1], TIME_SCALES[0]
        scales = (shortest if first is None else first, longest if last is None else last)
        return LearnedDecay(dim, heads, scales)

    def retnet() -> FixedDecay:
        return FixedDecay(heads, retnet_rates(heads))

    known = {"none": lambda: None, "fixed": fixed, "retnet": retnet, "learned": learned}
    made: FixedDecay | LearnedDecay | None = build("decay", name, known, options)
    return made
