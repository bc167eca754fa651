"""Any GPU through WebGPU (wgpu-py): WGSL kernels, on Vulkan, Metal or Direct3D.

A software adapter (Mesa's llvmpipe) counts as a device and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from entrenar_py.backends import Pair, linear
from entrenar_py.backends.operands import check_operands
from entrenar_py.backends.wgpu.device import Device, open_device
from entrenar_py.backends.wgpu.matmul import Matmul


class WgpuBackend:
    """See `Backend`. Keeps the device and the compiled kernel; one per process, from `open_wgpu`.

    WGSL leaves the direction of rounding to the device (WGSL, section "Differences from
    IEEE-754"), hence `unit_roundoff` 2^-23.
    """

    name = "wgpu"
    unit_roundoff = 2.0**-23

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernel = Matmul(device)

    @property
    def device(self) -> str:
        """The adapter's name."""
        return self._device.name

    @property
    def software(self) -> bool:
        """True if the adapter is a CPU that emulates a GPU."""
        return self._device.software

    @property
    def submissions(self) -> int:
        """How many command buffers were submitted so far."""
        return self._kernel.submissions

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
            check_operands(a, b, backend=self.name)
        return self._kernel.run([(a.detach(), b.detach()) for a, b in pairs])


@lru_cache(maxsize=1)
def open_wgpu() -> WgpuBackend:
    """The process's wgpu backend, opened on the first call.

    Raises BackendUnavailable when wgpu-py is not installed or no adapter starts.
    """
    return WgpuBackend(open_device())


def opened() -> WgpuBackend | None:
    """The process's wgpu backend if it was opened; opens nothing."""
    return open_wgpu() if open_wgpu.cache_info().currsize else None
