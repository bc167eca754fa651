"""Times the steps of a run: how long each took, and who was waited for."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from entrenar_py.service.happenings import Last

STEPS_AVERAGED = 20


class Stopwatch:
    """`clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._made: deque[float] = deque(maxlen=STEPS_AVERAGED + 1)
        self._delivered: dict[int, float] = {}  # rank -> when its last shard came
        self._reduce_s = 0.0

    def begin(self) -> None:
        """A step begins, or begins again."""
        self._began = self._clock()
        self._reduce_s = 0.0
        self._delivered.clear()

    def delivered(self, rank: int) -> None:
        """`rank` has delivered shards."""
        self._delivered[rank] = self._clock()

    def reduced(self, since: float) -> None:
        """A block of the gradient is averaged; that began at `since`."""
        self._reduce_s += self._clock() - since

    def now(self) -> float:
        """What the clock says."""
        return self._clock()

    def made(self) -> tuple[float, float, float | None]:
        """The step is made: its ms, the ms of its reduction, steps per second if there were two."""
        now = self._clock()
        self._made.append(now)
        passed = now - self._made[0]
        rate = (len(self._made) - 1) / passed if passed > 0 else None
        return 1e3 * (now - self._began), 1e3 * self._reduce_s, rate

    def last(self) -> Last | None:
        """Who delivered last in this step; None where fewer than two did."""
        if len(self._delivered) < 2:
            return None
        rank = max(self._delivered, key=self._delivered.__getitem__)
        behind = self._delivered[rank] - statistics.median(self._delivered.values())
        return Last(rank=rank, behind_ms=1e3 * behind)
