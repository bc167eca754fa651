"""Counts of calls to wgpu-py, and of operations that the CPU computes meanwhile.

The counts don't come from the backend, because their purpose is to check it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from entrenar_py import compute as backends
from entrenar_py.compute import adapters
from entrenar_py.compute.wgpu import WgpuBackend
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Meter:
    """The counts so far. `on_host` names the operations that computed on the CPU."""

    submissions: int = 0
    read_backs: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    dispatches: int = 0
    compiled: int = 0
    traced: int = 0
    on_host: list[str] = field(default_factory=list)
    _resting: int = 0

    def leaving_out(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, wrapped so that its operations and submissions are not counted."""

        def call(*arguments: P.args, **keywords: P.kwargs) -> R:
            self._resting += 1
            try:
                return function(*arguments, **keywords)
            finally:
                self._resting -= 1

        return call

    def submitted(self, *arguments: Any, **keywords: Any) -> None:
        self.submissions += not self._resting

    def dispatched(self, *arguments: Any, **keywords: Any) -> None:
        self.dispatches += 1

    def compiling(self, *arguments: Any, **keywords: Any) -> None:
        self.compiled += 1

    def mapped(self, *arguments: Any, **keywords: Any) -> None:
        self.read_backs += 1

    def written(self, *arguments: Any, data: Any = None, **keywords: Any) -> None:
        """Count an upload of `data`, or of the argument that is neither a buffer nor an offset."""
        kinds = (np.ndarray, bytes, bytearray, memoryview)
        given = data if data is not None else next(a for a in arguments if isinstance(a, kinds))
        self.uploads += 1
        self.upload_bytes += np.asarray(given).nbytes

    def computed(self, name: str, tensors: list[Tensor]) -> None:
        """Count operation `name` with operands and results `tensors`."""
        if self._resting:
            return
        if any(isinstance(one, FakeTensor) or one.device.type == "meta" for one in tensors):
            self.traced += 1
        else:
            self.on_host.append(name)


def open_adapter(scenario: Scenario) -> WgpuBackend:
    """Return the scenario's first backend, which must be a wgpu adapter.

    Raises UsageError for any other backend, BackendUnavailable if it can't be opened.
    """
    backend = backends.open_backend(scenario.backends[0])
    if not isinstance(backend, WgpuBackend):
        raise UsageError(
            f"backends={list(scenario.backends)} on system {scenario.system}: use wgpu or wgpu:N"
        )
    return backend


@contextmanager
def watching() -> Iterator[Meter]:
    """Yield a meter of the block's calls and operations, on any wgpu device of this process."""
    meter, native = Meter(), adapters.native()
    with ExitStack() as stack:
        for owner, name, report in (
            (native.GPUQueue, "submit", meter.submitted),
            (native.GPUQueue, "write_buffer", meter.written),
            (native.GPUBuffer, "write_mapped", meter.written),
            (native.GPUBuffer, "read_mapped", meter.mapped),
            (native.GPUDevice, "create_buffer_with_data", meter.written),
            (native.GPUDevice, "create_shader_module", meter.compiling),
            (native.GPUDevice, "create_compute_pipeline", meter.compiling),
            (native.GPUComputePassEncoder, "dispatch_workgroups", meter.dispatched),
        ):
            told_first = _telling(getattr(owner, name), report)
            stack.enter_context(patch.object(owner, name, told_first))
        # Whenever it maps memory, the library submits an empty command list, to make progress.
        mapping = meter.leaving_out(native.GPUBuffer.map_async)
        stack.enter_context(patch.object(native.GPUBuffer, "map_async", mapping))
        stack.enter_context(_Operations(meter))
        yield meter


def _telling(function: Callable[..., Any], told: Callable[..., None]) -> Callable[..., Any]:
    def call(owner: Any, *arguments: Any, **keywords: Any) -> Any:
        told(*arguments, **keywords)
        return function(owner, *arguments, **keywords)

    return call


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports each operation that computes new data, but not views and shapes, to the meter."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        views = any(one.alias_info is not None for one in func._schema.returns)
        if not views and func.namespace != "prim":
            tensors = [o for o in pytree.tree_leaves((args, result)) if isinstance(o, Tensor)]
            self._meter.computed(str(func), tensors)
        return result
