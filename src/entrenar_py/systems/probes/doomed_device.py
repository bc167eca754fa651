"""A WebGPU device on which one request fails, really: what is said of it is the adapter's own word.

Everything else is the device's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from entrenar_py.backends import Backend

Struck = Callable[[], None]


def has_adapter(backend: Backend) -> bool:
    """Return whether `backend` computes on a WebGPU adapter, whatever its name."""
    from entrenar_py.backends.wgpu import WgpuBackend

    return isinstance(backend, WgpuBackend)


def open_doomed(kind: str, on_strike: Struck) -> Backend:
    """The best adapter, opened for this alone, with the fault `kind` of `faults.OF_ADAPTERS`.

    `on_strike` is called when it strikes. Raises BackendUnavailable when there is no adapter, and
    as `kind` has it.
    """
    from entrenar_py.backends import wgpu
    from entrenar_py.backends.wgpu.device import open_device

    logging.getLogger("wgpu").addFilter(_is_news)
    device = open_device(0)
    doomed = DOOMS[kind](device.handle, on_strike)
    return wgpu.WgpuBackend(replace(device, handle=doomed), name="wgpu")


def _is_news(record: logging.LogRecord) -> bool:
    """False for what wgpu-py logs of a device that is lost: where that is wanted, it is no news."""
    said = record.getMessage()
    return not ("DEVICE LOST" in said or "was lost (destroyed)" in said)


class Doomed:
    """A wgpu.GPUDevice, `handle`, as those below change it."""

    def __init__(self, handle: Any, on_strike: Struck) -> None:
        self._handle, self._on_strike = handle, on_strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class Lost(Doomed):
    """It is lost while it computes: after the first submission, before its result is read."""

    @property
    def queue(self) -> Any:
        """The device's, which takes one submission."""
        return _LastQueue(self._handle, self._on_strike)


class _LastQueue:
    def __init__(self, handle: Any, on_strike: Struck) -> None:
        self._handle, self._on_strike = handle, on_strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle.queue, name)

    def submit(self, commands: Sequence[Any]) -> None:
        """Submit, and destroy the device."""
        self._handle.queue.submit(commands)
        self._on_strike()
        self._handle.destroy()


class TooLarge(Doomed):
    """Each buffer that is asked for is larger than the adapter allows."""

    def create_buffer(self, *, size: int, **given: Any) -> Any:
        """Asks for four bytes more than the device's limit."""
        self._on_strike()
        return self._handle.create_buffer(
            size=max(size, self._handle.limits["max-buffer-size"] + 4), **given
        )


class Rejecting(Doomed):
    """Each shader that it is given is cut in the middle."""

    def create_shader_module(self, *, code: str, **given: Any) -> Any:
        """Has the first half compiled."""
        self._on_strike()
        return self._handle.create_shader_module(code=code[: len(code) // 2], **given)


DOOMS: dict[str, type[Doomed]] = {
    "device_lost": Lost,
    "too_large": TooLarge,
    "shader_rejected": Rejecting,
}
