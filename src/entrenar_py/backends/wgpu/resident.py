"""Steps of training on one device: captured and compiled once for each number of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from blake3 import blake3
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.backends.steps import Array, DropFunction, Model
from entrenar_py.backends.wgpu.capture import Function, capture
from entrenar_py.backends.wgpu.device import Device
from entrenar_py.backends.wgpu.program import Program, compile_graph


@dataclass(frozen=True)
class Key:
    """Everything about a step, besides the model and its frozen tensors, that a graph depends on.

    `masked` is true where dropout's masks are inputs.
    """

    num_samples: int
    masked: bool
    scale: float


@dataclass
class Compiled:
    """The graphs of one workload, and the programs made of them.

    A program is kept by its graph's key and BLAKE3 of the frozen tensors that are resident in it.
    """

    graphs: dict[Key, GraphModule] = field(default_factory=dict)
    programs: dict[tuple[Key, str], Program] = field(default_factory=dict)


class Programs:
    """The programs compiled for one device, shared by all replicas of a workload."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: WeakKeyDictionary[Model, Compiled] = WeakKeyDictionary()

    def of(self, workload: Model) -> Compiled:
        """Return those of `workload`, to be added to; they are dropped when it is."""
        return self._known.setdefault(workload, Compiled())


class ResidentStep:
    """A `Stepper`. Frozen tensors are on the device from the first step on; what training changes,
    the batch and dropout's masks go there in one upload, loss and gradients come in one read-back.
    """

    def __init__(
        self, programs: Programs, workload: Model, tensors: Mapping[str, Tensor], scale: float
    ) -> None:
        self._device = programs.device
        self._compiled = programs.of(workload)
        self._workload, self._tensors, self._scale = workload, tensors, scale
        self._moving = [spec.name for spec in workload.specs if spec.role != "frozen"]
        self._frozen = [spec.name for spec in workload.specs if spec.role == "frozen"]
        self._trainable = [spec.name for spec in workload.specs if spec.role == "trainable"]
        self._digest = _digest([tensors[name] for name in self._frozen])
        self._ones: dict[int, list[Tensor]] = {}  # number of samples -> what masks are made of

    def __call__(self, ids: Sequence[int], drop: DropFunction) -> tuple[float, list[Array]]:
        batch = self._workload.batch(ids)
        masks = self._masks(batch, len(ids), drop)
        key = Key(len(ids), bool(masks), self._scale)
        programs = self._compiled.programs
        inputs = self._inputs(batch, masks)
        if (key, self._digest) not in programs:
            graph = self._graph(key, batch, masks)
            program = compile_graph(self._device, graph, inputs, self._resident())
            programs[key, self._digest] = program
        loss, *gradients = programs[key, self._digest].run([x.detach().numpy() for x in inputs])
        return float(loss), gradients

    def captured(
        self, num_samples: int, batch: Sequence[Tensor], masks: Sequence[Tensor]
    ) -> tuple[GraphModule, list[Tensor]]:
        """Return the graph of a step on `batch`, with dropout's `masks` if any, and its inputs.

        It is the graph that the step is compiled from.
        """
        key = Key(num_samples, bool(masks), self._scale)
        return self._graph(key, batch, masks), [*self._inputs(batch, masks), *self._resident()]

    def _masks(self, batch: Sequence[Tensor], num_samples: int, drop: DropFunction) -> list[Tensor]:
        """Return dropout's masks, in the order in which the model asks for them.

        A mask is what `drop` makes of ones.
        """
        if num_samples not in self._ones:
            self._ones[num_samples] = [torch.ones(shape) for shape in self._places(batch)]
        ones = self._ones[num_samples]
        masks = [drop(one) for one in ones]
        return [] if all(m is one for m, one in zip(masks, ones, strict=True)) else masks

    def _places(self, batch: Sequence[Tensor]) -> list[torch.Size]:
        """The shapes of what the model hands to dropout, in their order."""
        found: list[torch.Size] = []

        def note(x: Tensor) -> Tensor:
            found.append(x.shape)
            return x

        held = {name: tensor.detach().to("meta") for name, tensor in self._tensors.items()}
        there = [one.to("meta") for one in batch]
        self._workload.loss_of(held, there, linear=F.linear, drop=note)
        return found

    def _inputs(self, batch: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that are uploaded for each step."""
        return [*(self._tensors[name] for name in self._moving), *batch, *masks]

    def _resident(self) -> list[Tensor]:
        """Return the tensors that are uploaded once."""
        return [self._tensors[name] for name in self._frozen]

    def _graph(self, key: Key, batch: Sequence[Tensor], masks: Sequence[Tensor]) -> GraphModule:
        graphs = self._compiled.graphs
        if key not in graphs:
            given = [*self._inputs(batch, masks), *self._resident()]
            graphs[key] = capture(self._step(len(batch), len(masks)), given)
        return graphs[key]

    def _step(self, num_batch: int, num_masks: int) -> Function:
        """Return the step as a function of `_inputs` and `_resident`: (loss, gradients ...)."""

        def compute(*given: Tensor) -> tuple[Tensor, ...]:
            rest = iter(given)
            held = {name: next(rest) for name in self._moving}
            batch = [next(rest) for _ in range(num_batch)]
            masks = iter([next(rest) for _ in range(num_masks)])
            held |= {name: next(rest) for name in self._frozen}
            loss = self._workload.loss_of(
                held,
                batch,
                linear=F.linear,
                drop=(lambda x: x * next(masks)) if num_masks else (lambda x: x),
            )
            leaves = [held[name] for name in self._trainable]
            scale = torch.tensor(self._scale)
            return loss.detach(), *torch.autograd.grad(loss, leaves, grad_outputs=scale)

        return compute


def _digest(tensors: Sequence[Tensor]) -> str:
    hasher = blake3()
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().numpy().reshape(-1).data.cast("B"))
    return str(hasher.hexdigest(16))
