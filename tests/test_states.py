"""States in another precision: their sums are rounded, and nothing else is."""

from __future__ import annotations

from typing import Any

import judge
import pytest
import torch
from forms import BACKENDS

from linear_rope import Rotary, linear_attention, make_feature_map
from linear_rope.functional import DENOMINATORS


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["exp", "favor+", "elu+1"])
@pytest.mark.parametrize(
    ("made", "kept", "used", "tolerance"),
    [
        (torch.float32, torch.bfloat16, torch.float32, 1e-2),
        (torch.float64, torch.bfloat16, torch.float64, 1e-2),
        (torch.float64, torch.float32, torch.float32, 2e-5),
        (torch.float32, torch.float64, torch.float64, 2e-5),
    ],
)
def test_a_state_in_another_precision_goes_on(
    made: torch.dtype,
    kept: torch.dtype,
    used: torch.dtype,
    tolerance: float,
    name: str,
    backend: str,
    denominator: str,
) -> None:
    """Keys far from 0: bfloat16 would have their maximum an eighth off, and the past by 13 %."""
    generator = torch.Generator().manual_seed(3)
    phi = make_feature_map(name, 16, **({"seed": 0} if name == "favor+" else {})).double()
    shapes = ((2, 2, 40, 16), (2, 1, 40, 16), (2, 1, 40, 3))
    q, k, v = (0.3 * torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    k = k + (torch.tensor([40.0, 45.0])[:, None, None, None] if name == "exp" else 1.0)
    options: dict[str, Any] = {
        "feature_map": phi,
        "rotary": Rotary(phi.feature_dim, fraction=0.5),
        "denominator": denominator,
        "log_decay": -0.02 * torch.rand(2, 1, 40, generator=generator, dtype=torch.float64),
    }

    def call(part: slice, dtype: torch.dtype, **more: Any) -> Any:
        cut = {**options, "log_decay": options["log_decay"][..., part].to(dtype), **more}
        phi.to(dtype)
        return linear_attention(*(x[:, :, part].to(dtype) for x in (q, k, v)), **cut)

    want = call(slice(None), torch.float64, backend="reference")[:, :, 25:]
    _, state = call(slice(0, 25), made, return_state=True, backend=backend)
    narrow = state.to(kept)
    assert narrow.S.dtype == narrow.z.dtype == kept and narrow.position.dtype == torch.int64
    assert torch.equal(narrow.stabilizer, state.stabilizer)
    assert narrow.stabilizer.dtype == state.stabilizer.dtype
    got, after = call(slice(25, None), used, state=narrow, return_state=True, backend=backend)
    assert got.dtype == used and after.S.dtype == used
    if denominator == "rotated":  # a sum of both signs, which may nearly cancel
        tolerance *= 10
    assert judge.error(got / want.abs().max(), want / want.abs().max()) <= tolerance
