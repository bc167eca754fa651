"""Small models of transformers, unmodified: a step's loss and gradients are torch's."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.fx import GraphModule

from entrenar_py.compute.wgpu.bounds import sensitivity
from entrenar_py.compute.wgpu.capture import capture
from entrenar_py.compute.wgpu.device import Device
from entrenar_py.compute.wgpu.program import compile_graph
from entrenar_py.shared.errors import UsageError
from tests.compute.wgpu import tiny_models

pytestmark = [pytest.mark.wgpu, pytest.mark.integrations, pytest.mark.filterwarnings("default")]

TOLERANCE = 1e-6  # of a gradient's largest element; what is beyond must be within its bound


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_a_step(device: Device, name: str) -> None:
    """Loss and gradients are torch's within 1e-6, or as near to float64 as rounding explains."""
    fn, inputs = tiny_models.step(tiny_models.build(name), tiny_models.inputs(name))
    graph = capture(fn, inputs)
    arrays = [one.numpy() for one in inputs]
    program = compile_graph(device, graph, inputs)
    found, again = program.run(arrays), program.run(arrays)
    rest = []
    expected = fn(*inputs)
    assert len(expected) > 5
    for number, (one, twice, right) in enumerate(zip(found, again, expected, strict=True)):
        np.testing.assert_array_equal(one, twice)
        assert np.isfinite(one).all()
        error = np.abs(one - right.numpy()).max()
        if error > TOLERANCE * float(right.abs().max()):
            rest.append(number)
    assert len(rest) <= len(expected) // 4
    explained = sensitivity.deviations(
        [torch.from_numpy(found[number]) for number in rest], only(graph, rest), inputs
    )
    assert all(one.explained for one in explained), explained


def only(graph: GraphModule, outputs: Sequence[int]) -> GraphModule:
    """Return a copy of `graph` with some of its outputs."""
    copied = copy.deepcopy(graph)
    last = copied.graph.output_node()
    last.args = ([last.args[0][number] for number in outputs],)  # type: ignore[index]
    copied.graph.eliminate_dead_code()
    copied.recompile()
    return copied


def test_running_statistics_are_refused() -> None:
    """A batch norm that is trained would write its statistics: refused by its line."""
    model = tiny_models.build("resnet").train()
    fn, inputs = tiny_models.step(model, tiny_models.inputs("resnet"))
    with pytest.raises(UsageError, match=r"modeling_resnet\.py:\d+ in .*writes to an input"):
        capture(fn, inputs)
