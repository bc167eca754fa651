"""Stars, meshes and rings over TCP: this process is the coordinator, its workers are processes.

Faults are real signals, broken connections and damaged bytes. Faults on a worker's messages are
injected in its own process, faults on the coordinator's messages in this one.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache

from entrenar_py.shared import faults, trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems import preload
from entrenar_py.systems.star import worker_process
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.train.wire.effects import Effect, Finish
from entrenar_py.train.wire.terms import Run, Timing
from entrenar_py.train.wire_io import injections, sockets
from entrenar_py.train.wire_io.injections import Guest
from entrenar_py.train.wire_io.processes import Crew, Hand
from entrenar_py.train.wire_io.tcp import DIED, CoordinatorServer

LOOPBACK = "127.0.0.1"
ANSWER_S = 3.0
GATHER_S = 60.0  # within which all workers must have connected
SECRET_BYTES = 32
SOCKET_BYTES_MAX = 2**30  # a kernel takes the size as an int, and doubles it
RESTART_S = 0.2  # until a worker that was killed is started again


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says."""
    return ScenarioRun(scenario, ProcessTransport).train()


@cache
def crew() -> Crew:
    """Return the worker processes, which end with this process."""
    made = Crew(worker_process.main, preload=preload.of_star())
    atexit.register(made.dismiss)
    return made


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a worker's session, `after_s` seconds after the coordinator finished.

    `after_s` is negative if the worker finished first, for example because of its own non-finite
    gradient.
    """

    rank: int
    status: str
    reason: str
    after_s: float


class ProcessTransport:
    """The processes of one run on this machine. `ends` says how the surviving workers ended."""

    _server: CoordinatorServer
    _limit: asyncio.Timeout

    def __init__(self, of: ScenarioRun) -> None:
        self._of, self._scenario = of, of.scenario
        options = self._scenario.options
        self._timing = Timing(
            heartbeat_s=options.get("heartbeat_s", 0.5),
            dead_after_s=options.get("dead_after_s", 10.0),
            gather_s=GATHER_S,
        )
        self._deadline_s = options.get("deadline_s")
        self._socket_bytes = options.get("socket_bytes", sockets.BUFFER_BYTES)
        _require_sizes(self._deadline_s, self._socket_bytes)
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._address = (LOOPBACK, 0)
        self._visits: list[asyncio.Task[None]] = []
        self._over_s, self._has_begun = 0.0, False
        self._hands: dict[int, Hand] = {}
        self.ends: list[Ending] = []

    # --- the coordinator --------------------------------------------------------------------------

    def drive(self, run: Run) -> Finish:
        """Coordinate until the run is over and every worker has answered or died."""
        self._hands.clear()  # a process of the last run may be another rank now
        answer_s = 0.0  # after an interrupt no answer is awaited
        try:
            finish = asyncio.run(self._serve(run))
            answer_s = ANSWER_S
            return finish
        finally:
            crew().gather(answer_s)
            self._take_answers()

    async def _serve(self, run: Run) -> Finish:
        self._address = (LOOPBACK, 0)
        await self._listen(run)
        self._of.begin(run)
        while (finish := await self._finish()) is DIED:
            await self._listen(self._of.taken_up(self._server.end.machine.step))
        self._over_s = self._server.over_s
        self._of.measure(None, self._server.end)
        await asyncio.gather(*self._visits)  # the coordinator has closed them
        self._visits.clear()
        return finish

    async def _listen(self, run: Run) -> None:
        """Start a coordinator of `run`, at the address of the previous one if there was one."""
        self._server = CoordinatorServer(
            run,
            self._of.server,
            timing=self._timing,
            secret=self.secret,
            meddle=self._of.meddle,
            kind=self._of.topology.coordinator,
            notify=self._notify,
        )
        listening = self._server.listen(*self._address, buffer_bytes=self._socket_bytes)
        self._address = await listening

    async def _finish(self) -> Finish:
        """Wait for the end of the run. The deadline counts from the first worker's start.

        The time that processes take to load and to connect is not part of the run.
        """
        limit_s = None if self._deadline_s is None else GATHER_S + self._deadline_s
        try:
            async with asyncio.timeout(limit_s) as self._limit:
                return await self._server.finish()
        except TimeoutError:
            return Finish("failed", f"not finished after {self._deadline_s:g} s")

    def _notify(self, effect: Effect) -> None:
        self._of.notify(effect)
        if self._deadline_s is None or self._has_begun:
            return
        self._has_begun = bool(self._of.server.recorder.of(trace.Start))
        if self._has_begun:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._deadline_s)

    def visit(self, guest: Guest) -> None:
        """Connect `guest`, which is no worker of the run, to the coordinator's socket."""
        self._visits.append(asyncio.create_task(injections.visit(guest, *self._address)))

    # --- its workers ------------------------------------------------------------------------------

    def start(self, rank: int) -> None:
        """Start a process as worker `rank`, with the faults that it injects into itself."""
        down = {kind.__name__ for kind in self._of.topology.down}
        suffers = [
            one.to_dict()
            for one in self._of.waiting("restart", "lie", *faults.ON_THE_WAY)
            if one.rank in (rank, None) and one.at not in down
        ]
        host, port = self._address
        job = {
            "scenario": self._scenario.to_dict(),
            "terms": asdict(self._of.server.terms),
            "rank": rank,
            "backend": self._scenario.backend_of(rank),
            "host": host,
            "port": port,
            "secret": self.secret.hex(),
            "timing": asdict(self._timing),
            "socket_bytes": self._socket_bytes,
            "faults": suffers,
        }
        hand = self._hands[rank] = crew().give(json.dumps(job).encode())
        asyncio.get_running_loop().add_reader(hand.pipe.fileno(), self._heard, hand)

    def _take_answers(self) -> None:
        """Note how the workers ended; record their measurements, and whether one ran the mutant."""
        answers = {rank: json.loads(one.answer) for rank, one in self._hands.items() if one.answer}
        self.ends = [
            Ending(rank, answer["status"], answer["reason"], answer["ended_s"] - self._over_s)
            for rank, answer in sorted(answers.items())
        ]
        recorder = self._of.server.recorder
        for answer in answers.values():
            for event in trace.load_events(answer["measured"].encode()):
                recorder.emit(event)
        struck = any(answer["struck"] for answer in answers.values())
        if struck and self._scenario.mutant is not None:
            recorder.emit(trace.Planted(name=self._scenario.mutant))

    # --- faults -----------------------------------------------------------------------------------

    def befall(self, fault: Fault) -> None:
        """Send a worker the signal of `fault` and plan its return, or end the coordinator."""
        if fault.kind == "restart":
            asyncio.get_running_loop().call_soon(self._server.die)
        elif fault.kind in ("kill", "leave", "freeze") and fault.rank is not None:
            hand = self._hands[fault.rank]
            _signal(hand, signal.SIGSTOP if fault.kind == "freeze" else signal.SIGKILL)
            self._have_back(fault, hand)

    def _have_back(self, fault: Fault, hand: Hand) -> None:
        """Plan to restart a killed worker, or to resume a frozen worker, after a delay."""
        loop = asyncio.get_running_loop()
        if fault.kind == "kill" and fault.rank is not None:
            loop.call_later(RESTART_S, self.start, fault.rank)
        elif fault.kind == "freeze":
            loop.call_later(fault.seconds or 0.0, _signal, hand, signal.SIGCONT)

    def _heard(self, hand: Hand) -> None:
        """Read a worker's pipe: a note of a fault that it will inject, its answer, or EOF."""
        note = hand.heard()
        if note is None:
            asyncio.get_running_loop().remove_reader(hand.pipe.fileno())
            return
        noted = Fault.from_dict(json.loads(note))
        for fault in self._of.waiting(noted.kind):
            if fault == noted:  # several workers may note one restart: only the first note counts
                self._of.strike(fault)
                if fault.kind == "restart":
                    self.befall(fault)
                else:
                    self._have_back(fault, hand)
                return


def _require_sizes(deadline_s: object, socket_bytes: object) -> None:
    """Raise UsageError for a deadline or a buffer size that is not possible."""
    if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s > 0):
        raise UsageError(f"options {deadline_s=}: use a number of seconds > 0")
    if type(socket_bytes) is not int or not 1 <= socket_bytes <= SOCKET_BYTES_MAX:
        raise UsageError(f"options {socket_bytes=}: use a whole number, 1 to {SOCKET_BYTES_MAX}")


def _signal(hand: Hand, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(hand.pid, number)
