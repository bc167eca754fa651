"""What a coordinator had done, with nothing in it, and what must hold of it whatever happens.

The payload of a tree node is the shards under it, the average's the step and all that was added;
the state is the tuple of averages.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from entrenar_py.protocol import effects as do
from entrenar_py.protocol.coordinator import Coordinator
from entrenar_py.protocol.messages import (
    Applied,
    Assign,
    Average,
    Commit,
    Computed,
    Message,
    TreeNode,
    Welcome,
)
from entrenar_py.protocol.phases import MEMBERS, Stage
from entrenar_py.protocol.terms import Run
from entrenar_py.training import reduction

Payload: TypeAlias = tuple[Any, ...]
_NOTHING = np.zeros(0, np.float32)


def nodes(run: Run, asked: do.Compute) -> list[TreeNode]:
    """The tree nodes of what was asked."""
    leaves = [reduction.Node(0, shard, _NOTHING, 1.0, 1.0) for shard in asked.shards]
    return [
        TreeNode(step=asked.step, level=one.level, index=one.index, loss=one.loss, weight=1.0)
        for one in reduction.fold(leaves, run.num_shards)
    ]


def under(run: Run, node: TreeNode) -> list[int]:
    """The shards under a node."""
    found = reduction.Node(node.level, node.index, _NOTHING, 0.0, 0.0)
    return list(reduction.span(found, run.num_shards))


class Record:
    """What the coordinator of `run` had done. `moves` are those of the run from stage to stage."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state: Payload = tuple((step,) for step in range(run.first_step))
        self.stage = Stage.GATHERING
        self.moves: set[tuple[Stage, Stage]] = set()
        self.staged: set[do.Peer] = set()
        self._pending: dict[int, list[int]] = {}
        self._delivered: list[int] = []
        self._average: Payload = ()

    def enter(self, stage: Stage) -> None:
        """The run is in `stage`."""
        if stage is not self.stage:
            self.moves.add((self.stage, stage))
        self.stage = stage

    def keep(self, rank: int, message: Message) -> None:
        """A delivery is whole, and of just the shards that it names; a step is made once."""
        if isinstance(message, TreeNode):
            self._pending.setdefault(rank, []).extend(under(self.run, message))
        elif isinstance(message, Computed):
            came = self._pending.pop(rank)
            assert sorted(came) == sorted(message.shards), "no more and no less"
            self._delivered += came
        elif isinstance(message, Applied):
            assert message.step == len(self.state) - 1, "it is made here before that is kept"

    def left(self, rank: int) -> None:
        """What had not wholly come is void."""
        self._pending.pop(rank, None)

    def gather(self, step: int) -> None:
        """No step is skipped, and none that was made is made again."""
        self.enter(Stage.GATHERING)
        assert step == len(self.state)
        self._pending.clear()
        self._delivered.clear()

    def reduce(self, step: int) -> None:
        """Every shard is there, delivered once."""
        self.enter(Stage.REDUCING)
        every = list(range(self.run.num_shards))
        assert sorted(self._delivered) == every
        self._average = (step, *every)

    def apply(self, step: int) -> None:
        """A step is made at most once, and only when it was committed."""
        assert (self.stage, step) == (Stage.APPLYING, len(self.state))
        self.state += (self._average,)

    def payload(self, peer: do.Peer, message: Message, machine: Coordinator) -> Payload:
        """What `message` to `peer` carries; nobody is told to make what not all have."""
        match message:
            case Welcome():
                return self.state
            case Assign():
                self.enter(Stage.COMPUTING)
            case Average():
                self.enter(Stage.STAGING)
                self.staged.discard(peer)
                return self._average
            case Commit():
                self.enter(Stage.APPLYING)
                members = {one for one, m in machine.peers.items() if m.phase in MEMBERS}
                assert members <= self.staged, "everyone holds it before anyone makes it"
        return ()
