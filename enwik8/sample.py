"""Text from a trained model, byte by byte as it is drawn."""

from __future__ import annotations

import codecs
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from linear_rope.model import LanguageModel

from .errors import UserError
from .evaluate import load_model

__all__ = ["sample", "stream_text"]


def stream_text(
    run: Path,
    prompt: str = "The ",
    length: int = 500,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[str]:
    """Pieces of the continuation, as soon as their bytes are drawn; the prompt is not repeated.

    Bytes are decoded as UTF-8. A byte sequence that is no UTF-8 becomes the replacement character;
    a character of several bytes comes out when it is whole.
    """
    trained = load_model(run, device)
    model = trained.model
    if not isinstance(model, LanguageModel):
        raise UserError(
            f"{run} was trained with --objective {trained.objective.name}: it fills in masked "
            "bytes and cannot continue a text; give a run of --objective causal"
        )
    tokens = torch.tensor([list(prompt.encode())], dtype=torch.int64, device=device)
    if tokens.numel() == 0:
        raise UserError("--prompt must have at least one byte")
    longest = model.config.max_length if model.config.position == "learned" else None
    if longest is not None and tokens.shape[1] + length - 1 > longest:
        raise UserError(
            f"this arm has learned positions for {longest} bytes only, so prompt and --length "
            f"together may have {longest + 1} bytes, not {tokens.shape[1] + length}"
        )
    if length < 0:
        raise UserError(f"--length must not be negative, got {length}")
    generator = torch.Generator(device).manual_seed(seed)
    stream = model.stream(
        tokens, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
    )
    return _decode(itertools.islice(stream, length))


def _decode(tokens: Iterable[torch.Tensor]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(bytes([int(token)]))
    yield decoder.decode(b"", final=True)


def sample(run: Path, prompt: str = "The ", length: int = 500, **options: object) -> None:
    """Print the prompt and its continuation while it is being drawn. Options: `stream_text`."""
    pieces = stream_text(run, prompt, length, **options)  # type: ignore[arg-type]
    first = next(pieces, "")  # Wrong options are found here: before anything is printed.
    for piece in itertools.chain([prompt, first], pieces):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
