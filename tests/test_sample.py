"""`sample`: any bytes, from anywhere, of any length, and what comes out is as before."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from study_files import make_text

from enwik8 import sample as sampling
from enwik8.__main__ import main
from enwik8.errors import UserError
from enwik8.evaluate import load_model
from enwik8.presets import Settings
from enwik8.sample import PIECE, read_prompt, stream_text
from enwik8.train import train
from linear_rope.model import LanguageModel


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings = Settings(
        corpus=make_text(folder / "text.txt"),
        layers=1,
        dim=16,
        heads=2,
        length=16,
        batch_size=4,
        steps=20,
        validation_bytes=100,
        cpu=True,
    )
    train(settings, "elu-rope", folder / "run")
    train(settings, "elu-learned", folder / "learned")
    train(dataclasses.replace(settings, objective="mlm"), "elu-rope", folder / "masked")
    return folder / "run"


def given(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Standard input of these bytes."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["sample", *map(str, arguments), "--length", "12"]) == 0
    return capsys.readouterr().out


def test_a_prompt_is_the_same_from_everywhere(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "über the of — and"
    (tmp_path / "prompt").write_text(text, encoding="utf-8")
    expected = shown(capsys, run, "--prompt", text)
    assert expected.startswith(text) and len(expected) > len(text) + 1
    assert shown(capsys, run, "--prompt-file", tmp_path / "prompt") == expected
    given(monkeypatch, text.encode())
    assert shown(capsys, run, "--prompt-file", "-") == expected
    assert shown(capsys, run).startswith("The ")


def test_the_text_is_that_of_generate(run: Path) -> None:
    model = load_model(run).model
    assert isinstance(model, LanguageModel)
    prompt = bytes(islice(os.urandom(1) * 3000 + b"the of " * 300, 5000))  # more than two pieces
    tokens = torch.tensor([list(prompt)])
    expected = bytes(model.generate(tokens, 40, temperature=0)[0, len(prompt) :].tolist())
    text = "".join(stream_text(run, prompt, 40, temperature=0))
    assert text == expected.decode(errors="replace")


def test_text_comes_as_it_is_drawn(run: Path) -> None:
    endless = stream_text(run, "the ", 10**12)
    assert len("".join(islice(endless, 50))) <= 50


def test_bytes_that_are_no_text(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\x00ab\xc3")
    out = shown(capsys, run, "--prompt-file", tmp_path / "prompt")
    assert out.startswith("\ufffd\0ab")
    # As the shell hands over such bytes.
    assert shown(capsys, run, "--prompt", os.fsdecode(b"\xff\x00ab\xc3")) == out
    # A character may be cut by the end of a piece, or of the prompt.
    monkeypatch.setattr(sampling, "PIECE", 1)
    assert shown(capsys, run, "--prompt", "ü—") == "ü—" + shown(capsys, run, "--prompt", "ü—")[2:]


def test_a_terminal_of_other_characters(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["sample", str(run), "--prompt", "aü—b", "--length", "2"]) == 0
    out.flush()
    assert out.buffer.getvalue().startswith(b"a??b")  # type: ignore[attr-defined]


@pytest.mark.parametrize("whole", [True, False])
def test_memory_does_not_depend_on_the_length_of_the_prompt(
    run: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    size, read, asked = 1_000_000, [0], [0]
    real = LanguageModel.forward

    def forward(self: LanguageModel, tokens: torch.Tensor, **rest: Any) -> Any:
        assert tokens.shape[1] <= PIECE
        read[0] += tokens.shape[1]
        return real(self, tokens, **rest)

    def pieces() -> Iterator[bytes]:
        for i in range(size // 1000):
            assert read[0] == 1000 * i, "pieces are held"
            asked[0] += 1
            yield b"the of and" * 100

    monkeypatch.setattr(LanguageModel, "forward", forward)
    prompt = b"the of and" * (size // 10) if whole else pieces()
    text = stream_text(run, prompt, 10, repeat=True)
    assert next(text) and read[0] <= PIECE  # what is read comes out at once
    for _ in range(99):
        next(text)
    before = psutil.Process().memory_info().rss
    seen = sum(len(piece) for piece in text)
    # All of it at once would take 64 MB for each of dozens of arrays.
    assert psutil.Process().memory_info().rss - before < 30e6
    assert read[0] == size and seen > size / 2 and (whole or asked[0] == 1000)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompt", "a", "--prompt-file", "/nowhere"], "exclude each other"),
        (["--prompt-file", "/nowhere"], "--prompt-file /nowhere cannot be read (No such file"),
        (["--prompt-file", "/"], "--prompt-file / cannot be read"),
        (["--prompt-file", os.devnull], "the prompt must have at least one byte"),
        (["--length", "-1"], "--length must not be negative"),
        (["--top-k", "0"], "--top-k must be at least 1"),
        (["--top-p", "2"], "--top-p must lie in (0, 1]"),
    ],
)
def test_mistakes_are_one_sentence_before_any_output(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    capsys.readouterr()
    assert main(["sample", str(run), *arguments]) == 2
    said = capsys.readouterr()
    assert named in said.err and said.err.count("\n") == 1 and not said.out


def test_masked_models_continue_nothing(run: Path) -> None:
    with pytest.raises(UserError, match=r"mlm.*cannot continue a text"):
        stream_text(run.with_name("masked"), "the ")


def test_positions_that_end(run: Path) -> None:
    learned = run.with_name("learned")
    assert len("".join(stream_text(learned, read_prompt("the of the", None), 7))) <= 7
    for pieces, size in (([b"the of the "], "18"), ([b"the of the", b" "], "18")):
        with pytest.raises(UserError, match=f"17 bytes, not {size}"):
            stream_text(learned, pieces, 7)
    endless = iter(lambda: b"the of and", None)
    with pytest.raises(UserError, match="17 bytes, not at least 21"):
        stream_text(learned, endless, 1)
