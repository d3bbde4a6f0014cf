"""On a GPU, Python runs ahead of the device; to look at a tensor's values is to wait for it.

Here a CPU stands for the GPU: values cost something to look at (`can_read` says no), and whatever
looks at them all the same is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import judge
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linear_rope import Config, LanguageModel, advance_random_features, make_feature_map
from linear_rope.recipes import best

SIZES: dict[str, Any] = {"vocab_size": 19, "dim": 16, "layers": 2, "heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "elu+1": {"backend": "chunked"},
    "decay": {"decay": "learned"},  # decoded by the quick step
    "favor+": {"feature_map": "favor+", "redraw_interval": 100},
    "decay, convolution": {"decay": "learned", "short_conv": 3},
    "fixed decay": {"decay": "fixed"},
    "softmax": {"attention": "softmax"},
    "learned table": {"position": "learned", "max_length": 40},
    "cosformer": {
        "position": "cosformer",
        "max_length": 40,
        "feature_map": "relu-expand",
        "denominator": "rotated",
    },
}


class NoWaits(TorchDispatchMode):
    """Refuses operations whose results Python has to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        by_number = func is torch.ops.aten.index.Tensor and not any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )  # of a size that is known, unlike what a mask picks
        if waits & set(func.tags) and not by_number:
            raise AssertionError(f"{func} would wait for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def far() -> Iterator[None]:
    """No value can be looked at for nothing, and none is."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this would wait for the device")

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("linear_rope") and hasattr(module, "can_read"):
                patch.setattr(module, "can_read", lambda x: False)
        patch.setattr(Tensor, "tolist", refuse)
        for name in ("tensor", "as_tensor"):  # numbers of Python's are copied to the device
            patch.setattr(torch, name, refuse)
        with NoWaits():
            yield


def build(kind: str) -> LanguageModel:
    if kind == "best":
        return LanguageModel(best(**SIZES))
    return LanguageModel(Config(**{**SIZES, **KINDS[kind]}))


@pytest.mark.parametrize("kind", [*KINDS, "best"])
def test_training_and_decoding_wait_for_nothing(kind: str) -> None:
    model = build(kind)
    tokens = torch.randint(19, (2, 20))
    mask = torch.arange(20) >= torch.tensor([[0], [3]])
    documents = (torch.arange(20) >= 7).long().expand(2, 20)
    want = model(tokens)
    advance_random_features(model)  # the first time it has to look where it is
    with far():
        got = model(tokens)
        for given in ({"key_mask": mask}, {"segment_ids": documents}, {"positions": 3}):
            model(tokens, **given).square().mean().backward()
        advance_random_features(model)
        model.eval()
        logits, state = model.prefill(tokens[:, :15], key_mask=mask[:, :15])
        for t in range(15, 20):
            logits, state = model.decode(tokens[:, t], state)
    assert judge.error(got, want) <= 1e-5
    assert judge.error(logits, model.prefill(tokens, key_mask=mask)[0]) <= 1e-5


@pytest.mark.parametrize("scaling", ["xpos", "selective", "yarn:factor=4,original_length=8"])
def test_decoding_by_other_rotations_waits_for_nothing(scaling: str) -> None:
    model = LanguageModel(Config(**SIZES, rotary_scaling=scaling)).eval()
    tokens = torch.randint(19, (2, 9))
    logits, state = model.prefill(tokens[:, :7])
    with far():
        for t in (7, 8):
            logits, state = model.decode(tokens[:, t], state)
    with torch.no_grad():
        assert judge.error(logits, model(tokens)[:, -1]) <= 1e-5


def test_these_tests_see_what_waits() -> None:
    x = torch.ones(3)
    waits: list[Callable[[], Any]] = [
        *(x.sum().item, x.nonzero, lambda: x.tolist(), lambda: bool((x > 0).any())),
        *(lambda: x[x > 0], lambda: torch.as_tensor(3), lambda: torch.tensor([1.0])),
    ]
    for wait in waits:
        wait()
        with far(), pytest.raises(AssertionError, match="would wait for the device"):
            wait()


def test_redraws_are_counted_without_looking() -> None:
    torch.manual_seed(0)
    phi: Any = make_feature_map("favor+", 4, features=8, redraw_interval=3, seed=5)
    other: Any = make_feature_map("favor+", 4, features=8, redraw_interval=3, seed=5)
    saved = {name: x.clone() for name, x in phi.state_dict().items()}
    draws = []
    for _ in range(7):
        phi.advance()
        draws.append(phi.projection.clone())
    changed = [not torch.equal(a, b) for a, b in pairwise([saved["projection"], *draws])]
    assert changed == [False, False, True, False, False, True, False]
    # Whatever else writes to the count is heard: loading in place, a new buffer, a move.
    phi.load_state_dict({**saved, "steps": torch.tensor(2)})
    phi.advance()
    assert torch.equal(phi.projection, draws[2]) and int(phi.steps) == 3
    other.advance()
    other.steps = torch.tensor(5)
    other.advance()
    assert torch.equal(other.projection, draws[5])
    other.double().advance()
    other.steps.add_(1)
    other.advance()
    assert torch.equal(other.projection.float(), make_at(9)) and int(other.steps) == 9
    # Between two redraws nothing is looked at.
    with far():
        other.advance()
        other.advance()


def make_at(steps: int) -> Tensor:
    phi: Any = make_feature_map("favor+", 4, features=8, redraw_interval=3, seed=5)
    for _ in range(steps):
        phi.advance()
    return phi.projection  # type: ignore[no-any-return]
