"""The CPU and NVIDIA GPUs through torch, in true float32: no TF32."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
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
    """The CPU as a `Backend`; `device` names its architecture and widest vector unit."""

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
    """An NVIDIA GPU as a `Backend`: `index` is its index in torch, and `device` its name."""

    device: str
    index: int
    name: str = "cuda"
    software: bool = False
    unit_roundoff: float = 2.0**-24

    def stepper(self, workload: Model, tensors: Mapping[str, Tensor], *, scale: float) -> Stepper:
        """Return a `ResidentStep`, which computes the whole step on the GPU."""
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
        """Select this GPU, and convert torch's RuntimeErrors into BackendUnavailable, in a context.

        The message stays the same. Streams, recordings and pinned memory belong to the GPU in use.
        """
        try:
            with torch.cuda.device(self.index):
                yield
        except RuntimeError as error:  # includes OutOfMemoryError and AcceleratorError
            raise BackendUnavailable(f"backend {self.name} on {self.device}: {error}") from error


class DeviceStep:
    """The forward and backward pass of a workload on a torch device, with all tensors there.

    `weights` has the trainable tensors as one vector, float32 [num_trainable], and `tensors` has
    all tensors by name: the trainable ones are views of the vector. Calls return loss and gradients
    as one vector on the device. On CUDA, the operations of a static workload are recorded once for
    each shape of a batch, and then replayed by one call: launching operations takes longer than
    running them. If recording fails, a line on standard error says why.
    """

    def __init__(
        self, place: torch.device, workload: Model, tensors: Mapping[str, Tensor], scale: float
    ) -> None:
        """`weights` are not set yet; all other tensors are copied. `scale` is of the gradients."""
        self.place, self._workload = place, workload
        self._trainable = [spec.name for spec in workload.specs if spec.role == "trainable"]
        self._shapes = [tensors[name].shape for name in self._trainable]
        self._sizes = [shape.numel() for shape in self._shapes]
        # recorded operations by the shapes of a batch
        self._seen: dict[Shapes, _Recorded | None] = {}
        self._pool: Any = None  # memory shared by recorded operations
        self._records = workload.is_static and place.type == "cuda"
        self.weights = torch.empty(sum(self._sizes), device=place)
        self.tensors = {
            name: tensor.detach().to(place, copy=True)
            for name, tensor in tensors.items()
            if name not in self._trainable
        }
        for name, part in self.parts(self.weights).items():
            self.tensors[name] = part.detach().requires_grad_()
        self._scale = torch.tensor(scale, device=place)

    def parts(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the part of each trainable tensor in `vector`, [num_trainable], by name."""
        pieces = zip(self._trainable, self._shapes, torch.split(vector, self._sizes), strict=True)
        return {name: piece.view(shape) for name, shape, piece in pieces}

    def computed(self, batch: Sequence[Tensor], drop: DropFunction) -> Tensor:
        """Return the gradients, times the scale, and the loss of a batch that is on the CPU.

        They are float32 [num_trainable + 1], and valid until the next call.
        """
        inputs = [placed(tensor, self.place) for tensor in batch]
        if not self._records:
            return self._on_device(inputs, drop)
        shapes = _shapes(batch)
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
        loss = self._workload.loss_of(self.tensors, inputs, linear=F.linear, drop=drop)
        leaves = [self.tensors[name] for name in self._trainable]
        gradients = torch.autograd.grad(loss, leaves, grad_outputs=self._scale)
        return torch.cat([*(one.reshape(-1) for one in gradients), loss.detach().reshape(1)])


Result = tuple[float, list[Array]]  # of a `Stepper`


@dataclass(frozen=True)
class Begun:
    """A step that the GPU has started; `wait` returns its result on the host.

    `gradients` is the same gradient as one vector on the GPU, float32 [num_trainable].
    """

    gradients: Tensor
    wait: Callable[[], Result]


class ResidentStep(DeviceStep):
    """A `Stepper` that keeps a copy of all tensors on the GPU.

    After changing tensors on the host, call `changed`: the next step then uploads them. Loss and
    gradients are downloaded as one vector.
    """

    def __init__(
        self, backend: CudaBackend, workload: Model, tensors: Mapping[str, Tensor], scale: float
    ) -> None:
        self._backend = backend
        with backend.failures():
            super().__init__(backend.place, workload, tensors, scale)
            self._fetching = torch.cuda.Stream(backend.place)  # type: ignore[no-untyped-call]
        buffers = [spec.name for spec in workload.specs if spec.role == "buffer"]
        self._host = [tensors[name].detach() for name in self._trainable]
        self._host_buffers = [tensors[name].detach() for name in buffers]
        self._buffers = [self.tensors[name] for name in buffers]
        # whether the GPU's copies equal the host's tensors; all of them, the buffers
        self._is_current = self._has_buffers = False

    def __call__(self, ids: Sequence[int], drop: DropFunction) -> Result:
        batch = self._workload.batch(ids)
        with self._backend.failures():
            self.upload()
            return self._fetch(self.computed(batch, drop))()

    def begin(self, ids: Sequence[int]) -> Begun | None:
        """Start the step of `ids` without dropout.

        Returns None, and starts nothing, if this call could block: if the operations are not
        recorded (they would be launched one by one), if the result is too large to be copied while
        the GPU computes, or if the workload may wait for samples.
        """
        is_large = 4 * (sum(self._sizes) + 1) > _PINNED_BYTES_MAX
        if not self._records or is_large or self._workload.may_wait:
            return None
        batch = self._workload.batch(ids)
        if self._seen.get(_shapes(batch)) is None:
            return None
        with self._backend.failures():
            self.upload()
            flat = self.computed(batch, _same).clone()  # the next replay writes to the result
            return Begun(flat[:-1], self._fetch(flat))

    @property
    def failures(self) -> Callable[[], AbstractContextManager[None]]:
        """See `CudaBackend.failures`."""
        return self._backend.failures

    def changed(self) -> None:
        """Upload the host's tensors before the next step."""
        self._is_current = self._has_buffers = False

    def changed_buffers(self) -> None:
        """Upload the host's buffers before the next step."""
        self._has_buffers = False

    def upload(self) -> None:
        """Copy the host's tensors to the GPU, unless its copies have the same values."""
        with torch.no_grad():
            if not self._is_current:
                self.weights.copy_(_as_one(self._host))
            if not self._has_buffers:
                for copy, tensor in zip(self._buffers, self._host_buffers, strict=True):
                    copy.copy_(tensor)
        self._is_current = self._has_buffers = True

    def _fetch(self, flat: Tensor) -> Callable[[], Result]:
        """Start to copy a result to the host; return a function that waits for the copy.

        The GPU can write directly to pinned memory, and computes meanwhile, but must not change
        `flat`. A large result is copied at once.
        """
        if flat.nbytes > _PINNED_BYTES_MAX:
            result = self._parts(flat.cpu().numpy())
            return lambda: result
        host = torch.empty(flat.shape, pin_memory=True)
        self._fetching.wait_stream(torch.cuda.current_stream(self._backend.place))
        with torch.cuda.stream(self._fetching):
            host.copy_(flat, non_blocking=True)
            copied = self._fetching.record_event()
        flat.record_stream(self._fetching)

        def wait() -> Result:
            with self._backend.failures():
                copied.synchronize()
            return self._parts(host.numpy())

        return wait

    def _parts(self, flat: Array) -> Result:
        *parts, loss = np.split(flat, np.cumsum(self._sizes))
        shapes = [tuple(tensor.shape) for tensor in self._host]
        gradients = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return float(loss[0]), gradients


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


def placed(tensor: Tensor, place: torch.device) -> Tensor:
    """Return a tensor of the CPU on `place`, without waiting for the device."""
    if place.type != "cuda":
        return tensor.to(place)
    # From pageable memory, a copy would wait until the GPU has done all earlier work.
    return tensor.pin_memory().to(place, non_blocking=True)


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    """Return all float32 tensors as one vector, without a copy if they are adjacent in memory."""
    first, place = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        is_next = tensor.data_ptr() == place and tensor.is_contiguous()
        if not is_next or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        place += tensor.nbytes
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _shapes(tensors: Sequence[Tensor]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors)


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
    _let_memory_grow()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    # use_deterministic_algorithms would also import torch's compiler, which takes seconds. So code
    # that compiles has to tell it.
    torch.set_deterministic_debug_mode("error")
    # Reading memory that was never written is a bug in itself; hiding it would cost a pass.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return CudaBackend(devices[place], place, name)


def _let_memory_grow() -> None:
    """Let torch enlarge blocks of GPU memory, unless somebody has configured its allocator.

    Otherwise a batch of another shape needs blocks of its own, and the old ones stay reserved. On
    Windows, and on Linux inside of it, drivers can't do it, or fail later (pytorch#192330).
    """
    is_set = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    is_windows = sys.platform != "linux" or "microsoft" in platform.release().lower()
    if is_set or is_windows or torch.version.cuda is None:
        return
    renamed = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # by newer torch
    configure = renamed or torch.cuda.memory._set_allocator_settings
    configure("expandable_segments:True")


_C_COMPILERS = ("cc", "gcc", "clang")  # Triton's choices without $CC


def compiler_problem() -> str:
    """Return why torch can't compile kernels for CUDA in this process; "" if it can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if "CC" not in os.environ and not any(map(shutil.which, _C_COMPILERS)):
        return f"there is no C compiler, which triton needs ({', '.join(_C_COMPILERS)}, or $CC)"
    return ""
