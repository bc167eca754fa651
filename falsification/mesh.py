"""Bugs in the exchange of blocks between the workers of a mesh, mostly under faults.

Random schedules of faults (`falsification.schedules`) find every one of them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.arithmetic.blocks import Sums
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.coordinator.topology import TreeExchange
from entrenar_py.train.wire.attendance import Member as Seen
from entrenar_py.train.wire.effects import Effect, Peer, Reduce, Send
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import (
    Average,
    Commit,
    Group,
    Message,
    PeerPhase,
    Stage,
    Staged,
    State,
    TreeNode,
    Unreachable,
    WorkerPhase,
)

from .blocks import SUMS, added_again, all_that_came
from .protocol import any_step
from .subjects import MEMBER, MESH_COORDINATOR, MESH_WORKER, TREE_EXCHANGE, mesh

_replace, _regroup = MeshCoordinator._replace, MeshCoordinator._regroup
_said, _heard = MeshCoordinator.receive, MeshWorker.receive
_exchanged, _start_round = MeshWorker._exchanged, MeshWorker._start_round
_reduce, _payload, _complete = TreeExchange.reduce, Member.payload, Sums.complete

# coordinator -> shard -> rank of a dead worker that had delivered the shard in this step
_gone: WeakKeyDictionary[MeshCoordinator, dict[int, int]] = WeakKeyDictionary()


# --- what is lost with a worker ---------------------------------------------------------------


def delivered_is_done(
    self: MeshCoordinator, lost: Seen, members: Mapping[Peer, Seen], now: float
) -> list[Effect]:
    """Does not compute again the shards that a worker had delivered before it died."""
    _gone[self] = dict.fromkeys(lost.delivered, lost.in_rank())
    lost.delivered = []
    effects = _replace(self, lost, members, now)
    _gone.pop(self)
    return effects


def held_by_the_dead(
    self: MeshCoordinator, members: Mapping[Peer, Seen], now: float
) -> list[Effect]:
    """Names dead workers as the holders of their shards."""
    gone = _gone.get(self, {})
    heir = next(iter(members.values()))
    heir.delivered += gone
    effects: list[Effect] = []
    for effect in _regroup(self, members, now):
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Group)
        holders = enumerate(effect.message.holders)
        named = tuple(gone.get(shard, rank) for shard, rank in holders)
        effects.append(Send(effect.peer, replace(effect.message, holders=named)))
    heir.delivered = [shard for shard in heir.delivered if shard not in gone]
    return effects


def waits_for_the_living(self: MeshWorker) -> list[Effect]:
    """Does not wait for shards whose holder is not in the group."""
    effects = _start_round(self)
    assert self._group is not None
    living = set(self._group.ranks)
    for missing in self._missing.values():
        missing -= {shard for shard, rank in enumerate(self._holders) if rank not in living}
    return effects


def zeros_for_the_rest(self: Sums, block: int) -> None:
    """Adds the shards that came along the tree, with zeros for missing ones."""
    nodes = [node for of_rank in self._open.values() for node in of_rank.get(block, [])]
    under = (reduction.shards_under(one.level, one.index, self._num_shards) for one in nodes)
    there = {shard for shards in under for shard in shards}
    nothing = np.zeros_like(nodes[0].vector)
    for shard in sorted(set(range(self._num_shards)) - there):
        self.take(-1, block, reduction.Node(0, shard, nothing.copy(), 0.0, 0.0))
    _complete(self, block)


def nobody_is_unreachable(
    self: MeshCoordinator, peer: Peer, message: Message, now: float
) -> list[Effect]:
    """Ignores the message that a worker can't reach another."""
    return [] if isinstance(message, Unreachable) else _said(self, peer, message, now)


# --- what is of which round and step ----------------------------------------------------------


def any_round(self: MeshWorker, peer: Peer, rank: int, message: Message) -> list[Effect]:
    """Accepts a node that was sent in an earlier round."""
    group = self._group
    if group is not None and isinstance(message, TreeNode) and message.round < group.round:
        message = replace(message, round=group.round)
    return _exchanged(self, peer, rank, message)


def counted_as_it_comes(self: MeshWorker, rank: int, node: TreeNode) -> list[Effect]:
    """Counts the shards under a node, whichever worker sends them, and even if sent twice."""
    missing = self._missing.get(node.block)
    if missing is None:
        return []
    missing.difference_update(
        reduction.shards_under(node.level, node.index, len(self._holders)),
    )
    if missing:
        return []
    del self._missing[node.block]
    return [Reduce(self.step, node.block)]


def committed_with_the_first(
    self: MeshCoordinator, peer: Peer, message: Message, now: float
) -> list[Effect]:
    """Treats all workers as staged when the first one is, and ignores the others' messages."""
    if isinstance(message, Staged):
        if self.stage is not Stage.COMPUTING or message.round != self._round:
            return []
        for member in self._members().values():
            member.phase = PeerPhase.STAGED
    return _said(self, peer, message, now)


def makes_what_it_has(self: MeshWorker, message: Message, now: float) -> list[Effect]:
    """Makes a step on Commit, even if blocks are missing."""
    if isinstance(message, Commit) and self.phase is WorkerPhase.READY:
        self.phase = WorkerPhase.STAGED
    return _heard(self, message, now)


def too_late(self: MeshWorker, peer: Peer, rank: int, message: Message) -> list[Effect]:
    """Ignores a block that comes after its step was made, instead of dropping the link."""
    late = isinstance(message, Average) and message.step < self.step
    return [] if late else _exchanged(self, peer, rank, message)


# --- what is averaged, and handed on ----------------------------------------------------------


def divided_by_its_own(self: TreeExchange, block: int) -> tuple[float, float] | None:
    """Divides a block by the weight of the shards that its owner computed."""
    reduced = _reduce(self, block)
    own = sum(node.weight for node in self.nodes.values())
    if reduced is not None and own:
        part = self.held.part(block)
        part *= np.float32(reduced[1] / own)
    return reduced


def state_without_moments(self: Member, message: Message) -> Buffer:
    """Hands on the weights without the moments."""
    if not isinstance(message, State):
        return _payload(self, message)
    worker = self.worker
    moments = worker.state
    worker.state = {name: np.zeros_like(vector) for name, vector in moments.items()}
    try:
        return _payload(self, message)
    finally:
        worker.state = moments


def _at(kind: str, place: str, *, rank: int = 1, seconds: float | None = None) -> Fault:
    return Fault(kind=kind, rank=rank, step=1, at=place, seconds=seconds)


# Worker 1 dies when it holds all blocks, so after its delivery.
_DIES = mesh(faults=(_at("kill", "Staged"),))
# Worker 0's nodes of step 1 arrive after worker 1 has left and another round has begun.
_LATE = (_at("kill", "Computed"), _at("delay", "TreeNode", rank=0, seconds=0.5))
_OLD = Fault(kind="lie", step=1, rank=1, at="TreeNode", value="old_step")

VARIANTS = (
    Variant(
        name="shard-lost-with-its-worker",
        summary="the deliveries of a mesh's dead worker are not computed again",
        source="classic (elastic training)",
        plants={
            f"{MESH_COORDINATOR}._replace": delivered_is_done,
            f"{MESH_COORDINATOR}._regroup": held_by_the_dead,
            f"{MESH_WORKER}._start_round": waits_for_the_living,
            f"{SUMS}.complete": zeros_for_the_rest,
        },
        scenario=_DIES,
        invariants=("F-DP-006", "F-WP-005"),
        place={"step": 1},
    ),
    Variant(
        name="unreachable-ignored",
        summary="a worker reports that it can't reach another one, and nothing follows",
        source="classic (partial partition)",
        plants={f"{MESH_COORDINATOR}.receive": nobody_is_unreachable},
        scenario=mesh(faults=(_at("cut", "TreeNode"),)),
        invariants=("F-WP-005",),
        place={"step": 1},
    ),
    Variant(
        name="old-round-counted",
        summary="nodes of a finished round are added to the same nodes of the next round",
        source="classic (at-least-once delivery)",
        plants={
            f"{MESH_WORKER}._exchanged": any_round,
            f"{MESH_WORKER}._count": counted_as_it_comes,
            f"{SUMS}.take": added_again,
        },
        scenario=mesh(
            faults=(_at("kill", "Computed"), _at("delay", "TreeNode", rank=0, seconds=0.5))
        ),
        invariants=("F-WP-005",),
        place={"step": 1, "rank": 0},
    ),
    Variant(
        name="mesh-old-step-counted",
        summary="no worker checks the step of a node",
        source="classic (stale gradient)",
        plants={f"{MESH_WORKER}._require_step": any_step},
        scenario=mesh(faults=(_OLD,)),
        invariants=("F-WP-005",),
        place={"step": 1, "rank": 0},
    ),
    Variant(
        name="committed-with-the-first",
        summary="a step is taken as soon as the first worker holds every block",
        source="classic (two-phase commit)",
        plants={
            f"{MESH_COORDINATOR}.receive": committed_with_the_first,
            f"{MESH_WORKER}.receive": makes_what_it_has,
            f"{MESH_WORKER}._exchanged": too_late,
        },
        scenario=mesh(faults=(_at("delay", "Average", seconds=3.0),)),
        invariants=("F-DP-001", "F-WP-005"),
        place={"step": 1},
    ),
    Variant(
        name="mesh-arrival-order",
        summary="the owner of a block adds its nodes as they arrive",
        source="classic (all-reduce)",
        plants={f"{SUMS}.root": all_that_came},
        scenario=mesh(num_samples=40, batch_size=40, num_shards=8),
        invariants=("F-TI-006", "F-DP-005", "F-RED-002"),
        place={"step": 0},
    ),
    Variant(
        name="divided-by-its-own-weight",
        summary="the owner of a block divides it by the weight of the shards that it computed",
        source="classic (local mean)",
        plants={f"{TREE_EXCHANGE}.reduce": divided_by_its_own},
        scenario=mesh(),
        invariants=("F-DP-005",),
        place={"step": 0},
    ),
    Variant(
        name="moments-not-handed-on",
        summary="the state that a worker gives for a late joiner has no moments",
        source="torch elastic",
        plants={f"{MEMBER}.Member.payload": state_without_moments},
        scenario=mesh(faults=(_at("cut", "Commit"),), optimizer="momentum"),
        invariants=("F-DP-001",),
        place={"step": 1, "rank": 1, "tensor": "momentum"},
    ),
)
