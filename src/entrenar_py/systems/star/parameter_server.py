"""The parameter server over TCP: this process coordinates, its workers are other processes.

What befalls a worker is real: signals, broken connections, damaged bytes. What it sends is meddled
with in its own process, what it gets in this one.
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

from entrenar_py import faults, trace
from entrenar_py.drivers import sockets, uninvited_client
from entrenar_py.drivers.message_faults import Fate, Meddling
from entrenar_py.drivers.processes import Crew, Hand
from entrenar_py.drivers.tcp import DIED, CoordinatorServer
from entrenar_py.drivers.uninvited_client import Guest
from entrenar_py.errors import UsageError
from entrenar_py.faults import Fault
from entrenar_py.protocol.effects import Finish
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Assign, Average, Commit, Message, Weights
from entrenar_py.protocol.terms import Run, Timing
from entrenar_py.scenario import Scenario
from entrenar_py.systems import preloaded
from entrenar_py.systems.star import topology, worker_process
from entrenar_py.systems.star.star import Star

LOOPBACK = "127.0.0.1"
ANSWER_S = 3.0
SOCKET_BYTES_MAX = 2**30  # a kernel takes an int, and doubles it
RESTART_S = 0.2  # until a worker that was killed is started again


def run(scenario: Scenario) -> trace.Trace:
    """Trains as `scenario` says."""
    return ProcessStar(scenario).train()


@cache
def crew() -> Crew:
    """The worker processes of this process; they end with it."""
    made = Crew(worker_process.main, preload=preloaded.MODULES)
    atexit.register(made.dismiss)
    return made


@dataclass(frozen=True, slots=True)
class Ending:
    """How a worker's process ended its stay: `after_s` the coordinator knew that the run is over.

    That may be negative: who halts because of itself knows before.
    """

    rank: int
    status: str
    reason: str
    after_s: float


class ProcessStar(Star):
    """A run with real processes on this machine."""

    _server: CoordinatorServer
    # Where a fault strikes in this process.
    down: tuple[type[Message], ...] = (Assign, Average, Weights, Commit)

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        options = scenario.options
        self._timing = Timing(
            heartbeat_s=options.get("heartbeat_s", 0.5),
            dead_after_s=options.get("dead_after_s", 10.0),
            gather_s=60.0,
        )
        self._deadline_s = options.get("deadline_s")
        self._socket_bytes = options.get("socket_bytes", sockets.BUFFER_BYTES)
        _require_sizes(self._deadline_s, self._socket_bytes)
        self.secret = secrets.token_bytes(32)
        self._address = (LOOPBACK, 0)
        self._visits: list[asyncio.Task[None]] = []
        self._over_s = 0.0
        self._hands: dict[int, Hand] = {}
        self.ends: list[Ending] = []  # how the workers ended that are alive

    def drive(self, run: Run) -> Finish:
        """Coordinates until the run is over and every worker has answered or died."""
        self._hands.clear()  # a process of the run before may be another's now
        answer_s = 0.0  # who is interrupted waits for nobody
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
        self.begin(run)
        while (finish := await self._finish()) is DIED:
            await self._listen(self.taken_up(self._server.end.machine.step))
        self._over_s = self._server.over_s
        self.measure(None, self._server.end)
        await asyncio.gather(*self._visits)  # the coordinator has closed them
        self._visits.clear()
        return finish

    async def _listen(self, run: Run) -> None:
        """Has a coordinator of `run` listen, where the one before did if there was one."""
        self._server = CoordinatorServer(
            run,
            self,
            timing=self._timing,
            secret=self.secret,
            meddle=self.meddle,
            kind=topology.coordinator_of(self.scenario),
        )
        listening = self._server.listen(*self._address, buffer_bytes=self._socket_bytes)
        self._address = await listening

    async def _finish(self) -> Finish:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._server.finish()
        except TimeoutError:
            return Finish("failed", f"not finished after {self._deadline_s:g} s")

    def require(self, rank: int, message: Message, payload: Buffer) -> None:
        """Also has the coordinator die, if it is to do so at this message."""
        super().require(rank, message, payload)
        self._perhaps_die(message)

    def _perhaps_die(self, message: Message) -> bool:
        """Whether the coordinator dies here: in a moment, when it has begun to deal with it."""
        for fault in self.waiting("restart"):
            if (fault.step, fault.at) == (getattr(message, "step", None), type(message).__name__):
                self.strike(fault)
                asyncio.get_running_loop().call_soon(self._server.die)
                return True
        return False

    def visit(self, guest: Guest) -> None:
        """A stranger at a real socket."""
        self._visits.append(asyncio.create_task(uninvited_client.visit(guest, *self._address)))

    def _take_answers(self) -> None:
        """Notes how the workers ended, and records what they measured; also that the mutant took
        part in one, if one says so.
        """
        answers = {rank: json.loads(one.answer) for rank, one in self._hands.items() if one.answer}
        self.ends = [
            Ending(rank, said["status"], said["reason"], said["ended_s"] - self._over_s)
            for rank, said in sorted(answers.items())
        ]
        for said in answers.values():
            for event in trace.load_events(said["measured"].encode()):
                self.recorder.emit(event)
        struck = any(said["struck"] for said in answers.values())
        if struck and self.scenario.mutant is not None:
            self.recorder.emit(trace.Planted(name=self.scenario.mutant))

    def start(self, rank: int) -> None:
        """Gives a process the job of being `rank`, and the faults that it is to suffer itself."""
        suffers = [
            one.to_dict()
            for one in self.waiting("leave", "lie", *faults.ON_THE_WAY)
            if one.rank == rank and one.at not in [kind.__name__ for kind in self.down]
        ]
        host, port = self._address
        job = {
            "scenario": self.scenario.to_dict(),
            "terms": asdict(self.terms),
            "rank": rank,
            "backend": self.scenario.backend_of(rank),
            "host": host,
            "port": port,
            "secret": self.secret.hex(),
            "timing": asdict(self._timing),
            "socket_bytes": self._socket_bytes,
            "faults": suffers,
        }
        hand = self._hands[rank] = crew().give(json.dumps(job).encode())
        asyncio.get_running_loop().add_reader(hand.pipe.fileno(), self._heard, hand)

    def meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        """What befalls a message to a worker, and the worker that was to get it."""
        self.meet(message)
        if self._perhaps_die(message):
            return Meddling(Fate.CUT)
        for fault in self.waiting(*faults.ON_THE_WAY):
            place = (getattr(message, "step", None), type(message).__name__)
            if rank is not None and (fault.rank, fault.step, fault.at) == (rank, *place):
                self.strike(fault)
                if fault.kind == "kill":
                    _signal(self._hands[rank], signal.SIGKILL)
                    self._restart(rank)
                elif fault.kind == "freeze":
                    _signal(self._hands[rank], signal.SIGSTOP)
                    self._thaw(self._hands[rank], fault.seconds or 0.0)
                return Meddling(Fate(fault.kind), fault.seconds or 0.0)
        return None

    def _restart(self, rank: int) -> None:
        asyncio.get_running_loop().call_later(RESTART_S, self.start, rank)

    def _thaw(self, hand: Hand, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, _signal, hand, signal.SIGCONT)

    def _heard(self, hand: Hand) -> None:
        """A worker says what it is about to suffer, or has answered, or is gone."""
        note = hand.heard()
        if note is None:
            asyncio.get_running_loop().remove_reader(hand.pipe.fileno())
        else:
            self._noted(hand, note)

    def _noted(self, hand: Hand, note: bytes) -> None:
        told = Fault.from_dict(json.loads(note))
        fault = next(one for one in self.waiting(told.kind) if one == told)
        self.strike(fault)
        if fault.kind == "kill" and fault.rank is not None:
            self._restart(fault.rank)
        elif fault.kind == "freeze":
            self._thaw(hand, fault.seconds or 0.0)


def _require_sizes(deadline_s: object, socket_bytes: object) -> None:
    """UsageError for what is no time, or no size of a buffer."""
    if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s > 0):
        raise UsageError(f"options {deadline_s=}: use a number of seconds > 0")
    if type(socket_bytes) is not int or not 1 <= socket_bytes <= SOCKET_BYTES_MAX:
        raise UsageError(f"options {socket_bytes=}: use a whole number, 1 to {SOCKET_BYTES_MAX}")


def _signal(hand: Hand, number: signal.Signals) -> None:
    """Sends a signal to a worker's process, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(hand.pid, number)
