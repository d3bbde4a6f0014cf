"""Nothing is ever lost: real kills at random moments, and a real file system that fills up."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from run_files import rows, same_runs, tiny_run
from study_files import make_text
from study_files import tiny as tiny_study

from enwik8 import checkpoint
from enwik8.__main__ import main
from enwik8.presets import Settings
from enwik8.train import train

ROOT = Path(__file__).parent.parent

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_text(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture
def tiny(text: str) -> Settings:
    return tiny_run(text)


def run_program(
    program: str, *arguments: object, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )


# --- kills ----------------------------------------------------------------------------------------

# Children are forked from a process that has trained a step, so has imported everything: a start
# takes no seconds. A kill comes at a random moment of the start, or a random moment after a random
# number of steps; a first, uninterrupted run has told how long these take.
_KILLER = """
    import dataclasses, json, os, random, signal, sys, threading, time
    from pathlib import Path
    import torch
    from tqdm import tqdm
    from enwik8 import checkpoint
    from enwik8.presets import Settings
    from enwik8.train import train

    torch.set_num_threads(1)
    folder, arm, settings = Path(sys.argv[1]), sys.argv[2], Settings(**json.loads(sys.argv[3]))
    devnull = os.open(os.devnull, os.O_WRONLY)

    def start(out):
        child = os.fork()
        if child == 0:
            os.dup2(devnull, 2)
            # The lock that tqdm made is a semaphore shared with the parent and all other children:
            # one that is killed while it draws would leave it taken, and the next would wait.
            tqdm.set_lock(threading.RLock())
            code = 1
            try:
                train(settings, arm, folder / out, resume=True)
                code = 0
            finally:
                os._exit(code)
        return child

    def lines(out):
        log = folder / out / "metrics.csv"
        return log.read_bytes().count(b"\\n") if log.exists() else 0

    train(dataclasses.replace(settings, steps=1), arm, folder / "imports")
    began = time.monotonic()
    child = start("whole")
    while lines("whole") < 2:
        time.sleep(0.001)
    startup = time.monotonic() - began
    assert os.waitpid(child, 0)[1] == 0
    step = (time.monotonic() - began - startup) / settings.steps

    rng, out, saved = random.Random(0), folder / "parts", 0
    seen = {"kills": 0, "training": 0, "lost": 0, "cut": 0, "saving": 0}
    while seen["kills"] < 50 or (not seen["saving"] and seen["kills"] < 90):
        before, further = lines("parts"), rng.choice([0, 0, 1, 2, 3, 4, 5, 7, 9])
        child = start("parts")
        while further and lines("parts") <= saved + further:
            time.sleep(step / 20)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), f"ended by itself, after {seen}"
        time.sleep(rng.uniform(0, step if further else startup))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), f"ended by itself: {status}, after {seen}"
        seen["kills"] += 1
        kept = out / checkpoint.NAME
        saved = checkpoint.load(kept)["step"] if kept.exists() else 0
        seen["training"] += lines("parts") > before
        seen["lost"] += lines("parts") - 1 > saved
        log = out / "metrics.csv"
        seen["cut"] += log.exists() and not log.read_bytes().endswith(b"\\n")
        seen["saving"] += bool(list(out.glob("*.part")))
    seen["step"] = saved
    assert os.waitpid(start("parts"), 0)[1] == 0
    print(json.dumps(seen))
"""


@posix
@pytest.mark.slow
def test_fifty_kills_of_one_run_change_nothing(tmp_path: Path, tiny: Settings) -> None:
    settings = dataclasses.replace(
        tiny,
        steps=400,
        features=8,
        redraw_interval=70,
        dropout=0.1,
        evaluate_every=20,
        keep_checkpoints=3,
    )
    given = json.dumps(dataclasses.asdict(settings))
    done = run_program(_KILLER, tmp_path, "favor-rope", given)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] >= 50 and 0 < seen["step"] < 400, seen
    # The kills came where they hurt: amid training, with rows that no checkpoint covers, in a save.
    assert seen["training"] > 10 and seen["lost"] > 10 and seen["saving"], seen
    same_runs(tmp_path / "whole", tmp_path / "parts")
    assert [int(row["step"]) for row in rows(tmp_path / "parts")] == list(range(1, 401))
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        assert [step for step, _ in checkpoint.older(folder)] == [396, 399]
        assert not list(folder.glob("*.part"))
        assert [checkpoint.load(p)["step"] for _, p in checkpoint.older(folder)] == [396, 399]


@posix
@pytest.mark.slow
def test_three_kills_of_a_study_change_nothing(text: str, tmp_path: Path) -> None:
    file, out = tmp_path / "it.toml", tmp_path / "out"
    study = tiny_study(text, 'arms = ["elu-none", "elu-rope"]')
    longer = {"steps = 6": "steps = 200", "_every = 2": "_every = 7"}
    for old, new in longer.items():
        study = study.replace(old, new)
    file.write_text(study)
    command = [sys.executable, "-m", "enwik8", "study", str(file), "--out", str(out)]
    command += ["--workers", "2"]
    folders = [out / "runs" / arm / "base-seed0" for arm in ("elu-none", "elu-rope")]
    rng = random.Random(0)

    def lines() -> int:
        logs = [folder / "metrics.csv" for folder in folders]
        return sum(log.read_bytes().count(b"\n") for log in logs if log.exists())

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    for _ in range(3):
        before, process = lines(), start()
        deadline = time.monotonic() + 120
        while lines() <= before + 5:  # it trains again
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.15))
        # The study and its worker at once, so that none of them can save anything.
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        for one in (process, *family):
            os.kill(one.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        psutil.wait_procs(family, 60)
    assert any(not (folder / "result.json").exists() for folder in folders), "killed too late"
    assert start().wait(240) == 0
    assert "2 of 2 runs are finished" in (out / "summary.md").read_text()
    for folder in folders:
        record = json.loads((folder / "config.json").read_text())
        fields = {field.name for field in dataclasses.fields(Settings)}
        training = {k: v for k, v in record["training"].items() if k in fields}
        arm = folder.parent.name
        train(Settings(**training), arm, tmp_path / arm)
        same_runs(tmp_path / arm, folder)


# --- a full disk ----------------------------------------------------------------------------------

# In a mount namespace of its own: nothing stays mounted, whatever happens.
_FULL = """
    import json, os, subprocess, sys
    from pathlib import Path
    import torch
    from enwik8 import checkpoint
    from enwik8 import train as training
    from enwik8.__main__ import main

    torch.set_num_threads(1)
    disk, whole, full_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    flags = sys.argv[4:]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1400k", "tmpfs", str(disk)], check=True)
    out, filler = disk / "run", disk / "filler"
    command = ["train", "--out", str(out), *flags]

    def fill():
        with open(filler, "wb", buffering=0) as file:
            for size in (65536, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass

    real, filled = training.Run.train_step, []
    def train_step(self):
        row = real(self)
        if self.step == full_at and not filled:
            filled.append(True)
            fill()
        return row
    training.Run.train_step = train_step

    def state():
        return {p.name: p.read_bytes() for p in out.iterdir() if p.name != ".lock"}

    codes = [main(command)]
    kept = checkpoint.load(out / checkpoint.NAME)["step"]
    names = sorted(state())
    before = state()
    print("again", file=sys.stderr)
    codes.append(main([*command, "--resume"]))  # with the disk still full
    intact = state() == before
    filler.unlink()
    print("freed", file=sys.stderr)
    codes.append(main([*command, "--resume"]))
    subprocess.run(["cp", "-r", str(out), whole + "-parts"], check=True)
    print(json.dumps({"codes": codes, "kept": kept, "names": names, "intact": intact}))
"""


def namespace() -> tuple[str, ...]:
    """What runs a program with mounts of its own; skips the test where nobody may mount."""
    for how in (("unshare", "-Urm"), ("unshare", "-m")):
        probe = "mount -t tmpfs -o size=64k tmpfs /mnt"
        if shutil.which("unshare") and not subprocess.run([*how, "sh", "-c", probe]).returncode:
            return how
    pytest.skip("no file system can be mounted here, neither as root nor in a user namespace")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "full_at", "kept", "named"),
    [
        (10, 25, 20, "the checkpoint could not be written"),
        (50, 52, 50, "metrics.csv could not be written"),
    ],
)
def test_a_disk_that_fills_up_costs_nothing_but_time(
    text: str, tmp_path: Path, every: int, full_at: int, kept: int, named: str
) -> None:
    how = namespace()
    flags = {
        **{"--corpus": text, "--layers": 1, "--dim": 48, "--heads": 2, "--length": 16},
        **{"--batch-size": 4, "--steps": 100, "--warmup": 2, "--evaluate-every": 1000},
        **{"--validation-bytes": 100, "--threads": 1, "--checkpoint-every": every},
    }
    command = ["--cpu", *(str(part) for flag in flags.items() for part in flag)]
    whole, disk = tmp_path / "whole", tmp_path / "disk"
    disk.mkdir()
    assert main(["train", "--out", str(whole), *command]) == 0
    done = run_program(_FULL, disk, whole, full_at, *command, before=how)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["codes"] == [2, 2, 0] and seen["kept"] == kept, (seen, done.stderr)
    assert seen["names"] == ["checkpoint.pt", "config.json", "metrics.csv"] and seen["intact"]
    first, rest = done.stderr.split("again\n")
    second, _ = rest.split("freed\n")
    for said in (first, second):
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "No space left" in errors[0] and "Traceback" not in said, said
    assert named in first
    same_runs(whole, Path(f"{whole}-parts"))
