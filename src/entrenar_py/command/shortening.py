"""Decide whether to run a command again with epochs of two steps, to see whole ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from entrenar_py.checks import randomness
from entrenar_py.checks.needs import SHORTENED, Need, Runs
from entrenar_py.checks.population import has_ended_epoch, in_epochs
from entrenar_py.command.asked import Asked
from entrenar_py.faults import SHORTENED as SHORTENED_EPOCHS
from entrenar_py.faults import Fault
from entrenar_py.trace import Shard, Trace

_STEPS = 2  # of an epoch; whether it is shuffled shows in the second


class Shortening:
    """Follows the first run of a command for checks with `needs`."""

    def __init__(self, needs: Collection[Need]) -> None:
        self._is_wanted = SHORTENED in needs

    def after(self, asked: Asked, recorded: Trace) -> dict[str, Asked]:
        """Return by name the run with short epochs, if the completed run `asked` is too short.

        A script with a line tells its samples itself, and not those that are left out.
        """
        if not (self._is_wanted and asked.is_plain):
            return {}
        self._is_wanted = False
        runs = Runs(recorded)
        is_whole = has_ended_epoch(recorded) and not randomness.lacks_second_epoch(runs)
        if recorded.traits.losses != "backward" or not in_epochs(runs) or is_whole:
            return {}
        count = _STEPS * _num_micro_batches(recorded)
        fault = Fault(kind=SHORTENED_EPOCHS, step=0, value=str(count))
        name = f"{asked.world_size}-worker{'' if asked.world_size == 1 else 's'}-short-epochs"
        return {name: replace(asked, faults=(fault,))}


def _num_micro_batches(trace: Trace) -> int:
    """Return how many micro-batches a rank has in the first step, or 1 if none was recorded."""
    shards = trace.of(Shard)
    first = next(iter(shards), None)
    return max(1, sum((s.step, s.rank) == (first.step, first.rank) for s in shards if first))
