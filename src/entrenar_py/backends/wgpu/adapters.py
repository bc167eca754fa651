"""The WebGPU adapters of this machine, in the order of the names `wgpu:0`, `wgpu:1` ..."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from entrenar_py.errors import BackendUnavailable


def found() -> list[Any]:
    """Return the adapters (wgpu.GPUAdapter), the best one first. The list may be empty.

    Raises BackendUnavailable if wgpu-py is not installed, or with its message if it fails.
    """
    # Turns off Mesa's layer that reorders devices for a desktop. `ranked` orders them, and without
    # a desktop the layer prints "error: XDG_RUNTIME_DIR ..." four times.
    os.environ.setdefault("NODEVICE_SELECT", "1")
    try:
        import wgpu
    except (ImportError, OSError) as error:  # OSError: its native library does not load
        raise BackendUnavailable(
            f"backend wgpu: {error}; install it with pip install 'entrenar-py[wgpu]'"
        ) from error
    try:
        return ranked(wgpu.gpu.enumerate_adapters_sync())
    except (wgpu.GPUError, RuntimeError) as error:
        raise BackendUnavailable(f"backend wgpu: {error}") from error


def ranked(adapters: Sequence[Any]) -> list[Any]:
    """Sort adapters: hardware before software, OpenGL last.

    OpenGL lacks most limits. An OpenGL adapter is either a duplicate of a Vulkan adapter, or the
    only adapter that an old driver has.
    """
    return sorted(adapters, key=lambda adapter: (is_opengl(adapter), is_software(adapter)))


def choose(adapters: Sequence[Any], index: int) -> Any:
    """Return the adapter at `index`; BackendUnavailable, with a list of adapters, if missing."""
    if not adapters:
        raise BackendUnavailable(
            "backend wgpu: no adapter on this machine; install a Vulkan driver "
            "(Mesa's mesa-vulkan-drivers has one in software)"
        )
    if index >= len(adapters):
        there = ", ".join(f"wgpu:{n} {title(one)}" for n, one in enumerate(adapters))
        raise BackendUnavailable(f"backend wgpu:{index}: this machine has {there}")
    return adapters[index]


def title(adapter: Any) -> str:
    """Return the adapter's name for messages: `NVIDIA H100 (Vulkan)`."""
    return f"{adapter.info['device']} ({adapter.info['backend_type']})"


def is_software(adapter: Any) -> bool:
    """Return whether the adapter emulates a GPU on the CPU."""
    return bool(adapter.info["adapter_type"] == "CPU")


def is_opengl(adapter: Any) -> bool:
    """Return whether the adapter uses OpenGL."""
    return "OpenGL" in adapter.info["backend_type"]
