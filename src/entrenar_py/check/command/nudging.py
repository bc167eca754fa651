"""Decide whether to run a command once more, with its first weights nudged by some roundings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from entrenar_py.check.causes import rounding_bounds, run_comparison
from entrenar_py.check.clauses.knobs import KNOBS
from entrenar_py.check.command.asked import Asked
from entrenar_py.check.evidence.needs import NUDGED, Need
from entrenar_py.shared.faults import NUDGED as NUDGED_WEIGHTS
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Tally


class Nudging:
    """Follows the runs of a command for checks with `needs`, until one shows a need to nudge."""

    def __init__(self, needs: Collection[Need]) -> None:
        self._is_wanted = NUDGED in needs
        self._first: Trace | None = None
        self._plain: dict[int, Asked] = {}  # by number of workers

    def read_again(self, asked: Asked, recorded: Trace) -> None:
        """Replace the first run's trace, if this is the first run, read in another way."""
        if self._plain and next(iter(self._plain.values())) == asked:
            self._first = recorded

    def after(self, asked: Asked, recorded: Trace) -> dict[str, Asked]:
        """Return by name the nudged run, once, if the completed run `asked` needs it; else nothing.

        It does if it differs from the first run by so little that rounding may be why. The nudged
        run is on one worker if any was.
        """
        if asked.is_plain and not asked.repeat:
            self._plain[asked.world_size] = asked
        first, self._first = self._first, self._first or recorded
        if first is None or not (self._is_wanted and _must_be_like(asked)):
            return {}
        if not _may_be_rounding(first, recorded):
            return {}
        self._is_wanted = False
        few = min(self._plain)
        nudge = Fault(kind=NUDGED_WEIGHTS, step=0, value=repr(rounding_bounds.nudge(first)))
        name = f"{few}-worker{'' if few == 1 else 's'}-nudged"
        return {name: replace(self._plain[few], faults=(nudge,))}


def _must_be_like(asked: Asked) -> bool:
    """Return whether the run must have the results of the first one, within rounding."""
    return asked.turn is None or KNOBS[asked.turn.knob].limit is None


def _may_be_rounding(first: Trace, other: Trace) -> bool:
    """Return whether two runs differ, by so little that rounding may be why."""
    trial = Tally("", observed=True)
    run_comparison.compare(trial, other, first, None)
    return trial.broken is not None and rounding_bounds.may_be_rounding(other, first)
