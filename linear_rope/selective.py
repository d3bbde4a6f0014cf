"""Selective rotation: each token says how far the clock of the rotation moves.

    a_t = temperature * gate_t * (conv(W x^)_t + exp(beta))       angle increment, a pair and head
    phase_t = a_1 + ... + a_t      and queries and keys of token t turn by phase_t

so that a query at m and a key at n differ by the increments between them, a_{n+1} + ... + a_m.
Constant increments are fixed RoPE (with positions counted from 1).

Source: Movahedi et al. 2025, "Selective Rotary Position Embedding", arXiv 2511.17388, and its
authors' implementation, which settles what the text leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope.mixing import ShortConvolution
from linear_rope.phases import GivenRotation, running_sum
from linear_rope.rotary import PAIRINGS
from linear_rope.rotary_variants import make_rotary, parse
from linear_rope.scaling import build, powers

__all__ = [
    "CONVOLUTIONS",
    "GATES",
    "TEMPERATURES",
    "GivenRotation",
    "SelectiveRotation",
    "SelectiveState",
    "check_unturned",
    "is_selective",
    "make_selective",
]

GATES = ("none", "head", "pair")
CONVOLUTIONS = ("identity", "normal")
TEMPERATURES = ("rope", "random-features")

# Standard deviation of the projections at the start, as in the authors' models.
STD = 0.02

# Added to squared norms, so that an input of 0 has a direction (none) and a gradient.
NORM_EPS = 1e-6


class SelectiveState(NamedTuple):
    """The past of a selective rotation, constant in size."""

    phase: Tensor  # (batch, head, pairs) float64, radians in [0, 2 pi]: of the last token
    recent: Tensor  # (batch, width - 1, head * pairs): the convolution's last inputs

    def detach(self) -> SelectiveState:
        return SelectiveState(*(x.detach() for x in self))

    def clone(self) -> SelectiveState:
        return SelectiveState(*(x.clone() for x in self))

    def to(self, *args: Any, **kwargs: Any) -> SelectiveState:
        """As `Tensor.to`, but the phase stays float64: in bfloat16 it would be another angle."""
        recent = self.recent.to(*args, **kwargs)
        return SelectiveState(self.phase.to(recent.device), recent)

    def index_select(self, rows: Tensor) -> SelectiveState:
        return SelectiveState(*(x.index_select(0, rows) for x in self))


torch.serialization.add_safe_globals([SelectiveState])


class SelectiveRotation(nn.Module):
    """Angles from the input, (batch, time, dim) -> cos and sin (batch, head, time, pairs).

    1. x^: x cut into `heads` slices, each divided by its Euclidean norm.
    2. W x^: one number a head and pair, by a product of two matrices (dim -> rank -> heads * pairs)
       or, with rank=None, a matrix a head from its own slice, of unit columns times a learned
       number.
    3. A causal convolution over time, `kernel` tokens wide, a filter a head and pair.
    4. With bias: plus exp(beta), positive: the part that does not depend on the input.
    5. With a gate: times sigmoid(W_g x^ + b), a number a head, or a head and pair.
    6. Times a fixed temperature a pair: for width = 2 * pairs
       "rope": temperature_max * theta^(-2j/width), theta 500000 by default;
       "random-features": tan(t_j / 2), t from 0 to theta * pi in equal steps (0 < theta < 1, 0.5 by
       default), scaled to a maximum of temperature_max: the frequencies of random features; pair 0
       never turns.
    7. Summed over time: the phase.

    **Precision.** Increments are formed in float32 at least, whatever the input and autocast, and
    summed exactly, as integers of 2^-62 turns, which wrap around with the angle. So an angle is off
    by the float64 rounding of the increments and no more, 1e-16 of the way it has come: after 10^6
    tokens as precise as that of `Rotary`. The state holds phases in [0, 2 pi], in float64, and
    gradients run through a sum in float64. Parameters stay float32 at least, also after `.half()`
    or `.to(torch.bfloat16)`, as those of `LearnedRotary`.

    **At the start.** Projections are normal of standard deviation 0.02 (full rank: columns of unit
    norm), beta and the gate's bias are 0, as in the authors' models. They draw the convolution from
    the same distribution (convolution="normal"), which makes increments of 1e-4 rad and less; by
    default it starts as the identity here (see `ShortConvolution`), and increments are some 3e-3
    rad. So without bias the rotation starts as almost none, with it (and no gate) as fixed RoPE of
    base theta: exp(0) = 1.

    **Left out** of the authors' implementation: a temperature that is learned, a gate a head of low
    rank, an activation of the convolution, and differences of features in its place; none of them
    is its default.

    Args:
        dim: width of x, a multiple of heads.
        heads: key heads: each has its angles, which its query heads share.
        pairs: features that turn, over 2 (after a feature map: half of its features).
        rank: of the projection, or None for the full one. kernel: tokens the convolution sees.
        gate: "none", "head" or "pair" (through `rank`, or 16). bias: whether there is exp(beta).
        convolution: its start, "identity" or "normal", see above.
        temperature, theta, temperature_max: see 6.
        pairing: which features turn together where the tables are used, see `Rotary`.

    Raises:
        ValueError: sizes and names that do not fit.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        pairs: int,
        *,
        rank: int | None = 16,
        kernel: int = 4,
        gate: str = "none",
        bias: bool = False,
        temperature: str = "rope",
        theta: float | None = None,
        temperature_max: float = 1.0,
        pairing: str = "interleaved",
        convolution: str = "identity",
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "heads": heads, "pairs": pairs, "kernel": kernel}
        for name, size in (sizes if rank is None else {**sizes, "rank": rank}).items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if dim % heads:
            raise ValueError(
                f"heads={heads} does not divide dim={dim}: each head reads its slice of the input"
            )
        for name, choice, known in (
            ("gate", gate, GATES),
            ("temperature", temperature, TEMPERATURES),
            ("pairing", pairing, PAIRINGS),
            ("convolution", convolution, CONVOLUTIONS),
        ):
            if choice not in known:
                raise ValueError(f"{name}={choice!r} is unknown; choose one of: {', '.join(known)}")
        if theta is None:
            theta = 500000.0 if temperature == "rope" else 0.5
        if not (theta >= 1.0 if temperature == "rope" else 0.0 < theta < 1.0):
            raise ValueError(
                f"theta={theta} does not fit temperature={temperature!r}: it must be at least 1 "
                "for 'rope', within (0, 1) for 'random-features'"
            )
        if not 0.0 < temperature_max < math.inf:
            raise ValueError(f"temperature_max={temperature_max} must be positive")
        if temperature == "random-features" and pairs < 2:
            raise ValueError("temperature='random-features' needs 2 pairs: the first never turns")
        self.dim, self.heads, self.pairs, self.kernel = dim, heads, pairs, kernel
        self.gating, self.pairing, self.convolution_start = gate, pairing, convolution
        self.temperature, self.theta, self.temperature_max = temperature, theta, temperature_max

        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype))

        out = heads * pairs
        self.down = self.up = self.full = self.scale = None
        if rank is None:
            self.full, self.scale = parameter(heads, dim // heads, pairs), parameter(heads)
        else:
            self.down, self.up = parameter(rank, dim), parameter(out, rank)
        self.convolution = ShortConvolution(out, kernel).to(dtype)
        self.beta = parameter(heads, pairs) if bias else None
        self.gate_down = parameter(rank or 16, dim) if gate == "pair" else None
        self.gate_up = self.gate_bias = None
        if gate != "none":
            gates = heads if gate == "head" else out
            self.gate_up = parameter(gates, dim if gate == "head" else rank or 16)
            self.gate_bias = parameter(gates)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """The start described above; `generator` (on the CPU) draws, or torch's global one."""
        with torch.no_grad():
            for weight in (self.down, self.up, self.full, self.gate_down, self.gate_up):
                if weight is not None and not weight.is_meta:
                    weight.copy_(STD * torch.randn(weight.shape, generator=generator, device="cpu"))
            for zero in (self.beta, self.gate_bias):
                if zero is not None:
                    zero.zero_()
            if self.scale is not None:
                self.scale.fill_(1.0)
            self.convolution.reset_parameters()
            filters = self.convolution.weight
            if self.convolution_start == "normal" and not filters.is_meta:
                filters.copy_(STD * torch.randn(filters.shape, generator=generator, device="cpu"))

    def temperatures(self, device: torch.device | str | None = None) -> Tensor:
        """(pairs,) float64: radians that a pair turns for an increment of 1."""
        if self.temperature == "rope":
            return self.temperature_max * powers(self.theta, 2 * self.pairs, device)
        t = torch.linspace(0, self.theta * math.pi, self.pairs, dtype=torch.float64, device=device)
        tangent = (t / 2).tan()  # sqrt((1 - cos t) / (1 + cos t))
        return self.temperature_max * tangent / tangent[-1]

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: SelectiveState | None = None,
        return_state: bool = False,
    ) -> Any:  # (cos, sin), or (cos, sin, SelectiveState) with return_state
        """The tables of this input.

        Args:
            x: (batch, time, dim).
            key_mask: (batch, time) bool, True at real tokens. Pads advance nothing.
            segment_ids: (batch, time), a document a run of one id (`resolve_segments`): each starts
                with phase 0; the first goes on from a state.
            state: of an earlier call, to continue; return_state: also return the new one.

        Returns:
            cos, sin: (batch, head, time, pairs) in x's dtype, at least float32, for
            `linear_rope.rotate` or `GivenRotation`; and the state.

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        self._check(x, state)
        home, dtype = x.device, torch.promote_types(x.dtype, torch.float32)
        with torch.autocast("cpu" if home.type == "meta" else home.type, enabled=False):
            steps, recent = self._increments(x, key_mask, segment_ids, state)
            start = None if state is None else state.phase
            phase, last = running_sum(steps, start, segment_ids)
            phase = phase.transpose(1, 2)
            cos, sin = phase.cos().to(home, dtype), phase.sin().to(home, dtype)
        return (cos, sin, SelectiveState(last, recent)) if return_state else (cos, sin)

    def _increments(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        segment_ids: Tensor | None,
        state: SelectiveState | None,
    ) -> tuple[Tensor, Tensor]:
        """a_t, (batch, time, head, pairs) float64, and what the convolution leaves behind."""
        # 1. Slices of unit norm.
        wide = torch.promote_types(x.dtype, self.convolution.weight.dtype)
        slices = x.to(wide).unflatten(-1, (self.heads, -1))
        slices = slices * (slices.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
        unit = slices.flatten(2)
        # 2. A number a head and pair.
        if self.full is not None and self.scale is not None:
            columns = F.normalize(self.full, dim=1) * self.scale[:, None, None]
            number = torch.einsum("bthi,hip->bthp", slices, columns.to(wide)).flatten(2)
        else:
            assert self.down is not None and self.up is not None
            number = F.linear(F.linear(unit, self.down.to(wide)), self.up.to(wide))
        # 3. The convolution.
        number, recent = self.convolution(
            number,
            key_mask=key_mask,
            segment_ids=segment_ids,
            state=None if state is None else state.recent,
            return_state=True,
        )
        # Apple's GPUs have no float64: from here on the CPU works for them.
        work = torch.device("cpu") if x.device.type == "mps" else x.device
        steps = number.to(work, torch.float64).unflatten(-1, (self.heads, self.pairs))
        # 4. - 6. Bias, gate, temperature.
        if self.beta is not None:
            steps = steps + self.beta.to(work, torch.float64).exp()
        if self.gate_up is not None and self.gate_bias is not None:
            inner = unit if self.gate_down is None else F.linear(unit, self.gate_down.to(wide))
            gate = F.linear(inner, self.gate_up.to(wide), self.gate_bias.to(wide)).sigmoid()
            steps = steps * gate.to(work, torch.float64).unflatten(-1, (self.heads, -1))
        steps = steps * self.temperatures(work)
        if key_mask is not None:  # a pad is no step in time
            steps = steps.masked_fill(~key_mask.to(work)[:, :, None, None], 0.0)
        return steps, recent

    def _check(self, x: Tensor, state: SelectiveState | None) -> None:
        if x.ndim != 3 or x.shape[-1] != self.dim or not x.is_floating_point():
            raise ValueError(
                f"x must be floating-point of shape (batch, time, {self.dim}), got {x.dtype} of "
                f"shape {tuple(x.shape)}"
            )
        if state is None:
            return
        want = (x.shape[0], self.heads, self.pairs)
        if not isinstance(state, SelectiveState) or state.phase.shape != want:
            got = type(state).__name__
            if isinstance(state, SelectiveState):
                got = f"phases of shape {tuple(state.phase.shape)}"
            raise ValueError(
                f"state must be the SelectiveState that this module returned, with phases of shape "
                f"(batch, head, pairs) = {want}, got {got}"
            )
        if state.phase.dtype != torch.float64:
            raise ValueError(
                f"state.phase must be float64, got {state.phase.dtype}: angles would be lost; use "
                "state.to(), which keeps it"
            )

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, heads={self.heads}, pairs={self.pairs}, gate={self.gating!r}, "
            f"temperature={self.temperature!r}, theta={self.theta}, pairing={self.pairing!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelectiveRotation:
        def keep_precision(x: Tensor) -> Tensor:
            y = fn(x)
            wide = torch.promote_types(y.dtype, torch.float32)
            return y if y.dtype == wide else x.to(y.device, wide)

        return super()._apply(keep_precision, recurse)


def is_selective(text: object) -> bool:
    """Whether a `rotary_scaling` asks for a rotation that reads its input."""
    return isinstance(text, str) and text.partition(":")[0].strip() == "selective"


def check_unturned(scaling: Any) -> None:
    """Refuses a `rotary_scaling` where nothing turns; an unknown one by its name, as anywhere."""
    if scaling is None:
        return
    if is_selective(scaling):
        make_selective(scaling, 4, 1, 4)
    else:
        make_rotary(4, scaling=scaling)
    raise ValueError(
        f"rotary_scaling={scaling!r} needs a rotation, got rotate='none'; omit it, or use "
        "rotate='after'"
    )


def make_selective(
    text: str,
    dim: int,
    heads: int,
    width: int,
    base: float = 10000.0,
    fraction: float = 1.0,
    pairing: str = "interleaved",
) -> SelectiveRotation:
    """A selective rotation from what a configuration can hold.

    Args:
        text: "selective", or "selective:OPTION=VALUE,..." with options of `SelectiveRotation`:
            rank (0 for the full projection), kernel, gate, bias (0 or 1), temperature, theta,
            temperature_max, convolution. "selective:convolution=normal" starts as its authors do.
        dim: width of the layer's input. heads: key heads.
        width: features that turn, even. pairing: see `Rotary`.
        base, fraction: those of `Rotary`, which only their defaults fit: all features turn, and
            theta takes the place of the base.

    Raises:
        ValueError: an unknown option, an odd width, a value that does not fit.
    """
    if (base, fraction) != (10000.0, 1.0):
        raise ValueError(
            "a selective rotation has theta for a base and turns all features: leave rotary_base "
            f"and rotary_fraction as they are, got {base} and {fraction}"
        )
    if width < 2 or width % 2:
        raise ValueError(
            f"a selective rotation turns features in pairs and needs an even width, got {width}; "
            "choose another head width or number of features"
        )

    def make(
        rank: int = 16,
        kernel: int = 4,
        gate: str = "none",
        bias: int = 0,
        temperature: str = "rope",
        theta: float | None = None,
        temperature_max: float = 1.0,
        convolution: str = "identity",
    ) -> SelectiveRotation:
        for name, value in (("rank", rank), ("kernel", kernel), ("bias", bias)):
            if not isinstance(value, int):
                raise ValueError(f"rotary_scaling={text!r}: {name} must be an integer")
        if bias not in (0, 1):
            raise ValueError(f"rotary_scaling={text!r}: bias must be 0 or 1")
        for name, number in (("theta", theta), ("temperature_max", temperature_max)):
            if isinstance(number, str):
                raise ValueError(f"rotary_scaling={text!r}: {name} must be a number")
        return SelectiveRotation(
            dim,
            heads,
            width // 2,
            rank=rank or None,
            kernel=kernel,
            gate=gate,
            bias=bool(bias),
            temperature=temperature,
            theta=theta,
            temperature_max=temperature_max,
            pairing=pairing,
            convolution=convolution,
        )

    name, options = parse(text)
    made: SelectiveRotation = build("rotary_scaling", name, {"selective": make}, options)
    return made
