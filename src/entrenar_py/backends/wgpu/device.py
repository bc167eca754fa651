"""Opens a WebGPU adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from entrenar_py.backends.wgpu import adapters
from entrenar_py.errors import BackendUnavailable

# Asked for as the adapter has them; WebGPU's own defaults are what the weakest device has.
_LIMITS = (
    "max-buffer-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-storage-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
)


@dataclass(frozen=True)
class Device:
    """An open adapter. `handle` is a wgpu.GPUDevice; the limits are in bytes and workgroups."""

    handle: Any
    name: str
    software: bool
    binding_bytes_max: int
    buffer_bytes_max: int
    workgroups_max: int

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turns what wgpu raises inside into BackendUnavailable, with its words."""
        import wgpu

        try:
            yield
        except (wgpu.GPUError, wgpu.GPUPipelineError, RuntimeError) as error:
            raise BackendUnavailable(f"backend wgpu on {self.name}: {error}") from error

    def lost(self) -> bool:
        """Whether nothing can be made on it any more."""
        import wgpu

        try:
            self.handle.create_buffer(size=16, usage=wgpu.BufferUsage.STORAGE)
        except wgpu.GPUError:
            return True
        return False


def open_device(index: int) -> Device:
    """The adapter of that index, 0 the best one, opened with the adapter's own limits.

    Raises BackendUnavailable without wgpu-py, without such an adapter, or if it does not start.
    """
    adapter = adapters.choose(adapters.found(), index)
    import wgpu

    try:
        handle = adapter.request_device_sync(
            required_limits={name: adapter.limits[name] for name in _LIMITS}
        )
    except (wgpu.GPUError, RuntimeError) as error:
        raise BackendUnavailable(f"backend wgpu: {error}") from error
    return Device(
        handle=handle,
        name=adapters.title(adapter),
        software=adapters.is_software(adapter),
        binding_bytes_max=handle.limits["max-storage-buffer-binding-size"],
        buffer_bytes_max=handle.limits["max-buffer-size"],
        workgroups_max=handle.limits["max-compute-workgroups-per-dimension"],
    )
