"""Numbers of a study: a row for each arm and learning rate, with uncertainty over the seeds.

Beside them what they are made of: a row for each run, and the points of its curves.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..curves import describe_corpus
from ..presets import Settings
from ..statistics import Interval, interval, paired
from ..summary import tokens_to_reach
from .plan import Plan
from .results import Result, condition
from .speeds import Rates, condition_slug

__all__ = [
    "ArmRow",
    "Condition",
    "Reached",
    "conditions",
    "curves_csv",
    "runs_csv",
    "table_csv",
]


@dataclass(frozen=True)
class Reached:
    """Share of the baseline's tokens at which its final loss was reached, over the same seeds."""

    of: int
    share: Interval | None  # over the seeds that reached it
    bound: bool = False  # somewhere reached before the first validation

    @property
    def count(self) -> int:
        return 0 if self.share is None else self.share.count


@dataclass(frozen=True)
class ArmRow:
    """An arm with one learning rate, over its finished seeds."""

    arm: str
    learning_rate: float
    runs: tuple[Result, ...]
    chosen: bool = False  # the arm's best rate
    difference: Interval | None = None  # to the baseline at its best rate, same seeds
    reached: Reached | None = None
    parameter_difference: float | None = None  # share of the baseline's
    alone: Interval | None = None  # tokens per second with the machine to itself
    timely: Interval | None = None  # final loss, or that when the baseline's time is over
    timely_difference: Interval | None = None  # of that to the baseline's final loss, same seeds

    @property
    def seconds(self) -> float | None:
        """Of a whole run that has the machine to itself."""
        return None if self.alone is None else self.tokens / self.alone.mean

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.spec.seed for run in self.runs)

    @property
    def final(self) -> Interval:
        return interval([run.final for run in self.runs])

    @property
    def best(self) -> Interval:
        return interval([run.best for run in self.runs])

    @property
    def finals(self) -> dict[int, float]:
        return {run.spec.seed: run.final for run in self.runs}

    @property
    def tokens(self) -> int:
        s = self.runs[0].spec.settings
        return s.steps * s.batch_size * s.length

    @property
    def parameters(self) -> int | None:
        return self.runs[0].parameters

    @property
    def speed(self) -> Interval | None:
        speeds = [run.speed for run in self.runs if run.speed is not None]
        return interval(speeds) if speeds else None

    @property
    def peak_memory(self) -> float | None:
        return max((run.peak_memory for run in self.runs if run.peak_memory), default=None)

    def long(self, factor: int) -> Interval | str | None:
        """Bits per byte in windows of that many training lengths; the reason, if it cannot."""
        rows = [row for run in self.runs if (row := run.window(factor)) is not None]
        values = [row["bits_per_byte"] for row in rows if "bits_per_byte" in row]
        if values:
            return interval(values)
        return str(rows[0].get("reason", "")) if rows else None


@dataclass(frozen=True)
class Condition:
    """Runs that may be compared: equal settings but for the arm, the learning rate and the seed."""

    name: str
    baseline: str
    rows: tuple[ArmRow, ...]  # by arm, then learning rate
    wanted: tuple[tuple[str, str], ...] = ()  # arms to compare beside those with the baseline

    @property
    def settings(self) -> Settings:
        """Those of one of the runs: the others share all that matters."""
        return self.rows[0].runs[0].spec.settings

    @property
    def chosen(self) -> list[ArmRow]:
        """Each arm at its best learning rate."""
        return [row for row in self.rows if row.chosen]

    @property
    def swept(self) -> bool:
        return len({(row.arm, row.learning_rate) for row in self.rows}) > len(self.chosen)

    @property
    def base(self) -> ArmRow | None:
        return next((row for row in self.chosen if row.arm == self.baseline), None)

    @property
    def pairs(self) -> list[tuple[str, str, Interval]]:
        """(arm, other, final loss of the arm less the other's), each at its best rate."""
        finals = {row.arm: row.finals for row in self.chosen}
        found = []
        for arm, other in self.wanted:
            change = paired(finals.get(arm, {}), finals.get(other, {}))
            if change is not None:
                found.append((arm, other, change))
        return found

    def of_arm(self, arm: str) -> list[ArmRow]:
        return [row for row in self.rows if row.arm == arm]

    def at_edge(self) -> list[ArmRow]:
        """Best rates that are the first or last of those tried: a better one may lie beyond."""
        found = []
        for row in self.chosen:
            rates = sorted(each.learning_rate for each in self.of_arm(row.arm))
            if len(rates) > 1 and row.learning_rate in (rates[0], rates[-1]):
                found.append(row)
        return found


def conditions(plan: Plan, results: Sequence[Result], speeds: Rates) -> list[Condition]:
    """Group the finished runs, choose each arm's rate, and compare with the baseline."""
    groups: dict[object, list[Result]] = {}
    for result in results:
        if result.trained and math.isfinite(result.final):
            groups.setdefault(condition(result.spec.settings), []).append(result)
    found = []
    for runs in groups.values():
        name = condition_slug(plan, runs[0].spec.settings)
        rows = _rows(plan.baseline, runs, speeds.get(name, {}))
        name = "the study's settings" if name == "base" else name.replace(",", ", ")
        found.append(Condition(name, plan.baseline, tuple(rows), plan.pairs))
    return found


def _rows(
    baseline: str, runs: Sequence[Result], speeds: Mapping[str, Sequence[float]]
) -> list[ArmRow]:
    by_arm: dict[str, dict[float, list[Result]]] = {}
    for run in runs:
        rates = by_arm.setdefault(run.spec.arm, {})
        rates.setdefault(run.spec.settings.learning_rate, []).append(run)
    rows = [
        ArmRow(arm, rate, tuple(sorted(rates[rate], key=lambda r: r.spec.seed)))
        for arm, rates in by_arm.items()
        for rate in sorted(rates)
    ]
    best = {arm: _best_rate([row for row in rows if row.arm == arm]) for arm in by_arm}
    rows = [
        dataclasses.replace(
            row,
            chosen=best[row.arm] == row.learning_rate,
            alone=interval(speeds[row.arm]) if speeds.get(row.arm) else None,
        )
        for row in rows
    ]
    base = next((row for row in rows if row.chosen and row.arm == baseline), None)
    return rows if base is None else [_against(row, base) for row in rows]


def _against(row: ArmRow, base: ArmRow) -> ArmRow:
    """The row with what it is beside the baseline's."""
    both = row.parameters and base.parameters
    values = _when(row, base.seconds)
    return dataclasses.replace(
        row,
        difference=None if row is base else paired(row.finals, base.finals),
        reached=None if row is base else _reached(row, base),
        parameter_difference=row.parameters / base.parameters - 1 if both else None,  # type: ignore[operator]
        timely=interval(list(values.values())) if values else None,
        timely_difference=None if row is base else paired(values, base.finals),
    )


def _when(row: ArmRow, seconds: float | None) -> dict[int, float]:
    """By seed, the last validation loss that is known ``seconds`` after the start.

    Linear between evaluations; the final loss of an arm that is done by then. An arm that is not
    done has not lowered its learning rate to the end either, so this can only be to its
    disadvantage.
    """
    found: dict[int, float] = {}
    if seconds is None or row.alone is None:
        return found
    tokens = seconds * row.alone.mean
    for run in row.runs:
        if run.log is not None:
            when, values = run.log.validation
            if when.size and tokens >= when[0]:
                found[run.spec.seed] = float(np.interp(tokens, when, values))
    return found


def _best_rate(rows: Sequence[ArmRow]) -> float:
    """The rate of the lowest mean final validation loss, over the seeds that all rates have."""
    common = set.intersection(*(set(row.seeds) for row in rows))

    def mean(row: ArmRow) -> float:
        values = [value for seed, value in row.finals.items() if not common or seed in common]
        return math.fsum(values) / len(values)

    return min(rows, key=mean).learning_rate


def _reached(row: ArmRow, base: ArmRow) -> Reached:
    targets = {run.spec.seed: run for run in base.runs}
    shares, of, bound = [], 0, False
    for run in row.runs:
        if run.spec.seed not in targets or run.log is None:
            continue
        of += 1
        when, values = run.log.validation
        needed = tokens_to_reach(when, values, targets[run.spec.seed].final)
        if needed is not None:
            bound = bound or needed == when[0]
            shares.append(needed / base.tokens)
    return Reached(of, interval(shares) if shares else None, bound)


def table_csv(found: Sequence[Condition], factors: Iterable[int]) -> str:
    """A line for each condition, arm and learning rate; empty where there is no number."""
    rows = []
    for each in found:
        for row in each.rows:
            reached, shares = row.reached, row.reached.share if row.reached else None
            line: dict[str, object] = {
                "condition": each.name,
                "arm": row.arm,
                "learning_rate": row.learning_rate,
                "best_rate": row.chosen,
                "seeds": " ".join(map(str, row.seeds)),
                "parameters": row.parameters,
                "parameters_over_baseline": row.parameter_difference,
                "tokens": row.tokens,
                **_cells("final", row.final),
                **_cells("best", row.best),
                **_cells("difference", row.difference),
                "pairs": row.difference.count if row.difference else "",
                **_cells("share_of_tokens_to_baseline", shares),
                "reached": f"{reached.count} of {reached.of}" if reached else "",
                **_cells("tokens_per_second", row.speed),
                **_cells("tokens_per_second_alone", row.alone),
                **_cells("at_equal_time", row.timely),
                **_cells("difference_at_equal_time", row.timely_difference),
                "peak_memory_bytes": row.peak_memory,
            }
            for factor in factors:
                value = row.long(factor)
                known = value if isinstance(value, Interval) else None
                line |= _cells(f"at_{factor}x_length", known)
            rows.append(line)
    return _csv(rows)


def _cells(name: str, value: Interval | None) -> dict[str, object]:
    names = (name, f"{name}_sd", f"{name}_low", f"{name}_high")
    if value is None:
        return dict.fromkeys(names, "")
    return dict(zip(names, (value.mean, value.deviation, value.low, value.high), strict=True))


def runs_csv(results: Sequence[Result]) -> str:
    """A line for each run, finished or not: what the table's means are made of."""
    rows = []
    for run in results:
        line: dict[str, object] = {
            "run": run.spec.folder,
            "arm": run.spec.arm,
            "seed": run.spec.seed,
            "learning_rate": run.spec.settings.learning_rate,
            "state": run.state,
            "steps": run.steps,
            "final": run.final if run.trained else None,
            "best": run.best if run.trained else None,
            "tokens_per_second": run.speed,
            "peak_memory_bytes": run.peak_memory,
            "failure": run.failure,
        }
        for window in run.measured.get("windows", []):
            line[f"at_{window['factor']}x_length"] = window.get("bits_per_byte")
        rows.append(line)
    return _csv(rows)


def curves_csv(results: Sequence[Result]) -> str:
    """A line for each validation of each run: small enough to publish, unlike the runs' own logs.

    The training loss is the mean over the steps since the run's line before. An arm with several
    rates or settings is called after its folder, ``arm/settings``, so that
    `enwik8.curves.load_runs` can tell its curves apart; seeds stay seeds.
    """
    names = [run.spec.folder.removesuffix(f"-seed{run.spec.seed}") for run in results]
    variants: dict[str, set[str]] = {}
    for run, name in zip(results, names, strict=True):
        variants.setdefault(run.spec.arm, set()).add(name)
    rows: list[Mapping[str, object]] = []
    for run, name in zip(results, names, strict=True):
        if run.log is None:
            continue
        training, objective, begin = run.log.train, run.log.objective, 0
        validation = run.log.columns[objective.validation_column]
        for row in np.flatnonzero(np.isfinite(validation)).tolist():
            rows.append(
                {
                    "arm": run.spec.arm if len(variants[run.spec.arm]) == 1 else name,
                    "seed": run.spec.seed,
                    "step": int(run.log.columns["step"][row]),
                    "tokens": int(run.log.tokens[row]),
                    objective.train_column: float(training[begin : row + 1].mean()),
                    objective.validation_column: float(validation[row]),
                    "corpus": describe_corpus(run.config),
                }
            )
            begin = row + 1
    return _csv(rows)


def _csv(rows: Sequence[Mapping[str, object]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: "" if _missing(v) else v for k, v in row.items()})
    return text.getvalue()


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
