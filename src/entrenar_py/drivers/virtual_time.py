"""Virtual time: what is to be done when, in one order for everyone."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import TypeVar

Action = Callable[[], None]
Outcome = TypeVar("Outcome")


class Timeline:
    """`now` is in seconds from the beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._queue: list[tuple[float, int, Action]] = []

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def at(self, when: float, action: Action) -> None:
        """Has `action` done at a time, after everything that was said before for the same time."""
        heapq.heappush(self._queue, (when, next(self._numbers), action))

    def later(self, seconds: float, action: Action) -> None:
        """Has `action` done when `seconds` have passed."""
        self.at(self.now + seconds, action)

    def next(self) -> None:
        """Goes to the next thing that is to be done, and does it."""
        self.now, _, action = heapq.heappop(self._queue)
        action()

    def has_until(self, when: float) -> bool:
        """Return whether something is to be done up to then."""
        return bool(self._queue) and self._queue[0][0] <= when


class Later:
    """Work beside everything else, one piece after the other, each of which takes a time drawn from
    `takes_s`. `process` is whose work it is: it does the actions it is given, if it still can."""

    def __init__(
        self,
        timeline: Timeline,
        drawn: random.Random,
        takes_s: tuple[float, float],
        process: Callable[[Action], None],
    ) -> None:
        self._timeline, self._random, self._takes_s = timeline, drawn, takes_s
        self._process = process
        self._free_at = 0.0  # all that was given is done then
        self._epoch = 0

    def run(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        """Calls `work`, then `done` with what came of it, after a while."""
        epoch = self._epoch

        def finish() -> None:
            if epoch == self._epoch:
                done(work())

        takes_s = self._random.uniform(*self._takes_s)
        self._free_at = max(self._free_at, self._timeline.now) + takes_s
        self._timeline.at(self._free_at, lambda: self._process(finish))

    def forget(self) -> None:
        """Forget what was given: nothing more of it will be heard."""
        self._epoch += 1
        self._free_at = 0.0
