"""The events of one life of all ranks (from one start to the next), with whole tensors.

Ranks may have a model in pieces or in stages, or share micro-batches. A `Layout` says which. The
tensors that one rank would see as a whole are assembled from the pieces of all ranks that have
them.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3

from entrenar_py.check.rank_files.layout import PARTIAL, Layout, Piece
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.trace import (
    Declared,
    Event,
    Shard,
    Start,
    TensorRecord,
    Tensors,
    Update,
    record_sketch,
    record_tensor,
)

State = TypeVar("State", Start, Update)
# Fields that may be in pieces.
_IN_PIECES = (
    *("weights", "optimizer", "buffers", "local", "gradient", "edited", "extra", "unclipped"),
)


def layout_of(ranks: Sequence[RankTrace]) -> Layout | None:
    """Return the first layout that a rank declares; None if no rank declares any."""
    return next((rank.layout for rank in ranks if rank.layout is not None), None)


def of_life(life: Sequence[RankTrace]) -> list[Event]:
    """Return the events of `life`, the records of one start of all ranks, in no order."""
    events = [event for rank in life for event in rank.events]
    layout = layout_of(life)
    if layout is None:
        return events
    ranks = {rank.rank: rank for rank in life}
    return [
        *_shared(ranks, layout),
        *(_declared(event, layout) for event in events if isinstance(event, Declared)),
        *(event for event in events if not isinstance(event, Declared | Shard | Start | Update)),
        *(
            _whole_start(r, starts, ranks, layout)
            for starts in _by_step(life, Start)
            for r in starts
        ),
        *(_whole_update(r, made, ranks, layout) for made in _by_step(life, Update) for r in made),
    ]


def _declared(declared: Declared, layout: Layout) -> Declared:
    if declared.frozen is None:
        return declared
    return replace(declared, frozen=tuple(dict.fromkeys(map(layout.first_name, declared.frozen))))


# --- starts and updates -----------------------------------------------------------------------


def _by_step(life: Iterable[RankTrace], kind: type[State]) -> Iterable[dict[int, State]]:
    by_step: dict[int, dict[int, State]] = defaultdict(dict)
    for rank in life:
        for event in rank.events:
            if isinstance(event, kind):
                by_step[event.step][rank.rank] = event
    return by_step.values()


def _whole_start(rank: int, starts: Mapping[int, Start], ranks: Ranks, layout: Layout) -> Start:
    """Return the start of `rank`, with tensors and names of the whole model."""
    names: dict[str, Any] = {
        kind: tuple(
            dict.fromkeys(
                layout.first_name(name)
                for start in _of_replica(rank, starts, layout)
                for name in getattr(start, kind) or ()
            )
        )
        for kind in ("trainable", "frozen", "decayed")
    }
    shapes = {
        layout.first_name(name): shape
        for start in _of_replica(rank, starts, layout)
        for name, shape in start.shapes.items()
    }
    return replace(starts[rank], **_tensors(rank, starts, ranks, layout), **names, shapes=shapes)


def _whole_update(rank: int, updates: Mapping[int, Update], ranks: Ranks, layout: Layout) -> Update:
    """Return the update of `rank`, with tensors, rates and norms of the whole model."""
    own = updates[rank]
    parts = _tensors(rank, updates, ranks, layout)
    rates = {
        layout.first_name(name): update.rate_of(name)
        for update in _of_replica(rank, updates, layout)
        for name in update.weights
    }
    parts["rates"] = {name: rate for name, rate in rates.items() if rate != own.learning_rate}
    parts["kept"] = {layout.first_name(name): first for name, first in own.kept.items()}
    # Micro-batches are joined, or shared with other ranks.
    parts["summed"] = {name: () for name in layout.owned if name in parts["gradient"]}
    if own.grad_norm is not None:
        parts |= _norms([own, *updates.values()], norm(parts["gradient"]))
    return replace(own, **parts)


def _of_replica(rank: int, by_rank: Mapping[int, State], layout: Layout) -> list[State]:
    replica = layout.replica(rank)
    return [event for other, event in sorted(by_rank.items()) if layout.replica(other) == replica]


def _tensors(
    rank: int, by_rank: Mapping[int, State], ranks: Ranks, layout: Layout
) -> dict[str, Any]:
    """Return the tensor fields of `rank`'s event, filled with the whole model's tensors."""
    return {
        part: seen_by(
            rank, {other: getattr(event, part) for other, event in by_rank.items()}, ranks, layout
        )
        for part in _IN_PIECES
        if hasattr(by_rank[rank], part)
    }


def _norms(updates: Sequence[Update], norm: float | None) -> dict[str, float | None]:
    kept = [
        update.applied_norm / update.grad_norm
        for update in updates
        if update.grad_norm and update.applied_norm is not None
    ]
    return {"grad_norm": norm, "applied_norm": norm * kept[0] if norm and kept else norm}


# --- micro-batches ----------------------------------------------------------------------------


def _shared(ranks: Ranks, layout: Layout) -> list[Event]:
    parts: dict[Any, dict[int, Shard]] = defaultdict(dict)
    for rank in sorted(ranks):
        for shard in _micro_batches(ranks[rank], layout):
            parts[layout.data(rank), shard.step, shard.shard][rank] = shard
    return [shard for place in sorted(parts) for shard in _merged(parts[place], ranks, layout)]


def _micro_batches(rank: RankTrace, layout: Layout) -> list[Shard]:
    shards = [event for event in rank.events if isinstance(event, Shard)]
    if "pp" not in layout.axes:  # one worker has all stages of a pipeline
        return shards
    # The schedule of a pipeline splits a batch further, which samplers don't see. So a step counts
    # as one micro-batch.
    by_step: dict[int, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_step[shard.step].append(shard)
    return [_joined(of_step) for of_step in by_step.values()]


def _joined(shards: Sequence[Shard]) -> Shard:
    """Return one Shard for all micro-batches that a rank computed in a step."""
    losses = [shard for shard in shards if shard.loss_sum is not None]
    return replace(
        shards[0],
        shard=0,
        ids=tuple(id_ for shard in shards for id_ in shard.ids),
        loss_sum=sum(shard.loss_sum or 0.0 for shard in losses) if losses else None,
        slope=None,
        terms=(),
        weight=sum(shard.weight for shard in losses or shards),
        finite=all(shard.finite for shard in shards),
        draws=_draws(shards),
        contents=shards[0].contents if len(shards) == 1 else (),
        gradient=total(shard.gradient for shard in shards),
    )


def _merged(parts: Mapping[int, Shard], ranks: Ranks, layout: Layout) -> list[Shard]:
    """Return the Shard of a micro-batch, and one for each rank with different samples for it."""
    group = sorted(parts)
    drew = [rank for rank in group if parts[rank].ids] or group
    first = parts[drew[0]]
    others = [parts[rank] for rank in drew if parts[rank].ids != first.ids]
    with_loss = next((shard for shard in parts.values() if shard.loss_sum is not None), first)
    culprits = [rank for rank in group if not parts[rank].finite]
    gradients = {rank: shard.gradient for rank, shard in parts.items()}
    merged = replace(
        first,
        rank=(culprits or group)[0],
        loss_sum=with_loss.loss_sum,
        slope=with_loss.slope,
        terms=with_loss.terms,
        weight=with_loss.weight,
        finite=not culprits,
        draws=_draws(parts.values()),
        gradient={} if others else gradient(group, gradients, ranks, layout),
    )
    return [merged, *(replace(shard, gradient={}) for shard in others)]


def _draws(shards: Iterable[Shard]) -> str | None:
    return next((shard.draws for shard in shards if shard.draws is not None), None)


# --- tensors --------------------------------------------------------------------------------------


Held = Mapping[int, Tensors]  # rank -> its tensors of one kind, such as weights after a step
Ranks = Mapping[int, RankTrace]


def seen_by(rank: int, by_rank: Held, ranks: Ranks, layout: Layout) -> Tensors:
    """Return the tensors of the whole model as `rank` has them.

    These are the rank's own tensors, made whole, and tensors that only ranks of other stages have.
    A tensor with a missing piece is left out.
    """
    tensors: dict[str, TensorRecord] = {}
    replica = layout.replica(rank)
    others = sorted(
        other for other in by_rank if other != rank and layout.replica(other) == replica
    )
    for holder in (rank, *others):
        for name, record in renamed(made_whole(holder, by_rank, ranks), layout).items():
            tensors.setdefault(name, record)
    for name, record in renamed(_of_empty_pieces(rank, by_rank, ranks), layout).items():
        tensors.setdefault(name, record)
    return tensors


def _of_empty_pieces(rank: int, by_rank: Held, ranks: Ranks) -> dict[str, TensorRecord]:
    """Return the tensors that `rank` lacks because its piece of the parameter is empty.

    On such a rank the parameter has no gradient and no optimizer state.
    """
    pieces = ranks[rank].pieces if rank in ranks else {}
    empty = {name: piece.ranks for name, piece in pieces.items() if 0 in piece.shape}
    others: dict[str, TensorRecord] = {}
    for holder in sorted({holder for holders in empty.values() for holder in holders}):
        for name in by_rank.get(holder, {}):
            if name in by_rank[rank] or name.partition("/")[0] not in empty:
                continue
            if (record := _whole(name, holder, by_rank, ranks)) is not None:
                others.setdefault(name, record)
    return others


def gradient(group: Sequence[int], by_rank: Held, ranks: Ranks, layout: Layout) -> Tensors:
    """Return the gradient of one micro-batch that the ranks of `group` computed together.

    Ranks of the same stage have copies, and the first is used. Ranks of different stages have
    terms, which are added, or identical copies. If ranks compute on parts of samples, the result is
    empty, since a term can't be distinguished from a copy.
    """
    if layout.has(PARTIAL):
        return {}
    stages: dict[int, dict[str, TensorRecord]] = {}
    for rank in group:
        stage = stages.setdefault(layout.coordinates(rank).get("pp", 0), {})
        for name, record in made_whole(rank, by_rank, ranks).items():
            stage.setdefault(name, record)
    terms = _gathered(renamed(stage, layout) for stage in stages.values())
    sums = {
        name: records[0] if len({record.digest for record in records}) == 1 else _sum(records)
        for name, records in terms.items()
    }
    return {name: record for name, record in sums.items() if record is not None}


def made_whole(rank: int, held: Held, ranks: Ranks) -> dict[str, TensorRecord]:
    """Return the tensors of `rank`, each made whole. Tensors with a missing piece are left out."""
    tensors = {name: _whole(name, rank, held, ranks) for name in held.get(rank, {})}
    return {name: record for name, record in tensors.items() if record is not None}


def renamed(tensors: Tensors, layout: Layout) -> dict[str, TensorRecord]:
    """Return `tensors` with each tied tensor under the first name of its tie.

    If several tensors of a tie are recorded, the others keep their own names.
    """
    named: dict[str, TensorRecord] = {}
    for name, record in tensors.items():
        first = layout.first_name(name)
        named[name if first in tensors or first in named else first] = record
    return named


def total(terms: Iterable[Tensors]) -> dict[str, TensorRecord]:
    """Return name -> sum of the terms, without tensors of unknown values or different sizes."""
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


def _whole(name: str, rank: int, by_rank: Held, ranks: Ranks) -> TensorRecord | None:
    """Return a tensor of `rank`, made whole if the rank has a piece; None if a piece is missing."""
    piece = ranks[rank].pieces.get(name)
    if piece is None:
        return by_rank[rank][name]
    if by_rank[rank][name].data is None:
        return _whole_sketch(name, piece, by_rank, ranks)
    if by_rank[rank][name].size == math.prod(piece.whole):
        return by_rank[rank][
            name
        ]  # the gradient that a rank's own pass gave to the whole parameter
    parts = []
    for holder in piece.ranks:
        record = by_rank.get(holder, {}).get(name)
        part = ranks[holder].pieces.get(name) if holder in ranks else None
        values = None if record is None else record.values()
        if part is None or values is None or values.size != math.prod(part.shape):
            return None
        if part.whole != piece.whole:
            return None
        parts.append((part.place, part.arranged(values)))
    if sum(values.size for _, values in parts) < math.prod(piece.whole):
        return None  # before memory is allocated, since a file may claim any size
    own = by_rank[rank][name].values()
    whole = np.zeros(piece.whole, np.float32 if own is None else own.dtype)
    known = np.zeros(piece.whole, bool)
    for place, values in parts:
        whole[place] = values
        known[place] = True
    return record_tensor(whole, values=True) if known.all() else None


def _whole_sketch(name: str, piece: Piece, records_of: Held, ranks: Ranks) -> TensorRecord | None:
    """Return the record of a tensor for which the ranks of `piece` have sketches or digests.

    Its digest is computed from the digests of the pieces, so it depends on how the tensor is cut.
    Return None if a piece is missing.
    """
    records: list[TensorRecord] = []
    num_elements = 0
    for holder in piece.ranks:
        record = records_of.get(holder, {}).get(name)
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
