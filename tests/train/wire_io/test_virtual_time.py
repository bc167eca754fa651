"""Virtual time: the order of actions, and simulated background work."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

from entrenar_py.train.wire_io.virtual_time import Later, Timeline


def test_in_order() -> None:
    """Actions run by time, and those for the same time in the order of scheduling."""
    timeline, done = Timeline(), list[str]()
    timeline.later(2.0, lambda: done.append("second"))
    timeline.later(1.0, lambda: done.append("first"))
    timeline.later(2.0, lambda: done.append("third"))
    while timeline.has_until(5.0):
        timeline.next()
    assert (done, timeline.clock()) == (["first", "second", "third"], 2.0)


def test_work_takes_its_time_one_piece_after_the_other() -> None:
    """Results come in the order in which the work was given."""
    timeline, told = Timeline(), list[tuple[int, float]]()
    later = Later(timeline, random.Random(0), (0.5, 1.0), lambda action: action())
    for number in range(3):
        later.run(partial(int, number), lambda got: told.append((got, timeline.now)))
    assert told == []
    while timeline.has_until(10.0):
        timeline.next()
    assert [number for number, _ in told] == [0, 1, 2]
    times = [0.0, *(when for _, when in told)]
    assert all(0.5 <= after - before <= 1.0 for before, after in pairwise(times))


def test_what_is_forgotten_is_not_told() -> None:
    """A result that was forgotten is not reported; a later one is."""
    timeline, told = Timeline(), list[str]()
    later = Later(timeline, random.Random(0), (0.5, 1.0), lambda action: action())
    later.run(lambda: "old", told.append)
    later.forget()
    later.run(lambda: "new", told.append)
    while timeline.has_until(10.0):
        timeline.next()
    assert told == ["new"]
