"""Checks of numbers: low precision against float64, gradients against differences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from linear_rope.checks.report import Report, Skip, Tally, root_mean_square
from linear_rope.checks.subject import Options, Raised, Subject, conduct

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["TOLERANCES", "check_gradients", "check_precision"]

# Largest difference over the root mean square of the output: some 30 roundings of half precision;
# single precision must do better than single roundings of angles in the thousands.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float32: 1e-3,
    torch.float16: 0.03,
    torch.bfloat16: 0.25,
}

FAR = 2000  # a position whose angle half precision cannot hold
STEP = 1e-5  # of the differences, over a tensor's size: errors of 1e-10 by curvature and rounding
PLACES = 16  # tokens whose gradients are checked one by one


def check_precision(
    module: nn.Module,
    example: Tensor | None = None,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16),
    autocast: bool = True,
    scales: Sequence[float] = (1.0, 10.0),
    tolerances: Mapping[torch.dtype, float] | None = None,
    raises: bool = False,
    **options: Unpack[Options],
) -> Report:
    """The module in low precision gives what a float64 run of the same weights gives.

    Also at positions from 2000 on (or the last ones before `max_length`), if it takes `positions`:
    angles formed in half precision are off by whole radians there. At the larger scales of a float
    input it only has to stay finite where float64 is and the dtype could hold the result.

    Args:
        dtypes: the module is converted to each. autocast: and, in float32, run under autocast to
            those of half precision.
        scales: factors on float inputs; outputs are compared at the first, finite at all.
        tolerances: a dtype; default float32 1e-3, float16 0.03, bfloat16 0.25.
        others: as in `check_causal`.
    """
    limits = TOLERANCES if tolerances is None else {**TOLERANCES, **tolerances}
    for dtype in dtypes:
        if dtype not in limits:
            raise ValueError(f"dtypes: give a tolerance for {dtype} in tolerances=")
    modes = [(dtype, False) for dtype in dtypes]
    if autocast:
        modes += [(dtype, True) for dtype in dtypes if dtype.itemsize < 4]

    def body(subject: Subject, tally: Tally) -> str:
        tried, missing = [], []
        order = torch.arange(subject.length, device=subject.device).expand(subject.batch, -1)
        places: list[tuple[str, dict[str, Tensor]]] = [("", {})]
        if "positions" in subject.names:
            far = FAR
            if subject.max_length is not None:
                far = min(FAR, subject.max_length - subject.length)
            places.append((f" at positions from {far} on", {"positions": order + far}))
        for dtype, automatic in modes:
            name = f"{str(dtype).removeprefix('torch.')}{' autocast' if automatic else ''}"
            base = torch.float32 if automatic else dtype
            low, judge = subject.copy(base), subject.copy(torch.float64)
            # The same weights, but buffers as they were: tables must not suffer from a conversion.
            for ours, theirs in zip(judge.parameters(), low.parameters(), strict=True):
                ours.copy_(theirs)
            context = (
                torch.autocast(subject.device.type, dtype)
                if automatic
                else contextlib.nullcontext()
            )
            try:
                for number, scale in enumerate(scales if not subject.vocabulary else (1.0,)):
                    x = subject.draw()
                    x = x if subject.vocabulary else (x * scale).to(base)
                    for place, arguments in places:
                        with context:
                            got = subject.run(x, module=low, **arguments)
                        wide = x if subject.vocabulary else x.double()
                        want = subject.run(wide, module=judge, **arguments)
                        trial = name + place + (f", input times {scale:.0f}" if number else "")
                        if number == 0:
                            tally.compare(got, want, trial, tolerance=limits[dtype])
                        elif float(want.abs().max()) < torch.finfo(dtype).max:
                            # Where finite, the size of the error is not the question.
                            held = torch.where(got.isfinite(), want, got.double())
                            tally.compare(held, want, trial, tolerance=limits[dtype])
            except Raised as error:
                if "not implemented for" not in str(error):
                    raise Raised(f"{name}: {error}") from error.__cause__
                missing.append(name)
                continue
            tried.append(name)
        note = f" ({', '.join(missing)}: not implemented by torch here)" if missing else ""
        return f"{', '.join(tried)} against float64{note}"

    strictest = min((limits[dtype] for dtype in dtypes), default=1.0)
    return conduct("precision", body, module, example, strictest, raises, **options)


def check_gradients(
    module: nn.Module,
    example: Tensor | None = None,
    *,
    scales: Sequence[float] = (0.0, 1.0, 10.0),
    tolerance: float = 1e-5,
    raises: bool = False,
    **options: Unpack[Options],
) -> Report:
    """Gradients equal central differences in float64, and are finite in float32.

    As `torch.autograd.gradcheck` in its fast mode, which compares along random directions, but for
    each token of the input and each parameter apart, so that the report can say which is wrong.

    Args:
        scales: factors on float inputs at which float32 gradients must be finite.
        tolerance: of a derivative, over its size.
        others: as in `check_causal`.
    """

    def body(subject: Subject, tally: Tally) -> str:
        with torch.enable_grad():
            checked, doubtful = _differences(subject, tally)
            _finite(subject, tally, (1.0,) if subject.vocabulary else scales)
        if 2 * doubtful > checked:
            if tally.error is not None and tally.error > tolerance:
                return "finite gradients"  # at least that much can be told
            raise Skip(
                "differences do not settle: the module rounds to less than float64 inside, or is "
                "not smooth"
            )
        return f"{checked} derivatives in float64, finite gradients in float32"

    return conduct("gradients", body, module, example, tolerance, raises, **options)


def _differences(subject: Subject, tally: Tally) -> tuple[int, int]:
    """Compares derivatives with differences; how many, and how many differences are in doubt."""
    module, x = subject.module, subject.draw()
    leaves: list[tuple[str, Tensor]] = [
        (f"parameter {name}", p) for name, p in module.named_parameters() if p.requires_grad
    ]
    if not subject.vocabulary:
        leaves.insert(0, ("input", x.requires_grad_()))
    if not leaves:
        raise Skip("has neither a float input nor a parameter that takes gradients")
    out = subject.run(x)
    if not out.requires_grad:
        raise Skip("the output carries no gradient")
    cotangent = _normal(subject, out)
    gradients = torch.autograd.grad(
        (out * cotangent).sum(), [leaf for _, leaf in leaves], allow_unused=True
    )
    # One direction over each tensor, and one over each of some tokens.
    directions: list[tuple[str, Tensor, Tensor, Tensor]] = []
    for (name, leaf), gradient in zip(leaves, gradients, strict=True):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        whole = _normal(subject, leaf)
        directions.append((name, leaf, gradient, whole))
        if leaf is x:
            tokens = [(r, t) for r in range(x.shape[0]) for t in range(x.shape[1])]
            for r, t in tokens[:: -(-len(tokens) // PLACES)]:
                one = torch.zeros_like(x)
                one[r, t] = whole[r, t]
                directions.append((f"input, row {r}, time {t}", leaf, gradient, one))
    sizes = [_size(gradient, direction) for _, _, gradient, direction in directions]
    # What is far smaller than the rest cannot be told from rounding.
    floor = 1e-3 * max(sizes) + 1e-12
    doubtful = 0

    def loss() -> float:
        return float((subject.run(x) * cotangent).sum())

    with torch.no_grad():
        for (name, leaf, gradient, direction), size in zip(directions, sizes, strict=True):
            slope = float((gradient * direction).sum())
            step = STEP * (root_mean_square(leaf) or 1.0)
            coarse, fine = (_slope(loss, leaf, direction, h) for h in (step, step / 4))
            scale = max(size, abs(slope), abs(coarse), floor)
            if abs(coarse - fine) > tally.tolerance * scale / 2:
                doubtful += 1
                continue
            error = abs(slope - coarse) / scale
            tally.add(error if error == error else float("inf"), f"gradient of {name}")
    return len(directions), doubtful


def _finite(subject: Subject, tally: Tally, scales: Sequence[float]) -> None:
    module = subject.copy(torch.float32)
    for scale in scales:
        x = subject.draw()
        leaves: list[tuple[str, Tensor]] = [
            (f"parameter {name}", p) for name, p in module.named_parameters() if p.requires_grad
        ]
        if not subject.vocabulary:
            x = (x * scale).float().requires_grad_()
            leaves.append(("input", x))
        out = subject.run(x, module=module)
        if not out.requires_grad or not bool(out.isfinite().all()):
            if out.requires_grad:
                tally.add(float("inf"), f"output in float32, input times {scale:g} (not finite)")
            continue
        cotangent = _normal(subject, out)
        gradients = torch.autograd.grad(
            (out * cotangent).sum(), [leaf for _, leaf in leaves], allow_unused=True
        )
        for (name, _), gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                bad = not bool(gradient.isfinite().all())
                where = f"gradient of {name} in float32, input times {scale:g} (not finite)"
                tally.add(float("inf") if bad else 0.0, where)


def _slope(loss: Callable[[], float], leaf: Tensor, direction: Tensor, step: float) -> float:
    """The central difference of the loss along a direction; the leaf is put back exactly."""
    before = leaf.clone()
    leaf.copy_(before + step * direction)
    above = loss()
    leaf.copy_(before - step * direction)
    below = loss()
    leaf.copy_(before)
    return (above - below) / (2 * step)


def _normal(subject: Subject, like: Tensor) -> Tensor:
    drawn = torch.randn(like.shape, generator=subject.generator, dtype=torch.float64)
    return drawn.to(like.device, like.dtype)


def _size(gradient: Tensor, direction: Tensor) -> float:
    """What |gradient . direction| is like for a random direction: the norm where it points."""
    return float(gradient[direction != 0].norm())
