"""Measures the device memory that a worker takes: of a GPU through torch, or of a wgpu adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import finalize

from entrenar_py import compute as backends
from entrenar_py.compute import Backend
from entrenar_py.shared import scenario


@dataclass(frozen=True)
class Measured:
    """Bytes in use before the work, the most during it, and the device's total if it is known."""

    baseline_bytes: int
    peak_bytes: int
    reported_bytes: int | None


Work = Callable[[Backend], None]


def measure(name: str, *, before: Work, work: Work) -> Measured:
    """Run `before`, then `work`, on backend `name`; measure the memory that `work` takes there.

    Raises BackendUnavailable when the backend can't be opened or fails.
    """
    return MEASURES[scenario.backend_kind(name)](name, before, work)


def _of_cuda(name: str, before: Work, work: Work) -> Measured:
    """Measure a GPU's memory by the counts of torch's allocator."""
    import torch

    backend = backends.open_backend(name)
    before(backend)
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    torch.cuda.reset_peak_memory_stats(index)
    baseline = torch.cuda.memory_allocated(index)
    work(backend)
    total = torch.cuda.get_device_properties(index).total_memory
    return Measured(baseline, torch.cuda.max_memory_allocated(index), total)


def _of_adapter(name: str, before: Work, work: Work) -> Measured:
    """Measure an adapter's memory by the buffers that the backend creates.

    WebGPU can't report an adapter's memory, and wgpu-native's report counts objects, not bytes.
    """
    from entrenar_py.compute import wgpu
    from entrenar_py.compute.wgpu.device import open_device

    device = open_device(int(name.partition(":")[2] or 0))
    counted = Counted(device.handle)
    backend = wgpu.WgpuBackend(replace(device, handle=counted), name=name)
    before(backend)
    counted.peak_bytes = baseline = counted.held_bytes
    work(backend)
    return Measured(baseline, counted.peak_bytes, None)


MEASURES: dict[str, Callable[[str, Work, Work], Measured]] = {
    "cuda": _of_cuda,
    "wgpu": _of_adapter,
}


class Counted:
    """Wraps a wgpu.GPUDevice, `handle`, and counts the bytes of the buffers created on it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.held_bytes = self.peak_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def create_buffer(self, **given: Any) -> Any:
        """Create a buffer, which is counted until it is garbage-collected."""
        return self._count(self._handle.create_buffer(**given))

    def create_buffer_with_data(self, **given: Any) -> Any:
        """Create a buffer with content, and count it like any other buffer."""
        return self._count(self._handle.create_buffer_with_data(**given))

    def _count(self, buffer: Any) -> Any:
        self._add(buffer.size)
        finalize(buffer, self._add, -buffer.size)
        return buffer

    def _add(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
