"""The samples of a step, their division into logical shards, and the worker of each shard.

Only `runs` depends on the number of workers. The batch and its shards are functions of the data
set, the epoch's order and the position.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Position:
    """The next sample to be drawn: `offset` into the order of `epoch`."""

    epoch: int = 0
    offset: int = 0


def order(num_samples: int, rng: np.random.Generator) -> Ids:
    """Return a permutation of `num_samples` ids: the order in which an epoch visits the samples."""
    ids: list[int] = rng.permutation(num_samples).tolist()
    return ids


def batch(visit: Ids, position: Position, batch_size: int) -> Ids:
    """Return the next global batch: `batch_size` ids, or fewer at the end of the epoch."""
    return visit[position.offset : position.offset + batch_size]


def advance(position: Position, drawn: int, num_samples: int) -> Position:
    """Return the position after `drawn` more samples; a new epoch starts after the last sample."""
    offset = position.offset + drawn
    return (
        Position(position.epoch + 1, 0)
        if offset >= num_samples
        else Position(position.epoch, offset)
    )


def cut(ids: Ids, num_parts: int) -> list[Ids]:
    """Return `ids` in `num_parts` consecutive parts; sizes differ by at most one, larger first.

    Parts are empty when there are fewer ids than parts.
    """
    size, larger = divmod(len(ids), num_parts)
    ends = [part * size + min(part, larger) for part in range(num_parts + 1)]
    return [ids[start:end] for start, end in pairwise(ends)]


def runs(
    shards: Sequence[int], ranks: Collection[int], counts: Mapping[int, int] | None = None
) -> dict[int, Sequence[int]]:
    """Return the consecutive `shards` that each of `ranks` computes, in rank order.

    With `counts`, each rank gets its count; without, all get the same number.
    """
    if counts is None:
        return dict(zip(sorted(ranks), cut(shards, len(ranks)), strict=True))
    left, shared = iter(shards), dict[int, Sequence[int]]()
    for rank in sorted(ranks):
        shared[rank] = tuple(islice(left, counts[rank]))
    return shared
