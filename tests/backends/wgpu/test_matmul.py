"""The product's bookkeeping: one submission, no copies of transposed views, limits with numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from entrenar_py.backends.wgpu import WgpuBackend
from entrenar_py.backends.wgpu.device import Device
from entrenar_py.backends.wgpu.matmul import KERNEL, TILE, Matmul, flatten, plan
from entrenar_py.errors import BackendUnavailable


def device(*, binding: int = 1 << 20, buffer: int = 1 << 20, workgroups: int = 4) -> Device:
    """A device with these limits and nothing behind them."""
    return Device(
        handle=None,
        name="paper",
        software=True,
        binding_bytes_max=binding,
        buffer_bytes_max=buffer,
        workgroups_max=workgroups,
    )


@pytest.mark.wgpu
def test_several_products_in_one_submission(wgpu_backend: WgpuBackend) -> None:
    """Any number of products takes one submission; none takes none."""
    before = wgpu_backend.submissions
    wgpu_backend.products([(torch.ones(3, 4), torch.ones(4, 5))] * 7)
    assert wgpu_backend.submissions == before + 1
    wgpu_backend.products([])
    assert wgpu_backend.submissions == before + 1


@pytest.mark.wgpu
def test_operand_beyond_the_adapter(wgpu_backend: WgpuBackend) -> None:
    """An operand larger than a binding is refused with its size, before it is copied."""
    huge = torch.ones(1, 1).expand(1 << 20, 1 << 20)
    with pytest.raises(BackendUnavailable, match="a matrix of 4398046511104 bytes, a binding"):
        wgpu_backend.matmul(huge, huge)


@pytest.mark.wgpu
def test_device_errors_are_translated(
    wgpu_backend: WgpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wgpu raises comes out as BackendUnavailable with its words."""
    broken = tmp_path / "broken.wgsl"
    broken.write_text("fn main() { let x: f32 = 1u; }")
    monkeypatch.setattr("entrenar_py.backends.wgpu.matmul.KERNEL", broken)
    with pytest.raises(BackendUnavailable, match=r"(?s)backend wgpu on .*Shader.*f32"):
        Matmul(wgpu_backend._device)


def test_transposed_views_are_not_copied() -> None:
    """A transposed view is read in place with its strides swapped; other views are copied."""
    matrix = torch.arange(6.0).reshape(2, 3)
    for view, strides in ((matrix, (3, 1)), (matrix.t(), (1, 3))):
        data, row, column = flatten(view)
        assert np.shares_memory(data, matrix.numpy())
        assert (row, column) == strides
    data, row, column = flatten(matrix[:, ::2])
    assert (data.tolist(), row, column) == ([0.0, 2.0, 3.0, 5.0], 2, 1)


def test_results_are_aligned_and_apart() -> None:
    """Results lie at multiples of 256 bytes and do not overlap."""
    pairs = [(torch.ones(m, 2), torch.ones(2, 9)) for m in (1, 8, 3)]
    jobs = plan(pairs, device())
    assert [job.offset for job in jobs] == [0, 256, 768]
    assert [job.result_bytes for job in jobs] == [36, 288, 108]


def test_limits_are_named() -> None:
    """Each limit of the device is checked and named with both numbers."""
    pair = (torch.ones(20, 30), torch.ones(30, 10))
    with pytest.raises(BackendUnavailable, match="a matrix of 2400 bytes, a binding holds 2399"):
        plan([pair], device(binding=2399))
    with pytest.raises(BackendUnavailable, match="a side of 20, one dispatch covers 16"):
        plan([pair], device(workgroups=1))
    with pytest.raises(BackendUnavailable, match="3 products take 3072 bytes, a buffer holds 3071"):
        plan([pair] * 3, device(buffer=3071))


def test_kernel_uses_the_same_tile() -> None:
    """The tile that the dispatch assumes is the kernel's."""
    source = KERNEL.read_text(encoding="utf-8")
    assert f"const TILE = {TILE}u;" in source
    assert f"@workgroup_size({TILE}, {TILE})" in source
