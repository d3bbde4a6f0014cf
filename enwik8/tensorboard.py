"""Curves and samples of text for TensorBoard, beside the log.

The scalars are called after the log's columns. Points are handed to the system before each
checkpoint, and a resumed run declares all later ones void (``purge_step``): TensorBoard shows each
step once, and none that a checkpoint covers is lost.
"""

from __future__ import annotations

import codecs
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from linear_rope.model import LanguageModel

from .errors import UserError
from .evaluate import longest_text
from .objectives import Objective

__all__ = ["FOLDER", "TensorBoard", "check_installed", "continuation"]

FOLDER = "tensorboard"
_PROMPT, _SAMPLE = 64, 256  # bytes


def check_installed() -> None:
    """Raises UserError where there is no TensorBoard to write for."""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise UserError(
            f"--tensorboard needs the package tensorboard, which cannot be imported ({error}): "
            "pip install 'linear_rope[tensorboard]', or leave the flag out"
        ) from error


class TensorBoard:
    """The event file of one run, from the step after ``step`` on.

    Raises:
        UserError: there is no TensorBoard. From each method: the folder could not be written.
    """

    def __init__(self, run: Path, step: int, objective: Objective) -> None:
        check_installed()
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run / FOLDER
        self._validation = objective.validation_column
        self._scalars = (
            *(objective.train_column, objective.validation_column),
            *("learning_rate", "gradient_norm", "tokens_per_second"),
        )
        with self._guarded():
            self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        # The writer has a thread, so what fails may be told at any later call.
        try:
            yield
        except OSError as error:
            raise UserError(f"{self._folder} could not be written ({error})") from error

    def trained(self, row: Mapping[str, str]) -> None:
        """Add a row of the log."""
        with self._guarded():
            for name in self._scalars:
                if row[name]:
                    self._writer.add_scalar(name, float(row[name]), int(row["step"]))

    def validated(self, value: str, step: int) -> None:
        """Add a validation that was made after the row of its step."""
        if value:
            with self._guarded():
                self._writer.add_scalar(self._validation, float(value), step)

    def sampled(self, text: str | None, step: int) -> None:
        """Add a text, if there is one, to be shown as it is."""
        if text is not None:
            code = "\n".join("    " + line for line in text.splitlines())  # code, in Markdown
            with self._guarded():
                self._writer.add_text("sample", code, step)

    def flush(self) -> None:
        """Hand all points so far to the system, so that a kill cannot lose them."""
        with self._guarded():
            self._writer.flush()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._guarded():
                self._writer.close()
        except UserError:
            if error is None:
                raise


def continuation(model: nn.Module, data: np.ndarray, device: Any) -> str | None:
    """The beginning of ``data`` (bytes, uint8), and how the model goes on from there.

    Always drawn with the same random numbers, its own, so that samples differ by the model alone
    and training does not notice. None for a model that draws no text.
    """
    if not isinstance(model, LanguageModel):
        return None
    prompt, length = data[:_PROMPT], _SAMPLE
    longest = longest_text(model)
    if longest is not None:
        prompt = prompt[: max(longest // 2, 1)]
        length = min(length, longest - len(prompt) + 1)
    tokens = torch.from_numpy(prompt.astype(np.int64))[None].to(device)
    generator = torch.Generator(device).manual_seed(0)
    stream = model.stream(tokens, temperature=0.8, generator=generator)
    try:
        drawn = bytes(int(token) for token in islice(stream, length))
    finally:
        stream.close()  # type: ignore[attr-defined]
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    return decode(prompt.tobytes() + drawn, final=True)
