"""A training step in float64, and the part of a float32 step's error that rounding explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute.wgpu.bounds import sensitivity
from entrenar_py.compute.wgpu.bounds.sensitivity import Deviation
from entrenar_py.train.arithmetic import engine
from entrenar_py.train.arithmetic.tensors import Array, DropFunction, Workload


class Oracle:
    """One step of `workload` from the values `tensors`, with the dropout masks that `drop` draws.

    `inputs` are the weights and buffers that change between steps, then `batch`, then `masks`.
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
        self.batch = list(workload.batch(ids))
        self.masks: list[Tensor] = []
        self._draw(drop)
        moving = {spec.name for spec in workload.specs if spec.role != "frozen"}
        self._names = [*self._held]
        weights = [tensor for name, tensor in self._held.items() if name in moving]
        self.inputs = [*weights, *self.batch, *self.masks]

    def on_cpu(self) -> list[Array]:
        """Return loss and gradients as torch computes them on the CPU in float32."""
        loss, gradients = self._workload.gradients(
            {
                spec.name: self._held[spec.name].clone().requires_grad_(spec.role == "trainable")
                for spec in self._workload.specs
            },
            self._ids,
            drop=self._dropping(self.masks),
            scale=self._scale,
        )
        return [np.array(loss, np.float32), *gradients]

    def explain(
        self, results: Sequence[Tensor], graph: GraphModule, given: Sequence[Tensor]
    ) -> list[Deviation]:
        """Return for each of `results` its error, and the bound that rounding sets on it.

        `graph` is the captured step, and `given` its inputs, in the graph's order. The error is
        the larger of two: against torch's step in float64, and against the graph in float64. This
        finds mistakes in the capture as well as in the evaluation of the graph.
        """
        deviations = sensitivity.deviations(results, graph, given)
        exact = self._step(*(_double(one) for one in self._given()))
        together = []
        for one, got, right in zip(deviations, results, exact, strict=True):
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
        return [*self._held.values(), *self.batch, *self.masks]

    def _step(self, *given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        trained = {spec.name for spec in self._workload.specs if spec.role == "trainable"}
        values = {name: next(rest).detach().requires_grad_(name in trained) for name in self._names}
        batch = [next(rest) for _ in self.batch]
        drop = self._dropping(list(rest))
        loss = self._workload.loss_of(values, batch, linear=F.linear, drop=drop)
        leaves = [values[spec.name] for spec in self._workload.specs if spec.name in trained]
        scale = torch.tensor(self._scale, dtype=loss.dtype)
        return loss.detach(), *torch.autograd.grad(loss, leaves, grad_outputs=scale)

    def _draw(self, drop: DropFunction) -> None:
        """Keep the masks that `drop` draws, in the order in which the model uses them."""
        if drop is engine.no_dropout:
            return

        def keep(x: Tensor) -> Tensor:
            self.masks.append(drop(torch.ones(x.shape)))
            return x * self.masks[-1]

        with torch.no_grad():
            self._workload.loss_of(self._held, self.batch, linear=F.linear, drop=keep)

    def _dropping(self, masks: Sequence[Tensor]) -> DropFunction:
        if not masks:
            return engine.no_dropout
        rest = iter(masks)
        return lambda x: x * next(rest)


def _double(one: Tensor) -> Tensor:
    return one.double() if one.is_floating_point() else one
