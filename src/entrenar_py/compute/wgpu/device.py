"""WebGPU devices, and tensors in their memory that many programs read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entrenar_py.compute import adapters
from entrenar_py.compute.wgpu.capture import DTYPES, STORED
from entrenar_py.compute.wgpu.emitter import ELEMENT_BYTES
from entrenar_py.compute.wgpu.tiles import Limits
from entrenar_py.shared.errors import BackendUnavailable, UsageError

# The limits to request at the adapter's maximum. WebGPU's defaults are small.
LIMITS = (
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-buffer-size",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroups-per-dimension",
)


@dataclass(frozen=True)
class Device:
    """An open adapter. `handle` is a wgpu.GPUDevice.

    `pipelines` maps the source of a kernel to its pipeline, so that programs share equal kernels.
    """

    handle: Any
    name: str
    software: bool
    limits: Limits
    buffer_bytes_max: int
    pipelines: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Convert errors of wgpu into BackendUnavailable with the same message."""
        wgpu = adapters.library()

        try:
            yield
        except (wgpu.GPUError, wgpu.GPUPipelineError, RuntimeError) as error:
            raise BackendUnavailable(f"backend wgpu on {self.name}: {error}") from error

    def lost(self) -> bool:
        """Return whether the device is lost.

        This tries to create an object on the device, because wgpu-py reports a loss only in its
        log.
        """
        wgpu = adapters.library()

        try:
            self.handle.create_bind_group_layout(entries=[])
        except wgpu.GPUError:
            return True
        return False

    def submit(self, encoder: Any) -> None:
        """Submit the recorded commands.

        Raises BackendUnavailable if the device is lost, because wgpu-native would end the process.
        A loss during the submission itself can't be caught.
        """
        commands = encoder.finish()
        if self.lost():
            raise BackendUnavailable(f"backend wgpu on {self.name}: the device is lost")
        self.handle.queue.submit([commands])


def open_device(index: int, features: Sequence[str] = ()) -> Device:
    """Return the adapter with this index (0 is the best), opened with its largest limits.

    `features` are WebGPU's names of required features, such as `timestamp-query`.

    Raises BackendUnavailable if wgpu-py or the adapter is missing, or if the adapter does not start
    or kills the process that opens it.
    """
    adapter = adapters.choose(adapters.found(), index)
    adapters.probe(index).require_alive()
    wgpu = adapters.library()

    try:
        handle = adapter.request_device_sync(
            required_features=list(features),
            required_limits={name: adapter.limits[name] for name in LIMITS},
        )
    except (wgpu.GPUError, RuntimeError) as error:
        raise BackendUnavailable(f"backend wgpu: {error}") from error
    return Device(
        handle=handle,
        name=adapters.title(adapter),
        software=adapters.is_software(adapter),
        limits=limits_of(handle),
        buffer_bytes_max=handle.limits["max-buffer-size"],
    )


def limits_of(handle: Any) -> Limits:
    """Return the limits of a wgpu.GPUDevice that kernels must observe."""
    limits = handle.limits
    return Limits(
        binding_bytes_max=limits["max-storage-buffer-binding-size"],
        workgroup_bytes_max=limits["max-compute-workgroup-storage-size"],
        invocations_max=min(
            limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"]
        ),
        workgroups_max=limits["max-compute-workgroups-per-dimension"],
        # SPIR-V can store to a single component of a vector.
        component_writes=handle.adapter.info["backend_type"] == "Vulkan",
    )


Array = NDArray[Any]

HOST = {"f32": np.float32, "i32": np.int32, "bool": np.uint32}
_INT_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Uploaded:
    """A tensor in device memory, in C order; `dtype` is its dtype in kernels.

    `memory` is a wgpu.GPUBuffer.
    """

    memory: Any
    dtype: str
    shape: tuple[int, ...]


def upload(device: Device, tensor: Tensor, what: str = "a tensor") -> Uploaded:
    """Return a copy of `tensor` in device memory; 16-bit floats and uint8 keep their bits.

    Raises UsageError for dtypes that a kernel can't load and for integers beyond 32 bits, and
    BackendUnavailable with wgpu's message if the tensor does not fit.
    """
    wgpu = adapters.library()

    dtype = DTYPES.get(tensor.dtype) or STORED.get(tensor.dtype)
    if dtype is None:
        raise UsageError(
            f"{what}: dtype={tensor.dtype}; backend wgpu computes in "
            f"{', '.join(str(one) for one in DTYPES)}: cast it, or use another backend"
        )
    held = tensor.detach().contiguous()
    array = device_array(held.numpy(), dtype, what) if dtype in HOST else _words(held)
    # A device has no memory of size 0.
    array = array if array.size else np.zeros(1, np.uint32)
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    with device.failures():
        memory = device.handle.create_buffer_with_data(data=array, usage=usage)
    return Uploaded(memory, dtype, tuple(tensor.shape))


def _words(tensor: Tensor) -> Array:
    """Return the bytes of `tensor`, padded to whole words."""
    held = tensor.reshape(-1).view(torch.uint8).numpy()
    return np.pad(held, (0, -held.size % ELEMENT_BYTES)).view(np.uint32)


def device_array(array: Array, dtype: str, what: str) -> Array:
    """Return `array` in the device's `dtype`. Raises UsageError for integers beyond 32 bits."""
    if dtype == "i32" and array.dtype.itemsize > ELEMENT_BYTES and array.size:
        low, high = int(array.min()), int(array.max())
        if low < -_INT_MAX - 1 or high > _INT_MAX:
            raise UsageError(
                f"{what} holds integers from {low} to {high}: backend wgpu has integers of "
                "32 bits; use smaller numbers or another backend"
            )
    return np.ascontiguousarray(array, dtype=HOST[dtype])
