"""A run of two in which one worker is a fuzzer: a stranger at the door, or one that was let in.

The other worker is honest. Whatever the fuzzer says, nothing but effects may come of it, the honest
worker must not notice, and the run has to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from entrenar_py.drivers.endpoints import CoordinatorEnd, WorkerEnd
from entrenar_py.drivers.simulated_connections import feed
from entrenar_py.protocol import effects as do
from entrenar_py.protocol import handshake
from entrenar_py.protocol.coordinator import Coordinator
from entrenar_py.protocol.effects import Peer
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import VERSION, Challenge, Hello, Message
from entrenar_py.protocol.terms import Timing
from entrenar_py.protocol.worker import Worker
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star.member import Member
from entrenar_py.systems.star.server import Server
from tests.drivers.fakes import AtOnce

SCENARIO = Scenario(
    system="parameter_server_simulated",
    workload="linear",
    world_size=2,
    seed=0,
    num_shards=4,
    num_steps=3,
    optimizer="momentum",
)
SECRET = b"open sesame"
NONCE = "0" * 2 * handshake.NONCE_BYTES
CHALLENGE = Challenge(version=VERSION, nonce=NONCE)
TERMS = Server(SCENARIO).terms
HONEST, FUZZER, PASSER_BY = "honest", "fuzzer", "passer-by"


class Mailbox:
    """A wire that keeps what is written to each peer."""

    def __init__(self) -> None:
        self._boxes: dict[Peer, bytearray] = {}

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        self._boxes.setdefault(peer, bytearray()).extend(b"".join(buffers))

    def close(self, peer: Peer, reason: str) -> None:
        """A closed peer hears no more; the bytes written before are still there."""

    def take(self, peer: Peer) -> bytes:
        """Return the bytes for `peer`, and remove them."""
        return bytes(self._boxes.pop(peer, b""))


class Door:
    """A coordinator, its honest worker 0, and the connection FUZZER.

    `awaited` are the ranks that the first step waits for: without 1 the fuzzer comes when the step
    is being computed, and with it there is no step before it was let in.
    """

    def __init__(self, *awaited: int) -> None:
        self.hands = Server(SCENARIO)
        self._down, self._up = Mailbox(), Mailbox()
        self._awaited = {0: list(awaited)}
        run = replace(
            self.hands.run_between(0, SCENARIO.num_steps), terms=TERMS, awaited=self._awaited
        )
        machine = Coordinator(run, secret=SECRET, timing=Timing(), now=0.0)
        self.end = CoordinatorEnd(machine, self.hands, self._down, _clock, AtOnce())
        self._asked: list[do.Compute] = []
        self._honest = worker_end(0, self._up, self._asked.append)
        self._honest.connected(HONEST, NONCE)
        self.end.connected(HONEST, NONCE)
        self._carry()
        self.end.connected(FUZZER, NONCE)

    def say(self, data: bytes) -> None:
        """The fuzzer's `data` arrives, and the honest worker hears what follows from it."""
        feed(self.end, FUZZER, data)
        self._carry()

    def work(self) -> None:
        """The honest worker computes what it was asked to."""
        while self._asked:
            asked = self._asked.pop(0)
            self._honest.computed(asked, self._honest.hands.work(asked.step, asked.shards))
            self._carry()

    def finish(self) -> do.Finish | None:
        """How the run ends when the fuzzer has gone and nobody awaits it; None if it does not."""
        self._awaited.clear()
        self.end.lost(FUZZER, "the fuzzer has had enough")
        # Whoever goes is a reason to look who is there.
        self.end.connected(PASSER_BY, NONCE)
        self.end.lost(PASSER_BY, "gone")
        self._carry()
        self.work()
        return self.end.finished

    def weights(self) -> bytes:
        """Return the bits of the coordinator's weights."""
        arrays = self.hands.replica.replica.arrays
        return b"".join(arrays[name].tobytes() for name in sorted(arrays))

    def _carry(self) -> None:
        """Carries what the honest two say until they say no more; what FUZZER is told is lost."""
        while (down := self._down.take(HONEST)) or (up := self._up.take(HONEST)):
            if down:
                feed(self._honest, HONEST, down)
            else:
                feed(self.end, HONEST, up)
        for other in (FUZZER, PASSER_BY):
            self._down.take(other)


def worker_end(rank: int, wire: Mailbox, compute: Callable[[do.Compute], None]) -> WorkerEnd:
    """A real worker of the run, whose computing is left to `compute`."""
    machine = Worker(TERMS, secret=SECRET, backend="cpu", rank=rank, timing=Timing())
    return WorkerEnd(machine, Member(SCENARIO), wire, _clock, compute)


def hello_of(rank: int | None) -> Hello:
    """The hello of one that may take part, with its proof."""
    plain = Hello(
        version=VERSION,
        run=TERMS.run,
        manifest=TERMS.manifest,
        data=TERMS.data,
        backend="cpu",
        rank=rank,
        port=None,
        nonce=NONCE,
        proof="",
    )
    return proved(plain)


def proved(hello: Hello) -> Hello:
    """`hello` with the proof of one that knows the secret."""
    return replace(hello, proof=handshake.proof_of_worker(SECRET, CHALLENGE, hello))


def session_key(hello: Hello) -> bytes:
    """The key of the session that `hello` opens."""
    return handshake.session_key(SECRET, CHALLENGE, hello)


def _clock() -> float:
    return 0.0
