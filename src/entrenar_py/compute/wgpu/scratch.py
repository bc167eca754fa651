"""Memory for intermediate results that the programs of one workload share.

A program uses it from the beginning of a run to its end, and programs of one device run one after
another. So a program for smaller shapes than those before takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entrenar_py.compute import adapters
from entrenar_py.compute.wgpu.device import Device


class Scratch:
    """Pieces of device memory, which grow in number and never shrink."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Any]] = []  # size in bytes, wgpu.GPUBuffer

    @property
    def num_bytes(self) -> int:
        """The size of all pieces together."""
        return sum(size for size, _ in self._pieces)

    def take(self, device: Device, sizes: Sequence[int]) -> list[Any]:
        """Return a piece of at least each of `sizes`, in bytes, no piece twice.

        The largest size gets the smallest piece that it fits into, and so on; what fits into none
        that is left gets a new one.
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
