"""The WebGPU adapters of this machine, in the order in which `wgpu:0`, `wgpu:1` name them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from entrenar_py.errors import BackendUnavailable


def found() -> list[Any]:
    """The adapters (wgpu.GPUAdapter), the best one first; it may be none.

    Raises BackendUnavailable without wgpu-py, or when it fails, in its words.
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
        return ranked(wgpu.gpu.enumerate_adapters_sync())
    except (wgpu.GPUError, RuntimeError) as error:
        raise BackendUnavailable(f"backend wgpu: {error}") from error


def ranked(adapters: Sequence[Any]) -> list[Any]:
    """Hardware before software, OpenGL last, else as they come.

    OpenGL lacks most limits and is emulated by the same drivers that offer Vulkan: an adapter of
    OpenGL is another one's duplicate, or all that an old driver has.
    """
    return sorted(adapters, key=lambda adapter: (is_opengl(adapter), is_software(adapter)))


def choose(adapters: Sequence[Any], index: int) -> Any:
    """The one at `index`; BackendUnavailable, listing those there are, if there is none."""
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
    """Its name for people: `NVIDIA H100 (Vulkan)`."""
    return f"{adapter.info['device']} ({adapter.info['backend_type']})"


def is_software(adapter: Any) -> bool:
    """True for an adapter that emulates a GPU on the CPU."""
    return bool(adapter.info["adapter_type"] == "CPU")


def is_opengl(adapter: Any) -> bool:
    """True for one that is reached through OpenGL."""
    return "OpenGL" in adapter.info["backend_type"]
