"""A WebGPU device on which one kind of request really fails, with the adapter's own error.

All other requests go to the device unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from entrenar_py.compute import Backend

Struck = Callable[[], None]


def has_adapter(backend: Backend) -> bool:
    """Return whether `backend` computes on a WebGPU adapter, whatever its name."""
    from entrenar_py.compute.wgpu import WgpuBackend

    return isinstance(backend, WgpuBackend)


def open_doomed(kind: str, on_strike: Struck) -> Backend:
    """Open the best adapter anew, with the fault `kind` of `faults.OF_ADAPTERS`.

    `on_strike` is called when the fault strikes. Raises BackendUnavailable if there is no adapter.
    """
    from entrenar_py.compute import wgpu
    from entrenar_py.compute.wgpu.device import open_device

    logging.getLogger("wgpu").addFilter(_is_news)
    device = open_device(0)
    doomed = DOOMS[kind](device.handle, on_strike)
    return wgpu.WgpuBackend(replace(device, handle=doomed), name="wgpu")


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for wgpu-py's messages about a lost device, which is lost on purpose here."""
    said = record.getMessage()
    return not ("DEVICE LOST" in said or "was lost (destroyed)" in said)


class Doomed:
    """Wraps a wgpu.GPUDevice, `handle`; each subclass makes one kind of request fail."""

    def __init__(self, handle: Any, on_strike: Struck) -> None:
        self._handle, self._on_strike = handle, on_strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class Lost(Doomed):
    """A device that is lost after the first submission, before its result is read."""

    @property
    def queue(self) -> Any:
        """The device's queue, which destroys the device after one submission."""
        return _LastQueue(self._handle, self._on_strike)


class _LastQueue:
    def __init__(self, handle: Any, on_strike: Struck) -> None:
        self._handle, self._on_strike = handle, on_strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle.queue, name)

    def submit(self, commands: Sequence[Any]) -> None:
        """Submit `commands`, and destroy the device."""
        self._handle.queue.submit(commands)
        self._on_strike()
        self._handle.destroy()


class TooLarge(Doomed):
    """A device on which each new buffer is made larger than the adapter allows."""

    def create_buffer(self, *, size: int, **given: Any) -> Any:
        """Ask for a buffer at least four bytes larger than the device's limit."""
        self._on_strike()
        return self._handle.create_buffer(
            size=max(size, self._handle.limits["max-buffer-size"] + 4), **given
        )


class Rejecting(Doomed):
    """A device on which each shader is cut in the middle."""

    def create_shader_module(self, *, code: str, **given: Any) -> Any:
        """Compile the first half of `code`."""
        self._on_strike()
        return self._handle.create_shader_module(code=code[: len(code) // 2], **given)


DOOMS: dict[str, type[Doomed]] = {
    "device_lost": Lost,
    "too_large": TooLarge,
    "shader_rejected": Rejecting,
}
