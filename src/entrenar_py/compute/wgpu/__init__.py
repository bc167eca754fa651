"""Any GPU through WebGPU (wgpu-py): WGSL kernels, on Vulkan, Metal or Direct3D.

A software adapter, such as Mesa's llvmpipe, can be opened too. Its `software` is true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from entrenar_py.compute import Model, Pair, products
from entrenar_py.compute.wgpu.device import Device, open_device
from entrenar_py.compute.wgpu.matmul import Matmul
from entrenar_py.compute.wgpu.resident import Programs, ResidentStep


class WgpuBackend:
    """A `Backend` that keeps the device and its compiled kernels. Get it from `open_wgpu`.

    `unit_roundoff` is 2^-23 because WGSL lets a device round up or down (section "Differences from
    IEEE-754").
    """

    unit_roundoff = 2.0**-23

    def __init__(self, device: Device, *, name: str) -> None:
        self.name = name
        self._device = device
        self._kernel = Matmul(device)
        self.programs = Programs(device)

    @property
    def device(self) -> str:
        """The adapter's name."""
        return self._device.name

    @property
    def software(self) -> bool:
        """True if the adapter is a CPU that emulates a GPU."""
        return self._device.software

    def lost(self) -> bool:
        """Return whether the device is lost. `open_wgpu` then opens a new device."""
        return self._device.lost()

    @property
    def submissions(self) -> int:
        """The number of command buffers that `products` submitted. Training steps don't count."""
        return self._kernel.submissions

    def stepper(
        self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float
    ) -> ResidentStep:
        """Return a function that computes a step with one upload and one read-back."""
        return ResidentStep(self.programs, workload, tensors, scale)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output.

        Forward and backward take one submission each. The bias is added on the CPU.
        """
        return products.apply(self.products, x, weight, bias)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return one product, computed in one submission."""
        return self.products([(a, b)])[0]

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """Return all products, computed in one submission and one read-back.

        Raises BackendUnavailable if an operand is too large for the adapter, or with wgpu's message
        if the device fails.
        """
        for a, b in pairs:
            products.check_operands(a, b, backend=self.name)
        return self._kernel.run([(a.detach(), b.detach()) for a, b in pairs])


_opened: dict[str, WgpuBackend] = {}


def open_wgpu(index: int | None = None) -> WgpuBackend:
    """Return this process's backend on the adapter with this index, or on the best one for None.

    The backend is opened on the first call, and again after the device was lost. Raises
    BackendUnavailable if wgpu-py is not installed, or if the adapter is missing or does not start.
    """
    name = "wgpu" if index is None else f"wgpu:{index}"
    if name not in _opened or _opened[name].lost():
        _opened[name] = WgpuBackend(open_device(index or 0), name=name)
    return _opened[name]


def opened() -> list[WgpuBackend]:
    """Return the wgpu backends that this process has opened so far."""
    return list(_opened.values())
