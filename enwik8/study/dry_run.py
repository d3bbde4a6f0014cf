"""What ``study --dry-run`` prints: the runs, what each costs, and how long all will take."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ..corpus import Corpus
from .estimate import cost, same_work, timed
from .results import Result

__all__ = ["costs", "duration"]


def costs(
    results: Sequence[Result], corpora: Mapping[str, Corpus], workers: int, time_steps: int
) -> str:
    """A line a run, and the sums.

    Args:
        results: all runs, begun or not.
        workers: runs at once.
        time_steps: train that many steps of each kind of run whose time no run here tells yet.
    """
    speeds: dict[tuple[object, ...], list[float]] = {}
    peaks: dict[tuple[object, ...], float] = {}
    for result in results:
        if result.speed is None:
            continue
        key = same_work(result.spec)
        for known in ((result.spec.arm, *key), key):
            speeds.setdefault(known, []).append(result.speed)
            if result.peak_memory:
                peaks[known] = max(peaks.get(known, 0.0), result.peak_memory)
    words: dict[tuple[object, ...], str] = {}
    names = ("run", "state", "parameters", "tokens", "time", "from", "memory", "from")
    rows: list[tuple[str, ...]] = [names]
    left, unknown = 0.0, 0
    for result in results:
        run, s = result.spec, result.spec.settings
        key = (run.arm, *same_work(run))
        if time_steps and key not in speeds:
            speeds[key] = [timed(run, time_steps, corpora[s.corpus])]
            words[key] = f"{time_steps} timed steps"
        validation = min(s.validation_bytes or sys.maxsize, len(corpora[s.corpus].valid) - 1)
        one = cost(run, validation, speeds, peaks, words.get(key, "runs here"))
        if one.seconds is None:
            unknown += not result.complete
        else:
            left += one.seconds * (1 - result.steps / s.steps)
        time = "?" if one.seconds is None else duration(one.seconds)
        memory = f"{one.memory / 2**20:,.0f} MiB"
        sizes = (f"{one.parameters:,}", f"{one.tokens:,}")
        rows.append((run.folder, result.state, *sizes, time, one.timed_by, memory, one.memory_by))
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    tokens = sum(r.spec.settings.steps * r.spec.settings.batch_size * r.spec.settings.length
                 for r in results)  # fmt: skip
    at_once = "one after another" if workers == 1 else f"with {workers} at once"
    needed = [f"about {duration(left / workers)}"] if left or not unknown else []
    needed += [f"{unknown} runs of unknown time"] if unknown else []
    lines += [
        "",
        f"{len(results)} runs, {tokens:,} training tokens in all. Time left {at_once}: "
        f"{' and '.join(needed)}.",
        "Time: training and its evaluations, from the tokens per second of runs or timed steps; "
        "runs at once may slow each other down.",
    ]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Like ``2 h 05 min``, ``3 min 20 s`` or ``4.2 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
