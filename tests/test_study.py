"""A study is data: all faults at once, names that never clash, honest numbers of its runs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from study_files import make_text, tiny

from enwik8.errors import UserError
from enwik8.presets import PRESETS, Settings
from enwik8.statistics import t_quantile
from enwik8.study.estimate import parameters
from enwik8.study.figures import _seeds
from enwik8.study.plan import changes, parse, slug
from enwik8.study.presets import STUDIES
from enwik8.study.report import _condition
from enwik8.study.results import fairness, load_results
from enwik8.study.runner import study
from enwik8.study.speeds import read_speeds
from enwik8.study.tables import conditions


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_text(tmp_path_factory.mktemp("corpus") / "text.txt")


def faults_of(text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse(text, "it")
    return str(caught.value).splitlines()[1:]


# --- the file -----------------------------------------------------------------------------------


def test_runs_are_all_combinations_and_named_by_what_differs() -> None:
    plan = parse(
        """
        arms = ["elu-rope", "elu-none"]
        seeds = [3, 4]
        [settings]
        steps = 70
        [sweep]
        learning_rate = [1e-3, 4e-3]
        length = [64, 256]
        [arm.elu-none]
        dropout = 0.1
        """,
        "it",
    )
    assert len(plan.runs) == 16 and len({run.folder for run in plan.runs}) == 16
    names = [run.folder for run in plan.runs]
    assert "elu-rope/length=64,learning_rate=0.001-seed3" in names
    assert "elu-none/dropout=0.1,learning_rate=0.004-seed4" in names
    assert all(run.settings.steps == 70 and run.settings.threads == 1 for run in plan.runs)
    assert {run.settings.dropout for run in plan.runs if run.arm == "elu-none"} == {0.1}
    assert plan.baseline == "elu-rope" and plan.evaluation is not None


def test_groups_add_runs_and_share_those_that_are_equal() -> None:
    plan = parse(
        """
        preset = "small"
        arms = ["elu-none", "elu-rope"]
        baseline = "elu-none"
        [[group]]
        name = "sweep"
        seeds = [0]
        sweep = {learning_rate = [1e-3, 2e-3]}
        [[group]]
        name = "finalists"
        seeds = [0, 1, 2]
        [[group]]
        arms = ["softmax-rope"]
        seeds = [0]
        settings = {layers = 8, steps = 9}
        """,
        "it",
    )
    rate = PRESETS["small"].settings.learning_rate
    assert rate == 2e-3  # the sweep meets the finalists there
    names = [run.folder for run in plan.runs]
    assert len(names) == 4 + 6 - 2 + 1
    assert names.count("elu-rope/base-seed0") == 1
    assert "softmax-rope/layers=8,steps=9-seed0" in names


def test_every_fault_is_named_at_once() -> None:
    faults = faults_of(
        """
        title = 3
        preset = "smol"
        arms = ["elu-none", "elu-rop", "elu-none"]
        seeds = [0, 0, -1]
        colour = 2
        [settings]
        stepz = 3
        layers = 0
        dropout = 2.0
        dim = "x"
        precision = "fp8"
        seed = 3
        [sweep]
        learning_rate = [1e-3, 1e-3, -1]
        length = []
        [evaluation]
        factors = [0]
        """
    )
    expected = (
        *("'colour' is unknown", "preset 'smol'", "did you mean 'steps'?", "--layers must be"),
        *("--dropout must lie", "dim cannot be 'x'; give an integer", "precision cannot be 'fp8'"),
        *("seeds = [...] instead", "'elu-none' twice", "'elu-rop' is unknown; did you mean elu-r"),
        *("seeds has 0 twice", "seed -1 must be", "has 0.001 twice", "--learning-rate must be"),
        *("sweep of length must be a list", "title must be", "factors and bytes must be"),
    )
    assert len(faults) == len(expected)
    for words in expected:
        assert sum(words in fault for fault in faults) == 1, words


def test_no_fault_hides_another(tmp_path: Path) -> None:
    """Neither in another group, nor in what only the corpus and the model can tell."""
    file = tmp_path / "study.toml"
    file.write_text(
        f"""
        arms = ["elu-rop", "elu-rope", "elu-none-decay"]
        baseline = "nobody"
        [settings]
        corpus = "{tmp_path}/nothing"
        objective = "mlm"
        heads = 7
        steps = 0
        [[group]]
        seeds = [-1, 0]
        [[group]]
        name = "second"
        [group.settings]
        heads = 3
        [[group]]
        name = "third"
        [group.settings]
        heads = 5
        """
    )
    with pytest.raises(UserError) as caught:
        study(str(file), tmp_path / "out")
    faults = str(caught.value).split("\n  - ")[1:]
    expected = (
        *("--steps must be", "seed -1 must be", "'second', settings: --heads must divide --dim"),
        *("'third', settings: --heads must divide --dim, got 5", "baseline 'nobody' is not"),
        *("'elu-rop' is unknown", "there is no file", "arm elu-none-decay: arm 'elu-none-decay'"),
        "[settings]: --heads must divide --dim, got 7",
    )
    for words in expected:
        assert sum(words in fault for fault in faults) >= 1, (words, faults)
    assert sum("elu-rop'" in fault for fault in faults) == 3  # of each group
    assert len(faults) == len(expected) + 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("arms = [", "is not TOML"),
        ("seeds = [0]", "arms must be a list with at least one entry, got nothing"),
        ('arms = ["elu-none"]\nbaseline = "elu-rope"', "baseline 'elu-rope' is not among"),
        (
            'arms = ["elu-none"]\npairs = [["elu-none", "relu"]]',
            "'relu'] is not of arms of this study",
        ),
        ('arms = ["elu-none"]\npairs = ["elu-none"]', "pairs must be a list of two arms each"),
        ('arms = ["elu-none"]\npairs = 3', "pairs must be a list of two arms each, got 3"),
        ('arms = ["elu-none"]\n[arm.elu-none]\nthreads = 2', "threads must be equal in all runs"),
        ('arms = ["elu-none"]\n[sweep]\ncpu = [true]', "cpu must be equal in all runs"),
        ('arms = [["elu-none"]]', r"arm \['elu-none'\] is unknown"),
        ('preset = ["demo"]\narms = ["elu-none"]', r"preset \['demo'\] is unknown"),
        ('arms = ["elu-none"]\npairs = [[["elu-none"], "a"]]', "pairs must be a list of two arms"),
        ('arms = ["elu-none"]\n[settings]\nheads = 3', "--heads must divide --dim"),
        ('arms = ["elu-none"]\n[arm.elu-rope]\nsteps = 3', r"\[arm.elu-rope\] is about an arm"),
        ('arms = ["elu-none"]\n[group]\nseeds = [1]', r"group must be written as \[\[group\]\]"),
        ('arms = ["elu-none"]\n[[group]]\nsedes = [1]', "'sedes' is unknown; did you mean 'seeds'"),
        ('arms = ["elu-none"]\nsettings = 3', r"\[settings\] must be a table, got 3"),
        ('arms = ["elu-none"]\n[settings]\nsteps = true', "steps cannot be True; give an integer"),
    ],
)
def test_single_faults(wrong: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse(wrong, "it")


def test_names_of_settings_never_clash_and_are_safe() -> None:
    base = Settings()
    values: dict[str, list[Any]] = {
        "learning_rate": [1e-3, 1.0000001e-3, 1e-30],
        "corpus": ["a/b", "a_b", "../../" + "x" * 300, "../../" + "x" * 301],
        "features": [None, 1, 16],
    }
    named: dict[str, Settings] = {}
    for name, options in values.items():
        for value in options:
            settings = dataclasses.replace(base, **{name: value})
            text = slug(base, settings)
            assert re.fullmatch(r"[\w=.,+-]+", text) and len(text) < 100, text
            assert named.setdefault(text, settings) == settings
    assert slug(base, dataclasses.replace(base, threads=3, seed=5, cpu=True)) == "base"


def test_studies_by_name_are_possible() -> None:
    for name, content in STUDIES.items():
        plan = parse(content, name)
        assert all(parameters(run) > 0 for run in plan.runs)
    assert len({run.arm for run in parse(STUDIES["small"], "small").runs}) >= 8


def test_only_more_runs_may_come(text: str) -> None:
    old = parse(tiny(text), "old")
    more = parse(tiny(text, 'arms = ["elu-none", "elu-rope", "relu-rope"]\nseeds = [0, 1, 2]'), "n")
    wrong, added = changes(old, more)
    assert not wrong and len(added) == 9 - 4
    assert changes(more, old)[0] == [
        "the whole arm relu-rope is gone: base-seed0, base-seed1, base-seed2",
        "elu-none is gone: base-seed2",
        "elu-rope is gone: base-seed2",
    ]
    other = parse(tiny(text).replace("dim = 16", "dim = 32"), "other")
    assert changes(old, other)[0] == ["the setting dim was 16, is 32"]
    free = parse(tiny(text, settings="threads = 2").replace("cpu = true", "cpu = false"), "free")
    assert changes(old, free) == ([], [])


# --- numbers, from files made by hand -----------------------------------------------------------


def write_run(folder: Path, arm: str, settings: Settings, curve: list[float], **more: Any) -> None:
    """A finished run whose validation losses are ``curve``, one every two steps."""
    folder.mkdir(parents=True)
    lines = [
        "step,tokens,train_bits_per_byte,validation_bits_per_byte,learning_rate,gradient_norm,"
        "seconds,tokens_per_second,batch_hash"
    ]
    for step in range(1, settings.steps + 1):
        loss = repr(curve[step // 2 - 1]) if step % 2 == 0 else ""
        digest = more.get("batch_hash", "aa")
        lines.append(f"{step},{64 * step},5.0,{loss},0.001,1.0,{step}.0,{1000 + step}.0,{digest}")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    config = {
        "arm": arm,
        "training": {"seed": settings.seed},
        "parameters": more.get("parameters", 1000),
        "initial_parameters": more.get("initial_parameters", {"a": "2 one"}),
        "corpus": {"sha256": "ff", "name": "text"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "result.json").write_text(json.dumps({"steps": settings.steps, "peak_memory": 5e6}))


def study_by_hand(text: str, out: Path, curves: dict[str, list[float]], **more: Any) -> Any:
    """A plan of 2 arms, 2 rates and 3 seeds, and its results: curve + 0.1 x seed; None: no run."""
    plan = parse(
        tiny(
            text,
            'arms = ["elu-none", "elu-rope"]\nseeds = [0, 1, 2]',
            rest="[sweep]\nlearning_rate = [1e-3, 4e-3]",
        ),
        "it",
    )
    for run in plan.runs:
        curve = curves.get(f"{run.arm} {run.settings.learning_rate:g} {run.seed}")
        if curve is None:
            curve = curves[f"{run.arm} {run.settings.learning_rate:g}"]
        if curve:
            values = [value + 0.1 * run.seed for value in curve]
            own = more.get(run.arm, {})
            write_run(out / "runs" / run.folder, run.arm, run.settings, values, **own)
    return plan, load_results(plan, out)


def test_rates_are_chosen_and_differences_paired(text: str, tmp_path: Path) -> None:
    plan, results = study_by_hand(
        text,
        tmp_path,
        {
            "elu-none 0.001": [3.0, 2.5, 2.0],
            "elu-none 0.004": [3.0, 2.6, 2.2],
            "elu-rope 0.001": [3.0, 2.5, 2.4],
            "elu-rope 0.004": [2.6, 2.0, 1.5],
            "elu-rope 0.004 2": [2.6, 2.0, 1.8],
        },
        **{"elu-rope": {"parameters": 1020}},
    )
    (found,) = conditions(plan, results, {})
    base, rope = found.chosen
    assert (base.arm, base.learning_rate) == ("elu-none", 1e-3)
    assert (rope.arm, rope.learning_rate) == ("elu-rope", 4e-3)
    assert found.swept and found.at_edge() == [base, rope]  # two rates have edges only
    assert base.final.mean == pytest.approx(2.1) and base.final.deviation == pytest.approx(0.1)
    # Pairs: -0.5, -0.5, -0.2; the 0.1 a seed cancels.
    assert rope.difference is not None and rope.difference.count == 3
    assert rope.difference.mean == pytest.approx(-0.4)
    spread = math.sqrt(0.03)
    assert rope.difference.half == pytest.approx(t_quantile(0.975, 2) * spread / math.sqrt(3))
    # The baseline ends at 2.0 after 384 tokens; the arm is there at its second validation, 256.
    assert rope.reached is not None and rope.reached.share is not None
    assert rope.reached.share.mean == pytest.approx(256 / 384) and rope.reached.count == 3
    assert rope.parameter_difference == pytest.approx(0.02)
    assert rope.speed is not None and rope.speed.mean == pytest.approx(1003.5)
    assert base.difference is None and base.reached is None


def test_pairs_are_compared_beside_the_baseline(text: str, tmp_path: Path) -> None:
    curves = {
        "elu-none 0.001": [3.0, 2.5, 2.4],
        "elu-none 0.004": [],
        "elu-rope 0.001": [],
        "elu-rope 0.004": [3.0, 2.5, 2.0],
        "elu-rope 0.004 1": [3.0, 2.5, 2.3],
        "elu-rope 0.004 2": [],
    }
    plan, results = study_by_hand(text, tmp_path, curves)
    wanted = parse(
        plan.text.replace("seeds =", 'pairs = [["elu-none", "elu-rope"]]\nseeds ='), "it"
    )
    assert changes(plan, wanted) == ([], [])  # it may be asked for later
    (found,) = conditions(wanted, results, {})
    [(arm, other, change)] = found.pairs
    assert (arm, other, change.count) == ("elu-none", "elu-rope", 2)
    assert change.mean == pytest.approx((0.4 + 0.1) / 2)
    findings = next(part for part in _condition(found, (), "bits") if isinstance(part, list))
    said = [line for line in findings if "against elu" in line]
    half = 12.706 * (0.3 / math.sqrt(2)) / math.sqrt(2)
    assert said == [
        f"elu-none: +0.2500 ± {half:.4f} against elu-rope (not told apart: the interval holds 0)."
    ]


def test_equal_time_is_that_of_the_baseline(text: str, tmp_path: Path) -> None:
    curves = {
        "elu-none 0.001": [3.0, 2.5, 2.0],
        "elu-none 0.004": [3.0, 2.6, 2.2],
        "elu-rope 0.001": [3.0, 2.5, 2.4],
        "elu-rope 0.004": [2.6, 2.0, 1.5],
    }
    plan, results = study_by_hand(text, tmp_path, curves)
    # The baseline's 384 tokens take 384 / 192 = 2 s; an arm with 160 tokens/s has seen 320 of them
    # by then, half way between its second and its third validation.
    for rate, expected in ((160.0, 1.75), (192.0, 1.5), (400.0, 1.5), (64.0, 2.6), (63.0, None)):
        speeds = {"base": {"elu-none": [191.0, 192.0, 193.0], "elu-rope": [rate]}}
        (found,) = conditions(plan, results, speeds)
        base, rope = found.chosen
        assert base.seconds == pytest.approx(2.0) and rope.seconds == pytest.approx(384 / rate)
        assert base.timely is not None and base.timely.mean == pytest.approx(2.1)
        if expected is None:  # not validated once by then
            assert rope.timely is None and rope.timely_difference is None
            continue
        assert rope.timely is not None and rope.timely.mean == pytest.approx(expected + 0.1)
        assert rope.timely_difference is not None
        assert rope.timely_difference.mean == pytest.approx(expected - 2.0)
        assert rope.timely_difference.count == 3
    (found,) = conditions(plan, results, {"length=9": {"elu-rope": [1.0]}})  # of other settings
    assert all(row.alone is None and row.timely is None for row in found.rows)


def test_rates_of_a_few_steps_are_said_to_be_loose(text: str, tmp_path: Path) -> None:
    curves = {
        f"{arm} {rate}": [3.0, 2.5, 2.0]
        for arm in ("elu-none", "elu-rope")
        for rate in ("0.001", "0.004")
    }
    plan, results = study_by_hand(text, tmp_path, curves)
    # Half of the interval of three rates is 4.303 / sqrt(3) times their deviation.
    for low, warned in ((190.0, False), (187.0, True)):
        wide = [low, 196.0, 392.0 - low]
        speeds = {"base": {"elu-none": [196.0, 196.0, 196.0], "elu-rope": wide}}
        (found,) = conditions(plan, results, speeds)
        said = [
            line
            for part in _condition(found, (), "bits")
            if isinstance(part, list)
            for line in part
        ]
        loose = [line for line in said if "Loose rates" in line]
        assert len(loose) == warned, (low, said)
        share = 4.303 / math.sqrt(3) * (196.0 - low) / 196.0
        assert not warned or f"Loose rates: elu-rope ± {share:.1%} (over" in loose[0]


def test_damaged_speeds_are_named_and_left(tmp_path: Path) -> None:
    assert read_speeds(tmp_path) == {}
    for wrong in ("{", "[]", '{"tokens_per_second": {"base": {"elu-none": ["fast"]}}}'):
        (tmp_path / "speeds.json").write_text(wrong)
        with pytest.raises(UserError, match=r"speeds\.json is damaged .* --measure-speed"):
            read_speeds(tmp_path)
        assert (tmp_path / "speeds.json").read_text() == wrong


def test_a_rate_is_chosen_on_the_seeds_that_all_rates_have(text: str, tmp_path: Path) -> None:
    # Seed 2 is the hardest: a rate without it would look better than it is.
    curves = {
        "elu-none 0.001": [3.0, 2.5, 2.0],
        "elu-none 0.004": [3.0, 2.5, 2.05],
        "elu-none 0.004 2": [],
        "elu-rope 0.001": [3.0, 2.5, 2.5],
        "elu-rope 0.004": [3.0, 2.5, 2.5],
    }
    plan, results = study_by_hand(text, tmp_path, curves)
    (found,) = conditions(plan, results, {})
    assert [row.learning_rate for row in found.chosen if row.arm == "elu-none"] == [1e-3]
    slow = next(row for row in found.chosen if row.arm == "elu-rope")
    assert slow.reached is not None and (slow.reached.count, slow.reached.of) == (0, 3)


def test_unequal_runs_are_named_and_other_shapes_are_not_unequal(text: str, tmp_path: Path) -> None:
    curves = {f"{arm} {rate}": [3.0, 2.5, 2.0] for arm in ("elu-none", "elu-rope")
              for rate in ("0.001", "0.004")}  # fmt: skip
    _, fair = study_by_hand(
        text, tmp_path / "a", curves, **{"elu-rope": {"initial_parameters": {"a": "3 two"}}}
    )
    assert fairness(fair) == []
    _, wrong = study_by_hand(text, tmp_path / "b", curves, **{"elu-rope": {"batch_hash": "bb"}})
    assert len(fairness(wrong)) == 6 and "different batches" in fairness(wrong)[0]
    _, wrong = study_by_hand(
        text, tmp_path / "c", curves, **{"elu-rope": {"initial_parameters": {"a": "2 two"}}}
    )
    assert "shared parameters began with different values: a" in fairness(wrong)[0]
    _, unknown = study_by_hand(
        text, tmp_path / "e", curves, **{"elu-rope": {"initial_parameters": {}}}
    )
    assert len(fairness(unknown)) == 6 and "has no hashes" in fairness(unknown)[0]
    # Arms are compared at their own best rates, so runs with different rates must be equal too.
    curves |= {"elu-none 0.004": [], "elu-rope 0.001": []}
    _, wrong = study_by_hand(text, tmp_path / "d", curves, **{"elu-rope": {"batch_hash": "bb"}})
    assert len(fairness(wrong)) == 3


def test_figures_speak_of_intervals_where_there_are_some() -> None:
    def rows(*seeds: int) -> list[Any]:
        return [SimpleNamespace(runs=range(number)) for number in seeds]

    assert _seeds(rows(1, 1), ". Band: interval.") == "1 seed an arm."
    assert _seeds(rows(3, 3), ". Band: interval.") == "3 seeds an arm. Band: interval."
    assert _seeds(rows(3, 1), ". Band: interval.") == "1 or 3 seeds an arm. Band: interval."
