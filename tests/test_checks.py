"""The checks pass what is right, find each planted fault, and skip what they cannot know."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linear_rope
from linear_rope import (
    FEATURE_MAPS,
    Config,
    Encoder,
    LanguageModel,
    RotaryLinearAttention,
    SoftmaxAttention,
)
from linear_rope.checks import (
    CHECKS,
    Report,
    Reports,
    check_all,
    check_causal,
    check_gradients,
    check_packing,
    check_padding,
    check_precision,
    check_relative,
    check_streaming,
)
from linear_rope.checks.__main__ import main

DIM, HEADS = 8, 2
WIDTH = DIM // HEADS


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sizes here are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rope(x: Tensor, positions: Tensor, pairing: str = "interleaved") -> Tensor:
    """x (batch, head, time, width) as a user would turn it, in x's dtype or float32."""
    theta = 100.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angle = positions[:, None, :, None].float() * theta
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if pairing == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


class WrongExp(torch.autograd.Function):
    """exp whose gradient is 1 % off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 1.01 * grads[0] * ctx.saved_tensors[0]


class UserAttention(nn.Module):
    """A user's layer: torch's softmax attention with RoPE, or linear attention; one fault a name.

    The cache holds everything (past keys are cheap here), so that each form is as plain as it gets.
    """

    def __init__(self, kind: str = "softmax", fault: str = "") -> None:
        super().__init__()
        self.kind, self.fault = kind, fault
        generator = torch.Generator().manual_seed(1)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        with torch.no_grad():
            for layer in (self.qkv, self.out):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / DIM**0.5)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Any:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        real = torch.ones(batch, time, dtype=torch.bool, device=x.device)
        ignored = self.fault == "padding ignored" or (
            (self.fault == "padding ignored in later calls" and state is not None)
            or (self.fault == "padding ignored among documents" and segment_ids is not None)
        )
        if key_mask is not None and not ignored:
            real = key_mask
        segments = torch.zeros(batch, time, dtype=torch.int64, device=x.device)
        if segment_ids is not None and self.fault != "packing ignored":
            segments = segment_ids
        start = torch.zeros(batch, 1, dtype=torch.int64, device=x.device)
        if state is not None:
            segments = segments + state["segments"][:, -1:]
            start = state["next"]
            if self.fault == "offset one too large":
                start = start + 1
        at = start + real.long().cumsum(-1) - 1 if positions is None else positions
        after = start + real.sum(-1, keepdim=True)
        # Linear attention maps first, and rotates above the line only.
        plain_q, plain_k = q, k = self.features(q, k)
        q = rope(q, at)
        k = rope(k, at, "half" if self.fault == "mismatched pairing" else "interleaved")
        if self.fault == "rotated value":
            v = rope(v, at)
        past = 0
        if state is not None:
            past = state["k"].shape[2]
            k, v = torch.cat([state["k"], k], 2), torch.cat([state["v"], v], 2)
            plain_k = torch.cat([state["plain_k"], plain_k], 2)
            real = torch.cat([state["real"], real], 1)
            segments_k = torch.cat([state["segments"], segments], 1)
        else:
            segments_k = segments
        order = torch.ones(time, k.shape[2], dtype=torch.bool, device=x.device).tril(past)
        if self.fault == "sees the next token":
            order = order.tril(past + 1) | order.triu(past).roll(1, -1)
        allowed = order & real[:, None, None, :]
        allowed = allowed & (segments[:, None, :, None] == segments_k[:, None, None, :])
        if self.kind == "linear":
            weights = (q @ k.mT) * allowed
            below = (plain_q @ plain_k.mT) * allowed
            if self.fault == "denominator not in state":
                below = below[..., past:]
            heads = weights @ v / below.sum(-1, keepdim=True).clamp(min=1e-9)
        elif self.fault.startswith("exp"):
            heads = self.exponential(q, k, v, allowed)
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        y = self.out(heads.transpose(1, 2).reshape(batch, time, DIM))
        if self.fault == "rows see each other":
            y = y + 1e-3 * y.mean(0, keepdim=True)
        if not return_state:
            return y
        kept = {"k": k, "plain_k": plain_k, "v": v, "real": real}
        return y, {**kept, "segments": segments_k, "next": after}

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "softmax":
            return q, k
        if self.fault == "key maximum":  # performer's: over all keys, heads and rows, with an eps
            return (
                (q - q.detach().amax(-1, keepdim=True)).exp() + 1e-4,
                (k - k.detach().amax()).exp() + 1e-4,
            )
        return F.elu(q) + 1, F.elu(k) + 1

    def exponential(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        """Softmax by hand, where a fault needs it."""
        scores = q @ k.mT * (0.1 / WIDTH**0.5)
        if self.fault == "exp wrong gradient":
            scores = scores.masked_fill(~allowed, -1e4)
            weights = WrongExp.apply(scores - scores.detach().amax(-1, keepdim=True))
        else:
            weights = scores.exp()  # nothing subtracted
        weights = weights * allowed
        return weights @ v / weights.sum(-1, keepdim=True)


def failing(reports: Reports) -> set[str]:
    return {report.name for report in reports if report.failed}


# --- what is right passes -------------------------------------------------------------------------

SCALINGS = {
    "yarn": "yarn:factor=4,original_length=16",
    "llama3": "llama3:factor=8,original_length=16",
    "learned": "learned",
    "xpos": "xpos",
    "xpos, fast": "xpos:scale_base=4",
}


def layer(**options: Any) -> RotaryLinearAttention:
    if str(options.get("feature_map")).startswith("favor"):
        options["features"] = 6
    # Four features of relu can all be near 0, where half precision is far off.
    dim = 16 if "relu" in str(options.get("feature_map")) else 8
    return RotaryLinearAttention(**{"dim": dim, "heads": 2, **options})


OURS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(layer, feature_map=name) for name in FEATURE_MAPS},
    **{name: partial(layer, rotary_scaling=text) for name, text in SCALINGS.items()},
    "decay": partial(layer, decay="learned", pairing="half"),
    "decay, favor+": partial(layer, decay="learned", feature_map="favor+"),
    "partial": partial(layer, rotary_fraction=0.5),
    "grouped": partial(layer, dim=16, heads=4, kv_heads=2, value_dim=3, output_norm=True),
    "grouped, hedgehog": partial(layer, dim=16, heads=4, kv_heads=2, feature_map="hedgehog"),
    "one key head, normed": partial(layer, kv_heads=1, qk_norm=True, denominator="none"),
    "softmax": lambda: SoftmaxAttention(8, 2, kv_heads=1),
    "softmax, yarn": lambda: SoftmaxAttention(8, 2, rotary_scaling=SCALINGS["yarn"]),
    "language model": lambda: LanguageModel(Config(vocab_size=7, dim=8, layers=2, heads=2)),
}


@pytest.mark.parametrize("name", OURS)
def test_our_layers_pass_everything(name: str) -> None:
    torch.manual_seed(0)
    reports = check_all(OURS[name]())
    assert [r.name for r in reports if r.passed] == list(CHECKS), f"\n{reports}"
    for report in reports:
        if report.name not in ("precision", "gradients"):
            assert report.error is not None and report.error < 1e-10, str(report)


def test_positions_that_end_are_checked_up_to_there() -> None:
    torch.manual_seed(0)
    expanded = {"feature_map": "relu-expand", "denominator": "rotated"}
    cosformer = layer(rotary_scaling="cosformer:max_length=64", **expanded)
    reports = check_all(cosformer, max_length=64)
    assert [r.name for r in reports if r.passed] == list(CHECKS), f"\n{reports}"
    tried = {r.name: r.tried for r in reports}
    assert tried["relative"] == "positions shifted by 1, 7"  # and not by 100
    assert (
        check_relative(cosformer, max_length=15).skipped
        == ("max_length=15 leaves no room for a shift")
        or check_relative(cosformer, max_length=15).passed
    )
    failed = check_precision(cosformer)
    assert failed.failed and "position 2011 is beyond max_length=64" in failed.where
    sizes: dict[str, Any] = {"vocab_size": 7, "dim": 8, "layers": 1, "heads": 2, "max_length": 20}
    for options in ({"position": "learned"}, {"position": "cosformer", **expanded}):
        model = LanguageModel(Config(**sizes, **options))
        reports = check_all(model, max_length=20, skip=["relative"])
        assert not reports.failed and sum(r.passed for r in reports) == 6, f"\n{reports}"
    with pytest.raises(ValueError, match=r"max_length=14 must be at least length \+ 3 = 15"):
        check_causal(cosformer, max_length=14)


def test_a_rotation_by_the_length_passes_what_it_can() -> None:
    torch.manual_seed(0)
    module = layer(rotary_scaling="dynamic:factor=2,original_length=4")
    without = dict.fromkeys(("state", "return_state", "segment_ids", "cu_seqlens"))
    reports = check_all(module, names=without)
    assert {r.name for r in reports if r.passed} == set(CHECKS) - {"streaming", "packing"}
    # Left in, they are found to be refused.
    report = check_streaming(module)
    assert report.failed and "cannot take or return a state" in report.where


@pytest.mark.parametrize("kind", [RotaryLinearAttention, SoftmaxAttention])
def test_axial_positions_pass_through_a_call(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)

    def call(
        module: nn.Module,
        x: Tensor,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        if positions is None:  # rows of three
            count = torch.arange(x.shape[1]).expand(x.shape[0], -1)
            positions = count if key_mask is None else (key_mask.long().cumsum(-1) - 1).clamp(0)
        elif key_mask is None and int(positions.min()) != 0:
            # A shift of all positions is one of the image.
            shift = positions[:, :1]
            grid = torch.stack([(positions - shift) // 3, (positions - shift) % 3], -1)
            return module(x, positions=grid + shift[..., None] * torch.tensor([2, 5]))
        grid = torch.stack([positions // 3, positions % 3], -1)
        return module(x, positions=grid, key_mask=key_mask)

    module = kind(8, 2, causal=False, rotary_scaling="axial")
    reports = check_all(module, causal=False, call=call)
    wanted = {"relative", "padding", "precision", "gradients"}
    assert {r.name for r in reports if r.passed} == wanted, f"\n{reports}"


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_a_users_own_layer_passes_everything(kind: str) -> None:
    reports = check_all(UserAttention(kind))
    assert [r.name for r in reports if r.passed] == list(CHECKS), f"\n{reports}"


def test_torch_multihead_attention_through_call() -> None:
    def call(module: nn.Module, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        hidden = None if key_mask is None else ~key_mask
        return module(x, x, x, attn_mask=later, key_padding_mask=hidden, need_weights=False)[0]

    module = nn.MultiheadAttention(8, 2, batch_first=True)
    # A left-padded query that sees no key is NaN in torch, but it is no real token.
    reports = check_all(module, call=call)
    assert {r.name for r in reports if r.passed} == {"causal", "padding", "precision", "gradients"}
    assert not reports.failed


def test_an_encoder_passes_what_has_a_meaning() -> None:
    torch.manual_seed(0)
    encoder = Encoder(Config(vocab_size=7, dim=8, layers=1, heads=2))
    reports = check_all(encoder, causal=False)
    skipped = {r.name: r.skipped for r in reports if r.skipped}
    assert set(skipped) == {"causal", "streaming"} and not reports.failed
    assert check_causal(encoder).failed


def test_blocks_that_a_long_sequence_crosses() -> None:
    module = RotaryLinearAttention(8, 2, backend="chunked", chunk_size=8)
    for check in (check_causal, check_streaming, check_packing):
        assert check(module, length=21).passed


# --- each planted fault is found ------------------------------------------------------------------

FAULTS = {  # kind, fault: all checks that fail
    # (documents do not begin at position 0 here, which is right as long as distances count)
    ("softmax", "rotated value"): {"relative", "packing"},
    ("softmax", "mismatched pairing"): {"relative", "packing"},
    ("softmax", "offset one too large"): {"streaming", "padding"},
    ("softmax", "padding ignored"): {"padding", "packing"},
    ("softmax", "packing ignored"): {"packing"},
    ("softmax", "padding ignored in later calls"): {"padding"},
    ("softmax", "padding ignored among documents"): {"packing"},
    # (before padding in the middle of a row, the next token is no real one)
    ("softmax", "sees the next token"): {"causal", "streaming", "padding"},
    ("softmax", "rows see each other"): {"causal", "padding", "packing"},
    ("softmax", "exp overflows"): {"precision"},
    ("softmax", "exp wrong gradient"): {"gradients"},
    # (the maximum is detached, which is wrong too where it does not cancel)
    ("linear", "key maximum"): {"causal", "streaming", "padding", "packing", "gradients"},
    ("linear", "denominator not in state"): {"streaming", "padding"},
}


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_planted_fault_is_found(kind: str, fault: str) -> None:
    reports = check_all(UserAttention(kind, fault))
    assert failing(reports) == FAULTS[kind, fault], f"\n{reports}"
    for report in reports:
        if report.failed:
            assert report.error is not None and report.error > 1.5 * (report.tolerance or 0)
            assert report.where


def test_report_says_where() -> None:
    late = check_streaming(UserAttention(fault="offset one too large"), splits=[[12], [5, 7]])
    assert late.where.startswith("split [5, 7], row")
    # The first five tokens are right; what follows is not.
    report = check_streaming(UserAttention("linear", "denominator not in state"), splits=[[5, 7]])
    assert int(report.where.split("time ")[1]) >= 5
    overflow = check_precision(UserAttention(fault="exp overflows"))
    assert overflow.where.startswith("float16, input times 10") and overflow.error == math.inf
    assert check_precision(UserAttention(fault="exp overflows"), dtypes=[torch.float32]).passed
    assert "shifted by" in check_relative(UserAttention(fault="rotated value")).where
    assert check_packing(UserAttention(fault="packing ignored")).where.startswith("by segment_ids")
    ignored = check_padding(UserAttention(fault="padding ignored"), sides=["left"], decode=False)
    assert ignored.where.startswith("left padding")
    found = check_gradients(UserAttention(fault="exp wrong gradient"))
    assert "gradient of" in found.where and found.error is not None and found.error < 0.1


def test_a_mask_skipped_for_a_batch_of_one() -> None:
    class Shortcut(UserAttention):
        def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Any:  # type: ignore[override]
            return super().forward(x, key_mask=key_mask if x.shape[0] > 1 else None)

    report = check_padding(Shortcut())
    assert report.failed and "alone" in report.where


def test_each_kind_of_row_is_tried() -> None:
    later = check_padding(UserAttention(fault="padding ignored in later calls"))
    assert "padding in the middle of a later call" in later.where
    assert check_padding(
        UserAttention(fault="padding ignored in later calls"), sides=["left", "right"]
    ).passed
    both = check_packing(UserAttention(fault="padding ignored among documents"))
    assert re.match("by segment_ids with (left|right) padding", both.where)

    class Flat(UserAttention):
        """Documents by their limits."""

        def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Any:  # type: ignore[override]
            if cu_seqlens is None:
                return super().forward(x)
            lengths = cu_seqlens.diff()
            if self.fault == "empty documents have a token":
                lengths = lengths.clamp(min=1)
            ids = torch.arange(len(lengths)).repeat_interleave(lengths)[: x.shape[1]]
            return super().forward(x, segment_ids=ids[None])

    assert check_packing(Flat()).passed
    empty = check_packing(Flat(fault="empty documents have a token"))
    assert empty.failed and "by cu_seqlens with empty documents" in empty.where
    assert check_packing(Flat(fault="empty documents have a token"), empty_documents=False).passed


def test_padding_forgotten_by_the_state() -> None:
    class Forgets(UserAttention):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            result = super().forward(x, *args, **kwargs)
            if kwargs.get("return_state"):
                result[1]["real"] = torch.ones_like(result[1]["real"])
            return result

    words = {name: name for name in ("key_mask", "state", "return_state", "positions")}
    report = check_padding(Forgets(), names=words)
    assert report.failed and report.where.startswith("decoding after")
    assert check_padding(Forgets(), names=words, decode=False).passed


def test_tables_in_half_precision_are_found_far_from_the_start() -> None:
    class HalfAngles(UserAttention):
        def forward(self, x: Tensor, positions: Tensor | None = None) -> Any:  # type: ignore[override]
            if positions is not None and x.dtype == torch.bfloat16:
                positions = positions.to(torch.bfloat16)  # 2001 becomes 2000
            return super().forward(x, positions=positions)

    report = check_precision(HalfAngles())
    assert report.failed and "bfloat16 at positions from 2000 on" in report.where
    assert check_precision(HalfAngles(), dtypes=[torch.float16]).passed


def test_gradients_that_are_not_finite() -> None:
    class Plain(UserAttention):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x) + (x * x).sum(-1, keepdim=True).sqrt()

    report = check_gradients(Plain())
    assert report.failed and report.error == math.inf and "input times 0" in report.where
    assert check_gradients(Plain(), scales=[1.0]).passed


def test_a_detached_part_is_a_wrong_gradient() -> None:
    class Detached(UserAttention):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            y = super().forward(x)
            return y + 0.1 * y.detach().tanh()

    assert check_gradients(Detached()).failed


# --- nothing passes that was not checked ----------------------------------------------------------


def test_missing_arguments_are_skipped_not_passed() -> None:
    class Bare(UserAttention):
        def forward(self, x: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().forward(x)

    reports = {report.name: report for report in check_all(Bare())}
    assert reports["relative"].skipped == "takes no positions argument"
    assert reports["streaming"].skipped == "takes no state argument"
    assert reports["padding"].skipped == "takes no key_mask argument"
    assert reports["packing"].skipped == "takes no segment_ids and no cu_seqlens argument"
    assert all(reports[name].passed for name in ("causal", "precision", "gradients"))
    assert not reports["relative"].passed and not reports["relative"].failed
    with pytest.raises(AssertionError, match="takes no positions argument"):
        check_relative(Bare(), raises=True)


def test_what_mixes_nothing_is_skipped() -> None:
    module = UserAttention()
    nn.init.zeros_(module.out.weight)
    for check in (check_causal, check_relative, check_streaming, check_padding, check_packing):
        report = check(module)
        assert not report.passed and "no output depends on another token" in str(report)


def test_positions_without_effect_are_skipped() -> None:
    report = check_relative(RotaryLinearAttention(8, 2, rotate="none"))
    assert report.skipped is not None and "no effect" in report.skipped
    # Rotated before an elementwise map, distances are not all that counts.
    assert check_relative(RotaryLinearAttention(8, 2, rotate="before")).failed
    absolute = LanguageModel(Config(vocab_size=7, dim=8, layers=1, heads=2, position="sinusoidal"))
    assert check_relative(absolute).failed


def test_what_the_module_does_not_implement_is_skipped_and_what_it_raises_fails() -> None:
    class Refuses(UserAttention):
        error: type[Exception] = NotImplementedError

        def forward(self, x: Tensor, state: Any = None, return_state: bool = False) -> Any:  # type: ignore[override]
            if state is not None:
                raise self.error("no streaming here")
            return super().forward(x, return_state=return_state)

    assert check_streaming(Refuses()).skipped == "not implemented by the module: no streaming here"
    Refuses.error = KeyError
    report = check_streaming(Refuses())
    assert report.failed and "KeyError" in report.where
    with pytest.raises(AssertionError, match="KeyError") as caught:
        check_streaming(Refuses(), raises=True)
    assert isinstance(caught.value.__cause__, KeyError)


# --- the protocol ---------------------------------------------------------------------------------


def test_names_of_another_library() -> None:
    class Renamed(nn.Module):
        def __init__(self, fault: str = "") -> None:
            super().__init__()
            self.inner = UserAttention(fault=fault)

        def forward(
            self,
            hidden: Tensor,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
            past: Any = None,
            **kwargs: Any,
        ) -> Any:
            return self.inner(hidden, position_ids, attention_mask, None, past, True)

    names = {"key_mask": "attention_mask", "positions": "position_ids", "state": "past"}
    reports = {r.name: r for r in check_all(Renamed(), names=names)}
    assert all(reports[n].passed for n in ("relative", "streaming", "padding"))
    assert check_padding(Renamed("padding ignored"), names=names).failed
    assert check_padding(Renamed()).skipped == "takes no key_mask argument"
    assert check_padding(Renamed(), names={**names, "key_mask": None}).skipped
    with pytest.raises(ValueError, match="names has no use for mask"):
        check_padding(Renamed(), names={"mask": "attention_mask"})


def test_explicit_positions_for_a_module_that_counts_nothing() -> None:
    class Uncounted(UserAttention):
        def forward(  # type: ignore[override]
            self,
            x: Tensor,
            positions: Tensor | None = None,
            segment_ids: Tensor | None = None,
            state: Any = None,
            return_state: bool = False,
        ) -> Any:
            if positions is None:
                positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
            return super().forward(x, positions, None, segment_ids, state, return_state)

    assert check_streaming(Uncounted()).failed
    assert check_streaming(Uncounted(), explicit_positions=True).passed
    assert check_packing(Uncounted(), explicit_positions=True).passed


def test_example_decides_the_input() -> None:
    class Scaled(nn.Module):
        """Nothing here tells the width."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).cumsum(1)

    with pytest.raises(ValueError, match="give example="):
        check_causal(Scaled())
    assert check_causal(Scaled(), torch.ones(1, 5, 3)).passed
    with pytest.raises(ValueError, match="does not run on torch"):
        check_causal(UserAttention(), torch.ones(1, 5, 3))
    with pytest.raises(ValueError, match="example must be floats"):
        check_causal(Scaled(), torch.ones(3))


def test_bad_options_are_named() -> None:
    module = UserAttention()
    for message, call in {
        "batch=1 must": lambda: check_causal(module, batch=1),
        "length=3 must": lambda: check_causal(module, length=3),
        "splits: ": lambda: check_streaming(module, splits=[[5, 5]]),
        "sides: 'top'": lambda: check_padding(module, sides=["top"]),
        "dtypes: give a tolerance": lambda: check_precision(module, dtypes=[torch.float64]),
        "skip: unknown check 'padings'": lambda: check_all(module, skip=["padings"]),
        "must be a torch.nn.Module": lambda: check_causal(torch.relu),  # type: ignore[arg-type]
        "must return a tensor": lambda: check_causal(module, call=lambda m, x: m(x)[0]),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_the_module_and_the_random_state_are_left_alone() -> None:
    torch.manual_seed(3)
    module = LanguageModel(Config(vocab_size=7, dim=8, layers=1, heads=2, dropout=0.5))
    module.train()
    weights = copy.deepcopy(module.state_dict())
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first = check_all(module)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training and all(m.training for m in module.modules())
    assert torch.get_default_dtype() == torch.float32 and torch.get_num_threads() == threads
    after = module.state_dict()
    assert all(torch.equal(after[n], w) and after[n].dtype == w.dtype for n, w in weights.items())
    assert all(p.grad is None for p in module.parameters())
    assert first == check_all(module)  # and the same again
    assert first.passed, f"\n{first}"


def test_reports_read_well() -> None:
    report = check_streaming(UserAttention(fault="offset one too large"))
    assert "streaming FAILED, worst error" in str(report) and "split" in str(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.passed = True  # type: ignore[misc]
    with pytest.raises(AssertionError, match="streaming FAILED"):
        check_streaming(UserAttention(fault="offset one too large"), raises=True)
    with pytest.raises(AssertionError, match=r"(?s)causal.*FAILED"):
        check_all(UserAttention(fault="sees the next token"), raises=True)
    reports = check_all(UserAttention(), skip=["gradients", "precision"], raises=True)
    lines = str(reports).splitlines()
    assert len(lines) == 1 + len(CHECKS) and lines[0].startswith("check ")
    assert reports.passed and not Reports([Report("x", False, "", skipped="why")]).passed


# --- the command line -----------------------------------------------------------------------------

USERS_FILE = """
import torch
from torch import nn
from linear_rope import RotaryLinearAttention

class Layer(RotaryLinearAttention):
    def __init__(self):
        super().__init__(8, 2)

class Needs(nn.Module):
    def __init__(self, dim):
        super().__init__()

class Future(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x).mean(1, keepdim=True) + x

layer = Layer()
def with_example():
    return Layer(), torch.randn(1, 4, 8), {"skip": ["gradients"]}
def nothing():
    return 3
def broken():
    raise RuntimeError("no such\\nweights")
"""


@pytest.fixture
def users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users_layers.py").write_text(USERS_FILE)
    (tmp_path / "users_broken.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_layers", raising=False)
    return tmp_path


def test_command_line_prints_a_table(users_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["users_layers:Layer", "--length", "9", "--batch", "3"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["passed"] * len(CHECKS)
    assert "splits [9], [5, 4]" in out
    fast = ["--skip", "gradients", "--skip", "precision"]
    assert main(["users_layers:layer", *fast]) == 0
    assert main(["users_layers:with_example", "--name", "key_mask=key_mask", *fast]) == 0
    assert "left out on request" in capsys.readouterr().out
    assert main(["users_layers:Future", *fast]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main(["users_layers:Future", "--non-causal", *fast]) == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("users_layers", "must be MODULE:CALLABLE"),
        ("no_such_module_at_all:x", "cannot import 'no_such_module_at_all'"),
        ("users_broken:x", "No module named 'no_such_package_at_all'"),
        ("users_layers:Absent", "has no 'Absent'"),
        ("users_layers:Needs", "needs the arguments dim"),
        ("users_layers:nothing", "must be a torch.nn.Module"),
        ("users_layers:broken", "RuntimeError: no such weights"),
        ("users_layers:USERS", "has no 'USERS'"),
        ("users_layers:__name__", "neither a module nor callable"),
    ],
)
def test_bad_spec_is_one_sentence(
    users_file: Path, capsys: pytest.CaptureFixture[str], spec: str, message: str
) -> None:
    assert main([spec]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_command_line_as_a_process(users_file: Path) -> None:
    root = Path(linear_rope.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "linear_rope.checks", "users_layers:Needs"],
        capture_output=True,
        text=True,
        cwd=users_file,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 'users_layers:Needs' needs the arguments dim")
