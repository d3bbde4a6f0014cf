"""A million tokens, forward and backward, on a CPU: memory, time, and the error of sampled rows.

    python -m benchmarks.long [--length 1048576] [--heads 4] [--width 64] [--backend chunked]

Prints, and writes to OUT/long.md: peak memory beyond the inputs, against the 6 GiB that a machine
of 8 GiB has to spare; seconds; and the largest relative error of sampled output rows against a run
of the recurrent form in float64, which holds one state at a time.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._machine import add_common_options, describe, prepare
from linear_rope import Rotary, linear_attention

LIMIT = 6 * 2**30


def peak() -> int:
    """Bytes: the highest resident memory of this process so far (Linux: in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sampled_error(q: Tensor, k: Tensor, v: Tensor, out: Tensor, piece: int, samples: int) -> float:
    """Largest relative error of sampled rows, against float64 in short pieces with a state."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(q.shape[2], (samples,), generator=generator).sort().values
    rotary, state, worst = Rotary(q.shape[3]), None, 0.0
    for start in range(0, q.shape[2], piece):
        part = slice(start, start + piece)
        want, state = linear_attention(
            q[:, :, part].double(),
            k[:, :, part].double(),
            v[:, :, part].double(),
            rotary=rotary,
            backend="reference",
            state=state,
            return_state=True,
        )
        here = rows[(rows >= start) & (rows < start + piece)]
        if len(here):
            exact, got = want[:, :, here - start], out[:, :, here].double()
            worst = max(worst, float(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).max()))
    return worst


def main(argv: list[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_options(parser, "build/benchmarks")
    parser.add_argument("--length", type=int, default=2**20)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--backend", default="chunked")
    parser.add_argument("--samples", type=int, default=2000, help="rows that are judged")
    options = parser.parse_args(argv)
    load_before = prepare(options)
    torch.manual_seed(options.seed)
    shape = (1, options.heads, options.length, options.width)

    warm = torch.randn(1, 1, 64, options.width, requires_grad=True)
    linear_attention(
        warm, warm, warm, rotary=Rotary(options.width), backend=options.backend
    ).sum().backward()
    q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
    cotangent = torch.randn(shape)
    before, began = peak(), time.perf_counter()
    out = linear_attention(q, k, v, rotary=Rotary(options.width), backend=options.backend)
    middle = time.perf_counter()
    out.backward(cotangent)
    seconds, extra = time.perf_counter() - began, peak() - before
    print(f"forward {middle - began:.1f} s, with backward {seconds:.1f} s", flush=True)

    with torch.no_grad():
        worst = sampled_error(q, k, v, out, min(512, options.length), options.samples)
    given = list(sys.argv[1:] if argv is None else argv)
    facts = describe(given, "benchmarks.long", load_before)
    unavoidable = 4 * out.numel() * out.element_size()
    lines = [
        "# A long sequence",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        f"elu+1 with RoPE after it, batch 1, {options.heads} heads of width {options.width}, "
        f"{options.length:,} tokens, float32, backend {options.backend}:",
        "",
        "| | |",
        "|---|---|",
        f"| forward | {middle - began:.1f} s |",
        f"| forward and backward | {seconds:.1f} s |",
        f"| peak memory beyond inputs | {extra / 2**30:.2f} GiB (limit {LIMIT / 2**30:.0f}) |",
        f"| of it output and gradients | {unavoidable / 2**30:.2f} GiB |",
        f"| largest relative error of {options.samples} rows | {worst:.1e} (limit 1e-5) |",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    Path(options.out / "long.md").write_text(text, encoding="utf-8")
    if options.length >= 2**20 and (extra > LIMIT or worst > 1e-5):
        raise SystemExit("a limit is missed")


if __name__ == "__main__":
    main()
