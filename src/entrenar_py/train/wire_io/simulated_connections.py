"""The workers of a simulation and the connections between them, as plain records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Message
from entrenar_py.train.wire_io.endpoints import End, WorkerEnd


@dataclass(slots=True)
class Direction:
    """One direction of a connection: when its last bytes arrive, and bytes `held` to reorder."""

    arrives: float = 0.0
    held: bytes = b""


@dataclass(slots=True, eq=False)
class Node:
    """A worker's process. `connection` is that to the coordinator. The process does nothing until
    `frozen_until`; if `calling`, it will connect soon.
    """

    number: int
    end: WorkerEnd = field(init=False)
    connection: Connection | None = None
    alive: bool = True
    frozen_until: float = 0.0
    calling: bool = False

    def lose(self, connection: Connection, reason: str) -> None:
        """Tell the worker that `connection` is lost."""
        if self.connection is connection:
            self.connection = None
        self.end.lost(connection.peer, reason)


@dataclass(slots=True, eq=False)
class Connection:
    """A connection of `node` to the coordinator, or to worker `to`; both ends know it as `peer`.

    `dead`: all bytes are lost. `ended`: nothing more is sent on it.
    """

    peer: int
    node: Node
    to: Node | None = None
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    dead: bool = False
    ended: bool = False

    def end(self, up: bool) -> Node | None:
        """Return the worker at which bytes sent `up`, or down, arrive; None for the coordinator."""
        return self.to if up else self.node


@dataclass(frozen=True, slots=True)
class SimulatedWire:
    """A simulated end's wire: `send` gets each message with its bytes in one piece."""

    send: Callable[[Peer, Message, bytes], None]
    close: Callable[[Peer, str], None]

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        """Send `message`, which is encoded in `buffers`."""
        self.send(peer, message, b"".join(buffers))


def feed(end: End, peer: Peer, data: bytes) -> None:
    """Deliver `data` from `peer`, as much at a time as `end` takes; drop what it does not take."""
    left = memoryview(data)
    while left.nbytes and (place := end.buffer(peer)) is not None:
        num_bytes = min(place.nbytes, left.nbytes)
        place[:num_bytes] = left[:num_bytes]
        left = left[num_bytes:]
        end.filled(peer, num_bytes)
