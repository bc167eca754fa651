"""Decompositions of convolutions and of sorting, against torch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.compute.wgpu import decompositions
from entrenar_py.compute.wgpu.capture import capture
from entrenar_py.compute.wgpu.device import Device
from entrenar_py.compute.wgpu.program import compile_step
from entrenar_py.shared.errors import UsageError
from tests.compute.wgpu.test_operations import agree, numbers

ATEN = torch.ops.aten
# Kernel, stride, padding, dilation and groups of a convolution of 4 channels to 6.
WINDOWS = [
    (kernel, stride, padding, dilation, groups)
    for kernel, stride, padding, dilation, groups in product(
        (1, 3), (1, 2, 3), (0, 2), (1, 2), (1, 2)
    )
]


@pytest.mark.parametrize("rank", [1, 2])
def test_every_window(rank: int) -> None:
    """Strides, paddings, dilations and groups in all combinations: exactly torch's in float64."""
    for kernel, stride, padding, dilation, groups in WINDOWS:
        x = numbers(2, 4, *(9, 8)[:rank]).double()
        weight = numbers(6, 4 // groups, *[kernel] * rank).double()
        bias = numbers(6).double()
        window = [stride], [padding], [dilation], False, [0], groups
        right = ATEN.convolution(x, weight, bias, *window)
        found = decompositions.convolution(x, weight, bias, *window)
        assert found.is_contiguous()
        torch.testing.assert_close(found, right)
        gradient = numbers(*right.shape).double()
        given = gradient, x, weight, [6], *window, [True, True, True]
        gradients = decompositions.convolution_backward(*given)
        for one, wanted in zip(gradients, ATEN.convolution_backward(*given), strict=True):
            torch.testing.assert_close(one, wanted)


def test_uneven_windows() -> None:
    """Each dim has a stride, a padding and a dilation of its own; a channel each has no product."""
    x, weight = numbers(2, 3, 7, 11).double(), numbers(3, 1, 2, 3).double()
    window = [2, 3], [1, 0], [1, 2], False, [0, 0], 3
    right = ATEN.convolution(x, weight, None, *window)
    torch.testing.assert_close(decompositions.convolution(x, weight, None, *window), right)
    given = torch.ones_like(right), x, weight, None, *window, [True, True, False]
    found = decompositions.convolution_backward(*given)
    for one, wanted in zip(found[:2], ATEN.convolution_backward(*given)[:2], strict=True):
        torch.testing.assert_close(one, wanted)
    assert found[2] is None


@pytest.mark.wgpu
def test_on_a_device(device: Device) -> None:
    """A device's convolutions and their gradients are torch's."""

    def fn(x: Tensor, w: Tensor, b: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in (x, w, b, y, v)]
        x, w, b, y, v = leaves
        image = F.conv2d(x, w, b, stride=2, padding=1, groups=2)
        line = F.conv1d(y, v, padding=3, groups=5)  # a channel each, as in mamba
        loss = (image.tanh() * 2).sum() + line.square().sum()
        return image.detach(), line.detach(), *torch.autograd.grad(loss, leaves)

    agree(
        *(device, fn, numbers(2, 4, 7, 5), numbers(6, 2, 3, 2), numbers(6)),
        *(numbers(3, 5, 11), numbers(5, 1, 4)),
    )


@pytest.mark.wgpu
def test_pools(device: Device) -> None:
    """The maximum and the mean of patches, and their gradients; of equal ones the first counts."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        largest = F.max_pool2d(x.relu(), 3, stride=2, padding=1)
        mean = F.adaptive_avg_pool2d(x, 1)
        (gradient,) = torch.autograd.grad((largest * mean).sum(), [x])
        return largest.detach(), mean.detach(), gradient

    agree(device, fn, numbers(2, 3, 7, 9))


@pytest.mark.wgpu
def test_a_transposed_one_is_refused(device: Device) -> None:
    """A transposed convolution has no kernel, and says so by its line."""
    x, weight = numbers(1, 2, 5), numbers(2, 3, 2)
    with pytest.raises(UsageError, match=r"convolution.* at test_decompositions\.py:\d+ .*no kern"):
        compile_step(device, lambda x, w: (F.conv_transpose1d(x, w),), [x, weight])


def test_what_is_not_needed_is_not_computed() -> None:
    """The gradient of an image is left out of a step that asks for the weights' alone."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(F.conv2d(x, w).sum(), [w])

    graph = capture(fn, [numbers(1, 2, 5, 5), numbers(3, 2, 3, 3)])
    products = [one for one in graph.graph.nodes if one.target is ATEN.bmm.default]
    assert len(products) == 1


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
def test_sorting_on_a_device(device: Device) -> None:
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
