"""The machine of a pipeline's coordinator: stages, rounds, losses, complaints and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.mesh_coordinator import ROUNDS_MAX
from entrenar_py.train.wire.messages import (
    Applied,
    Assign,
    Commit,
    Group,
    Halt,
    Message,
    NonFinite,
    Refuse,
    Shutdown,
    Stage,
    Unreachable,
    Weights,
    Welcome,
)
from entrenar_py.train.wire.pipeline import Places
from tests.train.wire.pipeline_situations import (
    BLOCKS,
    THREE,
    Bench,
    applying,
    closed,
    computing,
    node,
    sent,
    staged,
    staging,
    summed,
)


def unreachable(rank: int, round_: int = 1) -> Unreachable:
    """Return a complaint about `rank`."""
    return Unreachable(round=round_, rank=rank, reason="refused")


def not_finite(shard: int = 0, step: int = 0) -> NonFinite:
    """Return the report of a loss that is infinite."""
    return NonFinite(
        step=step, shard=shard, tensor=None, element=None, loss=float("inf"), ids=(shard,)
    )


# --- a step -----------------------------------------------------------------------------------


def test_a_step_waits_for_every_stage() -> None:
    """With one of two stages nothing is handed out."""
    bench = Bench(changes={"num_awaited": 1})
    _, effects = bench.join(0)
    assert sent(effects, Group) == []
    _, effects = bench.join(1)
    (told, same) = sent(effects, Group)
    assert told == same
    assert (told.round, told.holders, told.addresses) == (1, (0, 0, 1, 1), ("host:9", "host:9"))
    assert sent(effects, Assign) == [Assign(step=0, shards=(0, 1))] * 2


def test_workers_of_a_stage_share_its_shards() -> None:
    """Each gets its run of them, and nothing if there are fewer shards than workers."""
    bench = Bench(THREE)
    for rank in range(3):
        _, effects = bench.join(rank)
    assert [one.shards for one in sent(effects, Assign)] == [(0, 1), (0,), (1,)]
    bench = Bench(THREE, {"num_shards": 1})
    for rank in range(3):
        _, effects = bench.join(rank)
    assert [one.shards for one in sent(effects, Assign)] == [(0,), (0,)]
    assert bench.phases() == ["computing", "computing", "ready"]


def test_a_step_from_sums_to_the_next_step() -> None:
    """Each stage gets its own weights; Commit follows the last Staged, Apply the first Applied."""
    bench = computing()
    assert sent(bench.deliver(0), Weights) == []
    effects = bench.deliver(1)
    for peer, blocks in ((0, [1, 0]), (1, [3, 2])):
        own = [one for one in effects if isinstance(one, do.Send) and one.peer == peer]
        assert [one.block for one in sent(own, Weights)] == blocks
    assert bench.say(0, staged()) == []
    assert sent(bench.say(1, staged()), Commit) == [Commit(step=0)] * 2
    effects = bench.say(1, Applied(step=0))
    assert effects[0] == do.Apply(0)
    effects = bench.say(0, Applied(step=0))
    assert do.Apply(0) not in effects
    assert sent(effects, Group) == []  # the round lasts
    assert sent(effects, Assign) == [Assign(step=1, shards=(0, 1))] * 2


def test_a_run_to_its_end() -> None:
    """After the last step all are told that the run is over."""
    bench = applying()
    bench.say(0, Applied(step=0))
    bench.say(1, Applied(step=0))
    for peer in (0, 1):
        bench.deliver(peer, step=1)
    for peer in (0, 1):
        bench.say(peer, staged(step=1))
    bench.say(0, Applied(step=1))
    effects = bench.say(1, Applied(step=1))
    assert sent(effects, Shutdown) == [Shutdown(problem=None)] * 2
    assert effects[-1] == do.Finish("completed")


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([summed(0)], "Summed shards=(0,): not the next assignment"),
        ([summed(), summed()], "Summed shards=(0, 1): not the next assignment, or already"),
        ([summed(step=1)], "step=1: the run is at step 0"),
        ([node(1)], "TreeNode block=1 level=1 index=0: its shards were not assigned"),
        ([summed(), node(3)], "TreeNode block=3: it is another stage's"),
        ([summed(), node(7)], "TreeNode block=7: it is another stage's"),
        ([summed(), node(0)], "TreeNode block=0: it is due only when block 1 is complete"),
        ([summed(), node(1), node(1)], "or were already received"),
        ([summed(), node(1, level=2)], "its shards were not assigned"),
        ([summed(), node(1, step=1)], "step=1: the run is at step 0"),
        ([summed(), node(1), node(0), node(0)], "TreeNode block=0: nothing more is due"),
        ([summed(), node(1), node(0), node(1)], "TreeNode block=1: nothing more is due"),
        ([staged()], "Staged: not all its weights were sent"),
        ([Applied(step=0)], "Applied from a peer that is computing"),
        ([not_finite(step=1)], "step=1: the run is at step 0"),
    ],
)
def test_a_message_out_of_turn_ends_the_connection(said: list[Message], reason: str) -> None:
    """Its sender is told why, and the other one starts over when there is another."""
    bench = computing()
    effects = bench.say(0, *said)
    assert reason in closed(effects)[0]
    (refuse,) = sent(effects, Refuse)
    assert refuse.retry
    assert (bench.machine.stage, bench.phases()) == (Stage.GATHERING, ["ready"])


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([staged(), staged()], "Staged from a peer that is staged"),
        ([staged(step=1)], "step=1: the run is at step 0"),
        ([summed()], "Summed shards=(0, 1): not the next assignment"),
        ([node(1)], "TreeNode block=1: nothing more is due"),
        ([staged(), summed()], "Summed from a peer that is staged"),
    ],
)
def test_a_message_out_of_turn_while_staging(said: list[Message], reason: str) -> None:
    """Nothing but one Staged is due."""
    assert reason in closed(staging().say(0, *said))[0]


def test_a_worker_on_the_wrong_backend_is_refused_for_good() -> None:
    """Or gets another place if it didn't ask for one."""
    bench = Bench(Places(((0,), (1,)), BLOCKS, ("cuda", None)))
    peer, effects = bench.hello(0, backend="cpu")
    (refuse,) = sent(effects, Refuse)
    assert not refuse.retry
    assert refuse.reason == "backend=cpu: stage 0 is planned for cuda"
    assert peer in closed(effects)
    _, effects = bench.hello(None, backend="cpu")
    assert [one.rank for one in sent(effects, Welcome)] == [1]
    _, effects = bench.hello(None, backend="cpu")
    (refuse,) = sent(effects, Refuse)
    assert refuse.retry  # its stage may become free
    _, effects = bench.hello(0, backend="cuda:1")
    assert [one.rank for one in sent(effects, Welcome)] == [0]


def test_a_worker_that_fits_no_stage_is_refused_for_good() -> None:
    """It would come back for ever."""
    bench = Bench(Places(((0,), (1,)), BLOCKS, ("cuda", "wgpu")))
    _, effects = bench.hello(None, backend="cpu")
    (refuse,) = sent(effects, Refuse)
    assert not refuse.retry
    assert refuse.reason == "backend=cpu: all stages are planned for cuda and wgpu"


def test_places_are_kept_for_those_that_have_a_name() -> None:
    """A worker without one gets another place, or is told which names there are."""
    bench = Bench(Places(((0,), (1,)), BLOCKS, names=("a", "")))
    _, effects = bench.hello(None)
    assert [one.rank for one in sent(effects, Welcome)] == [1]
    _, effects = bench.hello(0)
    assert [one.rank for one in sent(effects, Welcome)] == [0]
    _, effects = bench.hello(0)
    (refuse,) = sent(effects, Refuse)
    assert refuse.retry
    assert refuse.reason == "--id a: a live worker has that name; end it, or use another one"
    bench = Bench(Places(((0,), (1,)), BLOCKS, names=("a", "b")))
    _, effects = bench.hello(None)
    (refuse,) = sent(effects, Refuse)
    assert not refuse.retry
    told = "the stages are planned for workers by name: start it with --id and one of a, b"
    assert refuse.reason == told


@pytest.mark.parametrize("rank", [0, None])
def test_a_stranger_is_not_told_the_plan(rank: int | None) -> None:
    """Without the secret it learns nothing about backends."""
    bench = Bench(Places(((0,), (1,)), BLOCKS, ("cuda", "cuda")))
    _, effects = bench.hello(rank, backend="cpu", secret=b"guess")
    (refuse,) = sent(effects, Refuse)
    assert refuse.reason == "wrong secret"


# --- rounds -----------------------------------------------------------------------------------


def test_a_worker_lost_while_computing_voids_the_step() -> None:
    """The run waits for its stage, then begins a new round with the same step."""
    bench = computing()
    bench.deliver(0)
    effects = bench.machine.lost(1, "cut", 0.0)
    assert do.Left(1, 0, "cut") in effects
    assert do.Gather(0) in effects
    assert sent(effects, Group) == []
    peer, effects = bench.join(1)
    (told, _) = sent(effects, Group)
    assert (told.step, told.round) == (0, 3)
    assert bench.deliver(0, round=3) != []
    assert sent(bench.deliver(peer, round=3), Weights) != []


def test_a_worker_lost_from_a_shared_stage_is_replaced_at_once() -> None:
    """The other one of its stage takes over all shards."""
    bench = computing(THREE)
    effects = bench.machine.lost(2, "cut", 0.0)
    (told, _) = sent(effects, Group)
    assert told.holders == (0, 0, 1, 1)
    assert sent(effects, Assign) == [Assign(step=0, shards=(0, 1))] * 2


def test_a_worker_lost_while_staging_voids_the_step() -> None:
    """What was staged counts no more."""
    bench = staging()
    bench.say(0, staged())
    effects = bench.machine.lost(1, "cut", 0.0)
    assert do.Gather(0) in effects
    assert sent(effects, Commit) == []
    _, effects = bench.join(1)
    assert sent(effects, Commit) == []
    assert sent(effects, Assign) == [Assign(step=0, shards=(0, 1))] * 2


def test_a_worker_lost_while_applying_voids_nothing() -> None:
    """The others make the step, and its successor gets the state after it."""
    bench = applying()
    effects = bench.machine.lost(1, "cut", 0.0)
    assert not any(isinstance(one, do.Gather) for one in effects)
    effects = bench.say(0, Applied(step=0))
    assert effects[0] == do.Apply(0)
    assert do.Gather(1) in effects
    _, effects = bench.hello(1)
    assert [one.step for one in sent(effects, Welcome)] == [1]


def test_all_lost_before_one_made_the_step() -> None:
    """A committed step that nobody reports is computed again."""
    bench = applying()
    bench.machine.lost(0, "cut", 0.0)
    effects = bench.machine.lost(1, "cut", 0.0)
    assert do.Gather(0) in effects
    bench = applying()
    bench.say(0, Applied(step=0))
    bench.machine.lost(0, "cut", 0.0)
    assert do.Gather(1) in bench.machine.lost(1, "cut", 0.0)


def test_a_loss_between_two_steps_begins_one_round() -> None:
    """The next step is handed out once."""
    bench = computing(THREE)
    assert do.Gather(0) in bench.machine.lost(0, "cut", 0.0)
    bench.machine.lost(2, "cut", 0.0)  # while the run waits for the first stage
    _, effects = bench.join(0)
    assert len(sent(effects, Group)) == len(sent(effects, Assign)) == 2


@pytest.mark.parametrize("said", [summed(), node(1), staged(), not_finite(), unreachable(1)])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_message_of_a_round_that_is_over_has_no_effect(said: Message, is_new: bool) -> None:
    """Whether the next one has begun or a stage is still empty."""
    bench = computing()
    bench.machine.lost(1, "cut", 0.0)
    if is_new:
        if isinstance(said, NonFinite):
            return  # it tells no round, and would be said again
        bench.join(1)
    before = bench.phases()
    assert bench.say(0, said) == []
    assert bench.phases() == before


def test_a_report_of_another_ones_shard_has_no_effect() -> None:
    """It is of a round in which this worker had the shard."""
    bench = computing(THREE)
    assert bench.say(1, not_finite(1)) == []
    effects = bench.say(1, not_finite(0))
    assert [one.step for one in sent(effects, Halt)] == [0] * 3
    assert isinstance(effects[-1], do.Finish)
    assert effects[-1].status == "halted"


# --- complaints -------------------------------------------------------------------------------


def test_a_complaint_begins_a_new_round() -> None:
    """The other end's complaint about the same link is of the round before."""
    bench = computing()
    effects = bench.say(0, unreachable(1))
    assert sent(effects, Group)[0].round == 3
    assert sent(effects, Assign) == [Assign(step=0, shards=(0, 1))] * 2
    assert bench.say(1, unreachable(0)) == []


@pytest.mark.parametrize("reach", [staging, applying])
def test_a_complaint_after_the_sums_is_for_the_next_step(reach: Callable[[], Bench]) -> None:
    """The step is made; a new round begins with the next one."""
    bench = reach()
    assert bench.say(0, unreachable(1)) == []
    if bench.machine.stage is Stage.STAGING:
        bench.say(0, staged())
        bench.say(1, staged())
    bench.say(0, Applied(step=0))
    effects = bench.say(1, Applied(step=0))
    assert [(one.step, one.round) for one in sent(effects, Group)] == [(1, 2)] * 2


def test_the_third_complaint_in_a_step_dismisses_a_worker() -> None:
    """The one with the most complaints, although each complaint begins the step anew."""
    bench = computing(THREE)
    for times in range(ROUNDS_MAX - 1):
        effects = bench.say(0, unreachable(2, 1 + 2 * times))
        assert closed(effects) == {}
    effects = bench.say(1, unreachable(2, 1 + 2 * (ROUNDS_MAX - 1)))
    assert closed(effects) == {2: "worker 1 can't reach worker 2: refused"}
    assert sent(effects, Group)[0].ranks == (0, 1)


def test_complaints_are_counted_by_step() -> None:
    """After a step all begin at zero."""
    bench = computing()
    for times in range(ROUNDS_MAX - 1):
        bench.say(0, unreachable(1, 1 + 2 * times))
    number = bench.machine._round
    for peer in (0, 1):
        bench.deliver(peer, round=number)
    for peer in (0, 1):
        bench.say(peer, staged(round=number))
    for peer in (0, 1):
        bench.say(peer, Applied(step=0))
    assert closed(bench.say(0, unreachable(1, number))) == {}


def test_complaints_are_forgotten_with_a_lost_worker() -> None:
    """It may have been their cause, so the others are not dismissed for the next one."""
    bench = computing(THREE)
    for times in range(ROUNDS_MAX - 1):
        bench.say(0, unreachable(2, 1 + 2 * times))
    (told, _) = sent(bench.machine.lost(2, "cut", 0.0), Group)
    effects = bench.say(0, unreachable(1, told.round))
    assert closed(effects) == {}
    assert sent(effects, Group) != []
