"""Compress a file by a model's own probabilities, and get it back exactly.

An arithmetic coder (the range coder of the package constriction) spends -log2 p bits on a byte that
the model gave the probability p, so the size of the compressed file is the proof of a figure in
bits per byte: whoever has the model and that file has the text.

The text is cut into streams of (nearly) equal length, read side by side as the rows of one batch. A
stream's first byte costs 8 bits; each further one is predicted from those before it in its window.
Windows are those of `evaluate`: each starts afresh from the last byte of the one before. With one
stream, exactly the targets of ``evaluate --file`` are coded.

The decoder must see the same probabilities to the last bit, so both sides decode recurrently, a
byte of each stream at a time, with the same batch and the same number of threads. Another machine,
another version of PyTorch, or native kernels on one side only may round otherwise; a probe in the
header tells that before any decoding, and a SHA-256 proves the result.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from linear_rope import backends
from linear_rope.model import LanguageModel

from . import checkpoint, run_folder
from .distributed import refuse_several
from .errors import UserError
from .evaluate import TrainedLanguageModel, load_language_model, longest_text
from .flags import MOST_THREADS, check_sizes

__all__ = ["Report", "compress", "decompress"]

MAGIC = b"linear_rope text 2\n"  # then a line of JSON, `Header`; the code; CRC-32 of all that
_BEFORE = b"linear_rope text 1\n"
MOST_STREAMS = 256
MOST_BYTES = 2**40  # more would take years
_SUM = 4  # bytes of the checksum
_WINDOWS = 8  # in a stream, at least, where the number of streams is not given


@dataclass(frozen=True)
class Header:
    """What decompression must know, or can check before it begins."""

    bytes: int
    sha256: str  # of the text
    streams: int
    window: int  # bytes that a state reads before it starts afresh
    model: str  # of the weights and the configuration
    probe: str  # of probabilities, as computed when compressing
    threads: int
    torch: str
    native: bool  # whether native kernels were ready


@dataclass(frozen=True)
class Report:
    """What a compression came to; sizes in bytes, rates in bits per byte of the text."""

    text: int
    file: int
    header: int
    bits_per_byte: float  # of the whole file
    cross_entropy: float  # the model's own, over the bytes that it predicted
    predicted: int
    seconds: float


def compress(
    run: Path,
    file: Path,
    out: Path,
    *,
    streams: int | None = None,
    length: int | None = None,
    threads: int = 1,
    overwrite: bool = False,
    device: str = "cpu",
) -> Report:
    """Compress ``file`` into ``out`` by the model of ``run``; prints sizes and bits per byte.

    Args:
        run: run folder or checkpoint, of ``--objective causal``.
        streams: parts of the text that are read side by side; more is faster and costs a few bits a
            stream. None: up to 256, by the size of the file.
        length: bytes in a window; None: as in training.
        threads: of PyTorch; decompression uses as many.
        overwrite: replace ``out`` if it exists.

    Raises:
        UserError: constriction is missing, a file cannot be read or written, the model cannot
            predict byte by byte.
        ValueError: a size is impossible.
    """
    refuse_several("compress")
    coder = _constriction()
    out = out.resolve()  # of a link, what it points to is written
    _check_output(run, file, out, overwrite)
    check_sizes(streams=streams, length=length)
    check_sizes(most=MOST_THREADS, threads=threads)
    content = _read(file)
    trained = load_language_model(run, device, "compress a file")
    window = trained.config["training"]["length"] if length is None else length
    data = np.frombuffer(content, dtype=np.uint8)
    count = _default_streams(len(data), window) if streams is None else streams
    rows = _rows(len(data), count)
    _check_window(trained.model, window, rows)
    began = time.perf_counter()
    with _threads(threads):
        probe = _probe(trained.model, window, len(rows))
        encoder = coder.queue.RangeEncoder()
        nats = 0.0
        family = coder.model.Categorical(perfect=False)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        with _bar(len(data), "compressing") as bar:
            for t, active, p in _steps(trained.model, rows, window, lambda t: data[starts + t]):
                symbols = data[starts[:active] + t].astype(np.int32)
                encoder.encode(symbols, family, p[:active])
                if t:
                    nats -= float(np.log(p[np.arange(active), symbols]).sum())
                bar.update(active)
    words = np.asarray(encoder.get_compressed(), dtype="<u4").tobytes()
    header = Header(
        bytes=len(data),
        sha256=hashlib.sha256(content).hexdigest(),
        streams=len(rows),
        window=window,
        model=_fingerprint(trained),
        probe=probe,
        threads=threads,
        torch=torch.__version__,
        native=_native(),
    )
    lines = MAGIC + json.dumps(asdict(header), separators=(",", ":")).encode() + b"\n"
    sealed = seal(lines + words)
    checkpoint.replace_file(out, sealed)
    size, predicted = len(sealed), len(data) - len(rows)
    report = Report(
        text=len(data),
        file=size,
        header=len(lines),
        bits_per_byte=8 * size / len(data) if len(data) else math.nan,
        cross_entropy=nats / math.log(2) / predicted if predicted else math.nan,
        predicted=predicted,
        seconds=time.perf_counter() - began,
    )
    _print(report, file, out)
    return report


def decompress(
    run: Path, file: Path, out: Path, *, overwrite: bool = False, device: str = "cpu"
) -> int:
    """Write the text that was compressed into ``file`` to ``out``; returns its bytes.

    Raises:
        UserError: as in `compress`; ``file`` is damaged or was compressed by another model; this
            machine computes other probabilities. Nothing is written then.
    """
    refuse_several("decompress")
    coder = _constriction()
    out = out.resolve()  # of a link, what it points to is written
    _check_output(run, file, out, overwrite)
    header, words = _parse(file)
    trained = load_language_model(run, device, "decompress a file")
    if _fingerprint(trained) != header.model:
        raise UserError(
            f"{file} was compressed by another model than that of {run}; give the run of then"
        )
    rows = _rows(header.bytes, header.streams)
    try:
        content = np.zeros(header.bytes, dtype=np.uint8)
    except MemoryError as error:
        raise UserError(
            f"{file} says that it holds {header.bytes:,} bytes, for which there is no memory here"
        ) from error
    starts = np.array([row.start for row in rows], dtype=np.int64)
    began = time.perf_counter()
    with _threads(header.threads):
        if _probe(trained.model, header.window, len(rows)) != header.probe:
            raise UserError(
                f"the model's probabilities differ here in their last bits from those that {file} "
                f"was compressed with (by torch {header.torch}, native kernels "
                f"{'ready' if header.native else 'not ready'}; here torch {torch.__version__}, "
                f"{'ready' if _native() else 'not ready'}); decompress it where it was compressed"
            )
        decoder = coder.queue.RangeDecoder(words)
        family = coder.model.Categorical(perfect=False)
        with _bar(header.bytes, "decompressing") as bar:
            steps = _steps(trained.model, rows, header.window, lambda t: content[starts + t])
            for t, active, p in steps:
                content[starts[:active] + t] = decoder.decode(family, p[:active])
                bar.update(active)
    if hashlib.sha256(content.data).hexdigest() != header.sha256:
        raise UserError(
            f"the text decompressed from {file} is not the one that was compressed (its SHA-256 "
            "differs), so nothing was written; use the machine and the versions of then"
        )
    checkpoint.replace_file(out, content.tobytes())
    seconds = time.perf_counter() - began
    print(
        f"{file} -> {out}: {header.bytes:,} bytes, SHA-256 as it was, "
        f"{header.bytes / seconds:,.0f} bytes/s"
    )
    return header.bytes


# --- the walk that both sides take ----------------------------------------------------------------


def _default_streams(size: int, window: int) -> int:
    return max(1, min(MOST_STREAMS, size // (_WINDOWS * window)))


def _rows(size: int, streams: int) -> list[range]:
    """The text's parts: as many as there are bytes at most, the longer ones first."""
    count = min(streams, size)
    base, longer = divmod(size, count) if count else (0, 0)
    starts = [row * base + min(row, longer) for row in range(count + 1)]
    return [range(*ends) for ends in pairwise(starts)]


@torch.no_grad()
def _steps(
    model: LanguageModel, rows: list[range], window: int, bytes_at: Any
) -> Iterator[tuple[int, int, np.ndarray]]:
    """For each step t: (t, how many rows still have a byte t, its probabilities (rows, 256)).

    ``bytes_at(t)`` gives byte t of all rows, after step t is done. Rows that end a byte earlier
    than others still stand in the last batch, and are not coded.
    """
    if not rows:
        return
    device = next(model.parameters()).device
    longest, shortest = len(rows[0]), len(rows[-1])
    whole = sum(len(row) == longest for row in rows)
    yield 0, len(rows), np.full((len(rows), 256), 1 / 256)
    state: Any = None
    for t in range(1, longest):
        tokens = torch.from_numpy(bytes_at(t - 1).astype(np.int64)).to(device)
        if (t - 1) % window == 0:
            logits, state = model.prefill(tokens[:, None])
        else:
            logits, state = model.decode(tokens, state)
        # In float64, so that no probability of a finite logit is 0.
        p = logits.double().softmax(-1).cpu().numpy()
        if not np.isfinite(p).all():
            raise UserError("the model's probabilities are not finite: its weights are of no use")
        yield t, len(rows) if t < shortest else whole, p


def _probe(model: LanguageModel, window: int, streams: int) -> str:
    """Hash of the probabilities along fixed bytes, in batches of the size that will be coded."""
    digest, steps = hashlib.sha256(), 12
    rows = [range(steps)] * max(streams, 1)
    order = np.arange(len(rows))
    for _, _, p in _steps(model, rows, window, lambda t: (37 * t + 101 * order + 32) % 256):
        digest.update(p.tobytes())
    return digest.hexdigest()[:16]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _native() -> bool:
    return not backends()["native"]


def _fingerprint(trained: TrainedLanguageModel) -> str:
    digest = hashlib.sha256(json.dumps(trained.config["model"], sort_keys=True).encode())
    for name, value in sorted(trained.model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# --- files, checks, words -------------------------------------------------------------------------


def _constriction() -> Any:
    try:
        return importlib.import_module("constriction").stream
    except ImportError as error:
        raise UserError(
            f"compression needs the package constriction, which cannot be imported ({error}): "
            "pip install 'linear_rope[compression]'"
        ) from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error})") from error


def _check_output(run: Path, file: Path, out: Path, overwrite: bool) -> None:
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file to write")
    if out.exists() and not out.is_file():
        raise UserError(f"{out} is not a regular file; name another one to write")
    model = run / checkpoint.NAME if run.is_dir() else run
    folder = out.resolve().parent
    if folder == model.resolve().parent and (
        out.name in run_folder.FILES or out.name.startswith("checkpoint")
    ):
        raise UserError(f"{out} belongs to the run {run}; name another file to write")
    if out.exists() and file.exists() and out.samefile(file):
        raise UserError(f"{out} is the file to read; name another one to write")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists already; --overwrite replaces it")
    run_folder.make_writable(out.parent, "name a file elsewhere")


def _check_window(model: LanguageModel, window: int, rows: list[range]) -> None:
    needed = min(window, len(rows[0]) - 1 if rows else 0)
    longest = longest_text(model)
    if longest is not None and needed > longest:
        raise UserError(
            f"this arm has positions for {longest} bytes only, so --length must not be {window}"
        )


def seal(content: bytes) -> bytes:
    """The content and its CRC-32, so that no bit of it can change unnoticed."""
    return content + zlib.crc32(content).to_bytes(_SUM, "little")


def _parse(file: Path) -> tuple[Header, np.ndarray]:
    content = _read(file)
    if content.startswith(_BEFORE):
        raise UserError(
            f"{file} was written by an older version, whose checksum left out the header; read it "
            "with that version, or compress the text again"
        )
    if not content.startswith(MAGIC):
        raise UserError(f"{file} was not written by `python -m enwik8 compress`")
    line, _, code = content[len(MAGIC) : -_SUM].partition(b"\n")
    try:
        header = Header(**json.loads(line))
        sizes = (header.bytes, header.streams, header.window, header.threads)
        good = all(type(size) is int and size >= 0 for size in sizes)
        good = good and header.window >= 1 and header.threads >= 1
        good = good and header.threads <= MOST_THREADS and max(sizes) <= MOST_BYTES
    except (ValueError, TypeError):
        good = False
    if seal(content[:-_SUM]) != content or not good or len(code) % 4:
        raise UserError(f"{file} is damaged (its header or its checksum is wrong)")
    return header, np.frombuffer(code, dtype="<u4").astype(np.uint32)


def _bar(total: int, what: str) -> Any:
    return tqdm(total=total, unit="byte", unit_scale=True, desc=what, dynamic_ncols=True)


def _print(report: Report, file: Path, out: Path) -> None:
    print(f"{file} -> {out}: {report.text:,} bytes -> {report.file:,}", end="")
    if report.text:
        print(
            f", {report.bits_per_byte:.4f} bits per byte (header of {report.header} bytes "
            f"included), {report.text / report.seconds:,.0f} bytes/s",
            end="",
        )
    print()
    if report.predicted:
        print(
            f"the model's own cross-entropy: {report.cross_entropy:.4f} bits per byte over the "
            f"{report.predicted:,} bytes that it predicted"
        )
