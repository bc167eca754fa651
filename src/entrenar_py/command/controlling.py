"""Decide whether to run a command again on several workers and on one, with both runs controlled.

Then random numbers are alike for all samples. Samples come in one order, or all ranks have the same
share of them, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from entrenar_py.checks import controlled
from entrenar_py.checks.compared import Compared
from entrenar_py.checks.needs import ALONE, CONTROLLED, Need, Runs
from entrenar_py.command.asked import Asked
from entrenar_py.faults import COMMON, MERGED, MIRRORED, ORDERED, REPEATED, Fault
from entrenar_py.trace import Shard, Trace

# Kind of the fault that controls runs -> the end of their names.
_ENDS = {COMMON: "common", ORDERED: "ordered", MIRRORED: "mirrored", REPEATED: "repeated"}
_OF_ANY_SIZE = (COMMON, ORDERED)


class Controlling:
    """Follows the runs of a command for checks with `needs`, and plans the controlled ones."""

    def __init__(self, needs: Collection[Need]) -> None:
        self._is_wanted = CONTROLLED in needs
        self._plain: dict[int, Trace] = {}  # by number of workers
        self._merged: dict[int, Trace] = {}  # on one worker, by the number whose batches it has
        self._witnesses: tuple[Trace, ...] = ()
        self._planned: set[Asked] = set()

    def after(self, asked: Asked, recorded: Trace) -> dict[str, Asked]:
        """Return by name the runs that are needed after the completed run `asked`."""
        if not self._is_wanted or asked.repeat or not asked.is_witness or asked.is_nudged:
            return {}
        if asked.is_plain:
            self._plain[asked.world_size] = recorded
        elif {fault.kind for fault in asked.faults} == {MERGED}:
            self._merged[int(asked.faults[0].value or 1)] = recorded
        else:
            self._witnesses += (recorded,)
        if asked.world_size != 1:  # the last one of a pair
            return {}
        runs: dict[str, Asked] = {}
        for size in (size for size in self._plain if size > 1):
            if self._is_of_worker_s_batches(size) and size not in self._merged:
                merged = replace(asked, faults=(_merging(size),))
                if merged not in self._planned:
                    runs[f"1-worker-merged-of-{size}"] = merged
                    continue
            for one in self._next(size, asked):
                made = _asked(asked, size, *one)
                if size in self._merged and made.world_size == 1 and one[1] in _OF_ANY_SIZE:
                    made = replace(made, faults=(*made.faults, _merging(size)))
                runs[_name(size, *one)] = made
        fresh = {name: run for name, run in runs.items() if run not in self._planned}
        self._planned.update(fresh.values())
        return fresh

    def _is_of_worker_s_batches(self, size: int) -> bool:
        """Return whether one worker has the batches of one of `size` workers."""
        runs = self._plain[1], self._plain[size]
        few, many = (run.scenario.batch_size for run in runs)
        return few * size == many and all(any(s.ids for s in run.of(Shard)) for run in runs)

    def _next(self, size: int, last: Asked) -> list[tuple[int, str]]:
        """Return the numbers of workers, and the kind of control, of the next runs."""
        alone, several = self._merged.get(size, self._plain[1]), self._plain[size]
        runs = Runs(several, {ALONE: (alone,)}, witnesses={CONTROLLED: self._witnesses})
        plain = Compared(runs=runs, model=alone, trace=several)
        is_ordered = not controlled.is_ordered_otherwise(plain)
        if is_ordered and not controlled.is_prevented(plain):
            return []
        kinds = {fault.kind for fault in last.faults} - {MERGED}
        first = COMMON if is_ordered else ORDERED
        if not kinds and not (is_ordered and not controlled.is_by_chance(plain)):
            return [(size, first), (1, first)]
        if kinds <= {first} and controlled.alike(plain, first) is None:
            return [(size, MIRRORED), (1, MIRRORED)]
        if MIRRORED in kinds and controlled.mirrored(plain) is None:
            return [(1, REPEATED)]
        return []


def _merging(size: int) -> Fault:
    return Fault(kind=MERGED, step=0, value=str(size))


def _asked(like: Asked, size: int, workers: int, kind: str) -> Asked:
    value = None if kind in _OF_ANY_SIZE else str(size)
    return replace(like, world_size=workers, faults=(Fault(kind=kind, step=0, value=value),))


def _name(size: int, workers: int, kind: str) -> str:
    """Return a run's name. Runs on one worker for several numbers of workers have different ones.

    With common random numbers, or one order, it is the same run.
    """
    of = f"-of-{size}" if workers == 1 and kind not in _OF_ANY_SIZE else ""
    return f"{workers}-worker{'' if workers == 1 else 's'}-{_ENDS[kind]}{of}"
