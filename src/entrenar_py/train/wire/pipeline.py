"""The places of workers in a layer pipeline, and the order in which a stage processes shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import sharding


@dataclass(frozen=True, slots=True)
class Places:
    """The ranks of each stage, and the blocks of the reduced vector that belong to it.

    `backends` has the kind of backend that each stage needs, None for any; it is empty if all are
    None. `names` has the name of the worker that each rank is reserved for, "" for any worker; it
    is empty if all are "".
    """

    ranks: tuple[tuple[int, ...], ...]
    blocks: tuple[range, ...]
    backends: tuple[str | None, ...] = ()
    names: tuple[str, ...] = ()

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

    def called(self, rank: int) -> str:
        """Return the name of the worker that `rank` is reserved for.

        The name is "" if any worker may have the rank.
        """
        return self.names[rank] if self.names else ""

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
        """Return the stages that have none of the ranks in `there`."""
        return [stage for stage, ranks in enumerate(self.ranks) if not set(ranks) & set(there)]

    def holders(self, there: Collection[int], num_shards: int) -> list[int]:
        """Return the rank that computes each shard, first for stage 0, then for stage 1 and so on.

        Only ranks in `there` get shards.
        """
        holders: list[int] = []
        for ranks in self.ranks:
            present = [rank for rank in ranks if rank in there]
            runs = sharding.runs(range(num_shards), present)
            rank_of = {shard: rank for rank, shards in runs.items() for shard in shards}
            holders += [rank_of[shard] for shard in range(num_shards)]
        return holders


class Timed(NamedTuple):
    """The times of one pass of a stage, in microseconds since the stage received the Assign."""

    shard: int
    is_forward: bool
    began: int
    ended: int


def encode(passes: Iterable[Timed]) -> tuple[int, ...]:
    """Return `passes` in the format of `Summed.times_us`."""
    return tuple(
        number
        for one in passes
        for number in (2 * one.shard + one.is_forward, one.began, one.ended)
    )


def decode(times_us: Sequence[int]) -> list[Timed]:
    """Return the passes that `encode` encoded. Raises ProtocolError for anything else."""
    triples = list(zip(*[iter(times_us)] * 3, strict=False))
    if len(times_us) % 3 or any(ended < began for _, began, ended in triples):
        raise ProtocolError(
            "Summed times_us: use three numbers a pass; no pass ends before it began"
        )
    return [Timed(code // 2, bool(code % 2), began, ended) for code, began, ended in triples]


def idle_share(passes: Mapping[int, Sequence[Timed]]) -> float | None:
    """Return the fraction of time in which stages waited, from the first pass to the last.

    `passes` has the passes of each rank in one step. The result is None without passes. Each rank's
    clock starts when the rank receives the Assign, so the time that this message takes is not
    included.
    """
    every = [timed for of_rank in passes.values() for timed in of_rank]
    window = max((timed.ended for timed in every), default=0) - min(
        (timed.began for timed in every), default=0
    )
    if window <= 0:
        return None
    busy = sum(timed.ended - timed.began for timed in every)
    return 1 - busy / (len(passes) * window)


def order(shards: Sequence[int], *, stage: int, num_stages: int) -> list[tuple[int, bool]]:
    """Return the passes of a stage in order: the shard, and True for a forward pass.

    The schedule is 1F1B. A stage begins with one forward pass for each later stage and one more, so
    that it doesn't wait for the network. Then backward and forward passes alternate. The last stage
    runs both passes of a shard at once, as a single forward pass. Backward passes are in the order
    of `shards`.
    """
    if stage == num_stages - 1:
        return [(shard, True) for shard in shards]
    ahead = min(num_stages - stage, len(shards))
    passes = [(shard, True) for shard in shards[:ahead]]
    for shard, next_one in zip(shards, [*shards[ahead:], *[None] * ahead], strict=True):
        if next_one is not None:
            passes.append((next_one, True))
        passes.append((shard, False))
    return passes
