"""The events of all ranks put together: whole tensors, shared micro-batches, numbers, epochs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check.rank_files import assembly
from entrenar_py.check.rank_files.layout import Layout, Piece
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import (
    Event,
    Shard,
    Sketch,
    Start,
    TensorRecord,
    Update,
    record_sketch,
    record_tensor,
)
from entrenar_py.shared.trace.tensors import PROJECTIONS, SAMPLES

SHARD = Shard(step=0, epoch=0, rank=0, shard=0, ids=(1, 2), loss_sum=None, weight=2.0, finite=True)
RECORD = record_tensor(np.ones(1, np.float32), values=True)


def values(record: TensorRecord) -> list[float]:
    """Return the elements of a tensor's record."""
    found = record.values()
    assert found is not None
    return [float(value) for value in found]


def recorded_by(rank: int, pieces: dict[str, Piece], *events: Event) -> RankTrace:
    """Return the record of one of four ranks: two for data and two for each of their models."""
    return RankTrace(
        life=0,
        header={"rank": rank, "world_size": 4},
        events=events,
        ended=True,
        problem="",
        layout=Layout(axes={"dp": 2, "tp": 2}),
        pieces=pieces,
    )


def four_ranks() -> list[RankTrace]:
    """Four ranks whose second halves are spoilt on rank 3."""
    found = []
    for rank in range(4):
        column, pair = rank % 2, rank - rank % 2
        piece = Piece(offset=(0, column), shape=(2, 1), whole=(2, 2), ranks=(pair, pair + 1))
        values = np.array([[1], [3]], np.float32) + column + 10 * (rank == 3)
        weights = {
            "up.weight": record_tensor(values, values=True),
            "norm.weight": record_tensor(np.full(1, float(rank == 2), np.float32), values=True),
        }
        start = Start(step=0, rank=rank, weights=weights)
        found.append(recorded_by(rank, {"up.weight": piece}, start))
    return found


def test_each_rank_sees_its_own_copy() -> None:
    """A copy that ranks share is assembled from its pieces; a rank's own copy is taken as it is."""
    starts = [one for one in assembly.ordered(four_ranks()) if isinstance(one, Start)]
    assert [values(one.weights["up.weight"]) for one in starts] == [
        *([1, 2, 3, 4], [1, 2, 3, 4]),
        *([1, 12, 3, 14], [1, 12, 3, 14]),
    ]
    assert [values(one.weights["norm.weight"]) for one in starts] == [[0], [0], [1], [0]]
    assert assembly.places(four_ranks()) == {0: 0, 1: 0, 2: 1, 3: 1}


def test_a_piece_that_is_lacking_is_not_made_up() -> None:
    """A tensor with a missing piece is left out; other ranks' copies don't replace it."""
    starts = [one for one in assembly.ordered(four_ranks()[:3]) if isinstance(one, Start)]
    assert [sorted(one.weights) for one in starts] == [
        *(["norm.weight", "up.weight"], ["norm.weight", "up.weight"]),
        ["norm.weight"],
    ]


def test_who_drew_other_samples_than_its_group() -> None:
    """A rank that drew other samples than its group has a Shard of its own, of the same number."""
    drawn = [(1, 2), (1, 2), (3,), (4,)]
    ranks = [
        recorded_by(rank, {}, replace(SHARD, rank=rank, ids=ids)) for rank, ids in enumerate(drawn)
    ]
    events = assembly.numbered(assembly.ordered(ranks), 1, assembly.places(ranks))
    assert [(one.rank, one.shard, one.ids) for one in events if isinstance(one, Shard)] == [
        *((0, 0, (1, 2)), (2, 1, (3,)), (3, 1, (4,)))
    ]


def alone(*events: Event, life: int = 0) -> RankTrace:
    """Return the record of a rank that trains by itself."""
    header = {"rank": 0, "world_size": 1}
    return RankTrace(life=life, header=header, events=events, ended=True, problem="")


def test_a_rank_that_is_started_again_counts_epochs_on() -> None:
    """A restarted rank counts epochs from 0; repeated steps have the weight of their new shards."""
    update = Update(
        step=0, rank=0, loss=None, weight=0.0, learning_rate=0.1, finite=True, weights={}
    )
    first = alone(
        *(Start(step=0, rank=0, weights={}), SHARD, update),
        *(replace(SHARD, step=1, weight=8.0), replace(update, step=1)),
    )
    again = alone(
        Start(step=1, rank=0, weights={}), replace(SHARD, step=1), replace(update, step=1), life=1
    )
    events = assembly.numbered(assembly.ordered([first, again]), 1, {0: 0}, steps_per_epoch=1)
    assert [event.epoch for event in events if isinstance(event, Shard)] == [0, 0, 1]
    assert [event.weight for event in events if isinstance(event, Update)] == [2.0, 8.0, 2.0]


def counted(rank: int, life: int, step: int, counts: tuple[int, int]) -> RankTrace:
    """Return a life of one step, whose count is the first number before it, the second in it."""
    before, after = (
        {"n": record_tensor(np.array([count], np.int64), values=True)} for count in counts
    )
    start = Start(step=step, rank=rank, weights={}, buffers=before, resumed=step > 0)
    made = Update(
        step=step,
        rank=rank,
        loss=None,
        weight=1.0,
        learning_rate=0.1,
        finite=True,
        weights={},
        buffers=after,
    )
    return replace(
        alone(start, made, life=life), header={"rank": rank, "world_size": 2}, local=frozenset()
    )


@pytest.mark.parametrize(("other", "is_own"), [(0, False), (5, True)])
def test_whole_numbers_are_a_rank_s_own_if_ranks_of_one_life_differ(
    other: int, is_own: bool
) -> None:
    """A script counts after its step, so a later life begins with another count than the last one
    of the life before. Ranks are compared within a life.
    """
    ranks = [
        *(counted(0, 0, 0, (0, 0)), counted(1, 0, 0, (other, other))),
        *(counted(rank, 1, 1, (1, 1)) for rank in range(2)),
    ]
    held = [event for event in assembly.ordered(ranks) if isinstance(event, Start | Update)]
    assert {bool(event.local) for event in held} == {is_own}
    assert {bool(event.buffers) for event in held} == {not is_own}


def test_shards_are_numbered_through_the_places_of_their_ranks() -> None:
    """Two micro-batches a rank: the second rank's are 2 and 3."""
    shards = [replace(SHARD, rank=rank, shard=micro) for rank in range(2) for micro in range(2)]
    events = assembly.numbered(shards, 2, {0: 0, 1: 1})
    assert [event.shard for event in events if isinstance(event, Shard)] == [0, 1, 2, 3]


def test_what_is_given_a_gradient_is_not_frozen() -> None:
    """A frozen parameter that has a gradient later was unfrozen by the script."""
    start = Start(step=0, rank=0, weights={}, frozen=("head", "body"))
    rank = alone(start, replace(SHARD, gradient={"head": RECORD}))
    (found,) = [event for event in assembly.ordered([rank]) if isinstance(event, Start)]
    assert found.frozen == ("body",)


def in_pieces(*sizes: int) -> list[TensorRecord]:
    """Return what each of two ranks has of a tensor of 100 elements whose pieces are sketched."""
    ranks = []
    for rank, size in enumerate(sizes):
        piece = Piece(offset=(50 * rank,), shape=(50,), whole=(100,), ranks=(0, 1))
        numbers = np.full(1 + PROJECTIONS + SAMPLES, 3.0 + rank)
        record = record_sketch(Sketch(size, numbers), "float32", f"digest {rank}")
        weights = {"w": record, "count": TensorRecord("same")}
        start = Start(step=0, rank=rank, weights=weights)
        pieces = {"w": piece, "count": replace(piece, ranks=(0, 1))}
        header = {"rank": rank, "world_size": 2}
        ranks.append(
            RankTrace(
                life=0,
                header=header,
                events=(start,),
                ended=True,
                problem="",
                layout=Layout(axes={"fsdp": 2}),
                pieces=pieces,
            )
        )
    starts = [event for event in assembly.ordered(ranks) if isinstance(event, Start)]
    return [start.weights[name] for start in starts for name in ("w", "count") if start.weights]


def test_sketches_of_pieces_are_added() -> None:
    """The whole has the sum of the sketches and of the squares, and a digest of the digests."""
    whole, count, again, _ = in_pieces(100, 100)
    assert whole == again
    assert whole.sketch is not None
    assert whole.sketch.numbers.tolist() == [7.0] * (1 + PROJECTIONS + SAMPLES)
    assert (whole.size, count.sketch) == (100, None)
    assert count.digest != "same"
    other, *_ = in_pieces(100, 99)
    assert other.sketch is None


@pytest.mark.parametrize(("samples", "ids"), [("content", ()), ("index", (1, 2))])
def test_rows_whose_loss_is_multiplied_by_zero(samples: str, ids: tuple[int, ...]) -> None:
    """They are no samples, unless a loader drew them: a script may leave a batch out by that."""
    header = {"rank": 0, "world_size": 1, "samples": samples}
    dummy = replace(SHARD, terms=((5.0, 0.0),))
    ranks = [replace(alone(dummy), header=header)]
    assert [event.ids for event in assembly.ordered(ranks) if isinstance(event, Shard)] == [ids]
