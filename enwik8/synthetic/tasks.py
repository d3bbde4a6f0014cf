"""Sequences with answers: recall, copying, induction, counting.

Each generator returns `Examples`: inputs (examples, length), and the token to predict at each
position, IGNORE where nothing is asked. All draws come from the generator given, on the CPU: one
seed, one set of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["IGNORE", "TASKS", "Examples", "Task", "copying", "counting", "induction", "recall"]

IGNORE = -100  # what `torch.nn.functional.cross_entropy` leaves out


class Examples(NamedTuple):
    """Sequences (examples, length) int64, and what to predict at each position."""

    inputs: Tensor
    targets: Tensor


def recall(
    examples: int,
    length: int,
    vocab_size: int,
    generator: torch.Generator,
    *,
    pairs: int,
    power: float = 0.01,
    random_filler: bool = True,
) -> Examples:
    """Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv 2312.04927, section 3.1).

    A row begins with pairs of a key and its value, key value key value ...; keys are different
    tokens of 1 ... vocab_size/2 - 1, values different ones of vocab_size/2 ... vocab_size - 1.
    Later each key comes once more, and its value is to be predicted there. (The value does not
    follow.) What follows the pairs is cut into slots of two tokens, s = 0, 1, ...; the keys' slots
    are drawn one after another, without repetition, with probability in proportion to
    (s + 1)^(power - 1): most come soon, as repetitions in text do. The other tokens are any but the
    row's keys, or 0. (Zoology lets keys in, and has 8192 tokens to make that rare. In a small
    vocabulary a key would come again with anything behind it, the more often the longer the row.)

    Args:
        length: even, at least 4 * pairs.
        power: from 0 (closest) to 1 (uniform). random_filler: any tokens but the row's keys in
            between; else 0.

    Raises:
        ValueError: a length or vocabulary too small for the pairs.
    """
    if length % 2 or length < 4 * pairs or pairs < 1:
        raise ValueError(
            f"recall of --pairs {pairs} needs an even --length of at least {4 * max(pairs, 1)} and "
            f"at least 1 pair, got length {length}"
        )
    half = vocab_size // 2
    if half - 1 < pairs:
        raise ValueError(
            f"--vocab-size {vocab_size} has {max(half - 1, 0)} keys, too few for --pairs {pairs}; "
            f"give at least {2 * pairs + 2}"
        )
    slots = (length - 2 * pairs) // 2
    weights = torch.arange(1, slots + 1, dtype=torch.float64) ** (power - 1.0)
    chosen = weights.expand(examples, slots).multinomial(pairs, generator=generator)
    filler = torch.zeros(examples, length, dtype=torch.int64)
    keys = 1 + _different(examples, half - 1, pairs, generator)
    values = half + _different(examples, vocab_size - half, pairs, generator)
    if random_filler:
        filler.random_(vocab_size - pairs, generator=generator)
        for key in keys.sort(1).values.split(1, dim=1):  # numbers without the keys, in order
            filler += filler >= key
    return arrange_recall(keys, values, chosen, filler)


def arrange_recall(keys: Tensor, values: Tensor, slots: Tensor, filler: Tensor) -> Examples:
    """The sequences of `recall` from what was drawn: all (examples, pairs), filler (.., length)."""
    pairs = keys.shape[1]
    inputs, targets = filler.clone(), torch.full_like(filler, IGNORE)
    inputs[:, : 2 * pairs] = torch.stack([keys, values], dim=-1).flatten(1)
    at = 2 * pairs + 2 * slots
    inputs.scatter_(1, at, keys)
    targets.scatter_(1, at, values)
    return Examples(inputs, targets)


def copying(examples: int, length: int, vocab_size: int, generator: torch.Generator) -> Examples:
    """A string, the token 0, and the string again, which is to be predicted (arXiv 2402.01032).

    Inputs: s_1 ... s_n 0 s_1 ... s_(n-1), with n = length / 2 and any tokens but 0; targets from
    the 0 on: s_1 ... s_n.
    """
    if length % 2 or length < 2 or vocab_size < 2:
        raise ValueError(
            "copying needs an even --length of at least 2 and a --vocab-size of at least 2, got "
            f"{length} and {vocab_size}"
        )
    string = torch.randint(1, vocab_size, (examples, length // 2), generator=generator)
    zero = torch.zeros(examples, 1, dtype=torch.int64)
    ignored = torch.full_like(string, IGNORE)
    return Examples(
        torch.cat([string, zero, string[:, :-1]], dim=1), torch.cat([ignored, string], dim=1)
    )


def induction(examples: int, length: int, vocab_size: int, generator: torch.Generator) -> Examples:
    """What followed the token 0 when it came before? (Induction heads as in arXiv 2212.14052.)

    Any tokens but 0; a 0 at one place, at random but not among the last two, and at the end. To be
    predicted at the end: the token after the first 0.
    """
    if length < 3 or vocab_size < 2:
        raise ValueError(
            "induction needs a --length of at least 3 and a --vocab-size of at least 2, got "
            f"{length} and {vocab_size}"
        )
    inputs = torch.randint(1, vocab_size, (examples, length), generator=generator)
    place = torch.randint(length - 2, (examples, 1), generator=generator)
    inputs.scatter_(1, place, 0)
    inputs[:, -1] = 0
    targets = torch.full_like(inputs, IGNORE)
    targets[:, -1:] = inputs.gather(1, place + 1)
    return Examples(inputs, targets)


def counting(
    examples: int, length: int, generator: torch.Generator, *, modulus: int = 2
) -> Examples:
    """How many ones so far, modulo `modulus`? Asked at every position; 2 is parity.

    It cannot be told from any number of last tokens: it takes a state that every token changes.
    """
    if length < 1 or modulus < 2:
        raise ValueError(f"length={length} must be at least 1 and modulus={modulus} at least 2")
    inputs = torch.randint(2, (examples, length), generator=generator)
    return Examples(inputs, inputs.cumsum(1) % modulus)


def _different(rows: int, among: int, number: int, generator: torch.Generator) -> Tensor:
    """(rows, number) different integers below `among` in each row."""
    return torch.rand(rows, among, generator=generator).argsort(1)[:, :number]


@dataclass(frozen=True)
class Task:
    """A task as the grid needs it.

    make: (examples, length, pairs, vocab_size, generator) -> Examples. answers: how many there are
    to choose from, of a vocabulary of that size. has_pairs: whether pairs mean anything to it.
    """

    name: str
    description: str
    make: Callable[[int, int, int, int, torch.Generator], Examples]
    answers: Callable[[int], int]
    has_pairs: bool = False

    def pairs(self, given: Sequence[int]) -> Sequence[int]:
        """Those given, or a single 0."""
        return given if self.has_pairs else (0,)


_ALL = (
    Task(
        "recall",
        "multi-query associative recall",
        lambda n, length, pairs, vocab, g: recall(n, length, vocab, g, pairs=pairs),
        lambda vocab: vocab - vocab // 2,
        has_pairs=True,
    ),
    Task(
        "copying",
        "copying",
        lambda n, length, _, vocab, g: copying(n, length, vocab, g),
        lambda vocab: vocab - 1,
    ),
    Task(
        "induction",
        "induction",
        lambda n, length, _, vocab, g: induction(n, length, vocab, g),
        lambda vocab: vocab - 1,
    ),
    Task(
        "parity",
        "parity of the ones so far",
        lambda n, length, _, __, g: counting(n, length, g),
        lambda vocab: 2,
    ),
    Task(
        "counting",
        "ones so far, modulo 5",
        lambda n, length, _, __, g: counting(n, length, g, modulus=5),
        lambda vocab: 5,
    ),
)
TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ALL})
