"""Training steps of the workloads as functions of tensors, for tests of capturing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute.wgpu.capture import Function, capture
from entrenar_py.train.arithmetic import engine, workload


@cache
def step(name: str, num_samples: int = 1) -> tuple[Function, list[Tensor]]:
    """Return a step (loss and gradients of some samples) as a function of all tensors."""
    model = workload.build(name, num_samples=16, width=16, data=np.random.default_rng(0))
    values = model.initial(np.random.default_rng(0))
    ids = range(num_samples)
    batch = model.batch(ids)
    names = [spec.name for spec in model.specs]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        held = dict(zip(names, tensors, strict=False))
        given = tensors[len(names) :]
        loss = model.loss_of(held, given, linear=F.linear, drop=engine.no_dropout)
        wanted = [held[spec.name] for spec in model.specs if spec.role == "trainable"]
        return loss, *torch.autograd.grad(loss, wanted)

    inputs = [
        torch.tensor(values[spec.name]).requires_grad_(spec.role == "trainable")
        for spec in model.specs
    ]
    return run, [*inputs, *batch]


@cache
def captured(name: str) -> GraphModule:
    """Return the step's graph, cached because capturing takes a second."""
    return capture(*step(name))


def plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors detached from autograd."""
    return [one.detach() for one in tensors]
