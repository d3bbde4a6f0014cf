"""Times on a GPU: contestants, how they are timed, and how kernels are compiled beforehand."""

from __future__ import annotations

import gc
import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._gpu_checks import unready
from benchmarks._judge import relative_error, rows_of
from benchmarks._timing import quartiles
from linear_rope import Config, LanguageModel, Rotary, linear_attention
from linear_rope.causal import around

__all__ = [
    "SETTINGS",
    "Sizes",
    "Timed",
    "attention_times",
    "compile_one",
    "contestants",
    "decode_times",
    "few_settings",
    "train_times",
]

SETTINGS = 6  # of each kernel of flash-linear-attention that tunes itself; it has up to 48
ROUNDS = 10
IN_TORCH = ", torch around"  # the same without our Triton kernels: what they are worth
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What is timed. One batch for all: kernels are compiled for a batch, and that takes long."""

    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    batch: int = 4
    heads: int = 16
    width: int = 64
    layers: int = 6  # of the model
    model_length: int = 4096
    contexts: tuple[int, ...] = (1024, 16384)

    @classmethod
    def tiny(cls) -> Sizes:
        """For a dry run on a CPU."""
        return cls((32, 64), 2, 2, 8, 1, 32, (8, 16))


@dataclass(frozen=True)
class Timed:
    """Median and quartiles in milliseconds, peak extra memory in MB; or a note why not.

    `error` of an output, of some rows of a head, against float64.
    """

    job: str
    contestant: str
    dtype: str
    length: int
    milliseconds: float | None = None
    low: float | None = None
    high: float | None = None
    extra_mb: float | None = None
    error: float | None = None
    note: str = ""


# ---- Contestants --------------------------------------------------------------------------------


def contestants(device: str) -> dict[str, tuple[str, Run]]:
    """By name: which job of `_judge.JOBS` is done, of q, k, v (batch, head, time, width); how."""
    absent = unready(device)
    found: dict[str, tuple[str, Run]] = {}
    for backend in ("fla", "chunked"):
        if backend not in absent:
            found[f"ours, {backend}, rotary"] = "rotary", _ours(backend, True)
            found[f"ours, {backend}"] = "attention", _ours(backend, False)
    if "fla" not in absent:
        found[f"ours, fla, rotary{IN_TORCH}"] = "rotary", _ours("fla", True)
        found["fla's chunk_linear_attn"] = "attention", _fla_normalized
        found["fla's bare product"] = "product", _fla_product
    found["softmax, rotary"] = "softmax-rotary", _softmax(True)
    found["softmax"] = "softmax", _softmax(False)
    return found


def _ours(backend: str, turned: bool) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rotary = Rotary(q.shape[-1]) if turned else None
        return linear_attention(q, k, v, rotary=rotary, backend=backend)  # type: ignore[no-any-return]

    return run


def _fla_normalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.linear_attn import chunk_linear_attn

    q, k = F.elu(q) + 1, F.elu(k) + 1
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    return chunk_linear_attn(*rows, scale=1.0)[0].transpose(1, 2)  # type: ignore[no-any-return]


def _fla_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    rows = [x.transpose(1, 2) for x in (q, k, v)]
    return chunk_simple_gla(*rows, scale=1.0)[0].transpose(1, 2)  # type: ignore[no-any-return]


def _softmax(turned: bool) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if turned:
            at = torch.arange(q.shape[2], device=q.device)
            rotary = Rotary(q.shape[-1])
            q, k = rotary(q, at), rotary(k, at)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


# ---- Timing -------------------------------------------------------------------------------------


def attention_times(
    device: str, dtype: str, length: int, sizes: Sizes, allowed: Callable[[str, float], bool]
) -> Iterator[Timed]:
    """All contestants at one length, forward and with gradients, beside the bandwidth floor.

    Args:
        allowed: whether there is time left for what is named, which takes about so many seconds.
    """
    q, k, v, d = _inputs(device, dtype, length, sizes)
    found = contestants(device)
    rows = torch.randint(length, (8,), generator=torch.Generator().manual_seed(length))
    one, keys, values = (x[0, 0].double().cpu() for x in (q, k, v))

    def error(name: str, result: Any) -> float | None:
        if name not in found:
            return None
        want = rows_of(found[name][0], one, keys, values, rows)
        return relative_error(result[0][0, 0].cpu()[rows], want)

    for backward in (False, True):
        job = "forward + backward" if backward else "forward"
        # The least that must pass through memory: q, k, v in, out; then those and the gradients.
        copies = 6 if backward else 2
        calls: dict[str, Callable[[], Any]] = {"copy of the same bytes": _copies(q, copies)}
        for name, (_, run) in found.items():
            call = _call(run, (q, k, v), d, backward)
            calls[name] = _without_kernels(call) if name.endswith(IN_TORCH) else call
        judged = None if backward else error
        yield from _timed(job, calls, dtype, length, device, allowed, judged)


def _inputs(device: str, dtype: str, length: int, sizes: Sizes) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output: as a projection gives them, heads inside time."""
    shape, kind = (sizes.batch, length, sizes.heads, sizes.width), getattr(torch, dtype)
    return tuple(torch.randn(shape, device=device).to(kind).transpose(1, 2) for _ in range(4))


def _copies(x: Tensor, count: int) -> Callable[[], None]:
    y = torch.empty_like(x)

    def call() -> None:
        for _ in range(count):
            y.copy_(x)

    return call


def _call(
    run: Run, inputs: tuple[Tensor, ...], d: Tensor, backward: bool
) -> Callable[[], list[Tensor]]:
    def call() -> list[Tensor]:
        if not backward:
            with torch.no_grad():
                return [run(*inputs)]  # type: ignore[arg-type]
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = run(*leaves)  # type: ignore[arg-type]
        return list(torch.autograd.grad(out, leaves, d.to(out.dtype)))

    return call


def _without_kernels(call: Callable[[], Any]) -> Callable[[], Any]:
    def plainly() -> Any:
        kernels, around.kernels = around.kernels, lambda x: None
        try:
            return call()
        finally:
            around.kernels = kernels

    return plainly


def _timed(
    job: str,
    calls: Mapping[str, Callable[[], Any]],
    dtype: str,
    length: int,
    device: str,
    allowed: Callable[[str, float], bool],
    error: Callable[[str, Any], float | None] | None = None,
) -> Iterator[Timed]:
    """Warm each up, then rounds in a random order; the slow take part in fewer rounds."""
    warm, memory, notes, errors = {}, {}, {}, {}
    for name, call in calls.items():
        title = f"{job}, {name}, {dtype}, length {length}"
        if not allowed(title, 5.0):
            notes[name] = "skipped: no time left"
            continue
        try:
            result = call()  # compiles and tunes
            errors[name] = None if error is None else error(name, result)
            del result
            memory[name] = _peak(call, device)
            warm[name] = min(_once(call, device) for _ in range(2))
        except Exception as error:  # out of memory, or whatever a kernel does
            notes[name] = f"{type(error).__name__}: {(str(error) or '-').splitlines()[0][:120]}"
            gc.collect()
    times: dict[str, list[float]] = {name: [] for name in warm}
    order = random.Random(length)
    for _ in range(ROUNDS):
        names = [n for n in times if len(times[n]) < 3 or sum(times[n]) < 1.0]
        order.shuffle(names)
        for name in names:
            if len(times[name]) < 1 or allowed("", warm[name]):
                times[name].append(_once(calls[name], device))
    for name in calls:
        if name in notes:
            yield Timed(job, name, dtype, length, note=notes[name])
        else:
            low, middle, high = (1e3 * x for x in quartiles(times[name]))
            yield Timed(job, name, dtype, length, middle, low, high, memory[name], errors[name])


def _once(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call, on the GPU's own clock; results are freed afterwards."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    result = call()
    end.record()
    torch.cuda.synchronize()
    del result
    return float(start.elapsed_time(end)) / 1e3


def _peak(call: Callable[[], Any], device: str) -> float | None:
    """Megabytes of the GPU's memory that a call takes at its peak, its results included."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 1e6


# ---- A model ------------------------------------------------------------------------------------


def _models(device: str, sizes: Sizes) -> dict[str, LanguageModel]:
    shape: dict[str, Any] = {
        "dim": sizes.heads * sizes.width,
        "heads": sizes.heads,
        "layers": sizes.layers,
    }
    ready = [name for name in ("fla", "chunked") if name not in unready(device)]
    models = {f"ours, {b}": LanguageModel(Config(**shape, backend=b)).to(device) for b in ready}
    models["softmax"] = LanguageModel(Config(**shape, attention="softmax")).to(device)
    return models


def train_times(
    device: str, sizes: Sizes, allowed: Callable[[str, float], bool]
) -> Iterator[Timed]:
    """A step of training under autocast to bfloat16: forward, loss, backward, AdamW."""
    tokens = torch.randint(256, (sizes.batch, sizes.model_length + 1), device=device)
    calls = {}
    for name, model in _models(device, sizes).items():
        optimizer = torch.optim.AdamW(model.parameters(), fused=device != "cpu")

        def step(model: LanguageModel = model, optimizer: Any = optimizer) -> None:
            with torch.autocast(device, torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        calls[name] = step
    yield from _timed(
        f"training step of {sizes.batch * sizes.model_length} tokens",
        calls,
        "autocast",
        sizes.model_length,
        device,
        allowed,
    )


def decode_times(
    device: str, sizes: Sizes, allowed: Callable[[str, float], bool]
) -> Iterator[Timed]:
    """One token of one row, behind contexts of some lengths."""
    models = {n: m for n, m in _models(device, sizes).items() if n != "ours, fla"}
    for context in sizes.contexts:
        calls = {}
        for name, model in models.items():
            model.eval()
            prompt = torch.randint(256, (1, context), device=device)
            _, state = model.prefill(prompt)

            def step(model: LanguageModel = model, state: Any = state) -> Tensor:
                return model.decode(torch.zeros(1, dtype=torch.int64, device=device), state)[0]

            calls[name] = step
        yield from _timed("one token", calls, "float32", context, device, allowed)


# ---- Compiling beforehand -----------------------------------------------------------------------


def compile_one(number: int, device: str, sizes: Sizes) -> None:
    """Compile setting `number` of each kernel that is timed, for the cache on disk.

    flash-linear-attention's kernels try up to 48 settings at their first call, one after another,
    some seconds each. Processes that compile one each do it side by side.
    """
    with few_settings(device, only=number):
        q, k, v, d = _inputs(device, "bfloat16", 256, sizes)
        for _, run in contestants(device).values():
            _call(run, (q, k, v), d, True)()


@contextmanager
def few_settings(device: str, only: int | None = None) -> Iterator[None]:
    """Leaves fla's kernels `SETTINGS` of the settings that they choose among, or one of those."""
    kept = [] if "fla" in unready(device) else [(kernel, kernel.configs) for kernel in _tuned()]
    for kernel, settings in kept:
        step = max(1, len(settings) // SETTINGS)
        some = settings[step // 2 :: step][:SETTINGS]
        kernel.configs = some if only is None else [some[only % len(some)]]
    try:
        yield
    finally:
        for kernel, settings in kept:
            kernel.configs = settings


def _tuned() -> list[Any]:
    """The kernels in fla's modules that tune themselves, under whatever decorators."""
    for name in ("fla.ops.simple_gla", "fla.ops.linear_attn"):
        importlib.import_module(name)
    found: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for value in list(vars(module).values()):
            while type(value).__module__.partition(".")[0] in ("triton", "fla"):
                if isinstance(getattr(value, "configs", None), list):
                    found[id(value)] = value
                value = getattr(value, "fn", None)
    return list(found.values())
