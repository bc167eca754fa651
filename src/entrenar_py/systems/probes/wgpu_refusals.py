"""The refusals of a wgpu adapter: operations without a kernel, and data-dependent shapes.

Operations on empty tensors may be refused or computed correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType

import torch
from torch import Tensor

from entrenar_py.compute.wgpu import program
from entrenar_py.compute.wgpu.device import Array, Device
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable, EntrenarError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.probes import device_meter
from entrenar_py.train.coordinator.recorder import Recorder


@dataclass(frozen=True)
class Case:
    """A step, `compute(*given)`, to be computed correctly or refused with the name of `operation`.

    With `has_line` the error must also name a line of `compute`.
    """

    compute: Callable[..., tuple[Tensor, ...]]
    given: tuple[Tensor, ...]
    operation: str
    has_line: bool = True


def _with_gradient(x: Tensor) -> tuple[Tensor, ...]:
    loss = torch.linalg.inv(x).sum()
    return loss.detach(), *torch.autograd.grad(loss, [x])


def _cases() -> dict[str, Case]:
    matrix = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, -1.0], [1.0, 0.0, 3.0]])
    matrices = (matrix,)
    return {
        "no kernel": Case(lambda x: (torch.linalg.inv(x),), matrices, "inv"),
        "no kernel, in backward": Case(_with_gradient, (matrix.clone().requires_grad_(),), "inv"),
        "no kernel, two results": Case(lambda x: (x.kthvalue(2).values,), matrices, "kthvalue"),
        "no kernel, a function": Case(
            lambda x: (torch.special.bessel_j0(x),), matrices, "bessel_j0"
        ),
        "float64": Case(lambda x: ((x.double() * 2).float(),), matrices, "_to_copy"),
        "random numbers": Case(lambda x: (x * torch.rand_like(x),), matrices, "rand"),
        "a branch on data": Case(
            lambda x: (x if x.sum() > 0 else -x,), matrices, "_local_scalar_dense"
        ),
        "a shape that follows data": Case(lambda x: (x[x > 0],), matrices, "index"),
        "writes to an input": Case(lambda x: (x.add_(1),), matrices, "add_"),
        "a number of more than 32 bits": Case(lambda x: (x.long() * 2**40,), matrices, "mul"),
        "a slice of no rows": Case(lambda x: (x[:0] * 2,), matrices, "slice"),
        "a product over no elements": Case(lambda x: (x[:, :0] @ x[:0],), matrices, "slice"),
        "an input of no rows": Case(
            lambda x: (x * 2,), (torch.zeros(0, 3),), "shape=[0, 3]", has_line=False
        ),
    }


def run(scenario: Scenario) -> trace.Trace:
    """Record a Declined event for each case; without an adapter the run ends `failed`."""
    recorder = Recorder(scenario)
    try:
        device = device_meter.open_adapter(scenario).programs.device
        for name, case in _cases().items():
            recorder.emit(_declined(name, case, device))
    except BackendUnavailable as error:
        return recorder.finish(status="failed", reason=str(error))
    return recorder.finish(status="completed")


def _declined(name: str, case: Case, device: Device) -> trace.Declined:
    error: EntrenarError | None = None
    right = False
    inputs = [tensor.clone().detach().requires_grad_(tensor.requires_grad) for tensor in case.given]
    with device_meter.watching() as meter:
        try:
            compiled = program.compile_step(device, case.compute, inputs)
            results = compiled.run([tensor.detach().numpy() for tensor in inputs])
            right = _is_right(case, results)
        except BackendUnavailable:
            raise  # the adapter failed, and did not refuse the graph
        except EntrenarError as refused:
            error = refused
    message = "" if error is None else str(error)
    return trace.Declined(
        case=name,
        operation=case.operation,
        error=None if error is None else type(error).__name__,
        message=message,
        in_line=not case.has_line or _names_line(message, case.compute.__code__),
        right=right,
        submissions=meter.submissions,
    )


def _names_line(message: str, code: CodeType) -> bool:
    """Return whether `message` names a line of the function with `code`."""
    lines = {line for _, _, line in code.co_lines()}
    return any(f"wgpu_refusals.py:{line} in {code.co_name}" in message for line in lines)


def _is_right(case: Case, results: Sequence[Array]) -> bool:
    expected = case.compute(*(tensor.clone() for tensor in case.given))
    return len(results) == len(expected) and all(
        torch.equal(torch.from_numpy(got), right.detach())
        for got, right in zip(results, expected, strict=True)
    )
