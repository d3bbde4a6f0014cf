"""The runs of a study as their files tell them, finished or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoint
from ..compare import unfair
from ..curves import Run, load_runs
from ..errors import UserError
from ..presets import Settings
from ..train import RunResult
from .plan import Evaluation, Plan, RunSpec
from .queue import FAILURE
from .worker import read_result

__all__ = ["Result", "condition", "fairness", "load_results"]

# What may differ between arms that are compared: the rate of learning and what does not matter.
_TUNED = ("learning_rate",)
_FREE = ("threads", "cpu", "data_dir", "checkpoint_every", "seed")


@dataclass(frozen=True)
class Result:
    """One run: its log (None before the first step), its config.json and result.json."""

    spec: RunSpec
    folder: Path
    log: Run | None
    measured: dict[str, Any]
    failure: str | None
    wanted: Evaluation | None

    @property
    def config(self) -> dict[str, Any]:
        return self.log.config if self.log is not None else {}

    @property
    def steps(self) -> int:
        """Steps in the log."""
        return 0 if self.log is None else len(self.log.tokens)

    @property
    def trained(self) -> bool:
        """Whether all steps are done and the last validation is there."""
        if self.log is None or self.measured.get("steps") != self.spec.settings.steps:
            return False
        when, _ = self.log.validation
        return self.steps == self.spec.settings.steps and bool(
            when.size and when[-1] == self.log.tokens[-1]
        )

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do. Without its checkpoint, a run cannot be measured again."""
        wanted = self.wanted
        if not self.trained or wanted is None or not (self.folder / checkpoint.NAME).exists():
            return self.trained
        spec = {"factors": list(wanted.factors), "bytes": wanted.bytes}
        return bool(self.measured.get("evaluated") == spec)

    @property
    def state(self) -> str:
        if self.complete:
            return "finished"
        if self.failure is not None:
            return "failed"
        if self.trained:
            return "to evaluate"
        return f"step {self.steps} of {self.spec.settings.steps}" if self.steps else "to do"

    @property
    def final(self) -> float:
        assert self.log is not None
        return float(self.log.validation[1][-1])

    @property
    def best(self) -> float:
        assert self.log is not None
        return float(self.log.validation[1].min())

    @property
    def speed(self) -> float | None:
        """Training tokens a second: the median over the steps, which a pause does not move."""
        if self.log is None or "tokens_per_second" not in self.log.columns or not self.steps:
            return None
        return float(np.median(self.log.columns["tokens_per_second"]))

    @property
    def peak_memory(self) -> float | None:
        """Bytes."""
        return self.measured.get("peak_memory") or None

    @property
    def parameters(self) -> int | None:
        return self.config.get("parameters")

    def window(self, factor: int) -> dict[str, Any] | None:
        """What was measured in windows of that many training lengths."""
        for row in self.measured.get("windows", []):
            if row["factor"] == factor:
                return dict(row)
        return None


def load_results(plan: Plan, out: Path) -> list[Result]:
    """The study's runs in the order of its file.

    Raises:
        UserError: files that are damaged, all of them by name. They are left untouched.
    """
    results, faults = [], []
    for spec in plan.runs:
        folder = out / "runs" / spec.folder
        try:
            log = load_runs(folder)[0] if (folder / "metrics.csv").exists() else None
            failure = _failure(folder / FAILURE)
            measured = read_result(folder)
            results.append(Result(spec, folder, log, measured, failure, plan.evaluation))
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("; ".join(faults))
    return results


def _failure(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["reason"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return "the reason was not written down whole"


def condition(settings: Settings) -> tuple[tuple[str, Any], ...]:
    """The settings that two runs must share to be compared."""
    values = vars(settings)
    return tuple((k, v) for k, v in values.items() if k not in (*_TUNED, *_FREE))


def fairness(results: Sequence[Result]) -> list[str]:
    """Faults of the finished runs that one table compares, by their hashes; empty: all is fair."""
    faults: list[str] = []
    groups: dict[tuple[tuple[str, Any], ...], list[RunResult]] = {}
    for result in results:
        if not result.trained or result.log is None:
            continue
        hashes = result.log.columns.get("batch_hash")
        if hashes is None or not result.config.get("initial_parameters"):
            faults.append(f"{result.spec.folder} has no hashes, so nothing is known of it")
            continue
        last = str(hashes[-1])
        groups.setdefault(condition(result.spec.settings), []).append(
            RunResult(result.folder, result.steps, last, result.config)
        )
    return faults + [fault for group in groups.values() for fault in unfair(group)]
