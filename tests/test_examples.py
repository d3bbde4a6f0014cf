"""Each example runs as a user runs it, prints something, and its own assertions hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples_and_each_is_listed() -> None:
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert len(EXAMPLES) >= 5
    for path in EXAMPLES:
        assert f"[{path.name}]({path.name})" in table, f"{path.name} is not in examples/README.md"
        assert f"python examples/{path.name}" in table


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    # From another folder: an example must not depend on where it is called. conftest.py has set
    # one thread for child processes.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) >= 2
    assert list(tmp_path.iterdir()) == [], "an example leaves no files behind"
    # Processor time, not the clock, which tells of a busy machine too. (Windows counts none.)
    user, system = (after[i] - before[i] for i in (2, 3))  # of the children that have ended
    assert user + system < 60, "an example runs in under a minute"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_stays_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80, f"{path.name} has {len(lines)} lines; an example shows one idea"
    assert any(line.startswith(("assert ", "    assert ")) or " assert " in line for line in lines)
