"""Decide whether to run a command again to see whole epochs: with short ones, or for more steps.

Short ones also show what a script does from some epoch on, if a line of it compares their numbers.
A script may fail with epochs of two steps, or its sampler never ends. Then one more run goes on
until the second epoch shows how it begins.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from entrenar_py.check.clauses import randomness
from entrenar_py.check.clauses.coverage import has_ended_epoch, in_epochs
from entrenar_py.check.command.asked import Asked
from entrenar_py.check.command.run_plan import LONGER_MAX
from entrenar_py.check.evidence.needs import SHORTENED, Need, Runs
from entrenar_py.shared.faults import LONGER, Fault, are_shortened
from entrenar_py.shared.faults import SHORTENED as SHORTENED_EPOCHS
from entrenar_py.shared.trace import Shard, Trace

_STEPS = 2  # of an epoch; whether it is shuffled shows in the second. One, if that is known.


class Shortening:
    """Follows the first run of a command for checks with `needs`."""

    def __init__(self, needs: Collection[Need]) -> None:
        self._is_wanted = SHORTENED in needs
        self._usual: Trace | None = None  # the first run

    def after(self, asked: Asked, recorded: Trace) -> dict[str, Asked]:
        """Return by name the run to make after `asked`, if too few epochs' ends were seen by then.

        A script that reports its samples doesn't report those that an epoch leaves out.
        """
        if not self._is_wanted or asked.repeat or asked.stops:
            return {}
        if are_shortened(asked.faults):
            self._is_wanted = False
            is_enough = _is_whole(recorded) or _is_whole(self._usual)
            return {} if is_enough else self._longer(asked)
        if not asked.is_plain or recorded.end.status != "completed" or self._usual is not None:
            return {}
        self._usual = recorded
        are_seen = recorded.traits.sample_ids == "seen"
        steps = 1 if _is_whole(recorded) else _STEPS
        is_enough = _is_whole(recorded) and not _has_later_epochs(recorded)
        if not are_seen or not in_epochs(Runs(recorded)) or is_enough:
            return {}
        count = steps * _num_micro_batches(recorded)
        fault = Fault(kind=SHORTENED_EPOCHS, step=0, value=str(count))
        return {f"{_workers(asked)}-short-epochs": replace(asked, faults=(fault,))}

    def _longer(self, short: Asked) -> dict[str, Asked]:
        """Return by name the run that goes on into its second epoch, if that is not far."""
        assert self._usual is not None, "a run with short epochs follows it"
        scenario = self._usual.scenario
        second = math.ceil(randomness.ORDER_LENGTH_MIN / scenario.batch_size) + 1
        steps = math.ceil(scenario.num_samples / scenario.batch_size) + second
        if not scenario.num_steps < steps <= LONGER_MAX or "ended" not in self._usual.environment:
            return {}
        fault = Fault(kind=LONGER, step=0, value=str(steps))
        return {f"{_workers(short)}-two-epochs": replace(short, faults=(fault,))}


def _has_later_epochs(recorded: Trace) -> bool:
    """Return whether a script may do something in epochs to which short ones bring it alone."""
    epochs = {shard.epoch for shard in recorded.of(Shard)}
    return bool(recorded.traits.by_epoch) and 2 * len(epochs) <= recorded.scenario.num_steps


def _is_whole(recorded: Trace | None) -> bool:
    """Return whether a run shows the end of an epoch, and how the next one begins."""
    if recorded is None:
        return False
    is_shown = has_ended_epoch(recorded) and not randomness.lacks_second_epoch(Runs(recorded))
    return recorded.end.status == "completed" and is_shown


def _workers(asked: Asked) -> str:
    return f"{asked.world_size}-worker{'' if asked.world_size == 1 else 's'}"


def _num_micro_batches(trace: Trace) -> int:
    """Return how many micro-batches a rank has in the first step, or 1 if none was recorded."""
    shards = trace.of(Shard)
    first = next(iter(shards), None)
    return max(1, sum((s.step, s.rank) == (first.step, first.rank) for s in shards if first))
