"""Submissions, copies and limits of matrix products."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entrenar_py.compute.wgpu import WgpuBackend
from entrenar_py.compute.wgpu.device import Device
from entrenar_py.compute.wgpu.matmul import Matmul, flatten, layout, plan
from entrenar_py.compute.wgpu.tiles import Layout, Limits
from entrenar_py.shared.errors import BackendUnavailable


def device(*, binding: int = 1 << 20, buffer: int = 1 << 20, workgroups: int = 4) -> Device:
    """Return a device with these limits and no hardware."""
    limits = Limits(
        binding_bytes_max=binding,
        workgroup_bytes_max=16384,
        invocations_max=256,
        workgroups_max=workgroups,
    )
    return Device(handle=None, name="paper", software=True, limits=limits, buffer_bytes_max=buffer)


@pytest.mark.wgpu
def test_several_products_in_one_submission(wgpu_backend: WgpuBackend) -> None:
    """Any number of products takes one submission, and no products take none."""
    before = wgpu_backend.submissions
    wgpu_backend.products([(torch.ones(3, 4), torch.ones(4, 5))] * 7)
    assert wgpu_backend.submissions == before + 1
    wgpu_backend.products([])
    assert wgpu_backend.submissions == before + 1


@pytest.mark.wgpu
def test_operand_beyond_the_adapter(wgpu_backend: WgpuBackend) -> None:
    """An operand larger than a binding is refused with its size before it is copied."""
    huge = torch.ones(1, 1).expand(1 << 20, 1 << 20)
    with pytest.raises(BackendUnavailable, match="a takes 4398046511104 bytes, but a binding"):
        wgpu_backend.matmul(huge, huge)


@pytest.mark.wgpu
def test_device_errors_are_translated(
    wgpu_backend: WgpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wgpu's errors are raised as BackendUnavailable, with its message."""
    monkeypatch.setattr(
        "entrenar_py.compute.wgpu.product.write",
        lambda *_, **__: "fn main() { let x: f32 = 1u; }",
    )
    with pytest.raises(BackendUnavailable, match=r"(?s)backend wgpu on .*Shader.*f32"):
        Matmul(wgpu_backend._device).run([(torch.ones(1, 1), torch.ones(1, 1))])


@pytest.mark.wgpu
def test_a_shape_is_compiled_once(wgpu_backend: WgpuBackend) -> None:
    """The same shape and layout share a pipeline. Another layout needs a new one."""
    matmul, square = Matmul(wgpu_backend._device), torch.ones(4, 4)
    for _ in range(2):
        matmul.run([(square, square), (square, square.t().contiguous().t())])
    assert len(matmul._pipelines) == 2


def test_transposed_views_are_not_copied() -> None:
    """A transposed view is used in place with swapped strides. Other views are copied."""
    matrix = torch.arange(6.0).reshape(2, 3)
    for view, strides in ((matrix, (3, 1)), (matrix.t(), (1, 3))):
        assert np.shares_memory(flatten(view), matrix.numpy())
        assert layout(view) == Layout(row=strides[0], column=strides[1])
    assert flatten(matrix[:, ::2]).tolist() == [0.0, 2.0, 3.0, 5.0]
    assert layout(matrix[:, ::2]) == Layout(row=2, column=1)


def test_results_are_aligned_and_apart() -> None:
    """Results are at multiples of 256 bytes and do not overlap."""
    pairs = [(torch.ones(m, 2), torch.ones(2, 9)) for m in (1, 8, 3)]
    jobs = plan(pairs, device())
    assert [job.offset for job in jobs] == [0, 256, 768]
    assert [job.result_bytes for job in jobs] == [36, 288, 108]


def test_limits_are_named() -> None:
    """The message for each limit has the limit and the size that exceeds it."""
    pair = (torch.ones(20, 30), torch.ones(30, 10))
    with pytest.raises(
        BackendUnavailable, match=r"on paper: .* a takes 2400 bytes, .* holds at most 2399"
    ):
        plan([pair], device(binding=2399))
    with pytest.raises(
        BackendUnavailable, match="3 products take 3072 bytes, but a buffer holds at most 3071"
    ):
        plan([pair] * 3, device(buffer=3071))
