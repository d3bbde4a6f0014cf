"""The sampler, the batches' hash, the evaluation's cover of a split, and the unit of the loss."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from enwik8.batches import BatchHash, WindowSampler, bits_per_byte, evaluation_windows


def numbers(size: int) -> np.ndarray:
    return np.arange(size, dtype=np.uint8)


# --- windows --------------------------------------------------------------------------------------


def test_starts_are_exactly_those_with_a_whole_window_and_its_last_target() -> None:
    sampler = WindowSampler(numbers(10), length=4, batch_size=100, seed=0)
    starts = np.concatenate([sampler.starts(step) for step in range(100)])
    assert set(starts.tolist()) == {0, 1, 2, 3, 4, 5}
    counts = np.bincount(starts)
    # Uniform: 10,000 draws over 6 starts; six standard deviations of a binomial are 224.
    assert np.abs(counts - 10_000 / 6).max() < 224


def test_every_target_is_the_next_byte_and_the_last_byte_is_one() -> None:
    data = numbers(10)
    sampler = WindowSampler(data, length=4, batch_size=100, seed=3)
    seen = set()
    for step in range(20):
        x, y = sampler.batch(step)
        assert x.shape == y.shape == (100, 4)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1)
        seen.update(y.flatten().tolist())
    assert seen == set(range(1, 10))
    last = x[:, 0] == 5
    assert last.any()
    assert (y[last, -1] == 9).all()


def test_one_start_where_only_one_window_fits() -> None:
    x, y = WindowSampler(numbers(5), length=4, batch_size=50, seed=1).batch(0)
    assert torch.equal(x, torch.arange(4).expand(50, 4))
    assert torch.equal(y, torch.arange(1, 5).expand(50, 4))


@pytest.mark.parametrize("size", [0, 1, 4])
def test_data_shorter_than_a_window_is_refused_with_both_numbers(size: int) -> None:
    with pytest.raises(ValueError, match=rf"\b{size} bytes.*\b5\b"):
        WindowSampler(numbers(size), length=4, batch_size=1, seed=0)


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2, 60), length=st.integers(1, 59), seed=st.integers(0, 2**64 - 1))
def test_no_window_leaves_the_data(size: int, length: int, seed: int) -> None:
    if size < length + 1:
        return
    sampler = WindowSampler(numbers(size), length, batch_size=8, seed=seed)
    windows = sampler.windows(7, 2)
    assert windows.shape == (8, length + 1)
    assert (np.diff(windows.astype(int), axis=1) == 1).all()
    assert windows.max() < size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 2**64}, "seed must be in"),
        ({"rank": 2, "world": 2}, "rank must be in"),
        ({"world": 3}, "choose a multiple of 3"),
        ({"data": np.arange(10)}, "numpy array of uint8, got int64"),
        ({"data": list(range(10))}, "numpy array of uint8, got list"),
        ({"data": np.zeros((2, 9), np.uint8)}, "1-d"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "data": numbers(10),
        "length": 4,
        "batch_size": 4,
        "seed": 0,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        WindowSampler(**arguments)


# --- no history -----------------------------------------------------------------------------------


def test_a_batch_depends_on_seed_step_and_micro_only() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    walked = WindowSampler(data, 16, 8, seed=5)
    for step in range(30):
        walked.batch(step)
    fresh = WindowSampler(data, 16, 8, seed=5)
    assert torch.equal(walked.batch(30, 1)[0], fresh.batch(30, 1)[0])
    torch.manual_seed(1)
    np.random.seed(1)  # the global generators must not matter
    assert torch.equal(walked.batch(30, 1)[0], fresh.batch(30, 1)[0])


def test_batches_of_other_steps_micros_and_seeds_differ() -> None:
    data = np.zeros(1_000_000, np.uint8)
    keys = [
        (seed, step, micro) for seed in (0, 1, 2**32) for step in range(8) for micro in range(4)
    ]
    batches = {
        WindowSampler(data, 16, 8, seed).starts(step, micro).tobytes() for seed, step, micro in keys
    }
    assert len(batches) == len(keys)
    # Nor do they overlap, as neighboring counters of one stream would.
    starts = np.concatenate(
        [WindowSampler(data, 16, 8, seed).starts(step, micro) for seed, step, micro in keys]
    )
    assert len(np.unique(starts)) > 0.99 * len(starts)


def test_the_draws_are_those_of_every_other_machine() -> None:
    starts = WindowSampler(np.zeros(1_000_000, np.uint8), 256, 4, seed=1).starts(2, 3)
    assert starts.tolist() == [588625, 642197, 896805, 255109]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_one_global_batch(world: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8)
    whole = WindowSampler(data, 16, 8, seed=2)
    ranks = [WindowSampler(data, 16, 8, seed=2, rank=r, world=world) for r in range(world)]
    for one, all_of_them in zip(range(2), whole.batch(9, 1), strict=True):
        parts = [rank.batch(9, 1)[one] for rank in ranks]
        assert all(part.shape == (8 // world, 16) for part in parts)
        assert torch.equal(torch.cat(parts), all_of_them)
    assert all(np.array_equal(rank.windows(9, 1), whole.windows(9, 1)) for rank in ranks)


def test_read_only_data_gives_writable_batches_silently() -> None:
    data = numbers(100)
    data.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, _ = WindowSampler(data, 4, 2, seed=0).batch(0)
        x.zero_()
        for x, _ in evaluation_windows(data, 4, 2):
            x.zero_()
    assert np.array_equal(data, numbers(100))


# --- the hash -------------------------------------------------------------------------------------


def test_the_hash_goes_on_from_its_own_digest() -> None:
    sampler = WindowSampler(numbers(200), 16, 4, seed=0)
    whole, first = BatchHash("abc"), BatchHash("abc")
    for step in range(10):
        whole.update(sampler.windows(step))
    for step in range(5):
        first.update(sampler.windows(step))
    second = BatchHash.restore(first.digest)
    for step in range(5, 10):
        second.update(sampler.windows(step))
    assert second.digest == whole.digest
    assert len(whole.digest) == 16
    int(whole.digest, 16)


def test_the_hash_tells_order_content_shape_and_corpus_apart() -> None:
    one, two = numbers(12).reshape(3, 4), numbers(12)[::-1].reshape(3, 4)
    digests = set()
    for corpus, batches in [
        ("a", [one, two]),
        ("a", [two, one]),
        ("a", [one]),
        ("a", [one, one]),
        ("a", [one.reshape(4, 3), two]),
        ("b", [one, two]),
        ("a", []),
        ("b", []),
    ]:
        running = BatchHash(corpus)
        for batch in batches:
            running.update(batch)
        digests.add(running.digest)
    assert len(digests) == 8


def test_the_hash_is_the_one_of_all_logs_so_far() -> None:
    assert BatchHash("abc").update(numbers(12).reshape(3, 4)) == "99af4545962a8988"


@pytest.mark.parametrize("digest", ["", "12", "g" * 16, "0" * 18, None])
def test_a_wrong_digest_is_refused(digest: str) -> None:
    with pytest.raises(ValueError, match="16 hexadecimal digits"):
        BatchHash.restore(digest)


def test_the_hash_refuses_tokens_of_another_type() -> None:
    with pytest.raises(ValueError, match="uint8"):
        BatchHash("a").update(np.zeros((2, 3), np.int64))


# --- evaluation -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 120),
    length=st.integers(1, 130),
    batch_size=st.integers(1, 9),
    limit=st.none() | st.integers(1, 200),
)
def test_each_byte_but_the_first_is_a_target_once(
    size: int, length: int, batch_size: int, limit: int | None
) -> None:
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    batches = list(evaluation_windows(data, length, batch_size, limit))
    targets = torch.cat([y.flatten() for _, y in batches]).numpy()
    inputs = torch.cat([x.flatten() for x, _ in batches]).numpy()
    wanted = size - 1 if limit is None else min(limit, size - 1)
    assert np.array_equal(targets, data[1 : wanted + 1])
    assert np.array_equal(inputs, data[:wanted])
    assert all(x.shape == y.shape and len(x) <= batch_size for x, y in batches)
    assert all(x.shape[1] == length for x, _ in batches[:-1])


def test_the_loss_is_weighted_by_tokens_not_by_batches() -> None:
    """A unigram model: its bits per byte do not depend on how the split is cut."""
    data = np.array([0] * 90 + [1] * 13, dtype=np.uint8)
    logits = torch.tensor([2.0, -1.0])
    costs = -torch.log_softmax(logits, 0)
    direct = float(costs[torch.from_numpy(data[1:].astype(np.int64))].mean())
    for length, batch_size in [(8, 4), (100, 1), (7, 3), (1000, 2)]:
        nats = count = 0.0
        for x, y in evaluation_windows(data, length, batch_size):
            flat = logits.expand(*x.shape, 2).reshape(-1, 2)
            nats += float(F.cross_entropy(flat, y.flatten(), reduction="sum"))
            count += y.numel()
        assert nats / count == pytest.approx(direct, rel=1e-5)


def test_evaluation_refuses_bad_arguments_at_the_call() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        evaluation_windows(numbers(1), 4, 2)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        evaluation_windows(numbers(9), 4, 2, limit=0)
    with pytest.raises(ValueError, match="length must be at least 1"):
        evaluation_windows(numbers(9), 0, 2)


# --- units ----------------------------------------------------------------------------------------


def test_zero_logits_over_256_symbols_are_8_bits() -> None:
    x, y = WindowSampler(numbers(256), 16, 4, seed=0).batch(0)
    nats = float(F.cross_entropy(torch.zeros(x.numel(), 256, dtype=torch.float64), y.flatten()))
    assert nats == pytest.approx(5.545177, abs=1e-6)
    assert bits_per_byte(nats) == pytest.approx(8.0, abs=1e-6)


def test_nats_to_bits() -> None:
    assert bits_per_byte(1.3564) == pytest.approx(1.956872, abs=1e-6)
    assert 2.0 ** bits_per_byte(1.3564) == pytest.approx(math.exp(1.3564))  # one perplexity
    assert bits_per_byte(0.0) == 0.0


def test_bytes_unseen_in_training_are_tokens_like_any_other() -> None:
    """The vocabulary is the 256 bytes, not what the training part happens to contain."""
    unseen = np.array([0, 255, 10, 13, 200], dtype=np.uint8)
    ((x, y),) = evaluation_windows(unseen, 4, 1)
    assert x.tolist() == [[0, 255, 10, 13]]
    assert y.tolist() == [[255, 10, 13, 200]]
