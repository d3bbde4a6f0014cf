"""Checks of rows that hold more or less than one sequence: padding, packed documents, both.

Each compares what is in a row with the same tokens alone, on a float64 copy of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linear_rope.checks.invariants import LOUD
from linear_rope.checks.report import Report, Skip, Tally
from linear_rope.checks.subject import NEW_TOKENS, Options, Subject, conduct

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["check_packing", "check_padding"]

SIDES = ("left", "right", "middle")
PADS = (5, 2, 4, 1, 3)  # of the rows, in turn
BEFORE = 2  # tokens in the call before one with padding in its middle


def check_padding(
    module: nn.Module,
    example: Tensor | None = None,
    *,
    sides: Sequence[str] = SIDES,
    decode: bool = True,
    tolerance: float = 1e-5,
    raises: bool = False,
    **options: Unpack[Options],
) -> Report:
    """Real tokens of a padded row give what the row gives alone, whatever the padding holds.

    Rows of different lengths in one batch, and each row in a batch of 1, where a mask is easily
    skipped.

    Args:
        sides: where the padding is, "left", "right" or "middle".
        decode: where the module takes a state, also go on for three tokens after the padded call,
            without a mask: the state must remember what was padding. And, with "middle", read two
            tokens first and the rest with padding between them in a second call.
        others: as in `check_causal`.
    """

    def body(subject: Subject, tally: Tally) -> str:
        unknown = sorted(set(sides) - set(SIDES))
        if unknown:
            raise ValueError(f"sides: {unknown[0]!r} is none of {', '.join(SIDES)}")
        subject.require("key_mask")
        subject.require_mixing(10 * tolerance)
        streams = decode and "state" in subject.names
        length, batch = subject.length, subject.batch
        x = subject.draw(length=length + NEW_TOKENS)
        counts = [length - PADS[row % len(PADS)] for row in range(batch)]
        want = [subject.run(x[r, None, :n]) for r, n in enumerate(counts)]
        if streams:
            whole = [subject.run(x[r, None, : n + NEW_TOKENS]) for r, n in enumerate(counts)]

        def go_on(state: Any, trial: str) -> None:
            """Decode from the state, and compare."""
            new = torch.cat([x[r, None, n : n + NEW_TOKENS] for r, n in enumerate(counts)])
            after = torch.tensor(counts)[:, None] + torch.arange(NEW_TOKENS)
            out = subject.run(new, state=state, **subject.positions(after))
            for r, n in enumerate(counts):
                tally.compare(out[r, None], whole[r][:, n:], trial, row=r, time=n)

        for side in sides:
            padded, mask = _pad(subject, [x[r, :n] for r, n in enumerate(counts)], length, side)
            at = (mask.long().cumsum(-1) - 1).clamp(min=0)
            rows = [("", slice(None))] + [(" alone", slice(r, r + 1)) for r in range(batch)]
            for alone, row in rows:
                out = subject.run(padded[row], key_mask=mask[row], **subject.positions(at[row]))
                for i, r in enumerate(range(batch)[row]):
                    tally.compare(out[i, None, mask[r]], want[r], f"{side} padding{alone}", row=r)
            if streams:
                arguments: dict[str, Any] = {"key_mask": mask, **subject.positions(at)}
                _, state = subject.run_with_state(padded, **arguments)
                go_on(state, f"decoding after {side} padding")
        if streams and "middle" in sides:
            trial = "padding in the middle of a later call"
            begin = torch.arange(BEFORE).expand(batch, -1)
            _, state = subject.run_with_state(x[:, :BEFORE], **subject.positions(begin))
            rest = [x[r, BEFORE:n] for r, n in enumerate(counts)]
            padded, mask = _pad(subject, rest, length - BEFORE, "middle")
            at = (mask.long().cumsum(-1) - 1).clamp(min=0) + BEFORE
            arguments = {"key_mask": mask, "state": state, **subject.positions(at)}
            out, state = subject.run_with_state(padded, **arguments)
            for r in range(batch):
                part = want[r][:, BEFORE:]
                tally.compare(out[r, None, mask[r]], part, trial, row=r, time=BEFORE)
            go_on(state, f"decoding after {trial}")
        tried = f"{', '.join(sides)} padding of {max(counts)} to {min(counts)} real tokens"
        return tried + (f", then {NEW_TOKENS} new ones" if streams else "")

    return conduct("padding", body, module, example, tolerance, raises, **options)


def check_packing(
    module: nn.Module,
    example: Tensor | None = None,
    *,
    empty_documents: bool = True,
    tolerance: float = 1e-5,
    raises: bool = False,
    **options: Unpack[Options],
) -> Report:
    """Several documents packed into a row give what they give one by one.

    With `segment_ids` and with `cu_seqlens`, whichever the module takes; one document has a single
    token. With `segment_ids` and `key_mask` also rows that are padded left or right.

    Args:
        empty_documents: with `cu_seqlens` also have documents without a token, as equal neighbors.
        others: as in `check_causal`.
    """

    def body(subject: Subject, tally: Tally) -> str:
        layouts = [name for name in ("segment_ids", "cu_seqlens") if name in subject.names]
        if not layouts:
            raise Skip("takes no segment_ids and no cu_seqlens argument")
        subject.require_mixing(10 * tolerance)
        x, tried = subject.draw(), []
        documents = [5, 1, subject.length - 6]
        orders = [documents[:: 1 if row % 2 == 0 else -1] for row in range(subject.batch)]
        want = [_one_by_one(subject, x[r], order) for r, order in enumerate(orders)]
        ids, at = _packed(orders)
        if "segment_ids" in layouts:
            out = subject.run(x, segment_ids=ids.to(subject.device), **subject.positions(at))
            for r, order in enumerate(orders):
                _compare(tally, out[r], want[r], order, "by segment_ids", r)
            tried.append("segment_ids")
        if "cu_seqlens" in layouts:
            for empty in (False, True) if empty_documents else (False,):
                trial = f"by cu_seqlens{' with empty documents' if empty else ''}"
                for r, order in enumerate(orders):  # flat rows
                    lengths = [0, *order[:1], 0, 0, *order[1:], 0] if empty else order
                    limits = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
                    arguments: dict[str, Any] = {"cu_seqlens": limits.to(subject.device)}
                    out = subject.run(x[r, None], **arguments, **subject.positions(at[r, None]))
                    _compare(tally, out[0], want[r], order, trial, r)
                tried.append(trial.removeprefix("by "))
        if "segment_ids" in layouts and "key_mask" in subject.names:
            _check_packed_and_padded(subject, tally)
            tried.append("segment_ids with padding")
        return f"documents of {', '.join(map(str, documents))} tokens by {', '.join(tried)}"

    return conduct("packing", body, module, example, tolerance, raises, **options)


def _check_packed_and_padded(subject: Subject, tally: Tally) -> None:
    pads = 2
    real = subject.length - pads
    x = subject.draw(length=real)
    orders = [[4, 1, real - 5][:: 1 if row % 2 == 0 else -1] for row in range(subject.batch)]
    want = [_one_by_one(subject, x[r], order) for r, order in enumerate(orders)]
    of_real, at_real = _packed(orders)
    for side in ("left", "right"):
        padded, mask = _pad(subject, list(x), subject.length, side)
        ids, at = torch.zeros(2, *mask.shape, dtype=torch.int64)
        ids[mask.cpu()], at[mask.cpu()] = of_real.flatten(), at_real.flatten()
        # Padding counts to the document beside it: it is for the mask to hide it.
        ids[~mask.cpu()] = 1 if side == "left" else len(orders[0])
        out = subject.run(
            padded,
            segment_ids=ids.to(subject.device),
            key_mask=mask,
            **subject.positions(at),
        )
        for r, order in enumerate(orders):
            trial = f"by segment_ids with {side} padding"
            _compare(tally, out[r, mask[r]], want[r], order, trial, r)


def _pad(subject: Subject, rows: Sequence[Tensor], length: int, side: str) -> tuple[Tensor, Tensor]:
    """Rows padded to a common length with loud tokens, and their mask."""
    mask = torch.zeros(len(rows), length, dtype=torch.bool, device=subject.device)
    for r, row in enumerate(rows):
        behind = {"left": len(row), "right": 0, "middle": len(row) - len(row) // 2}[side]
        mask[r, : len(row) - behind] = True
        mask[r, length - behind :] = True
    filler = subject.draw(len(rows), length)
    padded = filler if subject.vocabulary else LOUD * filler
    for r, row in enumerate(rows):
        padded[r, mask[r]] = row
    return padded, mask


def _packed(orders: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Documents counted from 1 and positions within them, (rows, tokens)."""
    ids = [[n for n, size in enumerate(order, 1) for _ in range(size)] for order in orders]
    at = [[t for size in order for t in range(size)] for order in orders]
    return torch.tensor(ids), torch.tensor(at)


def _one_by_one(subject: Subject, row: Tensor, order: Sequence[int]) -> list[Tensor]:
    return [subject.run(document[None]) for document in row.split(list(order))]


def _compare(
    tally: Tally, got: Tensor, want: Sequence[Tensor], order: Sequence[int], trial: str, row: int
) -> None:
    limits = pairwise([0, *accumulate(order)])
    for (start, end), alone in zip(limits, want, strict=True):
        tally.compare(got[None, start:end], alone, trial, row=row, time=start)
