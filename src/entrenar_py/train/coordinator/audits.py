"""Audits: selection of the shards that two workers compute, and comparison of the copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.train.arithmetic.reduction import Node, Vector
from entrenar_py.train.coordinator.recorder import injected
from entrenar_py.train.wire.effects import Conclude
from entrenar_py.train.wire.frames import Buffer

# (block, index in the block) -> (name of a tensor, index in the tensor)
Locate: TypeAlias = Callable[[int, int], tuple[str, int]]


def share_of(plan: TrainingPlan) -> float:
    """Return the fraction of a step's shards that is audited, from 0 to 1; by default 0."""
    share = plan.options.get("audit_share", 0)
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not (math.isfinite(share) and 0 <= share <= 1):
        raise UsageError.of("audit_share", share, "use a number from 0 to 1")
    return float(share)


def shards(plan: TrainingPlan, step: int) -> Collection[int]:
    """Return the audited shards of `step`: at least one, unless the fraction is 0."""
    share = share_of(plan)
    if not share:
        return ()
    count = max(1, round(share * plan.num_shards))
    drawn = plan.rng("audit", step).permutation(plan.num_shards)[:count]
    return sorted(drawn.tolist())


@dataclass
class Copy:
    """One worker's copy of a shard: the recorded events, and the node of each block.

    `nodes` maps each block to its node and to the memory that holds the node's vector.
    """

    rank: int
    events: list[trace.Event]
    nodes: dict[int, tuple[Node, Buffer]] = field(default_factory=dict)

    def equals(self, other: Copy) -> bool:
        """Return whether all blocks, losses and weights have the same bits."""
        if self is other:
            return True
        return self.nodes.keys() == other.nodes.keys() and all(
            _same_bits(node, other.nodes[block][0]) for block, (node, _) in self.nodes.items()
        )

    def difference(self, other: Copy) -> tuple[int, int] | None:
        """Return the block, and the index in it, of the first vector element that differs, or None.

        If no element differs, the losses and weights of the nodes may; `equals` compares these,
        too.
        """
        for block in sorted(self.nodes):
            ours, theirs = (copy.nodes[block][0].vector for copy in (self, other))
            differs = _bits(ours) != _bits(theirs)
            if differs.any():
                return block, int(differs.argmax())
        return None


class Copies:
    """The copies of one step's audited shards; each worker delivers one copy at a time."""

    def __init__(self) -> None:
        self._open: dict[int, Copy] = {}  # by rank
        self._whole: dict[int, list[Copy]] = {}  # by shard, in order of arrival

    def begin(self, rank: int, events: list[trace.Event]) -> None:
        """Begin the copy that `rank` delivers; `events` are the events that `rank` recorded."""
        self._open[rank] = Copy(rank, events)

    def take(self, rank: int, block: int, node: Node, payload: Buffer) -> None:
        """Add `block` to the copy that `rank` delivers; `payload` holds the vector of `node`."""
        self._open[rank].nodes[block] = node, payload

    def end(self, rank: int, shard: int) -> None:
        """Note that the copy of `shard` from `rank` is complete."""
        self._whole.setdefault(shard, []).append(self._open.pop(rank))

    def of(self, shard: int) -> list[Copy]:
        """Return the complete copies of `shard`."""
        return list(self._whole.get(shard, []))

    def conclude(self, effect: Conclude, locate: Locate) -> tuple[Copy | None, list[trace.Event]]:
        """Return the copy that counts, or None, and the events to record of an audit that ends.

        Drops all copies of its shard.
        """
        copies = self._whole.pop(effect.shard, [])
        chosen = None if effect.copy is None else copies[effect.copy]
        wrong = [copy for copy in copies if copy.rank == effect.culprit]
        places = [copy.difference(chosen) for copy in wrong if chosen is not None]
        place = next((locate(*place) for place in places if place is not None), (None, None))
        audit = trace.Audit(
            step=effect.step,
            shard=effect.shard,
            ranks=tuple(copy.rank for copy in copies),
            alike=effect.alike,
            culprit=effect.culprit,
            tensor=place[0],
            element=place[1],
            disputed=effect.disputed,
        )
        recorded = [
            e for copy in copies for e in (copy.events if copy is chosen else injected(copy.events))
        ]
        return chosen, [*recorded, audit]

    def forget(self, rank: int) -> list[trace.Event]:
        """Drop the copies of `rank`, which has left; return the faults injected into them."""
        lost = [self._open.pop(rank)] if rank in self._open else []
        for shard, copies in self._whole.items():
            lost += [one for one in copies if one.rank == rank]
            self._whole[shard] = [one for one in copies if one.rank != rank]
        return [event for one in lost for event in injected(one.events)]

    def clear(self) -> None:
        """Drop all copies: a step begins or restarts."""
        self._open.clear()
        self._whole.clear()


def alike(copies: Sequence[Copy]) -> list[int]:
    """Return for each copy the index of the first copy with the same bits."""
    return [next(n for n, one in enumerate(copies) if one.equals(each)) for each in copies]


def _same_bits(one: Node, other: Node) -> bool:
    ours, theirs = (np.array([node.loss, node.weight]).tobytes() for node in (one, other))
    return ours == theirs and np.array_equal(_bits(one.vector), _bits(other.vector))


def _bits(vector: Vector) -> NDArray[np.uint32]:
    return vector.view(np.uint32)
