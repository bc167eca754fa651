"""What a step of training gives in float64, and what rounding explains of a float32 one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.backends.wgpu import capture
from entrenar_py.backends.wgpu.bounds import sensitivity
from entrenar_py.backends.wgpu.bounds.sensitivity import Deviation
from entrenar_py.training import dropout
from entrenar_py.training.tensors import Array, DropFunction
from entrenar_py.training.workload import Workload


class Oracle:
    """One step of `workload` at `tensors`, with the masks that `drop` draws for it.

    `inputs` are the weights and buffers that change between steps, the batch, and the masks.
    """

    def __init__(
        self,
        workload: Workload,
        tensors: Mapping[str, Tensor],
        ids: Sequence[int],
        drop: DropFunction,
        scale: float,
    ) -> None:
        self._workload, self._ids, self._scale = workload, ids, scale
        self._held = {name: tensor.detach() for name, tensor in tensors.items()}
        self._batch = list(workload.batch(ids))
        self._masks: list[Tensor] = []
        self._draw(drop)
        moving = {spec.name for spec in workload.specs if spec.role != "frozen"}
        self._names = [*self._held]
        weights = [tensor for name, tensor in self._held.items() if name in moving]
        self.inputs = [*weights, *self._batch, *self._masks]

    def on_cpu(self) -> list[Array]:
        """Loss and gradients as torch computes them in float32, here."""
        loss, gradients = self._workload.gradients(
            {
                spec.name: self._held[spec.name].clone().requires_grad_(spec.role == "trainable")
                for spec in self._workload.specs
            },
            self._ids,
            drop=self._dropping(self._masks),
            scale=self._scale,
        )
        return [np.array(loss, np.float32), *gradients]

    def captured(self) -> GraphModule:
        """The step as a graph; it depends on the number of samples, not on which they are."""
        return capture.capture(self._step, self._given())

    def explain(self, results: Sequence[Tensor], graph: GraphModule) -> list[Deviation]:
        """How far each of `results` is off, and how far rounding may take it.

        `graph` is what `captured` gives for as many samples.

        Off from torch's own step in float64 or from the captured graph's, whichever is more: so
        neither a mistake in the capture nor one in the bound's walk can hide.
        """
        given = self._given()
        found = sensitivity.deviations(results, graph, given)
        exact = self._step(*(_double(one) for one in given))
        together = []
        for one, got, right in zip(found, results, exact, strict=True):
            errors = (got.double() - right).abs().nan_to_num(torch.inf).reshape(-1)
            together.append(
                replace(
                    one,
                    error=max(one.error, float(errors.sum())),
                    element_error=max(one.element_error, float(errors.max())),
                )
            )
        return together

    def _given(self) -> list[Tensor]:
        return [*self._held.values(), *self._batch, *self._masks]

    def _step(self, *given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        trained = {spec.name for spec in self._workload.specs if spec.role == "trainable"}
        held = {name: next(rest).detach().requires_grad_(name in trained) for name in self._names}
        batch = [next(rest) for _ in self._batch]
        drop = self._dropping(list(rest))
        loss = self._workload.loss_of(held, batch, linear=F.linear, drop=drop)
        leaves = [held[spec.name] for spec in self._workload.specs if spec.name in trained]
        scale = torch.tensor(self._scale, dtype=loss.dtype)
        return loss.detach(), *torch.autograd.grad(loss, leaves, grad_outputs=scale)

    def _draw(self, drop: DropFunction) -> None:
        """Takes the masks that `drop` draws, in the order in which the model asks for them."""
        if drop is dropout.none:
            return

        def keep(x: Tensor) -> Tensor:
            self._masks.append(drop(torch.ones(x.shape)))
            return x * self._masks[-1]

        with torch.no_grad():
            self._workload.loss_of(self._held, self._batch, linear=F.linear, drop=keep)

    def _dropping(self, masks: Sequence[Tensor]) -> DropFunction:
        if not masks:
            return dropout.none
        rest = iter(masks)
        return lambda x: x * next(rest)


def _double(one: Tensor) -> Tensor:
    return one.double() if one.is_floating_point() else one
