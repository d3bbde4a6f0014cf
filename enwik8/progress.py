"""Progress on the terminal: loss, tokens a second, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from .objectives import CAUSAL, Objective

__all__ = ["ProgressBar"]


class ProgressBar:
    """One run's bar; begins where a resumed run goes on.

    Args:
        arm: what it is called.
        step, steps: where the run stands, and where it ends.
        tokens, seconds: spent until now, so that the rate is of this session only.
        shown: False for a process that is not the one that talks.
        objective: names the losses in the rows, and their unit.
    """

    def __init__(
        self,
        arm: str,
        step: int,
        steps: int,
        tokens: int,
        seconds: float,
        shown: bool = True,
        objective: Objective = CAUSAL,
    ) -> None:
        self._objective = objective
        # A file gets a line now and then, a terminal a smooth bar.
        self._interval = 0.2 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(
            total=steps,
            initial=step,
            desc=arm,
            unit="step",
            dynamic_ncols=True,
            disable=not shown,
            mininterval=self._interval,
        )
        self._refreshed = time.monotonic()
        self._tokens, self._seconds = tokens, seconds
        self._validation = ""

    def validating(self, share: float) -> None:
        """Say now and then how much of a validation is done, so that the bar does not look stuck.

        `trained` puts the usual text back.
        """
        now = time.monotonic()
        if now - self._refreshed >= self._interval:
            self._refreshed = now
            self._bar.set_postfix_str(f"validating {100 * share:.0f} %")

    def validated(self, value: str) -> None:
        """Take in a validation's loss; empty: there is none."""
        if value:
            self._validation = f", validation {float(value):.3f}"

    def trained(self, row: Mapping[str, str]) -> None:
        """Take in a step, as its row of the log."""
        tokens = int(row["tokens"]) - self._tokens
        seconds = max(float(row["seconds"]) - self._seconds, 1e-3)
        self._bar.set_postfix_str(
            f"train {float(row[self._objective.train_column]):.3f}{self._validation} "
            f"bits/{self._objective.per}, {tokens / seconds:,.0f} tokens/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
