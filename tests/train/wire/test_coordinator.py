"""The machine of a star coordinator: steps, blocks, deaths, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import frames
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.messages import (
    ALWAYS,
    MESSAGES,
    Applied,
    Assign,
    Average,
    Commit,
    Halt,
    Heartbeat,
    Leave,
    Loaded,
    Message,
    NonFinite,
    PeerPhase,
    Refuse,
    Shutdown,
    Stage,
    Staged,
    TreeNode,
    Welcome,
)
from tests.train.wire.samples import SAMPLES
from tests.train.wire.situations import WORKERS_MAY_SAY, alone, computed, link_of, node, reach
from tests.train.wire.star import SECRET, TIMING, Link, Star, Station, closes, closing, run_of

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


def test_workers_are_told_that_a_long_save_goes_on() -> None:
    """They get heartbeats, and the run is not given up; then it goes on."""
    star = Star(run_of(saves={0}), beside=True)
    station = star.arrive()
    star.until(lambda: bool(star.reducing))
    for _ in range(100):
        star.wait(TIMING.heartbeat_s)
        for action in star.ready()[1:]:  # all but the end of the save
            action()
    assert station.link is not None
    star.reduce()
    star.deliver()
    assert star.finished == do.Finish("completed")
    assert station.finished == do.Finish("completed")


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
    reason = "step 1 has waited 300 s for workers; present are [0]"
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
    reason = "step 0 has waited 300 s for workers; present are [0, 1]"
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
    reason = "did not receive and load the state within 300 s; if that takes longer, give a larger "
    assert effects[0] == do.Close(link_of(late).peer, f"{reason}timing.gather_s")
    reason = "step 0 has waited 590 s for workers; present are []"
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
    reason = "step 0 has waited 300 s for workers; present are []"
    assert star.finished == do.Finish("failed", reason)


def _unweighted(effect: Effect) -> Effect:
    """Return a kept node without its weight, which is the number of shards under it."""
    if isinstance(effect, do.Keep) and isinstance(effect.message, TreeNode):
        message = effect.message
        return do.Keep(effect.rank, replace(message, weight=4.0))
    return effect


def two_of_a_step(num_blocks: int) -> tuple[Star, Link, Link]:
    """Return two workers that have to deliver shards 0 and 1, and 2 and 3, of step 0."""
    star = Star(run_of(num_blocks=num_blocks, awaited={0: (0, 1)}))
    first, second = link_of(star.arrive()), link_of(star.arrive())
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    return star, first, second


def test_a_block_is_averaged_when_every_shard_of_it_is_there() -> None:
    """It is sent at once, before other blocks come."""
    star, first, second = two_of_a_step(3)
    star.say_above(first, computed(0, 1))
    star.say_above(second, computed(2, 3))
    for block in (2, 1):
        left, right = node(level=1, block=block), node(level=1, index=1, block=block)
        assert star.say_above(first, left) == [do.Keep(0, left)]
        assert star.say_above(second, right) == [do.Keep(1, right), do.Reduce(0, block)]
        average = Average(step=0, round=0, block=block, loss=1.0, weight=1.0)
        assert star.effects[-2:] == [do.Send(0, average), do.Send(1, average)]
    assert star.record.averaged == [2, 1]
    stages = [star.coordinator.stage]
    for said in (node(level=1), node(level=1, index=1)):
        star.say_above((first, second)[said.index], said)
        stages.append(star.coordinator.stage)
    assert stages == [Stage.COMPUTING, Stage.COMPUTING, Stage.STAGING]


def test_what_is_averaged_stays_when_its_worker_is_lost() -> None:
    """The worker that takes over delivers every block; an averaged block isn't counted again."""
    star, first, second = two_of_a_step(2)
    for link, index, shards in ((first, 0, (0, 1)), (second, 1, (2, 3))):
        star.say_above(link, computed(*shards))
        star.say_above(link, node(level=1, index=index, block=1))
    assert star.record.averaged == [1]
    star.cut(second)
    star.say_above(first, node(level=1, index=0))
    again = [computed(2, 3), node(level=1, index=1, block=1), node(level=1, index=1)]
    assert [star.say_above(first, said) for said in again] == [
        [do.Keep(0, again[0])],
        [],
        [do.Keep(0, again[2]), do.Deliver(0), do.Reduce(0, 0)],
    ]
    assert star.coordinator.stage is Stage.STAGING


def test_what_is_not_averaged_is_void_when_its_worker_is_lost() -> None:
    """Blocks of an incomplete delivery are missing again."""
    star, first, second = two_of_a_step(2)
    star.say_above(second, computed(2, 3))
    star.say_above(second, node(level=1, index=1, block=1))
    star.say_above(second, node(level=0, index=3, block=0))
    star.cut(second)
    star.say_above(first, computed(0, 1))
    for block in (1, 0):
        star.say_above(first, node(level=1, block=block))
        assert star.record.averaged == []
    star.say_above(first, computed(2, 3))
    for block in (1, 0):
        star.say_above(first, node(level=1, index=1, block=block))
    assert star.record.averaged == [1, 0]


def test_what_was_wholly_delivered_outlives_its_worker() -> None:
    """A complete delivery is not computed again."""
    star, first, second = two_of_a_step(2)
    star.say_above(second, computed(2, 3))
    for block in (1, 0):
        star.say_above(second, node(level=1, index=1, block=block))
    star.cut(second)
    assert star.coordinator.peers[first.peer].assigned == [(0, 1)]
    star.deliver()
    assert len(star.record.state) == 2


def test_what_is_being_averaged_stays_when_its_worker_is_lost() -> None:
    """A complete block is not computed again, and the step waits for its average."""
    star = Star(run_of(num_blocks=2, awaited={0: (0, 1)}), beside=True)
    first, second = link_of(star.arrive()), link_of(star.arrive())
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    for link, index, shards in ((first, 0, (0, 1)), (second, 1, (2, 3))):
        star.say_above(link, computed(*shards))
        star.say_above(link, node(level=1, index=index, block=1))
    assert list(star.reducing) == [do.Reduce(0, 1)]
    star.cut(second)
    star.say_above(first, node(level=1, index=0))
    again = [computed(2, 3), node(level=1, index=1, block=1), node(level=1, index=1)]
    assert [len(star.say_above(first, said)) for said in again] == [1, 0, 3]
    assert list(star.reducing) == [do.Reduce(0, 1), do.Reduce(0, 0)]
    stages = []
    for _ in range(2):
        star.reduce()
        stages.append(star.coordinator.stage)
    assert stages == [Stage.COMPUTING, Stage.STAGING]


def test_a_step_that_everyone_left_is_averaged_anew() -> None:
    """Averages in progress are forgotten."""
    star = Star(run_of(awaited={0: (0,)}), beside=True)
    star.arrive()
    star.until(lambda: bool(star.reducing))
    star.cut(link_of(star.stations[0]))
    assert (star.coordinator.stage, list(star.reducing)) == (Stage.GATHERING, [])
    assert star.finish().status == "completed"
    assert len(star.record.state) == 2


ALL = computed(0, 1, 2, 3)

ILLEGAL = [
    (phase, kind)
    for phase, legal in WORKERS_MAY_SAY.items()
    for kind in MESSAGES.values()
    if kind not in legal and (kind not in ALWAYS or phase is PeerPhase.CHALLENGED)
]


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL)
def test_what_is_not_legal_ends_that_connection_only(phase: PeerPhase, kind: type[Message]) -> None:
    """Any message that the table does not list ends its connection, and the run completes."""
    star, link = reach(phase)
    effects = star.say_above(link, SAMPLES[kind][0])
    reason = f"{kind.__name__} from a peer that is {phase}"
    assert [one for one in effects if isinstance(one, do.Close)] == [do.Close(link.peer, reason)]
    assert len(star.links) == 2
    assert star.finish().status == "completed"


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (PeerPhase.LOADING, Loaded(step=0)),
        (PeerPhase.COMPUTING, node(step=0)),
        (PeerPhase.COMPUTING, computed(0)),
        (PeerPhase.COMPUTING, BAD),
        (PeerPhase.STAGING, Staged(step=2, round=0)),
        (PeerPhase.APPLYING, Applied(step=0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_another_step_is_refused(phase: PeerPhase, said: Message) -> None:
    """A message of an earlier or later step ends its connection."""
    star, link = reach(phase)
    assert star.coordinator.step == 1
    close = closing(star.say_above(link, said))
    assert "the run is at step 1" in close.reason
    assert star.finish().status == "completed"


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ([node(block=1)], "its shards were not assigned, or were already received"),
        ([ALL, node(block=2)], "TreeNode block=2: it is due only when block 3 is complete"),
        ([ALL, node(block=2**63 - 1)], "it is due only when block 9223372036854775808 is complete"),
        ([ALL, node()], "TreeNode block=0: it is due only when block 1 is complete"),
        (
            [ALL, node(level=1, block=1), node()],
            "TreeNode block=0: it is due only when block 1 is complete",
        ),
        (
            [ALL, node(block=1), node(block=1)],
            "its shards were not assigned, or were already received",
        ),
        (
            [ALL, node(0, 0, 4, 1)],
            (
                "TreeNode block=1 level=0 index=4: its shards were not assigned, or were "
                "already received"
            ),
        ),
        ([ALL, node(0, 2, 1, 1)], "its shards were not assigned, or were already received"),
        ([ALL, node(0, 0, 2**63 - 1, 1)], "its shards were not assigned, or were already received"),
        (
            [ALL, node(0, 0, 0, 1), node(0, 0, 0, 1)],
            "its shards were not assigned, or were already received",
        ),
        (
            [ALL, node(0, 1, 0, 1), node(0, 0, 1, 1)],
            "its shards were not assigned, or were already received",
        ),
        (
            [ALL, node(0, 0, 3, 1), node(block=1)],
            "its shards were not assigned, or were already received",
        ),
        ([computed(0, 1)], "not the next assignment, or already reported"),
        ([computed(0, 1, 2, 3, 3)], "not the next assignment, or already reported"),
        ([computed()], "not the next assignment, or already reported"),
        ([ALL, ALL], "not the next assignment, or already reported"),
        ([ALL, node(block=1), ALL], "not the next assignment, or already reported"),
    ],
)
def test_a_delivery_is_what_was_asked_for(said: list[Message], complaint: str) -> None:
    """`Computed` with the assigned shards, then each of their nodes once per block."""
    star, link = alone(num_blocks=2)
    for one in said[:-1]:
        assert not closes(star.say_above(link, one), link)
    close = closing(star.say_above(link, said[-1]))
    assert complaint in close.reason
    link.down.clear()  # an average, for what the worker itself never said
    assert star.finish().status == "completed"


@pytest.mark.parametrize("level", [3, 4, 2**62])
def test_a_node_above_the_root_is_refused(level: int) -> None:
    """A tree over four shards ends at level 2."""
    star, link = alone()
    star.say_above(link, ALL)
    assert closes(star.say_above(link, node(level=level)), link)


def _owes_two_deliveries() -> tuple[Star, Link]:
    """Return a star of two workers: one is lost, and the other has its shards, too."""
    star = Star(run_of(awaited={0: (0, 1)}))
    first, second = link_of(star.arrive()), link_of(star.arrive())
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    star.cut(second)
    assert star.coordinator.peers[first.peer].assigned == [(0, 1), (2, 3)]
    return star, first


def test_a_node_is_of_one_delivery() -> None:
    """Deliveries count as a whole, so a node must not span two of them."""
    star, link = _owes_two_deliveries()
    star.say_above(link, computed(0, 1))
    assert closes(star.say_above(link, node()), link)


def test_deliveries_come_one_after_the_other() -> None:
    """Nodes of a delivery are due when the previous one is complete."""
    for early in (node(level=1, index=1), computed(2, 3)):
        star, link = _owes_two_deliveries()
        star.say_above(link, computed(0, 1))
        assert closes(star.say_above(link, early), link)


def test_a_worker_halts_the_run_for_its_own_shards_only() -> None:
    """A report about another worker's shard is refused."""
    star = Star(run_of(awaited={0: (0, 1)}))
    link = link_of(star.arrive())
    star.arrive()
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    said = NonFinite(step=0, shard=3, tensor=None, element=None, loss=1.0, ids=())
    assert closes(star.say_above(link, said), link)
    assert star.finished is None


def test_who_leaves_is_not_an_error() -> None:
    """The reason is recorded, and its shards go to others."""
    star, link = reach(PeerPhase.COMPUTING)
    effects = star.say_above(link, Leave(reason="asked to"))
    assert effects[:2] == [
        do.Close(link.peer, "left: asked to"),
        do.Left(2, 1, "left: asked to"),
    ]
    assert star.finish().status == "completed"


def test_a_stranger_is_refused_and_sent_away() -> None:
    """It gets the reason, its connection ends, and no rank is used."""
    star = Star(run_of())
    station = star.arrive(secret=SECRET + b"!")
    star.deliver()
    refusal = do.Send(0, Refuse(reason="wrong secret", retry=False))
    assert star.effects[1:] == [refusal, do.Close(0, "refused: wrong secret")]
    assert station.finished == do.Finish("failed", "refused: wrong secret")
    assert star.coordinator.peers == {}


def test_the_dead_are_not_heard() -> None:
    """Messages that arrive after their connection ended are ignored."""
    star, link = alone()
    star.cut(link)
    assert star.coordinator.receive(link.peer, node(), star.now) == []
    assert star.coordinator.lost(link.peer, "again", star.now) == []
    star.coordinator.heard(link.peer, star.now)
    assert link.peer not in star.coordinator.peers


# --- again and again ------------------------------------------------------------------------------


def _breaks(star: Star, station: Station, shard: int) -> list[do.Effect]:
    """Return the effects when `station` joins and delivers a shard that it was not assigned."""
    if station.link is None:
        star.connect(station)
    star.until(lambda: bool(station.jobs))
    return star.say_above(link_of(station), computed(shard))


def test_who_is_thrown_out_is_told_why() -> None:
    """It may come back; a peer that is not a member gets no reason."""
    star, link = alone()
    effects = star.say_above(link, computed(7))
    reason = "disconnected: Computed shards=(7,): not the next assignment, or already reported"
    assert effects[0] == do.Send(link.peer, Refuse(reason=reason, retry=True))
    assert star.finish().status == "completed"


def test_a_run_that_only_throws_out_ends() -> None:
    """It fails if a worker is thrown out repeatedly for one reason.

    Numbers in the reason don't matter. A step in between would reset the count. The other workers
    are told why.
    """
    star = Star(run_of())
    station = star.arrive()
    for shard in (7, 8):
        assert star.coordinator.stage is not Stage.OVER
        _breaks(star, station, shard)
        star.deliver()
    told, _, finish = _breaks(star, station, 9)
    problem = (
        "worker 0 was disconnected 3 times before step 0 was made, each time for the same reason: "
        "Computed shards=(9,): not the next assignment, or already reported"
    )
    assert isinstance(told, do.Send)
    assert told.message == Shutdown(problem=problem)
    assert finish == do.Finish("failed", problem)


def test_a_step_in_between_is_progress() -> None:
    """A worker may be thrown out any number of times if steps are made."""
    star = Star(run_of(num_steps=3))
    station = star.arrive()
    for step in range(3):
        for _ in range(2):
            _breaks(star, station, 7)
            star.deliver()
        if station.link is None:
            star.connect(station)
        star.until(lambda step=step: star.coordinator.step > step)  # type: ignore[misc]
    assert star.finish().status == "completed"
