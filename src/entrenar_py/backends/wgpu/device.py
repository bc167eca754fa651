"""Opens a WebGPU adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from entrenar_py.backends.wgpu import adapters
from entrenar_py.backends.wgpu.tiles import Limits
from entrenar_py.errors import BackendUnavailable

# What is asked for as large as the adapter has it; WebGPU's defaults are small.
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

    `pipelines` are those of programs, by their source: equal kernels are compiled once, whoever
    needs them.
    """

    handle: Any
    name: str
    software: bool
    limits: Limits
    buffer_bytes_max: int
    pipelines: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turns what wgpu raises inside into BackendUnavailable, with its words."""
        import wgpu

        try:
            yield
        except (wgpu.GPUError, wgpu.GPUPipelineError, RuntimeError) as error:
            raise BackendUnavailable(f"backend wgpu on {self.name}: {error}") from error

    def lost(self) -> bool:
        """Return whether nothing can be made on the device any more.

        Asked of the device: wgpu-py tells of a loss in its log only, and has no callback for it.
        """
        import wgpu

        try:
            self.handle.create_bind_group_layout(entries=[])
        except wgpu.GPUError:
            return True
        return False

    def submit(self, encoder: Any) -> None:
        """Submit what was recorded.

        Raises BackendUnavailable for a lost device: given a submission to one, wgpu-native ends the
        process. A loss that the driver notices in that very submission can't be seen before it.
        """
        commands = encoder.finish()
        if self.lost():
            raise BackendUnavailable(f"backend wgpu on {self.name}: the device is lost")
        self.handle.queue.submit([commands])


def open_device(index: int) -> Device:
    """The adapter of that index, 0 the best one, opened with the adapter's own limits.

    Raises BackendUnavailable without wgpu-py, without such an adapter, or if it does not start.
    """
    adapter = adapters.choose(adapters.found(), index)
    import wgpu

    try:
        handle = adapter.request_device_sync(
            required_limits={name: adapter.limits[name] for name in LIMITS}
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
    """Return the limits that kernels keep to on a wgpu.GPUDevice."""
    limits = handle.limits
    return Limits(
        binding_bytes_max=limits["max-storage-buffer-binding-size"],
        workgroup_bytes_max=limits["max-compute-workgroup-storage-size"],
        invocations_max=min(
            limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"]
        ),
        workgroups_max=limits["max-compute-workgroups-per-dimension"],
        # SPIR-V stores to a component of a vector, and to nothing else.
        component_writes=handle.adapter.info["backend_type"] == "Vulkan",
    )
