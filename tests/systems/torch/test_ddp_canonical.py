"""DistributedDataParallel with the canonical all-reduce as a system, on gloo."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario


def _run(**changes: Any) -> trace.Trace:
    usual: dict[str, Any] = {
        "system": "ddp_canonical",
        "workload": "mlp",
        "world_size": 4,
        "seed": 0,
        "num_samples": 21,
        "batch_size": 13,
        "num_steps": 2,
        "dropout": 0.1,
    }
    return systems.run(Scenario(**{**usual, **changes}))


def _weights(run: trace.Trace) -> list[dict[str, str]]:
    assert run.end.status == "completed", run.end
    last = [one for one in run.of(trace.Update) if one.step == 1]
    return [{name: record.digest for name, record in one.weights.items()} for one in last]


def test_the_number_of_workers_changes_no_bit() -> None:
    """1 and 4 workers have equal weights, with dropout, and with some leaves empty."""
    alone, together = (_run(world_size=n, num_shards=16) for n in (1, 4))
    (expected,) = _weights(alone)
    assert _weights(together) == [expected] * 4
    numbers = [[s.shard for s in run.of(trace.Shard) if s.step == 1] for run in (alone, together)]
    assert numbers == [list(range(16))] * 2


@pytest.mark.parametrize("shard", [4, 5])
def test_whose_gradient_is_not_finite_is_named(shard: int) -> None:
    """All ranks name the same leaf, and halt before the step.

    The reducer removes a leaf's gradients before the next leaf: this is no skipped step.
    """
    fault = Fault(kind="non_finite_gradient", step=1, shard=shard, value="nan")
    run = _run(faults=(fault,))
    assert {(one.step, one.rank, one.shard) for one in run.of(trace.Halt)} == {(1, 2, shard)}
    assert {one.step for one in run.of(trace.Update)} == {0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 3}, "world_size=3 on system ddp_canonical: use a power of two, such as 4"),
        ({"num_shards": 6, "accumulation": 2}, "num_shards * accumulation=12 on system ddp_canon"),
    ],
)
def test_only_powers_of_two_have_such_a_tree(changes: dict[str, int], message: str) -> None:
    """Other numbers are refused by name."""
    run = _run(**changes)
    assert run.end.status == "failed"
    assert message in run.end.reason
