"""Lowering fuses operations, also on devices with few bindings and few workgroups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from entrenar_py.compute.wgpu.capture import Function, capture
from entrenar_py.compute.wgpu.device import Device
from entrenar_py.compute.wgpu.lower import Lowered, lower
from entrenar_py.compute.wgpu.program import Program, plan
from entrenar_py.compute.wgpu.tiles import Limits

LIMITS = Limits(
    binding_bytes_max=2**27, workgroup_bytes_max=2**14, invocations_max=256, workgroups_max=65_535
)


def lowered(fn: Function, *inputs: Tensor, bindings_max: int = 8, fused: bool = True) -> Lowered:
    """Return the dispatches of `fn` on a device with WebGPU's default limits."""
    return lower(capture(fn, inputs), LIMITS, bindings_max=bindings_max, fused=fused)


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Compute attention: scores, a mask, softmax and the product with the values."""
    scores = (q @ k.transpose(-2, -1) * 0.5).masked_fill(torch.ones(7, 7).bool().triu(1), -1e9)
    return (scores.softmax(-1) @ v,)


@pytest.mark.parametrize(
    ("fn", "shape", "count"),
    [
        (lambda x: (x.tanh() * 2 + x.t().reshape(7, 5).exp(),), (7, 5), 1),
        (lambda x: (x.softmax(-1),), (7, 5), 1),
        (lambda x: ((x * x).mean(-1, keepdim=True).add(1e-5).rsqrt() * x,), (100, 50), 1),
        (lambda x: (torch.tanh(x @ x.t() + 1) * 0.5,), (7, 5), 1),
        (lambda x: (torch.cat([x, -x]).sum(),), (7, 5), 1),
        (lambda x: (x.sum(0) / 7,), (7, 5), 1),
        (lambda x: attention(x, x, x), (2, 7, 5), 3),
        # An operand of two products is computed once: a product kernel has no prologue.
        (lambda x: (x.exp() @ x.t(), x.exp().t() @ x), (7, 5), 3),
    ],
)
def test_what_fuses(fn: Function, shape: Sequence[int], count: int) -> None:
    """Chains, whole rows of softmax and norms, and epilogues of products are one dispatch each."""
    steps = lowered(fn, torch.ones(*shape))
    assert len(plan(steps, steps.inputs).steps) == count


def test_unfused_is_more() -> None:
    """Without fusion, each operation but a view takes at least one dispatch."""
    naive = lowered(lambda x: (x.tanh() * 2 + x.t().t(),), torch.ones(7, 5), fused=False)
    assert len(naive.steps) == 3


def test_a_step_knows_its_line() -> None:
    """Each dispatch has the model's line that it comes from."""
    assert "test_lower.py" in lowered(lambda x: (x + 1,), torch.ones(3)).steps[0].line


def sum_of_all(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Use more tensors than some devices can bind, in a chain, a join, a lookup and an epilogue."""
    first, *others = tensors
    total = first * 2
    for one in others:
        total = total * one + one
    ids = first[0].long().remainder(3)
    return total, torch.cat(tensors, 1).sum(1), (first @ first.t() * total[:, :3]), total[ids]


@pytest.mark.wgpu
def test_few_bindings(device: Device) -> None:
    """No dispatch exceeds the device's number of bindings, and the results are the same."""
    given = [torch.randn(3, 5) for _ in range(11)]
    steps = lowered(sum_of_all, *given, bindings_max=4)
    assert max(len(step.bindings) for step in steps.steps) == 4
    found = Program(device, steps, given, []).run([one.numpy() for one in given])
    for one, right in zip(found, sum_of_all(*given), strict=True):
        np.testing.assert_allclose(one, right.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.wgpu
def test_few_workgroups(device: Device) -> None:
    """A dispatch with more workgroups than one dimension allows uses the next one, too."""
    x = torch.randn(1000, 40)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x + 1,
            x.sum(1),
            torch.zeros(1000, 40).index_put((torch.arange(1000) // 2,), x, accumulate=True),
        )

    limits = dataclasses.replace(LIMITS, workgroups_max=7 * 15)
    steps = lower(capture(fn, [x]), limits, bindings_max=8)
    assert max(step.workgroups[1] for step in steps.steps) > 1
    assert max(max(step.workgroups) for step in steps.steps) <= 7 * 15
    for one, right in zip(Program(device, steps, [x], []).run([x.numpy()]), fn(x), strict=True):
        np.testing.assert_allclose(one, right.numpy(), rtol=1e-5, atol=1e-5)


def test_memory_is_shared_but_never_read_and_written_at_once() -> None:
    """Buffers share memory, but never two that are in use at the same time."""

    def deep(x: Tensor) -> tuple[Tensor, ...]:
        kept = x @ x
        for _ in range(9):
            x = torch.tanh(x @ x) + x.sum(0)
        return x, kept

    steps = lowered(deep, torch.ones(9, 9))
    planned = plan(steps, steps.inputs)
    assert len(planned.slot_bytes) < len(planned.slots) / 2
    holds: dict[int, object] = {}
    for step in planned.steps:
        written = planned.slots[step.writes]
        for one in step.bindings:
            if one in planned.slots and one is not step.writes:
                assert planned.slots[one] != written
                assert holds[planned.slots[one]] is one
        holds[written] = step.writes
        assert planned.slot_bytes[written] >= step.writes.num_bytes
    for result in steps.results:
        assert result.buffer is not None
        assert holds[planned.slots[result.buffer]] is result.buffer
