"""Reading the logs of finished, running or killed runs: `metrics.csv` and `config.json`.

A study's `curves.csv`, the points that it publishes of its runs, is read like a log without config.

Everything that looks at results (`plot`, `summary`) starts from these files alone.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from enwik8.errors import UserError
from enwik8.objectives import CAUSAL, OBJECTIVES, Objective

Floats = NDArray[np.float64]
Columns = dict[str, NDArray[Any]]

TEXT = ("arm", "batch_hash", "corpus")  # every other column is a number


@dataclass(frozen=True)
class Run:
    """One arm with one seed: its columns (equal lengths, by step) and its config (may be empty)."""

    arm: str
    seed: int
    columns: Columns
    config: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    @property
    def objective(self) -> Objective:
        """What was trained, by the names of the columns: a log alone says it too."""
        return _objective_in(self.columns) or CAUSAL

    @property
    def tokens(self) -> Floats:
        """Training tokens (bytes) seen after each step."""
        return np.asarray(self.columns["tokens"], dtype=np.float64)

    @property
    def train(self) -> Floats:
        """Training loss in the objective's unit, one a step."""
        return np.asarray(self.columns[self.objective.train_column], dtype=np.float64)

    @property
    def spaced(self) -> bool:
        """Whether steps are left out between the rows, as in a study's `curves.csv`."""
        return bool((np.diff(np.asarray(self.columns["step"], dtype=np.float64)) > 1).any())

    @property
    def validation(self) -> tuple[Floats, Floats]:
        """(tokens, loss in the objective's unit) of the steps with a finite validation value."""
        values = np.asarray(self.columns[self.objective.validation_column], dtype=np.float64)
        kept = np.isfinite(values)
        return self.tokens[kept], values[kept]


def _objective_in(names: Iterable[str]) -> Objective | None:
    there = set(names)
    for objective in OBJECTIVES.values():
        if {objective.train_column, objective.validation_column} <= there:
            return objective
    return None


def read_metrics(path: str | Path) -> Columns:
    """Read a run's or a comparison's `metrics.csv`.

    Returns a dict from column name to an array of one entry a row: float64 for numbers (an empty
    cell is NaN; "nan" and "inf" are kept), str for `arm`, `batch_hash` and `corpus`. A comparison's
    log has `arm` and `seed` in front. Zero rows give empty arrays. The last line is left out if it
    has no end-of-line, which is how a kill in the middle of a write looks.

    Raises:
        UserError: the file is missing, unreadable, not a metrics log, or damaged before its end.
    """
    path = Path(path)
    remedy = "give a folder written by `python -m enwik8 train` or `compare`"
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: {remedy}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a metrics log ({error}): {remedy}") from error

    lines = text.splitlines(keepends=True)
    if len(lines) > 1 and not lines[-1].endswith("\n"):
        lines.pop()
    rows = list(csv.reader(io.StringIO("".join(lines).replace("\0", ""))))
    header = [name.strip() for name in rows[0]] if rows else []
    objective = _objective_in(header) or CAUSAL
    required = ("step", "tokens", objective.train_column, objective.validation_column)
    missing = [name for name in required if name not in header]
    if missing:
        raise UserError(
            f"{path} is not a metrics log (no column {', '.join(missing)} in its first line): "
            f"{remedy}"
        )

    cells: dict[str, list[Any]] = {name: [] for name in header}
    for number, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise UserError(
                f"{path}, line {number}: {len(row)} cells under {len(header)} columns; "
                "delete that line or restore the file"
            )
        for name, cell in zip(header, row, strict=True):
            cells[name].append(cell.strip() if name in TEXT else _number(cell, name, path, number))
    return {
        name: np.array(values, dtype=object if name in TEXT else np.float64)
        for name, values in cells.items()
    }


def _number(cell: str, name: str, path: Path, line: int) -> float:
    if not cell.strip():
        return float("nan")
    try:
        return float(cell)
    except ValueError as error:
        raise UserError(
            f"{path}, line {line}: {name} is {cell!r}, which is not a number; "
            "delete that line or restore the file"
        ) from error


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the folder's `config.json`, or {} if there is none (a log alone can be plotted).

    Raises:
        UserError: the file is there but is not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON ({error}): restore or delete it") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} does not hold a JSON object: restore or delete it")
    return config


def load_runs(folders: str | Path | Iterable[str | Path]) -> list[Run]:
    """Load every run of the given folders, each a run or a comparison, in order of appearance.

    A study's `curves.csv` may stand for a folder.

    Equal arms of different folders count as seeds of one arm when they differ in the seed only;
    otherwise the folder's name is added to the arm's.

    Raises:
        UserError: no folder, a missing one, one without a readable log, or runs of two objectives.
    """
    if isinstance(folders, (str, Path)):
        folders = [folders]
    runs = [run for folder in folders for run in _load_folder(Path(folder))]
    if not runs:
        raise UserError("no folder was given: name a run's or a comparison's folder")
    objective_of(runs)
    return _tell_apart(runs)


def objective_of(runs: Sequence[Run]) -> Objective:
    """The objective that all runs share.

    Raises:
        UserError: they have two, whose losses are different quantities.
    """
    first = runs[0]
    for run in runs[1:]:
        if run.objective != first.objective:
            told = [
                f"{r.arm} in {r.folder} is measured in {r.objective.unit} "
                f"(--objective {r.objective.name})"
                for r in (first, run)
            ]
            raise UserError(
                f"{' and '.join(told)}: these are different quantities; give runs of one objective"
            )
    return first.objective


def _load_folder(folder: Path) -> list[Run]:
    if folder.is_file():
        return _load_points(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder: give one written by `python -m enwik8 train` or `compare`"
        )
    config = read_config(folder)
    if (folder / "study.toml").exists():
        raise UserError(
            f"{folder} holds a study: `python -m enwik8 study --out {folder} --report-only` draws "
            f"its figures, and {folder / 'curves.csv'} or the folders below {folder / 'runs'} can "
            "be drawn here"
        )
    logs = sorted((folder / "runs").glob("*/metrics.csv"))
    if not (folder / "metrics.csv").exists() and logs:  # a comparison killed before its end
        runs = [run for log in logs for run in _load_folder(log.parent)]
        order = _arm_names(config)
        return sorted(runs, key=lambda run: [*order, run.arm].index(run.arm))
    columns = read_metrics(folder / "metrics.csv")
    if "arm" not in columns:
        arm = str(config.get("arm") or folder.name)
        return [Run(arm, _seed(config), _last_of_each_step(columns), config, folder)]
    runs = []
    for arm, seed, part in _by_arm_and_seed(columns):
        own = folder / "runs" / f"{arm}-seed{seed}"
        own_config = read_config(own) or {**config, **_of_arm(config, arm)}
        runs.append(Run(arm, seed, part, own_config, own))
    if not runs:  # a header and nothing else: runs without rows, so that figures say so
        names = _arm_names(config) or [folder.name]
        runs = [Run(arm, 0, columns, {**config, **_of_arm(config, arm)}, folder) for arm in names]
    return runs


def _load_points(path: Path) -> list[Run]:
    """The runs of a study's `curves.csv`; columns of the other objective, if any, are left out."""
    columns = read_metrics(path)
    if "arm" not in columns or not len(columns["arm"]):
        raise UserError(
            f"{path} holds no curves of a study (rows under a column arm): give a study's "
            "curves.csv, or the folder of a run or a comparison"
        )
    runs = []
    for arm, seed, part in _by_arm_and_seed(columns):
        for objective in OBJECTIVES.values():
            names = (objective.train_column, objective.validation_column)
            if all(name in part and np.isnan(part[name]).all() for name in names):
                part = {name: values for name, values in part.items() if name not in names}
        text = str(part["corpus"][0]) if "corpus" in part else "an unknown corpus"
        config = {"corpus": {"name": text.split(" (")[0], "description": text}}
        runs.append(Run(arm, seed, part, config, path.parent))
    return runs


def _by_arm_and_seed(columns: Columns) -> Iterator[tuple[str, int, Columns]]:
    """The rows of each arm and seed, in order of appearance."""
    seeds = columns.get("seed", np.zeros(len(columns["arm"])))
    pairs = dict.fromkeys(zip(columns["arm"].tolist(), seeds.tolist(), strict=True))
    for arm, seed in pairs:
        rows = (columns["arm"] == arm) & (seeds == seed)
        part = {name: values[rows] for name, values in columns.items()}
        yield arm, int(seed), _last_of_each_step(part)


def _arm_names(config: dict[str, Any]) -> list[str]:
    """The arms of a comparison in its own order: a list of names, of objects, or an object."""
    arms = config.get("arms") or []
    named = [arm.get("arm", arm.get("name")) if isinstance(arm, dict) else arm for arm in arms]
    return [str(name) for name in named]


def _of_arm(config: dict[str, Any], arm: str) -> dict[str, Any]:
    """What a comparison's config says about one arm, if its `arms` are objects."""
    arms = config.get("arms")
    if isinstance(arms, dict) and isinstance(arms.get(arm), dict):
        return dict(arms[arm])
    if isinstance(arms, list):
        for entry in arms:
            if isinstance(entry, dict) and arm in (entry.get("arm"), entry.get("name")):
                return entry
    return {}


def _seed(config: dict[str, Any]) -> int:
    for holder in (config, config.get("training"), config.get("model")):
        if isinstance(holder, dict) and isinstance(holder.get("seed"), int):
            return int(holder["seed"])
    return 0


def _last_of_each_step(columns: Columns) -> Columns:
    """Sort by step; of a step that a resumed run repeated, keep the last row."""
    row_of_step = {step: row for row, step in enumerate(columns["step"].tolist())}
    kept = [row_of_step[step] for step in sorted(row_of_step)]
    return {name: values[kept] for name, values in columns.items()}


def _tell_apart(runs: list[Run]) -> list[Run]:
    def settings(run: Run) -> str:
        parts = {name: dict(run.config.get(name) or {}) for name in ("model", "training")}
        for part in parts.values():
            for name in [name for name in part if "seed" in name]:
                del part[name]
        return json.dumps(parts, sort_keys=True, default=str)

    renamed = []
    for run in runs:
        namesakes = [other for other in runs if other.arm == run.arm]
        alike = len({settings(other) for other in namesakes}) == 1
        distinct_seeds = len({other.seed for other in namesakes}) == len(namesakes)
        if alike and distinct_seeds:
            renamed.append(run)
        else:
            label = f"{run.arm} ({run.folder.resolve().name})"
            renamed.append(Run(label, run.seed, run.columns, run.config, run.folder))
    return renamed


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by arm, arms in order of appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.arm, []).append(run)
    return groups


def align(series: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Put several (tokens, values) series on the tokens that all of them have.

    Returns tokens (N,) and values (len(series), N). Other tokens are left out: a mean over a
    changing set of seeds would jump where a seed ends.
    """
    common = sorted(set.intersection(*(set(tokens.tolist()) for tokens, _ in series)))
    # Tokens ascend and occur once in a series, so a membership mask keeps the order.
    rows = [values[np.isin(tokens, common)] for tokens, values in series]
    return np.array(common, dtype=np.float64), np.array(rows, dtype=np.float64)


def smooth(values: ArrayLike, beta: float) -> Floats:
    """Exponential average, causal and without start-up bias.

    s_n = beta * s_{n-1} + (1 - beta) * x_n with s_0 = 0, divided by 1 - beta^n (the bias correction
    of Adam, arXiv 1412.6980, section 3). A value depends on no later one. A NaN or infinite entry
    is a gap: NaN in the result, and left out of the average and of n.

    Raises:
        ValueError: beta outside [0, 1).
    """
    if not 0 <= beta < 1:
        raise ValueError(f"beta is {beta}: give a smoothing factor from 0 (none) to below 1")
    series = np.asarray(values, dtype=np.float64)
    result = np.full(series.shape, np.nan)
    average, weight = 0.0, 0.0
    for index, value in enumerate(series.tolist()):
        if np.isfinite(value):
            average = beta * average + (1 - beta) * value
            weight = beta * weight + (1 - beta)  # equals 1 - beta^n
            result[index] = average / weight
    return result


def corpus_name(config: dict[str, Any]) -> str:
    """Return the corpus's name as its run recorded it; a prefix of enwik8 has its own name."""
    corpus = config.get("corpus")
    return str((corpus.get("name") if isinstance(corpus, dict) else corpus) or "an unknown corpus")


def describe_corpus(config: dict[str, Any]) -> str:
    """Describe the corpus as its run recorded it, which says how much of which text it is."""
    corpus = config.get("corpus")
    if isinstance(corpus, dict) and corpus.get("description"):
        return str(corpus["description"])
    size = corpus.get("bytes") if isinstance(corpus, dict) else None
    return corpus_name(config) + (f", {size:,} bytes" if isinstance(size, int) else "")


def model_size(runs: Sequence[Run]) -> str:
    """Describe the models' size, like "4 layers, 128 wide, 4 heads, 0.8 M parameters"."""
    models = [run.config.get("model") or {} for run in runs]
    parts = []
    for name, words in (("layers", "{} layers"), ("dim", "{} wide"), ("heads", "{} heads")):
        values = {model[name] for model in models if isinstance(model, dict) and name in model}
        if values:
            words = words.removesuffix("s") if values == {1} else words
            parts.append(words.format(" or ".join(str(value) for value in sorted(values))))
    counts = [run.config.get("parameters") for run in runs]
    numbers = sorted(count for count in counts if isinstance(count, int))
    if numbers:
        least, most = (f"{number / 1e6:.3g}" for number in (numbers[0], numbers[-1]))
        parts.append(f"{least if least == most else f'{least} to {most}'} M parameters")
    return ", ".join(parts)


def corpora_of(runs: Sequence[Run]) -> list[str]:
    """Describe the different corpora of the runs; more than one means not comparable."""
    return list(dict.fromkeys(describe_corpus(run.config) for run in runs))
