"""Tensors without elements: what is made of them has torch's values, and needs no kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.compute.wgpu.capture import capture, is_empty
from entrenar_py.compute.wgpu.device import Device
from tests.compute.wgpu.test_operations import agree, numbers


def compute(x: Tensor, nothing: Tensor) -> tuple[Tensor, ...]:
    """Use parts of `x` [3, 4] without elements, and `nothing` [0, 4], in all ways that have one."""
    none, no_rows = x[:, :0], torch.zeros(0, dtype=torch.int64)
    return (
        torch.cat([none, x * 2, x[:, 4:]], 1), torch.cat([none, none], 0), x[:0] * 2, none @ x[:0],
        torch.bmm(none[None], x[None, :0]) + 1, nothing.sum(0) + x, nothing.sum(), none.prod(1),
        F.pad(nothing, (0, 0, 1, 1), value=2.5), nothing * 3, none.any(1), nothing.bool().any(),
        x.index_put((no_rows,), nothing), x.slice_scatter(none, 1, 2, 2), x[no_rows] - 1,
        x.scatter(0, no_rows[:, None].expand(0, 4), nothing), nothing.reshape(4, 0).t(),
    )  # fmt: skip


def test_nothing_reads_them() -> None:
    """Only results have no elements, and what they are made of."""
    given = [numbers(3, 4), torch.zeros(0, 4)]
    graph = capture(compute, given)
    for node in graph.graph.nodes:
        if node.op == "call_function" and not is_empty(node):
            assert not any(map(is_empty, node.all_input_nodes)), node
    for got, right in zip(graph(*given), compute(*given), strict=True):
        assert torch.equal(got, right)


@pytest.mark.wgpu
def test_on_a_device(device: Device) -> None:
    """A device has torch's results, those without elements among them."""
    agree(device, compute, numbers(3, 4), torch.zeros(0, 4))
