"""Eq. 19 with decay and rotation: over 65,536 tokens, with a decay of nothing, and of NaN."""

from __future__ import annotations

from typing import Any

import judge
import pytest
import torch
from forms import BACKENDS
from torch import Tensor

from linear_rope import Rotary, RotaryLinearAttention, linear_attention
from linear_rope.arguments import DENOMINATORS

LENGTH = 1 << 16
ROWS = (0, 63, 64, 1010, 1019, 32_767, 32_768, 65_535)


def eq_19(q: Tensor, k: Tensor, v: Tensor, g: Tensor, row: int) -> Tensor:
    """One row of one head, from all its keys; decays summed back from the row, as no difference."""
    past = torch.arange(row + 1)
    back = g[1 : row + 1].flip(0).cumsum(0).flip(0)
    left = torch.cat([back, back.new_zeros(1)]).exp()
    query, keys = judge.phi("elu+1", q[row]), judge.phi("elu+1", k[: row + 1])
    turned = judge.turn(keys, past) @ judge.turn(query[None], past[-1:])[0] * left
    return turned @ v[: row + 1].double() / ((keys @ query) * left).sum()


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_rotated_and_strongly_decayed_over_65536_tokens(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, LENGTH, 4, generator=generator) for _ in range(3))
    g = torch.full((1, 1, LENGTH), -0.01)
    g[..., ::7] = -60.0
    g[..., 5::1001] = -torch.inf  # among them 1006
    g[..., 32_700:] = -1e-4  # and a long memory at last
    learns = backend != "recurrent"  # its graph over so many tokens would take gigabytes
    narrow = [x.requires_grad_(learns) for x in (q, k, v, g)]
    wide = [x.detach().double().requires_grad_(learns) for x in narrow]
    want = torch.stack([eq_19(*(x[0, 0] for x in wide), row) for row in ROWS])
    out = linear_attention(*narrow[:3], log_decay=narrow[3], rotary=Rotary(4), backend=backend)
    got = out[0, 0, list(ROWS)]
    assert judge.error(got, want) <= 2e-6
    if not learns:
        return
    weights = torch.randn(want.shape, generator=generator)
    want_grads = torch.autograd.grad((want * weights.double()).sum(), wide)
    grads = torch.autograd.grad((got * weights).sum(), narrow)
    for grad, want_grad, name in zip(grads, want_grads, "qkvg", strict=True):
        scale = want_grad.abs().max()
        assert scale > 0.05, name
        assert judge.error(grad / scale, want_grad / scale) <= 1e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decay_of_nothing_changes_no_bit(
    backend: str, denominator: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, weights = (torch.randn(2, 2, 150, 6, generator=generator, dtype=dtype) for _ in "qkvw")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    nothing = torch.zeros(2, 2, 150, dtype=dtype)
    found = []
    for g in (None, nothing):
        out = linear_attention(
            *leaves, log_decay=g, rotary=Rotary(6), denominator=denominator, backend=backend
        )
        found.append((out, *torch.autograd.grad((out * weights).sum(), leaves)))
    for plain, decayed in zip(*found, strict=True):
        assert plain.detach().abs().max() > 0.01
        assert torch.equal(plain, decayed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_in_a_decay_shows_and_is_no_error(backend: str) -> None:
    """A gate has it from its input, as q, k and v do: a diverged loss is NaN, on any device."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 90, 4, generator=generator) for _ in range(3))
    g = torch.full((1, 2, 90), -0.1)
    g[0, 1, 80] = torch.nan
    options: Any = {"log_decay": g, "rotary": Rotary(4), "backend": backend}
    out, state = linear_attention(q, k, v, return_state=True, **options)
    assert out[0, 1, 80:].isnan().all() and state.S[0, 1].isnan().all()
    assert out[0, 0].isfinite().all() and state.S[0, 0].isfinite().all()
    step = [x[:, :, -1:] for x in (q, k, v)]
    options["log_decay"] = torch.full((1, 2, 1), torch.nan)
    assert linear_attention(*step, state=state, **options).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {"decay": "learned"},
        {"decay": "learned", "feature_map": "favor+"},
        {"decay": "fixed", "short_conv": 3, "token_shift": True, "local_heads": 1, "window": 4},
        {"decay": "learned", "rotary_scaling": "selective", "output_gate": True},
    ],
    ids=str,
)
def test_nans_at_pads_reach_no_real_token(options: dict[str, Any], backend: str) -> None:
    layer = RotaryLinearAttention(16, 2, backend=backend, **options)
    x = torch.randn(2, 70, 16, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0, :40], mask[1, 50:] = False, False
    want = layer(x, key_mask=mask)
    got = layer(x.masked_fill(~mask[..., None], torch.nan), key_mask=mask)
    assert torch.equal(got[mask], want[mask])
