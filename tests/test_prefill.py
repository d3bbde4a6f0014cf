"""What a prompt costs, and what is refused before its first token is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linear_rope import Config, LanguageModel

TIME, VOCABULARY = 150, 97


def build(**options: Any) -> LanguageModel:
    return LanguageModel(Config(vocab_size=VOCABULARY, dim=8, layers=1, heads=2, **options)).eval()


class Widths(TorchDispatchMode):
    """How many numbers tensors with an axis of the vocabulary have, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and VOCABULARY in x.shape[1:]:
                self.most = max(self.most, x.numel())
        return out


@pytest.mark.parametrize("mask", [None, "left", "right"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_prompt_has_the_logits_of_its_last_tokens_only(tied: bool, mask: str | None) -> None:
    model, rows = build(tie_embeddings=tied), 3
    prompt = torch.randint(VOCABULARY, (rows, TIME))
    real = None
    last = torch.tensor([TIME - 1] * rows)
    if mask:
        real = torch.arange(TIME) < torch.tensor([[TIME], [7], [60]])
        real, last = (real.flip(1), last) if mask == "left" else (real, real.sum(1) - 1)
    with torch.no_grad():
        want = model(prompt, key_mask=real)[torch.arange(rows), last]
    with Widths() as widths:
        logits, state = model.prefill(prompt, key_mask=real)
        model.generate(prompt, 2, key_mask=real)
        next(model.stream(prompt, key_mask=real, state=state))
    assert rows * VOCABULARY <= widths.most <= 8 * VOCABULARY  # the weight itself, if not them
    torch.testing.assert_close(logits, want, atol=1e-6, rtol=0)
    assert not logits.requires_grad
    assert state.position.tolist() == ([TIME] * rows if real is None else real.sum(1).tolist())


def test_hooks_of_the_model_see_a_prompt() -> None:
    model, seen = build(), []
    model.register_forward_hook(lambda module, args, out: seen.append(out[0].shape))
    model.prefill(torch.zeros(2, 5, dtype=torch.int64))
    assert seen == [(2, VOCABULARY)]


@pytest.mark.parametrize(
    ("prompt", "mask", "message"),
    [
        (torch.tensor([[999]]), None, r"tokens must be in \[0, vocab_size=97\), got 999"),
        (torch.zeros(1, 2), None, r"tokens must be integers"),
        (torch.zeros(4, dtype=torch.int64), None, r"prompt must have shape \(batch, time\)"),
        (torch.zeros(2, 0, dtype=torch.int64), None, r"at least one token, got \(2, 0\)"),
        (torch.zeros(1, 2).long(), torch.zeros(1, 2).bool(), r"at least one real token in each"),
        (torch.zeros(1, 2).long(), torch.ones(1, 3).bool(), r"key_mask must be bool of shape"),
    ],
)
def test_bad_prompts_are_refused_at_once(prompt: Any, mask: Any, message: str) -> None:
    """Also where no token is wanted, or before one is."""
    model = build()
    for call in (
        lambda: model.generate(prompt, 0, key_mask=mask),
        lambda: model.generate(prompt, 1, key_mask=mask),
        lambda: model.stream(prompt, key_mask=mask),
        lambda: model.prefill(prompt, key_mask=mask),
    ):
        with pytest.raises(ValueError, match=message):
            call()
