"""Stars, meshes and rings over TCP: this process coordinates, its workers are other processes.

What befalls a worker is real: signals, broken connections, damaged bytes. What it sends is meddled
with in its own process, what it gets from the coordinator in this one.
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
from entrenar_py.drivers.processes import Crew, Hand
from entrenar_py.drivers.tcp import DIED, CoordinatorServer
from entrenar_py.drivers.uninvited_client import Guest
from entrenar_py.errors import UsageError
from entrenar_py.faults import Fault
from entrenar_py.protocol.effects import Finish
from entrenar_py.protocol.terms import Run, Timing
from entrenar_py.scenario import Scenario
from entrenar_py.systems import preloaded
from entrenar_py.systems.star import worker_process
from entrenar_py.systems.star.scenario_run import ScenarioRun

LOOPBACK = "127.0.0.1"
ANSWER_S = 3.0
SECRET_BYTES = 32
SOCKET_BYTES_MAX = 2**30  # a kernel takes an int, and doubles it
RESTART_S = 0.2  # until a worker that was killed is started again


def run(scenario: Scenario) -> trace.Trace:
    """Train as `scenario` says."""
    return ScenarioRun(scenario, ProcessTransport).train()


@cache
def crew() -> Crew:
    """The worker processes of this process; they end with it."""
    made = Crew(worker_process.main, preload=preloaded.of_star())
    atexit.register(made.dismiss)
    return made


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a worker process's stay: `after_s` the coordinator knew that the run is over.

    That may be negative: a worker that halts because of itself knows before.
    """

    rank: int
    status: str
    reason: str
    after_s: float


class ProcessTransport:
    """The processes of one run on this machine. `ends` is how those workers ended that live."""

    _server: CoordinatorServer

    def __init__(self, of: ScenarioRun) -> None:
        self._of, self._scenario = of, of.scenario
        options = self._scenario.options
        self._timing = Timing(
            heartbeat_s=options.get("heartbeat_s", 0.5),
            dead_after_s=options.get("dead_after_s", 10.0),
            gather_s=60.0,
        )
        self._deadline_s = options.get("deadline_s")
        self._socket_bytes = options.get("socket_bytes", sockets.BUFFER_BYTES)
        _require_sizes(self._deadline_s, self._socket_bytes)
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._address = (LOOPBACK, 0)
        self._visits: list[asyncio.Task[None]] = []
        self._over_s = 0.0
        self._hands: dict[int, Hand] = {}
        self.ends: list[Ending] = []

    # --- the coordinator --------------------------------------------------------------------------

    def drive(self, run: Run) -> Finish:
        """Coordinate until the run is over and every worker has answered or died."""
        self._hands.clear()  # a process of the run before may be another's now
        answer_s = 0.0  # an interrupt waits for nobody
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
        """Have a coordinator of `run` listen, where the one before did if there was one."""
        self._server = CoordinatorServer(
            run,
            self._of.server,
            timing=self._timing,
            secret=self.secret,
            meddle=self._of.meddle,
            kind=self._of.topology.coordinator,
            notify=self._of.notify,
        )
        listening = self._server.listen(*self._address, buffer_bytes=self._socket_bytes)
        self._address = await listening

    async def _finish(self) -> Finish:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._server.finish()
        except TimeoutError:
            return Finish("failed", f"not finished after {self._deadline_s:g} s")

    def visit(self, guest: Guest) -> None:
        """Send a stranger to the real socket."""
        self._visits.append(asyncio.create_task(uninvited_client.visit(guest, *self._address)))

    # --- its workers ------------------------------------------------------------------------------

    def start(self, rank: int) -> None:
        """Give a process the job of being `rank`, and the faults that it is to suffer itself."""
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
        """Note how the workers ended, and record what they measured; also that the mutant took
        part in one, if one says so.
        """
        answers = {rank: json.loads(one.answer) for rank, one in self._hands.items() if one.answer}
        self.ends = [
            Ending(rank, said["status"], said["reason"], said["ended_s"] - self._over_s)
            for rank, said in sorted(answers.items())
        ]
        recorder = self._of.server.recorder
        for said in answers.values():
            for event in trace.load_events(said["measured"].encode()):
                recorder.emit(event)
        struck = any(said["struck"] for said in answers.values())
        if struck and self._scenario.mutant is not None:
            recorder.emit(trace.Planted(name=self._scenario.mutant))

    # --- faults -----------------------------------------------------------------------------------

    def befall(self, fault: Fault) -> None:
        """Send the signal that `fault` is; have the worker come back, or another coordinator."""
        if fault.kind == "restart":
            asyncio.get_running_loop().call_soon(self._server.die)
        elif fault.kind in ("kill", "leave", "freeze") and fault.rank is not None:
            hand = self._hands[fault.rank]
            _signal(hand, signal.SIGSTOP if fault.kind == "freeze" else signal.SIGKILL)
            self._have_back(fault, hand)

    def _have_back(self, fault: Fault, hand: Hand) -> None:
        """Start a worker again that is killed, or thaw one that is frozen, when its time comes."""
        loop = asyncio.get_running_loop()
        if fault.kind == "kill" and fault.rank is not None:
            loop.call_later(RESTART_S, self.start, fault.rank)
        elif fault.kind == "freeze":
            loop.call_later(fault.seconds or 0.0, _signal, hand, signal.SIGCONT)

    def _heard(self, hand: Hand) -> None:
        """Hear a worker say what it is about to suffer, or that it has answered, or is gone."""
        note = hand.heard()
        if note is None:
            asyncio.get_running_loop().remove_reader(hand.pipe.fileno())
            return
        noted = Fault.from_dict(json.loads(note))
        for fault in self._of.waiting(noted.kind):
            if fault == noted:  # of a coordinator's death several workers may tell: the first does
                self._of.strike(fault)
                if fault.kind == "restart":
                    self.befall(fault)
                else:
                    self._have_back(fault, hand)
                return


def _require_sizes(deadline_s: object, socket_bytes: object) -> None:
    """UsageError for what is no time, or no size of a buffer."""
    if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s > 0):
        raise UsageError(f"options {deadline_s=}: use a number of seconds > 0")
    if type(socket_bytes) is not int or not 1 <= socket_bytes <= SOCKET_BYTES_MAX:
        raise UsageError(f"options {socket_bytes=}: use a whole number, 1 to {SOCKET_BYTES_MAX}")


def _signal(hand: Hand, number: signal.Signals) -> None:
    """Send a signal to a worker's process, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(hand.pid, number)
