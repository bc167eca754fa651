"""A run that goes on from another's checkpoint is recognised by the weights it begins with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entrenar_py.check.command.run_trace import Beginnings, first_step
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Tensors, Trace
from tests import traces

SCENARIO = Scenario(
    system="command",
    workload="own",
    world_size=1,
    seed=0,
    num_shards=1,
    num_samples=2,
    batch_size=2,
    num_steps=2,
)


def weights(value: float) -> Tensors:
    return {"w": trace.record_tensor(np.array([value], np.float32), values=True)}


def run(values: Sequence[float], step: int = 0) -> Trace:
    """Return a run that begins with the first of `values` and reaches the others."""
    steps = traces.reaching([*map(weights, values)], begin=step, loss=None)
    return traces.hand_written(*steps, subject=SCENARIO)


def test_a_run_that_begins_where_another_was_has_failed() -> None:
    """Its reason names the other run, and the step after which it had these weights."""
    beginnings = Beginnings()
    assert beginnings.seen("first", run([1, 2, 3])).end.status == "completed"
    found = beginnings.seen("second", run([2, 4, 5])).end
    assert found.status == "failed"
    assert "the weights that first had after step 0" in found.reason


def test_runs_that_begin_alike_are_left_alone() -> None:
    """Also where the weights never move, or come back to what they were."""
    for values in ([1, 2, 3], [1, 1, 1], [1, 2, 1]):
        beginnings = Beginnings()
        for name in ("first", "second"):
            assert beginnings.seen(name, run(values)).end.status == "completed"


def test_the_first_step_of_a_run_that_found_a_checkpoint() -> None:
    """A script that resumes says so by observe(step=...)."""
    assert first_step(run([1, 2], step=5)) == 5
    assert first_step(run([1, 2])) == 0
