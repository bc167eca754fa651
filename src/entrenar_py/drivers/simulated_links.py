"""Where the ends of a simulation write to, and to whom they leave what takes time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from entrenar_py.drivers.simulated_connections import Node
from entrenar_py.protocol import effects as do
from entrenar_py.protocol.effects import Peer
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.messages import Message

if TYPE_CHECKING:
    from entrenar_py.drivers.simulated import Simulation


class Down:
    """The coordinator's wire."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        self._simulation.tell(peer, message, b"".join(buffers))

    def close(self, peer: Peer, reason: str) -> None:
        self._simulation.closed_by_coordinator(peer, reason)


class Up:
    """A worker's wire, and what it leaves its computing and connecting to."""

    node: Node

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        data = b"".join(buffers)
        connection = self._simulation.connection_of(peer)
        if self.node.alive and connection is not None:
            self._simulation.send(connection, connection.node is self.node, message, data)

    def close(self, peer: Peer, reason: str) -> None:
        self._simulation.closed_by_worker(self.node, peer, reason)

    def compute(self, asked: do.Compute) -> None:
        self._simulation.work(self.node, asked)

    def dial(self, dial: do.Dial) -> None:
        self._simulation.dial(self.node, dial)
