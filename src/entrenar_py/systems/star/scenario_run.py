"""One run over the protocol: runs a scenario from stop to stop and injects its faults.

A transport (`processes`, `simulation`) starts and reaches the workers. A topology decides the route
of gradients.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from entrenar_py.shared import faults, trace, workers
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import AUTO
from entrenar_py.train.arithmetic.tensors import Workload
from entrenar_py.train.arithmetic.workload import GivenVectors
from entrenar_py.train.coordinator import recorder, topology
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire.attendance import CONVICTIONS_MAX
from entrenar_py.train.wire.effects import Conclude, Effect, Finish, Gather, Left
from entrenar_py.train.wire.frames import CHUNK_BYTES, FIELDS, MAGIC, TO_COORDINATOR, Encoder
from entrenar_py.train.wire.messages import VERSION, Assign, Challenge, Hello, Message
from entrenar_py.train.wire.terms import Run, Terms, proof_of_worker
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.endpoints import CoordinatorEnd, MemberHands, WorkerEnd
from entrenar_py.train.wire_io.injections import Fate, Guest, Meddling

GARBAGE_BYTES = 1_000
CLAIMED_BYTES = 2**62
PACE_S = 1.0
PORT = 1  # at which a guest claims to listen, as a mesh worker must
OTHER = "0" * 64  # a wrong digest of the right length


def stranger_of(fault: Fault, terms: Terms, secret: bytes) -> Guest:
    """Return the client that `fault` describes, which is no worker of the run.

    The run has the `terms` and the `secret`.
    """
    match fault.value:
        case "garbage":
            noise = random.Random(fault.step).randbytes(GARBAGE_BYTES)
            return Guest(lambda challenge: noise)
        case "huge_claim":
            return Guest(lambda challenge: _claim())
        case "silent":
            return Guest(lambda challenge: b"")
        case "slow_loris":
            return Guest(_applicant(terms, secret, None), pace_s=PACE_S)
        case "wrong_secret":
            return Guest(_applicant(terms, secret + b"!", None))
        case "wrong_run" | "wrong_manifest" | "wrong_data":
            wrong = {fault.value.removeprefix("wrong_"): OTHER}
            return Guest(_applicant(replace(terms, **wrong), secret, None))
        case _:  # taken_rank, one_too_many: a valid hello, but no rank is free for it
            return Guest(_applicant(terms, secret, fault.rank))


def _applicant(terms: Terms, secret: bytes, rank: int | None) -> Callable[[Challenge], bytes]:
    """Return a function that answers a challenge with a Hello that proves `secret`."""

    def hello(challenge: Challenge) -> bytes:
        plain = Hello(
            version=VERSION,
            run=terms.run,
            manifest=terms.manifest,
            data=terms.data,
            backend="cpu",
            rank=rank,
            port=PORT,
            nonce=challenge.nonce[::-1],
            proof="",
        )
        proof = proof_of_worker(secret, challenge, plain)
        return b"".join(Encoder().encode(replace(plain, proof=proof)))

    return hello


def _claim() -> bytes:
    """Return the prefix of a hello that announces a payload of CLAIMED_BYTES."""
    fields = FIELDS.pack(
        *(MAGIC, VERSION, Hello.tag, True, TO_COORDINATOR, 0), *(1, CHUNK_BYTES, CLAIMED_BYTES)
    )
    return fields + bytes(16)


class Transport(Protocol):
    """Starts and reaches the processes of a run, in real time or in a simulation.

    `secret` is the key that the processes share.
    """

    secret: bytes

    def drive(self, run: Run) -> Finish:
        """Drive `run` to its end; `ScenarioRun.begin` starts its first workers."""

    def start(self, rank: int) -> None:
        """Start a worker that will connect as `rank`."""

    def visit(self, guest: Guest) -> None:
        """Have `guest` connect to the coordinator."""

    def befall(self, fault: Fault) -> None:
        """Kill, freeze or restart the process of `fault`; bring it back later if planned."""


class ScenarioRun:
    """One run: its server, and the stops and faults of its scenario."""

    def __init__(
        self,
        scenario: Scenario,
        transport: Callable[[ScenarioRun], Transport],
        workload: Workload | None = None,
        server: Server | None = None,
    ) -> None:
        """Start a run; `workload` defaults to the scenario's, `server` to a plain Server."""
        self.scenario = scenario
        self.topology = topology.of(scenario)
        self.server = Server(scenario, workload=workload) if server is None else server
        self.transport = transport(self)
        self._waiting = [one for one in scenario.faults if one.kind in faults.SURVIVED]
        self._ranks = set(
            workers.initial_ranks(scenario.world_size, scenario.faults)
        )  # present, or about to return
        self._caught: Counter[int] = Counter()
        self._awaited: dict[int, set[int]] = {}
        self._guests: list[tuple[Fault, Guest]] = []  # the strangers that came
        self._last = scenario.num_steps  # the current part of the run ends before this step

    def train(self) -> trace.Trace:
        """Run all steps; return the trace, with `topology.promise` if all use one backend."""
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
                    case=fault.value or "", entitled=False, let_in=guest.let_in, answer=guest.answer
                )
            )
        promise = self.topology.promise if self._is_alike() else "draws"
        ending = {"status": finish.status, "reason": finish.reason}
        return server.recorder.finish(promises=(promise,), **ending)

    def _is_alike(self) -> bool:
        """Return whether all workers used one backend.

        `auto` counts as the backend that it selected.
        """
        ranks = range(self.scenario.world_size)
        names = {self.scenario.backend_of(rank) for rank in ranks} - {AUTO}
        served = {one.backend for one in self.server.recorder.of(trace.Attempt) if one.served}
        return len(names | served) <= 1

    # --- for the transport ------------------------------------------------------------------------

    @property
    def worker(self) -> type[Worker]:
        """The state machine of a worker."""
        return self.topology.worker

    def member(self) -> MemberHands:
        """Return the arithmetic and records of a worker that a simulation starts."""
        scenario, workload = self.scenario, self.server.replicas.workload
        return Member(scenario, workload=workload, faults=scenario.faults)

    def begin(self, run: Run) -> None:
        """Start the workers that are present at the first step of `run`."""
        for rank in sorted(self._ranks):
            self.transport.start(rank)
        self._join(run.first_step)

    def notify(self, effect: Effect) -> None:
        """Start the workers that join in a step that begins; count culprits of audits by rank."""
        if isinstance(effect, Gather):
            self._join(effect.step)
        elif isinstance(effect, Conclude) and effect.culprit is not None:
            self._caught[effect.culprit] += 1

    def measure(self, rank: int | None, end: CoordinatorEnd | WorkerEnd) -> None:
        """Record the traffic of `rank` (None: of the coordinator), if the workload measures it."""
        if isinstance(self.server.replicas.workload, GivenVectors):
            for event in recorder.traffic(end, rank):
                self.server.recorder.emit(event)

    def taken_up(self, step: int) -> Run:
        """Return the run with which a new coordinator continues after one died in `step`.

        All workers are recorded as having left, because the new coordinator can't know which are
        alive.
        """
        for rank in sorted(self.server.present):
            self.server.left(Left(rank, step, "the coordinator died"))
        first = self.server.restore()
        self.server.gather(first)
        self._join(first)
        return replace(self.run_of(first, self._last), resumed=True)

    def meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        """Inject the fault planned at `message`, if any.

        Return its effect on `message`, or None.
        """
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
        """Return the faults of these kinds that have not occurred yet."""
        return [one for one in self._waiting if one.kind in kinds]

    def strike(self, fault: Fault) -> None:
        """Note and record that `fault` has occurred."""
        self._waiting = [one for one in self._waiting if one is not fault]
        self.server.replicas.record_fault(fault, fault.step or 0)
        if fault.rank is None or fault.step is None:
            return
        if fault.kind == "join":
            self._ranks.add(fault.rank)
        elif fault.kind == "leave":
            self._ranks.discard(fault.rank)
            for step in range(fault.step + 1):  # steps are repeated if all workers die
                self._awaited.get(step, set()).discard(fault.rank)

    def _meet(self, message: Message) -> None:
        for fault in self.waiting("stranger"):
            if isinstance(message, Assign) and message.step == fault.step:
                self.strike(fault)
                guest = stranger_of(fault, self.server.terms, self.transport.secret)
                self._guests.append((fault, guest))
                self.transport.visit(guest)

    def _join(self, step: int) -> None:
        for fault in self.waiting("join"):
            if fault.step == step:
                assert fault.rank is not None, "faults.NEEDED has it"
                self.strike(fault)
                self.transport.start(fault.rank)

    def run_of(self, first: int, last: int) -> Run:
        """Return the run from step `first` to `last`, exclusive, with the remaining faults."""
        self._awaited = {first: set(self._ranks)}
        silent = [one for one in self.scenario.faults if one.kind in faults.SILENT]
        for fault in (*self.waiting("join", "lie", *faults.ON_THE_WAY), *silent):
            assert fault.step is not None, "faults.NEEDED has it"
            assert fault.rank is not None, "faults.NEEDED has it"
            # A rank removed by a fault is awaited before the next step, if there is one.
            step = fault.step + (fault.kind != "join")
            if fault.step >= first:
                self._awaited.setdefault(step, set()).add(fault.rank)
        # A rank that was barred does not connect to a new coordinator either.
        barred = {rank for rank, times in self._caught.items() if times >= CONVICTIONS_MAX}
        self._ranks -= barred
        for awaited in self._awaited.values():
            awaited -= barred
        saves = {last} & set(self.scenario.stops)  # the next part of the run starts there
        if self.waiting("restart"):
            saves |= set(range(first + 1, last + 1))
        return replace(self.server.run_between(first, last), awaited=self._awaited, saves=saves)
