"""Decide whether to run a command again on several workers and on one, with both runs controlled.

Then random numbers are alike for all samples. Samples come in one order, or all ranks have the same
share of them, too. One worker whose script draws other batches than several is given theirs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from entrenar_py.check import evidence
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import controlled
from entrenar_py.check.command.asked import Asked
from entrenar_py.check.evidence.needs import ALONE, CONTROLLED, Need, Runs
from entrenar_py.shared.faults import (
    COMMON,
    IN_TURN,
    JOINED,
    MERGED,
    MIRRORED,
    OF_RECORDS,
    ORDERED,
    REPEATED,
    REPLAYED,
    Fault,
)
from entrenar_py.shared.trace import Shard, Trace

# Kind of the fault that controls runs -> the end of their names.
_ENDS = {
    COMMON: "common",
    ORDERED: "ordered",
    MIRRORED: "mirrored",
    REPEATED: "repeated",
    MERGED: "merged",
    **dict.fromkeys(OF_RECORDS, "replayed"),
}
_OF_ANY_SIZE = (COMMON, ORDERED)


class Controlling:
    """Follows the runs of a command for checks with `needs`, and plans the controlled ones."""

    def __init__(self, needs: Collection[Need]) -> None:
        self._is_wanted = CONTROLLED in needs
        self._plain: dict[int, Trace] = {}  # by number of workers
        # Runs on one worker, by the number of those whose batches it has, and how it came by them.
        self._joined: dict[int, tuple[Fault, Trace]] = {}
        self._witnesses: tuple[Trace, ...] = ()
        self._planned: set[Asked] = set()

    def after(self, asked: Asked, recorded: Trace) -> dict[str, Asked]:
        """Return by name the runs that are needed after the completed run `asked`."""
        is_other = any(fault.kind not in _ENDS for fault in asked.faults)
        if not self._is_wanted or asked.repeat or not asked.is_witness or is_other:
            return {}
        if asked.is_plain:
            self._plain[asked.world_size] = recorded
        elif len(asked.faults) == 1 and asked.faults[0].kind in JOINED:
            self._joined[int(asked.faults[0].value or 1)] = asked.faults[0], recorded
        else:
            self._witnesses += (recorded,)
        if asked.world_size != 1:  # the last one of a pair
            return {}
        runs: dict[str, Asked] = {}
        for size in (size for size in self._plain if size > 1):
            fault = self._joining(size)
            if fault is not None and size not in self._joined:
                joined = replace(asked, faults=(fault,))
                if joined not in self._planned:
                    runs[f"1-worker-{_ENDS[fault.kind]}-of-{size}"] = joined
                    continue
            for one in self._next(size, asked):
                made = _asked(asked, size, *one)
                fault = self._joined[size][0] if size in self._joined else None
                is_any = one[1] in _OF_ANY_SIZE or (fault is not None and fault.kind == MERGED)
                if fault is not None and made.world_size == 1 and is_any:
                    made = replace(made, faults=(*made.faults, fault))
                runs[_name(size, *one)] = made
        fresh = {name: run for name, run in runs.items() if run not in self._planned}
        self._planned.update(fresh.values())
        return fresh

    def _joining(self, size: int) -> Fault | None:
        """Return how one worker is to have the batches of `size` workers, None if it has them.

        Its loaders can be told to, if it has the batches of a worker. Batches of other sizes in
        each step, as many tokens as fit, may be so. Without loaders the batches of others take the
        place of its own.
        """
        runs = self._plain[1], self._plain[size]
        if not all(any(shard.ids for shard in run.of(Shard)) for run in runs):
            return None
        few, many = (run.scenario.batch_size for run in runs)
        drawn = [sum(len(s.ids) for s in shards) for shards in evidence.shards(runs[1]).values()]
        are_uneven = few < many and len({*drawn[:-1]}) > 1
        is_short = few * size == many or are_uneven
        by_content = [run.traits.sample_ids == "content" for run in runs]
        if all(by_content):
            alone, several = map(_micro_batches, runs)
            if is_short or (alone == several and controlled.has_other_rows(*runs)):
                return _fault(REPLAYED, size)
            in_turn = alone == size * several and controlled.has_other_rows(*runs)
            return _fault(IN_TURN, size) if in_turn else None
        return _fault(MERGED, size) if is_short and not any(by_content) else None

    def _next(self, size: int, last: Asked) -> list[tuple[int, str]]:
        """Return the numbers of workers, and the kind of control, of the next runs."""
        several = self._plain[size]
        alone = self._joined[size][1] if size in self._joined else self._plain[1]
        runs = Runs(several, {ALONE: (alone,)}, witnesses={CONTROLLED: self._witnesses})
        plain = Compared(runs=runs, model=alone, trace=several)
        is_ordered = not controlled.is_ordered_otherwise(plain)
        if is_ordered and not controlled.is_prevented(plain):
            return []
        kinds = {fault.kind for fault in last.faults} - {*JOINED}
        first = COMMON if is_ordered else ORDERED
        if not kinds and not (is_ordered and not controlled.is_by_chance(plain)):
            return [(size, first), (1, first)]
        if kinds <= {first} and controlled.alike(plain, first) is None:
            return [(size, MIRRORED), (1, MIRRORED)]
        if MIRRORED in kinds and controlled.mirrored(plain) is None:
            return [(1, REPEATED)]
        return []


def source_of(asked: Asked) -> str:
    """Return the name of the run whose batches one worker is given; "" if it has its own."""
    size = next((int(fault.value or 1) for fault in asked.faults if fault.kind in OF_RECORDS), 0)
    kinds = [fault.kind for fault in asked.faults if fault.kind not in OF_RECORDS]
    return "-".join([f"{size}-workers", *(_ENDS[kind] for kind in kinds)]) if size else ""


def are_kept(asked: Asked) -> bool:
    """Return whether the batches of a run may be given to one worker."""
    kinds = {fault.kind for fault in asked.faults}
    others = asked.repeat or asked.stops or asked.turn is not None
    return asked.world_size > 1 and not others and kinds <= {COMMON}


def _fault(kind: str, size: int) -> Fault:
    return Fault(kind=kind, step=0, value=str(size))


def _micro_batches(trace: Trace) -> int:
    """Return how many micro-batches a rank has in the first step."""
    first = [shard.rank for shard in trace.of(Shard) if shard.step == 0]
    return first.count(first[0]) if first else 0


def _asked(like: Asked, size: int, workers: int, kind: str) -> Asked:
    value = None if kind in _OF_ANY_SIZE else str(size)
    return replace(like, world_size=workers, faults=(Fault(kind=kind, step=0, value=value),))


def _name(size: int, workers: int, kind: str) -> str:
    """Return a run's name. Runs on one worker for several numbers of workers have different ones.

    With common random numbers, or one order, it is the same run.
    """
    of = f"-of-{size}" if workers == 1 and kind not in _OF_ANY_SIZE else ""
    return f"{workers}-worker{'' if workers == 1 else 's'}-{_ENDS[kind]}{of}"
