"""How much of a model each rank holds, counted from the pieces that it recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from entrenar_py.rank_files.rank_trace import RankTrace
from entrenar_py.trace import Held, Start


def holdings(ranks: Sequence[RankTrace]) -> list[Held]:
    """Of each rank of a layout that spreads parameters, what it starts with; of values that were
    not recorded nothing is known.
    """
    found = []
    for one in ranks:
        start = next((event for event in one.events if isinstance(event, Start)), None)
        if one.layout is None or one.layout.num_parts < 2 or start is None:
            continue
        values = {name: record.values() for name, record in start.weights.items()}
        held = {name: value for name, value in values.items() if value is not None}
        if len(held) < len(values):
            continue
        wholes = (
            math.prod(one.pieces[name].whole) if name in one.pieces else value.size
            for name, value in held.items()
        )
        sizes = (value.itemsize for value in held.values())
        found.append(
            Held(
                rank=one.rank,
                num_parts=one.layout.num_parts,
                held_bytes=sum(value.nbytes for value in held.values()),
                whole_bytes=sum(n * size for n, size in zip(wholes, sizes, strict=True)),
            )
        )
    return found
