"""The coordinator compares what its stages hold, and records the whole model's state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entrenar_py.shared import trace
from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import sharding
from entrenar_py.train.model import preparation
from entrenar_py.train.model.settings import StagePlan
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages.server import PipelineServer, plan_of_stages, workload_of
from entrenar_py.train.wire.messages import Applied, Loaded, TreeNode
from tests.train.stages import test_stages as models


@pytest.fixture
def server(small: Path, tmp_path: Path) -> PipelineServer:
    """A coordinator of two stages before the first step."""
    make, targets = models.MODELS["llama"]
    prepared = models.prepared_of(small, tmp_path / "model", make(), targets)
    plan = (StagePlan(layers=(0, 1)), StagePlan(layers=(1, 4)))
    workload = workload_of(prepared)
    cut = cutting.of(replace(prepared.settings, stages=plan), workload.module)
    scenario = plan_of_stages(preparation.plan_of(prepared.settings, workload))
    return PipelineServer(scenario, cut=cut, workload=workload)


def start_of(server: PipelineServer, rank: int) -> trace.Start:
    """Return the event of a worker that holds what it was sent."""
    names = [spec.name for spec in server.cut.specs[rank]]
    arrays = server.replica.replica.arrays
    weights = server.recorder.tensors({name: arrays[name] for name in names})
    return trace.Start(
        step=0,
        rank=rank,
        trainable=tuple(names),
        frozen=(),
        decayed=(),
        progress=server.replicas.progress(0),
        weights=weights,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_sent_is_held(server: PipelineServer, rank: int) -> None:
    server._require_own(start_of(server, rank))
    recorded = server._completed(start_of(server, rank))
    assert isinstance(recorded, trace.Start)
    arrays = server.replica.replica.arrays
    assert recorded.rank == rank
    assert recorded.weights == server.recorder.tensors(arrays)
    assert list(recorded.trainable) == list(arrays)


def test_a_void_round_leaves_its_faults_alone(server: PipelineServer) -> None:
    """Shards count once the step is made in their round."""
    struck = trace.Injected(fault={"kind": "huge_gradient", "step": 0}, step=0, rank=1, shard=0)
    shard = trace.Shard(
        step=0, epoch=0, rank=1, shard=0, ids=(0,), loss_sum=1.0, weight=1.0, finite=True
    )
    for rank in (0, 1):
        server.deliveries._events[rank] = [struck, shard] if rank else []
        server.deliver(rank)
    server.deliveries._events[0] = [struck]  # not delivered completely
    server.gather(0)
    assert server.recorder.of(trace.Shard) == []
    assert server.recorder.of(trace.Injected) == [struck, struck]


@pytest.mark.parametrize("is_left_out", [False, True])
def test_other_weights_than_were_sent(server: PipelineServer, is_left_out: bool) -> None:
    """As of a worker that steps by itself, or skips a layer."""
    start = start_of(server, 1)
    last = start.trainable[-1]
    wrong = {last: replace(start.weights[last], digest="0" * 32)}
    kept = {name: one for name, one in start.weights.items() if name != last}
    with pytest.raises(ProtocolError, match=f"rank 1 holds different weights.*{last}, step 0"):
        server._require_own(replace(start, weights=kept if is_left_out else {**kept, **wrong}))


def test_a_worker_that_does_not_say_what_it_holds(server: PipelineServer) -> None:
    """Whatever it computes, nobody could compare it."""
    with pytest.raises(ProtocolError, match="Loaded of rank 1 without the weights that it holds"):
        server.require(1, Loaded(step=0), b"")
    with pytest.raises(ProtocolError, match="Applied of rank 1 without the weights that it holds"):
        server.require(1, Applied(step=0), b"")


def test_a_sum_has_the_weight_of_its_samples(server: PipelineServer) -> None:
    """A stage that says another one would scale its gradient."""
    num_shards = server.plan.num_shards
    ids = sharding.cut(server.replicas.batch(), num_shards)[0]
    due = server.replicas.workload.weight(ids)
    node = TreeNode(step=0, round=1, block=0, level=0, index=0, loss=1.0, weight=due)
    payload = bytes(server.reduction.blocks.num_bytes(0))
    server.require(0, node, payload)
    with pytest.raises(ProtocolError, match=f"weight={due + 1:g}: its samples have {due:g}"):
        server.require(0, replace(node, weight=due + 1), payload)
