"""Whole tensors, as one rank sees them, made of the pieces that it and other ranks recorded."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import numpy as np
from blake3 import blake3

from entrenar_py.check.rank_files.layout import PARTIAL, Layout, Piece
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import TensorRecord, Tensors, record_sketch, record_tensor

Held = Mapping[int, Tensors]  # rank -> its records of one kind: weights, say, after one step
Ranks = Mapping[int, RankTrace]


def seen_by(rank: int, held: Held, ranks: Ranks, layout: Layout) -> Tensors:
    """Return the tensors of the whole model as `rank` has them.

    These are the rank's own tensors, made whole, and tensors that only ranks of other stages hold.
    A tensor with a missing piece is left out.
    """
    tensors: dict[str, TensorRecord] = {}
    replica = layout.replica(rank)
    others = sorted(other for other in held if other != rank and layout.replica(other) == replica)
    for holder in (rank, *others):
        for name, record in renamed(made_whole(holder, held, ranks), layout).items():
            tensors.setdefault(name, record)
    for name, record in renamed(_of_empty_pieces(rank, held, ranks), layout).items():
        tensors.setdefault(name, record)
    return tensors


def _of_empty_pieces(rank: int, held: Held, ranks: Ranks) -> dict[str, TensorRecord]:
    """Return what `rank` lacks, since other ranks hold all elements of the parameter.

    Such a parameter has no gradient and no optimizer state there.
    """
    pieces = ranks[rank].pieces if rank in ranks else {}
    empty = {name: piece.ranks for name, piece in pieces.items() if 0 in piece.shape}
    others: dict[str, TensorRecord] = {}
    for holder in sorted({holder for holders in empty.values() for holder in holders}):
        for name in held.get(holder, {}):
            if name in held[rank] or name.partition("/")[0] not in empty:
                continue
            if (record := _whole(name, holder, held, ranks)) is not None:
                others.setdefault(name, record)
    return others


def gradient(group: Sequence[int], held: Held, ranks: Ranks, layout: Layout) -> Tensors:
    """Return the gradient of one micro-batch that the ranks of `group` computed together.

    Ranks of one stage hold copies of it, of which the first is taken. Ranks of several stages hold
    terms, which are added, or copies again. If ranks compute on parts of samples, the result is
    empty: a term can't be told from a copy.
    """
    if layout.has(PARTIAL):
        return {}
    stages: dict[int, dict[str, TensorRecord]] = {}
    for rank in group:
        stage = stages.setdefault(layout.coordinates(rank).get("pp", 0), {})
        for name, record in made_whole(rank, held, ranks).items():
            stage.setdefault(name, record)
    terms = _gathered(renamed(stage, layout) for stage in stages.values())
    sums = {
        name: records[0] if len({record.digest for record in records}) == 1 else _sum(records)
        for name, records in terms.items()
    }
    return {name: record for name, record in sums.items() if record is not None}


def made_whole(rank: int, held: Held, ranks: Ranks) -> dict[str, TensorRecord]:
    """Return the tensors of `rank`, each made whole, without those with a missing piece."""
    tensors = {name: _whole(name, rank, held, ranks) for name in held.get(rank, {})}
    return {name: record for name, record in tensors.items() if record is not None}


def renamed(tensors: Tensors, layout: Layout) -> dict[str, TensorRecord]:
    """Return `tensors` with tied ones under the first name of their tie.

    If several tensors of a tie are there, the others keep their own names.
    """
    named: dict[str, TensorRecord] = {}
    for name, record in tensors.items():
        first = layout.first_name(name)
        named[name if first in tensors or first in named else first] = record
    return named


def total(terms: Iterable[Tensors]) -> dict[str, TensorRecord]:
    """Return the sums by name, without tensors whose values are unknown or differ in size."""
    sums = {name: _sum(records) for name, records in _gathered(terms).items()}
    return {name: record for name, record in sums.items() if record is not None}


def _gathered(terms: Iterable[Tensors]) -> dict[str, list[TensorRecord]]:
    gathered: dict[str, list[TensorRecord]] = {}
    for tensors in terms:
        for name, record in tensors.items():
            gathered.setdefault(name, []).append(record)
    return gathered


def norm(tensors: Tensors) -> float | None:
    """Return the L2 norm of all tensors together; None if some values are unknown."""
    squares = [record.square() for record in tensors.values()]
    known = [square for square in squares if square is not None]
    return math.sqrt(math.fsum(known)) if len(known) == len(squares) else None


def _sum(records: Sequence[TensorRecord]) -> TensorRecord | None:
    if len(records) == 1:
        return records[0]
    sketches = [record.sketch for record in records if record.sketch is not None]
    if len(sketches) == len(records) and len({sketch.size for sketch in sketches}) == 1:
        return record_sketch(reduce(operator.add, sketches), records[0].dtype)
    values = [record.values() for record in records]
    known = [term for term in values if term is not None]
    if len(known) < len(values) or len({(term.size, term.dtype) for term in known}) > 1:
        return None
    return record_tensor(np.sum(known, axis=0, dtype=known[0].dtype), values=True)


def _whole(name: str, rank: int, held: Held, ranks: Ranks) -> TensorRecord | None:
    """Return a tensor of which `rank` holds all or a piece; None if a piece is missing."""
    piece = ranks[rank].pieces.get(name)
    if piece is None:
        return held[rank][name]
    if held[rank][name].data is None:
        return _whole_sketch(name, piece, held, ranks)
    if held[rank][name].size == math.prod(piece.whole):
        return held[rank][name]  # the gradient that a rank's own pass gave to the whole parameter
    parts = []
    for holder in piece.ranks:
        record = held.get(holder, {}).get(name)
        part = ranks[holder].pieces.get(name) if holder in ranks else None
        values = None if record is None else record.values()
        if part is None or values is None or values.size != math.prod(part.shape):
            return None
        if part.whole != piece.whole:
            return None
        parts.append((part.place, part.arranged(values)))
    if sum(values.size for _, values in parts) < math.prod(piece.whole):
        return None  # before memory is allocated: a file may give any size
    own = held[rank][name].values()
    whole = np.zeros(piece.whole, np.float32 if own is None else own.dtype)
    known = np.zeros(piece.whole, bool)
    for place, values in parts:
        whole[place] = values
        known[place] = True
    return record_tensor(whole, values=True) if known.all() else None


def _whole_sketch(name: str, piece: Piece, held: Held, ranks: Ranks) -> TensorRecord | None:
    """Return the record of a tensor of which the ranks of `piece` have sketches, or digests only.

    Its digest is that of the pieces' digests, so it depends on how the tensor is cut.
    """
    records: list[TensorRecord] = []
    num_elements = 0
    for holder in piece.ranks:
        record = held.get(holder, {}).get(name)
        part = ranks[holder].pieces.get(name) if holder in ranks else None
        if record is None or part is None or part.whole != piece.whole or record.data is not None:
            return None
        records.append(record)
        num_elements += math.prod(part.shape)
    if num_elements != math.prod(piece.whole):
        return None
    digest = blake3(" ".join(record.digest for record in records).encode()).hexdigest(16)
    sketches = [record.sketch for record in records if record.sketch is not None]
    if len(sketches) < len(records) or {sketch.size for sketch in sketches} != {num_elements}:
        return TensorRecord(digest)
    whole = reduce(operator.add, sketches)
    whole.numbers[0] = sum(sketch.square for sketch in sketches)  # pieces don't overlap
    return record_sketch(whole, records[0].dtype, digest)
