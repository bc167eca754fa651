"""Any GPU through WebGPU (wgpu-py): WGSL kernels, on Vulkan, Metal or Direct3D.

A software adapter (Mesa's llvmpipe) counts as a device and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from entrenar_py.backends import Pair, linear
from entrenar_py.backends.steps import Model
from entrenar_py.backends.wgpu.device import Device, open_device
from entrenar_py.backends.wgpu.matmul import Matmul
from entrenar_py.backends.wgpu.resident import Programs, ResidentStep


class WgpuBackend:
    """See `Backend`. Keeps the device and the compiled kernel; one per process, from `open_wgpu`.

    `name` is the one that it was asked for by.

    WGSL leaves the direction of rounding to the device (WGSL, section "Differences from
    IEEE-754"), hence `unit_roundoff` 2^-23.
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
        """Return whether the device is gone; opening the backend again gives a new one."""
        return self._device.lost()

    @property
    def submissions(self) -> int:
        """The number of command buffers of products submitted so far; `programs` count theirs."""
        return self._kernel.submissions

    def stepper(
        self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float
    ) -> ResidentStep:
        """Compute the whole step on the device, in one submission and one read-back."""
        return ResidentStep(self.programs, workload, tensors, scale)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One submission forward, one backward; the bias is added on the CPU."""
        return linear.apply(self.products, x, weight, bias)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """One product in one submission."""
        return self.products([(a, b)])[0]

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """All products in one command buffer, one submission and one read-back.

        Raises BackendUnavailable when an operand is larger than the adapter takes, or with the
        adapter's own words when it fails.
        """
        for a, b in pairs:
            linear.check_operands(a, b, backend=self.name)
        return self._kernel.run([(a.detach(), b.detach()) for a, b in pairs])


_opened: dict[str, WgpuBackend] = {}


def open_wgpu(index: int | None = None) -> WgpuBackend:
    """The process's backend on the adapter of that index, the best one where none is given.

    Opened on the first call, and again after it was lost. Raises BackendUnavailable when wgpu-py is
    not installed, there is no such adapter, or it does not start.
    """
    name = "wgpu" if index is None else f"wgpu:{index}"
    if name not in _opened or _opened[name].lost():
        _opened[name] = WgpuBackend(open_device(index or 0), name=name)
    return _opened[name]


def opened() -> list[WgpuBackend]:
    """The process's wgpu backends that were opened so far; opens nothing."""
    return list(_opened.values())
