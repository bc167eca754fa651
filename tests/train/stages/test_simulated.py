"""Pipelines in virtual time: whatever befalls a message, the run ends with the undisturbed bits."""

from __future__ import annotations

from typing import cast

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import (
    Activation,
    ActivationGradient,
    Applied,
    Assign,
    Challenge,
    Commit,
    Message,
    Staged,
    Summed,
    TreeNode,
    Weights,
)
from entrenar_py.train.wire_io.injections import Fate, Meddling
from tests.train.stages import soak
from tests.train.stages.linear import Plan
from tests.train.stages.stages import LinearStage
from tests.train.stages.trials import LASTING, RESTART, Trial, seeded

NUM_SEEDS, IN_CI = 300, 100
THREE = Plan(((0,), (1, 2), (3,)), num_shards=3)
# All that is said in a step without heartbeats.
SAID = {Assign, Activation, ActivationGradient, Summed, TreeNode, Weights, Staged, Commit, Applied}
FATES = [*((fate, 0.0) for fate in Fate if fate not in LASTING), (RESTART, 0.0)]
FATES += [(fate, seconds) for fate in LASTING for seconds in (0.5, 45.0)]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first < IN_CI else pytest.mark.by_hand)
        for first in range(0, NUM_SEEDS, 50)
    ],
)
def test_any_schedule_with_any_faults(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    """No violation in 50 seeded runs."""
    assert soak.main(50, first) == 0, capsys.readouterr().out


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_an_undisturbed_run(num_stages: int) -> None:
    """All stages make all steps in one round, with the bits of one process."""
    trial = Trial(Plan(tuple((rank,) for rank in range(num_stages))), seed=1)
    trial.require_undisturbed()
    assert trial.witness.rounds == 1
    for node in trial.simulation.nodes:
        assert cast(LinearStage, node.end.hands).made == [0, 1, 2]
        assert node.end.finished == do.Finish("completed")


def second_step(plan: Plan) -> range:
    """Return which messages belong to step 1, from the first Commit of step 0 on."""
    trial = Trial(plan, seed=1)
    trial.require_undisturbed()
    at = [k for k, (_, _, one) in enumerate(trial.said) if isinstance(one, Commit)]
    step = range(at[0], at[2 * plan.places.num_ranks - 1] + 1)
    assert {type(one) for _, _, one in trial.said[step.start : step.stop]} == SAID
    return step


@pytest.mark.parametrize("number", range(len(FATES)))
def test_a_fault_at_each_message_of_a_step(number: int) -> None:
    """Each message from and to each worker of each stage meets some of the faults."""
    step = second_step(THREE)
    assert len(step) > 50
    for at in step[number % 3 :: 3]:
        trial = Trial(THREE, seed=1, strikes={at: FATES[number]})
        trial.require_undisturbed()


@pytest.mark.parametrize(
    ("plan", "strikes"),
    [
        # A worker is lost while others have staged: their Staged comes while the run waits.
        (Plan(((0,), (1,), (2, 3))), {90: (Fate.CUT, 0.0)}),
        # The same with a Summed on its way, and a loss between two steps after it.
        (Plan(((0,), (1,), (2,), (3,))), {177: (Fate.REORDER, 0.0), 148: (Fate.FLIP, 0.0)}),
        # One shard for two workers of a stage.
        (Plan(((0,), (1, 2)), num_shards=1), {}),
        (Plan(((0, 1), (2,)), num_shards=1), {35: (Fate.DELAY, 5.0)}),
    ],
)
def test_runs_that_once_went_wrong(plan: Plan, strikes: dict[int, tuple[Fate, float]]) -> None:
    """They end as undisturbed ones."""
    for seed in range(10):
        Trial(plan, seed, strikes).require_undisturbed()


def test_a_worker_without_a_place_takes_another_one() -> None:
    """It lost the one that it had to a worker that came meanwhile, and all stages are filled."""
    for seed in (682, 984):  # in which a connection breaks while another worker says hello
        trial = seeded(seed)
        assert trial.arrivals is not None
        assert set(trial.arrivals) == {None}
        trial.require_undisturbed()


def test_a_gradient_that_is_not_finite_halts_the_run() -> None:
    """No stage makes the step, nor a later one."""

    def prepare(hands: LinearStage) -> None:
        hands.not_finite = (1, 2)

    trial = Trial(THREE, seed=1, prepare=prepare)
    finish = trial.finish()
    assert finish.status == "halted"
    assert "non-finite loss inf on worker 0, step 1, shard 2" in finish.reason
    assert trial.witness.made == [0]
    assert trial.server.stopped is not None
    assert all(node.end.finished == finish for node in trial.simulation.nodes)


class Parted(Trial):
    """Two workers whose connections to each other always break in the handshake."""

    def _meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        super()._meddle(rank, up, message)
        is_link = up and isinstance(message, Challenge)
        return Meddling(Fate.CUT) if is_link else None


def test_workers_that_never_reach_each_other_end_the_run() -> None:
    """The run doesn't compute the same step for ever; it names the worker and the problem."""
    trial = Parted(Plan(((0,), (1,))), seed=3)
    finish = trial.finish()
    assert finish.status == "failed"
    assert "disconnected 3 times before step 0 was made" in finish.reason
    assert "can't reach worker" in finish.reason
    assert trial.witness.rounds < 30
    assert not any(isinstance(one, Activation) for _, _, one in trial.said)
