"""Sorting, the largest elements, counts, and products by groups of rows are torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from entrenar_py.compute.wgpu import decompositions
from entrenar_py.compute.wgpu.device import Device
from tests.compute.wgpu.test_operations import agree, numbers

INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize("descending", [False, True])
def test_orders_with_nan(descending: bool) -> None:
    """NaN is the largest element, and equal elements keep their order."""
    x = torch.tensor([[2.0, NAN, -INF, 2.0, INF, NAN, -0.0, 0.0], [1, 1, 1, 0, 0, 0, 3, NAN]])
    values, indices = decompositions.sort(x, 1, descending)
    right = torch.sort(x, dim=1, descending=descending, stable=True)
    assert torch.equal(indices, right.indices)
    torch.testing.assert_close(values, right.values, equal_nan=True, rtol=0, atol=0)
    first = decompositions.topk(x, 3, 1, descending)
    torch.testing.assert_close(
        first[0], torch.topk(x, 3, 1, descending).values, equal_nan=True, rtol=0, atol=0
    )
    assert torch.equal(first[1], right.indices[:, :3])


def test_products_by_groups() -> None:
    """Rows times their group's matrix, and columns times rows; a group may be empty."""
    a, b = numbers(7, 5).double(), numbers(3, 5, 4).double()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    found = decompositions.grouped_mm(a, b, ends)
    right = torch.cat([a[:2] @ b[0], a[2:6] @ b[2], torch.zeros(1, 4)])
    torch.testing.assert_close(found, right)
    rows = numbers(7, 4).double()
    columns = decompositions.grouped_mm(a.T, rows, ends)
    torch.testing.assert_close(columns[0], a[:2].T @ rows[:2])
    assert torch.equal(columns[1], torch.zeros_like(columns[1]))
    torch.testing.assert_close(columns[2], a[2:6].T @ rows[2:6])


@pytest.mark.wgpu
def test_on_a_device(device: Device) -> None:
    """A device's orders and counts are torch's, in whole numbers and in floats."""

    def fn(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        order = torch.sort(i, stable=True)
        back = torch.empty_like(order.indices)
        back[order.indices] = torch.arange(i.shape[0])
        masked = x.clone()
        masked[x > 0.5] = -1.0
        masked[i[:3].remainder(17), 1:] = x[:3, 1:] * 2
        return (
            *x.sort(0), *x.topk(4, 1), *x.topk(2, 0, largest=False), *order, back, masked,
            torch.histc(i.float(), bins=5, min=0, max=4), torch.histc(x, bins=7, min=-1, max=2),
            i.max(), x.argmin(0),
        )  # fmt: skip

    i = torch.tensor([3, 0, 4, 1, 1, 3, 3, 2, 0])
    agree(device, fn, numbers(17, 11), i)


@pytest.mark.wgpu
def test_experts_on_a_device(device: Device) -> None:
    """Each row goes through its expert's matrices; gradients reach inputs, experts and router."""

    def fn(x: Tensor, router: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in (x, router, w)]
        x, router, w = leaves
        scores, chosen = (x @ router).softmax(-1).topk(2, -1)
        flat = chosen.reshape(-1)
        ids, order = torch.sort(flat, stable=True)
        counts = torch.histc(ids.float(), bins=w.shape[0], min=0, max=w.shape[0] - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        made = torch._grouped_mm(x[order // 2], w, offs=ends)
        weighted = made * scores.reshape(-1)[order][:, None]
        return weighted.detach(), *torch.autograd.grad(weighted.square().sum(), leaves)

    agree(device, fn, numbers(9, 8), numbers(8, 4), numbers(4, 8, 16))
