"""Mixing around attention: short convolution, token shift, output gate.

What looks back treats padding, documents and states as `linear_rope.local_attention` does:

- pads (key_mask False) leave no trace: a real token's past is the real tokens before it, wherever
  the pads stand; the output at a pad is 0;
- a document (a run of one segment id) does not see the one before it;
- a state is a value: what the last document leaves behind, taken and returned, never changed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope.arguments import check_key_mask
from linear_rope.projection import Projection

__all__ = ["OutputGate", "ShortConvolution", "TokenShift"]


class ShortConvolution(nn.Module):
    """A causal convolution over time, each channel by itself (depthwise), without a bias.

        y_t = sum_{j < width} w_j x_{t-j}          (x before the first token is 0)

    on queries, keys and values before the feature map, as in Mamba (arXiv 2312.00752, figure 3) and
    later linear attention, where SiLU follows (activation="silu").

    It starts as the identity (w_0 = 1, the others 0), so that a model begins as it would without
    convolution, from no random number: arms of a comparison start alike. The other weights have a
    gradient from the first step on. PyTorch's default, uniform in +-1/sqrt(width), shrinks the
    signal's variance to a third and blurs every token with its neighbors before any of it is
    learned.

    Args:
        channels: width of x. width: tokens seen, the current one included.
        activation: "none" or "silu", after the sum.

    Attributes:
        weight: (channels, width), the current token's in the last column (as in `nn.Conv1d`).

    Raises:
        ValueError: sizes below 1, an unknown activation.
    """

    def __init__(self, channels: int, width: int = 4, *, activation: str = "none") -> None:
        super().__init__()
        if channels < 1 or width < 1:
            raise ValueError(f"channels={channels} and width={width} must both be at least 1")
        if activation not in ("none", "silu"):
            raise ValueError(f"activation={activation!r} is unknown; choose one of: none, silu")
        self.channels, self.width, self.activation = channels, width, activation
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity."""
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, -1] = 1.0

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:  # Tensor, or (Tensor, Tensor) with return_state
        """Convolve.

        Args:
            x: (batch, time, channels).
            key_mask: (batch, time) bool, True at real tokens.
            segment_ids: (batch, time), a document a run of one id (`resolve_segments`).
            state: the last width - 1 inputs, (batch, width - 1, channels), 0 where there were none.
            return_state: also return the new state.

        Returns:
            (batch, time, channels) in x's dtype (sums in float32 at least), and the state.

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        whole, row, after = look_back(
            x, self.channels, self.width - 1, key_mask, segment_ids, state
        )
        wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        weight = self.weight.to(wide)
        if x.device.type == "cpu" and row.of_all is None and x.shape[1]:
            # Half the time of the sum below. (On a GPU it might be computed in TF32.)
            with torch.autocast("cpu", enabled=False):
                y = F.conv1d(whole.to(wide).mT, weight.unsqueeze(1), groups=self.channels).mT
        else:
            y = weight[:, -1] * row.back(whole, 0).to(wide)
            for lag in range(1, self.width):
                y = y + weight[:, -1 - lag] * row.back(whole, lag).to(wide)
        if self.activation == "silu":
            y = F.silu(y)
        y = row.move_back(y.to(x.dtype), 1)
        return (y, after) if return_state else y

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, activation={self.activation!r}"


class TokenShift(nn.Module):
    """Each channel mixes a token with the one before it (RWKV, arXiv 2305.13048, eq. 11-13).

        y_t = x_t + mu (x_{t-1} - x_t)             (x before the first token is 0)

    mu, a channel each, starts at 0: the identity, for the reason given at `ShortConvolution`. (RWKV
    starts at a ramp over channels that depends on the layer's depth.)

    Args:
        channels: width of x.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels={channels} must be at least 1")
        self.channels = channels
        self.mu = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity."""
        nn.init.zeros_(self.mu)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: Tensor | None = None,
        return_state: bool = False,
    ) -> Any:  # Tensor, or (Tensor, Tensor) with return_state
        """Mix; arguments and results as in `ShortConvolution.forward` of width 2."""
        whole, row, after = look_back(x, self.channels, 1, key_mask, segment_ids, state)
        wide = torch.promote_types(torch.promote_types(x.dtype, self.mu.dtype), torch.float32)
        now, before = row.back(whole, 0).to(wide), row.back(whole, 1).to(wide)
        y = now + self.mu.to(wide) * (before - now)
        y = row.move_back(y.to(x.dtype), 1)
        return (y, after) if return_state else y

    def extra_repr(self) -> str:
        return f"{self.channels}"


class OutputGate(Projection):
    """heads * silu(W x): the merged heads, gated by the layer's input, before the output projection
    (RetNet, arXiv 2307.08621, eq. 9; gated linear attention, arXiv 2312.06635, section 4.4).

    No token sees another here, so there is neither mask nor state.

    Args:
        dim: width of the layer's input x. width: of the merged heads. bias: default none.
    """

    def __init__(self, dim: int, width: int, bias: bool = False) -> None:
        super().__init__(dim, width, bias)

    def forward(self, heads: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        """heads (batch, time, width), x (batch, time, dim) -> (batch, time, width)."""
        if heads.shape != (*x.shape[:-1], self.out_features):
            raise ValueError(
                f"heads must have shape {(*x.shape[:-1], self.out_features)}, got "
                f"{tuple(heads.shape)}"
            )
        return heads * F.silu(super().forward(x)).to(heads.dtype)


class Row:
    """Tokens behind their past: `before` earlier tokens, then the row's own, pads moved to its end.

    Real tokens keep their order, so that a real token's neighbors are real, and what stands behind
    the last one is unseen by causal sums. Without a mask nothing moves.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        before: int,
        key_mask: Tensor | None,
        segment_ids: Tensor | None,
        device: torch.device,
    ) -> None:
        self.key_mask, self.before = key_mask, before
        self.length = length
        self.of_all: Tensor | None = None
        self.goes_on: Tensor | None = None
        count: int | Tensor = length
        if key_mask is not None:
            count = key_mask.sum(-1, keepdim=True)
            self.order = torch.argsort(~key_mask, dim=-1, stable=True)
            self.rank = (key_mask.cumsum(-1) - 1).clamp(min=0)
        # Which tokens are real, pads moved; where the last `before` stand, counted with the past.
        self.real = (torch.arange(length, device=device) < count).expand(batch, length)
        self.last = (torch.arange(before, device=device) + count).expand(batch, before)
        if segment_ids is not None and length:
            # The past belongs to the first document; what follows goes on with the last one.
            past = segment_ids[:, :1].expand(batch, before)
            self.of_all = torch.cat([past, self.move(segment_ids, 1)], dim=1)
            self.goes_on = self.of_all.gather(1, self.last) == segment_ids[:, -1:]

    def move(self, x: Tensor, dim: int) -> Tensor:
        """Pads to the end of x, along its axis `dim` of time, and 0 there: they may be anything."""
        if self.key_mask is None:
            return x
        return _take(x, self.order, dim).masked_fill(_lift(~self.real, x, dim), 0)

    def move_back(self, y: Tensor, dim: int) -> Tensor:
        """Real tokens to where they were; 0 at the pads."""
        if self.key_mask is None:
            return y
        return _take(y, self.rank, dim).masked_fill(_lift(~self.key_mask, y, dim), 0)

    def back(self, whole: Tensor, lag: int) -> Tensor:
        """Each token's predecessor `lag` tokens ago, 0 where that is of another document.

        whole: (batch, before + time, channels), the past and the row with its pads moved.
        """
        start = self.before - lag
        earlier = whole[:, start : start + self.length]
        if self.of_all is None or lag == 0:
            return earlier
        other = self.of_all[:, start : start + self.length] != self.of_all[:, self.before :]
        return earlier.masked_fill(other.unsqueeze(-1), 0.0)

    def end(self, whole: Tensor, dim: int) -> Tensor:
        """The last `before` tokens, for the state: a copy, which keeps nothing else alive."""
        if self.key_mask is None:
            last = whole.narrow(dim, self.length, self.before)
            # As dense as that of a single token, so that graphs need no second compilation.
            return last.clone(memory_format=torch.contiguous_format)
        return _take(whole, self.last, dim)


def look_back(
    x: Tensor,
    channels: int,
    lags: int,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Row, Tensor]:
    """The past and x in a row, (batch, lags + time, channels) with pads moved; the row; new state.

    Arguments as in `ShortConvolution.forward`. Where there is no past, it is 0.
    """
    _check(x, channels, lags, key_mask, segment_ids, state)
    row = Row(x.shape[0], x.shape[1], lags, key_mask, segment_ids, x.device)
    before = x.new_zeros(x.shape[0], lags, channels) if state is None else state.to(x.dtype)
    whole = torch.cat([before, row.move(x, 1)], dim=1)
    after = row.end(whole, 1)
    if row.goes_on is not None:
        after = after.masked_fill(~row.goes_on.unsqueeze(-1), 0.0)
    return whole, row, after


def _lift(index: Tensor, x: Tensor, dim: int) -> Tensor:
    """(batch, time) with axes of size 1 between and behind, to broadcast over x's axis `dim`."""
    return index.reshape(
        *index.shape[:1], *[1] * (dim - 1), index.shape[1], *[1] * (x.ndim - 1 - dim)
    )


def _take(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """x at the places `index` (batch, n) of its axis `dim`, a copy."""
    shape = [*x.shape[:dim], index.shape[1], *x.shape[dim + 1 :]]
    return x.gather(dim, _lift(index, x, dim).expand(shape))


def _check(
    x: Tensor,
    channels: int,
    lags: int,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    state: Tensor | None,
) -> None:
    if x.ndim != 3 or x.shape[-1] != channels or not x.is_floating_point():
        raise ValueError(
            f"x must be floating-point of shape (batch, time, {channels}), got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )
    check_key_mask(key_mask, (x.shape[0], x.shape[1]), x.device)
    check_segments(segment_ids, (x.shape[0], x.shape[1]))
    want = (x.shape[0], lags, channels)
    if state is not None and (not isinstance(state, Tensor) or state.shape != want):
        got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(
            f"state must be the tensor of shape {want} that an earlier call returned, got {got}"
        )


def check_segments(segment_ids: Tensor | None, want: tuple[int, int]) -> None:
    if segment_ids is not None and (
        segment_ids.shape != want or segment_ids.dtype not in (torch.int64, torch.int32)
    ):
        raise ValueError(
            f"segment_ids must be integers of shape (batch, time) = {want}, got "
            f"{segment_ids.dtype} of shape {tuple(segment_ids.shape)}"
        )
