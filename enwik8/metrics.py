"""``metrics.csv`` of a run: a row a step, appended and flushed, and never a step twice."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from types import TracebackType
from typing import TextIO

from .checkpoint import replace_file
from .errors import UserError
from .objectives import CAUSAL, Objective

__all__ = ["MetricsLog", "column_names", "merge", "read_rows"]


def column_names(objective: Objective = CAUSAL) -> tuple[str, ...]:
    """The log's first line: the losses' columns are called after the objective's unit."""
    return (
        "step",
        "tokens",
        objective.train_column,
        objective.validation_column,
        "learning_rate",
        "gradient_norm",
        "seconds",
        "tokens_per_second",
        "batch_hash",
    )


class MetricsLog:
    """The log of one run, open for appending.

    Args:
        path: the file. Without it, or with ``through=0``, a new log is begun.
        through: the step of the checkpoint that training goes on from. Rows after it are dropped,
            because these steps will be trained again.
        objective: names the columns of the losses.
        digest: the checkpoint's hash of the batches, which the row of its step must have.

    Raises:
        UserError: the file cannot be written, lacks rows up to ``through``, or is another run's.
    """

    def __init__(
        self,
        path: Path,
        through: int = 0,
        objective: Objective = CAUSAL,
        digest: str | None = None,
    ) -> None:
        self.path = path
        self._objective = objective
        rows = read_rows(path, objective)[:through] if through else []
        if [row["step"] for row in rows] != [str(step) for step in range(1, through + 1)]:
            raise UserError(
                f"{path} does not hold the rows of steps 1 to {through} that belong to the "
                "checkpoint; it was left untouched (--overwrite starts the run again)"
            )
        if rows and digest is not None and rows[-1]["batch_hash"] != digest:
            raise UserError(
                f"{path} is the log of other batches than the checkpoint's, so of another run; it "
                "was left untouched (--overwrite starts the run again)"
            )
        self._last = rows[-1] if rows else None
        replace_file(path, _text(rows, objective))
        self._file = self._open()

    def _open(self) -> TextIO:
        try:
            return open(self.path, "a", encoding="utf-8", newline="")
        except OSError as error:
            raise UserError(f"{self.path} could not be written ({error})") from error

    def append(self, row: dict[str, str]) -> None:
        """Write one row and hand it to the system, so that a kill cannot lose it."""
        try:
            self._file.write(_line(row, self._objective))
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path} could not be written ({error})") from error
        self._last = row

    @property
    def last(self) -> dict[str, str] | None:
        """The last row, if any."""
        return self._last

    def amend_last(self, column: str, value: str) -> None:
        """Fill in a column of the last row (a validation that had been interrupted)."""
        rows = read_rows(self.path, self._objective)
        rows[-1][column] = value
        self._file.close()
        replace_file(self.path, _text(rows, self._objective))
        self._file = self._open()
        self._last = rows[-1]

    def sync(self) -> None:
        """Make the rows so far survive a power cut; done before a checkpoint that needs them."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError:
            if error is None:
                raise


def read_rows(path: Path, objective: Objective = CAUSAL) -> list[dict[str, str]]:
    """All whole rows of a ``metrics.csv``; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(whole))
    try:
        if whole and tuple(reader.fieldnames or ()) != column_names(objective):
            raise UserError(
                f"{path} has not the columns of a run's metrics ({objective.unit}); it was left "
                "untouched"
            )
        return [row for row in reader if None not in row.values() and None not in row]
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num + 1}, is damaged ({error}); it was left untouched"
        ) from error


def merge(runs: list[tuple[str, int, Path]], out: Path, objective: Objective = CAUSAL) -> None:
    """Write the rows of several runs, (arm, seed, metrics.csv), into one file, in one step."""
    lines = [",".join(("arm", "seed", *column_names(objective))) + "\n"]
    for arm, seed, path in runs:
        lines += [f"{arm},{seed},{_line(row, objective)}" for row in read_rows(path, objective)]
    replace_file(out, "".join(lines))


def _line(row: dict[str, str], objective: Objective) -> str:
    return ",".join(row[name] for name in column_names(objective)) + "\n"


def _text(rows: list[dict[str, str]], objective: Objective) -> str:
    return ",".join(column_names(objective)) + "\n" + "".join(_line(row, objective) for row in rows)
