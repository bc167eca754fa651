"""A record of the coordinator's effects, without data, and the invariants that must hold.

The payload of a tree node's block is the list of shards under the node. That of an average is its
step, all that was added, and its block. The state is a tuple with what was added in each step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.messages import (
    MEMBERS,
    Applied,
    Assign,
    Average,
    Commit,
    Computed,
    Message,
    Stage,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.train.wire.terms import Run
from tests.train.wire.copies import Copies

Payload: TypeAlias = tuple[Any, ...]
_NOTHING = np.zeros(0, np.float32)


def nodes(run: Run, asked: do.Compute) -> list[TreeNode]:
    """Return the tree nodes of a computation in all blocks, in the order in which they are sent."""
    leaves = [reduction.Node(0, shard, _NOTHING, 1.0, 1.0) for shard in asked.shards]
    return [
        TreeNode(
            step=asked.step,
            round=0,
            block=block,
            level=one.level,
            index=one.index,
            loss=1.0,
            weight=1.0,
        )
        for block in reversed(range(run.num_blocks))
        for one in reduction.fold(leaves, run.num_shards)
    ]


def under(run: Run, node: TreeNode) -> list[int]:
    """Return the shards under a node."""
    return list(reduction.shards_under(node.level, node.index, run.num_shards))


@dataclass
class Delivery:
    """A delivery in progress: for each block the shards that arrived and count."""

    shards: tuple[int, ...]
    came: dict[int, list[int]] = field(default_factory=dict)


class Record:
    """The effects of the coordinator of `run`. `moves` are the changes of stage so far."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state: Payload = tuple((step,) for step in range(run.first_step))
        self.stage = Stage.GATHERING
        self.moves: set[tuple[Stage, Stage]] = set()
        self.staged: set[do.Peer] = set()
        self.averaged: list[int] = []  # the blocks of the step, in the order they were there
        self.spread: set[int] = set()  # those of them that went out
        self.prepared = False  # the step is made beside the state
        self.copies = Copies()
        self._open: dict[int, list[Delivery]] = {}  # the last of them may be on its way
        self._whole: dict[int, list[int]] = {}  # block -> shards of deliveries that are whole

    def enter(self, stage: Stage) -> None:
        """Record that the run is in `stage`."""
        if stage is not self.stage:
            self.moves.add((self.stage, stage))
        self.stage = stage

    def keep(self, rank: int, message: Message) -> None:
        """A worker makes one delivery at a time, of blocks not averaged; a step is made once."""
        if isinstance(message, Computed):
            deliveries = self._open.setdefault(rank, [])
            assert all(map(self._is_whole, deliveries)), "the one before is whole"
            deliveries.append(Delivery(message.shards))
        elif isinstance(message, TreeNode):
            assert message.block not in self.averaged, "nothing is added to what is averaged"
            came = self._open[rank][-1].came.setdefault(message.block, [])
            came += under(self.run, message)
        elif isinstance(message, Applied):
            assert message.step == len(self.state) - 1, "it is made here before that is kept"

    def deliver(self, rank: int) -> None:
        """A delivery is kept when it is complete and no audit is open."""
        assert self._unaudited() == set()
        for delivery in self._open.pop(rank):
            assert self._is_whole(delivery)
            for block, came in delivery.came.items():
                self._whole.setdefault(block, []).extend(came)

    def _is_whole(self, delivery: Delivery) -> bool:
        """Return whether each block that is not averaged has exactly the shards of the delivery."""
        due = set(range(self.run.num_blocks)) - set(self.averaged)
        of_each = [sorted(came) == sorted(delivery.shards) for came in delivery.came.values()]
        return delivery.came.keys() == due and all(of_each)

    def left(self, rank: int) -> None:
        """A lost worker's incomplete delivery is void."""
        self._open.pop(rank, None)
        self.copies.forget(rank)

    def conclude(self, effect: do.Conclude) -> None:
        """One copy of a shard counts, once."""
        assert effect.shard in self._unaudited()
        assert not self.averaged
        self.copies.conclude(effect)
        for block in range(self.run.num_blocks):
            self._whole.setdefault(block, []).append(effect.shard)

    def _unaudited(self) -> set[int]:
        """Return the shards of the step whose audit is open."""
        return set(self.run.audited(len(self.state))) - self.copies.concluded

    def gather(self, step: int) -> None:
        """No step is skipped, and none that was made is made again."""
        self.enter(Stage.GATHERING)
        assert step == len(self.state)
        self._open.clear()
        self.copies.clear()
        self._whole.clear()
        self.averaged.clear()
        self.spread.clear()
        self.prepared = False

    def reduce(self, step: int, block: int) -> None:
        """A block is averaged once, when every shard of it was delivered exactly once."""
        assert (self.stage, step) == (Stage.COMPUTING, len(self.state))
        assert block not in self.averaged
        assert self._unaudited() == set()
        came = self._whole.pop(block, [])
        for deliveries in self._open.values():
            for delivery in deliveries:
                came += delivery.came.pop(block, [])
        assert sorted(came) == list(range(self.run.num_shards))
        self.averaged.append(block)

    def prepare(self, step: int) -> None:
        """A step is prepared once, with all its blocks, and only if the coordinator updates."""
        assert self.run.server_updates
        assert (self.stage, step) == (Stage.COMPUTING, len(self.state))
        assert sorted(self.averaged) == list(range(self.run.num_blocks))
        assert not self.prepared
        self.prepared = True

    def save(self, step: int, stage: Stage) -> None:
        """The state before `step` is there, and no step is in work, until the save has ended."""
        self.enter(stage)
        assert self.stage in (Stage.GATHERING, Stage.OVER)
        assert step == len(self.state)

    def apply(self, step: int) -> None:
        """A step is made at most once, and only after its commit."""
        assert (self.stage, step) == (Stage.APPLYING, len(self.state))
        assert self.prepared == self.run.server_updates
        self.state += (self._added(step),)

    def payload(self, peer: do.Peer, message: Message, machine: Coordinator) -> Payload:
        """Return the payload of `message` to `peer`; no step is committed before all hold it."""
        match message:
            case Welcome():
                return self.state
            case Assign():
                self.enter(Stage.COMPUTING)
            case Average(step=step, block=block) | Weights(step=step, block=block):
                assert block in self.averaged, "it is there of every shard"
                assert isinstance(message, Weights) == self.prepared == self.run.server_updates
                self.spread.add(block)
                if len(self.spread) == self.run.num_blocks:
                    self.enter(Stage.STAGING)
                self.staged.discard(peer)
                return (*self._added(step), block)
            case Commit():
                self.enter(Stage.APPLYING)
                members = {one for one, m in machine.peers.items() if m.phase in MEMBERS}
                assert members <= self.staged, "everyone holds it before anyone makes it"
        return ()

    def _added(self, step: int) -> Payload:
        return (step, *range(self.run.num_shards))
