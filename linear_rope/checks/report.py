"""What a check says: reports, the table of several, and the tally that makes one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Report", "Reports", "Skip", "Tally"]


class Skip(Exception):
    """Raised inside a check that cannot be made; its message is the reason."""


@dataclass(frozen=True)
class Report:
    """The outcome of one check; `str()` is one readable line.

    A check that could not be made has `skipped`, the reason, and is not `passed`; `failed` is what
    a fault looks like.
    """

    name: str
    passed: bool
    tried: str
    """What was compared with what."""
    error: float | None = None
    """The worst difference over the root mean square of what it should have been; inf: NaN."""
    where: str = ""
    """Where the worst difference is: which trial, row of the batch, time."""
    tolerance: float | None = None
    """The largest error that passes."""
    skipped: str | None = None

    @property
    def failed(self) -> bool:
        return not self.passed and self.skipped is None

    @property
    def verdict(self) -> str:
        return "skipped" if self.skipped is not None else "passed" if self.passed else "FAILED"

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"{self.name} skipped: {self.skipped}"
        parts = [f"{self.name} {self.verdict}"]
        if self.error is not None:
            parts.append(f"worst error {self.error:.2g} (tolerance {self.tolerance:.2g})")
        if self.where:
            parts.append(f"at {self.where}")
        return f"{', '.join(parts)}; tried: {self.tried}"


class Reports(tuple[Report, ...]):
    """The reports of several checks; `str()` is a table."""

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(report.failed for report in self)

    @property
    def passed(self) -> bool:
        """Whether no check failed and at least one was made."""
        return not self.failed and any(report.passed for report in self)

    def __str__(self) -> str:
        rows = [("check", "result", "error", "tolerance", "where, or why not", "tried")]
        for r in self:
            number = "" if r.error is None else f"{r.error:.1e}"
            limit = "" if r.tolerance is None or r.error is None else f"{r.tolerance:g}"
            rows.append((r.name, r.verdict, number, limit, r.skipped or r.where, r.tried))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join(lines)


class Tally:
    """Keeps the worst of many comparisons, measured in tolerances."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.compared = 0
        self.error: float | None = None
        self.limit = tolerance
        self.where = ""

    def compare(
        self,
        got: Tensor,
        want: Tensor,
        trial: str,
        *,
        row: int = 0,
        time: int = 0,
        scale: float | None = None,
        tolerance: float | None = None,
    ) -> None:
        """Difference of got and want, (batch, time, ...), over the root mean square of want.

        Args:
            trial: what this is, in the report.
            row, time: of the first element, where the tensors are part of something.
            scale: to divide by instead, for a part too small to have a size of its own.
        """
        if got.shape != want.shape:
            raise ValueError(
                f"the module returned {tuple(got.shape)} where it had returned {tuple(want.shape)} "
                f"for the same tokens ({trial})"
            )
        if got.numel() == 0:
            return
        got, want = got.detach().double(), want.detach().double()
        size = root_mean_square(want) if scale is None else scale
        difference = (got - want).abs().flatten(2).amax(-1) if got.ndim > 2 else (got - want).abs()
        error = difference / size if size > 0 else torch.where(difference > 0, torch.inf, 0.0)
        error = torch.where(error.isnan(), torch.inf, error)  # includes inf - inf
        index = int(error.argmax())
        r, t = divmod(index, error.shape[1])
        place = f"{trial}, row {row + r}, time {time + t}"
        worst = float(error.flatten()[index])
        if not bool(got[r, t].isfinite().all()):
            place += " (not finite)"
        elif not bool(want.isfinite().all()):
            place += " (what it is compared with is not finite)"
        self.add(worst, place, tolerance)

    def add(self, error: float, where: str, tolerance: float | None = None) -> None:
        """An error that was measured in another way."""
        limit = self.tolerance if tolerance is None else tolerance
        self.compared += 1
        if self.error is None or error / limit > self.error / self.limit:
            # Nothing differs: no place is the worst.
            self.error, self.limit, self.where = error, limit, where if error > 0 else ""

    def report(self, name: str, tried: str) -> Report:
        if self.error is None:
            return Report(name, False, tried, skipped="nothing was compared")
        passed = self.error <= self.limit
        return Report(name, passed, tried, self.error, self.where, self.limit)


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
