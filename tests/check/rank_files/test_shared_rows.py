"""Which ranks compute on the same samples, and which on parts of one sample."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from entrenar_py.check.rank_files import shared_rows
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Shard

ROW = (3.0, 1.0, 2.0, 5.0)


def recorded(rank: int, *steps: tuple[int, ...], samples: str = "index") -> RankTrace:
    """Return the record of a rank that draws these samples in its steps."""
    shards = [
        Shard(step=step, epoch=0, rank=rank, shard=0, ids=ids, loss_sum=None, weight=1, finite=True)
        for step, ids in enumerate(steps)
    ]
    header = {"rank": rank, "world_size": 2, "samples": samples}
    return RankTrace(life=0, header=header, events=tuple(shards), ended=True, problem="")


def given(rank: int, *parts: tuple[float, ...], life: int = 0) -> RankTrace:
    """Return the record of a rank whose model is given a row, or a part of one, in each step."""
    shards = [
        Shard(
            step=step,
            epoch=0,
            rank=rank,
            shard=0,
            loss_sum=None,
            weight=1,
            ids=(10 * rank + step,),
            finite=True,
            contents=((float(len(part)), math.hypot(*part), sum(part)),),
        )
        for step, part in enumerate(parts, start=life)
    ]
    return replace(recorded(rank), events=tuple(shards), life=life)


def test_ranks_that_draw_the_same_samples_are_one_group() -> None:
    """In another order, too; with others in one step they are several groups."""
    one = shared_rows.of(recorded(0, (0, 1), (2, 3)))
    for second, due in (((3, 2), (0, 0)), ((4, 5), (0, 1))):
        ranks = [recorded(0, (0, 1), (2, 3)), recorded(1, (1, 0), second)]
        assert shared_rows.groups(shared_rows.drawn(ranks, one), 2) == due


def test_a_later_stage_is_given_no_samples() -> None:
    """Its rows are none of those of one worker: it works on the first stage's samples."""
    first, later = recorded(0, (10, 11), samples="content"), recorded(1, (7, 8), samples="content")
    drawn = shared_rows.drawn([first, later], shared_rows.of(first))
    assert sorted(drawn) == [0]
    assert shared_rows.groups(drawn, 2) == (0, 0)
    assert shared_rows.groups({0: shared_rows.of(first), 1: shared_rows.of(later)}, 3) is None
    assert [
        event.ids for event in shared_rows.without(later).events if isinstance(event, Shard)
    ] == [()]


@pytest.mark.parametrize(
    ("parts", "are_parts"),
    [
        ([ROW[:2], ROW[2:]], True),
        ([ROW[::2], ROW[1::2]], True),
        ([ROW[:1], ROW[1:]], True),
        ([ROW[:2], ROW[:2]], False),
        ([ROW, ROW], False),
        ([ROW[:2], ROW[1:3]], False),
    ],
)
def test_parts_of_a_row_have_its_numbers_together(
    parts: list[tuple[float, ...]], are_parts: bool
) -> None:
    """Halves of unequal size are parts; a half that is given twice, or the whole row, is none."""
    ranks = [given(rank, part) for rank, part in enumerate(parts)]
    assert shared_rows.are_parts(ranks, shared_rows.of(given(2, ROW))) is are_parts


def test_ranks_with_parts_have_the_samples_of_one_worker() -> None:
    """A rank that is started again goes on where it was; a step of no other run says nothing."""
    one = shared_rows.of(given(2, ROW, ROW))
    ranks = [given(rank, ROW[2 * rank :][:2], life=life) for rank in (0, 1) for life in (0, 1, 2)]
    assert shared_rows.are_parts(ranks, one)
    ids = [[event.ids for event in shared_rows.whole(rank, one).events] for rank in ranks[:3]]  # type: ignore[attr-defined]
    assert ids == [[(20,)], [(21,)], [(2,)]]
    assert not shared_rows.are_parts(ranks[2::3], one), "no step is one worker's"
