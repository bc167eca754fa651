"""A whole step in few submissions: its costs, its results and its refusals."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from entrenar_py.compute.wgpu import WgpuBackend
from entrenar_py.compute.wgpu import program as programs
from entrenar_py.compute.wgpu.capture import capture
from entrenar_py.compute.wgpu.device import Array, Device, open_device
from entrenar_py.compute.wgpu.lower import lower
from entrenar_py.compute.wgpu.program import Program, compile_step
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.train.arithmetic import workload
from tests.compute.wgpu.whole_steps import arrays, check_step, step_of

pytestmark = pytest.mark.wgpu


def test_a_step_of_a_workload(device: Device) -> None:
    """A step gives torch's gradients in one submission. `whole_steps` has the other workloads."""
    check_step(device, "mlp")


@pytest.mark.parametrize("dispatches", [1, 3, 10**6])
def test_a_step_in_parts_is_the_same(
    device: Device, monkeypatch: pytest.MonkeyPatch, dispatches: int
) -> None:
    """The results are read once, after the last part."""
    model = workload.build("mlp", num_samples=8, width=16, data=np.random.default_rng(0))
    step, inputs, resident = step_of(model, range(3))
    program = compile_step(device, step, inputs, resident)
    whole = program.run(arrays(inputs))
    monkeypatch.setattr(programs, "DISPATCHES", dispatches)
    parts = program.run(arrays(inputs))
    submissions = 1 + -(-len(program.dispatches) // dispatches)
    assert (program.counts.submissions, program.counts.read_backs) == (submissions, 2)
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(one, other)


def test_nothing_to_dispatch_is_submitted_once(device: Device) -> None:
    """A function that returns what it is given has its results copied."""
    program = compile_step(device, lambda x: (x,), [torch.ones(3)])
    assert not program.dispatches
    (result,) = program.run([np.arange(3, dtype=np.float32)])
    assert result.tolist() == [0, 1, 2]
    assert program.counts.submissions == 1


def test_equal_kernels_are_compiled_once(device: Device) -> None:
    """The second program of a function, and a run, compile nothing."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (x * 3.25 + x.sum(0),)

    first = compile_step(device, fn, [torch.ones(3, 5)])
    assert first.counts.pipelines > 0
    assert compile_step(device, fn, [torch.ones(3, 5)]).counts.pipelines == 0
    before = first.counts.pipelines
    first.run([np.ones((3, 5), np.float32)])
    assert first.counts.pipelines == before


def test_what_needs_no_input_is_computed_once(device: Device) -> None:
    """Operations on resident tensors alone are computed at compilation, not in a run."""

    def fn(x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return x * torch.cos(table).sum(0), table.t().contiguous()

    table = torch.linspace(0, 3, 15).reshape(5, 3)
    program = compile_step(device, fn, [torch.ones(3)], [table])
    assert len(program.steps) == 1
    for factor in (1.0, 2.0):
        scaled, turned = program.run([np.full(3, factor, np.float32)])
        np.testing.assert_allclose(scaled, factor * torch.cos(table).sum(0).numpy(), rtol=1e-5)
        np.testing.assert_array_equal(turned, table.t().numpy())


def test_what_a_run_does_not_need_is_let_go(device: Device) -> None:
    """The intermediate results of operations that are computed once are freed."""

    def fn(x: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return (x @ (table @ table.t() @ table),)

    program = compile_step(device, fn, [torch.ones(1, 5)], [torch.ones(5, 3)])
    assert sorted(one.size for one in program.places) == [3, 5, 15]
    (found,) = program.run([np.ones((1, 5), np.float32)])
    np.testing.assert_array_equal(found, np.full((1, 3), 75, np.float32))


def test_a_device_goes_with_its_pipelines() -> None:
    """A device and its pipelines are freed after the last reference to the device is gone."""
    device = open_device(0)
    compile_step(device, lambda x: (x * 2,), [torch.ones(3)]).run([np.ones(3, np.float32)])
    handle = weakref.ref(device.handle)
    del device
    gc.collect()
    assert handle() is None


def test_inputs_and_constants_as_results(device: Device) -> None:
    """Inputs that are outputs, too, come back unchanged for every dtype."""

    def fn(x: Tensor, i: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return x, i, b, x, torch.full((2, 2), 7)

    given: list[Array] = [
        np.array([1, 2, 3], np.float32),
        np.array([[-5], [2**31 - 1]]),
        np.array([True, False]),
    ]
    program = compile_step(device, fn, [torch.from_numpy(one) for one in given])
    x, i, b, again, sevens = program.run(given)
    for found, expected in zip((x, i, b, again), (*given, given[0]), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    assert sevens.tolist() == [[7, 7], [7, 7]]


def test_inputs_that_do_not_fit(device: Device) -> None:
    """Inputs of other shapes than those compiled for, or with large integers, are refused."""
    program = compile_step(device, lambda i: (i + 1,), [torch.zeros(3, dtype=torch.int64)])
    with pytest.raises(UsageError, match=r"shapes \[\(2,\)\]: the program takes \[\(3,\)\]"):
        program.run([np.zeros(2, np.int64)])
    with pytest.raises(UsageError, match=r"integers from 0 to 4294967296: .* 32 bits"):
        program.run([np.array([0, 0, 2**32])])


def test_a_tensor_larger_than_a_binding(device: Device) -> None:
    """A tensor larger than a binding is refused, with its size and line, before any allocation."""
    side = int((device.limits.binding_bytes_max / 4) ** 0.5) + 1
    with pytest.raises(
        BackendUnavailable, match=r"test_program.*a tensor of \d+ bytes, but a binding"
    ):
        compile_step(device, lambda x: (x[:, None] + x,), [torch.zeros(side)])


def test_a_shader_that_the_adapter_rejects(device: Device) -> None:
    """A shader that does not compile raises BackendUnavailable with wgpu's message."""
    lowered = lower(capture(lambda x: (x + 1,), [torch.zeros(3)]), device.limits, bindings_max=8)
    broken = dataclasses.replace(lowered.steps[0], source="fn main() { let x: f32 = 1u; }")
    with pytest.raises(BackendUnavailable, match=r"(?s)backend wgpu on .*f32"):
        Program(device, dataclasses.replace(lowered, steps=(broken,)), [torch.zeros(3)], [])


def test_a_device_that_is_lost() -> None:
    """A run and a compilation on a lost device raise BackendUnavailable with wgpu's message."""
    lost = open_device(0)
    program: Program = compile_step(lost, lambda x: (x + 1,), [torch.zeros(3)])
    lost.handle.destroy()
    with pytest.raises(BackendUnavailable, match=r"backend wgpu on .*"):
        program.run([np.zeros(3, np.float32)])
    with pytest.raises(BackendUnavailable, match=r"backend wgpu on .*"):
        compile_step(lost, lambda x: (x + 2,), [torch.zeros(3)])


@pytest.mark.parametrize("compute", ["step", "products"])
def test_a_device_that_is_lost_while_commands_are_recorded(
    compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is submitted to a lost device, which would end the process; it raises an error."""
    backend = WgpuBackend(open_device(0), name="wgpu")
    device, one = backend.programs.device, torch.ones(1, 1)
    program = compile_step(device, lambda x: (x + 1,), [one])
    encoder = type(device.handle.create_command_encoder())
    finish = encoder.finish

    def finish_and_lose(self: Any, **keywords: Any) -> Any:
        commands = finish(self, **keywords)
        device.handle.destroy()
        return commands

    monkeypatch.setattr(encoder, "finish", finish_and_lose)
    with pytest.raises(BackendUnavailable, match=r"backend wgpu on .*: the device is lost"):
        program.run([one.numpy()]) if compute == "step" else backend.matmul(one, one)
    assert backend.lost()
