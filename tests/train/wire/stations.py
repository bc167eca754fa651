"""The workers of a mesh without bytes, and the wires between them, as plain records.

The payload of a node's block is the shards under it, that of an average its step. A state is the
tuple of the steps that were made.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import Message

Payload: TypeAlias = tuple[int, ...]
Said: TypeAlias = tuple[Message, Payload]
NOTHING: Payload = ()


@dataclass(eq=False)
class Station:
    """A worker: what it holds of the current step, and the steps that it made or was given."""

    machine: MeshWorker
    number: int
    wire: Wire | None = None  # to the coordinator
    state: Payload = NOTHING
    sums: dict[int, list[int]] = field(default_factory=dict)  # own block -> shards that came
    held: set[int] = field(default_factory=set)
    jobs: deque[do.Compute] = field(default_factory=deque)
    postponed: list[tuple[do.Peer, Said]] = field(default_factory=list)
    finished: do.Finish | None = None


@dataclass(eq=False)
class Wire:
    """A connection from `maker` to `to`, None for the coordinator. `queues` holds the messages on
    their way to each end. `dead`: all are lost. `closed`: the ends that have closed it.
    """

    peer: int
    maker: Station
    to: Station | None
    queues: dict[Station | None, deque[Said]]
    dead: bool = False
    closed: set[Station | None] = field(default_factory=set)
