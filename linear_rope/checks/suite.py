"""All checks at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from linear_rope.checks.batches import check_packing, check_padding
from linear_rope.checks.invariants import check_causal, check_relative, check_streaming
from linear_rope.checks.numerics import check_gradients, check_precision
from linear_rope.checks.report import Report, Reports
from linear_rope.checks.subject import Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CHECKS", "check_all"]

CHECKS: dict[str, Callable[..., Report]] = {
    "causal": check_causal,
    "relative": check_relative,
    "streaming": check_streaming,
    "padding": check_padding,
    "packing": check_packing,
    "precision": check_precision,
    "gradients": check_gradients,
}

# What has no meaning for an encoder.
CAUSAL_ONLY = ("causal", "streaming")


def check_all(
    module: nn.Module,
    example: Tensor | None = None,
    *,
    causal: bool = True,
    skip: Sequence[str] = (),
    raises: bool = False,
    **options: Unpack[Options],
) -> Reports:
    """Run all checks with their default tolerances; `print` the result for a table.

    Args:
        module, example, options: see `linear_rope.checks.subject.Subject`.
        causal: False for an encoder: nothing to check of causality and streaming.
        skip: names of checks to leave out, such as "relative" for absolute positions.
        raises: AssertionError with the table if a check fails, or none could be made.

    Raises:
        ValueError: an unknown name in skip, or as in `check_causal`.
    """
    unknown = sorted(set(skip) - set(CHECKS))
    if unknown:
        raise ValueError(f"skip: unknown check {unknown[0]!r}; choose from: {', '.join(CHECKS)}")
    made: list[Report] = []
    for name, check in CHECKS.items():
        if name in skip:
            made.append(Report(name, False, "", skipped="left out on request"))
        elif not causal and name in CAUSAL_ONLY:
            made.append(Report(name, False, "", skipped="the module is not causal"))
        elif name == "padding" and not causal:
            made.append(check_padding(module, example, decode=False, **options))
        else:
            made.append(check(module, example, **options))
    reports = Reports(made)
    if raises and not reports.passed:
        raise AssertionError(f"\n{reports}")
    return reports
