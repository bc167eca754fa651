"""The machine of a worker: effects of messages, and ends of a connection or its work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.messages import (
    MESSAGES,
    TAKING_PART,
    VERSION,
    WORKER_MAY_HEAR,
    Applied,
    Assign,
    Average,
    Challenge,
    Commit,
    Computed,
    Halt,
    Heartbeat,
    Hello,
    Leave,
    Loaded,
    Message,
    NonFinite,
    Refuse,
    Shutdown,
    Staged,
    TreeNode,
    Welcome,
    WorkerPhase,
)
from entrenar_py.train.wire.worker import Worker
from tests.train.wire.samples import SAMPLES
from tests.train.wire.star import SECRET, TERMS, TIMING, closing

PEER = "coordinator"
CHALLENGE = Challenge(version=VERSION, nonce="0" * 32)
NODES = [
    TreeNode(step=5, round=0, block=block, level=level, index=index, loss=1.0, weight=weight)
    for block in (1, 0)
    for level, index, weight in ((1, 0, 2.0), (0, 2, 1.0))
]
AVERAGES = [Average(step=5, round=0, block=block, loss=1.0, weight=3.0) for block in (1, 0)]
PLACES = [one for one in WorkerPhase if one is not WorkerPhase.AWAY]


def new(rank: int | None = None) -> Worker:
    """Return a worker that is not connected."""
    return Worker(TERMS, secret=SECRET, backend="cpu", rank=rank, timing=TIMING)


def hello(rank: int | None = None) -> Hello:
    """Return the worker's answer to CHALLENGE, with its proof."""
    said = Hello(
        version=VERSION,
        run=TERMS.run,
        manifest=TERMS.manifest,
        data=TERMS.data,
        backend="cpu",
        rank=rank,
        port=None,
        nonce="1" * 32,
        proof="",
    )
    return replace(said, proof=terms.proof_of_worker(SECRET, CHALLENGE, said))


def welcome(rank: int | None = None) -> Welcome:
    """Return the welcome: rank 2, the state before step 5, and a vector in two blocks."""
    proof = terms.proof_of_coordinator(SECRET, CHALLENGE, hello(rank))
    return Welcome(rank=2, step=5, blocks=2, resumed=False, proof=proof)


def connect(machine: Worker) -> Worker:
    """Return a worker that was connected at 0 s."""
    assert machine.connected(PEER, "1" * 32, 0.0) == []
    return machine


def told(machine: Worker, *messages: Message) -> list[Effect]:
    """Return the effects of the last of `messages`."""
    return [machine.receive(message, 0.0) for message in messages][-1]


def reach(phase: WorkerPhase) -> Worker:
    """Return a worker in that phase, at step 5 once it has a state."""
    machine = connect(new())
    way: dict[WorkerPhase, list[Message]] = {
        WorkerPhase.CONNECTED: [],
        WorkerPhase.GREETED: [CHALLENGE],
        WorkerPhase.READY: [CHALLENGE, welcome()],
        WorkerPhase.COMPUTING: [CHALLENGE, welcome(), Assign(step=5, shards=(0, 1, 2))],
        WorkerPhase.STAGED: [CHALLENGE, welcome(), *AVERAGES],
        WorkerPhase.OVER: [CHALLENGE, Shutdown(problem=None)],
    }
    for message in way[phase]:
        machine.receive(message, 0.0)
    assert machine.phase is phase
    return machine


# --- in order ---------------------------------------------------------------------------------


def test_what_one_step_asks_for() -> None:
    """All effects from connection to end, in order."""
    machine = connect(new())
    key = terms.session_key(SECRET, CHALLENGE, hello())
    assert told(machine, CHALLENGE) == [do.Send(PEER, hello()), do.Secure(PEER, key)]
    assert told(machine, welcome()) == [do.Load(2, 5), do.Send(PEER, Loaded(step=5))]
    (asked,) = told(machine, Assign(step=5, shards=(0, 1, 2)))
    assert isinstance(asked, do.Compute)
    assert (asked.step, asked.shards) == (5, (0, 1, 2))
    assert machine.computed(asked, NODES) == [
        do.Send(PEER, Computed(step=5, shards=(0, 1, 2))),
        *(do.Send(PEER, node) for node in NODES),
    ]
    assert told(machine, AVERAGES[0]) == [do.Hold(5, 1)]
    assert told(machine, AVERAGES[1]) == [do.Hold(5, 0), do.Send(PEER, Staged(step=5, round=0))]
    assert told(machine, Commit(step=5)) == [do.Make(5), do.Send(PEER, Applied(step=5))]
    assert (machine.rank, machine.step, machine.phase) == (2, 6, WorkerPhase.READY)
    assert told(machine, Shutdown(problem=None)) == [
        do.Close(PEER, "completed"),
        do.Finish("completed"),
    ]


def test_it_comes_back_as_who_it_was() -> None:
    """It reconnects with a fresh nonce, and requests its former rank."""
    machine = reach(WorkerPhase.COMPUTING)
    assert machine.lost("cut") == [do.Close(PEER, "cut")]
    machine.connected("again", "1" * 32, 1.0)
    assert told(machine, CHALLENGE)[0] == do.Send("again", hello(rank=2))


def test_work_is_done_one_after_the_other() -> None:
    """A second assignment waits; the worker is ready when both are done."""
    machine = reach(WorkerPhase.READY)
    (first,) = told(machine, Assign(step=5, shards=(0,)))
    assert told(machine, Assign(step=5, shards=(2,))) == []
    assert isinstance(first, do.Compute)
    *said, second = machine.computed(first, [])
    assert said == [do.Send(PEER, Computed(step=5, shards=(0,)))]
    assert isinstance(second, do.Compute)
    assert second.shards == (2,)
    phases = [machine.phase]
    machine.computed(second, [])
    phases.append(machine.phase)
    assert phases == [WorkerPhase.COMPUTING, WorkerPhase.READY]


def test_work_of_an_earlier_stay_is_thrown_away() -> None:
    """Even if the same shards are assigned again after a reconnection."""
    machine = reach(WorkerPhase.READY)
    assign = Assign(step=5, shards=(0, 1, 2))
    (before,) = told(machine, assign)
    machine.lost("cut")
    connect(machine)
    (now,) = told(machine, CHALLENGE, welcome(rank=2), assign)
    assert isinstance(before, do.Compute)
    assert isinstance(now, do.Compute)
    assert (machine.wants(before), machine.wants(now)) == (False, True)
    assert machine.computed(before, NODES) == []
    assert len(machine.computed(now, NODES)) == 1 + len(NODES)


def test_what_is_not_finite_is_said_at_once() -> None:
    """The report replaces the nodes; then it waits for the halt."""
    machine = reach(WorkerPhase.READY)
    (asked,) = told(machine, Assign(step=5, shards=(0,)))
    said = NonFinite(step=5, shard=0, tensor=None, element=None, loss=float("nan"), ids=(3,))
    assert isinstance(asked, do.Compute)
    assert machine.computed(asked, said) == [do.Send(PEER, said)]
    assert told(machine, Halt(step=5, reason="nan")) == [
        do.Close(PEER, "nan"),
        do.Finish("halted", "nan"),
    ]


# --- what is not legal ------------------------------------------------------------------------

ILLEGAL = [
    (phase, kind)
    for phase in PLACES
    for kind in MESSAGES.values()
    if kind not in WORKER_MAY_HEAR[phase]
]


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL)
def test_what_is_not_legal_ends_the_connection(phase: WorkerPhase, kind: type[Message]) -> None:
    """In each phase every message that the table does not list ends it."""
    machine = reach(phase)
    reason = f"{kind.__name__} to a worker that is {phase}"
    said = [do.Send(PEER, Leave(reason=reason))] if phase in TAKING_PART else []
    assert told(machine, SAMPLES[kind][0]) == [*said, do.Close(PEER, reason)]
    assert machine.phase is WorkerPhase.AWAY


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (WorkerPhase.READY, Assign(step=4, shards=(0,))),
        (WorkerPhase.COMPUTING, Assign(step=6, shards=(0,))),
        (WorkerPhase.READY, replace(AVERAGES[0], step=4)),
        (WorkerPhase.READY, replace(AVERAGES[0], step=6)),
        (WorkerPhase.STAGED, Commit(step=6)),
    ],
)
def test_another_step_is_refused(phase: WorkerPhase, said: Message) -> None:
    """A message of an earlier or later step ends the connection."""
    assert "this worker is at step 5" in closing(told(reach(phase), said)).reason


@pytest.mark.parametrize("said", [[2], [2**63 - 1], [1, 1], [0, 0]])
def test_a_block_is_held_once(said: list[int]) -> None:
    """A second copy of a block, or an unknown block, is refused."""
    machine = reach(WorkerPhase.READY)
    messages = [replace(AVERAGES[0], block=block) for block in said]
    reason = f"Average block={said[-1]}: it was already received, or there is no such block"
    said_last = do.Send(PEER, Leave(reason=reason))
    assert told(machine, *messages) == [said_last, do.Close(PEER, reason)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_it_is_staged_with_the_last_block(order: tuple[int, int]) -> None:
    """Blocks may come in any order; it reports Staged after the last one."""
    machine = reach(WorkerPhase.READY)
    first, last = (replace(AVERAGES[0], block=block) for block in order)
    assert told(machine, first) == [do.Hold(5, order[0])]
    phases = [machine.phase]
    assert do.Send(PEER, Staged(step=5, round=0)) in told(machine, last)
    phases.append(machine.phase)
    assert phases == [WorkerPhase.READY, WorkerPhase.STAGED]


def test_blocks_are_of_one_stay() -> None:
    """Blocks are dropped when the connection or the step ends."""
    machine = reach(WorkerPhase.READY)
    told(machine, AVERAGES[0])
    machine.lost("cut")
    connect(machine)
    assert told(machine, CHALLENGE, welcome(rank=2), AVERAGES[0]) == [do.Hold(5, 1)]
    told(machine, AVERAGES[1], Commit(step=5))
    assert told(machine, replace(AVERAGES[0], step=6)) == [do.Hold(6, 1)]


def test_a_vector_has_at_least_one_block() -> None:
    """A Welcome with zero blocks ends the connection."""
    machine = reach(WorkerPhase.GREETED)
    reason = "Welcome blocks=0: there is at least one"
    assert told(machine, replace(welcome(), blocks=0)) == [do.Close(PEER, reason)]


def _thrown_out(machine: Worker, reason: str) -> list[Effect]:
    """Return the effects when the worker rejoins and is thrown out in its step."""
    connect(machine)
    told(machine, CHALLENGE, welcome(rank=machine.rank))
    return told(machine, Refuse(reason=f"disconnected: {reason}", retry=True))


def test_who_is_thrown_out_again_and_again_stays_away() -> None:
    """Three times for one reason without a step in between; numbers don't matter."""
    machine = new()
    for number in (1, 2):
        said = _thrown_out(machine, f"{number} bytes too many")
        assert said == [do.Close(PEER, f"disconnected: {number} bytes too many")]
    assert len(_thrown_out(machine, "another reason")) == 1
    _, finish = _thrown_out(machine, "3 bytes too many")
    assert isinstance(finish, do.Finish)
    assert finish.status == "failed"
    assert finish.reason == (
        "worker 2 was disconnected 3 times before step 5 was made, each time for the same reason: "
        "disconnected: 3 bytes too many"
    )


def test_a_step_in_between_is_progress() -> None:
    """After a step the count starts again."""
    machine = new()
    for _ in range(5):
        assert len(_thrown_out(machine, "because")) == 1
        connect(machine)
        told(machine, CHALLENGE, welcome(rank=2), *AVERAGES, Commit(step=5))
        machine.lost("cut")


@pytest.mark.parametrize("proof", ["0" * 64, "", welcome().proof[:-1], hello().proof])
def test_a_coordinator_proves_itself_too(proof: str) -> None:
    """A Welcome with a wrong proof is refused."""
    machine = reach(WorkerPhase.GREETED)
    reason = "Welcome proof: this coordinator does not know the secret"
    assert told(machine, replace(welcome(), proof=proof)) == [do.Close(PEER, reason)]


# --- how it ends ------------------------------------------------------------------------------


def test_another_version_is_the_end() -> None:
    """It does not try again."""
    reason = "version=1: this worker speaks version 3"
    assert told(connect(new()), replace(CHALLENGE, version=1)) == [
        do.Close(PEER, reason),
        do.Finish("failed", reason),
    ]


def test_a_refusal_may_be_worth_another_try() -> None:
    """It reconnects if `retry` is set, else it finishes."""
    machine = reach(WorkerPhase.GREETED)
    assert told(machine, Refuse(reason="full", retry=True)) == [do.Close(PEER, "refused: full")]
    assert machine.phase is WorkerPhase.AWAY
    machine = reach(WorkerPhase.GREETED)
    assert told(machine, Refuse(reason="no", retry=False)) == [
        do.Close(PEER, "refused: no"),
        do.Finish("failed", "refused: no"),
    ]


@pytest.mark.parametrize(
    "phase",
    [WorkerPhase.GREETED, WorkerPhase.READY, WorkerPhase.COMPUTING, WorkerPhase.STAGED],
)
@pytest.mark.parametrize(
    ("said", "finish"),
    [
        (Halt(step=9, reason="nan"), do.Finish("halted", "nan")),
        (Shutdown(problem=None), do.Finish("completed")),
        (Shutdown(problem="too few"), do.Finish("failed", "too few")),
    ],
)
def test_it_stops_wherever_it_stands(phase: WorkerPhase, said: Message, finish: do.Finish) -> None:
    """A halt or shutdown ends it in any phase, with the coordinator's reason."""
    machine = reach(phase)
    asked = do.Compute(0, 5, (0, 1, 2))
    assert told(machine, said) == [do.Close(PEER, finish.reason or finish.status), finish]
    assert machine.computed(asked, NODES) == []
    assert machine.tick(1e9) == []
    assert machine.lost("closed") == []


# --- how long it waits ------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [one for one in PLACES if one is not WorkerPhase.OVER])
def test_a_silent_coordinator_is_given_up(phase: WorkerPhase) -> None:
    """It disconnects after `dead_after_s` without a byte, and not before."""
    machine = reach(phase)
    machine.heard(1.0)
    machine.tick(30.9)
    assert machine.phase is phase
    assert machine.tick(31.0) == [do.Close(PEER, "the coordinator was silent for 30.0 s")]
    assert machine.tick(1e9) == []


@pytest.mark.parametrize("phase", [one for one in PLACES if one is not WorkerPhase.OVER])
def test_it_says_that_it_lives(phase: WorkerPhase) -> None:
    """It sends a heartbeat every `heartbeat_s`, once it was challenged."""
    machine = reach(phase)
    beat = [] if phase is WorkerPhase.CONNECTED else [do.Send(PEER, Heartbeat())]
    assert machine.tick(4.9) == []
    assert machine.tick(5.0) == beat
    assert machine.tick(9.9) == []
    assert machine.tick(10.0) == beat


def test_nothing_happens_while_it_is_away() -> None:
    """Ticks and losses have no effect while it is disconnected."""
    machine = new()
    assert machine.tick(1e9) == []
    assert machine.lost("never was") == []


def test_a_worker_can_leave() -> None:
    """It sends the reason, and does not come back."""
    machine = reach(WorkerPhase.COMPUTING)
    effects = machine.leave("asked to")
    assert isinstance(effects[0], do.Send)
    assert isinstance(effects[-1], do.Finish)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_worker_that_left_does_not_come_back(is_lost: bool) -> None:
    """A connection that was made meanwhile is closed."""
    machine = reach(WorkerPhase.COMPUTING)
    if is_lost:
        machine.lost("gone")
    machine.leave("asked to")
    (closed,) = machine.connected("again", "1" * 32, 1.0)
    assert closed == do.Close("again", "this worker is over")
    assert machine.phase is WorkerPhase.OVER
