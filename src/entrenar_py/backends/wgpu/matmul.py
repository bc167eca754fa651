"""Records matrix products into one command buffer and reads all results back at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py.backends import Pair
from entrenar_py.backends.wgpu.device import Device
from entrenar_py.errors import BackendUnavailable

KERNEL = Path(__file__).with_name("matmul.wgsl")
TILE = 16  # as in the kernel
FLOAT_BYTES = 4
RESULT_ALIGNMENT = 256  # WebGPU's largest min-storage-buffer-offset-alignment


@dataclass(frozen=True, kw_only=True)
class Job:
    """One product and the place of its result in the common output buffer, in bytes."""

    a: Tensor
    b: Tensor
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of the result."""
        return self.a.shape[0], self.b.shape[1]

    @property
    def result_bytes(self) -> int:
        """Size of the result."""
        return self.shape[0] * self.shape[1] * FLOAT_BYTES


class Matmul:
    """The compiled kernel on one device. `submissions` counts command buffers submitted."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.submissions = 0
        with device.failures():
            module = device.handle.create_shader_module(code=KERNEL.read_text(encoding="utf-8"))
            self._pipeline = device.handle.create_compute_pipeline(
                layout="auto", compute={"module": module, "entry_point": "main"}
            )

    def run(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """The products of `pairs` (checked operands), float32 [m, n] each, freshly allocated.

        Raises BackendUnavailable when something is larger than the device takes.
        """
        jobs = plan(pairs, self._device)
        if not jobs:
            return []
        with self._device.failures():
            return unpack(jobs, self._submit(jobs))

    def _submit(self, jobs: Sequence[Job]) -> memoryview:
        import wgpu

        gpu = self._device.handle
        size = jobs[-1].offset + jobs[-1].result_bytes
        usage = wgpu.BufferUsage
        results = gpu.create_buffer(size=size, usage=usage.STORAGE | usage.COPY_SRC)
        staging = gpu.create_buffer(size=size, usage=usage.MAP_READ | usage.COPY_DST)
        encoder = gpu.create_command_encoder()
        for job in jobs:
            self._record(encoder, job, results)
        encoder.copy_buffer_to_buffer(results, 0, staging, 0, size)
        gpu.queue.submit([encoder.finish()])
        self.submissions += 1
        staging.map_sync(wgpu.MapMode.READ)
        try:
            return memoryview(staging.read_mapped(copy=True))
        finally:
            staging.unmap()

    def _record(self, encoder: Any, job: Job, results: Any) -> None:
        import wgpu

        gpu, usage = self._device.handle, wgpu.BufferUsage
        (a, a_row, a_column), (b, b_row, b_column) = flatten(job.a), flatten(job.b)
        (m, k), n = job.a.shape, job.b.shape[1]
        dims = np.array([m, k, n, a_row, a_column, b_row, b_column, 0], dtype=np.uint32)
        buffers = [
            gpu.create_buffer_with_data(data=a, usage=usage.STORAGE),
            gpu.create_buffer_with_data(data=b, usage=usage.STORAGE),
            results,
            gpu.create_buffer_with_data(data=dims, usage=usage.UNIFORM),
        ]
        bindings: list[dict[str, Any]] = [{"buffer": buffer} for buffer in buffers]
        bindings[2] |= {"offset": job.offset, "size": job.result_bytes}
        group = gpu.create_bind_group(
            layout=self._pipeline.get_bind_group_layout(0),
            entries=[{"binding": i, "resource": item} for i, item in enumerate(bindings)],
        )
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(self._pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(-(-n // TILE), -(-m // TILE))
        compute.end()


def plan(pairs: Sequence[Pair], device: Device) -> list[Job]:
    """The jobs of `pairs`, results one after the other; BackendUnavailable if too large."""
    jobs: list[Job] = []
    offset = 0
    for a, b in pairs:
        job = Job(a=a, b=b, offset=offset)
        _check_size(job, device)
        jobs.append(job)
        offset += -(-job.result_bytes // RESULT_ALIGNMENT) * RESULT_ALIGNMENT
    if offset > device.buffer_bytes_max:
        raise BackendUnavailable(
            f"backend wgpu on {device.name}: the results of {len(jobs)} products take {offset} "
            f"bytes, a buffer holds {device.buffer_bytes_max}; multiply fewer at a time"
        )
    return jobs


def _check_size(job: Job, device: Device) -> None:
    where = f"backend wgpu on {device.name}: product of {list(job.a.shape)} and {list(job.b.shape)}"
    largest = max(job.a.numel() * FLOAT_BYTES, job.b.numel() * FLOAT_BYTES, job.result_bytes)
    if largest > device.binding_bytes_max:
        raise BackendUnavailable(
            f"{where}: a matrix of {largest} bytes, a binding holds {device.binding_bytes_max}; "
            "use smaller matrices or another backend"
        )
    longest = max(job.shape)
    if longest > device.workgroups_max * TILE:
        raise BackendUnavailable(
            f"{where}: a side of {longest}, one dispatch covers {device.workgroups_max * TILE}; "
            "use smaller matrices or another backend"
        )


def flatten(matrix: Tensor) -> tuple[np.ndarray[Any, Any], int, int]:
    """The elements as they lie in memory, and the strides of rows and columns in elements.

    A transposed view is not copied: its strides swap. Other views are copied to row-major.
    """
    rows, columns = matrix.shape
    if matrix.t().is_contiguous():
        return matrix.t().numpy().reshape(-1), 1, rows
    return matrix.contiguous().numpy().reshape(-1), columns, 1


def unpack(jobs: Sequence[Job], data: memoryview) -> list[Tensor]:
    """The results in `data`, each copied to memory of its own."""
    floats = np.frombuffer(data, dtype=np.float32)
    results = []
    for job in jobs:
        start = job.offset // FLOAT_BYTES
        end = start + job.result_bytes // FLOAT_BYTES
        results.append(torch.from_numpy(floats[start:end].copy()).reshape(job.shape))
    return results
