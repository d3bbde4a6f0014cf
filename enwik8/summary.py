"""The words about a comparison: a table, a verdict and its conditions, from the files only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enwik8.curves import (
    Floats,
    Run,
    align,
    by_arm,
    corpora_of,
    load_runs,
    objective_of,
    read_config,
)
from enwik8.plot import write_whole

__all__ = ["batch_check", "summarize", "tokens_to_reach", "verdict"]

NONE = "-"


def summarize(folder: str | Path) -> str:
    """Write `summary.md` into a run's or a comparison's folder and return its text.

    The file is replaced whole or not at all.

    Raises:
        UserError: the folder has no readable log, or cannot be written.
    """
    folder = Path(folder)
    runs = load_runs(folder)
    config = read_config(folder) or runs[0].config
    training = config.get("training") or {}
    tokens = training.get("tokens") if isinstance(training, dict) else None
    corpus = config.get("corpus") or runs[0].config.get("corpus")
    digest = corpus.get("sha256") if isinstance(corpus, dict) else None
    command = config.get("command") or runs[0].config.get("command")

    corpora, objective = corpora_of(runs), objective_of(runs)
    lines = [f"# {' against '.join(by_arm(runs)) if len(by_arm(runs)) < 3 else 'Comparison'}", ""]
    if len(corpora) == 1:
        lines += [f"Corpus: {corpora[0]}." + (f" sha256 `{digest}`." if digest else "")]
    else:
        lines += ["**The corpora differ: these numbers are not comparable.**"]
        lines += [f"- {corpus}" for corpus in corpora]
    if not objective.causal:
        lines += [f"Objective: {objective.name}. {objective.description}"]
    if isinstance(tokens, int):
        lines += [f"Planned: {tokens:,} training tokens an arm (a token is a byte)."]
    part = training.get("validation_bytes") if isinstance(training, dict) else None
    splits = corpus.get("splits") if isinstance(corpus, dict) else None
    whole = splits.get("valid") if isinstance(splits, dict) else None
    # The first byte of a split is never a target.
    if isinstance(part, int) and not (isinstance(whole, int) and part >= whole - 1):
        of = f"the {whole:,} bytes" if isinstance(whole, int) else "the bytes"
        lines += [f"Validation on the first {part:,} of {of} of the validation split only."]
    lines += ["", *(f"- {line}" for line in verdict(runs)), "", *_table(runs), ""]
    lines += [
        f"{objective.unit.capitalize()}: mean loss in nats over ln 2, weighted by token; lower is "
        f"better. Perplexity per {objective.per}: 2 to that power. Tokens/s: over the whole "
        "training.",
        "",
        batch_check(runs),
    ]
    if command:
        lines += ["", "Command:", "", "```", str(command), "```"]
    text = "\n".join(lines) + "\n"
    write_whole(folder / "summary.md", text.encode("utf-8"))
    return text


def _table(runs: Sequence[Run]) -> list[str]:
    objective = objective_of(runs)
    names = (
        *("arm", "seed", "parameters", "tokens", f"final validation {objective.unit}", "best"),
        *(f"perplexity per {objective.per}", "tokens/s"),
    )
    lines = ["| " + " | ".join(names) + " |", "|:--|" + "--:|" * (len(names) - 1)]
    for run in runs:
        count, (when, values) = run.config.get("parameters"), run.validation
        tokens = run.tokens[-1] if run.tokens.size else 0
        final = best = perplexity = NONE
        if values.size:
            final, best = f"{values[-1]:.4f}", f"{values.min():.4f}"
            perplexity = f"{2 ** values[-1]:.3f}"
            if when[-1] < tokens:
                final += f" (at {when[-1]:,.0f} tokens)"
        planned = (run.config.get("training") or {}).get("tokens")
        done = f"{tokens:,.0f}"
        if isinstance(planned, int) and tokens < planned:
            done += f" of {planned:,} (unfinished)"
        if run.train.size and not np.isfinite(run.train[-1]):
            done += " (loss no longer finite)"
        cells = (run.arm, run.seed, f"{count:,}" if isinstance(count, int) else NONE, done)
        row = (*cells, final, best, perplexity, _speed(run))
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return lines


def _speed(run: Run) -> str:
    seconds = run.columns.get("seconds")
    if seconds is None or not seconds.size or not seconds[-1] > 0:
        return NONE
    return f"{run.tokens[-1] / seconds[-1]:,.0f}"


@dataclass(frozen=True)
class _Arm:
    """Mean validation curve of an arm's seeds, on the tokens that all of them have."""

    name: str
    tokens: Floats
    values: Floats
    spread: float  # half the range of the seeds' final values

    @property
    def final(self) -> float:
        return float(self.values[-1])

    def __str__(self) -> str:
        seeds = f" ± {self.spread:.4f}" if self.spread else ""
        return f"{self.name} {self.final:.4f}{seeds}"


def _mean_curves(runs: Sequence[Run]) -> list[_Arm]:
    arms = []
    for name, seeds in by_arm(runs).items():
        series = [run.validation for run in seeds if run.validation[0].size]
        tokens, values = align(series) if series else (np.empty(0), np.empty((1, 0)))
        spread = float(np.ptp(values[:, -1])) / 2 if tokens.size else 0.0
        arms.append(_Arm(name, tokens, values.mean(axis=0), spread))
    return arms


def verdict(runs: Sequence[Run] | str | Path) -> list[str]:
    """Say how the arms compare: three lines for two arms.

    Final validation loss of each arm, in the objective's unit; the difference; and the tokens that
    the arm with RoPE needed to reach the other arm's final value. With more arms, every arm against
    the first. With several seeds, means over them ("± half the range"). `runs` may be a folder.

    Raises:
        UserError: `runs` is a folder without a readable log.
    """
    if isinstance(runs, (str, Path)):
        runs = load_runs(runs)
    arms, unit = _mean_curves(runs), objective_of(runs).unit
    ready = [arm for arm in arms if arm.tokens.size]
    waiting = [f"{arm.name}: no validation yet" for arm in arms if not arm.tokens.size]
    if len(arms) == 2 and not waiting:
        base, other = arms
        if "rope" in base.name and "rope" not in other.name:
            base, other = other, base
        return [
            f"Validation {unit}: {base}, {other}",
            f"Difference: {other.name} is {_difference(base, other)}",
            f"Tokens to the final value of {base.name}: {other.name} {_reached(base, other)}",
        ]
    if not arms[0].tokens.size:
        return [f"{arm}: final validation {unit}" for arm in ready] + waiting
    base = arms[0]
    return [
        f"{base}: final validation {unit} of the first arm, the baseline",
        *(f"{arm}: {_difference(base, arm)}; {_reached(base, arm)}" for arm in ready[1:]),
        *waiting,
    ]


def _difference(base: _Arm, other: _Arm) -> str:
    change = other.final - base.final
    text = f"{abs(change):.4f} ({abs(change) / base.final:.2%}) "
    text += "lower" if change < 0 else "higher"
    ends = base.tokens[-1], other.tokens[-1]
    if ends[0] != ends[1]:
        text += f", but on UNEQUAL tokens ({ends[1]:,.0f} against {ends[0]:,.0f})"
    return text


def _reached(base: _Arm, other: _Arm) -> str:
    needed = tokens_to_reach(other.tokens, other.values, base.final)
    if needed is None:
        return f"did not reach {base.final:.4f}"
    bound = "at most " if needed == other.tokens[0] else ""
    share = needed / base.tokens[-1]
    return f"reached {base.final:.4f} after {bound}{needed:,.0f} tokens ({share:.0%})"


def tokens_to_reach(tokens: Floats, values: Floats, target: float) -> float | None:
    """Tokens at which a validation curve first falls to `target`; None if it never does.

    Linear between validation points. A curve at or below `target` from its first point on gives
    that point's tokens, which is an upper bound.
    """
    below = np.flatnonzero(values <= target)
    if not below.size:
        return None
    index = int(below[0])
    if index == 0:
        return float(tokens[0])
    drop = values[index - 1] - values[index]
    share = (values[index - 1] - target) / drop
    return float(tokens[index - 1] + share * (tokens[index] - tokens[index - 1]))


def batch_check(runs: Sequence[Run]) -> str:
    """Say whether the arms saw the same batches, by the running hashes in their logs.

    Arms are compared seed by seed, over the steps that both have.
    """
    compared, unequal = 0, []
    for seed in dict.fromkeys(run.seed for run in runs):
        logs = [
            (run.arm, dict(zip(run.columns["step"], run.columns["batch_hash"], strict=True)))
            for run in runs
            if run.seed == seed and "batch_hash" in run.columns and run.tokens.size
        ]
        for (base, expected), (arm, found) in ((logs[0], log) for log in logs[1:]):
            steps = sorted(expected.keys() & found.keys())
            compared += bool(steps)
            wrong = next((step for step in steps if expected[step] != found[step]), None)
            if wrong is not None:
                unequal.append(f"{arm} and {base} (seed {seed}) differ from step {wrong:.0f} on")
    if unequal:
        return f"**WARNING: the batches of the arms are NOT equal: {'; '.join(unequal)}.**"
    if not compared:
        return "Batches: nothing to compare (one arm, or no hashes in the logs)."
    what = "Batches" if objective_of(runs).causal else "Batches and masks"
    return f"{what}: equal in all arms at every common step (checked by the hashes in the logs)."
