"""Correct variants of the mesh: no check may report any of these."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import TreeNode

from .subjects import MESH_WORKER, mesh

_send = MeshWorker._send


def from_the_last(self: MeshWorker, block: int) -> int:
    """Assigns blocks to ranks from the last rank down."""
    assert self._group is not None
    ranks = self._group.ranks
    return ranks[-1 - block % len(ranks)]


def first_block_first(self: MeshWorker, nodes: Sequence[TreeNode]) -> list[Effect]:
    """Sends the nodes of the first block first, not those of the last block."""
    return _send(self, nodes[::-1])


_BACK = mesh(faults=(Fault(kind="cut", rank=1, step=1, at="TreeNode"),), num_steps=5)
_TRIED = ("F-DP-001", "F-DP-002", "F-DP-005", "F-DP-006", "F-TI-006", "F-TI-007", "F-WP-005")

VARIANTS = (
    Variant(
        name="owned-from-the-last",
        summary="the blocks of a mesh are assigned to its workers from the last worker on",
        plants={f"{MESH_WORKER}._owner": from_the_last},
        scenario=_BACK.with_(faults=(Fault(kind="leave", rank=1, step=1),), optimizer="momentum"),
        tried=_TRIED,
    ),
    Variant(
        name="first-block-first",
        summary="the nodes of the first block go to their owner first",
        plants={f"{MESH_WORKER}._send": first_block_first},
        scenario=_BACK.with_(optimizer="adamw", learning_rate=0.01),
        # No worker leaves when a link breaks, so that there is no recovery to judge.
        tried=tuple(one for one in _TRIED if one != "F-DP-006"),
    ),
)
