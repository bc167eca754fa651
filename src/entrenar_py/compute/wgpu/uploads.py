"""Tensors in a device's memory that many programs read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entrenar_py.compute import adapters
from entrenar_py.compute.wgpu.device import Device
from entrenar_py.compute.wgpu.emitter import ELEMENT_BYTES
from entrenar_py.compute.wgpu.nodes import DTYPES, STORED
from entrenar_py.shared.errors import UsageError

Array = NDArray[Any]

HOST = {"f32": np.float32, "i32": np.int32, "bool": np.uint32}
_INT_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Uploaded:
    """A tensor in device memory, in C order. `memory` is a wgpu.GPUBuffer, a kernel's `dtype`."""

    memory: Any
    dtype: str
    shape: tuple[int, ...]


def upload(device: Device, tensor: Tensor, what: str = "a tensor") -> Uploaded:
    """Copy `tensor` to memory of its own, 16-bit floats and uint8 with the bits that they have.

    Raises UsageError for dtypes that a kernel can't load and for integers beyond 32 bits, and
    BackendUnavailable with wgpu's message if it does not fit.
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
    """Return the bytes of `tensor`, filled up to whole words."""
    held = tensor.reshape(-1).view(torch.uint8).numpy()
    return np.pad(held, (0, -held.size % ELEMENT_BYTES)).view(np.uint32)


def device_array(array: Array, dtype: str, what: str) -> Array:
    """Convert `array` to the device's `dtype`; UsageError for integers beyond 32 bits."""
    if dtype == "i32" and array.dtype.itemsize > ELEMENT_BYTES and array.size:
        low, high = int(array.min()), int(array.max())
        if low < -_INT_MAX - 1 or high > _INT_MAX:
            raise UsageError(
                f"{what} holds integers from {low} to {high}: backend wgpu has integers of "
                "32 bits; use smaller numbers or another backend"
            )
    return np.ascontiguousarray(array, dtype=HOST[dtype])
