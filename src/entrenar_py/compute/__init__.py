"""The backends for arithmetic: `cpu`, `cuda` and `wgpu` with one interface.

Callers pass and receive float32 tensors on the CPU. A backend copies them to its device and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from entrenar_py.shared.scenario import backend_kind as kind_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Array: TypeAlias = "NDArray[np.float32]"

# (x [rows, in], weight [out, in], bias [out] or None) -> [rows, out], as `F.linear`.
LinearFunction: TypeAlias = "Callable[[Tensor, Tensor, Tensor | None], Tensor]"
# x of any shape -> the same shape: dropout, or the identity.
DropFunction: TypeAlias = "Callable[[Tensor], Tensor]"
# All tensors of a model by name, on one device.
Tensors: TypeAlias = "Mapping[str, Tensor]"
Batch: TypeAlias = "Sequence[Tensor]"  # ids of the samples of a step

# (sample ids, at least one; drop) -> the summed loss, and the scaled gradient of each trainable
# tensor, in the order and with the shapes of the specs, float32 on the host.
Stepper: TypeAlias = "Callable[[Sequence[int], DropFunction], tuple[float, list[Array]]]"


class Spec(Protocol):
    """A tensor of a model: `role` is trainable, frozen, or buffer."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...


class Model(Protocol):
    """The part of a `train.arithmetic.tensors.Workload` that a backend uses."""

    @property
    def specs(self) -> Sequence[Spec]: ...

    @property
    def draws(self) -> bool:
        """True if `loss_of` draws random numbers itself, with the key from `key_of(drop)`."""

    @property
    def is_static(self) -> bool:
        """True if `loss_of` runs the same operations on all batches of the same shapes."""

    @property
    def may_wait(self) -> bool:
        """True if `batch` may wait for data that are still being produced."""

    @property
    def constants(self) -> Tensors:
        """The workload's own tensors, by name; they never change, and replicas hold no copies.

        `loss_of` can use them. A backend with memory of its own passes its copies to `loss_of`, by
        name.
        """

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the tensors of the samples `ids`, on the CPU."""

    def loss_of(
        self, tensors: Tensors, batch: Batch, *, linear: LinearFunction, drop: DropFunction
    ) -> Tensor:
        """Return the loss summed over a batch, 0-d."""

    def gradients(
        self, tensors: Tensors, ids: Sequence[int], *, drop: DropFunction, scale: float
    ) -> tuple[float, list[Array]]:
        """Return the loss, and `scale` times its gradient for each trainable tensor, on the CPU."""


Pair = tuple["Tensor", "Tensor"]


class Stepping(Protocol):
    """The part of a backend that a replica uses."""

    def stepper(self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float) -> Stepper:
        """Return a function that computes the loss and the gradients of `workload` at `tensors`.

        Between steps, the caller may change all tensors except frozen ones. An
        `on_torch.ResidentStep` learns of a change only by a call of its `changed`. If the device
        fails, the function raises BackendUnavailable with the device library's message.
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
        """Return `x @ weight.T + bias` for x [..., in], weight [out, in] and bias [out].

        The result is differentiable once.
        """
        ...

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a @ b`, [m, k] x [k, n] -> [m, n], for any strides and without a gradient.

        Raises UsageError for other shapes, zero sizes, and tensors that aren't float32 on the CPU.
        """
        ...

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """Return `matmul` of each pair.

        On wgpu, all pairs share one submission and one read-back.
        """
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
    """Return the backend called `name`, opened without a fallback.

    Raises UsageError for an unknown name, and BackendUnavailable with the device library's message
    if the device is missing or does not start.
    """
    kind = kind_of(name)
    if name == kind:
        return BACKENDS[kind]()
    return _BY_INDEX[kind](int(name.removeprefix(f"{kind}:")))
