"""`LanguageModel.generate` and `decode`: tokens a second, and where the time goes."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks._judge import relative_error
from benchmarks._machine import progress
from benchmarks._results import table, verdict
from benchmarks._steps import without_kernels
from benchmarks._timing import interleave, quartiles
from linear_rope import Config, LanguageModel
from linear_rope.causal import native
from linear_rope.projection import Projection

__all__ = ["decode_report", "generation_report", "products", "self_times"]

PROMPT = 128
TOP = 8


def self_times(events: Any) -> dict[str, float]:
    """Seconds in each operator itself, without those that it calls, the largest first."""
    times = {event.key: 1e-6 * event.self_cpu_time_total for event in events}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def products(model: LanguageModel, tokens: int) -> None:
    """The matrix products of that many tokens, one by one, and nothing else: the least that
    generation costs, whoever multiplies. (A native call shows a profiler no operators inside.)"""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear | Projection)]
    work: list[tuple[Tensor, Tensor | None]] = [(m.weight, m.bias) for m in layers]
    if model.head is None:
        work.append((model.embedding.weight, None))
    inputs = {weight.shape[1]: torch.ones(1, weight.shape[1]) for weight, _ in work}
    with torch.no_grad():
        for _ in range(tokens):
            for weight, bias in work:
                F.linear(inputs[weight.shape[1]], weight, bias)


def generation_report(options: argparse.Namespace) -> str:
    """A section of the report of `benchmarks.decode`."""
    layers, dim, heads = options.model
    models = {}
    for attention in ("linear", "softmax"):
        torch.manual_seed(options.seed)
        config = Config(dim=dim, layers=layers, heads=heads, attention=attention)
        models[attention] = LanguageModel(config).eval()
    if native.is_ready():  # what was found out about a model is kept, so each way has its own
        models["linear, in torch"] = copy.deepcopy(models["linear"])
    prompt = torch.randint(256, (1, PROMPT), generator=torch.Generator().manual_seed(options.seed))
    new = options.new_tokens
    calls: dict[str, Callable[[], object]] = {}

    def in_torch(call: Callable[[], object]) -> object:
        with without_kernels():
            return call()

    for name, model in models.items():
        calls[name] = partial(model.generate, prompt, new)
        if name == "linear, in torch":
            calls[name] = partial(in_torch, calls[name])
        calls[f"{name}, products"] = partial(products, model, new)
    progress(f"generate: {new} tokens, {layers} layers, {dim} wide, {heads} heads")
    times = interleave(calls, rounds=min(options.rounds, 5), budget=float("inf"))
    lines, shares, tops = [], {}, []
    for name in models:
        low, median, high = quartiles(times[name])
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            calls[name]()
        spent = self_times(profiled.key_averages())
        shares[name] = quartiles(times[f"{name}, products"])[1] / median
        lines.append(
            [
                name.replace(",", " attention,") if "," in name else f"{name} attention",
                f"{new / median:.0f} ({new / high:.0f} to {new / low:.0f})",
                f"{1e6 * median / new:.0f}",
                f"{shares[name]:.2f}",
            ]
        )
        for key, seconds in list(spent.items())[:TOP]:
            tops.append([f"{name}: `{key}`", f"{1e6 * seconds / new:.1f}"])
    header = ["", "tokens/s", "microseconds a token", "share in matrix products"]
    goal = verdict(shares["linear"], 0.6, at_least=True)
    return "\n".join(
        [
            f"## generate: batch 1, prompt {PROMPT}, {new} new tokens, {layers} layers, {dim} "
            f"wide, {heads} heads\n",
            table(header, lines),
            "Share: the time of all matrix products of the linear layers by themselves, through "
            "torch, in the same rounds, over that of generation.\n",
            table(["", "", "target", "verdict"], [["linear: share in matrix products", *goal]]),
            "Largest costs, the time in an operator itself, profiled:\n",
            table(["operator", "microseconds a token"], tops),
        ]
    )


def decode_report(options: argparse.Namespace, compiler: str = "inductor") -> str:
    """A section of the report of `benchmarks.decode`: the ways through `LanguageModel.decode`.

    options.compile: also that through torch.compile, with `compiler` as its backend.
    """
    layers, dim, heads = options.model
    torch.manual_seed(options.seed)
    model = LanguageModel(Config(dim=dim, layers=layers, heads=heads)).eval()
    drawn = torch.randint(
        256, (PROMPT + options.new_tokens, 1), generator=torch.Generator().manual_seed(options.seed)
    )
    prompt, tokens = drawn[:PROMPT].mT, drawn[PROMPT:]
    progress(f"decode: {len(tokens)} tokens, {layers} layers, {dim} wide, {heads} heads")

    def run(model: LanguageModel, decode: Callable[..., Any]) -> Callable[[], Tensor]:
        _, start = model.prefill(prompt)

        def call() -> Tensor:
            state = start
            for token in tokens:
                logits, state = decode(token, state)
            return logits

        return call

    def alone(call: Callable[[], Tensor]) -> Tensor:
        with without_kernels():
            return call()

    other = copy.deepcopy(model)  # what was found out about a model is kept
    torch_alone = "torch, operation by operation"
    ways: dict[str, Callable[[], Tensor]] = {}
    ways[torch_alone] = partial(alone, run(other, other.decode))
    if native.is_ready():
        ways["one native call for all layers"] = run(model, model.decode)
    if options.compile:
        compiled = torch.compile(model.decode, fullgraph=True, backend=compiler)
        ways["torch.compile"] = run(model, compiled)
    judge = copy.deepcopy(model).double()
    want = run(judge, judge.decode)()
    errors = {name: relative_error(call(), want) for name, call in ways.items()}
    times = interleave(ways, rounds=min(options.rounds, 5), budget=float("inf"))
    slowest = quartiles(times[torch_alone])[1]
    lines = []
    for name, error in errors.items():
        low, median, high = (1e6 * x / len(tokens) for x in quartiles(times[name]))
        cells = [
            f"{median:.0f} ({low:.0f} to {high:.0f})",
            f"{1e-6 * median * len(tokens) / slowest:.2f}",
        ]
        lines.append([name, *cells, f"{error:.0e}"])
    header = ["", "microseconds a token", "of the first", "error of the last logits"]
    heading = f"## decode: {len(tokens)} tokens of the same model with linear attention\n"
    return "\n".join([heading, table(header, lines)])
