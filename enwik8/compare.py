"""Several arms with everything equal but the arm: data, order, initial values, tokens, schedule.

Equality holds by construction (batches and initial values depend on seeds only) and is checked
anyway: the running hash of all batches and the fingerprints of all shared parameters must agree,
or the comparison fails.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from . import checkpoint, run_folder
from .corpus import Corpus, load_corpus
from .distributed import refuse_several
from .errors import UserError
from .flags import check_seed
from .interrupt import Interrupted, Lock
from .methods import DEFAULT_ARMS, find
from .metrics import merge, read_rows
from .objectives import Objective, objective_named
from .plot import plot
from .presets import Settings, model_fields
from .record import training_record, versions
from .run import make_sampler
from .summary import summarize, verdict
from .tasks import ModelConfig, make_config, make_model
from .train import RunResult, train

__all__ = ["check_fair", "compare", "unfair"]

_OUTPUTS = ("config.json", "metrics.csv", "summary.md", "curves.png", "curves.svg")


def compare(
    settings: Settings,
    out: Path,
    *,
    arms: Sequence[str] = DEFAULT_ARMS,
    seeds: Sequence[int] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: str = "",
) -> list[RunResult]:
    """Train all arms with all seeds into ``out/runs``, then write table, figure and summary.

    Args:
        settings: those of every run; ``seed`` is replaced by each of ``seeds``.
        seeds: None: the one of the settings.
        resume: go on with what is there: finished runs are skipped, interrupted ones resumed,
            missing ones begun.

    Raises:
        UserError: as `train`; or two runs turn out not to be comparable.
        ValueError: an unknown arm, or a setting that an arm cannot have; before anything runs.
        Interrupted: SIGINT or SIGTERM came; what there is, is on the disk.
    """
    refuse_several(
        "compare",
        "with several devices, launch `train` once for each arm and draw the run folders with "
        "`plot`",
    )
    settings.check()
    if settings.data_seed is None:
        for seed in seeds or ():
            check_seed("seeds", seed)
    seeds = list(dict.fromkeys(seeds if seeds else [settings.seed]))
    arms = list(dict.fromkeys(arms))
    if not arms:
        raise UserError("--arms must name at least one arm")
    models = {arm: make_config(model_fields(settings, find(arm))) for arm in arms}
    run_folder.check_new(out, resume=resume, overwrite=overwrite)
    corpus = load_corpus(settings.corpus, data_dir=settings.data_dir)
    _check_possible(settings, models, seeds, corpus)
    record = {
        "arms": {
            arm: {"description": find(arm).description, "model": dataclasses.asdict(model)}
            for arm, model in models.items()
        },
        "seeds": seeds,
        "training": training_record(settings),
        "corpus": corpus.record(),
        "versions": versions(),
        "command": command,
    }
    run_folder.make_writable(out)
    with Lock(out):
        run_folder.check_new(out, resume=resume, overwrite=overwrite)  # now that it is ours
        checkpoint.remove_part_files(out)
        if overwrite:
            _clear(out)
        _refuse_other(out, record)
        _write_record(out, record, [])
        results: list[RunResult] = []
        try:
            for seed in seeds:
                for arm in arms:
                    results.append(
                        train(
                            dataclasses.replace(settings, seed=seed),
                            arm,
                            _folder(out, arm, seed),
                            resume=True,
                            command=command,
                            corpus=corpus,
                        )
                    )
                    check_fair(results)
                    _write_record(out, record, results)
        except Interrupted as error:
            raise Interrupted(error.exit_code - 128, f"{arm}, seed {seed}: {error}") from None
        finally:
            # Also what an interrupted or failed run has logged, so that it can be looked at.
            _merge(out, arms, seeds, objective_named(settings.objective))
        pictures = plot(out)
        summarize(out)
    print(f"Picture: {pictures[0]}")
    print("\n".join(verdict(out)))
    return results


def _check_possible(
    settings: Settings, models: Mapping[str, ModelConfig], seeds: Sequence[int], corpus: Corpus
) -> None:
    """Refuse what a later run would refuse, before anything is written or trained."""
    Accelerator(cpu=settings.cpu, mixed_precision=settings.precision)
    for config in models.values():
        with torch.device("meta"):  # shapes without memory: quick at any size
            make_model(config, objective_named(settings.objective))
    for seed in seeds:
        make_sampler(dataclasses.replace(settings, seed=seed), corpus)


def check_fair(results: Sequence[RunResult]) -> None:
    """Fail unless all runs of a seed saw the same batches and began with the same shared values.

    Raises:
        UserError: which two runs differ, and in what.
    """
    for fault in unfair(results):
        raise UserError(fault)


def unfair(results: Sequence[RunResult]) -> list[str]:
    """Where runs of one seed are not comparable: a sentence for each run that differs."""
    faults = []
    first: dict[int, RunResult] = {}
    for result in results:
        seed = result.config["training"]["seed"]
        base = first.setdefault(seed, result)
        names = f"{base.config['arm']} and {result.config['arm']} (seed {seed})"
        if (base.step, base.batch_hash) != (result.step, result.batch_hash):
            faults.append(
                f"{names} are not comparable: they were trained on different batches "
                f"({base.batch_hash} to step {base.step}, {result.batch_hash} to step "
                f"{result.step})"
            )
        ours, theirs = (r.config["initial_parameters"] for r in (base, result))
        # Of another shape (an arm with another width inside), it is not the same parameter.
        differ = [
            name
            for name in ours.keys() & theirs.keys()
            if ours[name] != theirs[name] and ours[name].split()[0] == theirs[name].split()[0]
        ]
        if differ:
            faults.append(
                f"{names} are not comparable: shared parameters began with different values: "
                f"{', '.join(sorted(differ))}"
            )
    return faults


def _shared(results: Sequence[RunResult]) -> dict[str, Any]:
    """How many initial parameters all runs of a seed share, and one hash of their values."""
    shared: dict[str, Any] = {}
    for seed in dict.fromkeys(r.config["training"]["seed"] for r in results):
        prints: list[Mapping[str, str]] = [
            r.config["initial_parameters"] for r in results if r.config["training"]["seed"] == seed
        ]
        common = sorted(set.intersection(*(set(p.items()) for p in prints)))
        digest = hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]
        shared[str(seed)] = {"tensors": len(common), "hash": digest}
    return shared


def _write_record(out: Path, record: dict[str, Any], results: Sequence[RunResult]) -> None:
    for result in results:
        record["arms"][result.config["arm"]]["parameters"] = result.config["parameters"]
    checks = {
        "batch_hash": {str(r.config["training"]["seed"]): r.batch_hash for r in results},
        "shared_initial_parameters": _shared(results),
    }
    text = json.dumps({**record, "checks": checks}, indent=2) + "\n"
    checkpoint.replace_file(out / "config.json", text)


def _refuse_other(out: Path, record: dict[str, Any]) -> None:
    """Refuse to go on with a comparison of other settings. (Arms and seeds may be added.)"""
    there = run_folder.read_config(out)
    if there is None:
        return
    differ = [
        d for d in run_folder.differences(there, record) if not d.startswith(("seed ", "seeds "))
    ]
    if differ:
        raise UserError(
            f"{out} cannot be resumed with other settings: {'; '.join(differ)}; "
            "give the settings of then, or --overwrite to start again"
        )


def _folder(out: Path, arm: str, seed: int) -> Path:
    return out / "runs" / f"{arm}-seed{seed}"


def _merge(out: Path, arms: Sequence[str], seeds: Sequence[int], objective: Objective) -> None:
    runs = [(arm, seed, _folder(out, arm, seed) / "metrics.csv") for arm in arms for seed in seeds]
    runs = [run for run in runs if read_rows(run[2], objective)]
    merge(runs, out / "metrics.csv", objective)


def _clear(out: Path) -> None:
    """Remove an old comparison's own files, and nothing else."""
    run_folder.clear(out, _OUTPUTS)
    for folder in (out / "runs").glob("*-seed*"):
        run_folder.clear(folder)
