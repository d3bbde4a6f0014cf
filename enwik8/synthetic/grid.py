"""All cells of a table: task x arm x seed. Finished ones are kept, so a run can go on.

A folder holds `config.json` (settings and arms), `results.csv` (a row a cell, number of
pairs and length) and the figure. Axes can grow from call to call: more tasks, arms or seeds are new
cells. Settings cannot.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from enwik8.errors import UserError
from enwik8.interrupt import Lock
from enwik8.plot import write_whole

from .tasks import TASKS
from .train import Cell, Result, Settings, config_of, train_cell

__all__ = ["Table", "cells_of", "read", "run"]

HEADER = ("task", "arm", "seed", "pairs", "length", "accuracy", "loss", "steps", "seconds")
CONFIG, RESULTS = "config.json", "results.csv"

Arms = Mapping[str, Mapping[str, Any]]
Table = dict[Cell, list[Result]]


def run(
    out: Path,
    settings: Settings,
    arms: Arms,
    *,
    tasks: Sequence[str] = tuple(TASKS),
    seeds: Sequence[int] = (0,),
) -> Table:
    """Train what is not in the folder yet; returns the whole table.

    Args:
        arms: names, and the fields of `linear_rope.Config` that make them.

    Raises:
        ValueError: a task, arm or size that does not fit; before anything is trained.
        UserError: a folder with other settings, or damaged, or that cannot be written.
    """
    cells = cells_of(tasks, list(arms), seeds)
    _check(cells, settings, arms)
    out.mkdir(parents=True, exist_ok=True)
    with Lock(out):
        _agree(out, settings, arms)
        table = read(out)
        for number, cell in enumerate(cells, start=1):
            if cell in table:
                continue
            table[cell] = _train(cell, arms[cell.arm], settings, f"{number}/{len(cells)}")
            _write(out, table)
    return table


def cells_of(tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """The cells in the order of training: all of one seed first, so that a whole picture is there
    early."""
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"task {task!r} is unknown; known tasks: {', '.join(TASKS)}")
    return [Cell(task, arm, seed) for seed in seeds for task in tasks for arm in arms]


def _check(cells: Sequence[Cell], settings: Settings, arms: Arms) -> None:
    s = settings
    s.check()
    if not cells:
        raise ValueError("there is nothing to do: give at least one task, arm and seed")
    for task in {cell.task: TASKS[cell.task] for cell in cells}.values():
        for pairs, factor in product(task.pairs(s.pairs), s.longer):
            draws = torch.Generator().manual_seed(0)
            task.make(1, s.length * factor, pairs, s.vocab_size, draws)
    for fields in arms.values():
        config_of(fields, s)


def _agree(out: Path, settings: Settings, arms: Arms) -> None:
    """Write config.json, or compare with the one there."""
    path = out / CONFIG
    now = json.loads(json.dumps({"settings": asdict(settings), "arms": dict(arms)}, default=dict))
    if path.exists():
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
            old, known = dict(there["settings"]), dict(there["arms"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); choose another folder") from error
        changed = [
            f"{name} was {old.get(name)!r}, is {value!r}"
            for name, value in now["settings"].items()
            if old.get(name) != value
        ]
        changed += [
            f"arm {name} was {known[name]}, is {fields}"
            for name, fields in now["arms"].items()
            if name in known and known[name] != fields
        ]
        if changed:
            raise UserError(
                f"{out} holds a table with other settings ({'; '.join(changed)}); give those, or "
                "another folder"
            )
        now["arms"] = {**known, **now["arms"]}
    write_whole(path, (json.dumps(now, indent=2) + "\n").encode())


def read(out: Path) -> Table:
    """The table in a folder; empty where there is none.

    Raises:
        UserError: a damaged file.
    """
    path = out / RESULTS
    table: Table = {}
    if not path.exists():
        return table
    try:
        for row in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))):
            cell = Cell(row["task"], row["arm"], int(row["seed"]))
            table.setdefault(cell, []).append(
                Result(
                    int(row["pairs"]),
                    int(row["length"]),
                    float(row["accuracy"]),
                    float(row["loss"]),
                    int(row["steps"]),
                    float(row["seconds"]),
                )
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove it or choose another folder"
        ) from error
    return table


def _write(out: Path, table: Table) -> None:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(HEADER)
    for cell, results in table.items():
        for r in results:
            measured = (r.pairs, r.length, f"{r.accuracy:.4f}", f"{r.loss:.4f}")
            spent = (r.steps, f"{r.seconds:.1f}")
            rows.writerow((cell.task, cell.arm, cell.seed, *measured, *spent))
    write_whole(out / RESULTS, text.getvalue().encode())


def _train(cell: Cell, fields: Mapping[str, Any], settings: Settings, place: str) -> list[Result]:
    name = f"{place} {cell.task}, {cell.arm}, seed {cell.seed}"
    # A file gets a line now and then, a terminal a smooth bar.
    interval = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(total=settings.steps, desc=name, mininterval=interval, dynamic_ncols=True) as bar:

        def progress(step: int, loss: float, right: float) -> None:
            bar.set_postfix_str(f"loss {loss:.3f}, right {right:.0%}", refresh=False)
            bar.update(1)

        results = train_cell(cell, fields, settings, progress)
    shown = ", ".join(
        f"{r.accuracy:.0%} at {r.length}" + (f" with {r.pairs} pairs" if r.pairs else "")
        for r in results
    )
    print(f"{name}: {shown} ({results[0].steps} steps, {results[0].seconds:.0f} s)", flush=True)
    return results
