"""Notes where in a training step random numbers are drawn, and by which generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from entrenar_py.check.observing import common_numbers, generators
from entrenar_py.check.observing.generators import Generators, States
from entrenar_py.check.observing.recomputed import Recomputed
from entrenar_py.shared import hook_calls, trace

_COMMON = "common numbers"
_NONE_DRAWN = {_COMMON: "0"}  # as a loader hands out a batch


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
        *,
        compiles: Callable[[], bool] = hook_calls.has_compiled,
    ) -> None:
        self._generators, self._rank, self._place, self._write = generators, rank, place, write
        self._last = self._states()
        drawn = partial(self.mark, "recomputed")
        self._recomputed = Recomputed(self._are_not_set_back, drawn, compiles)

    def since(self, states: States) -> None:
        """Take `states` for those at the last mark, as far as they are known."""
        common = {} if common_numbers.CURRENT is None or not states else _NONE_DRAWN
        self._last = {**self._last, **states, **common}

    def begin_backward(self) -> None:
        """Write what the loss drew. From here on, modules that are called are computed again."""
        self.mark("loss")
        self._recomputed.begin()

    def end_backward(self) -> None:
        """Write what the backward pass drew."""
        self.remove()
        self.mark("backward")

    def were_recomputed(self) -> bool:
        """Return whether modules were called in a backward pass since the last call."""
        return self._recomputed.were_called()

    def remove(self) -> None:
        """Remove the hooks of a backward pass."""
        self._recomputed.end()

    def _states(self) -> States:
        """Return the generators' states, and which common random numbers were drawn, if any are."""
        common, states = common_numbers.CURRENT, self._generators.states()
        return states if common is None else {**states, _COMMON: str(common.drawn)}

    def _are_not_set_back(self) -> bool:
        return self._states() == self._last

    def mark(
        self, where: str | None, *, worker: int | None = None, ids: tuple[int, ...] = ()
    ) -> tuple[States, list[str]]:
        """Write what was drawn since the last mark as drawn `where`, or nothing if that is None.

        `worker` is the loader's worker that this process is, with the samples `ids`. Return the
        states at the last mark, and the names of the generators that have drawn.
        """
        before, now = self._last, self._states()
        self._last = now
        drawn = generators.moved(before, now)
        if where == "between" and generators.is_just_seeded():
            drawn = [name for name in drawn if name != "torch"]  # as a script may after observe()
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
