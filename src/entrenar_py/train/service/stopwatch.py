"""Times the steps of a run: their lengths, and the worker that delivered last."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from entrenar_py.train.service.run_events import Last

STEPS_AVERAGED = 20


class Times(NamedTuple):
    """The times of one step, as in `StepMade`; None where one was not measured."""

    step_ms: float
    exchange_ms: float | None
    reduce_ms: float | None
    steps_per_s: float | None
    tokens_per_s: float | None


class Stopwatch:
    """Times the steps of a run by `clock`, which gives seconds and is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        # When steps were made, and of how many tokens.
        self._made: deque[tuple[float, int | None]] = deque(maxlen=STEPS_AVERAGED + 1)
        self._delivered: dict[int, float] = {}  # rank -> time of its last delivery
        self._computed: dict[int, float] = {}  # rank -> time when its last shards were computed
        self._exchange_s: float | None = None

    def begin(self) -> None:
        """Note that a step begins, or begins again."""
        self._began = self._clock()
        self._delivered.clear()
        self._computed.clear()
        self._exchange_s = None

    def computed(self, rank: int) -> None:
        """Note that `rank` has computed shards and will deliver them."""
        self._computed[rank] = self._clock()

    def exchanged(self) -> None:
        """Note that all workers hold the average. Only the first call in a step counts."""
        if self._computed and self._exchange_s is None:
            self._exchange_s = self._clock() - max(self._computed.values())

    def delivered(self, rank: int) -> None:
        """Note that `rank` has delivered shards."""
        self._delivered[rank] = self._clock()

    def made(self, *, reduce_s: float, num_tokens: int | None = None) -> Times:
        """Return the times of the step just made, of `num_tokens`.

        `reduce_s` is that of adding and averaging.
        """
        now = self._clock()
        self._made.append((now, num_tokens))
        passed = now - self._made[0][0]
        tokens = [number for _, number in itertools.islice(self._made, 1, None)]
        known = [number for number in tokens if number is not None]
        return Times(
            step_ms=1e3 * (now - self._began),
            exchange_ms=None if self._exchange_s is None else 1e3 * self._exchange_s,
            reduce_ms=1e3 * reduce_s if reduce_s else None,
            steps_per_s=len(tokens) / passed if passed > 0 else None,
            tokens_per_s=sum(known) / passed if passed > 0 and known == tokens else None,
        )

    def last(self) -> Last | None:
        """Return who delivered last in this step, or None if fewer than two delivered."""
        if len(self._delivered) < 2:
            return None
        rank = max(self._delivered, key=self._delivered.__getitem__)
        behind = self._delivered[rank] - statistics.median(self._delivered.values())
        return Last(rank=rank, behind_ms=1e3 * behind)

    def waits_ms(self, ranks: Iterable[int]) -> dict[int, float]:
        """Return how long each of `ranks` has waited in this step until all shards were computed.

        A rank without a shard has waited since the step began. Empty if no shard was computed.
        """
        last = max(self._computed.values(), default=None)
        if last is None:
            return {}
        return {rank: 1e3 * (last - self._computed.get(rank, self._began)) for rank in ranks}
