"""Pipeline parallelism as a system: real processes over gloo, with `observe`."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py.check.evidence.needs import ORACLE
from entrenar_py.check.harness import companions
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Verdict
from entrenar_py.systems.torch import pipeline_parallel
from tests import traces


def scenario(**changes: Any) -> Scenario:
    """Return a run of two stages, with one batch of seven lines of unequal length."""
    usual: dict[str, Any] = {
        "system": "pipeline_parallel",
        "workload": "decoder_full",
        "world_size": 2,
        "seed": 0,
        "num_samples": 7,
        "batch_size": 7,
        "num_steps": 1,
        "num_shards": 4,
        "detail": "values",
    }
    return Scenario(**{**usual, **changes})


@pytest.mark.parametrize("schedule", pipeline_parallel.SCHEDULES)
def test_it_trains_as_a_single_device_does(schedule: str) -> None:
    """For every schedule, losses, gradients and weights are those of a single device."""
    subject = scenario(options={"schedule": schedule})
    ((oracle,),) = companions.of((ORACLE,), subject).beside.values()
    runs = [traces.run(subject), traces.run(oracle)]
    finding = traces.judge("parity", runs)
    assert finding.verdict is Verdict.HELD, finding
    (shard,) = runs[0].of(trace.Shard)
    assert len(shard.gradient) == len(runs[1].of(trace.Update)[0].gradient)


@pytest.mark.parametrize(
    ("workload", "options", "sizes"),
    [
        ("decoder_full", {}, [1, 2, 1, 2]),
        ("decoder_full", {"pp": 4}, [1, 2, 1, 4]),
        ("decoder", {"pp": 2}, [1, 2, 1, 2]),
        ("decoder", {"schedule": "interleaved"}, [1, 1, 1, 1]),  # a rank would train nothing
        ("mlp", {"pp": 3}, [1, 1, 3, 1]),
        ("linear", {}, [1, 1, 1, 1]),
    ],
)
def test_how_many_ranks_share_a_model(
    workload: str, options: dict[str, Any], sizes: list[int]
) -> None:
    """The number of ranks divides the world, and each has stages and something to train."""
    subject = scenario(workload=workload, options=options)
    assert [pipeline_parallel.degree(subject, world) for world in (1, 2, 3, 4)] == sizes


def test_two_stages_a_rank_are_dealt_in_turn() -> None:
    """With two stages a rank, consecutive stages are on consecutive ranks."""
    subject = scenario(options={"schedule": "zero_bubble"})
    assert pipeline_parallel.stages_of(subject, 2) == [
        [range(1), range(2, 3)],
        [range(1, 2), range(3, 4)],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "dualpipe"}, "allowed are gpipe, 1f1b, interleaved, zero_bubble"),
        ({"pp": 8}, "can't be cut into so many stages"),
        ({"pp": 0}, "pp=0"),
    ],
)
def test_what_can_not_be_cut_is_refused(options: dict[str, Any], message: str) -> None:
    """Impossible options are refused before a process is started."""
    with pytest.raises(UsageError, match=message):
        pipeline_parallel.run(scenario(options=options))
