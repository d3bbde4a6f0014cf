"""Sums of each document against products with a mask of who sees whom, with all gradients."""

from __future__ import annotations

import judge
import pytest
import torch
from torch import Tensor

from linear_rope.documents import FEWEST, product_by_document


def masked(q: Tensor, k: Tensor, v: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Quadratic, in float64; and the sum of each row's last document."""
    q, k, v = q.double(), k.double(), v.double()
    number = fresh.long().cumsum(-1)
    same = number[:, :, None] == number[:, None, :]
    last = (number == number[:, -1:])[:, None, :, None]
    return ((q @ k.mT) * same[:, None]) @ v, (k * last).mT @ v


def borders(batch: int, time: int, *where: int) -> Tensor:
    fresh = torch.zeros(batch, time, dtype=torch.bool)
    for row, t in enumerate(where):
        fresh[row % batch, t] = True
    return fresh


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "shape",  # batch, heads, time, features, value width, where documents begin (row by row)
    [
        (1, 1, 64, 2, 1, 1),
        (2, 3, 130, 6, 5, 70, 3, 71, 129),
        (3, 2, 101, 1, 7),
        (1, 2, 257, 8, 3, 256, 100, 101, 130),
    ],
)
def test_outputs_and_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    batch, heads, time, width, value, *where = shape
    fresh = borders(batch, time, *where)
    q, k = torch.randn(2, batch, heads, time, width, dtype=dtype) / width**0.5
    v = torch.randn(batch, time, heads, value, dtype=dtype).transpose(1, 2)  # a view
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    got = product_by_document(*leaves, fresh)
    assert got is not None
    want = masked(*leaves, fresh)
    pulls = [torch.randn_like(x) for x in want]
    grads = torch.autograd.grad(got, leaves, [p.to(dtype) for p in pulls])
    want_grads = torch.autograd.grad(want, leaves, pulls)
    for one, other in zip((*got, *grads), (*want, *want_grads), strict=True):
        assert judge.error(one, other) <= tolerance
    assert got[0].dtype == dtype


def test_only_the_output_is_asked_for() -> None:
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 90, 4, dtype=torch.float64)]
    fresh = borders(1, 90, 40)
    got, want = product_by_document(*leaves, fresh), masked(*leaves, fresh)
    assert got is not None
    for one, other in zip(
        torch.autograd.grad(got[0].square().sum(), leaves),
        torch.autograd.grad(want[0].square().sum(), leaves),
        strict=True,
    ):
        assert judge.error(one, other) <= 1e-11


def test_where_a_loop_is_no_good() -> None:
    x = torch.randn(1, 1, 4 * FEWEST, 2)
    assert product_by_document(x, x, x, borders(1, 4 * FEWEST, 1, 2, 3)) is not None
    assert product_by_document(x, x, x, borders(1, 4 * FEWEST, 1, 2, 3, 4)) is None  # too short
    fresh = borders(1, 4 * FEWEST, 9)
    assert product_by_document(x, x, x, fresh.to("meta")) is None

    def refused(one: Tensor) -> Tensor:
        assert product_by_document(one, x, x, fresh) is None
        return one.sum()

    torch.func.vmap(refused)(torch.randn(3, *x.shape))
    nothing = torch.randn(1, 1, 0, 2)
    assert product_by_document(nothing, nothing, nothing, fresh[:, :0]) is None
