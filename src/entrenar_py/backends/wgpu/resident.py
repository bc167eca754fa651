"""Steps of training on one device: captured and compiled once for each number of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from blake3 import blake3
from torch import Tensor

from entrenar_py.backends.steps import Array, DropFunction, Model
from entrenar_py.backends.wgpu.device import Device
from entrenar_py.backends.wgpu.program import Program, compile_step


@dataclass(frozen=True)
class Key:
    """What a program of a workload was compiled for; `frozen` is BLAKE3 of what is resident."""

    num_samples: int
    masked: bool
    scale: float
    frozen: str


class Programs:
    """The programs compiled for one device, shared by all replicas of a workload."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: WeakKeyDictionary[Model, dict[Key, Program]] = WeakKeyDictionary()

    def of(self, workload: Model) -> dict[Key, Program]:
        """Those of `workload`, to be added to; they go when it goes."""
        return self._known.setdefault(workload, {})

    def all(self) -> Iterator[Program]:
        """Every one that is kept."""
        for one in self._known.values():
            yield from one.values()


class ResidentStep:
    """A `Stepper`. Frozen tensors are on the device from the first step on; what training changes,
    the batch and dropout's masks go there in one upload, loss and gradients come in one read-back.
    """

    def __init__(
        self, programs: Programs, workload: Model, tensors: Mapping[str, Tensor], scale: float
    ) -> None:
        self._device = programs.device
        self._programs = programs.of(workload)
        self._workload, self._tensors, self._scale = workload, tensors, scale
        self._moving = [spec.name for spec in workload.specs if spec.role != "frozen"]
        self._frozen = [spec.name for spec in workload.specs if spec.role == "frozen"]
        self._trainable = [spec.name for spec in workload.specs if spec.role == "trainable"]
        self._digest = _digest([tensors[name] for name in self._frozen])
        self._ones: dict[int, list[Tensor]] = {}  # number of samples -> what masks are made of

    def __call__(self, ids: Sequence[int], drop: DropFunction) -> tuple[float, list[Array]]:
        batch = self._workload.batch(ids)
        masks = self._masks(batch, len(ids), drop)
        inputs = [*(self._tensors[name] for name in self._moving), *batch, *masks]
        key = Key(len(ids), bool(masks), self._scale, self._digest)
        if key not in self._programs:
            self._programs[key] = self._compile(inputs, len(batch), len(masks))
        loss, *gradients = self._programs[key].run([one.detach().numpy() for one in inputs])
        return float(loss), gradients

    def _masks(self, batch: Sequence[Tensor], num_samples: int, drop: DropFunction) -> list[Tensor]:
        """What `drop` multiplies by, in the order in which the model asks; empty if by nothing.

        What it makes of ones is its mask.
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

    def _compile(self, inputs: Sequence[Tensor], num_batch: int, num_masks: int) -> Program:
        names = [*self._moving, *self._frozen]

        def compute(*given: Tensor) -> tuple[Tensor, ...]:
            rest = iter(given)
            held = {name: next(rest) for name in self._moving}
            batch = [next(rest) for _ in range(num_batch)]
            masks = iter([next(rest) for _ in range(num_masks)])
            held |= {name: next(rest) for name in self._frozen}
            loss = self._workload.loss_of(
                {name: held[name] for name in names},
                batch,
                linear=F.linear,
                drop=(lambda x: x * next(masks)) if num_masks else (lambda x: x),
            )
            leaves = [held[name] for name in self._trainable]
            scale = torch.tensor(self._scale)
            return loss.detach(), *torch.autograd.grad(loss, leaves, grad_outputs=scale)

        resident = [self._tensors[name] for name in self._frozen]
        return compile_step(self._device, compute, inputs, resident)


def _digest(tensors: Sequence[Tensor]) -> str:
    hasher = blake3()
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().numpy().reshape(-1).data.cast("B"))
    return str(hasher.hexdigest(16))
