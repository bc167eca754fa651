"""The plan of a run: when workers are started and awaited, and which faults are still to strike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from entrenar_py import compute as backends
from entrenar_py import systems
from entrenar_py.compute import chain
from entrenar_py.shared import trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.train.wire.effects import Finish, Gather
from entrenar_py.train.wire.terms import Run
from entrenar_py.train.wire_io.injections import Guest
from tests.systems import stars


class Planned(ScenarioRun):
    """Is its own transport, which only remembers its calls and reports success."""

    secret = b""

    def __init__(self, *faults: Fault, statuses: Sequence[str] = (), **changes: object) -> None:
        scenario = stars.subject("parameter_server", faults=faults, **changes)
        super().__init__(scenario, lambda run: self)
        self.runs: list[Run] = []
        self.started: list[int] = []
        self.guests: list[Guest] = []
        self._statuses = list(statuses)

    def drive(self, run: Run) -> Finish:
        self.runs.append(run)
        self.begin(run)
        self.server.present.update(self.started)
        status = self._statuses.pop(0) if self._statuses else "completed"
        if status == "completed":
            for step in run.saves:
                self.server.save(step)()()
        return Finish(status, "" if status == "completed" else "because")

    def start(self, rank: int) -> None:
        self.started.append(rank)

    def visit(self, guest: Guest) -> None:
        self.guests.append(guest)

    def befall(self, fault: Fault) -> None:
        """Do nothing: there is no process."""


LEAVE = Fault(kind="leave", step=1, rank=2)
JOIN = Fault(kind="join", step=3, rank=2)
CUT = Fault(kind="cut", step=2, rank=1, at="Commit")


def test_everyone_is_started_and_awaited() -> None:
    """A run goes from the first to the last step, and awaits all workers before the first."""
    star = Planned()
    finished = star.train()
    assert (finished.end.status, finished.promises) == ("completed", ("bitwise",))
    (run,) = star.runs
    assert (run.first_step, run.num_steps, run.resumed) == (0, 5, False)
    assert set(run.awaited[0]) == {0, 1, 2}
    assert star.started == [0, 1, 2]
    assert run.terms == star.server.terms


def test_who_joins_is_started_and_awaited_then() -> None:
    """A joining worker is started before its step, when the fault is recorded, and not earlier."""
    star = Planned(Fault(kind="join", step=3, rank=2))
    star.train()
    assert set(star.runs[0].awaited[0]) == {0, 1}
    assert set(star.runs[0].awaited[3]) == {2}
    assert star.started == [0, 1]
    star.notify(Gather(2))
    assert star.started == [0, 1]
    star.notify(Gather(3))
    star.notify(Gather(3))
    assert star.started == [0, 1, 2]
    assert star.waiting("join") == []


def test_who_is_struck_is_awaited_for_the_next_step() -> None:
    """A worker with a fault to come is awaited before the next step; one already struck is not."""
    star = Planned(CUT)
    star.train()
    assert set(star.runs[0].awaited[3]) == {1}
    star.strike(CUT)
    assert star.waiting("cut") == []
    assert 3 not in star.run_of(0, 5).awaited
    events = star.server.recorder.drain()
    assert [one for one in events if isinstance(one, trace.Injected)] == [
        trace.Injected(fault=CUT.to_dict(), step=2, rank=1)
    ]


def test_a_run_with_stops_is_several() -> None:
    """Each part starts where the last one ended, from the state saved there."""
    star = Planned(stops=(3, 1))
    finished = star.train()
    spans = [(run.first_step, run.num_steps, run.resumed) for run in star.runs]
    assert spans == [(0, 1, False), (1, 3, True), (3, 5, True)]
    assert [set(run.saves) for run in star.runs] == [{1}, {3}, set()]
    assert [one.step for one in finished.of(trace.Saved)] == [1, 3]


def test_who_may_restart_saves_every_step() -> None:
    """Every step is saved until the coordinator has died: no step is made again."""
    restart = Fault(kind="restart", step=2, at="Commit")
    star = Planned(restart, stops=(3,))
    assert set(star.run_of(0, 3).saves) == {1, 2, 3}
    star.strike(restart)
    assert set(star.run_of(2, 3).saves) == {3}
    assert set(star.run_of(3, 5).saves) == set()


def test_a_run_that_failed_is_not_resumed() -> None:
    """The run keeps the status with which it failed."""
    star = Planned(stops=(1, 3), statuses=["completed", "halted"])
    finished = star.train()
    assert len(star.runs) == 2
    assert (finished.end.status, finished.end.reason) == ("halted", "because")
    assert [one.step for one in finished.of(trace.Saved)] == [1]


def test_faults_wait_by_kind() -> None:
    """A fault waits until it has struck; faults that plant values are not the star's."""
    star = Planned(LEAVE, JOIN, CUT, Fault(kind="non_finite_loss", step=4, value="nan"))
    assert star.waiting("leave", "cut") == [LEAVE, CUT]
    assert star.waiting("non_finite_loss") == []
    star.strike(LEAVE)
    assert star.waiting("leave", "join") == [JOIN]


@pytest.mark.parametrize(
    ("served", "promised"), [(("cpu", "cpu"), ("bitwise",)), (("cpu", "wgpu"), ("draws",))]
)
def test_bits_are_promised_by_who_served(
    monkeypatch: pytest.MonkeyPatch, served: tuple[str, ...], promised: tuple[str, ...]
) -> None:
    """Under `auto` two workers may use two backends, which round differently."""
    turns = iter(served)

    def auto(on_attempt: Callable[[chain.Attempt], None]) -> backends.Backend:
        on_attempt(chain.Attempt(backend=next(turns), served=True))
        return backends.open_backend("cpu")

    monkeypatch.setattr(chain, "auto", auto)
    scenario = Scenario(
        system="parameter_server_simulated",
        workload="linear",
        world_size=2,
        seed=0,
        backends=("auto",),
    )
    assert systems.run(scenario).promises == promised
