"""A captured step, compiled for one device. A run is one upload, few submissions, one read-back."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute import adapters
from entrenar_py.compute.wgpu.capture import Function, capture
from entrenar_py.compute.wgpu.device import HOST, Array, Device, Uploaded, device_array, upload
from entrenar_py.compute.wgpu.emitter import ELEMENT_BYTES, Buffer
from entrenar_py.compute.wgpu.lower import Lowered, lower
from entrenar_py.compute.wgpu.values import Step
from entrenar_py.shared.errors import BackendUnavailable, UsageError

# Memory for intermediate results that the programs of one workload share.
#
# A program uses this memory from the beginning to the end of a run, and programs of one device run
# one after another. So a program for smaller shapes than earlier ones takes no additional memory.


class Scratch:
    """Pieces of device memory, which grow in number and never shrink."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Any]] = []  # size in bytes, wgpu.GPUBuffer

    @property
    def num_bytes(self) -> int:
        """The size of all pieces together."""
        return sum(size for size, _ in self._pieces)

    def take(self, device: Device, sizes: Sequence[int]) -> list[Any]:
        """Return a different piece, of at least the requested size, for each of `sizes` in bytes.

        The largest size gets the smallest piece that is large enough, and so on. If no remaining
        piece is large enough, a new one is created.
        """
        wgpu = adapters.library()

        free = sorted(self._pieces, key=lambda piece: piece[0])
        taken: dict[int, Any] = {}
        for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
            fitting = next((piece for piece in free if piece[0] >= sizes[index]), None)
            if fitting is None:
                usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
                memory = device.handle.create_buffer(size=sizes[index], usage=usage)
                self._pieces.append((sizes[index], memory))
            else:
                free.remove(fitting)
                memory = fitting[1]
            taken[index] = memory
        return [taken[index] for index in range(len(sizes))]


# The memory of a schedule's buffers is assigned and reused here.
#
# All inputs of a run are in one block. A dispatch never writes to memory that it reads: WebGPU
# doesn't allow one buffer to be read and written in the same dispatch.

ALIGNMENT = 256  # WebGPU's largest min-storage-buffer-offset-alignment


@dataclass(frozen=True)
class Plan:
    """The dispatches: `once` has those that don't depend on a run's inputs, `steps` the others.

    `kept` has the buffers that `once` writes. `slots` has the index of the shared piece of memory
    for each buffer that `steps` write, and `slot_bytes` has the sizes of these pieces.
    """

    once: tuple[Step, ...]
    steps: tuple[Step, ...]
    kept: tuple[Buffer, ...]
    slots: dict[Buffer, int]
    slot_bytes: tuple[int, ...]


def plan(lowered: Lowered, given: Collection[Buffer]) -> Plan:
    """Return the plan for `lowered`; only the input buffers `given` change between runs."""
    changing = _changing(lowered.steps, given)
    once = tuple(step for step in lowered.steps if step.writes not in changing)
    steps = tuple(step for step in lowered.steps if step.writes in changing)
    results = [one.buffer for one in lowered.results if one.buffer is not None]
    slots, slot_bytes = _assign(steps, changing, results)
    kept = tuple(dict.fromkeys(step.writes for step in once))
    return Plan(once, steps, kept, slots, slot_bytes)


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return aligned offsets for pieces of `sizes` in one block, and the block's size, in bytes."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, total


def _changing(steps: Sequence[Step], given: Collection[Buffer]) -> set[Buffer]:
    changing = set(given)
    while True:
        more = {step.writes for step in steps if not changing.isdisjoint(step.bindings)}
        if more <= changing:
            return changing
        changing |= more


def _assign(
    steps: Sequence[Step], changing: set[Buffer], results: Sequence[Buffer]
) -> tuple[dict[Buffer, int], tuple[int, ...]]:
    """Return each written buffer's piece (the best free fit or a new one) and all pieces' sizes."""
    last = {buffer: number for number, step in enumerate(steps) for buffer in step.bindings}
    last |= dict.fromkeys(results, len(steps))
    slots: dict[Buffer, int] = {}
    sizes: list[int] = []
    free: set[int] = set()
    for number, step in enumerate(steps):
        out = step.writes
        if out not in slots:
            fitting = [i for i in free if out.num_bytes <= sizes[i] <= 2 * out.num_bytes]
            if fitting:
                slots[out] = min(fitting, key=lambda i: (sizes[i], i))
                free.discard(slots[out])
            else:
                slots[out] = len(sizes)
                sizes.append(out.num_bytes)
        # Free pieces after `out` got one, so that this dispatch doesn't write to what it reads.
        free |= {slots[one] for one in step.bindings if one in slots and last[one] == number}
    return slots, tuple(sizes)


# Dispatches that are submitted together. The device computes them while the host records the next
# ones, which takes about 20 us each.
DISPATCHES = 256
_RESULT = {torch.float32: np.float32, torch.int64: np.int64, torch.int32: np.int32}


@dataclass(frozen=True)
class Dispatch:
    """A `Step` with its compiled pipeline and its bind group."""

    pipeline: Any
    group: Any
    workgroups: tuple[int, int, int]


@dataclass
class Counts:
    """The operations of a program so far, and the seconds that it spent on recording commands."""

    runs: int = 0
    submissions: int = 0
    read_backs: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    dispatches: int = 0
    pipelines: int = 0
    encode_s: float = 0.0


def compile_step(
    device: Device,
    fn: Function,
    inputs: Sequence[Tensor],
    resident: Sequence[Tensor] = (),
    *,
    fused: bool = True,
) -> Program:
    """Return the program of `fn(*inputs, *resident)`, which returns a flat tuple of tensors.

    See `compile_graph`. Also raises UsageError for operations that can't be captured.
    """
    graph = capture(fn, [*inputs, *resident])
    uploaded = [upload(device, one) for one in resident]
    return compile_graph(device, graph, inputs, uploaded, fused=fused)


def compile_graph(
    device: Device,
    graph: GraphModule,
    inputs: Sequence[Tensor],
    resident: Sequence[Uploaded] = (),
    scratch: Scratch | None = None,
    *,
    fused: bool = True,
) -> Program:
    """Return the program of a captured function of `inputs` and `resident`, for these shapes.

    Programs read `resident` in place, and may share it. Intermediate results are in `scratch`, by
    default in separate memory for this program. Without `fused`, each operation is a separate
    dispatch. Raises UsageError, with the model's source line, for an operation without a kernel,
    and BackendUnavailable for tensors that are too large for the device.
    """
    bindings_max = device.handle.limits["max-storage-buffers-per-shader-stage"]
    lowered = lower(graph, device.limits, bindings_max=bindings_max, fused=fused)
    return Program(device, lowered, inputs, resident, scratch)


class Program:
    """Dispatches with their memory on `device`. A program is not thread-safe."""

    def __init__(
        self,
        device: Device,
        lowered: Lowered,
        inputs: Sequence[Tensor],
        resident: Sequence[Uploaded],
        scratch: Scratch | None = None,
    ) -> None:
        self.counts = Counts()
        self.device = device
        self._lowered = lowered
        self._given = lowered.inputs[: len(inputs)]
        self._shapes = [tuple(tensor.shape) for tensor in inputs]
        self._plan = plan(lowered, self._given)
        self._starts, self._input_bytes = offsets([buffer.num_bytes for buffer in self._given])
        self._host = np.zeros(max(ELEMENT_BYTES, self._input_bytes), np.uint8)
        self._result_starts, self._result_bytes = offsets(
            [_num_bytes(result.shape) for result in lowered.results]
        )
        self._check_sizes()
        # For each buffer that a run needs: the GPU buffer that has it, and at which byte.
        self.places: dict[Buffer, tuple[Any, int]] = {}
        with device.failures():
            self._allocate(resident, scratch or Scratch())
            once = [self._prepare(step) for step in self._plan.once]
            self.dispatches = [self._prepare(step) for step in self._plan.steps]
            self._compute_once(once)
        # Drop the memory that only the dispatches of `once` read.
        needed = {buffer for step in self.steps for buffer in step.bindings}
        needed.update(r.buffer for r in lowered.results if r.buffer is not None)
        self.places = {b: place for b, place in self.places.items() if b in needed}

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of a run, in the order of `dispatches`."""
        return self._plan.steps

    @property
    def memory_bytes(self) -> int:
        """The device memory that intermediate results share, in bytes."""
        return sum(self._plan.slot_bytes)

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """Return the results for `inputs`, in new arrays with the dtypes that torch would return.

        Raises UsageError for shapes that the program was not compiled for and for integers beyond
        32 bits, and BackendUnavailable with wgpu's message if the device fails.
        """
        started = time.perf_counter()
        self._fill(inputs)
        with self.device.failures():
            self._upload()
            for encoder in self._encoded():
                self.counts.encode_s += time.perf_counter() - started
                self.submit(encoder)
                started = time.perf_counter()
            data = self._read()
        results = [
            _unpack(data, start, one.shape, one.dtype)
            for start, one in zip(self._result_starts, self._lowered.results, strict=True)
        ]
        self.counts.runs += 1
        return results

    def _encoded(self) -> Iterator[Any]:
        """Yield encoders with all dispatches, in order; the last one copies the results, too."""
        for start in range(0, max(1, len(self.dispatches)), DISPATCHES):
            encoder = self.device.handle.create_command_encoder()
            self.encode(encoder, self.dispatches[start : start + DISPATCHES])
            if start + DISPATCHES >= len(self.dispatches):
                self._collect(encoder)
            yield encoder

    def encode(self, encoder: Any, dispatches: Sequence[Dispatch]) -> None:
        """Record `dispatches`, in order, as one compute pass."""
        compute = encoder.begin_compute_pass()
        current = None
        for dispatch in dispatches:
            if dispatch.pipeline is not current:
                current = dispatch.pipeline
                compute.set_pipeline(current)
            compute.set_bind_group(0, dispatch.group)
            compute.dispatch_workgroups(*dispatch.workgroups)
        compute.end()
        self.counts.dispatches += len(dispatches)

    def submit(self, encoder: Any) -> None:
        """Submit the recorded commands."""
        self.device.submit(encoder)
        self.counts.submissions += 1

    def _check_sizes(self) -> None:
        largest = max(
            (buffer for step in self._lowered.steps for buffer in step.bindings),
            key=lambda buffer: buffer.num_bytes,
            default=None,
        )
        where = f"backend wgpu on {self.device.name}"
        if largest is not None and largest.num_bytes > self.device.limits.binding_bytes_max:
            step = next(buffer for buffer in self._lowered.steps if largest in buffer.bindings)
            raise BackendUnavailable(
                f"{where}: {step.line}: a tensor of {largest.num_bytes} bytes, but a binding holds "
                f"at most {self.device.limits.binding_bytes_max}; use smaller tensors or another "
                "backend"
            )
        for what, size in (("inputs", self._input_bytes), ("results", self._result_bytes)):
            if size > self.device.buffer_bytes_max:
                raise BackendUnavailable(
                    f"{where}: the {what} of a step take {size} bytes, but a buffer holds at most "
                    f"{self.device.buffer_bytes_max}; use a smaller model or another backend"
                )

    def _allocate(self, resident: Sequence[Uploaded], scratch: Scratch) -> None:
        wgpu = adapters.library()

        gpu, usage = self.device.handle, wgpu.BufferUsage
        storage = usage.STORAGE | usage.COPY_SRC
        self._inputs = gpu.create_buffer(size=self._host.nbytes, usage=storage | usage.COPY_DST)
        for buffer, start in zip(self._given, self._starts, strict=True):
            self.places[buffer] = (self._inputs, start)
        for buffer, uploaded in zip(
            self._lowered.inputs[len(self._given) :], resident, strict=True
        ):
            size = math.prod(uploaded.shape)
            assert (buffer.dtype, buffer.size) == (uploaded.dtype, size), buffer.name
            self.places[buffer] = (uploaded.memory, 0)
        for buffer, tensor in self._lowered.constants:
            self.places[buffer] = (upload(self.device, tensor, buffer.name).memory, 0)
        for buffer in self._plan.kept:
            self.places[buffer] = (gpu.create_buffer(size=buffer.num_bytes, usage=storage), 0)
        shared = scratch.take(self.device, self._plan.slot_bytes)
        self.places |= {uploaded: (shared[slot], 0) for uploaded, slot in self._plan.slots.items()}
        self._staging = gpu.create_buffer(
            size=max(ELEMENT_BYTES, self._result_bytes), usage=usage.MAP_READ | usage.COPY_DST
        )

    def _prepare(self, step: Step) -> Dispatch:
        pipeline = self._pipeline(step.source)
        entries = []
        for number, buffer in enumerate(step.bindings):
            memory, start = self.places[buffer]
            resource = {"buffer": memory, "offset": start, "size": buffer.num_bytes}
            entries.append({"binding": number, "resource": resource})
        group = self.device.handle.create_bind_group(
            layout=pipeline.get_bind_group_layout(0), entries=entries
        )
        return Dispatch(pipeline, group, step.workgroups)

    def _pipeline(self, source: str) -> Any:
        known = self.device.pipelines
        if source not in known:
            module = self.device.handle.create_shader_module(code=source)
            known[source] = self.device.handle.create_compute_pipeline(
                layout="auto", compute={"module": module, "entry_point": "main"}
            )
            self.counts.pipelines += 1
        return known[source]

    def _compute_once(self, dispatches: Sequence[Dispatch]) -> None:
        if dispatches:
            encoder = self.device.handle.create_command_encoder()
            self.encode(encoder, dispatches)
            self.submit(encoder)
        self.counts = Counts(pipelines=self.counts.pipelines)

    def _fill(self, inputs: Sequence[Array]) -> None:
        shapes = [tuple(np.shape(one)) for one in inputs]
        if shapes != self._shapes:
            raise UsageError(f"inputs of shapes {shapes}: the program takes {self._shapes}")
        for array, buffer, start in zip(inputs, self._given, self._starts, strict=True):
            place = self._host[start : start + buffer.num_bytes].view(HOST[buffer.dtype])
            place[:] = device_array(array, buffer.dtype, buffer.name).reshape(-1)

    def _upload(self) -> None:
        if self._given:
            self.device.handle.queue.write_buffer(self._inputs, 0, self._host)
            self.counts.uploads += 1
            self.counts.upload_bytes += self._host.nbytes

    def _collect(self, encoder: Any) -> None:
        """Record the copies of all results to the buffer for the read-back."""
        for start, result in zip(self._result_starts, self._lowered.results, strict=True):
            if result.buffer is None:
                continue
            memory, offset = self.places[result.buffer]
            encoder.copy_buffer_to_buffer(
                *(memory, offset + result.offset * ELEMENT_BYTES, self._staging, start),
                _num_bytes(result.shape),
            )

    def _read(self) -> memoryview:
        wgpu = adapters.library()

        self._staging.map_sync(wgpu.MapMode.READ)
        try:
            self.counts.read_backs += 1
            return memoryview(self._staging.read_mapped(copy=True))
        finally:
            self._staging.unmap()


def _num_bytes(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * ELEMENT_BYTES


def _unpack(data: memoryview, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    """Return a new array of a result, with the dtype that torch would return."""
    raw = np.frombuffer(data, np.uint8, _num_bytes(shape), start)
    if dtype == torch.bool:
        return np.not_equal(raw.view(np.uint32).reshape(shape), 0)
    if dtype == torch.float32:
        return raw.view(np.float32).reshape(shape).copy()
    return raw.view(np.int32).reshape(shape).astype(_RESULT[dtype])
