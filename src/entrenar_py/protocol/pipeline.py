"""The places of workers in a layer pipeline, and the order in which a stage takes shards."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from entrenar_py.training import sharding


@dataclass(frozen=True, slots=True)
class Places:
    """The ranks of each stage, and the blocks of the reduced vector that belong to it.

    `backends` are the kinds of backend that stages need, None for any; empty if all are None.
    """

    ranks: tuple[tuple[int, ...], ...]
    blocks: tuple[range, ...]
    backends: tuple[str | None, ...] = ()

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """The number of places for workers."""
        return sum(map(len, self.ranks))

    def stage_of(self, rank: int) -> int:
        """Return the stage of `rank`."""
        return next(stage for stage, ranks in enumerate(self.ranks) if rank in ranks)

    def stage_with(self, block: int) -> int:
        """Return the stage to which `block` belongs."""
        return next(stage for stage, blocks in enumerate(self.blocks) if block in blocks)

    def unsuited(self, backend: str) -> set[int]:
        """Return the ranks that a worker on `backend`, such as cuda or wgpu:1, can't have."""
        kind = backend.partition(":")[0]
        return {
            rank
            for needed, ranks in zip(self.backends, self.ranks, strict=False)
            if needed not in (None, kind)
            for rank in ranks
        }

    def empty(self, there: Collection[int]) -> list[int]:
        """Return the stages of which none of the ranks `there` is."""
        return [stage for stage, ranks in enumerate(self.ranks) if not set(ranks) & set(there)]

    def holders(self, there: Collection[int], num_shards: int) -> list[int]:
        """Return for each stage, and in it for each shard, the rank of `there` that computes it."""
        holders: list[int] = []
        for ranks in self.ranks:
            present = [rank for rank in ranks if rank in there]
            runs = sharding.runs(range(num_shards), present)
            rank_of = {shard: rank for rank, shards in runs.items() for shard in shards}
            holders += [rank_of[shard] for shard in range(num_shards)]
        return holders


def order(shards: Sequence[int], *, stage: int, num_stages: int) -> list[tuple[int, bool]]:
    """Return the passes of a stage: pairs of a shard and whether its pass is the forward one.

    The schedule is 1F1B: as many forward passes as there are later stages, then one of each kind in
    turns. The last stage makes both passes of a shard at once, in what counts as the forward one.
    Backward passes come in the order of `shards`.
    """
    if stage == num_stages - 1:
        return [(shard, True) for shard in shards]
    ahead = min(num_stages - 1 - stage, len(shards))
    passes = [(shard, True) for shard in shards[:ahead]]
    for shard, next_one in zip(shards, [*shards[ahead:], *[None] * ahead], strict=True):
        if next_one is not None:
            passes.append((next_one, True))
        passes.append((shard, False))
    return passes
