"""Witnesses: additional runs that show whether, and how closely, other runs can be compared.

- `Nudging`: a run with first weights that are changed by a few roundings. It is needed if rounding
  may be why two runs differ.
- `Shortening`: a run with short epochs, or with more steps, so that whole epochs are seen. Short
  epochs also show what a script does from some epoch on, if one of its lines compares the epoch's
  number. With epochs of two steps a script may fail, or its sampler may never end. Then one more
  run continues until it shows how the second epoch begins.
- `Controlling`: runs on several workers and on one, with the same random numbers for all samples.
  The order of samples is fixed, or all ranks get the same share. One worker is given the batches of
  several workers if its script draws different ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from entrenar_py.check import evidence
from entrenar_py.check.causes import rounding_bounds, run_comparison
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.clauses import parity, randomness
from entrenar_py.check.clauses.coverage import has_ended_epoch, in_epochs
from entrenar_py.check.clauses.knobs import KNOBS
from entrenar_py.check.command.run_plan import LONGER_MAX
from entrenar_py.check.command.run_settings import RunSettings
from entrenar_py.check.evidence.needs import ALONE, CONTROLLED, NUDGED, SHORTENED, Need, Runs
from entrenar_py.shared.faults import (
    COMMON,
    IN_TURN,
    JOINED,
    LONGER,
    MERGED,
    MIRRORED,
    OF_RECORDS,
    ORDERED,
    REPEATED,
    REPLAYED,
    Fault,
    has_kind,
)
from entrenar_py.shared.faults import NUDGED as NUDGED_WEIGHTS
from entrenar_py.shared.faults import SHORTENED as SHORTENED_EPOCHS
from entrenar_py.shared.trace import Shard, Trace
from entrenar_py.shared.verdict import Tally


class Nudging:
    """Decides, after each run of a command, whether a nudged run is needed."""

    def __init__(self, needs: Collection[Need]) -> None:
        self._is_wanted = NUDGED in needs
        self._first: Trace | None = None
        self._plain: dict[int, RunSettings] = {}  # number of workers -> settings of the plain run

    def read_again(self, settings: RunSettings, recorded: Trace) -> None:
        """Replace the first run's trace by `recorded`, read again, if it has these `settings`."""
        if self._plain and next(iter(self._plain.values())) == settings:
            self._first = recorded

    def after(self, settings: RunSettings, recorded: Trace) -> dict[str, RunSettings]:
        """Return name -> settings of the nudged run if the completed run needs it, else {}.

        A run needs it if the run differs from the first one by so little that rounding may be the
        cause. The nudged run has the smallest number of workers so far, and is made only once.
        """
        if settings.is_plain and not settings.repeat:
            self._plain[settings.world_size] = settings
        first, self._first = self._first, self._first or recorded
        if first is None or not (self._is_wanted and _must_be_like(settings)):
            return {}
        if not _may_be_rounding(first, recorded):
            return {}
        self._is_wanted = False
        few = min(self._plain)
        nudge = Fault(kind=NUDGED_WEIGHTS, step=0, value=repr(rounding_bounds.nudge(first)))
        name = f"{few}-worker{'' if few == 1 else 's'}-nudged"
        return {name: replace(self._plain[few], faults=(nudge,))}


def _must_be_like(settings: RunSettings) -> bool:
    return settings.turn is None or KNOBS[settings.turn.knob].limit is None


def _may_be_rounding(first: Trace, other: Trace) -> bool:
    trial = Tally("", observed=True)
    run_comparison.compare(trial, other, first, None)
    return trial.broken is not None and rounding_bounds.may_be_rounding(other, first)


_STEPS = 2  # steps of an epoch, as the second shows if it is shuffled; one if that is known


class Shortening:
    """Decides, after each run of a command, which additional run would show whole epochs."""

    def __init__(self, needs: Collection[Need]) -> None:
        self._is_wanted = SHORTENED in needs
        self._usual: Trace | None = None  # the first run

    def after(self, settings: RunSettings, recorded: Trace) -> dict[str, RunSettings]:
        """Return name -> settings of the next run, if too few ends of epochs were seen; else {}.

        Nothing is decided for a script that reports its samples, since it doesn't report those that
        an epoch leaves out.
        """
        if not self._is_wanted or settings.repeat or settings.stops:
            return {}
        if has_kind(settings.faults, SHORTENED_EPOCHS):
            self._is_wanted = False
            is_enough = _is_whole(recorded) or _is_whole(self._usual)
            return {} if is_enough else self._longer(settings)
        if not settings.is_plain or recorded.end.status != "completed" or self._usual is not None:
            return {}
        self._usual = recorded
        are_seen = recorded.traits.sample_ids == "seen"
        steps = 1 if _is_whole(recorded) else _STEPS
        is_enough = _is_whole(recorded) and not _has_later_epochs(recorded)
        if not are_seen or not in_epochs(Runs(recorded)) or is_enough:
            return {}
        count = steps * _num_micro_batches(recorded)
        fault = Fault(kind=SHORTENED_EPOCHS, step=0, value=str(count))
        return {f"{_workers(settings)}-short-epochs": replace(settings, faults=(fault,))}

    def _longer(self, short: RunSettings) -> dict[str, RunSettings]:
        """Return name -> settings of a run into its second epoch.

        Return {} if that needs too many steps.
        """
        assert self._usual is not None, "a run with short epochs follows it"
        scenario = self._usual.scenario
        second = math.ceil(randomness.ORDER_LENGTH_MIN / scenario.batch_size) + 1
        steps = math.ceil(scenario.num_samples / scenario.batch_size) + second
        if not scenario.num_steps < steps <= LONGER_MAX or "ended" not in self._usual.environment:
            return {}
        fault = Fault(kind=LONGER, step=0, value=str(steps))
        return {f"{_workers(short)}-two-epochs": replace(short, faults=(fault,))}


def _has_later_epochs(recorded: Trace) -> bool:
    epochs = {shard.epoch for shard in recorded.of(Shard)}
    return bool(recorded.traits.by_epoch) and 2 * len(epochs) <= recorded.scenario.num_steps


def _is_whole(recorded: Trace | None) -> bool:
    if recorded is None:
        return False
    is_shown = has_ended_epoch(recorded) and not randomness.lacks_second_epoch(Runs(recorded))
    return recorded.end.status == "completed" and is_shown


def _workers(settings: RunSettings) -> str:
    return f"{settings.world_size}-worker{'' if settings.world_size == 1 else 's'}"


def _num_micro_batches(trace: Trace) -> int:
    shards = trace.of(Shard)
    first = next(iter(shards), None)
    return max(1, sum((s.step, s.rank) == (first.step, first.rank) for s in shards if first))


# Kind of the fault that controls a run -> the suffix of the run's name.
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
    """Decides, after each run of a command, which controlled runs are needed."""

    def __init__(self, needs: Collection[Need]) -> None:
        self._is_wanted = CONTROLLED in needs
        self._plain: dict[int, Trace] = {}  # number of workers -> trace of the plain run
        # For runs on one worker with the batches of several workers: the number of these workers ->
        # the fault that gives the batches, and the trace.
        self._joined: dict[int, tuple[Fault, Trace]] = {}
        self._witnesses: tuple[Trace, ...] = ()
        self._planned: set[RunSettings] = set()

    def after(self, settings: RunSettings, recorded: Trace) -> dict[str, RunSettings]:
        """Return name -> settings of the runs that are needed after the completed `settings`."""
        is_other = any(fault.kind not in _ENDS for fault in settings.faults)
        if not self._is_wanted or settings.repeat or not settings.is_witness or is_other:
            return {}
        if settings.is_plain:
            self._plain[settings.world_size] = recorded
        elif len(settings.faults) == 1 and settings.faults[0].kind in JOINED:
            self._joined[int(settings.faults[0].value or 1)] = settings.faults[0], recorded
        else:
            self._witnesses += (recorded,)
        if settings.world_size != 1:  # the run on one worker is the last of a pair
            return {}
        runs: dict[str, RunSettings] = {}
        for size in (size for size in self._plain if size > 1):
            fault = self._joining(size)
            if fault is not None and size not in self._joined:
                joined = replace(settings, faults=(fault,))
                if joined not in self._planned:
                    runs[f"1-worker-{_ENDS[fault.kind]}-of-{size}"] = joined
                    continue
            for kind_of_run in self._next(size, settings):
                following = _asked(settings, size, *kind_of_run)
                fault = self._joined[size][0] if size in self._joined else None
                is_any = kind_of_run[1] in _OF_ANY_SIZE or (
                    fault is not None and fault.kind == MERGED
                )
                if fault is not None and following.world_size == 1 and is_any:
                    following = replace(following, faults=(*following.faults, fault))
                runs[_name(size, *kind_of_run)] = following
        fresh = {name: run for name, run in runs.items() if run not in self._planned}
        self._planned.update(fresh.values())
        return fresh

    def _joining(self, size: int) -> Fault | None:
        """Return the fault that gives one worker the batches of `size` workers, or None.

        None means that the worker has these batches already, or can't get them. If it has the
        batches of one of the workers, its loaders can merge them. This is also likely if batch
        sizes vary by step, as with as many samples as a token limit allows. Without loaders,
        recorded batches replace the worker's own.
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
            if is_short or (alone == several and parity.has_other_rows(*runs)):
                return _fault(REPLAYED, size)
            in_turn = alone == size * several and parity.has_other_rows(*runs)
            return _fault(IN_TURN, size) if in_turn else None
        return _fault(MERGED, size) if is_short and not any(by_content) else None

    def _next(self, size: int, last: RunSettings) -> list[tuple[int, str]]:
        """Return (number of workers, kind of control) for each of the next runs."""
        several = self._plain[size]
        alone = self._joined[size][1] if size in self._joined else self._plain[1]
        runs = Runs(several, {ALONE: (alone,)}, witnesses={CONTROLLED: self._witnesses})
        plain = Compared(runs=runs, model=alone, trace=several)
        is_ordered = not parity.is_ordered_otherwise(plain)
        if is_ordered and not parity.is_prevented(plain):
            return []
        kinds = {fault.kind for fault in last.faults} - {*JOINED}
        first = COMMON if is_ordered else ORDERED
        if not kinds and not (is_ordered and not parity.is_by_chance(plain)):
            return [(size, first), (1, first)]
        if kinds <= {first} and parity.alike(plain, first) is None:
            return [(size, MIRRORED), (1, MIRRORED)]
        if MIRRORED in kinds and parity.mirrored(plain) is None:
            return [(1, REPEATED)]
        return []


def source_of(settings: RunSettings) -> str:
    """Return the name of the run that gives its batches to this one; "" if it has its own."""
    size = next((int(fault.value or 1) for fault in settings.faults if fault.kind in OF_RECORDS), 0)
    kinds = [fault.kind for fault in settings.faults if fault.kind not in OF_RECORDS]
    return "-".join([f"{size}-workers", *(_ENDS[kind] for kind in kinds)]) if size else ""


def are_kept(settings: RunSettings) -> bool:
    """Return whether the batches of a run may be given to one worker, and so are stored."""
    kinds = {fault.kind for fault in settings.faults}
    others = settings.repeat or settings.stops or settings.turn is not None
    return settings.world_size > 1 and not others and kinds <= {COMMON}


def _fault(kind: str, size: int) -> Fault:
    return Fault(kind=kind, step=0, value=str(size))


def _micro_batches(trace: Trace) -> int:
    first = [shard.rank for shard in trace.of(Shard) if shard.step == 0]
    return first.count(first[0]) if first else 0


def _asked(like: RunSettings, size: int, workers: int, kind: str) -> RunSettings:
    value = None if kind in _OF_ANY_SIZE else str(size)
    return replace(like, world_size=workers, faults=(Fault(kind=kind, step=0, value=value),))


def _name(size: int, workers: int, kind: str) -> str:
    # With common random numbers, or a fixed order, the run is the same for any size.
    of = f"-of-{size}" if workers == 1 and kind not in _OF_ANY_SIZE else ""
    return f"{workers}-worker{'' if workers == 1 else 's'}-{_ENDS[kind]}{of}"
