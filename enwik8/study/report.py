"""The report of a study: tables, figures, summary.md, and report.html of all of it.

Everything is made anew from the runs' files, so it can be made at any time, of a study that is
under way too.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ..checkpoint import replace_file
from ..curves import corpora_of, model_size
from ..objectives import objective_named
from ..plot import save_figure
from ..record import versions
from ..statistics import Interval
from .figures import draw
from .page import Cell, Picture, Table, markdown, page
from .plan import Plan
from .results import Result, fairness
from .speeds import read_speeds
from .tables import ArmRow, Condition, conditions, curves_csv, runs_csv, table_csv

__all__ = ["report"]

LOOSE = 0.1  # half of a rate's 95 % interval, as a share of the rate, that is worth a warning

Part = str | Table | Picture | list[str]


def report(plan: Plan, results: Sequence[Result], out: Path, command: str) -> list[Path]:
    """Write the report of what there is; returns the paths, the page first.

    Raises:
        UserError: a file cannot be written.
    """
    found = conditions(plan, results, read_speeds(out))
    factors = plan.evaluation.factors if plan.evaluation is not None else ()
    unit = objective_named(plan.base.objective).unit
    parts: list[Part] = [*_facts(plan, results, command), *_state(results)]
    figures: list[Path] = []
    for number, each in enumerate(found, start=1):
        unit = objective_named(each.settings.objective).unit
        parts += _condition(each, factors, unit)
        suffix = "" if len(found) == 1 else f"-{number}"
        heading = plan.title if len(found) == 1 else f"{plan.title} ({each.name})"
        for name, (figure, words) in draw(each, heading, unit).items():
            png, svg = save_figure(figure, out / f"{name}{suffix}")
            figures += [png, svg]
            parts.append(Picture(png, words))
    parts += [*_every_run(results), *_how(unit)]
    texts = {
        "report.html": page(plan.title, parts),
        "summary.md": markdown(plan.title, parts),
        "table.csv": table_csv(found, factors),
        "runs.csv": runs_csv(results),
        "curves.csv": curves_csv(results),
    }
    for name, text in texts.items():
        replace_file(out / name, text)
    return [*(out / name for name in texts), *figures]


def _facts(plan: Plan, results: Sequence[Result], command: str) -> Iterator[Part]:
    logs = [run.log for run in results if run.log is not None]
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    with_what = ", ".join(f"{name} {version}" for name, version in versions().items())
    facts = [f"Report of {now}, {os.cpu_count()} CPU cores, {_processor()}; {with_what}."]
    if logs:
        facts = [f"Corpus: {corpus}." for corpus in corpora_of(logs)] + facts
        digests = sorted({str(log.config["corpus"]["sha256"]) for log in logs})
        facts.insert(1, "SHA-256 of the corpus: " + ", ".join(f"`{each}`" for each in digests))
        facts.insert(1, f"Models: {model_size(logs)}.")
    if command:
        facts.append(f"Command: `{command}`; the study's file is in study.toml beside this report.")
    yield facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = [line for line in lines if line.startswith("model name")]
        return named[0].split(":", 1)[1].strip()
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def _state(results: Sequence[Result]) -> Iterator[Part]:
    """What is missing, and whether what is there is comparable."""
    unfair, trained = fairness(results), sum(run.trained for run in results)
    lines = [f"{trained} of {len(results)} runs are finished."]
    failed = [run for run in results if run.failure is not None and not run.complete]
    lines += [f"**Failed: {run.spec.folder}**: {run.failure}" for run in failed]
    lines += [
        f"Unfinished: {run.spec.folder}, {run.state}"
        for run in results
        if not run.trained and run not in failed
    ]
    lines += [f"**NOT FAIR: {fault}**" for fault in unfair]
    if trained and not unfair:
        lines.append(
            "Fairness, checked by the hashes in the logs: the finished runs that share a table and "
            "a seed saw the same batches at every step, and began with the same values of the "
            "parameters that they share."
        )
    yield lines


def _condition(each: Condition, factors: Sequence[int], unit: str) -> Iterator[Part]:
    yield f"## Results at {each.name}"
    yield _findings(each, unit)
    yield _main_table(each, unit)
    if each.swept:
        yield "### Learning rates"
        yield [
            f"**The best rate of {row.arm}, {row.learning_rate:g}, is at the edge of those tried: "
            "a better one may lie beyond.**"
            for row in each.at_edge()
        ]
        yield _rates_table(each, unit)
    if any(row.alone is not None for row in each.chosen):
        yield "### Equal time"
        yield _time_table(each, unit)
        yield _loose_rates(each)
    if any(row.long(factor) is not None for row in each.chosen for factor in factors):
        yield "### Longer windows than in training"
        yield _long_table(each, factors, unit)


def _time_table(each: Condition, unit: str) -> Table:
    seconds = each.base.seconds if each.base is not None else None
    names = (
        *("arm", "tokens/s alone", "seconds for all tokens"),
        f"{unit} after {seconds:,.0f} s" if seconds else unit,
        "difference",
    )
    rows = []
    for row in sorted(each.chosen, key=lambda row: row.timely.mean if row.timely else 1e9):
        needed = row.seconds
        done = row.timely is not None and needed is not None and seconds and needed <= seconds
        text = _cell(row.timely)
        rows.append(
            (
                Cell(row.arm + (" (baseline)" if row.arm == each.baseline else ""), None),
                _cell(row.alone, digits=0),
                Cell("-", None) if needed is None else Cell(f"{needed:,.0f}", needed),
                Cell(f"{text.text} (done)", text.order) if done else text,
                _cell(row.timely_difference, signed=True),
            )
        )
    return Table(names, tuple(rows))


def _loose_rates(each: Condition) -> list[str]:
    """A warning, where too little was timed for the losses at equal time to mean much."""
    loose = {
        row.arm: row.alone.half / row.alone.mean
        for row in each.chosen
        if row.alone is not None and row.alone.half > LOOSE * row.alone.mean
    }
    if not loose:
        return []
    arms = ", ".join(f"{arm} ± {share:.1%}" for arm, share in loose.items())
    return [
        f"**Loose rates: {arms} (over {LOOSE:.0%}). Their losses at equal time, and all of them if "
        "the baseline is among these, are known no better; more steps (`--report-only "
        "--measure-speed`) with nothing else on the machine tell more.**"
    ]


def _findings(each: Condition, unit: str) -> list[str]:
    base = each.base
    if base is None:
        return [f"No finished run of the baseline {each.baseline} yet: no differences."]
    lines = [f"{each.baseline}, the baseline: {_plain(base.final)} {unit} at the end."]
    for row in sorted(each.chosen, key=lambda row: row.final.mean):
        if row is base or row.difference is None:
            continue
        text = f"{row.arm}: {_plain(row.final)}, {_change(row.difference, 'the baseline')}"
        if row.reached is not None and row.reached.share is not None:
            text += f"; the baseline's final loss after {_share(row)} of its tokens"
        lines.append(text + ".")
    lines += [f"{arm}: {_change(difference, other)}." for arm, other, difference in each.pairs]
    return lines


def _change(change: Interval, other: str) -> str:
    """The difference to another arm, and whether it says anything."""
    if change.count == 1:
        verdict = "one seed: no interval, so no claim"
    elif not change.excludes_zero:
        verdict = "not told apart: the interval holds 0"
    else:
        verdict = f"{'better' if change.mean < 0 else 'worse'}, beyond the interval"
    return f"{_plain(change, signed=True)} against {other} ({verdict})"


def _plain(value: Interval, *, signed: bool = False, digits: int = 4) -> str:
    mean = f"{value.mean:{'+' if signed else ''},.{digits}f}"
    return mean if value.count < 2 else f"{mean} ± {value.half:,.{digits}f}"


def _cell(value: Interval | None, *, signed: bool = False, digits: int = 4) -> Cell:
    return Cell("-", None) if value is None else Cell(
        _plain(value, signed=signed, digits=digits), value.mean
    )  # fmt: skip


def _share(row: ArmRow) -> str:
    reached = row.reached
    if reached is None:
        return "-"
    if reached.share is None:
        return "not reached"
    text = ("at most " if reached.bound else "") + f"{100 * reached.share.mean:.0f} %"
    if reached.count > 1:
        text += f" ± {100 * reached.share.half:.0f}"
    whole = reached.count == reached.of
    return text if whole else f"{text} ({reached.count} of {reached.of} seeds)"


def _main_table(each: Condition, unit: str) -> Table:
    names = ("arm", "learning rate", "seeds", f"final {unit}", "sd", "best", "difference",
             "tokens to baseline's loss", "tokens/s", "peak memory, MiB", "parameters")  # fmt: skip
    rows = []
    for row in sorted(each.chosen, key=lambda row: row.final.mean):
        final, share = row.final, row.reached.share if row.reached else None
        spread = Cell("-", None) if final.count < 2 else Cell(f"{final.deviation:.4f}",
                                                              final.deviation)  # fmt: skip
        memory, count = row.peak_memory, row.parameters
        rows.append(
            (
                Cell(row.arm + (" (baseline)" if row.arm == each.baseline else ""), None),
                Cell(f"{row.learning_rate:g}", row.learning_rate),
                Cell(str(len(row.runs)), len(row.runs)),
                _cell(final),
                spread,
                _cell(row.best),
                _cell(row.difference, signed=True),
                Cell(_share(row), share.mean if share else None),
                _cell(row.speed, digits=0),
                Cell("-", None) if memory is None else Cell(f"{memory / 2**20:,.0f}", memory),
                _parameters(count, row.parameter_difference),
            )
        )
    return Table(names, tuple(rows))


def _parameters(count: int | None, difference: float | None) -> Cell:
    if count is None:
        return Cell("-", None)
    text = f"{count:,}"
    if difference is not None and abs(difference) > 0.01:
        text += f" ({difference:+.1%} of the baseline's)"
    return Cell(text, count)


def _rates_table(each: Condition, unit: str) -> Table:
    rates = sorted({row.learning_rate for row in each.rows})
    rows = []
    for row in each.chosen:
        there = {other.learning_rate: other for other in each.of_arm(row.arm)}
        cells = [Cell(row.arm, None)]
        for rate in rates:
            cell = _cell(there[rate].final if rate in there else None)
            best = rate == row.learning_rate and len(there) > 1
            cells.append(Cell(f"**{cell.text}**", cell.order) if best else cell)
        rows.append(tuple(cells))
    return Table((f"final {unit} at rate", *(f"{rate:g}" for rate in rates)), tuple(rows))


def _long_table(each: Condition, factors: Sequence[int], unit: str) -> Table:
    length = each.settings.length
    names = (unit, *(f"{factor}x, {factor * length:,} bytes" for factor in factors))
    rows = []
    for row in sorted(each.chosen, key=lambda row: row.final.mean):
        cells = [Cell(row.arm, None)]
        for factor in factors:
            value = row.long(factor)
            # A reason says that it cannot; without one it has not been read yet.
            cells.append(Cell("cannot", None) if isinstance(value, str) else _cell(value))
        rows.append(tuple(cells))
    return Table(names, tuple(rows))


def _every_run(results: Sequence[Result]) -> Iterator[Part]:
    yield "## Every run"
    rows = []
    for run in results:
        final = Cell(f"{run.final:.4f}", run.final) if run.trained else Cell("-", None)
        best = Cell(f"{run.best:.4f}", run.best) if run.trained else Cell("-", None)
        speed = Cell("-", None) if run.speed is None else Cell(f"{run.speed:,.0f}", run.speed)
        rows.append((Cell(run.spec.folder, None), Cell(run.state, None), final, best, speed))
    yield Table(("run", "state", "final", "best", "tokens/s"), tuple(rows))


def _how(unit: str) -> Iterator[Part]:
    yield "## How to read this"
    yield [
        f"{unit.capitalize()}: mean loss in nats over ln 2, weighted by token, on the validation "
        "split; lower is better. Final: after the last step. Best: the lowest of the evaluations.",
        "± is half of the 95 % interval of the mean over seeds, by Student's t. It holds for the "
        "choice of the seed alone: same text, same machine.",
        "Difference: the arm less the baseline on the same seed (same batches, same initial values "
        "where both have them), then mean and interval over the seeds.",
        "Tokens to the baseline's loss: where an arm's validation curve first falls to the final "
        "loss of the baseline on the same seed, linear between evaluations; over the seeds that "
        "get there.",
        "Equal time: tokens/s with the machine to itself, measured apart in rounds; the loss when "
        "the baseline has finished, linear between evaluations. An arm that is not done by then is "
        "caught in the middle of its schedule, with a learning rate still high.",
        "The learning rate of each arm is the best of those tried, chosen on validation over the "
        "seeds that all its rates have. Choosing makes the winner's number a little too good.",
        "Longer windows: the same bytes of the validation split cut into longer windows, read "
        "recurrently from the state. Memory: the process at its peak (on an accelerator, of the "
        "device). Tokens/s: median over the steps; runs at once slow each other down.",
    ]
