"""Invariants that a user runs on an attention module or language model of any origin.

    from linear_rope.checks import check_all, check_streaming

    print(check_all(my_attention))                    # a table, one line a check
    check_streaming(my_attention, raises=True)        # an assertion, for a test suite

or `python -m linear_rope.checks my_package.my_module:MyAttention`, which exits 1 if a check fails.

A module maps floats (batch, time, width) or integer tokens (batch, time) to (batch, time, ...).
Whatever else a check needs is passed by keyword, if the module's forward has a parameter of that
name; if not, the check is skipped, which is not passed:

    positions      (batch, time) int64       the position of every token
    key_mask       (batch, time) bool        True at real tokens of this call, False at padding
    segment_ids    (batch, time) int64       documents in one row, counted from 1
    cu_seqlens     (documents + 1,) int32    the same as limits, for a batch of 1
    state          what an earlier call returned, to continue it
    return_state   True: return (output, state)

A module that spells them differently is met half way, by names or by a function:

    check_padding(model, names={"key_mask": "attention_mask"})

    def call(layer, x, key_mask=None):                # torch.nn.MultiheadAttention, say
        hidden = None if key_mask is None else ~key_mask
        return layer(x, x, x, key_padding_mask=hidden)[0]

    check_padding(layer, call=call)

The module itself is never touched: everything happens on copies, in evaluation mode and float64
unless the check is about something else, with inputs from a generator of their own.
"""

from linear_rope.checks.batches import check_packing, check_padding
from linear_rope.checks.invariants import check_causal, check_relative, check_streaming
from linear_rope.checks.numerics import check_gradients, check_precision
from linear_rope.checks.report import Report, Reports
from linear_rope.checks.suite import CHECKS, check_all

__all__ = [
    "CHECKS",
    "Report",
    "Reports",
    "check_all",
    "check_causal",
    "check_gradients",
    "check_packing",
    "check_padding",
    "check_precision",
    "check_relative",
    "check_streaming",
]
