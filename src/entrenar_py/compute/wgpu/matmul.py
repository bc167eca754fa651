"""Matrix products that are recorded into one command buffer and read back at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entrenar_py.compute import Pair, adapters
from entrenar_py.compute.wgpu.device import Device
from entrenar_py.compute.wgpu.product import Kernel, product_kernel
from entrenar_py.compute.wgpu.tiles import FLOAT_BYTES, Layout, Product
from entrenar_py.shared.errors import BackendUnavailable

RESULT_ALIGNMENT = 256  # WebGPU's largest min-storage-buffer-offset-alignment
PIPELINES_MAX = 512  # kernels to keep, one for each shape and layout


@dataclass(frozen=True, kw_only=True)
class Job:
    """One product, its kernel, and its result's offset in the shared output, in bytes."""

    a: Tensor
    b: Tensor
    kernel: Kernel
    offset: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (m, n) of the result."""
        return self.a.shape[0], self.b.shape[1]

    @property
    def result_bytes(self) -> int:
        """The size of the result."""
        return self.shape[0] * self.shape[1] * FLOAT_BYTES


class Matmul:
    """Matrix products on one device, with a kernel for each shape and memory layout.

    `submissions` is the number of command buffers submitted.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pipelines: dict[str, Any] = {}  # by source
        self.submissions = 0

    def run(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """Return the products of `pairs`, checked by the caller, as new float32 [m, n] tensors.

        Raises BackendUnavailable if operands or results are too large for the device.
        """
        jobs = plan(pairs, self._device)
        if not jobs:
            return []
        with self._device.failures():
            return unpack(jobs, self._submit(jobs))

    def _submit(self, jobs: Sequence[Job]) -> memoryview:
        wgpu = adapters.library()

        gpu = self._device.handle
        size = jobs[-1].offset + jobs[-1].result_bytes
        usage = wgpu.BufferUsage
        results = gpu.create_buffer(size=size, usage=usage.STORAGE | usage.COPY_SRC)
        staging = gpu.create_buffer(size=size, usage=usage.MAP_READ | usage.COPY_DST)
        encoder = gpu.create_command_encoder()
        for job in jobs:
            self._record(encoder, job, results)
        encoder.copy_buffer_to_buffer(results, 0, staging, 0, size)
        self._device.submit(encoder)
        self.submissions += 1
        staging.map_sync(wgpu.MapMode.READ)
        try:
            return memoryview(staging.read_mapped(copy=True))
        finally:
            staging.unmap()

    def _record(self, encoder: Any, job: Job, results: Any) -> None:
        wgpu = adapters.library()

        gpu, usage = self._device.handle, wgpu.BufferUsage
        pipeline = self._pipeline(job.kernel.source)
        operands = [flatten(matrix) for matrix in (job.a, job.b)]
        bindings: list[dict[str, Any]] = [
            {"buffer": gpu.create_buffer_with_data(data=data, usage=usage.STORAGE)}
            for data in operands
        ]
        bindings.append({"buffer": results, "offset": job.offset, "size": job.result_bytes})
        group = gpu.create_bind_group(
            layout=pipeline.get_bind_group_layout(0),
            entries=[{"binding": i, "resource": item} for i, item in enumerate(bindings)],
        )
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(*job.kernel.workgroups)
        compute.end()

    def _pipeline(self, source: str) -> Any:
        if source not in self._pipelines:
            if len(self._pipelines) == PIPELINES_MAX:
                self._pipelines.pop(next(iter(self._pipelines)))  # the oldest
            gpu = self._device.handle
            module = gpu.create_shader_module(code=source)
            self._pipelines[source] = gpu.create_compute_pipeline(
                layout="auto", compute={"module": module, "entry_point": "main"}
            )
        return self._pipelines[source]


def plan(pairs: Sequence[Pair], device: Device) -> list[Job]:
    """Return a job for each pair, with consecutive results.

    Raises BackendUnavailable if operands or results are too large.
    """
    jobs: list[Job] = []
    offset = 0
    for a, b in pairs:
        try:
            kernel = product_kernel(as_product(a, b), device.limits)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"backend wgpu on {device.name}: {error}") from None
        job = Job(a=a, b=b, kernel=kernel, offset=offset)
        jobs.append(job)
        offset += -(-job.result_bytes // RESULT_ALIGNMENT) * RESULT_ALIGNMENT
    if offset > device.buffer_bytes_max:
        raise BackendUnavailable(
            f"backend wgpu on {device.name}: the results of {len(jobs)} products take {offset} "
            f"bytes, a buffer holds at most {device.buffer_bytes_max}; multiply fewer at a time"
        )
    return jobs


def as_product(a: Tensor, b: Tensor) -> Product:
    """Return a description of `a @ b`, with the layouts that `flatten` gives both operands."""
    (m, k), n = a.shape, b.shape[1]
    a_layout, b_layout = layout(a), layout(b)
    return Product(m=m, k=k, n=n, a=a_layout, b=b_layout, c=Layout(row=n, column=1))


def layout(matrix: Tensor) -> Layout:
    """Return the layout of `flatten(matrix)`: column-major for a transposed view."""
    rows, columns = matrix.shape
    transposed = matrix.t().is_contiguous()
    return Layout(row=1, column=rows) if transposed else Layout(row=columns, column=1)


def flatten(matrix: Tensor) -> np.ndarray[Any, Any]:
    """Return the elements as a 1-d array in memory order, row-major or column-major.

    Row-major matrices and transposed ones are not copied. Other views are copied to row-major.
    """
    if matrix.t().is_contiguous():
        return matrix.t().numpy().reshape(-1)
    return matrix.contiguous().numpy().reshape(-1)


def unpack(jobs: Sequence[Job], data: memoryview) -> list[Tensor]:
    """Return the results in `data`, each copied to a new tensor."""
    floats = np.frombuffer(data, dtype=np.float32)
    results = []
    for job in jobs:
        start = job.offset // FLOAT_BYTES
        end = start + job.result_bytes // FLOAT_BYTES
        results.append(torch.from_numpy(floats[start:end].copy()).reshape(job.shape))
    return results
