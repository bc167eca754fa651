"""Compares steps of workloads in one submission with torch's, and counts their operations.

`make graphs` also tries the decoders, whose kernels take a software driver many seconds to compile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor

from entrenar_py.compute.wgpu.capture import Function
from entrenar_py.compute.wgpu.device import Array, Device, open_device
from entrenar_py.compute.wgpu.program import compile_step
from entrenar_py.train.arithmetic import engine, workload
from entrenar_py.train.arithmetic.tensors import Workload

# Relative to a tensor's largest element: ten times the error of the whole decoder's gradients.
# Other tests compare with derived bounds.
TOLERANCE = 1e-5


def arrays(tensors: Sequence[Tensor]) -> list[Array]:
    """Return the inputs of a run."""
    return [one.numpy() for one in tensors]


def step_of(model: Workload, ids: Sequence[int]) -> tuple[Function, list[Tensor], list[Tensor]]:
    """Return the step as a function of batch, trainable and frozen tensors, and these tensors."""
    rng = np.random.default_rng(1)
    held = {name: torch.from_numpy(array) for name, array in model.initial(rng).items()}
    for name, one in held.items():
        if name.endswith("lora_b"):  # adapters that have learned something
            one += torch.from_numpy(rng.normal(0, 0.1, one.shape).astype(np.float32))
    roles = {spec.name: spec.role for spec in model.specs}
    trained = [name for name in held if roles[name] == "trainable"]
    frozen = [name for name in held if roles[name] != "trainable"]
    batch = model.batch(ids)

    def step(*given: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in given[len(batch) :][: len(trained)]]
        tensors = dict(zip([*trained, *frozen], [*leaves, *given[-len(frozen) :]], strict=False))
        inputs = given[: len(batch)]
        loss = model.loss_of(tensors, inputs, linear=F.linear, drop=engine.no_dropout)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return step, [*batch, *(held[name] for name in trained)], [held[name] for name in frozen]


def check_step(device: Device, name: str) -> None:
    """Require one upload, submission and read-back a run, torch's gradients, and repeated bits."""
    model = workload.build(name, num_samples=8, width=16, data=np.random.default_rng(0))
    step, inputs, resident = step_of(model, range(3))
    program = compile_step(device, step, inputs, resident)
    first, second = program.run(arrays(inputs)), program.run(arrays(inputs))

    counts = program.counts
    assert (counts.submissions, counts.read_backs, counts.uploads) == (2, 2, 2)
    assert counts.dispatches == 2 * len(program.dispatches) == 2 * len(program.steps)
    assert counts.upload_bytes >= 2 * sum(4 * one.numel() for one in inputs)
    for one, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, again)
    expected = step(*inputs, *resident)
    assert len(first) == len(expected)
    for one, right in zip(first, expected, strict=True):
        size = float(right.abs().max())
        assert size > 0, "gradients that are compared are not zero"
        np.testing.assert_allclose(one, right.numpy(), rtol=0, atol=TOLERANCE * size)


if __name__ == "__main__":
    for tried in ("mlp", "decoder", "decoder_full"):
        check_step(open_device(0), tried)
        print(f"{tried}: the gradients are torch's, in one submission")
