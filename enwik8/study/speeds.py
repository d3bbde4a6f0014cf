"""How fast each arm trains when it has the machine to itself: the clock of equal-time results.

Runs that are trained at once slow each other down, and a study may take days on a machine that
does other things too, so the logs cannot tell what a second is worth. `measure` trains some steps
of every arm in turn, in rounds, and keeps the rates beside the study.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from tqdm import tqdm

from .. import checkpoint
from ..corpus import Corpus
from ..errors import UserError
from ..presets import Settings
from .estimate import timed
from .plan import Plan, RunSpec, slug

__all__ = ["NAME", "Rates", "condition_slug", "measure", "read_speeds"]

NAME = "speeds.json"
ROUNDS = 5

Rates = Mapping[str, Mapping[str, Sequence[float]]]
"""Condition (`condition_slug`) -> arm -> training tokens per second, a number a round."""


def condition_slug(plan: Plan, settings: Settings) -> str:
    """The name of the settings but for the learning rate, which costs no time, and the seed."""
    rate = plan.base.learning_rate
    return slug(plan.base, dataclasses.replace(settings, learning_rate=rate))


def measure(plan: Plan, corpora: Mapping[str, Corpus], steps: int, out: Path) -> None:
    """Time ``steps`` training steps of each arm in each condition, in `ROUNDS` rounds; write them.

    A round goes through all arms, so that a machine that slows down meanwhile slows all of them.
    """
    kinds: dict[tuple[str, str], RunSpec] = {}
    for run in plan.runs:
        kinds.setdefault((condition_slug(plan, run.settings), run.arm), run)
    rates: dict[str, dict[str, list[float]]] = {}
    total = ROUNDS * len(kinds)
    with tqdm(total=total, desc="timing alone", unit="arm", file=sys.stderr) as bar:
        for _ in range(ROUNDS):
            for (name, arm), run in kinds.items():
                rate = timed(run, steps, corpora[run.settings.corpus])
                rates.setdefault(name, {}).setdefault(arm, []).append(rate)
                bar.update()
    content = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "steps": steps,
        "tokens_per_second": rates,
    }
    checkpoint.replace_file(out / NAME, json.dumps(content, indent=1) + "\n")


def read_speeds(out: Path) -> Rates:
    """What `measure` wrote; empty where it has not.

    Raises:
        UserError: the file is damaged.
    """
    path = out / NAME
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))["tokens_per_second"]
        return {
            str(name): {str(arm): [float(x) for x in values] for arm, values in arms.items()}
            for name, arms in rates.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({error}); it was left untouched: delete it, and measure again "
            "with --measure-speed"
        ) from error
