"""The machine of the coordinator: effects of events, ends of a run, and timeouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import frames
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.messages import (
    Applied,
    Assign,
    Average,
    Commit,
    Halt,
    Heartbeat,
    Loaded,
    NonFinite,
    Shutdown,
    TreeNode,
    Welcome,
)
from entrenar_py.train.wire.phases import PeerPhase, Stage
from tests.train.wire.situations import WORKERS_MAY_SAY, alone, computed, link_of, node, reach
from tests.train.wire.star import SECRET, TIMING, Star, run_of

BAD = NonFinite(step=0, shard=0, tensor="w", element=1, loss=1.0, ids=(1,))


# --- in order ---------------------------------------------------------------------------------


def test_what_a_run_of_one_step_asks_for() -> None:
    """All effects from the first connection to the end, in order."""
    star, link = alone(num_steps=1, num_blocks=2, saves=(1,))
    star.deliver()
    (welcome,) = [one for one in star.effects if isinstance(one, do.Send)][1:2]
    assert isinstance(welcome.message, Welcome)
    assert (welcome.message.rank, welcome.message.step) == (0, 0)
    to = partial(do.Send, link.peer)
    expected = [
        do.Joined(0, 0, late=False),
        do.Keep(0, Loaded(step=0)),
        to(Assign(step=0, shards=(0, 1, 2, 3))),
        do.Keep(0, computed(0, 1, 2, 3)),
        do.Keep(0, node(block=1)),
        do.Reduce(0, 1),
        to(Average(step=0, round=0, block=1, loss=1.0, weight=1.0)),
        do.Keep(0, node(block=0)),
        do.Deliver(0),
        do.Reduce(0, 0),
        to(Average(step=0, round=0, block=0, loss=1.0, weight=1.0)),
        to(Commit(step=0)),
        do.Apply(0),
        do.Keep(0, Applied(step=0)),
        do.Gather(1),
        do.Save(1),
        to(Shutdown(problem=None)),
        do.Close(link.peer, "completed"),
        do.Finish("completed"),
    ]
    assert [_unweighted(one) for one in star.effects[3:]] == [_unweighted(one) for one in expected]


def test_shards_are_dealt_in_runs() -> None:
    """Runs go by rank, larger ones first; a lost worker's shards are queued at others."""
    star = Star(run_of(num_shards=5, awaited={0: (0, 1, 2)}))
    stations = [star.arrive() for _ in range(3)]
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    star.cut(link_of(stations[1]))
    dealt = [one for one in star.effects if isinstance(one, do.Send)]
    assert [
        one.message.shards for one in dealt if isinstance(one.message, Assign)
    ] == [(0, 1), (2, 3), (4,), (2,), (3,)]  # fmt: skip


def test_who_comes_late_takes_part_from_the_next_step() -> None:
    """It gets the state between steps, and is recorded as late."""
    star, link = reach(PeerPhase.WAITING)
    assert star.coordinator.step == 0
    star.until(lambda: star.coordinator.peers[link.peer].phase is PeerPhase.COMPUTING)
    joined = [one for one in star.effects if isinstance(one, do.Joined)]
    assert joined[-1] == do.Joined(2, 1, late=True)
    assert len(link.station.state) == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_who_starts_from_a_checkpoint_is_told(resumed: bool) -> None:
    """The first workers are told so; a later one is not."""
    star, _ = reach(PeerPhase.COMPUTING, num_steps=4, first_step=1, resumed=resumed)
    told = [one.message for one in star.effects if isinstance(one, do.Send)]
    welcomes = [one for one in told if isinstance(one, Welcome)]
    first = [one.resumed for one in welcomes if one.step == 1]
    assert set(first) == {resumed}
    assert {one.resumed for one in welcomes if one.step > 1} == {False}


def test_a_step_waits_for_those_it_needs() -> None:
    """Step 1 waits until the rank that it awaits is there."""
    star = Star(run_of(awaited={1: (2,)}))
    star.arrive()
    star.deliver()
    assert (star.coordinator.stage, star.coordinator.step) == (Stage.GATHERING, 1)
    star.arrive(1)
    star.deliver()
    assert star.coordinator.step == 1
    star.arrive(2)
    star.deliver()
    assert star.finished == do.Finish("completed")


# --- how a run ends ---------------------------------------------------------------------------


def test_a_value_that_is_not_finite_halts_everyone() -> None:
    """The report is kept, all workers halt, no step is made."""
    star, link = reach(PeerPhase.COMPUTING)
    said = NonFinite(step=1, shard=3, tensor="w", element=5, loss=1.0, ids=(1,))
    others = list(star.links)
    effects = star.say_above(link, said)
    reason = (
        "non-finite gradient w[5] on worker 2, step 1, shard 3: training halted before any update"
    )
    assert effects == [
        do.Keep(2, said),
        do.Stop(1, 2, reason, said),
        *(do.Send(peer, Halt(step=1, reason=reason)) for peer in others),
        *(do.Close(peer, reason) for peer in others),
        do.Finish("halted", reason),
    ]
    star.deliver()
    assert {one.finished for one in star.stations} == {do.Finish("halted", reason)}


def test_a_loss_that_is_not_finite_halts_everyone() -> None:
    """A report without a tensor is about the loss."""
    star, link = alone()
    said = NonFinite(step=0, shard=1, tensor=None, element=None, loss=float("nan"), ids=())
    star.say_above(link, said)
    assert star.finished is not None
    assert star.finished.reason.startswith("non-finite loss nan on worker 0, step 0, shard 1:")


def test_an_average_that_is_not_finite_halts_everyone() -> None:
    """A sum of finite parts may overflow; no worker is blamed."""
    star, link = alone()
    machine = star.coordinator
    machine.receive(link.peer, computed(0, 1, 2, 3), 0.0)
    assert machine.receive(link.peer, node(), 0.0)[-1] == do.Reduce(0, 0)
    assert machine.refused(0, "overflow") == [
        do.Stop(0, None, "overflow"),
        do.Send(link.peer, Halt(step=0, reason="overflow")),
        do.Close(link.peer, "overflow"),
        do.Finish("halted", "overflow"),
    ]


def test_a_halt_is_heard_whatever_it_names() -> None:
    """A tensor may have the longest name that a message can hold."""
    star, link = alone()
    said = NonFinite(step=0, shard=0, tensor="w" * 1_000, element=1, loss=1.0, ids=())
    sent = [one.message for one in star.say_above(link, said) if isinstance(one, do.Send)]
    assert [frames.parse_header(one.tag, frames.dump_header(one)) for one in sent] == sent


def test_nobody_joins_what_is_over() -> None:
    """After the end connections are closed at once, and ticks do nothing."""
    star = Star(run_of())
    star.arrive()
    star.finish()
    assert star.coordinator.connected("late", "0" * 32, 1.0) == [
        do.Close("late", "the run is over")
    ]
    assert star.coordinator.tick(1e9) == []


# --- how long it waits ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phase", [one for one in WORKERS_MAY_SAY if one is not PeerPhase.CHALLENGED]
)
def test_the_silent_are_dropped(phase: PeerPhase) -> None:
    """A worker is dropped after `dead_after_s` without a byte, and not before."""
    star, link = reach(phase)
    machine = star.coordinator
    machine.heard(link.peer, 1.0)
    others = star.links.keys() - {link.peer}

    def tick(now: float) -> list[Effect]:
        for peer in others:
            machine.heard(peer, now)
        return [one for one in machine.tick(now) if isinstance(one, do.Close)]

    assert tick(30.99) == []
    assert tick(31.0) == [do.Close(link.peer, "silent for 30.0 s")]
    assert machine.peers.keys() == others


def test_all_may_fall_silent_at_once() -> None:
    """The run continues with the workers that connect next."""
    star = Star(run_of(awaited={0: (0, 1, 2)}))
    for _ in range(3):
        star.arrive()
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    for link in star.links.values():
        link.dead = True
    star.wait(30.0)
    assert star.coordinator.peers == {}
    assert star.finish().status == "completed"


def test_a_stranger_has_a_while_to_prove_itself() -> None:
    """It has `hello_s`, which is less than `dead_after_s`."""
    machine = Coordinator(run_of(), secret=SECRET, timing=TIMING, now=0.0)
    machine.connected("stranger", "0" * 32, 0.0)
    assert machine.tick(9.99) == []
    assert machine.tick(10.0) == [do.Close("stranger", "silent for 10.0 s")]


def test_a_stranger_gains_nothing_by_trickling() -> None:
    """`hello_s` counts from the connection, not the last byte."""
    machine = Coordinator(run_of(), secret=SECRET, timing=TIMING, now=0.0)
    machine.connected("stranger", "0" * 32, 0.0)
    for now in range(1, 11):
        machine.heard("stranger", float(now))
    assert machine.tick(10.0) == [do.Close("stranger", "silent for 10.0 s")]


def test_everyone_let_in_hears_a_heartbeat() -> None:
    """Admitted peers in any phase get one every `heartbeat_s`; strangers none."""
    star, _ = reach(PeerPhase.WAITING)
    star.coordinator.connected("stranger", "0" * 32, star.now)
    beats = [do.Send(peer, Heartbeat()) for peer in (0, 1, 2)]
    assert star.coordinator.tick(4.9) == []
    assert star.coordinator.tick(5.0) == beats
    assert star.coordinator.tick(9.9) == []
    assert star.coordinator.tick(10.0)[-3:] == beats


def test_a_run_does_not_wait_for_ever() -> None:
    """It fails after `gather_s`, and tells which step waited and who was there."""
    star = Star(run_of(awaited={1: (1, 2)}))
    station = star.arrive()
    star.deliver()
    assert star.coordinator.step == 1
    for _ in range(299):
        star.wait(1.0)
        star.deliver()
    assert star.finished is None
    star.wait(1.0)
    star.deliver()
    reason = "step 1 has waited 300 s for workers; here are [0]"
    assert [one for one in star.effects if isinstance(one, do.Finish)] == [station.finished]
    assert station.finished == do.Finish("failed", reason)


def test_who_comes_and_goes_wins_no_time() -> None:
    """A worker that joins and leaves does not extend the waiting time."""
    star = Star(run_of(awaited={0: (0, 2)}))
    star.arrive(0)
    star.deliver()
    for _ in range(15):
        assert star.finished is None
        station = star.arrive(1)
        star.deliver()
        star.wait(20.0)
        star.deliver()
        if station.link is not None:
            star.cut(station.link)
    assert star.now == 300.0
    reason = "step 0 has waited 300 s for workers; here are [0, 1]"
    assert star.finished == do.Finish("failed", reason)


def _phases(star: Star) -> set[PeerPhase]:
    return {one.phase for one in star.coordinator.peers.values()}


@pytest.mark.parametrize("loads", [False, True])
def test_who_came_in_time_has_time_to_load(loads: bool) -> None:
    """It has another `gather_s`; then it is dropped, and the run fails."""
    star = Star(run_of(awaited={0: (0,)}))
    star.wait(290.0)
    late = star.arrive(0)
    star.until(lambda: _phases(star) == {PeerPhase.LOADING})
    (member,) = star.coordinator.peers.values()
    member.heard = star.now = 589.0
    assert [one for one in star.coordinator.tick(star.now) if not isinstance(one, do.Send)] == []
    if loads:
        star.deliver()
        assert star.finished == do.Finish("completed")
        return
    member.heard = star.now = 590.0
    effects = star.coordinator.tick(star.now)
    assert effects[0] == do.Close(link_of(late).peer, "has loaded for 300 s")
    reason = "step 0 has waited 590 s for workers; here are []"
    assert effects[-1] == do.Finish("failed", reason)


def test_waiting_begins_anew_with_each_step() -> None:
    """If all workers leave during a step, `gather_s` starts again."""
    star, link = alone()
    for _ in range(29):
        star.wait(10.0)
        star.coordinator.heard(link.peer, star.now)
        link.station.machine.heard(star.now)
    star.cut(link)
    assert star.now == 290.0
    star.wait(299.0)
    assert star.coordinator.stage is Stage.GATHERING
    star.wait(1.0)
    reason = "step 0 has waited 300 s for workers; here are []"
    assert star.finished == do.Finish("failed", reason)


def _unweighted(effect: Effect) -> Effect:
    """Return a kept node without its weight, which is the number of shards under it."""
    if isinstance(effect, do.Keep) and isinstance(effect.message, TreeNode):
        message = effect.message
        return do.Keep(effect.rank, replace(message, weight=4.0))
    return effect
