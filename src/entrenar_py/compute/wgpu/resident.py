"""Training steps on one device, captured and compiled once for each number of samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from blake3 import blake3
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute import Array, DropFunction, Model, Tensors, draws
from entrenar_py.compute.wgpu.capture import Function, capture
from entrenar_py.compute.wgpu.device import Device, Uploaded, upload
from entrenar_py.compute.wgpu.program import Program, Scratch, compile_graph

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
# (all tensors of a model by name, the inputs of a program) -> its results
Body: TypeAlias = Callable[[Tensors, Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Key:
    """The properties of a step that determine its graph, besides the model.

    `shapes` has the shapes of the batch. `masked` is true if dropout masks are inputs.
    """

    shapes: Shapes
    masked: bool
    scale: float


@dataclass
class Compiled:
    """The graphs of one workload, the programs compiled from them, and their shared memory.

    A program's key is its graph's key and the BLAKE3 digest of the replica's frozen tensors.
    `frozen` has these tensors on the device by digest, `constants` the workload's constants. All
    programs read the same copies, and use the same `scratch` for intermediate results.
    """

    graphs: dict[Hashable, GraphModule] = field(default_factory=dict)
    programs: dict[tuple[Hashable, str], Program] = field(default_factory=dict)
    frozen: dict[str, list[Uploaded]] = field(default_factory=dict)
    constants: list[Uploaded] | None = None
    scratch: Scratch = field(default_factory=Scratch)


class Programs:
    """The programs compiled for one device, shared by all replicas of a workload."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: WeakKeyDictionary[Model, Compiled] = WeakKeyDictionary()

    def of(self, workload: Model) -> Compiled:
        """Return the graphs and programs of `workload`, which are kept while it exists."""
        return self._known.setdefault(workload, Compiled())


class Resident:
    """The tensors of one replica of a workload, and the programs that compute with them.

    Frozen tensors and the workload's constants stay on the device. All other tensors and the inputs
    of a program are uploaded together for each run. `tensors` has all tensors except the constants,
    by name.
    """

    def __init__(self, programs: Programs, workload: Model, tensors: Mapping[str, Tensor]) -> None:
        self._device = programs.device
        self._compiled = programs.of(workload)
        self.tensors = tensors
        self.moving = [spec.name for spec in workload.specs if spec.role != "frozen"]
        self.frozen = [spec.name for spec in workload.specs if spec.role == "frozen"]
        self._constants = workload.constants
        self._digest = _digest([tensors[name] for name in self.frozen])

    def run(self, key: Hashable, body: Body, tensors: Sequence[Tensor]) -> list[Array]:
        """Return the results of `body`, with one upload and one read-back.

        The program is compiled once for each `key`, which must determine `body` up to the values of
        tensors.
        """
        inputs = self._inputs(tensors)
        programs = self._compiled.programs
        if (key, self._digest) not in programs:
            graph = self.graph(key, body, tensors)
            uploaded, scratch = self._uploaded(), self._compiled.scratch
            program = compile_graph(self._device, graph, inputs, uploaded, scratch)
            programs[key, self._digest] = program
        return programs[key, self._digest].run([x.detach().numpy() for x in inputs])

    def graph(self, key: Hashable, body: Body, tensors: Sequence[Tensor]) -> GraphModule:
        """Return the graph of `body`, captured once for each `key`."""
        graphs = self._compiled.graphs
        if key not in graphs:
            graphs[key] = capture(self._function(body, len(tensors)), self.inputs(tensors))
        return graphs[key]

    def inputs(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of the graph of a function that is called with the tensors `given`."""
        return [*self._inputs(given), *self._resident()]

    def _function(self, body: Body, num_given: int) -> Function:
        """Return `body` as a function of tensors in the order of `inputs`."""

        def compute(*inputs: Tensor) -> tuple[Tensor, ...]:
            rest = iter(inputs)
            tensors = {name: next(rest) for name in self.moving}
            given = [next(rest) for _ in range(num_given)]
            tensors |= {name: next(rest) for name in (*self.frozen, *self._constants)}
            return body(tensors, given)

        return compute

    def _inputs(self, given: Sequence[Tensor]) -> list[Tensor]:
        return [*(self.tensors[name] for name in self.moving), *given]

    def _resident(self) -> list[Tensor]:
        return [*(self.tensors[name] for name in self.frozen), *self._constants.values()]

    def _uploaded(self) -> list[Uploaded]:
        """Return `_resident()` on the device, the same copy for all programs."""
        known = self._compiled
        if self._digest not in known.frozen:
            frozen = [(name, self.tensors[name]) for name in self.frozen]
            known.frozen[self._digest] = [
                upload(self._device, array, name) for name, array in frozen
            ]
        if known.constants is None:
            held = self._constants.items()
            known.constants = [upload(self._device, array, name) for name, array in held]
        return [*known.frozen[self._digest], *known.constants]


class ResidentStep:
    """A `Stepper` that keeps frozen tensors and the workload's constants on the device.

    Each step uploads all other tensors, the batch and the dropout masks together, and reads the
    loss and the gradients back together.
    """

    def __init__(
        self, programs: Programs, workload: Model, tensors: Mapping[str, Tensor], scale: float
    ) -> None:
        self._resident = Resident(programs, workload, tensors)
        self._workload, self._scale = workload, scale
        self._trainable = [spec.name for spec in workload.specs if spec.role == "trainable"]
        # number of samples -> tensors of ones, see `_masks`
        self._ones: dict[int, list[Tensor]] = {}

    def __call__(self, ids: Sequence[int], drop: DropFunction) -> tuple[float, list[Array]]:
        batch = self._workload.batch(ids)
        masks = self._masks(batch, len(ids), drop)
        body = self._step(len(batch), len(masks))
        loss, *gradients = self._resident.run(self._key(batch, masks), body, [*batch, *masks])
        return float(loss), gradients

    def captured(
        self, batch: Sequence[Tensor], masks: Sequence[Tensor]
    ) -> tuple[GraphModule, list[Tensor]]:
        """Return the graph that a step on `batch` with dropout `masks` runs, and its inputs."""
        body, given = self._step(len(batch), len(masks)), [*batch, *masks]
        graph = self._resident.graph(self._key(batch, masks), body, given)
        return graph, self._resident.inputs(given)

    def _key(self, batch: Sequence[Tensor], masks: Sequence[Tensor]) -> Key:
        return Key(shapes_of(batch), bool(masks), self._scale)

    def _masks(self, batch: Sequence[Tensor], num_samples: int, drop: DropFunction) -> list[Tensor]:
        """Return dropout's masks (`drop` applied to ones) in the order of their use.

        The list is empty if `drop` is the identity. If the workload draws its random numbers
        itself, the list has only their key.
        """
        if self._workload.draws:
            drawn = draws.key_of(drop)
            return [] if drawn is None else [drawn]
        if num_samples not in self._ones:
            self._ones[num_samples] = [torch.ones(shape) for shape in self._places(batch)]
        ones = self._ones[num_samples]
        masks = [drop(one) for one in ones]
        return [] if all(m is one for m, one in zip(masks, ones, strict=True)) else masks

    def _places(self, batch: Sequence[Tensor]) -> list[torch.Size]:
        """Return the shapes of the tensors that the model passes to dropout, in order."""
        shapes: list[torch.Size] = []

        def note(x: Tensor) -> Tensor:
            shapes.append(x.shape)
            return x

        held = self._resident.tensors.items()
        tensors = {name: tensor.detach().to("meta") for name, tensor in held}
        inputs = [one.to("meta") for one in batch]
        self._workload.loss_of(tensors, inputs, linear=F.linear, drop=note)
        return shapes

    def _step(self, num_batch: int, num_masks: int) -> Body:
        """Return the step, a function of the batch and the masks: (loss, gradients ...)."""

        def compute(tensors: Tensors, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
            batch, masks = given[:num_batch], iter(given[num_batch:])
            drop: DropFunction = (lambda x: x * next(masks)) if num_masks else (lambda x: x)
            if num_masks and self._workload.draws:
                drop = draws.Keyed(next(masks))
            loss = self._workload.loss_of(tensors, batch, linear=F.linear, drop=drop)
            leaves = [tensors[name] for name in self._trainable]
            scale = torch.tensor(self._scale)
            return loss.detach(), *torch.autograd.grad(loss, leaves, grad_outputs=scale)

        return compute


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Return the shape of each of `tensors`."""
    return tuple(tuple(one.shape) for one in tensors)


def _digest(tensors: Sequence[Tensor]) -> str:
    hasher = blake3()
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().numpy().reshape(-1).data.cast("B"))
    return str(hasher.hexdigest(16))
