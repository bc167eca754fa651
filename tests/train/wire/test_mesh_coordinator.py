"""The machine of a mesh's coordinator: rounds, complaints, the state, and disconnections."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.applicant import Applicant
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.mesh_coordinator import ROUNDS_MAX
from entrenar_py.train.wire.messages import (
    ALWAYS,
    MESH_PEER_MAY_SAY,
    MESSAGES,
    Applied,
    Assign,
    Challenge,
    Computed,
    Fetch,
    Group,
    Halt,
    Hello,
    Message,
    Offer,
    Overflow,
    PeerPhase,
    Refuse,
    Stage,
    Staged,
    State,
    Unreachable,
    Welcome,
)
from tests.train.wire.mesh import Mesh
from tests.train.wire.samples import SAMPLES
from tests.train.wire.star import SECRET, closing, run_of
from tests.train.wire.stations import Station, Wire

OUTSIDE = (PeerPhase.CHALLENGED, PeerPhase.FETCHING)
PLACES = [phase for phase in MESH_PEER_MAY_SAY if phase not in OUTSIDE]


def started(num_workers: int = 3, **changes: Any) -> tuple[Mesh, list[Station]]:
    """Return a mesh of `num_workers` that were told to compute the first step, and the workers."""
    usual = {"num_steps": 4, "num_blocks": 2, "awaited": {0: range(num_workers)}}
    mesh = Mesh(run_of(**{**usual, **changes}))
    stations = [mesh.arrive(rank) for rank in range(num_workers)]
    mesh.until(lambda: mesh.coordinator.stage is Stage.COMPUTING)
    return mesh, stations


def wire_of(station: Station) -> Wire:
    """Return the connection of a worker to the coordinator."""
    assert station.wire is not None
    return station.wire


def say(mesh: Mesh, station: Station, message: Message) -> list[Effect]:
    """Return the effects of a worker's `message` at the coordinator, all carried out."""
    before = len(mesh.effects)
    mesh.say_above(wire_of(station), message)
    return mesh.effects[before:]


def sent(effects: list[Effect], kind: type[Message]) -> list[Any]:
    """Return the messages of that kind."""
    messages = [one.message for one in effects if isinstance(one, do.Send)]
    return [one for one in messages if isinstance(one, kind)]


def unreachable(rank: int, round_: int = 1) -> Unreachable:
    """Return a complaint about `rank`."""
    return Unreachable(round=round_, rank=rank, reason="refused")


# --- rounds -----------------------------------------------------------------------------------


def test_the_first_round() -> None:
    """All workers get the members, addresses and shards of the group, then their assignments."""
    mesh, stations = started()
    told = sent(mesh.effects, Group)
    expected = Group(
        step=0,
        round=1,
        holders=(0, 0, 1, 2),
        ranks=(0, 1, 2),
        addresses=("host:0", "host:1", "host:2"),
    )
    assert told == [expected] * 3
    to_first = [
        one.message
        for one in mesh.effects
        if isinstance(one, do.Send) and one.peer == wire_of(stations[0]).peer
    ]
    assert to_first[-2:] == [expected, Assign(step=0, shards=(0, 1))]


def test_a_round_lasts_while_nobody_comes_or_goes() -> None:
    """One round serves all steps; a late worker starts another."""
    mesh, _ = started(2, awaited={0: (0, 1), 3: (2,)})
    mesh.until(lambda: mesh.coordinator.step == 2)
    late = mesh.arrive(2)
    assert mesh.finish() == do.Finish("completed")
    assert late.state == (0, 1, 2, 3)
    told = sent(mesh.effects, Group)
    assert sorted({(one.step, one.round, one.ranks) for one in told}) == [
        (0, 1, (0, 1)),
        (told[-1].step, 2, (0, 1, 2)),
    ]


def test_what_a_lost_worker_had_delivered_is_computed_again() -> None:
    """The others compute all its shards in the new round."""
    mesh, stations = started()
    say(mesh, stations[1], Computed(step=0, shards=(2,)))
    assert mesh.coordinator.peers[wire_of(stations[1]).peer].delivered == [2]
    before = len(mesh.effects)
    mesh.cut(wire_of(stations[1]))
    effects = mesh.effects[before:]
    (group, same) = sent(effects, Group)
    assert group == same
    assert (group.round, group.ranks, group.holders) == (2, (0, 2), (0, 0, 0, 2))
    assert sent(effects, Assign) == [Assign(step=0, shards=(2,))]
    assert mesh.finish() == do.Finish("completed")


def test_who_held_it_all_begins_again() -> None:
    """A worker that staged in an earlier round has not staged in the new one."""
    mesh, stations = started(num_blocks=1)
    (first, *_, last) = stations
    mesh.until(lambda: any(_phase(mesh, one) is PeerPhase.STAGED for one in stations))
    mesh.cut(wire_of(last))
    assert PeerPhase.STAGED not in {_phase(mesh, one) for one in stations[:2]}
    say(mesh, first, Staged(step=0, round=1))
    assert _phase(mesh, first) is not PeerPhase.STAGED
    assert mesh.finish() == do.Finish("completed")


def test_a_loss_after_the_commit_is_no_new_round() -> None:
    """The others make the step; the new round begins with the next step."""
    mesh, stations = started()
    mesh.until(lambda: mesh.coordinator.stage is Stage.APPLYING)
    before = len(mesh.effects)
    mesh.cut(wire_of(stations[1]))
    assert sent(mesh.effects[before:], Group) == []
    mesh.until(lambda: mesh.coordinator.stage is Stage.COMPUTING)
    group = sent(mesh.effects, Group)[-1]
    assert (group.step, group.round, group.ranks) == (1, 2, (0, 2))


# --- complaints -------------------------------------------------------------------------------


def test_a_complaint_begins_another_round() -> None:
    """The workers stay; a complaint about an earlier round is ignored."""
    mesh, stations = started()
    groups = sent(say(mesh, stations[0], unreachable(1)), Group)
    assert [(one.round, one.ranks) for one in groups] == [(2, (0, 1, 2))] * 3
    assert say(mesh, stations[1], unreachable(0)) == []


def test_the_third_complaint_sends_the_worst_away() -> None:
    """The worker in most complaints is thrown out; in a tie the highest rank."""
    mesh, stations = started()
    for round_, (by, of) in enumerate([(0, 1), (1, 2)], start=1):
        say(mesh, stations[by], unreachable(of, round_))
    effects = say(mesh, stations[0], unreachable(1, ROUNDS_MAX))
    peer, reason = wire_of_lost(effects), "worker 0 can't reach worker 1: refused"
    told = do.Send(peer, Refuse(reason=f"disconnected: {reason}", retry=True))
    assert effects[:3] == [told, do.Close(peer, reason), do.Left(1, 0, reason)]
    assert [one.ranks for one in sent(effects, Group)] == [(0, 2)] * 2
    assert mesh.finish() == do.Finish("completed")


def wire_of_lost(effects: list[Effect]) -> do.Peer:
    """Return the peer that the coordinator has dropped."""
    (peer,) = [one.peer for one in effects if isinstance(one, do.Close)]
    return peer


def test_of_two_that_can_t_reach_each_other_one_stays() -> None:
    """In the tie the higher rank is thrown out; the run completes."""
    mesh, stations = started(2)
    for round_ in range(1, ROUNDS_MAX + 1):
        say(mesh, stations[0], unreachable(1, round_))
    assert [one.rank for one in mesh.coordinator.peers.values()] == [0]
    assert mesh.finish() == do.Finish("completed")


def test_what_both_ends_tell_counts_once() -> None:
    """Two breaks make four complaints, and count as two."""
    mesh, stations = started(2)
    for round_ in range(1, 5):
        by = round_ % 2
        say(mesh, stations[by], unreachable(1 - by, round_))
    assert [one.rank for one in mesh.coordinator.peers.values()] == [0, 1]
    say(mesh, stations[1], unreachable(0, 5))
    assert [one.rank for one in mesh.coordinator.peers.values()] == [0]
    assert mesh.finish() == do.Finish("completed")


def test_complaints_are_of_one_step() -> None:
    """The count starts again with each step."""
    mesh, stations = started()
    for round_ in range(1, ROUNDS_MAX):
        say(mesh, stations[0], unreachable(1, round_))
    mesh.until(lambda: mesh.coordinator.step == 1 and mesh.coordinator.stage is Stage.COMPUTING)
    say(mesh, stations[0], unreachable(1, ROUNDS_MAX))
    assert len(mesh.coordinator.peers) == 3


def test_a_complaint_between_steps_waits_for_the_next() -> None:
    """The next step begins with another round."""
    mesh, stations = started(2)
    mesh.until(lambda: mesh.coordinator.stage is Stage.APPLYING)
    assert sent(say(mesh, stations[0], unreachable(1)), Group) == []
    mesh.until(lambda: mesh.coordinator.stage is Stage.COMPUTING)
    assert [one.round for one in sent(mesh.effects, Group)[-2:]] == [2, 2]


# --- where the state is -----------------------------------------------------------------------


def test_a_newcomer_gets_what_another_holds() -> None:
    """The state is requested once; no step starts until it has come."""
    mesh, stations = started(2, awaited={0: (0, 1), 2: (2,)})
    mesh.until(lambda: mesh.coordinator.step == 1)
    mesh.arrive(2)
    assert mesh.finish() == do.Finish("completed")
    kinds = (Fetch, Welcome)
    told = [one.message for one in mesh.effects if isinstance(one, do.Send)]
    asked = [one for one in told if isinstance(one, kinds) and one.step > 0]
    assert [type(one) for one in asked] == [Fetch, Welcome]
    assert len({one.step for one in asked}) == 1
    assert [one.state for one in stations] == [(0, 1, 2, 3)] * 2


def test_what_is_saved_is_asked_for() -> None:
    """The state is requested before each save, unless the coordinator has it."""
    mesh, _ = started(2, saves=(0, 2, 4))
    assert mesh.finish() == do.Finish("completed")
    assert [one.step for one in mesh.effects if isinstance(one, do.Save)] == [0, 2, 4]
    assert [one.step for one in sent(mesh.effects, Fetch)] == [2, 4]


def test_who_was_asked_may_die() -> None:
    """Then another worker is asked."""
    mesh, _ = started(2, saves=(1,))
    mesh.until(lambda: bool(sent(mesh.effects, Fetch)))
    (giver,) = [one for one in mesh.stations if _phase(mesh, one) is PeerPhase.GIVING]
    mesh.cut(wire_of(giver))
    assert len(sent(mesh.effects, Fetch)) == 2
    assert mesh.finish() == do.Finish("completed")
    assert [one.step for one in mesh.effects if isinstance(one, do.Save)] == [1]


def test_all_may_die_with_a_state_that_was_fetched() -> None:
    """The coordinator has it for the workers that come next."""
    mesh, stations = started(2, saves=(1,))
    mesh.until(lambda: mesh.coordinator.step == 1 and mesh.coordinator.stage is Stage.COMPUTING)
    for station in stations:
        mesh.cut(wire_of(station))
    assert mesh.finished is None
    assert mesh.finish() == do.Finish("completed")


def test_a_stop_saves_what_is_here() -> None:
    """The state is saved if the coordinator has it, and is not fetched if not."""
    for saves, saved in (((1,), [1, 1]), ((), [])):
        mesh, _ = started(2, saves=saves)
        mesh.until(
            lambda mesh=mesh: (
                mesh.coordinator.step == 1  # type: ignore[misc]
                and mesh.coordinator.stage is Stage.COMPUTING
            )
        )
        effects = mesh.coordinator.stop("asked to", mesh.now, at_once=True)
        if saved:
            assert effects[-1] == do.Save(1)
            effects += mesh.coordinator.saved(mesh.now)
        assert effects[-1] == do.Finish("stopped", "asked to")
        done = [*mesh.effects, *effects]
        assert [one.step for one in done if isinstance(one, do.Save)] == saved


def test_a_stop_asks_for_what_is_to_be_saved() -> None:
    """The current step is finished, then its state is requested and saved."""
    mesh, _ = started(2)
    mesh.until(lambda: mesh.coordinator.step == 1 and _stands_in(mesh, Stage.COMPUTING))
    mesh.stop("asked to")
    assert mesh.finish() == do.Finish("stopped", "asked to")
    assert [one.step for one in sent(mesh.effects, Fetch)] == [2]
    assert [one.step for one in mesh.effects if isinstance(one, do.Save)] == [2]


def test_a_step_that_is_just_made_is_not_saved_with_the_state_before_it() -> None:
    """A stop at once after the first Applied saves nothing: only workers have the new state."""
    mesh, _ = started(2)
    mesh.until(lambda: any(_tells_of_a_step(one) for one in mesh.effects))
    assert _stands_in(mesh, Stage.APPLYING)
    mesh.stop("asked to", at_once=True)
    assert mesh.finished == do.Finish("stopped", "asked to")
    assert not [one for one in mesh.effects if isinstance(one, do.Save)]


def _tells_of_a_step(effect: do.Effect) -> bool:
    return isinstance(effect, do.Keep) and isinstance(effect.message, Applied)


def _stands_in(mesh: Mesh, stage: Stage) -> bool:
    return mesh.coordinator.stage is stage


# --- how it ends, and whom it sends away ------------------------------------------------------


def test_an_average_that_is_not_finite_halts_everyone() -> None:
    """A worker reports it; no worker is blamed."""
    mesh, stations = started(2)
    effects = say(mesh, stations[1], Overflow(step=0, block=1))
    reason = "the average gradient or loss is not finite, though each worker's is"
    assert effects[0] == do.Stop(0, None, reason)
    assert sent(effects, Halt) == [Halt(step=0, reason=reason)] * 2
    assert mesh.finished == do.Finish("halted", reason)
    mesh.deliver()
    assert {one.finished for one in stations} == {mesh.finished}


def test_a_worker_that_can_t_be_reached_is_sent_away() -> None:
    """In a mesh a hello must have a port."""
    mesh = Mesh(run_of())
    station = mesh.arrive()
    station.machine.port = None
    mesh.until(lambda: station.wire is None)
    closed = [one for one in mesh.effects if isinstance(one, do.Close)]
    assert closed == [do.Close(0, "Hello port=null: in a mesh every worker has to listen")]


def test_who_asks_what_the_run_is_needs_no_port() -> None:
    """An applicant is answered and a stranger refused, as in a star."""
    for secret, kind in ((SECRET, Offer), (b"open barley", Refuse)):
        machine = Mesh(run_of()).coordinator
        (challenge,) = sent(machine.connected("asks", "0" * 32, 0.0), Challenge)
        asks = Applicant("coordinator", "1" * 32, secret=secret, backend="cpu")
        (hello,) = sent(asks.receive(challenge), Hello)
        assert hello.port is None
        (answer,) = sent(machine.receive("asks", hello, 0.0), kind)
        assert answer == Refuse(reason="wrong secret", retry=False) or secret == SECRET


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.7", "10.0.0.7:0"), ("::1", "[::1]:0"), ("w1", "w1:0")]
)
def test_an_address_can_be_read_again(host: str, address: str) -> None:
    """Addresses of both families can be parsed: an IPv6 one is put in brackets."""
    mesh = Mesh(run_of(), host=host)
    mesh.arrive()
    mesh.until(lambda: mesh.coordinator.stage is Stage.COMPUTING)
    assert sent(mesh.effects, Group)[0].addresses == (address,)


def _reach(phase: PeerPhase) -> tuple[Mesh, Station]:
    """Return a mesh of three workers, one of which is in that phase."""
    mesh, stations = started(2, num_blocks=1, saves=(1, 2, 3))
    stations.append(mesh.arrive(2))
    if phase is PeerPhase.ASKED:  # all are cut off, and the first has come back
        mesh.until(lambda: mesh.coordinator.step == 1)
        for station in stations:
            if station.wire is not None:
                mesh.cut(station.wire)
        mesh.connect(stations[0])
    mesh.until(lambda: phase in {_phase(mesh, one) for one in stations})
    return mesh, next(one for one in stations if _phase(mesh, one) is phase)


ILLEGAL = [
    (phase, kind)
    for phase in PLACES
    for kind in MESSAGES.values()
    if kind not in (*MESH_PEER_MAY_SAY[phase], *ALWAYS)
]


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL)
def test_what_is_not_legal_ends_that_connection_only(phase: PeerPhase, kind: type[Message]) -> None:
    """Any message that the table does not list ends its connection, and the run completes."""
    mesh, station = _reach(phase)
    effects = say(mesh, station, SAMPLES[kind][0])
    closed = [one.reason for one in effects if isinstance(one, do.Close)]
    assert closed == [f"{kind.__name__} from a peer that is {phase}"]
    assert mesh.finish() == do.Finish("completed")


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (PeerPhase.COMPUTING, Computed(step=9, shards=(0,))),
        (PeerPhase.READY, Staged(step=9, round=1)),
        (PeerPhase.READY, Overflow(step=9, block=0)),
        (PeerPhase.GIVING, State(step=9)),
        (PeerPhase.ASKED, State(step=9)),
        (PeerPhase.ASKED, Applied(step=9)),
    ],
)
def test_another_step_is_refused(phase: PeerPhase, said: Message) -> None:
    """A message of another step ends its connection only."""
    mesh, station = _reach(phase)
    (closed,) = [one for one in say(mesh, station, said) if isinstance(one, do.Close)]
    assert closed.reason.startswith("step=9: the run is at step")
    assert mesh.finish() == do.Finish("completed")


@pytest.mark.parametrize("shards", [(0,), (2,), (0, 1, 2), ()])
def test_what_was_not_assigned_is_refused(shards: tuple[int, ...]) -> None:
    """The first of three workers has shards 0 and 1 only."""
    mesh, stations = started()
    closed = closing(say(mesh, stations[0], Computed(step=0, shards=shards)))
    assert closed.reason.endswith("not the next assignment, or already reported")


def test_all_was_computed_by_who_has_staged() -> None:
    """A worker that has not computed its shards can't have staged the step."""
    mesh, stations = started()
    closed = closing(say(mesh, stations[0], Staged(step=0, round=1)))
    assert closed.reason == "Staged: its shards (0, 1) are not computed yet"


def _phase(mesh: Mesh, station: Station) -> PeerPhase | None:
    """Return the phase of a worker in the coordinator's view."""
    member = None if station.wire is None else mesh.coordinator.peers.get(station.wire.peer)
    return None if member is None else member.phase
