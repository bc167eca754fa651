"""How much of a model each rank holds, counted from the pieces that it recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from entrenar_py.rank_files.rank_trace import RankTrace
from entrenar_py.trace import Held, Start


def holdings(ranks: Sequence[RankTrace]) -> list[Held]:
    """Return how many bytes of parameters each rank starts with.

    Ranks whose layout doesn't spread parameters, or that recorded no values, are left out.
    """
    found = []
    for rank in ranks:
        start = next((event for event in rank.events if isinstance(event, Start)), None)
        if rank.layout is None or rank.layout.num_parts < 2 or start is None:
            continue
        recorded = {name: record.values() for name, record in start.weights.items()}
        held = {name: values for name, values in recorded.items() if values is not None}
        if len(held) < len(recorded):
            continue
        whole_sizes = {
            name: math.prod(rank.pieces[name].whole) if name in rank.pieces else values.size
            for name, values in held.items()
        }
        found.append(
            Held(
                rank=rank.rank,
                num_parts=rank.layout.num_parts,
                held_bytes=sum(values.nbytes for values in held.values()),
                whole_bytes=sum(whole_sizes[name] * held[name].itemsize for name in held),
            )
        )
    return found
