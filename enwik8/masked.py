"""The masked objective: which bytes are hidden and how, and the model that guesses them.

As BERT does it (Devlin et al. 2018, arXiv 1810.04805, section 3.1), on bytes: 15 % of the positions
are chosen; of those 80 % show the mask symbol, 10 % a random byte and 10 % the byte itself; the
loss is that of the chosen positions, and no other. RoFormer compares pre-training with and without
RoPE in this way (arXiv 2104.09864, section 4.2).

Masks have no state, as batches have none (`enwik8.batches`): those of a training window are a
function of (seed, step, row), those of an evaluation window of its place in the text alone. So they
are equal in all arms, for a resumed run, and at every evaluation whatever the batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linear_rope.model import Encoder

from .batches import WindowSampler, evaluation_windows

__all__ = [
    "IGNORED",
    "MASK",
    "MaskedModel",
    "hide",
    "masked_batch",
    "masked_count",
    "masked_evaluation",
]

MASK = 256  # the symbol after the 256 bytes
IGNORED = -100  # the target of a position that was not chosen; cross_entropy leaves it out

# Second words of Philox's key. Windows are drawn under 0, so no two kinds of draws ever meet.
_TRAINING, _EVALUATION = 1, 2


class MaskedModel(Encoder):
    """An encoder with its embedding as output layer: (batch, time) -> (batch, time, 256) logits.

    It reads 257 symbols, the bytes and `MASK`, and predicts bytes only: the mask is no answer, and
    knowing nothing costs 8 bits. Parameters have the names that `LanguageModel` gives them.
    """

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        """Logits of the byte that belongs at each position; options as for `Encoder`."""
        return F.linear(super().forward(tokens, **options), self.embedding.weight[:MASK])


def masked_count(length: int) -> int:
    """How many positions of a window are chosen: 15 %, rounded, and at least 1.

    Exactly so many in each window, so that a mean over windows is a mean over hidden bytes, in
    whatever parts the windows are computed.
    """
    return max(1, (15 * length + 50) // 100)


def hide(
    windows: np.ndarray, key: tuple[int, int], rows: Iterable[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """What the model sees of windows (B, T), and the targets: int64, (B, T) each.

    Row i is drawn by Philox (see `WindowSampler`) under ``key`` and the counter ``rows[i]``. A
    target is the byte that was there, or `IGNORED` where the position was not chosen.
    """
    seen = windows.astype(np.int64)
    targets = np.full_like(seen, IGNORED)
    time = windows.shape[1]
    for x, y, counter in zip(seen, targets, rows, strict=True):
        philox = np.random.Philox(
            key=np.array(key, dtype=np.uint64),
            counter=np.array([0, 0, *counter], dtype=np.uint64),
        )
        order, kind, byte = philox.random_raw(3 * time).reshape(3, time)
        chosen = np.argsort(order, kind="stable")[: masked_count(time)]
        y[chosen] = x[chosen]
        tenth = kind[chosen] % 10
        x[chosen[tenth < 8]] = MASK
        another = chosen[tenth == 8]  # and at 9 the byte stays
        x[another] = byte[another] % 256
    return seen, targets


def masked_batch(sampler: WindowSampler, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a step's global batch, int64, (batch_size, length) each.

    The windows are those of the causal objective, without its last target.
    """
    windows = sampler.windows(step)[:, :-1]
    return hide(windows, (sampler.seed, _TRAINING), ((i, step) for i in range(len(windows))))


def masked_evaluation(
    data: np.ndarray, length: int, batch_size: int, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cover a split once, in order, as `evaluation_windows` does; inputs and targets, int64.

    The masks of a window depend on its number and length alone: not on a seed, the batch size or
    the limit.
    """
    number = 0
    for windows, _ in evaluation_windows(data, length, batch_size, limit):
        rows = ((0, number + i) for i in range(len(windows)))
        seen, targets = hide(windows.numpy(), (0, _EVALUATION), rows)
        number += len(windows)
        yield torch.from_numpy(seen), torch.from_numpy(targets)
