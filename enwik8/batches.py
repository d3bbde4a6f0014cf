"""Which bytes are trained and evaluated on, in which order, and in which unit the loss is told.

Sampling has no state: batch ``(step, micro)`` is a pure function of the seed, so a resumed run and
another arm of a comparison see the same batches by construction. `BatchHash` is the check of that.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def bits_per_byte(nats: float) -> float:
    """Mean nats per byte -> bits per byte: ``nats / ln 2`` (so that ``2**bits == e**nats``)."""
    return nats / math.log(2.0)


class WindowSampler:
    """Random windows of a byte array: a batch is a function of ``(seed, step, micro)`` alone.

    The starts of the windows are uniform over ``0 .. len(data) - length - 1``, both included: the
    last start has the last byte of the data as its last target. They are the words of Philox
    (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3") under the key ``seed`` and
    the counter ``(step, micro)``, reduced modulo the number of starts. (The bias, below
    starts / 2**64, is nothing; and unlike `numpy.random.Generator.integers`, these words are
    promised to stay the same in every version of numpy.)

    Args:
        data: (bytes,) uint8.
        length: tokens in a window.
        batch_size: windows in a global batch, over all ranks together.
        seed: any integer in ``0 .. 2**64 - 1``.
        rank, world: this process and the number of processes: rank r gets the r-th of ``world``
            equal slices of the same global batch.

    Raises:
        ValueError: data shorter than ``length + 1``, sizes below 1, a batch size that ``world``
            does not divide, ...; the message names argument, value and remedy.
    """

    def __init__(
        self,
        data: np.ndarray,
        length: int,
        batch_size: int,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        _check_bytes(data)
        _check_at_least_1(length=length, batch_size=batch_size, world=world)
        if len(data) < length + 1:
            raise ValueError(
                f"data has {len(data):,} bytes, but a window of length {length:,} needs "
                f"{length + 1:,} (its last target included): use a longer text or a smaller length"
            )
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in 0 .. 2**64 - 1, got {seed}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in 0 .. world - 1 = {world - 1}, got {rank}")
        if batch_size % world:
            raise ValueError(
                f"batch_size {batch_size} cannot be shared equally by world={world} processes: "
                f"choose a multiple of {world}"
            )
        self.data = data
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world = world

    @property
    def number_of_starts(self) -> int:
        """How many different windows there are."""
        return len(self.data) - self.length

    def starts(self, step: int, micro: int = 0) -> np.ndarray:
        """First bytes' indices of the global batch: (batch_size,) int64, the same on each rank."""
        if step < 0 or micro < 0:
            raise ValueError(f"step and micro must not be negative, got {step} and {micro}")
        # Philox counts in the first of its four 64-bit words: the others keep batches apart.
        words: np.ndarray = np.random.Philox(
            key=np.array([self.seed, 0], dtype=np.uint64),
            counter=np.array([0, 0, micro, step], dtype=np.uint64),
        ).random_raw(self.batch_size)
        starts: np.ndarray = (words % np.uint64(self.number_of_starts)).astype(np.int64)
        return starts

    def windows(self, step: int, micro: int = 0) -> np.ndarray:
        """The global batch with its targets: (batch_size, length + 1) uint8, same on each rank."""
        return self._cut(self.starts(step, micro))

    def batch(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs x and targets y of this rank: int64, (batch_size / world, length).

        ``y[:, t]`` is the byte after ``x[:, t]``.
        """
        share = self.batch_size // self.world
        mine = slice(self.rank * share, (self.rank + 1) * share)
        return _inputs_and_targets(self._cut(self.starts(step, micro)[mine]))

    def _cut(self, starts: np.ndarray) -> np.ndarray:
        cut: np.ndarray = self.data[starts[:, None] + np.arange(self.length + 1)]
        return cut


class BatchHash:
    """A running hash of all batches so far, to compare arms with and to log at each step.

    ``h_t = sha256(h_{t-1} || shape of batch t || bytes of batch t)``, cut to 64 bits, from
    ``h_0 = sha256(corpus_sha256)`` cut likewise. The state is the digest itself: 16 hexadecimal
    digits go into the log and into the checkpoint, and `restore` goes on from them. A batch is
    (batch, length + 1) uint8, or, with masks, inputs and targets as (2, batch, length) int16.

        hash = BatchHash(corpus.sha256)
        hash.update(sampler.windows(step))      # once per micro batch
        row["batch_hash"] = hash.digest
        hash = BatchHash.restore(row["batch_hash"])
    """

    def __init__(self, corpus_sha256: str) -> None:
        self._state = hashlib.sha256(corpus_sha256.encode()).digest()[:8]

    @classmethod
    def restore(cls, digest: str) -> BatchHash:
        """A hash that goes on from ``digest``. Raises ValueError where it is not 16 hex digits."""
        try:
            state = bytes.fromhex(digest)
        except (TypeError, ValueError):
            state = b""
        if len(state) != 8:
            raise ValueError(
                f"digest must be 16 hexadecimal digits, as in the column batch_hash, got {digest!r}"
            )
        restored = cls("")
        restored._state = state
        return restored

    @property
    def digest(self) -> str:
        """16 hexadecimal digits: the whole state."""
        return self._state.hex()

    def update(self, windows: np.ndarray) -> str:
        """Take in one batch; returns the new digest."""
        if windows.dtype not in (np.dtype(np.uint8), np.dtype("<i2")):
            raise ValueError(
                "windows must be uint8 (WindowSampler.windows), or little-endian int16 with masks, "
                f"got {windows.dtype}"
            )
        chain = hashlib.sha256(self._state)
        chain.update(np.array(windows.shape, dtype="<i8").tobytes())
        chain.update(windows.tobytes())
        self._state = chain.digest()[:8]
        return self.digest


def evaluation_windows(
    data: np.ndarray, length: int, batch_size: int, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cover a split once, in order: each byte but the first is a target exactly once.

    Yields ``(x, y)``, int64, of shape (up to batch_size, length); the remainder that fills no
    window comes last, as a batch of its own of shape (1, shorter). The loss of the split is the sum
    of all targets' nats over the sum of ``y.numel()``: weighted by tokens, not by batches.

    Args:
        data: (bytes,) uint8, at least 2 bytes.
        length: tokens in a window.
        batch_size: windows in a batch.
        limit: evaluate the first ``limit`` targets only; None: all ``len(data) - 1``.

    Raises:
        ValueError: at the call, for sizes below 1 or data too short.
    """
    _check_bytes(data)
    _check_at_least_1(length=length, batch_size=batch_size)
    if limit is not None:
        _check_at_least_1(limit=limit)
        data = data[: limit + 1]
    if len(data) < 2:
        raise ValueError(
            f"data has {len(data)} bytes, but evaluation needs at least 2 (an input and its "
            "target): use a longer text or other splits"
        )
    return _cover(data, length, batch_size)


def _cover(data: np.ndarray, length: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    full = (len(data) - 1) // length
    offsets = np.arange(min(length, len(data)) + 1)  # of no use where no window is full
    for first in range(0, full, batch_size):
        starts = np.arange(first, min(first + batch_size, full)) * length
        yield _inputs_and_targets(data[starts[:, None] + offsets])
    if (len(data) - 1) % length:
        yield _inputs_and_targets(data[full * length :][None])


def _inputs_and_targets(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(windows.astype(np.int64))  # a copy: never a view of read-only data
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _check_bytes(data: np.ndarray) -> None:
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
        kind = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise ValueError(f"data must be a 1-d numpy array of uint8, got {kind}")


def _check_at_least_1(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
