"""A run of a parameter server as a scenario wants it: from stop to stop, with who joins when.

How the workers are started and reached is left to who drives it (simulated, or real processes).
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from pathlib import Path

from entrenar_py import faults, trace
from entrenar_py.drivers.endpoints import CoordinatorEnd, WorkerEnd
from entrenar_py.drivers.uninvited_client import Guest
from entrenar_py.faults import Fault
from entrenar_py.protocol.attendance import CONVICTIONS_MAX
from entrenar_py.protocol.effects import Conclude, Finish, Left
from entrenar_py.protocol.messages import Assign, Message
from entrenar_py.protocol.terms import Run
from entrenar_py.scenario import Scenario
from entrenar_py.systems import AUTO, membership
from entrenar_py.systems.star import reduction_measures, strangers
from entrenar_py.systems.star.server import Server
from entrenar_py.training.vectors import GivenVectors


class Star(Server, ABC):
    """One run: the server, and the scenario's stops and faults as they come up.

    `promises` is what a run of one backend says of itself.
    """

    promises: tuple[str, ...] = ("bitwise",)

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._waiting = [one for one in scenario.faults if one.kind in faults.SURVIVED]
        self._ranks = set(membership.initial_ranks(scenario))  # who is there, or on the way back
        self._caught: Counter[int] = Counter()
        self._awaited: dict[int, set[int]] = {}
        self._guests: list[tuple[Fault, Guest]] = []  # who came uninvited
        self.secret = b""

    def train(self) -> trace.Trace:
        """The trace of the run; it promises the same bits where all compute on one backend."""
        scenario, first = self.scenario, 0
        with tempfile.TemporaryDirectory() as folder:
            self.checkpoint_path = Path(folder, "checkpoint")
            for last in (*sorted(set(scenario.stops)), scenario.num_steps):
                self.last = last
                finish = self.drive(self.run_of(first, last))
                if finish.status != "completed" or last == scenario.num_steps:
                    break
                first = self.restore()
        for fault, guest in self._guests:
            self.recorder.emit(
                trace.Admission(
                    case=fault.value or "",
                    entitled=False,
                    let_in=guest.let_in,
                    answer=guest.answer,
                )
            )
        promises = self.promises if self._alike() else ("draws",)
        return self.recorder.finish(promises=promises, status=finish.status, reason=finish.reason)

    def _alike(self) -> bool:
        """Whether all workers computed on one backend; for `auto` that is who served."""
        ranks = range(self.scenario.world_size)
        names = {self.scenario.backend_of(rank) for rank in ranks} - {AUTO}
        served = {one.backend for one in self.recorder.of(trace.Attempt) if one.served}
        return len(names | served) <= 1

    def measure(self, rank: int | None, end: CoordinatorEnd | WorkerEnd) -> None:
        """Records what went over the connections of `rank`, or of the coordinator (None)."""
        if isinstance(self.workload, GivenVectors):
            for event in reduction_measures.traffic(end, rank):
                self.recorder.emit(event)

    @abstractmethod
    def drive(self, run: Run) -> Finish:
        """Drives `run` to its end; `begin` starts its first workers."""

    @abstractmethod
    def start(self, rank: int) -> None:
        """Starts a worker that will connect as `rank`."""

    @abstractmethod
    def visit(self, guest: Guest) -> None:
        """Has `guest` connect to the coordinator."""

    def begin(self, run: Run) -> None:
        """Starts those who are there from the first step on."""
        for rank in sorted(self._ranks):
            self.start(rank)
        self._join(run.first_step)

    def gather(self, step: int) -> None:
        """Also starts who is to join before `step`."""
        super().gather(step)
        self._join(step)

    def conclude(self, effect: Conclude) -> None:
        """Also notes who is caught."""
        super().conclude(effect)
        if effect.culprit is not None:
            self._caught[effect.culprit] += 1

    def taken_up(self, step: int) -> Run:
        """What another coordinator goes on with, from the checkpoint, when one has died in `step`.

        It knows nobody: who dies while there is none is missed by nobody else.
        """
        for rank in sorted(self.present):
            self.left(Left(rank, step, "the coordinator died"))
        first = self.restore()
        self.gather(first)
        return replace(self.run_of(first, self.last), resumed=True)

    def waiting(self, *kinds: str) -> list[Fault]:
        """The faults of these kinds that have not struck yet."""
        return [one for one in self._waiting if one.kind in kinds]

    def strike(self, fault: Fault) -> None:
        """Notes and records that `fault` has struck."""
        self._waiting = [one for one in self._waiting if one is not fault]
        self.record_fault(fault, fault.step or 0)
        if fault.rank is None or fault.step is None:
            return
        if fault.kind == "join":
            self._ranks.add(fault.rank)
        elif fault.kind == "leave":
            self._ranks.discard(fault.rank)
            for step in range(fault.step + 1):  # which may be made again, should everyone die
                self._awaited.get(step, set()).discard(fault.rank)

    def meet(self, message: Message) -> None:
        """Has the strangers of a step come when its first shards are handed out."""
        for fault in self.waiting("stranger"):
            if isinstance(message, Assign) and message.step == fault.step:
                self.strike(fault)
                guest = strangers.guest(fault, self.terms, self.secret)
                self._guests.append((fault, guest))
                self.visit(guest)

    def run_of(self, first: int, last: int) -> Run:
        """The run from step `first` to before step `last`, as far as nothing has struck yet."""
        self._awaited = {first: set(self._ranks)}
        silent = [one for one in self.scenario.faults if one.kind in faults.SILENT]
        for fault in (*self.waiting("join", "lie", *faults.ON_THE_WAY), *silent):
            assert fault.step is not None, "faults.NEEDED has it"
            assert fault.rank is not None, "faults.NEEDED has it"
            # Whom something befalls is waited for before the next step, if there is one.
            step = fault.step + (fault.kind != "join")
            if fault.step >= first:
                self._awaited.setdefault(step, set()).add(fault.rank)
        # Who is not let in again any more does not come to another coordinator either.
        barred = {rank for rank, times in self._caught.items() if times >= CONVICTIONS_MAX}
        self._ranks -= barred
        for awaited in self._awaited.values():
            awaited -= barred
        saves = {last} & set(self.scenario.stops)  # from which the next run starts
        if self.waiting("restart"):
            saves |= set(range(first + 1, last + 1))
        return replace(self.run_between(first, last), awaited=self._awaited, saves=saves)

    def _join(self, step: int) -> None:
        for fault in self.waiting("join"):
            if fault.step == step:
                assert fault.rank is not None, "faults.NEEDED has it"
                self.strike(fault)
                self.start(fault.rank)
