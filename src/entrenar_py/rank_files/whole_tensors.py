"""Whole tensors, as one rank sees them, made of the pieces that it and others recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from entrenar_py.rank_files.layout import PARTIAL, Layout
from entrenar_py.rank_files.rank_trace import RankTrace
from entrenar_py.trace import TensorRecord, Tensors, record_tensor

Held = Mapping[int, Tensors]  # rank -> what it recorded of one thing
Ranks = Mapping[int, RankTrace]


def seen_by(rank: int, held: Held, ranks: Ranks, arranged: Layout) -> Tensors:
    """The tensors of the whole model as `rank` has them: what it holds itself, made whole, and
    what only ranks of other stages hold.

    A tensor of which a piece is lacking is left out.
    """
    found: dict[str, TensorRecord] = {}
    beside = (one for one in held if arranged.replica(one) == arranged.replica(rank))
    for holder in (rank, *sorted(set(beside) - {rank})):
        for name, record in renamed(made_whole(holder, held, ranks), arranged).items():
            found.setdefault(name, record)
    return found


def gradient(group: Sequence[int], held: Held, ranks: Ranks, arranged: Layout) -> Tensors:
    """The gradient of one micro-batch, to which each of `group` has come: of copies on ranks of
    one stage the first one's, of those on several stages the sum, as they are terms of one.

    Empty where ranks compute on parts of samples: what is a term there can't be told from a copy.
    """
    if arranged.has(PARTIAL):
        return {}
    stages: dict[int, dict[str, TensorRecord]] = {}
    for rank in group:
        stage = stages.setdefault(arranged.coordinates(rank).get("pp", 0), {})
        for name, record in made_whole(rank, held, ranks).items():
            stage.setdefault(name, record)
    return total(renamed(stage, arranged) for stage in stages.values())


def made_whole(rank: int, held: Held, ranks: Ranks) -> dict[str, TensorRecord]:
    """What `rank` holds, each tensor whole; without those of which a piece is lacking."""
    found = {name: _whole(name, rank, held, ranks) for name in held.get(rank, {})}
    return {name: record for name, record in found.items() if record is not None}


def renamed(tensors: Tensors, arranged: Layout) -> dict[str, TensorRecord]:
    """`tensors` with tied ones under the first name of their tie, unless that is there, too."""
    return {
        name if arranged.first_name(name) in tensors else arranged.first_name(name): record
        for name, record in tensors.items()
    }


def total(terms: Iterable[Tensors]) -> dict[str, TensorRecord]:
    """The sum, by name; without those whose values are unknown, or of other sizes."""
    gathered: dict[str, list[TensorRecord]] = {}
    for tensors in terms:
        for name, record in tensors.items():
            gathered.setdefault(name, []).append(record)
    sums = {name: _sum(records) for name, records in gathered.items()}
    return {name: record for name, record in sums.items() if record is not None}


def norm(tensors: Tensors) -> float | None:
    """The L2 norm of all of them together; None where values are unknown."""
    values = [one.values() for one in tensors.values()]
    squares = [float(np.square(v, dtype=np.float64).sum()) for v in values if v is not None]
    return math.sqrt(math.fsum(squares)) if len(squares) == len(values) else None


def _sum(records: Sequence[TensorRecord]) -> TensorRecord | None:
    if len(records) == 1:
        return records[0]
    values = [one.values() for one in records]
    known = [one for one in values if one is not None]
    if len(known) < len(values) or len({(one.size, one.dtype) for one in known}) > 1:
        return None
    return record_tensor(np.sum(known, axis=0, dtype=known[0].dtype), values=True)


def _whole(name: str, rank: int, held: Held, ranks: Ranks) -> TensorRecord | None:
    """A tensor of which `rank` holds all, or a piece; None where another piece is lacking."""
    piece = ranks[rank].pieces.get(name)
    if piece is None:
        return held[rank][name]
    parts = []
    for holder in piece.ranks:
        record = held.get(holder, {}).get(name)
        part = ranks[holder].pieces.get(name) if holder in ranks else None
        values = None if record is None else record.values()
        if part is None or values is None or values.size != math.prod(part.shape):
            return None
        if part.whole != piece.whole:
            return None
        parts.append((part.place, values.reshape(part.shape)))
    if sum(values.size for _, values in parts) < math.prod(piece.whole):
        return None  # before there is room for it: a file may say any size
    own = held[rank][name].values()
    whole = np.zeros(piece.whole, np.float32 if own is None else own.dtype)
    known = np.zeros(piece.whole, bool)
    for place, values in parts:
        whole[place] = values
        known[place] = True
    return record_tensor(whole, values=True) if known.all() else None
