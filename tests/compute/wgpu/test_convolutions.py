"""Convolutions of one and two dims, forward and backward, and pools, are torch's."""

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
    with pytest.raises(UsageError, match=r"convolution.* at test_convolutions\.py:\d+ .*no kern"):
        compile_step(device, lambda x, w: (F.conv_transpose1d(x, w),), [x, weight])


def test_what_is_not_needed_is_not_computed() -> None:
    """The gradient of an image is left out of a step that asks for the weights' alone."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(F.conv2d(x, w).sum(), [w])

    graph = capture(fn, [numbers(1, 2, 5, 5), numbers(3, 2, 3, 3)])
    products = [one for one in graph.graph.nodes if one.target is ATEN.bmm.default]
    assert len(products) == 1
