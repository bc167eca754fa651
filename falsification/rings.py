"""Bugs in the reduction of a vector in a ring or a mesh: in its sums, its results, its messages."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.arithmetic import blocks, reduction
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.topology import RingExchange
from entrenar_py.train.wire.attendance import Member as Seen
from entrenar_py.train.wire.effects import Effect, Peer, Send
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.mesh_worker import Exchanged, MeshWorker, RingWorker
from entrenar_py.train.wire.messages import Average, Group, Hello, Message, Partial, TreeNode
from entrenar_py.train.wire_io.link import Link

from .subjects import (
    MEMBER,
    MESH_COORDINATOR,
    MESH_WORKER,
    RING_EXCHANGE,
    RING_WORKER,
    mesh,
    vectors,
)

_reduce, _combine, _make_held = RingExchange.reduce, RingExchange.combine, Member.make_held
_exchanged, _part, _send = RingWorker._exchanged, RingWorker._part, MeshWorker._send
_deliver, _mesh_part, _read = MeshWorker._deliver, MeshWorker._part, Link._read
_said, _regroup = MeshCoordinator.receive, MeshCoordinator._regroup

_RANKS = vectors().world_size

_arrived: WeakKeyDictionary[MeshCoordinator, list[Peer]] = WeakKeyDictionary()
_links: WeakSet[Link] = WeakSet()  # of this process


# --- what is added, and by what it is divided -------------------------------------------------


def divided_by_ranks(self: RingExchange, block: int) -> tuple[float, float] | None:
    """Divides the sum by the number of workers."""
    reduced = _reduce(self, block)
    if reduced is not None:
        part = self.held.part(block)
        part *= np.float32(reduced[1] / _RANKS)
    return reduced


def last_element_not_added(
    self: RingExchange, block: int, message: Partial | None, payload: Buffer
) -> tuple[float, float]:
    """Adds only as many elements of a block as the shortest block has."""
    came = None if message is None else blocks.vector_of(payload).copy()
    combined = _combine(self, block, message, payload)
    size = self.held.vector.size // self.held.blocks.count
    if came is not None:
        self.passing[block].vector[size:] = came[size:]
    return combined


def first_node_alone(self: RingExchange, block: int) -> reduction.Vector:
    """Takes a worker's first tree node for its whole sum."""
    first = min(self.nodes, key=lambda place: place[1] << place[0])
    return self.nodes[first].vector[self.held.blocks.part(block)]


def any_round(self: RingWorker, peer: Peer, rank: int, message: Message) -> list[Effect]:
    """Accepts a sum that was sent in an earlier round."""
    group = self._group
    if group is not None and isinstance(message, Partial) and message.round < group.round:
        message = replace(message, round=group.round)
    return _exchanged(self, peer, rank, message)


def first_one_added(self: RingWorker, peer: Peer, rank: int, message: Exchanged) -> list[Effect]:
    """Ignores a sum of a block if it has added to that block before."""
    if isinstance(message, Partial) and message.block in self._combined:
        return []
    return _part(self, peer, rank, message)


# --- whose bits are held ----------------------------------------------------------------------


def keeps_its_partial(self: Member, step: int) -> None:
    """Makes worker 1's step with its partial sum of the first block."""
    if self.rank == 1:
        assert isinstance(self.exchange, RingExchange)
        blocks.average(self.exchange.passing[0], self.replicas.scale, out=self.held.part(0))
    _make_held(self, step)


def notes_who_comes(
    self: MeshCoordinator, peer: Peer, message: Message, now: float
) -> list[Effect]:
    """Remembers the order of the workers' hellos, for `in_order_of_arrival`."""
    if isinstance(message, Hello):
        _arrived.setdefault(self, []).append(peer)
    return _said(self, peer, message, now)


def in_order_of_arrival(
    self: MeshCoordinator, members: dict[Peer, Seen], now: float
) -> list[Effect]:
    """Orders the ring by the workers' arrival."""
    told: list[Effect] = []
    for effect in _regroup(self, members, now):
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Group)
        came = [members[peer] for peer in _arrived[self] if peer in members]
        addresses = {one.in_rank(): one.address for one in came}
        order = tuple(addresses)
        group = replace(effect.message, ranks=order, addresses=tuple(addresses.values()))
        told.append(Send(effect.peer, group))
    return told


# --- what is sent, and read -------------------------------------------------------------------


def sent_to_all(self: MeshWorker, nodes: list[TreeNode]) -> list[Effect]:
    """Sends every block of a worker's nodes to all workers."""
    assert self._group is not None
    effects = _send(self, nodes)
    for node in nodes:
        said = replace(node, round=self._group.round)
        for rank in self._group.ranks:
            if rank not in (self.rank, self._owner(node.block)):
                effects += self.links.say(rank, said)
    return effects


def not_its_own(self: MeshWorker, peer: Peer, rank: int, message: Exchanged) -> list[Effect]:
    """Ignores nodes of blocks that another worker averages."""
    mine = self._owner(message.block) == self.rank
    if isinstance(message, TreeNode) and not mine:
        return []
    return _mesh_part(self, peer, rank, message)


def told_to_the_coordinator(self: MeshWorker, nodes: list[TreeNode]) -> list[Effect]:
    """Sends all of a worker's nodes to the coordinator, too, before the other workers."""
    told: list[Effect] = [Send(self._peer, node) for node in nodes]
    return [*told, *_deliver(self, nodes)]


def not_asked_for(self: MeshCoordinator, peer: Peer, message: Message, now: float) -> list[Effect]:
    """Ignores nodes at the coordinator, instead of refusing them."""
    return [] if isinstance(message, TreeNode) else _said(self, peer, message, now)


def once_more(self: RingWorker, average: Average) -> list[Effect]:
    """Sends the average on to the next worker, even if it comes from there."""
    return self.links.say(self._neighbour(1), average)


def nothing_new(self: RingWorker, peer: Peer, rank: int, message: Exchanged) -> list[Effect]:
    """Ignores an average that this worker has made itself."""
    mine = self._owner(message.block) == self.rank
    if isinstance(message, Average) and mine:
        return []
    return _part(self, peer, rank, message)


def all_written_first(self: Link) -> None:
    """Reads from no connection while any connection has data to write."""
    _links.add(self)
    if not any(link._queue or link._pieces for link in _links):
        _read(self)


def _at(kind: str, place: str, *, rank: int, seconds: float | None = None) -> Fault:
    return Fault(kind=kind, rank=rank, step=1, at=place, seconds=seconds)


_MESH = mesh(workload="vectors", width=51, options={"block_bytes": 44}, num_steps=2)
# Worker 2's sums of step 1 arrive after worker 1 has left and another round has begun.
_LATE = (_at("kill", "Computed", rank=1), _at("delay", "Partial", rank=2, seconds=0.5))

VARIANTS = (
    Variant(
        name="ring-divides-by-ranks",
        summary="the owner of a block divides it by the number of workers",
        source="classic (mean of sums)",
        plants={f"{RING_EXCHANGE}.reduce": divided_by_ranks},
        scenario=vectors(),
        invariants=("F-RED-001",),
        place={"step": 0, "tensor": "vector"},
    ),
    Variant(
        name="ring-last-element-not-added",
        summary="only as many elements of each block are added as the shortest block has",
        source="classic (chunk = length / N)",
        plants={f"{RING_EXCHANGE}.combine": last_element_not_added},
        scenario=vectors(),
        invariants=("F-RED-001",),
        place={"step": 0, "tensor": "vector", "element": 50},
    ),
    Variant(
        name="ring-first-node-alone",
        summary="a worker adds the first of its tree nodes, and not the others",
        source="classic (accumulation without the rest)",
        plants={f"{RING_EXCHANGE}._own": first_node_alone},
        scenario=vectors(world_size=2),
        invariants=("F-RED-001",),
        place={"step": 0, "tensor": "vector"},
    ),
    Variant(
        name="ring-old-round-added",
        summary="a sum sent in an earlier round is passed on in the next",
        source="classic (stale message)",
        plants={
            f"{RING_WORKER}._exchanged": any_round,
            f"{RING_WORKER}._part": first_one_added,
        },
        scenario=vectors(faults=_LATE),
        invariants=("F-RED-001",),
        place={"step": 1, "tensor": "vector"},
    ),
    Variant(
        name="ring-keeps-its-partial",
        summary="a worker keeps its own sum of a block instead of the average that arrives",
        source="classic (all-gather into the wrong buffer)",
        plants={f"{MEMBER}.Member.make_held": keeps_its_partial},
        scenario=vectors(),
        invariants=("F-RED-001", "F-RED-002"),
        place={"step": 0, "rank": 1, "tensor": "vector"},
    ),
    Variant(
        name="ring-in-order-of-arrival",
        summary="a ring is formed in the order in which the workers joined",
        source="classic (rank by arrival)",
        plants={
            f"{MESH_COORDINATOR}.receive": notes_who_comes,
            f"{MESH_COORDINATOR}._regroup": in_order_of_arrival,
        },
        scenario=vectors(world_size=5),
        invariants=("F-RED-002",),
        place={"step": 0, "tensor": "vector"},
    ),
    Variant(
        name="mesh-sends-to-all",
        summary="a worker sends every block to all workers, not only to the one that averages it",
        source="classic (broadcast instead of reduce-scatter)",
        plants={f"{MESH_WORKER}._send": sent_to_all, f"{MESH_WORKER}._part": not_its_own},
        scenario=_MESH,
        invariants=("F-RED-003",),
        place={"rank": 0},
    ),
    Variant(
        name="ring-once-more-around",
        summary="the average of a block is passed on until it is back at its owner",
        source="classic (off by one in 2 (N - 1))",
        plants={f"{RING_WORKER}._spread": once_more, f"{RING_WORKER}._part": nothing_new},
        scenario=vectors(),
        invariants=("F-RED-003",),
        place={"rank": 0},
    ),
    Variant(
        name="mesh-over-the-coordinator",
        summary="a worker also sends every node that it computed to the coordinator",
        source="classic (gathering on rank 0)",
        plants={
            f"{MESH_WORKER}._deliver": told_to_the_coordinator,
            f"{MESH_COORDINATOR}.receive": not_asked_for,
        },
        scenario=_MESH,
        invariants=("F-RED-003",),
        # Three workers with 51 elements in two steps each.
        place={"expected": "0", "got": "1224"},
    ),
    Variant(
        name="ring-writes-before-it-reads",
        summary="a worker reads nothing before it has written all its messages",
        source="classic (blocking send around a ring)",
        plants={"entrenar_py.train.wire_io.link.Link._read": all_written_first},
        scenario=vectors(
            system="ring",
            width=3 * 2**17,
            options={"block_bytes": 2**19, "socket_bytes": 4_096, "deadline_s": 3.0},
        ),
        invariants=("F-RED-004",),
        place={"expected": "completed", "got": "failed"},
    ),
)
