"""Where arithmetic runs: `cpu`, `cuda` and `wgpu` behind one interface.

Tensors are float32 on the CPU on both sides of the interface; a backend moves them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from entrenar_py.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Pair = tuple["Tensor", "Tensor"]


class Backend(Protocol):
    """A device that multiplies matrices.

    `device` is its name for people. `software` is true for an emulated GPU. `unit_roundoff` is the
    largest relative error of one float32 operation: 2^-24 where results round to nearest, 2^-23
    where the direction is the device's choice.
    """

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def software(self) -> bool: ...
    @property
    def unit_roundoff(self) -> float: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`, differentiable once: [..., in], [out, in], [out] -> [..., out]."""
        ...

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b`, [m, k] x [k, n] -> [m, n], any strides, no gradient.

        Raises UsageError for other shapes, zero sizes, or what is not float32 on the CPU.
        """
        ...

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """`matmul` of each pair, together: on wgpu one submission and one read-back."""
        ...


def _open_cpu() -> Backend:
    from entrenar_py.backends import cpu

    return cpu.open_cpu()


def _open_cuda() -> Backend:
    from entrenar_py.backends import cuda

    return cuda.open_cuda()


def _open_wgpu() -> Backend:
    from entrenar_py.backends import wgpu

    return wgpu.open_wgpu()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "cuda": _open_cuda,
    "wgpu": _open_wgpu,
    "cpu": _open_cpu,
}


def open_backend(name: str) -> Backend:
    """The backend called `name`; never another one.

    Raises UsageError for an unknown name, BackendUnavailable (in the device library's own words)
    when it is not there or does not start.
    """
    if name not in BACKENDS:
        raise UsageError(f"backend={name!r}: allowed are {', '.join(BACKENDS)}")
    return BACKENDS[name]()
