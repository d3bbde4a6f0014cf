"""How several processes end together: not before the checkpoint is written, and with a sentence."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from ranks import before_step, engine, terminate_me, tiny, write_text

from enwik8 import checkpoint
from enwik8.errors import UserError
from enwik8.interrupt import Interrupted
from enwik8.train import train

ARM = "elu-rope"


def slow_disk(rank: int, folder: Path, text: Path) -> None:
    """All get a signal; the first one's checkpoint takes its time; a launcher ends it meanwhile."""
    plain = checkpoint.save

    def slow(*args: Any, **given: Any) -> None:
        time.sleep(2.0)
        plain(*args, **given)

    checkpoint.save = slow  # type: ignore[assignment]
    with engine(), before_step(2, terminate_me), pytest.raises(Interrupted):
        train(tiny(text, checkpoint_every=9), ARM, folder / "slow")
    assert torch.load(folder / "slow" / "checkpoint.pt")["step"] == 2  # nobody left before


def full_disk(rank: int, folder: Path, text: Path) -> None:
    """The process that writes cannot, and says so; the other ends too, with one sentence."""
    with engine(), before_step(4, lambda: _fill(rank)), pytest.raises(UserError) as error:
        train(tiny(text), ARM, folder / "full")
    expected = "could not be written" if rank == 0 else "another process of this run has ended"
    assert expected in str(error.value)


def _fill(rank: int) -> None:
    def no_space(*args: Any, **given: Any) -> None:
        raise UserError("the checkpoint could not be written (no space)")

    if rank == 0:
        checkpoint.save = no_space  # type: ignore[assignment]


def test_nobody_leaves_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    ranks.start(slow_disk, tmp_path, write_text(tmp_path))


def test_an_error_of_the_writing_process_ends_the_other_with_a_sentence(tmp_path: Path) -> None:
    ranks.start(full_disk, tmp_path, write_text(tmp_path), limit=60.0)
