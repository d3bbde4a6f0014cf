"""The README's table of what works where: every cell of it is run.

"yes" equals the sums written out below, over all pairs of tokens in float64; "no" is a ValueError
with a reason that the row gives; "—" is allowed where there is nothing to run.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import judge
import pytest
import torch
from forms import BACKENDS
from torch import Tensor
from written_out import written_out as all_written_out

from linear_rope import (
    FEATURE_MAPS,
    SCALINGS,
    Config,
    Encoder,
    LanguageModel,
    LearnedRotary,
    Permute,
    RotaryLinearAttention,
    XPos,
    checks,
    grid_positions,
)

DIM, HEADS, TIME = 16, 4, 12
# The chunkwise form has several backends: all that can run here.
FORMS = {"reference": ("reference",), "recurrent": ("recurrent",)}
FORMS["chunked"] = tuple(name for name in BACKENDS if name not in FORMS)
DOCUMENTS = ((4, 1, 7), (7, 4, 1))
# Each call goes on within a document: at a boundary there is nothing to go on from.
SPLIT = (2, 1, 5, 4)
MASK = torch.ones(2, TIME, dtype=torch.bool)
MASK[0, :3] = MASK[1, 5:8] = MASK[1, 11:] = False  # left, middle, right
GRID = grid_positions(3, 4)
IDS = torch.stack([torch.arange(TIME) * 3, torch.arange(TIME) // 2 + 5])


@dataclass
class Layer:
    """A row of the table: the options of layers, and what they are called with."""

    options: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    mask: Tensor | None = None
    first: int | Tensor | None = None
    ids: Tensor | None = None
    layout: str = ""
    context: bool = False

    def __call__(self, column: str) -> None:
        for options in self.options:
            for backend in FORMS.get(column, ("auto",)):
                self.run(column, backend, options)

    def run(self, column: str, backend: str, options: dict[str, Any]) -> None:
        causal = column != "non-causal" and not (self.context and column not in FORMS)
        layer = build(causal=causal, backend=backend, **options)
        layout = self.layout or ("segment_ids" if column == "packed" else "")
        batch = 1 if layout == "cu_seqlens" else 2
        x = torch.randn(batch, TIME, DIM, dtype=torch.float64)
        # Documents of padding alone are fine, torn ones are not: no mask in a flat row.
        mask = None if layout == "cu_seqlens" else self.mask
        lengths = DOCUMENTS if layout else ((TIME,), (TIME,))
        documents = torch.stack(
            [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
        )[:batch]
        rows: dict[str, Any] = {"key_mask": mask}
        if layout == "segment_ids":
            rows["segment_ids"] = documents
        elif layout == "cu_seqlens":
            rows["cu_seqlens"] = torch.tensor([0, *lengths[0]]).cumsum(0)
        if self.context:
            self.cross(layer, x, column, rows)
            return
        given = self.first if self.ids is None else self.ids
        at = self.ids
        if at is not None and at is not GRID:
            at = at.expand(batch, TIME)
        if at is None:
            start = torch.as_tensor(0 if self.first is None else self.first).expand(batch, 1)
            at = count(mask, documents, start[:, 0].tolist())
        want = written_out(layer, x, x, at, at, mask, mask, documents)
        if column != "with a state":
            got = layer(x, positions=given, **rows)
        else:
            got = in_calls(layer, x, given, rows)
        real = torch.ones(batch, TIME, dtype=torch.bool) if mask is None else mask
        assert judge.error(got[real], want[real]) <= 1e-10

    def cross(self, layer: Any, x: Tensor, column: str, rows: dict[str, Any]) -> None:
        context = torch.randn(2, 7, DIM, dtype=torch.float64)
        query_mask, key_mask = MASK, torch.arange(7) < torch.tensor([[7], [4]])
        masks: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask}
        if column == "with a state":
            layer(x, context, return_state=True, **masks)
        got = layer(x, context, **{**rows, **masks})
        at_q = count(query_mask, torch.zeros(2, TIME, dtype=torch.int64), [0, 0])
        at_k = count(key_mask, torch.zeros(2, 7, dtype=torch.int64), [0, 0])
        want = written_out(layer, x, context, at_q, at_k, query_mask, key_mask, None)
        assert judge.error(got[query_mask], want[query_mask]) <= 1e-10


@dataclass
class Mixed:
    """A row of a layer that looks back by more than attention: each document's real tokens alone
    are what they are in the row."""

    options: list[dict[str, Any]]

    def __call__(self, column: str) -> None:
        lengths = DOCUMENTS if column == "packed" else ((TIME,), (TIME,))
        documents = torch.stack(
            [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
        )
        rows: dict[str, Any] = {"key_mask": MASK}
        if column == "packed":
            rows["segment_ids"] = documents
        for options in self.options:
            for backend in FORMS.get(column, ("auto",)):
                layer = build(causal=column != "non-causal", backend=backend, **options)
                layer.pairing_by_hand = options.get("pairing", "interleaved")
                assert layer.local is None or layer.local.window == options["window"]
                x = torch.randn(2, TIME, DIM, dtype=torch.float64)
                call = partial(in_calls, given=None, rows=rows)
                got = call(layer, x) if column == "with a state" else layer(x, **rows)
                for row in range(2):
                    for document in documents[row].unique():
                        real = (documents[row] == document) & MASK[row]
                        if real.any():
                            want = all_written_out(layer, x[row, real][None])
                            assert judge.error(got[row, real][None], want) <= 1e-10


def build(**options: Any) -> Any:
    if str(options.get("feature_map")).startswith("favor"):
        options["features"] = 8
    layer = RotaryLinearAttention(**{"dim": DIM, "heads": HEADS, **options}).double()
    with torch.no_grad():
        for module in (layer.feature_map, layer.shift, layer.convolution, layer.rotary):
            if isinstance(module, LearnedRotary):
                module.log_frequencies.add_(0.1)
            elif isinstance(module, torch.nn.Module):
                for p in module.parameters():  # no identity any more
                    p.add_(0.3 * torch.randn_like(p))
    return layer


def in_calls(layer: Any, x: Tensor, given: Any, rows: dict[str, Any]) -> Tensor:
    """The layer's output in several calls, each with the state of the one before."""
    state, parts, begin = None, [], 0
    for size in SPLIT:
        part = slice(begin, begin + size)
        more = {
            name: value[..., part] if value is not None and name != "cu_seqlens" else value
            for name, value in rows.items()
        }
        if "cu_seqlens" in rows:  # of the documents that this call has tokens of
            limits = rows["cu_seqlens"].clamp(part.start, part.stop) - part.start
            more["cu_seqlens"] = limits.unique()
        if given is GRID:
            at = given[part]
        elif isinstance(given, Tensor) and given.shape[-1] == TIME:
            at = given[..., part]
        else:
            at = None if begin else given  # the state knows
        out, state = layer(x[:, part], positions=at, state=state, return_state=True, **more)
        parts.append(out)
        begin += size
    return torch.cat(parts, 1)


def count(mask: Tensor | None, documents: Tensor, starts: list[int]) -> Tensor:
    """The position of every token: real ones count, a row's first document from its start."""
    at = torch.zeros_like(documents)
    for row in range(documents.shape[0]):
        following = starts[row]
        for t in range(documents.shape[1]):
            if t and documents[row, t] != documents[row, t - 1]:
                following = 0
            if mask is None or mask[row, t]:
                at[row, t] = following
                following += 1
    return at


def written_out(
    layer: Any,
    x: Tensor,
    context: Tensor,
    at_q: Tensor,
    at_k: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    documents: Tensor | None,
) -> Tensor:
    """The layer by sums over all pairs of tokens; only its projections, map and angles are used."""

    def heads(projection: Any, source: Tensor, number: int) -> Tensor:
        return torch.stack(projection(source).chunk(number, dim=-1), dim=1)

    def normed(y: Tensor, norm: Any) -> Tensor:
        if norm is None:
            return y
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    groups = layer.heads // layer.kv_heads
    q = normed(heads(layer.query, x, layer.heads), layer.query_norm)
    k = normed(heads(layer.key, context, layer.kv_heads), layer.key_norm)
    v = heads(layer.value, context, layer.kv_heads).repeat_interleave(groups, 1)
    turn = layer.rotary if layer.rotary is not None else (lambda y, at: y)
    if layer.rotate == "before":
        q, k = turn(q, at_q), turn(k, at_k)
    q, k = layer.feature_map(q), layer.feature_map(k)
    above = (q, k) if layer.rotate != "after" else (turn(q, at_q), turn(k, at_k))
    below = above if layer.denominator == "rotated" else (q, k)
    # weight[m, n] = sum_f left[m, n, f] a_mf b_nf
    left = torch.ones(x.shape[0], 1, x.shape[1], context.shape[1], 1, dtype=torch.float64)
    if layer.causal:
        left = left * torch.ones(left.shape[2:4]).tril()[..., None]
    if key_mask is not None:
        left = left * key_mask[:, None, None, :, None]
    if documents is not None:
        left = left * (documents[:, :, None] == documents[:, None, :])[:, None, ..., None]
    if layer.gate is not None:
        decay = layer.gate(x)
        if key_mask is not None:
            decay = decay.masked_fill(~key_mask[:, None], 0.0)
        left = left * judge.left_over(decay, q)[..., 1:].repeat_interleave(groups, 1)[..., None]
    if isinstance(layer.rotary, XPos):
        apart = (at_q[:, None, :, None] - at_k[:, None, None, :]).clamp(min=0)
        left = left * (apart[..., None] * layer.rotary.log_fade()).exp()
    if isinstance(layer.rotary, Permute) and layer.causal:
        apart = (at_q[:, None, :, None] - at_k[:, None, None, :]).clamp(min=0)
        ratios = torch.arange(layer.kv_heads, dtype=torch.float64) * 3 / layer.kv_heads + 2
        left = (
            left
            * ratios.sigmoid().repeat_interleave(groups)[:, None, None, None] ** apart[..., None]
        )

    def weights(a: Tensor, b: Tensor) -> Tensor:
        b = b.repeat_interleave(groups, 1)
        return (left * a[:, :, :, None] * b[:, :, None]).sum(-1)

    out = weights(*above) @ v
    if layer.denominator != "none":
        out = out / weights(*below).sum(-1, keepdim=True)
    if layer.output_norm:
        out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    merged = torch.cat(list(out.unbind(1)), -1)
    if layer.output_gate is not None:
        gate = x @ layer.output_gate.weight.T
        merged = merged * gate * gate.sigmoid()
    return layer.out(merged)


def several(*layers: Layer) -> Callable[[str], None]:
    def run(column: str) -> None:
        for layer in layers:
            layer(column)

    return run


def each(call: Callable[[str, str], None]) -> Callable[[str], None]:
    """Once for each backend of the column's form."""

    def run(column: str) -> None:
        for backend in FORMS.get(column, ("auto",)):
            call(column, backend)

    return run


# ---- Rows that are more than a layer -------------------------------------------------------------


def states(column: str, backend: str) -> None:
    """Any split, and what can be done to a state on the way."""
    layer = build(causal=column != "non-causal", backend=backend)
    x, ids = torch.randn(2, TIME, DIM, dtype=torch.float64), None
    if column == "packed":
        ids = torch.tensor([0] * 3 + [1] * 9)
    whole = layer(x, segment_ids=ids)
    for split in ((TIME,), (5, 7), (1,) * TIME, (4, 1, 1, 6)):
        state, parts, begin = None, [], 0
        for size in split:
            part = slice(begin, begin + size)
            # Where a call begins with a document of its own, there is no past.
            state = None if ids is not None and begin == 3 else state
            out, state = layer(
                x[:, part],
                segment_ids=None if ids is None else ids[part],
                state=state,
                return_state=True,
            )
            parts.append(out)
            file = io.BytesIO()
            torch.save(state.detach().clone().to("cpu"), file)
            file.seek(0)
            state = torch.load(file).index_select(torch.tensor([1, 0, 1]))
            state = state.index_select(torch.tensor([1, 0]))
            begin += size
        assert judge.error(torch.cat(parts, 1), whole) <= 1e-12


def generation(column: str, backend: str) -> None:
    if column == "non-causal":
        assert not hasattr(Encoder, "generate") and not hasattr(Encoder, "prefill")
        return
    config = Config(vocab_size=11, dim=DIM, layers=2, heads=HEADS)
    model = LanguageModel(config).double().eval()
    for block in model.blocks:
        block.attention.backend = backend
    prompts = torch.randint(11, (2, TIME))
    rows = [prompts[row][MASK[row]] for row in range(2)]
    if column == "packed":
        lengths = torch.tensor([len(row) for row in rows])
        limits = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        logits, state = model.prefill(torch.cat(rows)[None], cu_seqlens=limits)
    else:
        logits, state = model.prefill(prompts, key_mask=MASK)
    new = []
    for _ in range(4):
        new.append(logits.argmax(-1))
        logits, state = model.decode(new[-1], state)
    for row, tokens in enumerate(rows):
        for step in new:  # greedy decoding by full recomputation
            want = model(tokens[None])[0, -1].argmax()
            assert step[row] == want
            tokens = torch.cat([tokens, want[None]])
    if column != "packed":
        got = model.generate(prompts, 4, key_mask=MASK, temperature=0)[:, TIME:]
        assert torch.equal(got, torch.stack(new, 1))


def run_check(name: str, column: str, backend: str) -> None:
    causal = column != "non-causal"
    layer = RotaryLinearAttention(8, 2, causal=causal, backend=backend)
    report = {r.name: r for r in checks.check_all(layer, causal=causal, skip=others(name))}[name]
    if not causal and name in ("causal", "streaming"):
        assert report.skipped == "the module is not causal"
        return
    assert report.passed, str(report)
    if column == "with a state":
        assert "splits" in report.tried or "new ones" in report.tried
    if column == "packed":  # padding among documents is the business of check_packing
        packing = checks.check_packing(layer)
        assert packing.passed and "segment_ids with padding" in packing.tried


def others(name: str) -> list[str]:
    return [check for check in checks.CHECKS if check != name]


EXPANDED = {"feature_map": "relu-expand", "denominator": "rotated"}
RULES = {
    "linear": "linear:factor=4",
    "ntk": "ntk:factor=4",
    "dynamic": "dynamic:factor=2,original_length=4",
    "ntk-by-parts": "ntk-by-parts:factor=4,original_length=16",
    "yarn": "yarn:factor=4,original_length=16",
    "llama3": "llama3:factor=8,original_length=16",
    "learned": "learned",
    "xpos": "xpos:scale_base=3",
}
WIDTHS: list[dict[str, Any]] = [
    {"head_dim": 1, "value_dim": 3, "feature_map": "hedgehog"},
    {"head_dim": 1, "value_dim": 2, "rotate": "none"},
    {"head_dim": 3, "value_dim": 1, "feature_map": "dpfp"},
    {"head_dim": 40, "value_dim": 7},
    {"head_dim": 256, "value_dim": 5, "heads": 1},
]

# Rotated before an elementwise map, positions themselves count and not their distances alone.
BOTH: list[dict[str, Any]] = [{}, {"rotate": "before"}]
ROWS: dict[str, Callable[[str], None]] = {
    "default": Layer(BOTH),
    "positions=7": several(Layer(BOTH, first=7), Layer(BOTH, first=torch.tensor([[3], [10**6]]))),
    "positions=ids": several(Layer(BOTH, ids=IDS), Layer(BOTH, ids=IDS[0])),
    "key_mask": Layer(BOTH, mask=MASK),
    "segment_ids": Layer(BOTH, layout="segment_ids", mask=MASK),
    "cu_seqlens": Layer(BOTH, layout="cu_seqlens"),
    "return_state": each(states),
    "generate": each(generation),
    "context": Layer(BOTH, context=True),
    "kv_heads": Layer([{"kv_heads": 2}, {"kv_heads": 1}]),
    "head_dim": Layer(WIDTHS),
    "qk_norm": Layer([{"qk_norm": True}]),
    "output_norm": Layer([{"output_norm": True}]),
    "output_gate": Layer([{"output_gate": True}], mask=MASK),
    "decay": Layer([{"decay": "learned"}], mask=MASK),
    "short_conv": Mixed([{"short_conv": 3}, {"short_conv": 4, "kv_heads": 2}]),
    "token_shift": Mixed([{"token_shift": True}]),
    "local_heads": Mixed(
        [{"local_heads": 1, "window": 3}, {"local_heads": 2, "kv_heads": 2, "window": 1}]
    ),
    "denominator": Layer([{"denominator": name} for name in ("unrotated", "rotated", "none")]),
    "rotate": Layer([{"rotate": name} for name in ("after", "before", "none")]),
    "rotary_fraction": Layer([{"rotary_fraction": 0.5}]),
    "pairing": Layer([{"pairing": "half"}]),
    **{name: Layer([{"rotary_scaling": text}]) for name, text in RULES.items()},
    "axial": Layer([{"rotary_scaling": "axial"}], ids=GRID),
    "cosformer": Layer([{"rotary_scaling": "cosformer:max_length=20", **EXPANDED}]),
    "permute": Layer(
        [
            {"rotary_scaling": "permute", "denominator": "rotated"},
            {"rotary_scaling": "permute:seed=1", "feature_map": "relu", "kv_heads": 2},
        ],
        mask=MASK,
    ),
    "selective": Mixed(
        [
            {"rotary_scaling": "selective"},
            {"rotary_scaling": "selective:gate=pair,bias=1,rank=0", "pairing": "half"},
            {"rotary_scaling": "selective:gate=head", "rotate": "before", "kv_heads": 2},
        ]
    ),
    **{name: Layer([{"feature_map": name}], mask=MASK) for name in FEATURE_MAPS},
    **{f"check_{name}": each(partial(run_check, name)) for name in checks.CHECKS},
}
COLUMNS = ("reference", "chunked", "recurrent", "non-causal", "with a state", "packed")


def table() -> dict[str, tuple[dict[str, str], list[str]]]:
    """Name -> (column -> verdict, reasons)."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- positions:begin -->\n(.*?)<!-- positions:end -->", text, re.DOTALL)
    assert found
    head, _, *lines = ([c.strip() for c in line.split("|")[1:-1]] for line in found[1].splitlines())
    assert tuple(head[2:8]) == COLUMNS and head[8] == "Refused, since"
    return {
        line[0].strip("`"): (
            dict(zip(COLUMNS, line[2:8], strict=True)),
            [reason.strip() for reason in line[8].split(";") if reason.strip()],
        )
        for line in lines
    }


TABLE = table()


def test_the_table_has_every_row_and_no_other() -> None:
    assert list(TABLE) == list(ROWS)
    assert set(FORMS) < set(COLUMNS) and set(SCALINGS) < set(ROWS)
    for name, (verdicts, reasons) in TABLE.items():
        assert set(verdicts.values()) <= {"yes", "no", "—"}, name
        assert ("no" in verdicts.values()) == bool(reasons), name
        if "—" in verdicts.values():
            assert name == "generate" or name.startswith("check_")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", ROWS)
def test_cell(name: str, column: str) -> None:
    verdicts, reasons = TABLE[name]
    if verdicts[column] != "no":
        if verdicts[column] == "yes" or column == "non-causal":
            ROWS[name](column)
        return
    with pytest.raises(ValueError) as caught:
        ROWS[name](column)
    assert any(reason in str(caught.value) for reason in reasons), str(caught.value)


@pytest.mark.parametrize("name", [name for name, (_, reasons) in TABLE.items() if reasons])
def test_every_reason_is_given_somewhere(name: str) -> None:
    verdicts, reasons = TABLE[name]
    said = ""
    for column in COLUMNS:
        if verdicts[column] == "no":
            with pytest.raises(ValueError) as caught:
                ROWS[name](column)
            said += str(caught.value)
    assert all(reason in said for reason in reasons)
