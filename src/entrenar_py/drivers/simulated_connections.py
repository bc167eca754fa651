"""The workers of a simulation and the connections between them, as plain records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from entrenar_py.drivers.endpoints import End, WorkerEnd
from entrenar_py.protocol.effects import Peer
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Message


@dataclass(slots=True)
class Direction:
    """One way of a connection: when its last bytes arrive, and what waits to be reordered."""

    arrives: float = 0.0
    held: bytes = b""


@dataclass(slots=True, eq=False)
class Node:
    """A worker's process. `connection` is that to the coordinator, `frozen_until` when it goes on;
    `calling`: it will connect soon.
    """

    number: int
    end: WorkerEnd = field(init=False)
    connection: Connection | None = None
    alive: bool = True
    frozen_until: float = 0.0
    calling: bool = False

    def lose(self, connection: Connection, reason: str) -> None:
        """A connection is gone."""
        if self.connection is connection:
            self.connection = None
        self.end.lost(connection.peer, reason)


@dataclass(slots=True, eq=False)
class Connection:
    """From a worker to the coordinator, or to worker `to`; both call it `peer`.

    `dead`: nothing passes. `ended`: nothing more is said on it.
    """

    peer: int
    node: Node
    to: Node | None = None
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    dead: bool = False
    ended: bool = False

    def end(self, up: bool) -> Node | None:
        """Return who is at its upper or lower end; None is the coordinator."""
        return self.to if up else self.node


@dataclass(frozen=True, slots=True)
class SimulatedWire:
    """The way of a simulated end's bytes: `send` gets a message's in one piece."""

    send: Callable[[Peer, Message, bytes], None]
    close: Callable[[Peer, str], None]

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Send `message`, which `buffers` are."""
        self.send(peer, message, b"".join(buffers))


def feed(end: End, peer: Peer, data: bytes) -> None:
    """Has `data` of `peer` arrive, as much at a time as the end takes; drops what it takes not."""
    left = memoryview(data)
    while left.nbytes and (place := end.buffer(peer)) is not None:
        num_bytes = min(place.nbytes, left.nbytes)
        place[:num_bytes] = left[:num_bytes]
        left = left[num_bytes:]
        end.filled(peer, num_bytes)
