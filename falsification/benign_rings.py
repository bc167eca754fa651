"""Correct variants of the ring: no check may report any of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from entrenar_py.shared.mutants import Variant
from entrenar_py.train.wire.attendance import Member as Seen
from entrenar_py.train.wire.effects import Effect, Peer, Send
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.mesh_worker import RingWorker
from entrenar_py.train.wire.messages import Group, TreeNode

from .subjects import MESH_COORDINATOR, RING_WORKER, vectors

_regroup, _send = MeshCoordinator._regroup, RingWorker._send


def backwards(self: MeshCoordinator, members: Mapping[Peer, Seen], now: float) -> list[Effect]:
    """Orders the ring from the highest rank to the lowest."""
    told: list[Effect] = []
    for effect in _regroup(self, members, now):
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Group)
        group = effect.message
        turned = replace(group, ranks=group.ranks[::-1], addresses=group.addresses[::-1])
        told.append(Send(effect.peer, turned))
    return told


def first_block_first(self: RingWorker, nodes: Sequence[TreeNode]) -> list[Effect]:
    """Starts with the first block, not with the last."""
    effects = _send(self, nodes)
    return [*reversed(effects[:-1]), *effects[-1:]]  # the last one has what waits told again


_TRIED = (
    *("F-DP-001", "F-DP-002", "F-DP-005", "F-TI-007"),
    *("F-RED-001", "F-RED-002", "F-RED-003", "F-RED-004"),
)

VARIANTS = (
    Variant(
        name="ring-backwards",
        summary="the ring goes from the highest rank to the lowest",
        plants={f"{MESH_COORDINATOR}._regroup": backwards},
        # Six blocks of one size for three workers, so that each averages as many bytes as before.
        scenario=vectors(width=60, options={"block_bytes": 40}, detail="values"),
        tried=_TRIED,
    ),
    Variant(
        name="ring-first-block-first",
        summary="every worker of a ring begins with the first of its blocks",
        plants={f"{RING_WORKER}._send": first_block_first},
        scenario=vectors(detail="values"),
        tried=_TRIED,
    ),
    Variant(
        name="ring-in-one-block",
        summary="the whole vector goes around at once, and one worker averages it",
        plants={},
        scenario=vectors(options={"block_bytes": 2**20}, detail="values"),
        tried=_TRIED,
    ),
    Variant(
        name="ring-element-by-element",
        summary="every element of the vector goes around separately",
        plants={},
        scenario=vectors(options={"block_bytes": 4}, detail="values"),
        tried=_TRIED,
    ),
)
