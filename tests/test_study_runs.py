"""The command `study`: nothing trained twice, nothing lost, a page that stands by itself."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from study_files import make_text, tiny

from enwik8.__main__ import main
from enwik8.curves import corpora_of, load_runs
from enwik8.errors import UserError
from enwik8.interrupt import Lock
from enwik8.study import estimate, queue, runner, speeds, worker
from enwik8.study import report as reporting
from enwik8.study.plan import parse


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_text(tmp_path_factory.mktemp("corpus") / "text.txt")


# --- the whole command, its runs in this process --------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train in this process, which is quicker; returns the names of what was trained."""
    trained: list[str] = []

    def run_all(runs: Any, out: Path, *, evaluation: Any, command: str, **_: Any) -> list[str]:
        for run in runs:
            trained.append(run.folder)
            task = {
                "arm": run.arm,
                "settings": dataclasses.asdict(run.settings),
                "folder": str(out / "runs" / run.folder),
                "command": command,
                "evaluation": None if evaluation is None else dataclasses.asdict(evaluation),
            }
            worker.work(json.loads(json.dumps(task)))
        return []

    monkeypatch.setattr(runner, "run_all", run_all)
    return trained


class _Page(HTMLParser):
    """What a page refers to, and its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for name, v in attributes if name in ("src", "href", "srcset")]


@pytest.mark.slow
def test_from_a_file_to_a_page(
    text: str,
    tmp_path: Path,
    here: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, out = tmp_path / "it.toml", tmp_path / "out"
    top = 'title = "A <b> & c"\narms = ["elu-none", "elu-rope", "elu-learned"]\nseeds = [0, 1]'
    file.write_text(tiny(text, top, rest="[sweep]\nlearning_rate = [2e-3, 8e-3]"))
    assert main(["study", str(file), "--out", str(out), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("to do") == 12 and "12 runs, 4,608 training tokens in all" in shown
    assert "finish a run, or give --time-steps" in shown and not out.exists() and not here

    assert main(["study", str(file), "--out", str(out)]) == 0
    assert len(here) == 12
    summary = (out / "summary.md").read_text()
    assert "12 of 12 runs are finished" in summary and "Fairness, checked" in summary
    assert "at the edge of those tried" in summary and "cannot" in summary
    assert "NOT FAIR" not in summary and "nan" not in summary.lower()
    with open(out / "table.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 6 and sum(row["best_rate"] == "True" for row in rows) == 3
    for row in rows:
        logs = [
            (out / "runs" / run / "metrics.csv").read_text().splitlines()[-1].split(",")
            for run in here
            if run.startswith(row["arm"] + "/")
            and ("0.008" in run) == (row["learning_rate"] == "0.008")
        ]
        mean = sum(float(log[3]) for log in logs) / 2
        assert float(row["final"]) == pytest.approx(mean) and row["seeds"] == "0 1"
        assert (row["at_2x_length"] == "") == (row["arm"] == "elu-learned")

    # The curves that it publishes are those of the logs, arms with two rates told apart.
    curves = {(run.arm, run.seed): run for run in load_runs(out / "curves.csv")}
    assert len(curves) == 12 and ("elu-rope/learning_rate=0.008", 1) in curves
    for (name, seed), curve in curves.items():
        whole = load_runs(out / "runs" / f"{name}-seed{seed}")[0]
        assert [each.tolist() for each in curve.validation] == [
            each.tolist() for each in whole.validation
        ]
        begins = [0, *curve.columns["step"].astype(int)]
        means = [whole.train[begin:end].mean() for begin, end in pairwise(begins)]
        assert curve.train.tolist() == pytest.approx(means)
        assert corpora_of([curve]) == corpora_of([whole])

    page = (out / "report.html").read_text()
    parsed = _Page(page)
    assert parsed.tags.count("img") == 6 and parsed.tags.count("table") == 4
    assert parsed.links and all(link.startswith("data:image/png;base64,") for link in parsed.links)
    assert "default-src 'none'" in page and "http" not in page.replace("http-equiv", "")
    assert "<h1>A &lt;b&gt; &amp; c</h1>" in page and "data-order=" in page

    # Timed alone, for the results at equal time.
    assert "Equal time" not in summary.split("## How to read")[0]
    assert main(["study", "--out", str(out), "--report-only", "--measure-speed", "1"]) == 0
    rates = json.loads((out / "speeds.json").read_text())["tokens_per_second"]["base"]
    assert {arm: len(found) for arm, found in rates.items()} == {
        arm: speeds.ROUNDS for arm in ("elu-none", "elu-rope", "elu-learned")
    }
    summary = (out / "summary.md").read_text()
    assert "### Equal time" in summary and "clock.png" in summary and (out / "clock.svg").exists()
    assert len(here) == 12

    monkeypatch.setattr(reporting, "draw", lambda *_: {})  # figures take the most time
    capsys.readouterr()
    here.clear()
    assert main(["study", "--out", str(out)]) == 0 and not here
    assert "0 runs to do, 12 finished already" in capsys.readouterr().out
    assert main(["study", str(file), "--out", str(out), "--dry-run"]) == 0
    assert "finished" in capsys.readouterr().out
    file.write_text(file.read_text().replace("seeds = [0, 1]", "seeds = [0, 1, 2]"))
    assert main(["study", str(file), "--out", str(out)]) == 0
    assert len(here) == 6 and all(name.endswith("seed2") for name in here)

    # What is measured after training may change, without training again.
    here.clear()
    file.write_text(file.read_text().replace("factors = [1, 2]", "factors = [1, 3]"))
    before = {run: (run / "checkpoint.pt").stat().st_mtime_ns for run in out.glob("runs/*/*")}
    assert main(["study", str(file), "--out", str(out)]) == 0 and len(here) == 18
    assert {run: (run / "checkpoint.pt").stat().st_mtime_ns for run in before} == before
    assert "at_3x_length" in (out / "runs.csv").read_text()

    # Without its checkpoint (to save room), a finished run stays finished.
    here.clear()
    for run in before:
        (run / "checkpoint.pt").unlink()
    file.write_text(file.read_text().replace("factors = [1, 3]", "factors = [1, 2]"))
    assert main(["study", str(file), "--out", str(out)]) == 0 and not here
    # What can no more be measured is not said to be impossible.
    rows = (out / "summary.md").read_text().split("| bits per byte | 1x")[1].split("\n\n")[0]
    assert rows.count(" - |") >= 3 and "cannot" not in rows


def test_what_only_the_model_and_the_text_can_tell(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], here: list[str]
) -> None:
    file, out = tmp_path / "it.toml", tmp_path / "out"
    content = tiny(text, 'arms = ["elu-rope", "elu-none-decay"]', "length = 16").replace(
        "length = 16\n", "", 1
    )
    groups = (
        *("settings = {dim = 18}", "settings = {length = 100000}", 'settings = {precision="fp16"}'),
        *('settings = {objective = "mlm"}', 'settings = {corpus = "/nowhere/x"}'),
    )
    file.write_text(content + "".join(f"\n[[group]]\n{each}\n" for each in groups))
    assert main(["study", str(file), "--out", str(out)]) == 2
    shown = capsys.readouterr().err
    for words in ("even", "100,000", "fp16", "both sides", "/nowhere/x"):
        assert words in shown, words
    assert not out.exists() and not here


def test_other_studies_and_damaged_files_are_left_untouched(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    here: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting, "draw", lambda *_: {})
    file, out = tmp_path / "it.toml", tmp_path / "out"
    file.write_text(tiny(text, 'arms = ["elu-none", "elu-rope"]'))
    command = ["study", str(file), "--out", str(out)]
    assert main(command) == 0
    here.clear()

    def refused(named: str) -> None:
        before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
        capsys.readouterr()
        assert main(command) == 2 and named in capsys.readouterr().err
        assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before and not here

    whole = file.read_text()
    file.write_text(whole.replace('"elu-none", ', ""))
    refused("the whole arm elu-none is gone")
    file.write_text(whole.replace("dim = 16", "dim = 32"))
    refused("the setting dim was 16, is 32")
    file.write_text(whole)
    log = out / "runs" / "elu-rope" / "base-seed0" / "metrics.csv"
    good = log.read_text()
    log.write_text(good.replace("\n3,", "\nthree,"))
    refused(f"{log}, line 4")
    log.write_text(good)
    result = log.with_name("result.json")
    kept = result.read_text()
    result.write_text(kept[:20])
    refused(f"{result} is damaged")
    result.write_text(kept)
    shutil.copy(log.parents[2] / "elu-none/base-seed0/config.json", log.with_name("config.json"))
    refused("was trained otherwise: arm was 'elu-none', is 'elu-rope'")
    with Lock(out):
        capsys.readouterr()
        shutil.copy(log.parents[1] / "base-seed0/config.json", tmp_path)
        (log.with_name("config.json")).unlink()
        assert main(command) == 2 and "another run is working" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "studies by name: demo, small, rates"),
        ([], "holds no study yet; name a file, or one of: demo"),
        (["demo", "--workers", "0"], "--workers must be at least 1"),
        (["demo", "--time-steps", "-1"], "--time-steps must not be negative"),
        (["demo", "--measure-speed", "-1"], "--measure-speed must not be negative"),
    ],
)
def test_mistakes_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["study", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_timed_steps_tell_the_time(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it.toml"
    file.write_text(tiny(text, 'arms = ["elu-none"]'))
    command = ["study", str(file), "--out", str(tmp_path / "out"), "--dry-run"]
    assert main([*command, "--time-steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 timed steps" in shown and "unknown time" not in shown and "?" not in shown


# --- real processes -------------------------------------------------------------------------------


def spawn(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "enwik8", "study", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_one_failure_does_not_stop_the_others(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "it.toml", tmp_path / "out"
    rest = "[arm.elu-rope]\nlearning_rate = 1e30"
    file.write_text(tiny(text, 'arms = ["elu-rope", "elu-none"]\nbaseline = "elu-none"', rest=rest))
    assert main(["study", str(file), "--out", str(out), "--workers", "2"]) == 2
    shown = capsys.readouterr().err
    assert "1 of 2 runs failed" in shown and "is not finite" in shown
    summary = (out / "summary.md").read_text()
    assert "1 of 2 runs are finished" in summary
    assert "**Failed: elu-rope/learning_rate=1e+30-seed0**" in summary and "not finite" in summary


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_study_leaves_no_process_and_goes_on(
    text: str, tmp_path: Path, signum: int
) -> None:
    file, out = tmp_path / "it.toml", tmp_path / "out"
    top = 'arms = ["elu-none", "elu-rope"]'
    file.write_text(tiny(text, top).replace("steps = 6", "steps = 100000"))
    study = spawn([str(file), "--out", str(out), "--workers", "2"])
    logs = [out / "runs" / arm / "base-seed0" / "metrics.csv" for arm in ("elu-none", "elu-rope")]
    until(lambda: all(log.exists() and log.read_bytes().count(b"\n") > 3 for log in logs))
    os.kill(study.pid, signum)
    assert study.wait(60) == (143 if signum == signal.SIGTERM else -signum)

    def free(folder: Path) -> bool:
        try:
            with Lock(folder):
                return True
        except UserError:
            return False

    until(lambda: all(free(log.parent) for log in logs))  # the workers have ended by themselves
    sizes = [log.read_bytes().count(b"\n") for log in logs]
    time.sleep(0.3)
    assert [log.read_bytes().count(b"\n") for log in logs] == sizes
    assert all((log.parent / "checkpoint.pt").exists() for log in logs)
    if signum == signal.SIGTERM:
        assert "Unfinished: elu-none/base-seed0, step" in (out / "summary.md").read_text()
    for log in logs:  # each worker saved where it stopped
        assert "stopped after step" in (log.parent / queue.LOG).read_text()


def test_memory_is_that_of_the_process_alone() -> None:
    """A child must not be told the use of the one that started it."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here")
    large = bytearray(600 * 2**20)
    large[::4096] = b"x" * len(large[::4096])
    code = "from enwik8.study.worker import _peak_memory; print(_peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert 0 < int(done.stdout) < len(large)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_the_dry_run_s_memory_is_about_what_is_used(text: str, tmp_path: Path) -> None:
    """Two sizes, since most of a small one is the process itself."""
    file, out = tmp_path / "it.toml", tmp_path / "out"
    top = 'preset = "small"\narms = ["best"]'
    sizes = "[[group]]\nseeds = [0]\n[group.sweep]\nbatch_size = [4, 16]"
    settings = f'[settings]\ncorpus = "{text}"\nsteps = 2\nevaluate_every = 2\nthreads = 1'
    file.write_text(f"{top}\n{settings}\n{sizes}\n")
    assert main(["study", str(file), "--out", str(out), "--workers", "1"]) == 0
    for run in parse(file.read_text(), str(file)).runs:
        used = json.loads((out / "runs" / run.folder / "result.json").read_text())["peak_memory"]
        guess = estimate.cost(run, 1000, {}, {})
        assert guess.memory_by == "formula"
        assert guess.memory == pytest.approx(used, rel=0.2), run.folder


def test_a_study_is_no_work_for_several_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["study", "demo", "--out", str(tmp_path / "out")]) == 2
    assert "study works in one process" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_accelerators_are_shared_out_by_turns(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices, four runs at once: each device has two, under the name that it had here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(queue.torch.cuda, "is_available", lambda: True)
    given: list[str] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            given.append(options["env"]["CUDA_VISIBLE_DEVICES"])
            super().__init__([sys.executable, "-c", "pass"], **options)

    monkeypatch.setattr(queue.subprocess, "Popen", Popen)
    plan = parse(tiny(text, settings="", top='arms = ["elu-none"]\nseeds = [0, 1, 2, 3]'), "it")
    runs = [dataclasses.replace(r, settings=dataclasses.replace(r.settings, cpu=False))
            for r in plan.runs]  # fmt: skip
    queue.run_all(runs, tmp_path, workers=4, evaluation=None, command="", finished=lambda *_: None)
    assert sorted(given) == ["5", "5", "7", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(queue.torch.cuda, "device_count", lambda: 3)
    assert queue._devices() == ["0", "1", "2"]
