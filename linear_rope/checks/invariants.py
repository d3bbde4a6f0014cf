"""Checks of what a module sees and where: causality, positions, streaming.

Each compares two ways to compute the same outputs, on a float64 copy of the module. Default
tolerances leave room for modules that compute in float32 inside; a module that keeps float64
throughout passes at 1e-10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linear_rope.checks.report import Report, Skip, Tally, root_mean_square
from linear_rope.checks.subject import Options, Subject, conduct

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LOUD", "check_causal", "check_relative", "check_streaming"]

# What a changed or padded token is multiplied by: a maximum over tokens must notice it.
LOUD = 30.0


def check_causal(
    module: nn.Module,
    example: Tensor | None = None,
    *,
    tolerance: float = 1e-5,
    raises: bool = False,
    **options: Unpack[Options],
) -> Report:
    """No output changes with later tokens, nor with other rows of the batch.

    Tokens from a cut on are replaced, by others of the same size and 30 times as large, and all
    outputs before the cut compared; then all rows but one. Gradients alone would not do: a maximum
    over all keys leaks behind a stopped gradient.

    Args:
        module, example, options: see `linear_rope.checks.subject.Subject`.
        tolerance: of the difference, over the root mean square of the output.
        raises: AssertionError with the report unless it passed; also if it was skipped.

    Raises:
        ValueError: the module does not run on its input, or an option does not fit.
    """

    def body(subject: Subject, tally: Tally) -> str:
        subject.require_mixing(10 * tolerance)
        x, length = subject.draw(), subject.length
        want = subject.run(x)
        size = root_mean_square(want)
        cuts = sorted({round(1 + i * (length - 2) / 15) for i in range(16)})
        factors = (1.0,) if subject.vocabulary else (1.0, LOUD)
        for factor in factors:
            for cut in cuts:
                changed = torch.cat([x[:, :cut], subject.other(x[:, cut:], factor)], dim=1)
                got = subject.run(changed)
                trial = f"tokens from {cut} on changed"
                trial += f" (times {factor:.0f})" if factor > 1 else ""
                tally.compare(got[:, :cut], want[:, :cut], trial, scale=size)
            for row in range(subject.batch):
                changed = subject.other(x, factor)
                changed[row] = x[row]
                got = subject.run(changed)
                trial = "other rows changed"
                tally.compare(got[row, None], want[row, None], trial, row=row, scale=size)
        return f"{len(cuts)} cuts of {length} tokens, other rows"

    return conduct("causal", body, module, example, tolerance, raises, **options)


def check_relative(
    module: nn.Module,
    example: Tensor | None = None,
    *,
    shifts: Sequence[int] = (1, 7, 100),
    tolerance: float = 1e-4,
    raises: bool = False,
    **options: Unpack[Options],
) -> Report:
    """A shift of all positions changes nothing: only distances count.

    True of rotary embeddings and relative biases, not of absolute positions (sinusoidal, learned).
    It fails if values are rotated, if queries and keys are paired differently, or by different
    angles. The tolerance allows for angles formed in float32, which err by 6e-8 of a position.

    Args:
        shifts: numbers added to the positions 0 to length - 1; those beyond `max_length` are left
            out.
        others: as in `check_causal`.
    """

    def body(subject: Subject, tally: Tally) -> str:
        subject.require("positions")
        subject.require_mixing(10 * tolerance)
        x = subject.draw()
        order = torch.arange(subject.length, device=subject.device).expand(subject.batch, -1)
        tried = [shift for shift in shifts if subject.reaches(shift + subject.length - 1)]
        if not tried:
            raise Skip(f"max_length={subject.max_length} leaves no room for a shift")
        want = subject.run(x, positions=order)
        apart = 3 * order if subject.reaches(3 * (subject.length - 1)) else 0 * order
        moved = float((subject.run(x, positions=apart) - want).abs().max())
        if moved <= tolerance * root_mean_square(want):
            raise Skip("positions have no effect on the output (is anything rotated?)")
        for shift in tried:
            got = subject.run(x, positions=order + shift)
            tally.compare(got, want, f"positions shifted by {shift}")
        return f"positions shifted by {', '.join(map(str, tried))}"

    return conduct("relative", body, module, example, tolerance, raises, **options)


def check_streaming(
    module: nn.Module,
    example: Tensor | None = None,
    *,
    splits: Sequence[Sequence[int]] | None = None,
    tolerance: float = 1e-5,
    raises: bool = False,
    **options: Unpack[Options],
) -> Report:
    """Any split of a sequence into calls, each with the state of the one before, equals one call.

    It fails if the state lacks something (a denominator, a stabilizer), or if positions do not go
    on where they stopped.

    Args:
        splits: lengths of the calls, each summing to `length`; default [T], [5, T - 5], T single
            steps, [4, 1, 1, T - 6].
        others: as in `check_causal`.
    """

    def body(subject: Subject, tally: Tally) -> str:
        length = subject.length
        tried = splits
        if tried is None:
            tried = ([length], [5, length - 5], [1] * length, [4, 1, 1, length - 6])
        for split in tried:
            if sum(split) != length or min(split, default=0) < 0:
                raise ValueError(f"splits: {list(split)} does not sum to length={length}")
        subject.require("state")
        subject.require_mixing(10 * tolerance)
        x = subject.draw()
        want = subject.run(x)
        size = root_mean_square(want)
        for split in tried:
            for begin, got in _stream(subject, x, split):
                part = want[:, begin : begin + got.shape[1]]
                tally.compare(got, part, f"split {_name(split)}", time=begin, scale=size)
        return f"splits {', '.join(_name(split) for split in tried)}"

    return conduct("streaming", body, module, example, tolerance, raises, **options)


def _stream(subject: Subject, x: Tensor, split: Sequence[int]) -> list[tuple[int, Tensor]]:
    """(time of its first token, output) of each call."""
    outputs: list[tuple[int, Tensor]] = []
    state: Any = None
    begin = 0
    for size in split:
        end = begin + size
        at = torch.arange(begin, end).expand(subject.batch, -1)
        arguments: dict[str, Any] = dict(subject.positions(at))
        if begin > 0 or state is not None:
            arguments["state"] = state
        out, state = subject.run_with_state(x[:, begin:end], **arguments)
        outputs.append((begin, out))
        begin = end
    return outputs


def _name(split: Sequence[int]) -> str:
    if len(split) > 2 and set(split) == {1}:
        return f"{len(split)} single steps"
    return str(list(split))
