"""Numbers that cannot be: one sentence that names the flag, exit code 2, nothing half written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from study_files import make_text
from test_cli import one_sentence, tiny

from enwik8.__main__ import main
from enwik8.evaluate import load_model

HUGE = str(10**23)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_text(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="module")
def run(text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("runs") / "run")
    assert main(["train", "--out", out, *tiny(corpus=text, steps=1)]) == 0
    return out


COUNTS = (
    *("layers", "dim", "heads", "features", "redraw-interval", "length", "batch-size"),
    *("micro-batch-size", "steps", "evaluate-every", "validation-bytes", "checkpoint-every"),
    *("keep-checkpoints", "threads"),
)


@pytest.mark.parametrize("flag", COUNTS)
@pytest.mark.parametrize("value", ["0", "-1", HUGE])
def test_counts_of_a_run(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    flags = tiny(corpus=text, arm="favor-rope")
    assert main(["train", "--out", str(tmp_path / "out"), *flags, f"--{flag}={value}"]) == 2
    bound = "least 1" if len(value) < 3 else "most"
    assert f"--{flag} must be at {bound}" in one_sentence(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("warmup", ["-1"]),
        ("dropout", ["1", "-0.1", "nan", "inf"]),
        ("learning-rate", ["0", "-1", "nan", "inf", "-inf", "1e400"]),
        ("final-learning-rate", ["-1", "1.5", "nan", "inf"]),
        ("weight-decay", ["-1", "nan", "-inf", "inf"]),
        ("beta1", ["1", "-1", "nan", "inf"]),
        ("beta2", ["1", "-1", "nan", "inf"]),
        ("clip", ["-1", "nan", "-inf"]),
        ("seed", ["-1", HUGE]),
        ("data-seed", ["-1", HUGE]),
        ("length", ["20000"]),
    ],
)
def test_other_numbers_of_a_run(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, values: list[str]
) -> None:
    for value in values:
        command = ["train", "--out", str(tmp_path / "out"), *tiny(corpus=text)]
        assert main([*command, f"--{flag}={value}"]) == 2, value
        assert f"--{flag} " in one_sentence(capsys), value
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "flag", "values"),
    [
        ("sample RUN", "temperature", ["-1", "nan", "-inf"]),
        ("sample RUN", "top-k", ["0", "-1", HUGE]),
        ("sample RUN", "top-p", ["0", "-1", "1.5", "nan", "inf"]),
        ("sample RUN", "seed", ["-1", HUGE]),
        ("sample RUN", "length", ["-1"]),
        ("evaluate RUN", "length", ["0", "-1", HUGE]),
        ("evaluate RUN", "batch-size", ["0", "-1", HUGE]),
        ("evaluate RUN", "limit", ["0", "-1", HUGE]),
        ("compress RUN TEXT OUT", "length", ["0", "-1", HUGE]),
        ("compress RUN TEXT OUT", "streams", ["0", "-1", HUGE]),
        ("compress RUN TEXT OUT", "threads", ["0", "-1", HUGE]),
        ("plot RUN --out OUT", "smoothing", ["-1", "1", "nan", "inf"]),
        ("compare --out OUT", "seeds", ["-1", HUGE]),
    ],
)
def test_numbers_of_the_other_commands(
    run: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    flag: str,
    values: list[str],
) -> None:
    if command.startswith("compress"):
        pytest.importorskip("constriction")
    places = {"RUN": run, "TEXT": text, "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in command.split()]
    for value in values:
        assert main([*words, f"--{flag}={value}"]) == 2, value
        assert f"--{flag} must " in one_sentence(capsys), value
        assert not capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_model_that_nobody_has_room_for(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = tiny(corpus=text, dim=10**7, heads=1)
    assert main(["train", "--out", str(tmp_path / "out"), *flags]) == 2
    assert "--dim 10000000 make a model of more than 10**12" in one_sentence(capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 16.0 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    ],
)
def test_too_little_memory_is_a_sentence(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    assert main_with(error) == 2
    assert "not enough memory here" in one_sentence(capsys)
    with pytest.raises(RuntimeError, match="size of tensor"):  # no other fault is taken for that
        main_with(RuntimeError("The size of tensor a"))


def main_with(error: Exception) -> int:
    """`main` of a command that raises."""
    with pytest.MonkeyPatch.context() as patch:

        def prepare(*_: object) -> None:
            raise error

        patch.setattr("enwik8.corpus.prepare", prepare)
        return main(["prepare"])


@pytest.mark.parametrize("content", [b"", b"x", b"xy", b"xyz", bytes(19)])
def test_files_of_a_few_bytes(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    file = tmp_path / "few.txt"
    file.write_bytes(content)
    capsys.readouterr()
    code = main(["evaluate", run, "--file", str(file)])
    if len(content) < 2:
        assert code == 2
        named = "is empty" if not content else "has 1 byte, and a text is predicted from its second"
        assert named in one_sentence(capsys)
        return
    assert code == 0
    tokens = torch.tensor(list(content))[None]
    with torch.no_grad():
        logits = load_model(Path(run)).model(tokens[:, :16])
        nats = -logits.log_softmax(-1)[0].gather(1, tokens[0, 1:17, None])[: len(content) - 1]
    if len(content) <= 17:  # one window
        assert f"{float(nats.mean()) / math.log(2):.4f} bits" in capsys.readouterr().out
    else:
        assert f"over {len(content) - 1} bytes" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["sample RUN", "evaluate RUN", "compress RUN TEXT OUT",
                                     "decompress RUN TEXT OUT"])  # fmt: skip
def test_one_process_commands_refuse_a_launcher(
    run: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    places = {"RUN": run, "TEXT": text, "OUT": str(tmp_path / "out")}
    assert main([places.get(word, word) for word in command.split()]) == 2
    name = command.split()[0]
    assert f"{name} works in one process; start it without a launcher" in one_sentence(capsys)
    assert not (tmp_path / "out").exists()
