"""Text from a trained model, byte by byte as it is drawn.

A prompt is read a piece at a time, and a state of constant size goes on from piece to piece: with
linear attention the memory does not depend on the lengths of prompt and text.
"""

from __future__ import annotations

import codecs
import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from linear_rope.model import LanguageModel
from linear_rope.sampling import pick

from .distributed import refuse_several
from .errors import UserError
from .evaluate import load_language_model, longest_text
from .flags import check_seed, check_sizes

__all__ = ["read_prompt", "sample", "stream_text"]

PIECE = 2048  # bytes read at once: enough for full speed, little enough for little memory


def read_prompt(prompt: str | None, file: Path | None) -> Iterator[bytes]:
    """The prompt's bytes in pieces, from the text itself, from a file, or, for ``-``, from
    standard input.

    Raises:
        UserError: text and file are both given, or the file cannot be read.
    """
    if file is None:
        yield os.fsencode("The " if prompt is None else prompt)  # as it was typed, UTF-8 or not
        return
    if prompt is not None:
        raise UserError("--prompt and --prompt-file exclude each other; give one of them")
    if str(file) == "-" and sys.stdin is None:
        raise UserError("--prompt-file - cannot be read (standard input is closed); name a file")
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as source:
            yield from iter(lambda: source.read(PIECE), b"")
    except OSError as error:
        raise UserError(
            f"--prompt-file {file} cannot be read ({error.strerror or error})"
        ) from error


def stream_text(
    run: Path,
    prompt: str | bytes | Iterable[bytes] = "The ",
    length: int = 500,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    repeat: bool = False,
) -> Iterator[str]:
    """Pieces of the continuation, as soon as their bytes are drawn.

    Bytes are decoded as UTF-8. A byte sequence that is no UTF-8 becomes the replacement character;
    a character of several bytes comes out when it is whole.

    Args:
        run: run folder or checkpoint.
        prompt: text, bytes, or an iterable of bytes, of which one piece is held at a time.
        length: bytes to draw.
        temperature, top_k, top_p: see `linear_rope.LanguageModel.generate`.
        seed: of the draws.
        repeat: begin with the prompt itself.

    Raises:
        UserError: no model that continues a text, an empty prompt, or one that is too long for
            an arm whose positions end; before anything is drawn.
        ValueError: impossible sampling options.
    """
    if not temperature >= 0:
        raise ValueError(
            f"--temperature must be at least 0 (always the likeliest), got {temperature}"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p must lie in (0, 1], got {top_p}; leave it out to keep all bytes")
    check_sizes(top_k=top_k)
    check_seed("seed", seed)
    if length < 0:
        raise UserError(f"--length must not be negative, got {length}")
    model = load_language_model(run, device, "continue a text").model
    whole = prompt.encode() if isinstance(prompt, str) else prompt
    pieces = _cut([whole] if isinstance(whole, bytes) else whole)
    first = next(pieces, b"")
    if not first:
        raise UserError("the prompt must have at least one byte; see --prompt and --prompt-file")
    longest = longest_text(model)
    if longest is not None:
        first, pieces = _fit(first, pieces, length, longest)
    generator = torch.Generator(device).manual_seed(seed)
    options = (temperature, top_k, top_p, generator)
    parts = _continue(model, itertools.chain([first], pieces), length, options, device, repeat)
    return _decode(parts)


def _cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), PIECE):
            yield piece[start : start + PIECE]


def _fit(
    first: bytes, pieces: Iterator[bytes], length: int, longest: int
) -> tuple[bytes, Iterator[bytes]]:
    """The whole of a prompt, where positions end and so only a short one is of use."""
    while len(first) + length <= longest + 1 and (piece := next(pieces, b"")):
        first += piece
    if len(first) + length > longest + 1:
        more = "at least " if next(pieces, b"") else ""
        raise UserError(
            f"this arm has positions for {longest} bytes only, so prompt and --length "
            f"together may have {longest + 1} bytes, not {more}{len(first) + length}"
        )
    return first, pieces


@torch.no_grad()
def _continue(
    model: LanguageModel,
    pieces: Iterable[bytes],
    length: int,
    options: tuple[Any, ...],
    device: str,
    repeat: bool,
) -> Iterator[bytes]:
    state: Any = None
    last = torch.empty(0)
    for piece in pieces:
        tokens = torch.frombuffer(bytearray(piece), dtype=torch.uint8).long()[None].to(device)
        logits, state = model(tokens, state=state, return_state=True)
        last = logits[:, -1]
        if repeat:
            yield piece
    for drawn in range(length):
        if not torch.isfinite(last).all():
            raise UserError(
                "the model's outputs are not finite: its training diverged, or the checkpoint is "
                "damaged; sample from another one"
            )
        token = pick(last, *options)
        yield bytes([int(token)])
        if drawn < length - 1:
            last, state = model.decode(token, state)


def _decode(parts: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for part in parts:
        yield decoder.decode(part)
    yield decoder.decode(b"", final=True)


def sample(
    run: Path,
    prompt: str | bytes | Iterable[bytes] = "The ",
    length: int = 500,
    **options: Any,
) -> None:
    """Print the prompt and its continuation while it is being drawn. Options: `stream_text`."""
    refuse_several("sample")
    # Wrong options are found here: before anything is printed.
    for piece in stream_text(run, prompt, length, repeat=True, **options):
        # A terminal that is not UTF-8 gets question marks, not an error in the middle.
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(piece.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    sys.stdout.write("\n")
