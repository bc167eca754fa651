"""The backends that arithmetic runs on: `cpu`, `cuda` and `wgpu` behind one interface.

Tensors are float32 on the CPU on both sides of the interface; a backend moves them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from entrenar_py.backends.steps import Model, Stepper
from entrenar_py.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Pair = tuple["Tensor", "Tensor"]


class Backend(Protocol):
    """A device that computes steps of training, and multiplies matrices.

    `name` is what it was asked for by, `device` its name for people. `software` is true for an
    emulated GPU. `unit_roundoff` is the largest relative error of one float32 operation: 2^-24
    where results round to nearest, 2^-23 where the direction is the device's choice.
    """

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def software(self) -> bool: ...
    @property
    def unit_roundoff(self) -> float: ...

    def stepper(self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float) -> Stepper:
        """Return a function that computes the loss and the gradients of `workload` at `tensors`.

        The caller changes `tensors` between steps, but for the frozen ones. The function raises
        BackendUnavailable, in the device library's words, when the device fails.
        """
        ...

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


def _open_cuda(index: int | None = None) -> Backend:
    from entrenar_py.backends import cuda

    return cuda.open_cuda(index)


def _open_wgpu(index: int | None = None) -> Backend:
    from entrenar_py.backends import wgpu

    return wgpu.open_wgpu(index)


# Those a machine may have several of: `wgpu:1` is the second.
INDEXED: dict[str, Callable[[int | None], Backend]] = {"cuda": _open_cuda, "wgpu": _open_wgpu}
BACKENDS: dict[str, Callable[[], Backend]] = {
    "cuda": _open_cuda,
    "wgpu": _open_wgpu,
    "cpu": _open_cpu,
}


def open_backend(name: str) -> Backend:
    """Open the backend called `name`, and never another one.

    Raises UsageError for an unknown name, BackendUnavailable (in the device library's own words)
    when it is not there or does not start.
    """
    kind = kind_of(name)
    if name == kind:
        return BACKENDS[kind]()
    return INDEXED[kind](int(name.removeprefix(f"{kind}:")))


def kind_of(name: str) -> str:
    """Return the kind of backend that `name` selects: `wgpu` for `wgpu` and `wgpu:1`.

    Raises UsageError for a name that can't be one.
    """
    kind, colon, index = name.partition(":")
    known = kind in INDEXED if colon else kind in BACKENDS
    if not known or (colon and not (index.isascii() and index.isdigit() and len(index) <= 4)):
        raise UsageError(f"backend={name!r}: allowed are {allowed(BACKENDS)}")
    return kind


def allowed(kinds: Iterable[str]) -> str:
    """Return the names that select a backend of `kinds`, for a message."""
    indexed = [f"{kind}:N" for kind in kinds if kind in INDEXED]
    return ", ".join([*kinds, *indexed])
