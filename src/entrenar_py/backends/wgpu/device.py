"""Finds the best WebGPU adapter and opens it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from entrenar_py.backends.wgpu.product import Limits
from entrenar_py.errors import BackendUnavailable

# What is asked for as large as the adapter has it; WebGPU's defaults are small.
LIMITS = (
    "max-storage-buffer-binding-size",
    "max-buffer-size",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroups-per-dimension",
)


@dataclass(frozen=True)
class Device:
    """An open adapter. `handle` is a wgpu.GPUDevice."""

    handle: Any
    name: str
    software: bool
    limits: Limits
    buffer_bytes_max: int

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turns what wgpu raises inside into BackendUnavailable, with its words."""
        import wgpu

        try:
            yield
        except (wgpu.GPUError, wgpu.GPUPipelineError, RuntimeError) as error:
            raise BackendUnavailable(f"backend wgpu on {self.name}: {error}") from error


def open_device() -> Device:
    """The best adapter of this machine, opened with the adapter's own buffer limits.

    Raises BackendUnavailable without wgpu-py, without an adapter, or if it does not start.
    """
    # Mesa's layer that reorders devices as a desktop wants it. The choice is made here, and where
    # there is no desktop the layer prints "error: XDG_RUNTIME_DIR ..." four times.
    os.environ.setdefault("NODEVICE_SELECT", "1")
    try:
        import wgpu
    except (ImportError, OSError) as error:  # OSError: its native library does not load
        raise BackendUnavailable(
            f"backend wgpu: {error}; install it with pip install 'entrenar-py[wgpu]'"
        ) from error
    try:
        adapter = choose(wgpu.gpu.enumerate_adapters_sync())
        handle = adapter.request_device_sync(
            required_limits={name: adapter.limits[name] for name in LIMITS}
        )
    except (wgpu.GPUError, RuntimeError) as error:
        raise BackendUnavailable(f"backend wgpu: {error}") from error
    return Device(
        handle=handle,
        name=f"{adapter.info['device']} ({adapter.info['backend_type']})",
        software=is_software(adapter),
        limits=limits_of(handle),
        buffer_bytes_max=handle.limits["max-buffer-size"],
    )


def limits_of(handle: Any) -> Limits:
    """What kernels must keep to on a wgpu.GPUDevice."""
    limits = handle.limits
    return Limits(
        binding_bytes_max=limits["max-storage-buffer-binding-size"],
        workgroup_bytes_max=limits["max-compute-workgroup-storage-size"],
        invocations_max=min(
            limits["max-compute-invocations-per-workgroup"], limits["max-compute-workgroup-size-x"]
        ),
        workgroups_max=limits["max-compute-workgroups-per-dimension"],
    )


def choose(adapters: Sequence[Any]) -> Any:
    """Hardware before software, OpenGL only when there is nothing else.

    OpenGL lacks most limits and is emulated by the same drivers that offer Vulkan. Raises
    BackendUnavailable for an empty list.
    """
    if not adapters:
        raise BackendUnavailable(
            "backend wgpu: no adapter on this machine; install a Vulkan driver "
            "(Mesa's mesa-vulkan-drivers has one in software)"
        )
    return min(adapters, key=lambda adapter: (_is_opengl(adapter), is_software(adapter)))


def is_software(adapter: Any) -> bool:
    """True for an adapter that emulates a GPU on the CPU."""
    return bool(adapter.info["adapter_type"] == "CPU")


def _is_opengl(adapter: Any) -> bool:
    return "OpenGL" in adapter.info["backend_type"]
