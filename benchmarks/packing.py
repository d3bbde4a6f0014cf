"""What packing costs: a row of several documents against the same row as one document.

    python -m benchmarks.packing [--length 8192] [--documents 16] [--heads 8] [--width 64]

Attention with elu+1 and RoPE after it, each backend that is ready, forward and forward with
backward, both rows in turn in one process; and the largest difference of the packed row from its
documents run one by one. Prints the table and writes OUT/packing.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._contestants import ready_backends
from benchmarks._machine import add_common_options, describe, prepare
from benchmarks._timing import interleave, quartiles
from linear_rope import Rotary, linear_attention

__all__ = ["main"]


def make_call(
    inputs: list[Tensor], ids: Tensor | None, cotangent: Tensor, backend: str, backward: bool
) -> Callable[[], object]:
    """One call, without gradients or with those of q, k and v."""
    rotary = Rotary(inputs[0].shape[3])
    leaves = [x.clone().requires_grad_(backward) for x in inputs]

    def call() -> object:
        out = linear_attention(*leaves, rotary=rotary, segment_ids=ids, backend=backend)
        return torch.autograd.grad(out, leaves, cotangent) if backward else out

    return call


def difference(inputs: list[Tensor], limits: list[int], ids: Tensor, backend: str) -> float:
    """Largest difference of the packed row from its documents one by one, over their largest
    entry."""
    rotary, worst = Rotary(inputs[0].shape[3]), 0.0
    packed = linear_attention(*inputs, rotary=rotary, segment_ids=ids, backend=backend)
    for start, stop in itertools.pairwise(limits):
        parts = [x[:, :, start:stop] for x in inputs]
        alone = linear_attention(*parts, rotary=rotary, backend=backend)
        apart = (packed[:, :, start:stop] - alone).abs().max() / alone.abs().max()
        worst = max(worst, float(apart))
    return worst


def main(argv: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_options(parser, "build/benchmarks")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=16, help="of equal length, about")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(argv)
    length, count = options.length, options.documents
    if not 1 <= count <= length:
        parser.error(f"--documents must lie between 1 and --length, got {count} for {length}")
    load_before = prepare(options)
    torch.manual_seed(options.seed)
    inputs = [torch.randn(1, options.heads, length, options.width) for _ in range(3)]
    cotangent = torch.randn_like(inputs[2])
    limits = [round(i * length / count) for i in range(count + 1)]
    ids = torch.repeat_interleave(torch.arange(count), torch.tensor(limits).diff())[None]

    backends = [name for name in ("chunked", "native") if not ready_backends().get(name)]
    calls = {
        (backend, backward, packed): make_call(
            inputs, ids if packed else None, cotangent, backend, backward
        )
        for backend in backends
        for backward in (False, True)
        for packed in (False, True)
    }
    times = {key: quartiles(found) for key, found in interleave(
        calls, rounds=options.rounds, budget=60.0, seed=options.seed
    ).items()}  # fmt: skip

    given = list(sys.argv[1:] if argv is None else argv)
    facts = describe(given, "benchmarks.packing", load_before)
    lines = [
        "# What packing costs",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        f"elu+1 with RoPE after it, batch 1, {options.heads} heads of width {options.width}, "
        f"{length:,} tokens in {count} documents, float32; medians of up to {options.rounds} "
        "rounds, quartiles in brackets.",
        "",
        "| backend | | one document, ms | packed, ms | ratio | error of the packed row |",
        "|---|---|---|---|---|---|",
    ]
    for backend in backends:
        apart = difference(inputs, limits, ids, backend)
        for backward, what in ((False, "forward"), (True, "forward and backward")):
            plain, packed = (times[backend, backward, x] for x in (False, True))
            cells = [
                f"{1e3 * middle:.1f} [{1e3 * low:.1f}, {1e3 * high:.1f}]"
                for low, middle, high in (plain, packed)
            ]
            ratio = packed[1] / plain[1]
            lines.append(
                f"| {backend} | {what} | {cells[0]} | {cells[1]} | {ratio:.2f} | {apart:.1e} |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    Path(options.out / "packing.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
