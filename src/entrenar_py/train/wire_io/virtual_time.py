"""Virtual time: scheduled actions, done one after the other in the order of their times."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from entrenar_py.shared import patience

Action = Callable[[], None]
Outcome = TypeVar("Outcome")


class Timeline:
    """A queue of scheduled actions. `now` is the virtual time in seconds from the beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._queue: list[tuple[float, int, Action]] = []

    def clock(self) -> float:
        """Return the virtual time."""
        return self.now

    def at(self, when: float, action: Action) -> None:
        """Schedule `action` for the time `when`, after those scheduled before for the same time."""
        heapq.heappush(self._queue, (when, next(self._numbers), action))

    def later(self, seconds: float, action: Action) -> None:
        """Schedule `action` for `seconds` from now."""
        self.at(self.now + seconds, action)

    def next(self) -> None:
        """Advance to the next scheduled action, and do it."""
        self.now, _, action = heapq.heappop(self._queue)
        patience.mark()
        action()

    def has_until(self, when: float) -> bool:
        """Return whether an action is scheduled for the time `when` or earlier."""
        return bool(self._queue) and self._queue[0][0] <= when


class Later:
    """A simulated background thread: it does one piece of work after the other, each of which takes
    a random time from `takes_s`. `process(action)` does it in the process that owns the thread."""

    def __init__(
        self,
        timeline: Timeline,
        drawn: random.Random,
        takes_s: tuple[float, float],
        process: Callable[[Action], None],
    ) -> None:
        self._timeline, self._random, self._takes_s = timeline, drawn, takes_s
        self._process = process
        self._free_at = 0.0  # when all work so far is done
        self._epoch = 0

    def run(self, work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
        """Schedule `work`, then `done` with its result."""
        epoch = self._epoch

        def finish() -> None:
            if epoch == self._epoch:
                done(work())

        takes_s = self._random.uniform(*self._takes_s)
        self._free_at = max(self._free_at, self._timeline.now) + takes_s
        self._timeline.at(self._free_at, lambda: self._process(finish))

    def forget(self) -> None:
        """Drop all work; `done` is not called for it."""
        self._epoch += 1
        self._free_at = 0.0
