"""Notes where in a training step random numbers are drawn, and by which generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from entrenar_py import trace
from entrenar_py.observing import generators
from entrenar_py.observing.generators import Generators, States


class RandomNumbers:
    """Compares the generators' states from mark to mark, and writes what was drawn in between.

    `place` returns the step and the micro-batch that this rank is in.
    """

    def __init__(
        self,
        generators: Generators,
        rank: int,
        place: Callable[[], tuple[int, int]],
        write: Callable[[Sequence[trace.Event]], None],
    ) -> None:
        self._generators, self._rank, self._place, self._write = generators, rank, place, write
        self._last = generators.states()

    def mark(
        self, where: str | None, *, worker: int | None = None, ids: tuple[int, ...] = ()
    ) -> tuple[States, list[str]]:
        """Write what was drawn since the last mark as drawn `where`, or nothing if that is None.

        `worker` is the loader's worker that this process is, with the samples `ids`. Return the
        states at the last mark, and the names of the generators that have drawn.
        """
        before, now = self._last, self._generators.states()
        self._last = now
        drawn = generators.moved(before, now)
        if where is not None and drawn:
            step, micro_batch = self._place()
            self._write(
                [
                    trace.Drawn(
                        step=step,
                        rank=self._rank,
                        micro_batch=micro_batch,
                        where=where,
                        worker=worker,
                        ids=ids,
                        generator=name,
                        before=before[name],
                        after=now[name],
                    )
                    for name in drawn
                ]
            )
        return before, drawn
