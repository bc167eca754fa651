"""A run on two workers, one of which is a fuzzer: a stranger, or an admitted worker.

The other worker is honest. Whatever the fuzzer sends, the coordinator may only produce effects, the
honest worker must not be affected, and the run has to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import VERSION, Challenge, Hello, Message
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.endpoints import CoordinatorEnd, WorkerEnd
from entrenar_py.train.wire_io.simulation import feed
from tests.train.wire_io.fakes import AtOnce

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
NONCE = "0" * 2 * terms.NONCE_BYTES
CHALLENGE = Challenge(version=VERSION, nonce=NONCE)
TERMS = Server(SCENARIO).terms
HONEST, FUZZER, PASSER_BY = "honest", "fuzzer", "passer-by"


class Mailbox:
    """A connection that keeps what is written to each peer."""

    def __init__(self) -> None:
        self._boxes: dict[Peer, bytearray] = {}

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        self._boxes.setdefault(peer, bytearray()).extend(b"".join(buffers))

    def close(self, peer: Peer, reason: str) -> None:
        """Do nothing: nothing is written to a closed peer, and earlier bytes are kept."""

    def take(self, peer: Peer) -> bytes:
        """Return the bytes for `peer`, and remove them."""
        return bytes(self._boxes.pop(peer, b""))


class Door:
    """A coordinator, its honest worker 0, and the connection FUZZER.

    `awaited` are the ranks that the first step waits for. Without rank 1 the fuzzer connects while
    the step is computed. With it, no step begins before the fuzzer is admitted.
    """

    def __init__(self, *awaited: int) -> None:
        self.hands = Server(SCENARIO)
        self._down, self._up = Mailbox(), Mailbox()
        self._awaited = {0: list(awaited)}
        run = replace(
            self.hands.run_between(0, SCENARIO.num_steps), terms=TERMS, awaited=self._awaited
        )
        machine = Coordinator(run, secret=SECRET, timing=Timing(), now=0.0)
        self.end = CoordinatorEnd(machine, self.hands, self._down, _clock, AtOnce(), AtOnce())
        self._asked: list[do.Compute] = []
        self._honest = worker_end(0, self._up, self._asked.append)
        self._honest.connected(HONEST, NONCE)
        self.end.connected(HONEST, NONCE)
        self._carry()
        self.end.connected(FUZZER, NONCE)

    def say(self, data: bytes) -> None:
        """Deliver the fuzzer's `data`, and the resulting messages to the honest worker."""
        feed(self.end, FUZZER, data)
        self._carry()

    def work(self) -> None:
        """Compute the shards assigned to the honest worker."""
        while self._asked:
            asked = self._asked.pop(0)
            self._honest.computed(asked, self._honest.hands.work(asked.step, asked.shards))
            self._carry()

    def finish(self) -> do.Finish | None:
        """Return the end of the run after the fuzzer disconnects, or None if it does not end."""
        self._awaited.clear()
        self.end.lost(FUZZER, "the fuzzer has had enough")
        # The coordinator looks at the cleared `awaited` when any connection ends.
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
        """Deliver the messages of coordinator and honest worker to each other; drop those to
        FUZZER.
        """
        while (down := self._down.take(HONEST)) or (up := self._up.take(HONEST)):
            if down:
                feed(self._honest, HONEST, down)
            else:
                feed(self.end, HONEST, up)
        for other in (FUZZER, PASSER_BY):
            self._down.take(other)


def worker_end(rank: int, wire: Mailbox, compute: Callable[[do.Compute], None]) -> WorkerEnd:
    """Return a worker of the run that leaves its computations to `compute`."""
    machine = Worker(TERMS, secret=SECRET, backend="cpu", rank=rank, timing=Timing())
    return WorkerEnd(machine, Member(SCENARIO), wire, _clock, compute)


def hello_of(rank: int | None) -> Hello:
    """Return the hello of a worker that may join, with its proof."""
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
    return replace(hello, proof=terms.proof_of_worker(SECRET, CHALLENGE, hello))


def session_key(hello: Hello) -> bytes:
    return terms.session_key(SECRET, CHALLENGE, hello)


def _clock() -> float:
    return 0.0
