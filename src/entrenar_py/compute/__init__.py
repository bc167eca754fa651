"""The backends that arithmetic runs on: `cpu`, `cuda` and `wgpu` behind one interface.

Callers pass and receive float32 tensors on the CPU. A backend copies them to its device and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from entrenar_py.compute.steps import Model, Stepper
from entrenar_py.shared.scenario import backend_kind

if TYPE_CHECKING:
    from torch import Tensor

Pair = tuple["Tensor", "Tensor"]


class Stepping(Protocol):
    """The part of a backend that a replica uses."""

    def stepper(self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float) -> Stepper:
        """Return a function that computes the loss and the gradients of `workload` at `tensors`.

        The caller may change all tensors but the frozen ones between steps. If the device fails,
        the function raises BackendUnavailable with the device library's message.
        """
        ...


class Backend(Stepping, Protocol):
    """A device that computes training steps and multiplies matrices.

    `name` is the name that selects it, such as `wgpu:1`. `device` describes the hardware.
    `software` is true for an emulated GPU. `unit_roundoff` is the largest relative error of one
    float32 operation: 2^-24 if results round to nearest, 2^-23 if a device may round up or down.
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
        """Return `x @ weight.T + bias`, differentiable once: [..., in], [out, in], [out]."""
        ...

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a @ b`, [m, k] x [k, n] -> [m, n], for any strides and without a gradient.

        Raises UsageError for other shapes, zero sizes, and tensors that aren't float32 on the CPU.
        """
        ...

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """Return `matmul` of each pair. On wgpu, all share one submission and one read-back."""
        ...


def _open_cpu() -> Backend:
    from entrenar_py.compute import on_torch

    return on_torch.open_cpu()


def _open_cuda(index: int | None = None) -> Backend:
    from entrenar_py.compute import on_torch

    return on_torch.open_cuda(index)


def _open_wgpu(index: int | None = None) -> Backend:
    from entrenar_py.compute import wgpu

    return wgpu.open_wgpu(index)


_BY_INDEX: dict[str, Callable[[int | None], Backend]] = {"cuda": _open_cuda, "wgpu": _open_wgpu}
BACKENDS: dict[str, Callable[[], Backend]] = {
    "cuda": _open_cuda,
    "wgpu": _open_wgpu,
    "cpu": _open_cpu,
}


def open_backend(name: str) -> Backend:
    """Open the backend called `name`, without a fallback to another one.

    Raises UsageError for an unknown name, and BackendUnavailable with the device library's message
    if the device is missing or does not start.
    """
    kind = backend_kind(name)
    if name == kind:
        return BACKENDS[kind]()
    return _BY_INDEX[kind](int(name.removeprefix(f"{kind}:")))
