"""Language models of one size, ours and others, and a training step of each."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._contestants import ready_backends
from linear_rope import Config, LanguageModel

__all__ = ["Size", "Trainer", "find_models", "memory_task"]

VOCABULARY = 256
COMPILED = ", compiled"
# The forms that are meant to be fast.
FAST = ("chunked", "native")


@dataclass(frozen=True)
class Size:
    """Tokens in time and batch, and sizes of the model."""

    time: int
    batch: int
    layers: int
    dim: int
    heads: int
    seed: int = 0

    def small(self) -> Size:
        """The same model for few tokens, to load code and start threads."""
        return replace(self, time=min(self.time, 64), batch=1, layers=1)

    def config(self, **choices: Any) -> Config:
        """The config of our model of this size."""
        return Config(
            vocab_size=VOCABULARY, dim=self.dim, layers=self.layers, heads=self.heads, **choices
        )


def find_models(*, compiled: bool = False) -> tuple[list[str], dict[str, str]]:
    """Names for `build`, and who is absent and why."""
    present, absent = [], {}
    for backend, missing in ready_backends().items():
        if backend in FAST and missing:
            absent[f"linear_rope {backend}"] = missing
        elif backend in FAST:
            present.append(f"linear_rope {backend}")
    present.append("linear_rope softmax")
    if compiled:
        present += [name + COMPILED for name in present]
    present.append("floor: no mixing")
    try:
        _performer_class()
        present.append("PerformerLM")
    except Exception as error:  # whatever an old package does when it is imported
        absent["PerformerLM"] = f"{type(error).__name__}: {error}"
    return present, absent


def build(name: str, size: Size) -> nn.Module:
    """A model by the name that `find_models` gave; tokens (batch, time) -> logits."""
    torch.manual_seed(size.seed)
    if name == "PerformerLM":
        return _performer(size)
    plain = name.removesuffix(COMPILED)
    if plain == "linear_rope softmax":
        model = LanguageModel(size.config(attention="softmax"))
    elif plain == "floor: no mixing":
        model = LanguageModel(size.config())
        for block in model.blocks:
            block.attention = NoMixing(block.attention)
    else:
        model = LanguageModel(size.config(backend=plain.removeprefix("linear_rope ")))
    if plain != name:
        model.compile()  # in place
    return model


class NoMixing(nn.Module):
    """All projections of an attention layer and nothing between them: what a step costs anyway."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        self.rotary = attention.rotary

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """(batch, time, dim) -> the same; every token sees itself alone."""
        inner = self.attention
        return inner.out(inner.query(x) + inner.key(x) + inner.value(x))


def _performer_class() -> Callable[..., nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports what torch and Python have deprecated
        return importlib.import_module("performer_pytorch").PerformerLM


def _performer(size: Size) -> nn.Module:
    """PerformerLM of the same size with elu(x) + 1 on as many random features as a head is wide."""
    width = size.dim // size.heads
    with contextlib.redirect_stdout(io.StringIO()):  # each layer prints that it has no CUDA kernel
        return _performer_class()(
            num_tokens=VOCABULARY,
            max_seq_len=size.time,
            dim=size.dim,
            depth=size.layers,
            heads=size.heads,
            dim_head=width,
            causal=True,
            nb_features=width,
            feature_redraw_interval=None,
            generalized_attention=True,
            kernel_fn=lambda x: F.elu(x) + 1,
            tie_embed=True,
        )


class Trainer:
    """A model, AdamW, one batch, and the losses of the steps made so far."""

    def __init__(self, name: str, size: Size, part: int) -> None:
        self.model = build(name, size).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(size.seed)
        self.tokens = torch.randint(VOCABULARY, (size.batch, size.time + 1), generator=generator)
        self.part = part
        self.losses: list[float] = []

    def step(self) -> float:
        """One step over the batch, in parts of `part` rows; the mean loss in nats."""
        whole = 0.0
        for tokens in self.tokens.split(self.part):
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss = loss * (len(tokens) / len(self.tokens))
            loss.backward()
            whole += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(whole)
        return whole


def before_fork(**_: Any) -> None:
    """Imports what the models need, once for all processes that measure memory."""
    find_models()
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # which imports much when it is first made


def memory_task(name: str, size: dict[str, Any], part: int) -> Callable[[], object]:
    """For `_memory.Meter`: a first step, with model and data made."""
    trainer = Trainer(name, Size(**size), part)
    return trainer.step
