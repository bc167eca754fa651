"""Lives of ranks that resumed without saying so are counted from the step that weights show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from entrenar_py.check.rank_files import resumed_lives
from entrenar_py.check.rank_files.rank_trace import RankTrace
from entrenar_py.shared.trace import Event, Start, Update
from tests.check.clauses.traces import values


def life(number: int, weights: Sequence[float], *, rank: int = 0, step: int = 0) -> RankTrace:
    """Return a life that begins with the first of `weights`, and makes a step to each other."""
    events: list[Event] = [
        Start(step=step, rank=rank, weights={"w": values(weights[0])}, resumed=step > 0)
    ]
    for place, weight in enumerate(weights[1:], start=step):
        events.append(
            Update(
                step=place,
                rank=rank,
                loss=None,
                weight=1.0,
                learning_rate=0.1,
                finite=True,
                weights={"w": values(weight)},
            )
        )
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
    found = resumed_lives.recognised([FIRST, life(1, second)])
    assert begun(found) == [(step, step > 0)]
    assert found[0] == FIRST
    assert [event.step for event in found[1].events] == [step, step]  # type: ignore[attr-defined]


def test_a_third_life() -> None:
    """The steps of a life that was recognised count for the next one."""
    found = resumed_lives.recognised([FIRST, life(1, [3.0, 4.0, 5.0]), life(2, [5.0, 6.0])])
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
    assert begun(resumed_lives.recognised(lives)) == [(2, True), (2, True)]


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
    assert begun(resumed_lives.recognised(lives)) == [(2, True)]


def test_a_process_that_observes_twice() -> None:
    """A second call of observe in one process is no resume."""
    ranks = [FIRST, life(1, [3.0, 4.0])]
    same = [replace(one, header={**one.header, "pid": 7}) for one in ranks]
    assert resumed_lives.recognised(same) == same
    other = [replace(one, header={**one.header, "pid": one.life}) for one in ranks]
    assert begun(resumed_lives.recognised(other)) == [(2, True)]


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
    assert resumed_lives.recognised(ranks) == ranks


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
    found = resumed_lives.recognised([first, two(1, second, (5.0, 5.0))])
    assert begun(found) == [(step, step > 0)]
