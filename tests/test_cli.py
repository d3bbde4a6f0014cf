"""The command line, end to end on a small file; mistakes are one sentence and a code."""

from __future__ import annotations

import gzip
import inspect
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from enwik8.__main__ import main, parse
from enwik8.evaluate import split_bits_per_byte
from enwik8.presets import PRESETS

SMALL = {
    **{"--layers": 1, "--dim": 16, "--heads": 2, "--length": 16, "--batch-size": 4},
    **{"--steps": 6, "--warmup": 2, "--evaluate-every": 3, "--checkpoint-every": 3},
    **{"--validation-bytes": 100, "--threads": 1},
}


def tiny(**instead: object) -> list[str]:
    """Flags of a tiny run, some of them given here: ``steps=9`` is ``--steps 9``."""
    flags = {**SMALL, **{"--" + k.replace("_", "-"): v for k, v in instead.items()}}
    return ["--cpu", *(str(part) for flag in flags.items() for part in flag)]


TINY = tiny()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    words = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as"]
    path.write_text(" ".join(random.Random(0).choices(words, k=4000)))
    return str(path)


@pytest.fixture(scope="module")
def run(text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("runs") / "run")
    assert main(["train", "--out", out, "--corpus", text, *TINY]) == 0
    return out


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error, when it is exactly one `error: ` line."""
    error = capsys.readouterr().err
    bars = ("step/s", "s/step")  # the second where a step takes more than a second
    lines = [ln for ln in error.splitlines() if ln and not any(bar in ln for bar in bars)]
    assert len(lines) == 1 and lines[0].startswith("error: "), error
    return lines[0]


def test_from_a_file_to_figures_text_and_a_number(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", text]) == 0
    assert "sha256" in capsys.readouterr().out

    out = tmp_path / "comparison"
    command = ["compare", "--out", str(out), "--arms", "elu-none", "softmax-rope"]
    assert main([*command, "--corpus", text, *TINY]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("curves.png") and len(shown) == 4
    config = json.loads((out / "runs" / "softmax-rope-seed0" / "config.json").read_text())
    assert config["command"].startswith("python -m enwik8 compare --out")

    pictures = tmp_path / "pictures"
    assert main(["plot", str(out), "--out", str(pictures), "--title", "A title"]) == 0
    assert (pictures / "curves.png").stat().st_size > 1000

    trained = str(out / "runs" / "elu-none-seed0")
    capsys.readouterr()
    assert main(["sample", trained, "--length", "30", "--prompt", "for the "]) == 0
    first = capsys.readouterr().out
    assert first.startswith("for the ") and len(first) > len("for the ")
    assert main(["sample", trained, "--length", "30", "--prompt", "for the "]) == 0
    assert capsys.readouterr().out == first
    assert main(["sample", trained, "--length", "30", "--prompt", "for the ", "--seed", "1"]) == 0
    assert capsys.readouterr().out != first

    assert main(["evaluate", trained, "--limit", "100"]) == 0
    said = capsys.readouterr().out
    logged = (out / "runs" / "elu-none-seed0" / "metrics.csv").read_text().splitlines()[-1]
    assert f"{float(logged.split(',')[3]):.4f} bits per byte" in said
    assert main(["evaluate", trained, "--file", text, "--batch-size", "3"]) == 0
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        *("", "prepare", "train", "compare", "study", "plot", "sample", "evaluate"),
        *("compress", "decompress", "arms"),
    ],
)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert "usage: python -m enwik8" in capsys.readouterr().out


def test_plot_smooths_alike_from_the_command_line_and_from_python() -> None:
    from enwik8.plot import plot

    default = inspect.signature(plot).parameters["smoothing"].default
    assert parse(["plot", "x"]).smoothing == default  # type: ignore[union-attr]


def test_arms_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["arms"]) == 0
    shown = capsys.readouterr().out
    assert "elu-rope-before-decay" in shown and "--preset paper" in shown


def test_a_flag_replaces_one_value_of_the_preset() -> None:
    command = parse(["train", "--out", "x", "--preset", "paper", "--steps", "7"])
    paper = PRESETS["paper"].settings
    assert command.settings.steps == 7  # type: ignore[union-attr]
    assert command.settings.dim == paper.dim == 768  # type: ignore[union-attr]
    assert parse(["compare", "--out", "x", "--preset=small"]).settings == (  # type: ignore[union-attr]
        PRESETS["small"].settings
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"arm": "elu-rop"}, "elu-rop"),
        ({"heads": 3}, "--heads"),
        ({"corpus": "/nowhere/text.txt"}, "/nowhere/text.txt"),
        ({"dim": 18, "arm": "elu-rope"}, "9"),  # an odd width of the heads
        ({"length": 100_000}, "length"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_half_written(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: dict[str, object],
    named: str,
) -> None:
    out = tmp_path / "out"
    assert main(["train", "--out", str(out), *tiny(**{"corpus": text, **flags})]) == 2
    assert named in one_sentence(capsys)
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"heads": 3}, "--heads"),
        ({"corpus": "/nowhere/text.txt"}, "/nowhere/text.txt"),
        ({"dim": 18}, "9"),  # an odd width of the heads: possible for elu-none, not for elu-rope
        ({"length": 100_000}, "length"),
        ({"seed": -1}, "seed"),
        ({"data_seed": -1}, "seed"),
        ({"seeds": -1}, "seed"),
        ({"precision": "fp16"}, "fp16"),  # not on a CPU
    ],
)
def test_mistakes_leave_no_half_written_comparison(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: dict[str, object],
    named: str,
) -> None:
    out = tmp_path / "out"
    assert main(["compare", "--out", str(out), *tiny(**{"corpus": text, **flags})]) == 2
    assert named in one_sentence(capsys)
    assert not out.exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_validation_split_of_one_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "text.txt").write_text("a short text of forty bytes, not one more"[:39])
    flags = tiny(corpus=tmp_path / "text.txt", length=4)
    assert main([command, "--out", str(tmp_path / "out"), *flags]) == 2
    assert "validation split" in one_sentence(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("flag", [["--preset", "smal"], ["--preset=smal"]])
def test_unknown_preset(capsys: pytest.CaptureFixture[str], command: str, flag: list[str]) -> None:
    assert main([command, "--out", "/nowhere", *flag]) == 2
    sentence = one_sentence(capsys)
    assert "'smal'" in sentence and all(name in sentence for name in PRESETS)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_output_folder_that_cannot_be_written(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    # Below a regular file: even the superuser cannot make a folder there.
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "out")
    assert main([command, "--out", out, "--corpus", text, *TINY]) == 2
    assert "cannot be written" in one_sentence(capsys)


def test_resuming_with_another_configuration(
    run: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(run)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    flags = tiny(corpus=text, dim=32)
    assert main(["train", "--out", run, "--resume", *flags]) == 2
    assert "dim was 16, is 32" in one_sentence(capsys)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("command", ["train", "compare"])
def test_truncated_corpus(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    whole = gzip.compress(Path(text).read_bytes())
    (tmp_path / "text.gz").write_bytes(whole[: len(whole) // 2])
    flags = tiny(corpus=tmp_path / "text.gz")
    assert main([command, "--out", str(tmp_path / "out"), *flags]) == 2
    assert "truncated or damaged" in one_sentence(capsys)
    assert not (tmp_path / "out").exists()


def test_compare_with_an_unknown_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--out", str(tmp_path / "out"), "--arms", "elu-none", "bogus"]) == 2
    assert "bogus" in one_sentence(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["sample", "RUN", "--prompt", ""], "--prompt"),
        (["sample", "RUN", "--temperature", "-1"], "temperature"),
        (["sample", "RUN", "--device", "nonsense"], "nonsense"),
        (["sample", "/nowhere"], "/nowhere"),
        (["evaluate", "/nowhere"], "/nowhere"),
        (["evaluate", "RUN", "--file", "/nowhere.txt"], "/nowhere.txt"),
        (["evaluate", "RUN", "--length", "0"], "length"),
        (["compress", "RUN", "/nowhere.txt", "/tmp/new"], "/nowhere.txt"),
        (["decompress", "RUN", "/nowhere.txt", "/tmp/new"], "/nowhere.txt"),
        (["train", "--out", "new", "--keep-checkpoints", "0"], "--keep-checkpoints"),
        (["plot", "/nowhere"], "/nowhere"),
        (["prepare", "nonsense"], "nonsense"),
        (["train", "--out", "RUN"], "--resume"),
    ],
)
def test_mistakes_of_the_other_commands(
    run: str, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main([run if a == "RUN" else a for a in arguments]) == 2
    assert named in one_sentence(capsys)
    assert not capsys.readouterr().out


def test_learned_positions_end_where_the_training_window_ends(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "--out", out, "--arm", "elu-learned", "--corpus", text, *TINY]) == 0
    capsys.readouterr()
    assert main(["sample", out, "--prompt", "the ", "--length", "13"]) == 0
    capsys.readouterr()
    assert main(["sample", out, "--prompt", "the ", "--length", "14"]) == 2
    assert "17 bytes, not 18" in one_sentence(capsys)


def test_evaluate_refuses_a_text_that_has_changed(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, out = tmp_path / "text.txt", str(tmp_path / "run")
    corpus.write_bytes(Path(text).read_bytes())
    assert main(["train", "--out", out, "--corpus", str(corpus), *TINY]) == 0
    corpus.write_bytes(Path(text).read_bytes()[:-5])
    capsys.readouterr()
    assert main(["evaluate", out]) == 2
    assert "SHA-256" in one_sentence(capsys)
    assert main(["evaluate", out, "--corpus", str(corpus)]) == 0


# --- units --------------------------------------------------------------------------------------


class _Constant(nn.Module):
    """The same logits everywhere."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


def test_no_knowledge_is_eight_bits_per_byte() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    value = split_bits_per_byte(_Constant(torch.zeros(256)), data, 64, 4)
    assert value == pytest.approx(8.0, abs=1e-6)


def test_each_byte_counts_alike_also_in_the_last_short_window() -> None:
    logits = torch.zeros(256)
    logits[0] = 3.0
    log = torch.log_softmax(logits, 0)
    data = np.array([0] * 9 + [255] * 4, dtype=np.uint8)  # 12 targets: 8 zeros, 4 unseen bytes
    expected = -(8 * log[0] + 4 * log[255]).item() / 12 / math.log(2)
    for length in (1, 5, 12, 100):
        model = _Constant(logits).train()
        value = split_bits_per_byte(model, data, length, 2)
        assert value == pytest.approx(expected, rel=1e-6)
        assert model.training


# --- signals, to a real process -----------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_process_resumably(text: str, tmp_path: Path, signum: int, code: int) -> None:
    out = tmp_path / "run"
    never = 1_000_000
    flags = tiny(corpus=text, steps=never, evaluate_every=never, checkpoint_every=never)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "enwik8",
            "train",
            "--out",
            str(out),
            "--corpus",
            text,
            *flags,
        ],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    log = out / "metrics.csv"
    deadline = time.monotonic() + 90
    while not (log.exists() and log.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors and "--resume goes on" in errors
    rows = log.read_text().splitlines()
    last = torch.load(out / "checkpoint.pt")["step"]
    assert rows[-1].startswith(f"{last},") and len(rows) == last + 1 >= 4
    assert main(["plot", str(out)]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_second_signal_ends_at_once() -> None:
    program = (
        "import os, signal, sys, time\n"
        "from enwik8.interrupt import Interrupt\n"
        "with Interrupt() as interrupt:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert interrupt\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent.parent,
        env=dict(os.environ),
        timeout=30,
    )
    assert done.returncode == 143
