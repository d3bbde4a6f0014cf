"""What a GPU computes, against the judge of the tests in float64 on the CPU.

A group is what one process checks: a backend with a dtype. Kernels that read past their memory take
the whole process down, so groups keep each other safe; and compilers, which are what takes the time
here, run side by side.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks._judge import relative_error
from benchmarks._machine import ROOT
from linear_rope import BACKENDS, Config, LanguageModel, Rotary, linear_attention
from linear_rope.causal import around

sys.path.insert(0, str(ROOT / "tests"))
judge = importlib.import_module("judge")

__all__ = ["DTYPES", "Check", "groups", "run_group", "unready"]

DTYPES = ("float32", "bfloat16", "float16")

# Largest error of a result over its largest value; gradients, of which more roundings are a part,
# get three times that. The products of "fla" are in TF32 for float32, and so for float16.
LIMITS = {
    "chunked": {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3},
    "fla": {"float32": 4e-3, "bfloat16": 3e-2, "float16": 5e-3},
}
BACKENDS_HERE = tuple(LIMITS)

# Width and value width of a head: those that are timed, so that kernels are compiled once.
WIDTH, HEADS, BATCH = 64, 4, 2


@dataclass(frozen=True)
class Check:
    """One comparison: errors by the name of what was compared, and the limit of each.

    `note` is what went wrong otherwise, or what was seen where nothing is demanded.
    """

    group: str
    name: str
    errors: dict[str, float]
    limits: dict[str, float]
    note: str = ""
    demanded: bool = True

    @property
    def passed(self) -> bool:
        """Whether all is within its limit; what is not demanded always passes."""
        if not self.demanded:
            return True
        within = all(error <= self.limits[name] for name, error in self.errors.items())
        return within and bool(self.errors)


def unready(device: str) -> dict[str, str]:
    """The backends that cannot run, with the reason."""
    reasons = {}
    for name in BACKENDS_HERE:
        if name not in BACKENDS:
            reasons[name] = "not a backend of this version"
    if "fla" in BACKENDS:
        from linear_rope.causal.fla import why_not

        if device == "cpu" or why_not():
            reasons["fla"] = why_not() or "the device is a CPU"
    return reasons


def groups(device: str) -> list[str]:
    """The names of the groups, those that compile longest first."""
    ready = [name for name in reversed(BACKENDS_HERE) if name not in unready(device)]
    names = [f"{backend} {dtype}" for backend in ready for dtype in DTYPES]
    return [*names, "passes", *(f"waits {backend}" for backend in ready)]


def run_group(name: str, device: str, length: int) -> list[dict[str, Any]]:
    """The checks of one group, as dicts that JSON holds, `passed` among them."""
    kind, _, dtype = name.partition(" ")
    if kind == "passes":
        checks = _passes(name, device)
    elif kind == "waits":
        checks = _waits(name, dtype, device, length)
    else:
        checks = _backend(name, kind, dtype, device, length)
    return [{**asdict(check), "passed": check.passed} for check in checks]


# ---- A backend in a dtype -----------------------------------------------------------------------


def _backend(group: str, backend: str, dtype: str, device: str, length: int) -> Iterator[Check]:
    limit = LIMITS[backend][dtype]
    cases: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(_attention, backend, dtype, device, length, options)
        for name, options in _cases(length).items()
    }
    cases["language model"] = partial(_model, backend, dtype, device, length)
    for name, case in cases.items():
        errors, note = {}, ""
        try:
            errors = case()
        except Exception as error:  # a compiler's or a driver's: any kind
            note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        limits = {what: 3 * limit if what.startswith("d") else limit for what in errors}
        if name == "language model":  # two layers, and what is around attention in them
            limits = {what: 4 * value for what, value in limits.items()}
        yield Check(group, name, errors, limits, note)


def _cases(length: int) -> dict[str, dict[str, Any]]:
    """Options of `linear_attention`, and what the helpers below make of `keys`, `documents`."""
    rotary = Rotary(WIDTH)
    some = Rotary(WIDTH, fraction=0.25)  # most features stay, so that no denominator nears 0
    return {
        "rotation after the map": {"rotary": rotary},
        "halves, a share, relu": {
            "rotary": Rotary(WIDTH, fraction=0.5, pairing="half"),
            "feature_map": "relu",
        },
        "no rotation": {},
        "rotated denominator": {"rotary": some, "denominator": "rotated"},
        "no denominator": {"rotary": rotary, "denominator": "none"},
        "grouped heads": {"rotary": rotary, "keys": 1},
        "decay": {"rotary": rotary, "decay": True},
        "documents": {"rotary": rotary, "documents": (0, 3, length // 2, length - 1, length)},
        "documents, decay": {
            "rotary": rotary,
            "decay": True,
            "documents": (0, length // 3, length),
        },
        "padding": {"rotary": rotary, "padding": length // 4},
        "in parts": {"rotary": rotary, "decay": True, "parts": (0, 1, length // 2, length)},
    }


def _attention(
    backend: str, dtype: str, device: str, length: int, options: dict[str, Any]
) -> dict[str, float]:
    """Errors of the output and of all gradients."""
    options = dict(options)
    keys, limits = options.pop("keys", HEADS), options.pop("documents", None)
    decay, padding = options.pop("decay", False), options.pop("padding", 0)
    parts = options.pop("parts", (0, length))
    draw = torch.Generator().manual_seed(length)
    kind = getattr(torch, dtype)

    def normal(heads: int) -> Tensor:
        return torch.randn(BATCH, length, heads, WIDTH, generator=draw).to(kind).transpose(1, 2)

    q, k, v, d = normal(HEADS), normal(keys), normal(keys), normal(HEADS)
    names = ["out", "dq", "dk", "dv"] + ["dg"] * decay
    g = -0.1 * torch.randn(BATCH, keys, length, generator=draw).square()
    inputs = [q, k, v] + [g] * decay
    mask = None
    if padding:
        mask = torch.ones(BATCH, length, dtype=torch.bool)
        mask[0, :padding] = mask[1, length - padding :] = False
    ours = [x.to(device).requires_grad_() for x in inputs]
    wanted = [x.double().requires_grad_() for x in inputs]

    # ours, with the state handed on between parts
    state, outs = None, []
    ids = None if limits is None else _ids(limits, length).to(device)
    for begin, end in pairwise(parts):
        q, k, v, *decays = (x[:, :, begin:end] for x in ours)
        out, state = linear_attention(
            *(q, k, v),
            log_decay=decays[0] if decays else None,
            key_mask=None if mask is None else mask.to(device),
            segment_ids=ids,
            state=state,
            return_state=True,
            backend=backend,
            **options,
        )
        outs.append(out)
    got = torch.cat(outs, dim=2)
    found = [got, *torch.autograd.grad(got, ours, d.to(device).to(got.dtype))]

    # the judge's, a document at a time
    turn = options.pop("rotary", None)
    if turn is None:
        options["rotate"] = "none"
    else:
        options |= {"fraction": turn.fraction, "pairing": turn.pairing}
    outs, limits = [], limits or (0, length)
    for begin, end in pairwise(limits):
        q, *rest = (x[:, :, begin:end] for x in wanted)
        k, v, *decays = (x.repeat_interleave(HEADS // keys, 1) for x in rest)
        past = decays[0] if decays else None
        outs.append(judge.attention(q, k, v, log_decay=past, key_mask=mask, **options))
    want = torch.cat(outs, dim=2)
    right = [want, *torch.autograd.grad(want, wanted, d.double())]
    return {
        name: relative_error(a.detach().cpu(), b.detach())
        for name, a, b in zip(names, found, right, strict=True)
    }


def _ids(limits: tuple[int, ...], length: int) -> Tensor:
    ends = torch.tensor(limits[1:])
    return torch.searchsorted(ends, torch.arange(length), right=True).expand(BATCH, length)


def _model(backend: str, dtype: str, device: str, length: int) -> dict[str, float]:
    """Logits, the gradient of the loss, and logits in parts; of the same model in float64."""
    config = Config(dim=HEADS * WIDTH, heads=HEADS, layers=2, decay="learned", backend=backend)
    torch.manual_seed(0)
    right = LanguageModel(config).double()
    for block in right.blocks:
        block.attention.backend = "reference"  # type: ignore[union-attr,assignment]
    model = LanguageModel(config).to(device)
    model.load_state_dict({n: x.float() for n, x in right.state_dict().items()})
    model.to(getattr(torch, dtype))
    right.load_state_dict({n: x.double() for n, x in model.state_dict().items()})
    tokens = torch.randint(256, (BATCH, length), generator=torch.Generator().manual_seed(1))
    pull = torch.randn(BATCH, length, 256, generator=torch.Generator().manual_seed(2))
    logits = model(tokens.to(device))
    with torch.no_grad():
        first, state = model(tokens[:, : length // 2].to(device), return_state=True)
        second = model(tokens[:, length // 2 :].to(device), state=state)
    want = right(tokens)
    logits.backward(pull.to(device, logits.dtype))
    want.backward(pull.double())
    errors = {
        "logits": relative_error(logits.detach().cpu(), want.detach()),
        "logits in parts": relative_error(torch.cat([first, second], 1).cpu(), want.detach()),
    }
    worst = [
        relative_error(a.grad.cpu(), b.grad)  # type: ignore[union-attr,arg-type]
        for a, b in zip(model.parameters(), right.parameters(), strict=True)
    ]
    return {**errors, "dparameters": max(worst)}


# ---- The passes around the product --------------------------------------------------------------


def _passes(group: str, device: str) -> Iterator[Check]:
    """Triton's kernels against plain torch in float64 on the CPU, in every dtype."""
    at = torch.arange(100_000, 100_000 + 37)
    for dtype, pairing, phi, width, share in (
        ("float32", "interleaved", "elu+1", 64, 1.0),
        ("float32", "half", "relu", 90, 0.4),
        ("float64", "interleaved", "none", 34, 1.0),
        ("bfloat16", "interleaved", "elu+1", 128, 1.0),
        ("bfloat16", "half", "elu+1", 64, 1.0),
        ("float16", "half", "elu+1", 256, 1.0),
    ):
        kind = getattr(torch, dtype)
        name = f"{dtype}, {phi}, {pairing}, width {width}, share {share}"
        x = (torch.randn(2, 37, 3, width) * 4).to(kind).transpose(1, 2)
        den = torch.rand(2, 37, 3).add(0.5).transpose(1, 2).to(kind)
        d = torch.randn(3, 2, 3, 37, width).to(kind)
        rotary = Rotary(width, fraction=share, pairing=pairing)
        results = []
        for home, to in ((device, kind), ("cpu", torch.float64)):
            y = x.to(home, to, copy=True).requires_grad_()
            by = den.to(home, to, copy=True).requires_grad_()
            work = torch.promote_types(to, torch.float32)
            cos, sin = rotary.tables(at.to(home), work)
            out = around.features(
                y, cos, sin, phi=phi, eps=1e-3, pairing=pairing, dtype=to, both=True
            )
            quotient = around.divide(y, by, signed=False, dtype=to)
            pulls = [z.to(home, to) for z in d]
            grads = torch.autograd.grad([*out, quotient], [y, by], pulls)
            results.append([z.detach().cpu() for z in (*out, quotient, *grads)])
        what = ("phi", "R phi", "quotient", "dx", "dden")
        errors = {n: relative_error(a, b) for n, a, b in zip(what, *results, strict=True)}
        limit = 4 * max(torch.finfo(kind).eps, 1e-6 if dtype == "float32" else 0.0)
        used = "" if around.kernels(x.to(device)) else "plain torch: no kernels on this device"
        yield Check(group, name, errors, dict.fromkeys(errors, limit), used)


# ---- Where the CPU waits for the GPU, and what a CUDA graph takes --------------------------------


def _waits(group: str, backend: str, device: str, length: int) -> Iterator[Check]:
    """Nothing is demanded here: what is seen is listed."""
    config = Config(dim=HEADS * WIDTH, heads=HEADS, layers=1, decay="learned", backend=backend)
    model = LanguageModel(config).to(device)
    tokens = torch.randint(256, (BATCH, length), device=device)
    ids = _ids((0, length // 2, length), length).to(device)

    def step() -> None:
        model(tokens).float().square().mean().backward()

    def packed() -> None:
        model(tokens, segment_ids=ids).float().square().mean().backward()

    @torch.no_grad()
    def forward() -> Tensor:
        return model(tokens)

    for name, call in (("training step", step), ("packed training step", packed)):
        yield Check(group, name, {}, {}, _waiting(call, device), demanded=False)
    yield Check(group, "CUDA graph", {}, {}, _graph(forward, device), demanded=False)


def _waiting(call: Callable[[], Any], device: str) -> str:
    if device == "cpu":
        call()
        return "a CPU waits for nobody"
    call()  # compiles
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    if not lines:
        return "never waits for the GPU"
    return f"waits {len(lines)} times: {', '.join(sorted(set(lines)))}"


def _graph(call: Callable[[], Tensor], device: str) -> str:
    if device == "cpu":
        return "none on a CPU"
    side = torch.cuda.Stream()
    try:
        with torch.cuda.stream(side):
            want = [call() for _ in range(3)][-1].clone()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = call()
        graph.replay()
        torch.cuda.synchronize()
        return f"captured; replay differs by {float((held - want).abs().max()):.1e}"
    except Exception as error:  # a capture fails in as many ways as there are operators
        return f"not captured: {str(error).splitlines()[0]}"
