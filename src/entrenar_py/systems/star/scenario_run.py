"""A run over the protocol as a scenario wants it: from stop to stop, with its faults as they come.

How workers are started and reached is left to a transport (`processes`, `simulated`), which way
gradients go to a topology.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from entrenar_py import faults, trace
from entrenar_py.drivers.endpoints import CoordinatorEnd, WorkerEnd
from entrenar_py.drivers.message_faults import Fate, Meddling
from entrenar_py.drivers.uninvited_client import Guest
from entrenar_py.faults import Fault
from entrenar_py.protocol.attendance import CONVICTIONS_MAX
from entrenar_py.protocol.effects import Conclude, Effect, Finish, Gather, Left
from entrenar_py.protocol.messages import Assign, Message
from entrenar_py.protocol.terms import Run
from entrenar_py.scenario import Scenario
from entrenar_py.systems import AUTO, membership
from entrenar_py.systems.star import reduction_measures, strangers, topology
from entrenar_py.systems.star.server import Server
from entrenar_py.training.vectors import GivenVectors


class Transport(Protocol):
    """The means to start and reach the processes of a run, in real time or in a simulation's.

    `secret` is what they know of each other.
    """

    secret: bytes

    def drive(self, run: Run) -> Finish:
        """Drive `run` to its end; `ScenarioRun.begin` starts its first workers."""

    def start(self, rank: int) -> None:
        """Start a worker that will connect as `rank`."""

    def visit(self, guest: Guest) -> None:
        """Have `guest` connect to the coordinator."""

    def befall(self, fault: Fault) -> None:
        """Kill or freeze the process to which `fault` does that, and have it come back."""


class ScenarioRun:
    """One run: its server, and the scenario's stops and faults as they come up."""

    def __init__(self, scenario: Scenario, transport: Callable[[ScenarioRun], Transport]) -> None:
        self.scenario = scenario
        self.topology = topology.of(scenario)
        self.server = Server(scenario)
        self.transport = transport(self)
        self._waiting = [one for one in scenario.faults if one.kind in faults.SURVIVED]
        self._ranks = set(membership.initial_ranks(scenario))  # those here, or on the way back
        self._caught: Counter[int] = Counter()
        self._awaited: dict[int, set[int]] = {}
        self._guests: list[tuple[Fault, Guest]] = []  # those that came uninvited
        self._last = scenario.num_steps  # the step before which the part in work ends

    def train(self) -> trace.Trace:
        """Return the trace; it promises the same bits where all compute on one backend."""
        scenario, server, first = self.scenario, self.server, 0
        with tempfile.TemporaryDirectory() as folder:
            server.checkpoint_path = Path(folder, "checkpoint")
            for last in (*sorted(set(scenario.stops)), scenario.num_steps):
                self._last = last
                finish = self.transport.drive(self.run_of(first, last))
                if finish.status != "completed" or last == scenario.num_steps:
                    break
                first = server.restore()
        for fault, guest in self._guests:
            server.recorder.emit(
                trace.Admission(
                    case=fault.value or "",
                    entitled=False,
                    let_in=guest.let_in,
                    answer=guest.answer,
                )
            )
        promise = self.topology.promise if self._is_alike() else "draws"
        ending = {"status": finish.status, "reason": finish.reason}
        return server.recorder.finish(promises=(promise,), **ending)

    def _is_alike(self) -> bool:
        """Return whether all workers computed on one backend; for `auto` the one that served."""
        ranks = range(self.scenario.world_size)
        names = {self.scenario.backend_of(rank) for rank in ranks} - {AUTO}
        served = {one.backend for one in self.server.recorder.of(trace.Attempt) if one.served}
        return len(names | served) <= 1

    # --- for the transport ------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """Start those that are there from the first step on."""
        for rank in sorted(self._ranks):
            self.transport.start(rank)
        self._join(run.first_step)

    def notify(self, effect: Effect) -> None:
        """Start those that are to join before a step; note which worker was caught."""
        if isinstance(effect, Gather):
            self._join(effect.step)
        elif isinstance(effect, Conclude) and effect.culprit is not None:
            self._caught[effect.culprit] += 1

    def measure(self, rank: int | None, end: CoordinatorEnd | WorkerEnd) -> None:
        """Record what went over the connections of `rank`, or of the coordinator (None)."""
        if isinstance(self.server.workload, GivenVectors):
            for event in reduction_measures.traffic(end, rank):
                self.server.recorder.emit(event)

    def taken_up(self, step: int) -> Run:
        """Return what another coordinator goes on with when one has died in `step`.

        It knows of no worker: one that dies while there is none is missed by nobody else.
        """
        for rank in sorted(self.server.present):
            self.server.left(Left(rank, step, "the coordinator died"))
        first = self.server.restore()
        self.server.gather(first)
        self._join(first)
        return replace(self.run_of(first, self._last), resumed=True)

    def meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        """Return what the scenario's faults do to `message`, whose process is struck by then."""
        place = getattr(message, "step", None), type(message).__name__
        self._meet(message)
        for fault in self.waiting("restart"):
            if (fault.step, fault.at) == place:
                self.strike(fault)
                self.transport.befall(fault)
                return Meddling(Fate.CUT)
        for fault in self.waiting("leave", *faults.ON_THE_WAY):
            at = fault.at or Assign.__name__
            if (fault.rank, fault.step, at) == (rank, *place):
                self.strike(fault)
                self.transport.befall(fault)
                fate = Fate.KILL if fault.kind == "leave" else Fate(fault.kind)
                return Meddling(fate, fault.seconds or 0.0)
        return None

    # --- faults -----------------------------------------------------------------------------------

    def waiting(self, *kinds: str) -> list[Fault]:
        """Return the faults of these kinds that have not struck yet."""
        return [one for one in self._waiting if one.kind in kinds]

    def strike(self, fault: Fault) -> None:
        """Note and record that `fault` has struck."""
        self._waiting = [one for one in self._waiting if one is not fault]
        self.server.record_fault(fault, fault.step or 0)
        if fault.rank is None or fault.step is None:
            return
        if fault.kind == "join":
            self._ranks.add(fault.rank)
        elif fault.kind == "leave":
            self._ranks.discard(fault.rank)
            for step in range(fault.step + 1):  # which may be made again, should everyone die
                self._awaited.get(step, set()).discard(fault.rank)

    def _meet(self, message: Message) -> None:
        """Have the strangers of a step come when its first shards are handed out."""
        for fault in self.waiting("stranger"):
            if isinstance(message, Assign) and message.step == fault.step:
                self.strike(fault)
                guest = strangers.guest(fault, self.server.terms, self.transport.secret)
                self._guests.append((fault, guest))
                self.transport.visit(guest)

    def _join(self, step: int) -> None:
        for fault in self.waiting("join"):
            if fault.step == step:
                assert fault.rank is not None, "faults.NEEDED has it"
                self.strike(fault)
                self.transport.start(fault.rank)

    def run_of(self, first: int, last: int) -> Run:
        """Return the run from step `first` to before `last`, as far as nothing has struck yet."""
        self._awaited = {first: set(self._ranks)}
        silent = [one for one in self.scenario.faults if one.kind in faults.SILENT]
        for fault in (*self.waiting("join", "lie", *faults.ON_THE_WAY), *silent):
            assert fault.step is not None, "faults.NEEDED has it"
            assert fault.rank is not None, "faults.NEEDED has it"
            # A rank that something befalls is waited for before the next step, if there is one.
            step = fault.step + (fault.kind != "join")
            if fault.step >= first:
                self._awaited.setdefault(step, set()).add(fault.rank)
        # A rank that is not let in again any more does not come to another coordinator either.
        barred = {rank for rank, times in self._caught.items() if times >= CONVICTIONS_MAX}
        self._ranks -= barred
        for awaited in self._awaited.values():
            awaited -= barred
        saves = {last} & set(self.scenario.stops)  # from which the next run starts
        if self.waiting("restart"):
            saves |= set(range(first + 1, last + 1))
        return replace(self.server.run_between(first, last), awaited=self._awaited, saves=saves)
