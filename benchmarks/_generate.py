"""`LanguageModel.generate`: tokens a second, and where the time goes."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks._machine import progress
from benchmarks._results import table, verdict
from benchmarks._timing import interleave, quartiles
from linear_rope import Config, LanguageModel

__all__ = ["generation_report", "self_times"]

PROMPT = 128
TOP = 8


def self_times(events: Any) -> dict[str, float]:
    """Seconds in each operator itself, without those that it calls, the largest first."""
    times = {event.key: 1e-6 * event.self_cpu_time_total for event in events}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def products(model: LanguageModel, tokens: int) -> None:
    """The matrix products of that many tokens, one by one, and nothing else: the least that
    generation costs, whoever multiplies. (A native call shows a profiler no operators inside.)"""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    work = [(m.weight, m.bias) for m in layers]
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
    prompt = torch.randint(256, (1, PROMPT), generator=torch.Generator().manual_seed(options.seed))
    new = options.new_tokens
    calls = {name: partial(model.generate, prompt, new) for name, model in models.items()}
    calls |= {f"{name}, products": partial(products, m, new) for name, m in models.items()}
    progress(f"generate: {new} tokens, {layers} layers, {dim} wide, {heads} heads")
    times = interleave(calls, rounds=min(options.rounds, 5), budget=float("inf"))
    lines, shares, tops = [], {}, []
    for name, model in models.items():
        low, median, high = quartiles(times[name])
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model.generate(prompt, new)
        spent = self_times(profiled.key_averages())
        shares[name] = quartiles(times[f"{name}, products"])[1] / median
        lines.append(
            [
                f"{name} attention",
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
