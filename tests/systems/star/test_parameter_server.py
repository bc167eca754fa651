"""The parameter server over TCP, with each worker in its own process, under real faults."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared import faults
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Halt, Membership, Shard, Traffic, Update
from entrenar_py.systems import preload
from entrenar_py.systems.star import processes, worker_process
from entrenar_py.systems.star.processes import ProcessTransport
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.train.wire.attendance import CONVICTIONS_MAX
from entrenar_py.train.wire.terms import Run
from entrenar_py.train.wire_io.processes import Crew, Hand
from tests.systems import stars
from tests.systems.stars import REAL, subject

SCRIPT = Path(__file__).with_name("abandoned.py")
GONE_S = 20.0


class Remembering(Crew):
    """A crew that remembers to which processes it gave jobs."""

    def __init__(self) -> None:
        super().__init__(worker_process.main, preload=preload.of_ranks())
        self.given: list[Hand] = []

    def give(self, job: bytes) -> Hand:
        self.given.append(super().give(job))
        return self.given[-1]

    def answers(self) -> list[dict[str, Any]]:
        """Return the last answers of all processes."""
        return [json.loads(hand.answer or b"null") for hand in self.given]


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remembering]:
    """Return the worker processes of one test."""
    made = Remembering()
    monkeypatch.setattr(processes, "crew", lambda: made)
    yield made
    made.dismiss()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("workload", ["linear", "mlp", "decoder"])
def test_any_number_of_processes_gives_the_reference(workload: str, world_size: int) -> None:
    """The weights after every step are those of the reference."""
    scenario = subject(REAL, workload=workload, world_size=world_size, num_steps=3)
    trace = stars.run(scenario)
    assert stars.held(trace) == stars.expected(scenario)
    assert {update.rank for update in trace.of(Update)} == set(range(world_size))


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("kill", "Assign"),
        ("kill", "TreeNode"),
        ("kill", "Average"),
        ("kill", "Commit"),
        ("kill", "Applied"),
        ("cut", "Computed"),
        ("cut", "Commit"),
        ("half_open", "Staged"),
        ("duplicate", "TreeNode"),
        ("reorder", "Applied"),
        ("truncate", "Average"),
        ("flip", "Assign"),
        ("flip", "Computed"),
    ],
)
def test_what_breaks_a_connection(kind: str, at: str) -> None:
    """The worker is given up and comes back with the whole state, and no bit changes."""
    trace = stars.run(stars.struck(REAL, kind, at))
    assert stars.held(trace) == stars.expected(trace.scenario)
    stars.require_back(trace)


@pytest.mark.parametrize(("value", "at"), stars.LIES)
def test_who_lies_is_given_up(value: str, at: str) -> None:
    """The worker comes back with the whole state, and no bit changes."""
    trace = stars.run(stars.lying(REAL, value, at))
    assert stars.held(trace) == stars.expected(trace.scenario)
    stars.require_back(trace)


@pytest.mark.parametrize("at", ["Assign", "TreeNode", "Average", "Applied"])
def test_a_coordinator_that_dies(at: str) -> None:
    """Another coordinator takes over its checkpoint and address, and all workers reconnect."""
    trace = stars.require_right(subject(REAL, faults=(Fault(kind="restart", step=1, at=at),)))
    reasons = {event.reason for event in trace.of(Membership)}
    assert reasons == {"the coordinator died"}


@pytest.mark.parametrize("value", faults.STRANGERS)
def test_strangers_are_turned_away(value: str) -> None:
    """Strangers at real sockets do not affect the run."""
    trace = stars.run(stars.visited(REAL, value))
    assert stars.held(trace) == stars.expected(trace.scenario)
    stars.require_turned_away(trace)


@pytest.mark.parametrize(("kind", "at"), [("freeze", "Assign"), ("delay", "Average")])
def test_a_short_while_is_waited_for(kind: str, at: str) -> None:
    """A worker that comes back in time is not given up."""
    trace = stars.run(stars.struck(REAL, kind, at, seconds=0.2))
    assert stars.held(trace) == stars.expected(trace.scenario)
    assert stars.changes(trace) == []


@pytest.mark.parametrize(("kind", "at"), [("freeze", "Staged"), ("delay", "TreeNode")])
def test_a_long_while_is_not(kind: str, at: str) -> None:
    """The others go on, and the frozen worker comes back with the whole state."""
    trace = stars.run(stars.struck(REAL, kind, at, seconds=4.0))
    assert stars.held(trace) == stars.expected(trace.scenario)
    stars.require_back(trace)


@pytest.mark.parametrize(("kind", "at"), [("kill", "Staged"), ("cut", "Applied")])
def test_nothing_is_lost_or_repeated(kind: str, at: str) -> None:
    """Every clause that would detect a lost or repeated step holds."""
    stars.require_right(stars.struck(REAL, kind, at))


def test_who_leaves_and_joins() -> None:
    """One worker is killed for good, and one joins later."""
    leave = Fault(kind="leave", step=1, rank=2)
    join = Fault(kind="join", step=3, rank=2)
    trace = stars.require_right(subject(REAL, faults=(leave, join)))
    assert stars.changes(trace) == [(1, 2, "left"), (3, 2, "joined")]


def test_a_run_that_is_stopped_and_resumed() -> None:
    """A run is stopped twice, and resumed by new processes each time."""
    stars.require_right(subject(REAL, stops=(1, 3)))


class Barring(ScenarioRun):
    """A run in which worker 1 is barred after the stop."""

    def run_of(self, first: int, last: int) -> Run:
        self._caught[1] = CONVICTIONS_MAX if first else 0
        return super().run_of(first, last)


def test_what_a_worker_measured_is_told_once(crew: Remembering) -> None:
    """Measurements are recorded once, even of a worker that takes no part after the stop."""
    scenario = subject(REAL, workload="vectors", world_size=2, num_steps=2, stops=(1,))
    star = Barring(scenario, ProcessTransport)
    told = Counter(one.rank for one in star.train().of(Traffic) if one.message == "Hello")
    assert told == {None: 2, 0: 2, 1: 1}
    assert isinstance(star.transport, ProcessTransport)
    assert [one.rank for one in star.transport.ends] == [0]
    assert len(crew.given) == 3


@pytest.mark.parametrize("kind", ["non_finite_gradient", "non_finite_loss"])
def test_a_value_that_is_not_finite_halts_everyone(crew: Remembering, kind: str) -> None:
    """All processes halt with the one reason that names the worker, and none steps."""
    fault = Fault(kind=kind, step=1, rank=1, value="inf")
    trace = stars.run(subject(REAL, faults=(fault,)))
    (halt,) = trace.of(Halt)
    assert (trace.end.status, trace.end.reason) == ("halted", halt.reason)
    assert "on worker 1, step 1, shard" in halt.reason
    assert {update.step for update in trace.of(Update)} == {0}
    assert {shard.rank for shard in trace.of(Shard) if not shard.finite} == {1}
    said = {"status": "halted", "reason": halt.reason}
    assert [{name: answer[name] for name in said} for answer in crew.answers()] == [said] * 3


def test_every_process_hears_of_the_end(crew: Remembering) -> None:
    """Every process learns of the end, and is used again by the next run."""
    stars.run(subject(REAL))
    assert [answer["status"] for answer in crew.answers()] == ["completed"] * 3
    pids = {hand.pid for hand in crew.given}
    stars.run(subject(REAL))
    assert {hand.pid for hand in crew.given} == pids


# --- whatever happens to the first process ------------------------------------------------------


def _descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, directly or indirectly."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *_descendants(child))]


def _require_gone(watched: list[int]) -> None:
    """Return when the processes behind these file descriptors have ended."""
    for one in watched:
        poll = select.poll()
        poll.register(one, select.POLLIN)
        assert poll.poll(GONE_S * 1000), "a process was left behind"
        os.close(one)


@pytest.mark.parametrize(
    ("number", "mood"),
    [
        # While one worker is frozen, the other one is busy.
        pytest.param(signal.SIGKILL, "busy", marks=pytest.mark.by_hand),
        (signal.SIGKILL, "frozen"),
        (signal.SIGKILL, "idle"),
        (signal.SIGINT, "frozen"),
    ],
)
def test_nobody_is_left_behind(number: signal.Signals, mood: str) -> None:
    """No process remains, however the first one ends, and whatever its workers do just then."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), mood],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == f"{mood}\n"
        watched = [os.pidfd_open(pid) for pid in _descendants(parent.pid)]
        assert len(watched) >= 3
        parent.send_signal(number)
        assert parent.wait(GONE_S) == -number
        _require_gone(watched)
