"""A file by a model's own probabilities: exact back again, as small as the model says, refused
with a sentence where the probabilities would not be the same.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from study_files import make_text

pytest.importorskip("constriction")

from enwik8 import compression
from enwik8.__main__ import main
from enwik8.compression import MAGIC, compress, decompress
from enwik8.errors import UserError
from enwik8.evaluate import load_model, split_bits_per_byte
from enwik8.presets import Settings
from enwik8.train import train

SETTINGS = Settings(
    layers=1,
    dim=16,
    heads=2,
    length=16,
    batch_size=8,
    steps=60,
    warmup=5,
    learning_rate=1e-2,
    evaluate_every=1000,
    validation_bytes=100,
    checkpoint_every=1000,
    threads=1,
    cpu=True,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of trained runs, by their arms, and the text."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = make_text(folder / "text.txt")
    for arm in ("elu-rope", "softmax-rope", "favor-rope", "elu-learned"):
        train(Settings(**{**vars(SETTINGS), "corpus": corpus}), arm, folder / arm)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """700 bytes of other words in the same manner, and some that are in no text."""
    path = tmp_path / "file"
    words = " ".join(random.Random(1).choices(["the", "of", "and", "is", "with"], k=250))
    path.write_bytes(words.encode()[:690] + bytes([0, 255, 128, 10, 13, 0, 0, 254, 1, 26]))
    assert path.stat().st_size == 700
    return path


def back(run: Path, file: Path, **options: Any) -> compression.Report:
    """Compress and decompress; the result must be the file."""
    code, out = file.with_suffix(".code"), file.with_suffix(".out")
    report = compress(run, file, code, overwrite=True, **options)
    assert report.file == code.stat().st_size and report.text == file.stat().st_size
    decompress(run, code, out, overwrite=True)
    assert out.read_bytes() == file.read_bytes()
    return report


@pytest.mark.parametrize("arm", ["elu-rope", "softmax-rope", "favor-rope", "elu-learned"])
def test_round_trip_of_an_arm(runs: Path, file: Path, arm: str) -> None:
    report = back(runs / arm, file)
    # It is compressed, far below 8 bits, although a model of another text reads it.
    assert report.cross_entropy < 5 and report.file - report.header < 700 * 5 / 8


@pytest.mark.parametrize("streams", [1, 2, 3, 7, 64, 699, 700, 701, 100_000])
def test_any_number_of_streams(runs: Path, file: Path, streams: int) -> None:
    report = back(runs / "elu-rope", file, streams=streams)
    assert report.predicted == 700 - min(streams, 700)


@pytest.mark.parametrize("content", [b"", b"a", b"ab", bytes(33), b"the of and " * 20])
@pytest.mark.parametrize("streams", [None, 1, 16])
def test_short_files(runs: Path, tmp_path: Path, content: bytes, streams: int | None) -> None:
    (tmp_path / "file").write_bytes(content)
    report = back(runs / "elu-rope", tmp_path / "file", streams=streams)
    assert report.text == len(content)


def test_length_of_the_windows(runs: Path, file: Path) -> None:
    rates = [
        back(runs / "elu-rope", file, length=n, streams=5).cross_entropy for n in (1, 16, 5000)
    ]
    assert len(set(rates)) == 3 and rates[0] > rates[1]
    with pytest.raises(UserError, match="positions for 16 bytes only"):
        compress(runs / "elu-learned", file, file.with_suffix(".x"), length=17)


def test_the_size_is_the_cross_entropy(runs: Path, file: Path) -> None:
    """The file is as large as `evaluate` says, up to the coder's own few bits."""
    data = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    report = back(runs / "elu-rope", file, streams=1)
    model = load_model(runs / "elu-rope").model
    expected = split_bits_per_byte(model, data, SETTINGS.length, 4)
    assert report.predicted == 699
    assert report.cross_entropy == pytest.approx(expected, abs=1e-5)
    code = 8 * (report.file - report.header)
    ideal = 8 + 699 * report.cross_entropy  # the first byte is not predicted
    # Words of 32 bits, two of them at the end; 2^-24 is the smallest step of a probability.
    assert ideal - 1 <= code <= ideal + 64 + 699 * 0.01
    assert report.bits_per_byte == 8 * report.file / 700


def test_the_output_says_what_was_done(
    runs: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = file.with_suffix(".code"), file.with_suffix(".out")
    run = str(runs / "elu-rope")
    assert main(["compress", run, str(file), str(code), "--streams", "4"]) == 0
    said = capsys.readouterr().out
    rate = 8 * code.stat().st_size / 700
    assert f"{rate:.4f} bits per byte" in said and "bytes/s" in said
    assert "cross-entropy" in said and "over the 696 bytes" in said
    assert main(["decompress", run, str(code), str(out)]) == 0
    assert "700 bytes, SHA-256 as it was" in capsys.readouterr().out
    assert out.read_bytes() == file.read_bytes()
    header = header_of(code.read_bytes())
    assert header["streams"] == 4 and header["window"] == 16 and header["threads"] == 1
    assert header["torch"] == torch.__version__


def test_threads_are_those_of_the_compression_and_put_back(
    runs: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, seen = file.with_suffix(".code"), list[int]()
    file.write_bytes(b"the of the of")
    real = compression._probe

    def probe(*arguments: Any) -> str:
        seen.append(torch.get_num_threads())
        return real(*arguments)

    monkeypatch.setattr(compression, "_probe", probe)
    compress(runs / "elu-rope", file, code, threads=2)
    decompress(runs / "elu-rope", code, file.with_suffix(".out"))
    assert seen == [2, 2] and torch.get_num_threads() == 1


# --- what cannot be -------------------------------------------------------------------------------


@pytest.fixture
def code(runs: Path, file: Path) -> Path:
    path = file.with_suffix(".code")
    compress(runs / "elu-rope", file, path)
    return path


def header_of(code: bytes) -> dict[str, Any]:
    return dict(json.loads(code[len(MAGIC) :].split(b"\n")[0]))


def with_header(code: bytes, **changes: Any) -> bytes:
    """A file with other values in its header, and the checksum of that."""
    line, _, rest = code[len(MAGIC) : -4].partition(b"\n")
    header = {**json.loads(line), **changes}
    return compression.seal(MAGIC + json.dumps(header).encode() + b"\n" + rest)


def resealed(code: bytes, old: bytes, new: bytes) -> bytes:
    """The same with other words in the header."""
    return compression.seal(code[:-4].replace(old, new))


def refused(run: Path, code: Path, match: str) -> None:
    out = code.with_suffix(".back")
    before = code.read_bytes()
    with pytest.raises(UserError, match=match):
        decompress(run, code, out)
    assert not out.exists() and code.read_bytes() == before
    assert not list(code.parent.glob("*.part"))


def test_another_model(runs: Path, code: Path) -> None:
    refused(runs / "softmax-rope", code, "another model")
    copy = code.parent / "copy.pt"
    state = torch.load(runs / "elu-rope" / "checkpoint.pt")
    state["model"]["norm.weight"][3] += 1e-3
    torch.save(state, copy)
    refused(copy, code, "another model")


def test_other_last_bits(runs: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compression._steps

    def steps(*arguments: Any) -> Any:
        for t, active, p in real(*arguments):
            yield t, active, np.nextafter(p, 1)

    monkeypatch.setattr(compression, "_steps", steps)
    refused(runs / "elu-rope", code, r"last bits.*decompress it where it was compressed")
    # If the probe does not tell, the checksum does.
    monkeypatch.setattr(
        compression, "_steps", lambda *a: ((t, n, p[:, ::-1].copy()) for t, n, p in real(*a))
    )
    header = header_of(code.read_bytes())
    monkeypatch.setattr(compression, "_probe", lambda *_: header["probe"])
    refused(runs / "elu-rope", code, r"is not the one that was compressed .*nothing was written")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda b: b.replace(b"text 2", b"text 1"), "older version.*compress the text again"),
        (lambda b: b[:-4], r"is damaged \(its header"),
        (lambda b: b[:-1], r"is damaged \(its header"),
        (lambda b: b[:-9] + b"\0" + b[-8:], r"is damaged \(its header"),
        (lambda b: resealed(b, b'"streams":', b'"dreams":'), r"is damaged \(its header"),
        (lambda b: resealed(b, b'"streams":', b'"streams":-'), r"is damaged \(its header"),
        (lambda b: resealed(b, b'"bytes":', b'"bytes":"", "x":'), r"is damaged \(its header"),
        (lambda b: b[: len(MAGIC) + 20], r"is damaged \(its header"),
        (lambda b: b[1:], "not written by"),
        (lambda b: b"", "not written by"),
    ],
)
def test_damaged_files(runs: Path, code: Path, damage: Any, match: str) -> None:
    whole = code.read_bytes()
    code.write_bytes(damage(whole))
    assert code.read_bytes() != whole
    refused(runs / "elu-rope", code, match)


@pytest.mark.parametrize("streams", [1, 3])
def test_no_byte_can_change_unnoticed(runs: Path, file: Path, streams: int) -> None:
    """Whichever bit of the file, the header's too, flips: refused before anything is decoded."""
    file.write_bytes(b"the of and is with the of and" * 2)
    code = file.with_suffix(".code")
    compress(runs / "elu-rope", file, code, streams=streams)
    whole = code.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            code.write_bytes(changed)
            with pytest.raises(UserError, match=r"is damaged|not written by|older version"):
                compression._parse(code)
    for cut in range(len(whole)):
        code.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"is damaged|not written by"):
            compression._parse(code)


@pytest.mark.parametrize(
    "changes",
    [
        *({"streams": 2}, {"streams": 60}, {"window": 5}, {"bytes": 57}, {"bytes": 59}),
        *({"sha256": 64 * "0"}, {"model": 16 * "0"}, {"probe": 16 * "0"}, {"more": 1}),
        *({"bytes": 0}, {"bytes": -1}, {"streams": 0}, {"window": 0}, {"threads": 0}),
    ],
)
def test_a_header_that_says_something_else_gives_no_wrong_text(
    runs: Path, file: Path, changes: dict[str, Any]
) -> None:
    """Not damage, which the checksum tells, but another header that is whole."""
    file.write_bytes(b"the of and is with the of and" * 2)
    code = file.with_suffix(".code")
    compress(runs / "elu-rope", file, code, streams=1)
    code.write_bytes(with_header(code.read_bytes(), **changes))
    refused(runs / "elu-rope", code, ".")


def test_masked_models_compress_nothing(runs: Path, file: Path, tmp_path: Path) -> None:
    values = {"corpus": str(runs / "text.txt"), "objective": "mlm", "steps": 1}
    train(Settings(**{**vars(SETTINGS), **values}), "elu-rope", tmp_path / "masked")
    with pytest.raises(UserError, match="mlm: it fills in masked bytes and cannot compress"):
        compress(tmp_path / "masked", file, tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_a_model_of_no_use(runs: Path, file: Path, tmp_path: Path) -> None:
    state = torch.load(runs / "elu-rope" / "checkpoint.pt")
    state["model"]["norm.weight"][3] = math.nan
    torch.save(state, tmp_path / "broken.pt")
    with pytest.raises(UserError, match="not finite"):
        compress(tmp_path / "broken.pt", file, tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_files_are_not_replaced_unasked(runs: Path, file: Path, code: Path) -> None:
    run, before = runs / "elu-rope", code.read_bytes()
    for match, source, out in (
        ("exists already", file, code),
        ("is the file to read", file, file),
        ("is a folder", file, file.parent),
        ("cannot be read", file.parent / "nowhere", file.parent / "new"),
        ("cannot be read", file.parent, file.parent / "new"),
        ("cannot be written", file, file / "new"),
    ):
        with pytest.raises(UserError, match=match):
            compress(run, source, out)
    for name, value in (("streams", 0), ("length", 0), ("threads", -1)):
        with pytest.raises(ValueError, match=f"--{name} must be at least 1"):
            compress(run, file, file.parent / "new", **{name: value})  # type: ignore[arg-type]
    assert code.read_bytes() == before and file.stat().st_size == 700
    assert not (file.parent / "new").exists()


def test_without_the_package(
    runs: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "constriction", None)
    assert main(["compress", str(runs / "elu-rope"), str(file), str(file) + ".code"]) == 2
    assert "pip install 'linear_rope[compression]'" in capsys.readouterr().err


def test_only_files_of_ones_own_are_replaced(runs: Path, file: Path, tmp_path: Path) -> None:
    """Neither a device or pipe, nor the model itself; a link keeps what it is."""
    run = runs / "elu-rope"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="is not a regular file"):
        compress(run, file, pipe, overwrite=True)
    assert pipe.is_fifo()
    for name in ("checkpoint.pt", "config.json", "metrics.csv"):
        before = (run / name).read_bytes()
        with pytest.raises(UserError, match="belongs to the run"):
            compress(run, file, run / name, overwrite=True)
        assert (run / name).read_bytes() == before
    (tmp_path / "real").write_text("old")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    compress(run, file, link, overwrite=True)
    assert link.is_symlink() and (tmp_path / "real").read_bytes().startswith(MAGIC)


def test_sizes_that_no_machine_has(runs: Path, file: Path, code: Path) -> None:
    with pytest.raises(ValueError, match="--threads must be at most 1024, got 100000"):
        compress(runs / "elu-rope", file, file.with_name("new"), threads=100_000)
    whole = code.read_bytes()
    for name, value in (("threads", 10**12), ("bytes", 10**15)):
        code.write_bytes(with_header(whole, **{name: value}))
        with pytest.raises(UserError, match="is damaged"):
            decompress(runs / "elu-rope", code, file.with_name("new"))
