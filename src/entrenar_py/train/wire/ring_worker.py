"""A worker of a ring: each block is summed on its way around, then its average goes around.

This is the classic ring all-reduce, coordinated as in a mesh. Each worker sends 2 (N - 1) / N of
the vector to the next one. Sums are added in ring order, so every worker and every run gets the
same bits. A different number of workers rounds differently.
"""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.mesh_worker import Exchanged, MeshWorker
from entrenar_py.train.wire.messages import Average, Message, Partial, TreeNode


class RingWorker(MeshWorker):
    """The state machine. The next worker is the next rank of the group, cyclically."""

    parts: tuple[type[Message], ...] = (Partial, Average)
    _is_computed = False  # whether all of this worker's shards are
    _combined: frozenset[int] = frozenset()  # blocks to which this worker added its part

    def combined(self, step: int, block: int, loss: float, weight: float) -> list[Effect]:
        """Average the sum of `block` if this worker owns it, else send the sum to the next one."""
        assert self._group is not None
        if self._owner(block) == self.rank:
            return [do.Reduce(step, block)]
        hops = self._hops(block)
        partial = Partial(
            step=step, round=self._group.round, block=block, hops=hops, loss=loss, weight=weight
        )
        return self.links.say(self._neighbour(1), partial)

    def _start_round(self) -> list[Effect]:
        self._is_computed, self._combined = False, frozenset()
        return super()._start_round()

    def _send(self, nodes: Sequence[TreeNode]) -> list[Effect]:
        """Start the blocks that begin here, once every shard of this worker is computed."""
        under = [
            reduction.shards_under(node.level, node.index, len(self._holders)) for node in self._own
        ]
        computed = {shard for shards in under for shard in shards}
        mine = {shard for shard, rank in enumerate(self._holders) if rank == self.rank}
        if self._is_computed or computed != mine:
            return []
        self._is_computed = True
        first = [block for block in reversed(range(self._num_blocks)) if not self._hops(block)]
        return [*(effect for block in first for effect in self._combine(block)), do.Again()]

    def _part(self, peer: Peer, rank: int, message: Exchanged) -> list[Effect]:
        if rank != self._neighbour(-1):
            raise ProtocolError(
                f"{type(message).__name__} of rank {rank}: not the predecessor in the ring"
            )
        block = message.block
        if isinstance(message, Average):
            if block in self._held or self._owner(block) == self.rank:
                raise ProtocolError(f"Average block={block}: it came before")
            return [do.Hold(self.step, block), *self._spread(message), *self._has(block)]
        assert isinstance(message, Partial)
        if not self._is_computed:
            return self._postpone(peer)
        if message.hops + 1 != self._hops(block) or block in self._combined:
            raise ProtocolError(f"Partial block={block} hops={message.hops}: not due here")
        return self._combine(block)

    def _combine(self, block: int) -> list[Effect]:
        self._combined |= {block}
        return [do.Combine(self.step, block)]

    def _spread(self, average: Average) -> list[Effect]:
        following = self._neighbour(1)
        return [] if following == self._owner(average.block) else self.links.say(following, average)

    def _hops(self, block: int) -> int:
        """Return how many workers add to `block` before this one; its owner adds last."""
        assert self._group is not None
        ranks = self._group.ranks
        return (self._place() - block - 1) % len(ranks)

    def _neighbour(self, places: int) -> int:
        """Return the rank `places` further on in the ring."""
        assert self._group is not None
        ranks = self._group.ranks
        return ranks[(self._place() + places) % len(ranks)]

    def _place(self) -> int:
        assert self._group is not None
        assert self.rank is not None
        return self._group.ranks.index(self.rank)
