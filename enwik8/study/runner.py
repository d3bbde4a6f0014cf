"""``python -m enwik8 study``: check everything, run what is missing, report what there is."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from .. import checkpoint, run_folder
from ..corpus import Corpus, load_corpus
from ..distributed import refuse_several
from ..errors import UserError
from ..interrupt import Lock
from ..methods import find
from ..presets import Settings, model_fields
from ..record import training_record
from ..run import make_sampler
from ..tasks import make_config
from . import estimate, speeds
from .dry_run import costs
from .plan import Plan, RunSpec, changes, examine, parse, refuse
from .presets import STUDIES
from .queue import run_all
from .report import report
from .results import Result, load_results

__all__ = ["study"]

COPY = "study.toml"


def study(
    file: str | None,
    out: Path,
    *,
    workers: int = 1,
    dry_run: bool = False,
    time_steps: int = 0,
    report_only: bool = False,
    measure_speed: int = 0,
    command: str = "",
) -> list[Path]:
    """Run a study, or go on with it, into the folder ``out``.

    Args:
        file: a study file, or the name of one of `STUDIES`; None: the folder's own ``study.toml``.
        workers: runs trained at once, each in a process of its own.
        dry_run: print the runs and their costs, and do nothing.
        time_steps: steps that a dry run trains to find the time where no finished run tells it.
        report_only: train nothing; make summary, tables, figures and page from what there is.
        measure_speed: when all runs are done, train that many steps of each arm, alone on the
            machine, for the results at equal time; 0: not.

    Returns:
        The report's files.

    Raises:
        UserError: faults in the file, all of them, before anything runs; a folder that holds
            another study; a finished study with runs that are not comparable or have failed.
        Interrupted: SIGINT or SIGTERM came; the same command goes on.
    """
    refuse_several(
        "study",
        "it starts its own workers (--workers); launch `train` alone over several processes",
    )
    if workers < 1:
        raise UserError(f"--workers must be at least 1, got {workers}")
    if time_steps < 0:
        raise UserError(f"--time-steps must not be negative, got {time_steps}")
    if measure_speed < 0:
        raise UserError(f"--measure-speed must not be negative, got {measure_speed}")
    plan, source, faults = _read(file, out)
    corpora = check_possible(plan, source, faults)
    refuse_changes(plan, out)
    results = load_results(plan, out)
    refuse(str(out), _foreign(results, corpora))
    if dry_run:
        print(costs(results, corpora, workers, time_steps))
        return []
    run_folder.make_writable(out)
    failures: list[str] = []
    with Lock(out):
        refuse_changes(plan, out)  # now that it is ours
        checkpoint.remove_part_files(out)
        checkpoint.replace_file(out / COPY, plan.text)
        try:
            if not report_only:
                todo = [r.spec for r in load_results(plan, out) if not r.complete]
                skipped = len(plan.runs) - len(todo)
                print(f"{len(todo)} runs to do, {skipped} finished already")
                failures = run_all(
                    todo,
                    out,
                    workers=workers,
                    evaluation=plan.evaluation,
                    command=command,
                    finished=_announce,
                )
            if measure_speed:
                speeds.measure(plan, corpora, measure_speed, out)
        finally:  # also of what an interrupted study has, so that it can be looked at
            written = report(plan, load_results(plan, out), out, command)
    for path in written:
        print(path)
    if failures:
        raise UserError(
            f"{len(failures)} of {len(plan.runs)} runs failed; the others went on: "
            + "".join(f"\n  - {failure}" for failure in failures)
        )
    return written


def _announce(run: RunSpec, seconds: float) -> None:
    tqdm.write(f"finished {run.folder} ({seconds:,.0f} s)", file=sys.stderr)


def _read(file: str | None, out: Path) -> tuple[Plan, str, list[str]]:
    """The plan, how to call it, and what is wrong with its file."""
    if file is None:
        path = out / COPY
        if not path.exists():
            raise UserError(
                f"{out} holds no study yet; name a file, or one of: {', '.join(STUDIES)}"
            )
    elif file in STUDIES and not Path(file).is_file():
        return parse(STUDIES[file], f"study {file}"), f"study {file}", []
    else:
        path = Path(file)
    plan, faults = examine(_text(path), str(path))
    return plan, str(path), faults


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"the study file {path} cannot be read ({reason}); "
            f"studies by name: {', '.join(STUDIES)}"
        ) from error


def refuse_changes(plan: Plan, out: Path) -> None:
    """Refuse to go on in a folder whose study had other runs; more of them are welcome.

    Raises:
        UserError: which arms and settings have changed.
    """
    if not (out / COPY).exists():
        return
    wrong, _ = changes(parse(_text(out / COPY), str(out / COPY)), plan)
    if wrong:
        raise UserError(
            f"{out} holds a study whose file said otherwise: {'; '.join(wrong)}; a study can only "
            "get more runs: put these back, or choose another --out"
        )


def check_possible(plan: Plan, source: str, faults: Sequence[str] = ()) -> dict[str, Corpus]:
    """Refuse what a run would refuse later: models, windows, precision, corpora.

    Args:
        faults: those of the file, which are named with what is found here.

    Returns:
        The corpora, by the name that the settings have for them.

    Raises:
        UserError: all faults, a line each.
    """
    faults = list(faults)
    corpora: dict[str, Corpus] = {}
    tried: set[tuple[Any, ...]] = set()

    def attempt(what: str, key: tuple[Any, ...], action: Callable[[], object]) -> None:
        if key in tried:
            return
        tried.add(key)
        try:
            action()
        except (UserError, ValueError, OSError, RuntimeError) as error:
            if not any(fault.endswith(f": {error}") for fault in faults):  # of the file already
                faults.append(f"{what}: {error}")

    def load(s: Settings) -> None:
        corpora[s.corpus] = load_corpus(s.corpus, data_dir=s.data_dir)

    for run in plan.runs:
        s = run.settings
        attempt(f"corpus {s.corpus}", ("corpus", s.corpus, s.data_dir), partial(load, s))
        attempt(
            f"precision {s.precision}",
            ("precision", s.precision, s.cpu),
            partial(Accelerator, cpu=s.cpu, mixed_precision=s.precision),
        )
        size = (s.layers, s.dim, s.heads, s.features, s.length, s.objective, s.dropout)
        fields = partial(model_fields, s, find(run.arm))
        attempt(f"arm {run.arm}", (run.arm, s.objective), fields)
        if s.dim % s.heads == 0:  # it has been said otherwise
            attempt(f"arm {run.arm}", (run.arm, *size), partial(estimate.parameters, run))
        if s.corpus in corpora:
            windows = (s.corpus, s.length, s.batch_size, *s.seeds.values())
            attempt(run.folder, windows, partial(make_sampler, s, corpora[s.corpus]))
    refuse(source, faults)
    return corpora


def _foreign(results: Sequence[Result], corpora: Mapping[str, Corpus]) -> list[str]:
    """Runs in the folder that are not those of the plan, whoever put them there."""
    faults = []
    for result in results:
        if not result.config:
            continue
        settings = result.spec.settings
        model = make_config(model_fields(settings, find(result.spec.arm)))
        now = {
            "arm": result.spec.arm,
            "model": dataclasses.asdict(model),
            "training": training_record(settings),
            "corpus": corpora[settings.corpus].record(),
            "processes": 1,
        }
        differ = run_folder.differences(result.config, json.loads(json.dumps(now)))
        if differ:
            faults.append(f"runs/{result.spec.folder} was trained otherwise: {'; '.join(differ)}")
    return faults
