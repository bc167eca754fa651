"""The time that a step took, and the worker that delivered last."""

from __future__ import annotations

import pytest

from entrenar_py.train.service.measures import STEPS_AVERAGED, Stopwatch, Times
from entrenar_py.train.service.run_events import Last


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def deliver(watch: Stopwatch, clock: Clock, *when: float) -> None:
    """Let worker 0 deliver after the first of these seconds, worker 1 after the second, ..."""
    began = clock.now
    for rank, seconds in sorted(enumerate(when), key=lambda pair: pair[1]):
        clock.now = began + seconds
        watch.delivered(rank)


def test_a_step_is_timed() -> None:
    """A step has its whole time, the exchange's, and the reduction's."""
    clock = Clock()
    watch = Stopwatch(clock)
    watch.begin()
    clock.now += 0.5
    watch.computed(0)
    clock.now += 0.25
    watch.exchanged()
    clock.now += 0.25
    watch.exchanged()
    unknown: dict[str, None] = {"steps_per_s": None, "tokens_per_s": None}
    expected = Times(step_ms=1000.0, exchange_ms=250.0, reduce_ms=250.0, **unknown)
    assert watch.made(reduce_s=0.25) == expected
    watch.begin()
    expected = Times(step_ms=0.0, exchange_ms=None, reduce_ms=None, **unknown)
    assert watch.made(reduce_s=0.0) == expected


def test_the_pace_is_over_the_last_steps() -> None:
    """The pace follows a lasting change, but does not jump with every step."""
    clock = Clock()
    watch = Stopwatch(clock)
    for seconds in [1.0] * 5 + [0.5] * STEPS_AVERAGED:
        clock.now += seconds
        rate = watch.made(reduce_s=0.0).steps_per_s
    assert rate == pytest.approx(2.0)


def test_tokens_are_counted_over_the_same_steps() -> None:
    """The tokens of the first step are not among them: nobody timed it."""
    clock = Clock()
    watch = Stopwatch(clock)
    for tokens in (1000, 30, 50):
        times = watch.made(reduce_s=0.0, num_tokens=tokens)
        clock.now += 2.0
    assert times.tokens_per_s == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ((1.0, 2.0, 5.0), Last(rank=2, behind_ms=3000.0)),
        ((4.0, 1.0, 2.0), Last(rank=0, behind_ms=2000.0)),
        ((1.0, 3.0), Last(rank=1, behind_ms=1000.0)),
        ((1.0,), None),
        ((), None),
    ],
)
def test_who_was_last(when: tuple[float, ...], expected: Last | None) -> None:
    """The last worker has its delay after the median of all. A single worker is not last."""
    clock = Clock()
    watch = Stopwatch(clock)
    watch.begin()
    deliver(watch, clock, *when)
    assert watch.last() == expected


def test_a_worker_that_takes_over_shards_delivers_later() -> None:
    """A worker's last delivery counts, and a new step starts from zero."""
    clock = Clock()
    watch = Stopwatch(clock)
    watch.begin()
    deliver(watch, clock, 1.0, 2.0)
    clock.now += 3.0
    watch.delivered(0)
    assert watch.last() == Last(rank=0, behind_ms=1500.0)
    watch.begin()
    assert watch.last() is None


def test_how_long_each_rank_waited() -> None:
    """A rank waits from its last shard, or from the step's start, until all are computed."""
    clock = Clock()
    watch = Stopwatch(clock)
    watch.begin()
    assert watch.waits_ms([0, 1]) == {}
    for rank, seconds in ((0, 1.0), (1, 2.0), (0, 0.5)):
        clock.now += seconds
        watch.computed(rank)
    clock.now += 9.0
    assert watch.waits_ms([0, 1, 2]) == {0: 0.0, 1: 500.0, 2: 3500.0}
    watch.begin()
    assert watch.waits_ms([0]) == {}
