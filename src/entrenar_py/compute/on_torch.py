"""The CPU and NVIDIA GPUs through torch, in true float32: no TF32."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.compute import Array, DropFunction, Model, Pair, Stepper, products
from entrenar_py.compute.products import check_operands
from entrenar_py.shared.errors import BackendUnavailable
from entrenar_py.shared.untrusted import printing


@dataclass(frozen=True)
class CpuBackend:
    """A `Backend`. `device` names the architecture and the widest vector unit that torch uses."""

    device: str
    name: str = "cpu"
    software: bool = False
    unit_roundoff: float = 2.0**-24

    def stepper(self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float) -> Stepper:
        """Return a function that calls `workload.gradients`."""
        return lambda ids, drop: workload.gradients(tensors, ids, drop=drop, scale=scale)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `torch.nn.functional.linear` of the arguments."""
        return F.linear(x, weight, bias)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a @ b`, computed by torch."""
        check_operands(a, b, backend=self.name)
        return a.detach() @ b.detach()

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """Compute the products one after another."""
        return [self.matmul(a, b) for a, b in pairs]


def open_cpu() -> CpuBackend:
    """Return the CPU backend, which every machine has."""
    return CpuBackend(f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}")


Shapes = tuple[tuple[int, ...], ...]

_RECORDED_MAX = 16  # shapes of a batch to keep recordings of
_PINNED_BYTES_MAX = 2**28  # bytes of one result; torch keeps such memory, and rounds it up to 2^n


@dataclass(frozen=True)
class CudaBackend:
    """A `Backend`. `index` is the GPU's index in torch, and `device` its name."""

    device: str
    index: int
    name: str = "cuda"
    software: bool = False
    unit_roundoff: float = 2.0**-24

    def stepper(self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float) -> Stepper:
        """Return a function that computes the whole step on the GPU."""
        return ResidentStep(self, workload, tensors, scale)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output.

        The products of both passes are computed on the GPU. The bias is added on the CPU.
        """
        return products.apply(self.products, x, weight, bias)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a @ b`, computed by torch on the GPU."""
        products.check_operands(a, b, backend=self.name)
        return (a.detach().to(self.place) @ b.detach().to(self.place)).cpu()

    def products(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """Compute the products one after another."""
        return [self.matmul(a, b) for a, b in pairs]

    @property
    def place(self) -> torch.device:
        """The GPU as a torch device."""
        return torch.device("cuda", self.index)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Convert a RuntimeError of torch into BackendUnavailable with the same message."""
        try:
            yield
        except RuntimeError as error:  # includes OutOfMemoryError and AcceleratorError
            raise BackendUnavailable(f"backend {self.name} on {self.device}: {error}") from error


class ResidentStep:
    """A `Stepper` that keeps a copy of all tensors on the GPU.

    Each call uploads the tensors that training changes as one vector, and downloads loss and
    gradients as one. The operations of a static workload are recorded once for each shape of a
    batch, and then replayed by one call: launching operations takes longer than running them. If
    recording fails, a line on standard error says why.
    """

    def __init__(
        self, backend: CudaBackend, workload: Model, tensors: Mapping[str, Tensor], scale: float
    ) -> None:
        self._backend = backend
        self._workload = workload
        self._trainable = [spec.name for spec in workload.specs if spec.role == "trainable"]
        moving = [spec.name for spec in workload.specs if spec.role != "frozen"]
        self._moving = [tensors[name].detach() for name in moving]
        # recorded operations by the shapes of a batch
        self._seen: dict[Shapes, _Recorded | None] = {}
        self._pool: Any = None  # memory shared by recorded operations
        self._records = workload.is_static
        with backend.failures():
            self._copies = {
                name: tensor.detach().to(backend.place, copy=True)
                for name, tensor in tensors.items()
            }
            self._scale = torch.tensor(scale, device=backend.place)
        self._moved = [self._copies[name] for name in moving]
        for name in self._trainable:
            self._copies[name].requires_grad_()

    def __call__(self, ids: Sequence[int], drop: DropFunction) -> tuple[float, list[Array]]:
        batch = self._workload.batch(ids)
        with self._backend.failures():
            self._upload()
            flat = _on_host(self._computed(batch, drop))
        sizes = [self._copies[name].numel() for name in self._trainable]
        *parts, loss = np.split(flat, np.cumsum(sizes))
        shapes = [tuple(self._copies[name].shape) for name in self._trainable]
        gradients = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return float(loss[0]), gradients

    def _upload(self) -> None:
        whole = _as_one(self._moving).to(self._backend.place)
        parts = torch.split(whole, [one.numel() for one in self._moved])
        shaped = [part.view_as(one) for part, one in zip(parts, self._moved, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(self._moved, shaped)

    def _computed(self, batch: Sequence[Tensor], drop: DropFunction) -> Tensor:
        """Return `_on_device` of a batch on the CPU, with recorded operations if possible."""
        inputs = [tensor.to(self._backend.place) for tensor in batch]
        if not self._records:
            return self._on_device(inputs, drop)
        shapes = tuple(tuple(tensor.shape) for tensor in batch)
        if shapes not in self._seen:
            self._seen[shapes] = None  # in the first run, libraries choose their algorithms
            return self._on_device(inputs, drop)
        recorded = self._seen.pop(shapes) or self._recorded(inputs)
        if recorded is None:
            self._records = False
            return self._on_device(inputs, drop)
        self._seen[shapes] = recorded  # last, as the most recently used
        held = [key for key, tensor in self._seen.items() if tensor is not None]
        for key in held[:-_RECORDED_MAX]:
            self._seen[key] = None
        return recorded(inputs)

    def _recorded(self, inputs: Sequence[Tensor]) -> _Recorded | None:
        """Return recorded operations for such inputs; None if that fails or memory is short."""
        torch.cuda.empty_cache()  # recorded operations have separate memory
        places = [one.clone() for one in inputs]
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                flat = self._on_device(places, _same)
        except RuntimeError as error:  # such as a read of data on the host
            reason = str(error).partition("\n")[0]
            told = f"a step can't be recorded and launches its operations one by one: {reason}"
            printing.warn(told)
            return None
        return _Recorded(graph, places, flat)

    def _on_device(self, inputs: Sequence[Tensor], drop: DropFunction) -> Tensor:
        """Return all gradients and the loss as one vector on the GPU."""
        loss = self._workload.loss_of(self._copies, inputs, linear=F.linear, drop=drop)
        leaves = [self._copies[name] for name in self._trainable]
        gradients = torch.autograd.grad(loss, leaves, grad_outputs=self._scale)
        return torch.cat([*(one.reshape(-1) for one in gradients), loss.detach().reshape(1)])


@dataclass(frozen=True)
class _Recorded:
    """Recorded operations on tensors with fixed addresses."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    result: Tensor

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the result of a replay on `inputs`, which is valid until the next replay."""
        for place, one in zip(self.inputs, inputs, strict=True):
            place.copy_(one)
        self.graph.replay()
        return self.result


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    """Return all float32 tensors as one vector, without a copy if they are adjacent in memory."""
    first, place = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        is_next = tensor.data_ptr() == place and tensor.is_contiguous()
        if not is_next or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        place += tensor.nbytes
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _on_host(vector: Tensor) -> Array:
    """Return a copy in host memory, which the GPU can access directly if the copy is small."""
    host = torch.empty(vector.shape, pin_memory=vector.nbytes <= _PINNED_BYTES_MAX)
    array: Array = host.copy_(vector).numpy()
    return array


def _same(tensor: Tensor) -> Tensor:
    return tensor


def open_cuda(index: int | None = None) -> CudaBackend:
    """Return the backend on the GPU with this index; None means torch's current GPU.

    Disables TF32, which rounds operands to 11 bits, for the whole process, and allows only
    deterministic kernels. Raises BackendUnavailable with torch's message, or with a list of the
    GPUs if none has this index.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
    name = "cuda" if index is None else f"cuda:{index}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        place = torch.cuda.current_device() if index is None else index
    except (AssertionError, RuntimeError) as error:  # a build without CUDA asserts
        raise BackendUnavailable(f"backend cuda: {error}") from error
    if place >= len(devices):
        there = ", ".join(f"cuda:{n} {device}" for n, device in enumerate(devices))
        raise BackendUnavailable(f"backend {name}: this machine has {there or 'none'}")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.use_deterministic_algorithms(True)
    # Reading memory that was never written is a bug in itself; hiding it would cost a pass.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return CudaBackend(devices[place], place, name)
