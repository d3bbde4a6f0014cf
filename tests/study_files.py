"""Files of tiny studies, for the tests."""

from __future__ import annotations

import random
from pathlib import Path

TINY = """
layers = 1
dim = 16
heads = 2
length = 16
batch_size = 4
steps = 6
warmup = 2
evaluate_every = 2
validation_bytes = 200
checkpoint_every = 2
cpu = true
"""


def make_text(path: Path) -> str:
    """Write some words; returns the path."""
    words = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as"]
    path.write_text(" ".join(random.Random(0).choices(words, k=4000)))
    return str(path)


def tiny(text: str, top: str = "", settings: str = "", rest: str = "") -> str:
    """A study file; the arms and seeds are given in ``top``, unless they do not matter."""
    top = top or 'arms = ["elu-none", "elu-rope"]\nseeds = [0, 1]'
    evaluation = "" if "evaluation" in rest else "[evaluation]\nfactors = [1, 2]\nbytes = 300\n"
    return f'{top}\n[settings]\ncorpus = "{text}"{TINY}{settings}\n{rest}\n{evaluation}'
