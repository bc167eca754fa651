"""Times the steps of a run: how long each took, and who was waited for."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from entrenar_py.service.run_events import Last

STEPS_AVERAGED = 20


class Times(NamedTuple):
    """Times of one step. `exchange_ms` lie between the last shard computed and everyone holding the
    average; `reduce_ms` were spent adding and averaging here. Each is None where it was not seen.
    """

    step_ms: float
    exchange_ms: float | None
    reduce_ms: float | None
    steps_per_s: float | None


class Stopwatch:
    """`clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._made: deque[float] = deque(maxlen=STEPS_AVERAGED + 1)
        self._delivered: dict[int, float] = {}  # rank -> when its last shard came
        self._computed: float | None = None  # when the last shards were
        self._exchange_s: float | None = None

    def begin(self) -> None:
        """A step begins, or begins again."""
        self._began = self._clock()
        self._delivered.clear()
        self._computed = self._exchange_s = None

    def computed(self) -> None:
        """Somebody has computed what it was given, and will deliver it."""
        self._computed = self._clock()

    def exchanged(self) -> None:
        """Everyone holds the average. Whoever of them is told first says it for all."""
        if self._computed is not None and self._exchange_s is None:
            self._exchange_s = self._clock() - self._computed

    def delivered(self, rank: int) -> None:
        """`rank` has delivered shards."""
        self._delivered[rank] = self._clock()

    def made(self, *, reduce_s: float) -> Times:
        """The step is made, `reduce_s` of it spent adding and averaging here.

        Steps per second are over the last ones, if there were two.
        """
        now = self._clock()
        self._made.append(now)
        passed = now - self._made[0]
        rate = (len(self._made) - 1) / passed if passed > 0 else None
        return Times(
            step_ms=1e3 * (now - self._began),
            exchange_ms=None if self._exchange_s is None else 1e3 * self._exchange_s,
            reduce_ms=1e3 * reduce_s if reduce_s else None,
            steps_per_s=rate,
        )

    def last(self) -> Last | None:
        """Return the rank that delivered last in this step; None where fewer than two did."""
        if len(self._delivered) < 2:
            return None
        rank = max(self._delivered, key=self._delivered.__getitem__)
        behind = self._delivered[rank] - statistics.median(self._delivered.values())
        return Last(rank=rank, behind_ms=1e3 * behind)
