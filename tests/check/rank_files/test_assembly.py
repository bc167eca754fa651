"""The events of a run, put together from its ranks' files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from entrenar_py.check.rank_files import assembly
from entrenar_py.check.rank_files.layout import Layout, Piece
from entrenar_py.check.rank_files.rank_file import RankTrace
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
from tests import traces
from tests.traces import values

SHARD = traces.shard(0, ids=(1, 2), loss_sum=None, weight=2.0)
RECORD = record_tensor(np.ones(1, np.float32), values=True)


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
    assert [traces.numbers(one.weights["up.weight"]) for one in starts] == [
        *([1, 2, 3, 4], [1, 2, 3, 4]),
        *([1, 12, 3, 14], [1, 12, 3, 14]),
    ]
    assert [traces.numbers(one.weights["norm.weight"]) for one in starts] == [[0], [0], [1], [0]]
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
    update = traces.update(0, loss=None, weight=0.0)
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
    made = traces.update(step, rank, loss=None, buffers=after)
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


def life(number: int, weights: Sequence[float], *, rank: int = 0, step: int = 0) -> RankTrace:
    """Return a life that begins with the first of `weights`, and makes a step to each other."""
    held = [{"w": values(weight)} for weight in weights]
    events = traces.reaching(held, rank=rank, begin=step, loss=None)
    header = {"rank": rank, "world_size": 2}
    return RankTrace(life=number, header=header, events=tuple(events), ended=True, problem="")


FIRST = life(0, [1.0, 2.0, 3.0])


def begun(ranks: Sequence[RankTrace]) -> list[tuple[int, bool]]:
    """Return the first step of the last life of each rank, and whether it is one of a resume."""
    starts = [event for rank in ranks for event in rank.events if isinstance(event, Start)]
    last = {start.rank: start for start in starts}
    return [(start.step, start.resumed) for start in last.values()]


@pytest.mark.parametrize(
    ("second", "step"),
    [
        ([3.0, 4.0], 2),  # the last weights
        ([2.0, 3.0], 1),  # an older checkpoint
        ([1.0, 2.0], 0),  # the initial weights: it began anew
        ([9.0, 8.0], 0),  # weights of no step
    ],
)
def test_the_step_that_weights_show(second: list[float], step: int) -> None:
    """A life with the weights of an earlier step, but not the initial ones, goes on after it."""
    found = assembly.recognised([FIRST, life(1, second)])
    assert begun(found) == [(step, step > 0)]
    assert found[0] == FIRST
    assert [event.step for event in found[1].events] == [step, step]  # type: ignore[attr-defined]


def test_a_third_life() -> None:
    """The steps of a life that was recognised count for the next one."""
    found = assembly.recognised([FIRST, life(1, [3.0, 4.0, 5.0]), life(2, [5.0, 6.0])])
    assert begun(found) == [(4, True)]


@pytest.mark.parametrize(
    "second",
    [
        [3.0, 4.0],  # rank 0's weights, which were saved
        [1.5, 0.0],  # its initial weights: it restored nothing
        [7.0, 8.0],  # weights of no step
    ],
)
def test_ranks_that_had_parted(second: list[float]) -> None:
    """A rank that shows no step of its own makes the steps of the rank that does."""
    other = life(0, [1.5, 2.5, 3.5], rank=1)
    lives = [FIRST, other, life(1, [3.0, 4.0]), life(1, second, rank=1)]
    assert begun(assembly.recognised(lives)) == [(2, True), (2, True)]


def test_an_average_within_the_model_moves_after_the_step() -> None:
    """So the weights that train show the step, and all that a rank holds does not."""

    def averaged(one: RankTrace, first: float) -> RankTrace:
        events = [
            replace(event, weights={**event.weights, "average": values(first + number)})
            for number, event in enumerate(one.events)
            if isinstance(event, Start | Update)
        ]
        assert isinstance(events[0], Start)
        return replace(one, events=(replace(events[0], trainable=("w",)), *events[1:]))

    lives = [averaged(FIRST, 7.0), averaged(life(1, [3.0, 4.0]), 9.5)]
    assert begun(assembly.recognised(lives)) == [(2, True)]


def test_a_process_that_observes_twice() -> None:
    """A second call of observe in one process is no resume."""
    ranks = [FIRST, life(1, [3.0, 4.0])]
    same = [replace(one, header={**one.header, "pid": 7}) for one in ranks]
    assert assembly.recognised(same) == same
    other = [replace(one, header={**one.header, "pid": one.life}) for one in ranks]
    assert begun(assembly.recognised(other)) == [(2, True)]


@pytest.mark.parametrize(
    "ranks",
    [
        [life(0, [1.0, 2.0, 2.0]), life(1, [2.0, 3.0])],  # of two steps
        [FIRST, life(1, [3.0, 4.0], step=1)],  # it says the step itself
        [FIRST, life(0, [1.0, 3.0, 5.0], rank=1), life(1, [3.0]), life(1, [3.0], rank=1)],
    ],
)
def test_a_step_that_can_not_be_told(ranks: list[RankTrace]) -> None:
    """A step that is ambiguous, declared, or not the same for all ranks is left as it is."""
    assert assembly.recognised(ranks) == ranks


def two(number: int, *weights: tuple[float, float]) -> RankTrace:
    """Return a life of a model with two tensors."""
    one = life(number, [first for first, _ in weights])
    events = [
        replace(event, weights={**event.weights, "v": values(second)})
        for event, (_, second) in zip(one.events, weights, strict=True)
        if isinstance(event, Start | Update)
    ]
    return replace(one, events=tuple(events))


@pytest.mark.parametrize(
    ("second", "step"),
    [
        ((3.0, 7.0), 2),  # one is as it was at first
        ((3.0, 3.0), 2),  # one has what another had
        ((3.0, 4.5), 0),  # one has what nothing had: it may be changed on purpose
        ((1.0, 8.0), 1),
        ((2.0, 9.0), 0),  # of two steps
    ],
)
def test_weights_that_are_restored_in_part(second: tuple[float, float], step: int) -> None:
    """A tensor tells the step, if the rest is explained."""
    first = two(0, (1.0, 7.0), (2.0, 8.0), (3.0, 9.0))
    found = assembly.recognised([first, two(1, second, (5.0, 5.0))])
    assert begun(found) == [(step, step > 0)]


def _shard(step: int, ids: tuple[int, ...], rank: int = 0) -> Shard:
    return traces.shard(step, rank, ids=ids, loss_sum=None, weight=float(len(ids)))


def test_ranks_that_name_samples_differently() -> None:
    """Indices and digests don't go together: no sample has an id, and still counts."""
    ranks = [
        RankTrace(
            life=0,
            header={"rank": rank, "samples": kind},
            events=(_shard(0, (1,), rank),),
            ended=True,
            problem="",
        )
        for rank, kind in enumerate(("index", "content"))
    ]
    (first, second) = assembly.agreed(ranks)
    assert [e.ids for r in (first, second) for e in r.events if isinstance(e, Shard)] == [(), ()]
    assert assembly.agreed(ranks[:1]) == ranks[:1]
