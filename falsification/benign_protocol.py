"""Correct variants of the parameter server: no check may report any of these."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.arithmetic import reduction, sharding
from entrenar_py.train.arithmetic.blocks import Sums
from entrenar_py.train.wire.attendance import Member as Seen
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Effect, Keep, Peer
from entrenar_py.train.wire.messages import Stage, TreeNode
from entrenar_py.train.wire.worker import Worker

from .subjects import COORDINATOR, TRAINING, WORKER, star

_deliver, _tick = Sums.deliver, Worker.tick
_members, _assign, _count = Coordinator._members, Coordinator._assign, Coordinator._count


def always_alive(self: Worker, now: float) -> list[Effect]:
    """Sends a heartbeat whenever the worker looks at the clock."""
    self._said = -math.inf
    return _tick(self, now)


def from_the_last(
    shards: Sequence[int], ranks: Collection[int], counts: Mapping[int, int] | None = None
) -> dict[int, Sequence[int]]:
    """Assigns the first shards to the last rank."""
    parts = sharding.cut(shards, len(ranks))
    return dict(zip(sorted(ranks, reverse=True), parts, strict=True))


def folded_on_delivery(self: Sums, rank: int) -> None:
    """Adds nodes as soon as a delivery is complete."""
    _deliver(self, rank)
    self._whole = {
        block: reduction.fold(nodes, self._num_shards) for block, nodes in self._whole.items()
    }


def kept_though_averaged(
    self: Coordinator, member: Seen, node: TreeNode, under: range
) -> list[Effect]:
    """Keeps a block that is sent again after its average, and does not use it."""
    return _count(self, member, node, under) or [Keep(member.in_rank(), node)]


def last_first(self: Coordinator) -> dict[Peer, Seen]:
    """Lists the members in reversed order, so that messages go to the latest one first."""
    return dict(reversed(_members(self).items()))


def orphans_to_one(
    self: Coordinator,
    shards: Sequence[int],
    members: Mapping[Peer, Seen],
    now: float,
    counts: Mapping[int, int] | None = None,
) -> list[Effect]:
    """Assigns all shards of a dead worker to the lowest rank."""
    if self.stage is Stage.COMPUTING and len(shards) < self.run.num_shards:
        lowest = min(members, key=lambda peer: members[peer].in_rank())
        members = {lowest: members[lowest]}
    return _assign(self, shards, members, now, counts)


_LEAVING = star(faults=(Fault(kind="leave", rank=1, step=1),), optimizer="momentum")
_BACK = star(faults=(Fault(kind="cut", rank=1, step=1, at="Computed"),), num_steps=5)
_TRIED = ("F-DP-001", "F-DP-002", "F-DP-005", "F-DP-006", "F-TI-006", "F-TI-007", "F-WP-005")

VARIANTS = (
    Variant(
        name="heartbeat-at-every-tick",
        summary="workers send heartbeats ten times as often as required",
        plants={f"{WORKER}.Worker.tick": always_alive},
        scenario=_BACK.with_(
            faults=(Fault(kind="half_open", rank=1, step=1, at="Average"),), dropout=0.2
        ),
        tried=_TRIED,
    ),
    Variant(
        name="assigned-from-the-last",
        summary="the last rank gets the first shards",
        plants={f"{TRAINING}.sharding.runs": from_the_last},
        scenario=_BACK,
        tried=_TRIED,
    ),
    Variant(
        name="folded-on-delivery",
        summary="the server adds each delivery as soon as it is complete",
        plants={f"{TRAINING}.blocks.Sums.deliver": folded_on_delivery},
        scenario=_LEAVING.with_(options={"block_bytes": 1000}),
        tried=_TRIED,
    ),
    Variant(
        name="kept-though-averaged",
        summary="the server keeps blocks that arrive after they were averaged, until the end",
        plants={f"{COORDINATOR}.Coordinator._count": kept_though_averaged},
        scenario=_BACK.with_(
            faults=(Fault(kind="half_open", rank=1, step=1, at="Average"),),
            options={"block_bytes": 40},
        ),
        tried=_TRIED,
    ),
    Variant(
        name="told-from-the-last",
        summary="the worker that joined last gets every message first",
        plants={f"{COORDINATOR}.Coordinator._members": last_first},
        scenario=_BACK.with_(optimizer="adamw", learning_rate=0.01),
        tried=_TRIED,
    ),
    Variant(
        name="orphans-to-one",
        summary="a dead worker's shards all go to one worker",
        plants={f"{COORDINATOR}.Coordinator._assign": orphans_to_one},
        scenario=_LEAVING.with_(world_size=4),
        tried=_TRIED,
    ),
)
