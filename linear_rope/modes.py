"""Evaluation mode for the time of a computation, and then every module's own again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[bool]:
    """Within it nothing in `module` is in training mode; afterwards what was is again.

    Each part gets back the mode that it had: one that was frozen (`part.eval()` in a model that
    trains) stays so. Where nothing trains, nothing is called. Yields whether anything did.
    """
    modes = [(part, part.training) for part in module.modules()]
    if not any(training for _, training in modes):
        yield False
        return
    try:
        module.eval()
        yield True
    finally:
        # By `train`, which a module may have made its own, and from the outside in, because it sets
        # all that is inside; a part that is in two places might get the mode of the second.
        for part, training in modes:
            if part.training != training:
                part.train(training)
        for part, training in modes:
            if part.training != training:
                part.training = training
