"""A pass of a round that is over has no effect on the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from entrenar_py.compute import open_backend
from entrenar_py.shared import trace
from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import checkpoint, sharding
from entrenar_py.train.model import model, preparation
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages.member import DRAWS_MAX, StageMember
from entrenar_py.train.stages.server import plan_of_stages
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import Activation, Summed, Welcome
from entrenar_py.train.wire.pipeline_peers import Passed
from tests.train.stages import test_stages as models


@pytest.fixture
def member(small: Path, tmp_path: Path) -> StageMember:
    """The worker of a model's only stage, before the first step."""
    make, targets = models.MODELS["llama"]
    prepared = models.prepared_of(small, tmp_path / "model", make(), targets)
    [stage] = models.stages_of(prepared, 4)
    workload = stage._workload
    cut = cutting.of(prepared.settings, model.shape(prepared.settings))
    scenario = plan_of_stages(preparation.plan_of(prepared.settings, workload))
    made = StageMember(scenario, open_backend("cpu"), workload, every=cut.blocks, stage=0)
    tensors = workload.initial(scenario.rng("initial"))
    progress = checkpoint.Progress(position=sharding.Position(), schedule_step=0)
    payload = checkpoint.dump_state(workload.specs, "sgd", progress, tensors, {})
    welcome = Welcome(rank=0, step=0, blocks=cut.blocks.count, resumed=False, proof="")
    made.load(welcome, payload)
    made.member.recorder.drain()
    return made


def test_a_pass_that_outlives_its_round_records_nothing(
    member: StageMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after the next round has begun; then its shard is computed again."""
    stepper: Any = member.replicas.workers[0].replica.stepper
    forward = stepper.forward

    def interrupted(*given: Any) -> Any:
        found = forward(*given)
        member.regroup(2)
        return found

    member.regroup(1)
    monkeypatch.setattr(stepper, "forward", interrupted)
    run(member, do.Pass(0, 0, 0, is_forward=True, is_last=False))
    monkeypatch.setattr(stepper, "forward", forward)
    num_shards = member.plan.num_shards
    for shard in range(num_shards):
        is_last = shard == num_shards - 1
        run(member, do.Pass(1 + shard, 0, shard, is_forward=True, is_last=is_last))
    told = member.payload(Summed(step=0, round=2, shards=tuple(range(num_shards))))
    events = trace.load_events(bytes(told))
    assert [one.shard for one in events if isinstance(one, trace.Shard)] == [*range(num_shards)]


def test_a_pass_whose_round_is_over_before_it_begins(member: StageMember) -> None:
    """It waits in a thread's queue, and takes nothing that is the next round's."""
    member.regroup(1)
    asked = do.Pass(0, 0, 0, is_forward=True, is_last=False)
    member.bind(asked)
    member.regroup(2)
    assert member.run(asked) == Passed(began_s=ANY, ended_s=ANY)
    assert not member._round.is_begun
    assert member._out == {}


def run(member: StageMember, asked: do.Pass) -> None:
    """Make a pass in the round in which it is asked for."""
    member.bind(asked)
    member.run(asked)


def test_a_number_of_draws_that_is_none(member: StageMember) -> None:
    said = Activation(step=0, round=0, shard=0, dtype="float32", draws=DRAWS_MAX)
    with pytest.raises(ProtocolError, match="draws=2147483648: use 0 to 2147483647"):
        member.require(said, b"")
