"""Read traces: their runs, steps, ranks and tensors. Nothing is judged here.

A trace is a list of events in order of time. Judges read it by step and rank (`updates`, `shards`,
`ranks_by_step`), never by index: ranks join and leave, a resume undoes steps, and a rank that was
killed lacks its last steps. Steps that a resume undid are left out everywhere (`Trace.standing`).

A fact that a trace does not record is unknown, and never equal to anything. So functions return
None for an unknown value, and an empty mapping only where nothing was recorded. Every tensor has a
digest, and may also have values or a sketch. `vectors` and `elements` are None if any tensor has
neither, since a comparison of the remaining tensors would look complete. `usable` alone counts
failed runs as missing, with the reason of the failure.

This file has the functions that most judges need. The package's modules compare tensors
(`closeness`), add up gradients (`step_sums`), say what is missing (`missing`, `facts`) and define
which runs are needed (`needs`). They import nothing from `causes`: reading evidence requires no
theory of what went wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check.evidence import run_names
from entrenar_py.check.evidence.needs import CALM, Traces
from entrenar_py.shared.faults import SURVIVED
from entrenar_py.shared.trace import (
    E,
    Event,
    Membership,
    Shard,
    Start,
    Synchronised,
    TensorRecord,
    Tensors,
    Trace,
    Update,
    record_sketch,
    record_tensor,
)
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import counted, named

Values = NDArray[Any]


def usable(traces: Iterable[Trace], tally: Tally) -> list[Trace]:
    """Return the traces of runs that did not fail. Count each failed run as missing in `tally`."""
    kept = []
    for trace in traces:
        if trace.end.status == "failed":
            scenario = trace.scenario
            run = f"{scenario.system} with {scenario.world_size} workers did not run to an end"
            if tally.observed:
                run = f"{run_names.of(scenario)} failed"
            tally.miss(f"{run}: {trace.end.reason}")
        else:
            kept.append(trace)
    return kept


def usable_runs(runs: Traces, tally: Tally) -> Traces:
    """Return `runs` without the failed ones. Count each failed run as missing in `tally`."""
    usable(runs, tally)
    return runs.chosen(lambda trace: None if trace.end.status == "failed" else trace)


def is_as_trained(trace: Trace) -> bool:
    """Return whether all faults of the scenario leave the training results unchanged."""
    return all(fault.kind in SURVIVED for fault in trace.scenario.faults)


def could_run(tally: Tally, trace: Trace) -> bool:
    """Return whether the run of `trace` started. If not, count it as missing, with the reason."""
    if trace.end.status == "failed" and not trace.of(Start):
        tally.miss(f"{trace.scenario.system} could not be run: {trace.end.reason}")
        return False
    return True


def calm_run(tally: Tally, trace: Trace, runs: Traces) -> Trace | None:
    """Return the run without faults that must have the same bits as `trace`.

    If there is none to compare with, count the reason as missing and return None.
    """
    if not could_run(tally, trace):
        return None
    if "bitwise" not in trace.promises:
        tally.miss(f"{trace.scenario.system} promises no bits to compare")
        return None
    if not runs.of(CALM):
        tally.miss("no undisturbed run of the same training to compare with: record one, too")
        return None
    return runs.of(CALM)[0]


def started_alone(traces: Iterable[Trace]) -> str:
    """Return advice for a command that can only start one worker; "" for any other command.

    With one worker, nothing distributed was tested.
    """
    if {(trace.traits.starts, trace.scenario.world_size) for trace in traces} != {("one", 1)}:
        return ""
    return (
        "the command starts one worker, so nothing distributed was tested: put {world_size} where "
        "the command takes the number of workers"
    )


def place(trace: Trace, event: Event) -> dict[str, Any]:
    """Return the fields of a counterexample that locate `event`, with scenario and shapes."""
    known = {
        name: getattr(event, name) for name in ("step", "rank", "shard") if hasattr(event, name)
    }
    return {**known, "scenario": trace.scenario, "shapes": trace.shapes}


def updates(trace: Trace) -> dict[int, dict[int, Update]]:
    """Return step -> rank -> its last update in the step.

    Updates that a resume undid are left out.
    """
    by_step: dict[int, dict[int, Update]] = defaultdict(dict)
    for update in trace.standing.of(Update):
        by_step[update.step][update.rank] = update
    return dict(by_step)


def shards(trace: Trace) -> dict[int, list[Shard]]:
    """Return step -> shards, sorted by number, of completed steps that no resume undid."""
    kept = trace.standing
    committed = {update.step for update in kept.of(Update)}
    by_step: dict[int, list[Shard]] = defaultdict(list)
    for shard in kept.of(Shard):
        if shard.step in committed:
            by_step[shard.step].append(shard)
    return {step: sorted(part, key=lambda s: (s.shard, s.rank)) for step, part in by_step.items()}


def replaced(trace: Trace, kind: type[E], changes: Callable[[E], Mapping[str, Any]]) -> Trace:
    """Return `trace` with the fields of each event of type `kind` replaced by `changes(event)`."""
    events = (replace(e, **changes(e)) if isinstance(e, kind) else e for e in trace.events)
    return replace(trace, events=tuple(events))


def with_losses(trace: Trace) -> Trace:
    """Return `trace` with missing losses of updates computed from the shards of their steps.

    If the scale of the losses is unknown (`Traits.losses` is "backward"), return `trace` unchanged.
    """
    if trace.traits.losses == "backward" or all(
        update.loss is not None for update in trace.of(Update)
    ):
        return trace
    means = {}
    for step, of_step in shards(trace).items():
        weight = sum(shard.weight for shard in of_step)
        sums = [shard.loss_sum for shard in of_step if shard.loss_sum is not None]
        if weight and len(sums) == len(of_step):
            means[step] = sum(sums) / weight
    return replaced(
        trace,
        Update,
        lambda update: {"loss": means.get(update.step)} if update.loss is None else {},
    )


def non_finite(tensors: Tensors) -> tuple[str, int | None] | None:
    """Return the tensor name and element index of the first recorded NaN or Inf, or None.

    The index is None if the tensor has only a sketch. The result is None if all recorded values are
    finite.
    """
    for name, record in tensors.items():
        if record.sketch is not None and not math.isfinite(record.square() or 0.0):
            return name, None
        values = record.values()
        if values is not None and not (finite := np.isfinite(values)).all():
            return name, int(finite.argmin())
    return None


def any_rank(by_rank: Mapping[int, Update]) -> Update:
    """Return the update of the lowest rank, for facts that are equal on all ranks."""
    return by_rank[min(by_rank)]


def vectors(tensors: Tensors) -> dict[str, Values] | None:
    """Return each tensor's flat elements or projection; None if there are no tensors.

    Also None if any tensor has neither values nor a sketch.
    """
    vector_of = {name: record.vector() for name, record in tensors.items()}
    known = {name: vector for name, vector in vector_of.items() if vector is not None}
    return known if known and len(known) == len(vector_of) else None


def elements(tensors: Tensors) -> dict[str, Values] | None:
    """Return each tensor's flat elements, or those in its sketch; None if there are no tensors.

    Also None if any tensor has neither values nor a sketch.
    """
    elements_of = {name: record.elements() for name, record in tensors.items()}
    known = {name: found for name, found in elements_of.items() if found is not None}
    return known if known and len(known) == len(elements_of) else None


def digests(tensors: Tensors) -> dict[str, str]:
    """Return the digest of each tensor."""
    return {name: record.digest for name, record in tensors.items()}


def are_equal(one: Tensors, other: Tensors) -> bool:
    """Return whether `one` and `other` have the same tensor names with the same bits."""
    return digests(one) == digests(other)


def first_difference(one: Tensors, other: Tensors) -> str | None:
    """Return the name of the first tensor that both have with different bits, or None."""
    return next((n for n in one if n in other and one[n].digest != other[n].digest), None)


def differ(name: str, of_ranks: Iterable[Tensors]) -> bool:
    """Return whether the values of tensor `name`, where recorded, differ between ranks."""
    return len({tensors[name].digest for tensors in of_ranks if name in tensors}) > 1


def times(tensors: Tensors, factor: float) -> Tensors:
    """Return the tensors multiplied by `factor`.

    Those with neither values nor a sketch are left out.
    """
    return {name: scaled for name, t in tensors.items() if (scaled := _scaled(t, factor))}


def _scaled(record: TensorRecord, factor: float) -> TensorRecord | None:
    if record.sketch is not None:
        return record_sketch(record.sketch.times(factor), record.dtype)
    values = record.values()
    if values is None:
        return None
    return record_tensor(factor * values.astype(np.float64), values=True)


def has_values(tensors: Tensors) -> bool:
    """Return whether at least one tensor was recorded with its values or a sketch."""
    return any(record.data is not None or record.sketch for record in tensors.values())


def begins_anew(trace: Trace) -> set[int]:
    """Return the steps before which a script put back the weights with which a rank started."""
    starts = {start.rank: start.weights for start in trace.of(Start) if not start.resumed}
    return {
        update.step
        for update in trace.of(Update)
        if update.edited
        and all(
            (start := starts.get(update.rank, {}).get(name)) and start.digest == record.digest
            for name, record in update.edited.items()
        )
    }


def ranks_by_step(trace: Trace) -> Iterator[tuple[int, Mapping[int, Update]]]:
    """Yield each step with its updates by rank, in step order."""
    yield from sorted(updates(trace).items())


def unseen_gradients(trace: Trace) -> str:
    """Return the reason why the norm of the whole gradient is unknown; "" if it is known.

    It is unknown if a parameter moves without a recorded gradient. The gradient of a DTensor is not
    recorded if it is one term of a sum over ranks, or if it is split differently from its
    parameter.
    """
    start = next(iter(trace.of(Start)), None)
    if start is None:
        return ""
    updates = [update for update in trace.of(Update) if update.rank == start.rank]
    seen = {name for update in updates for name in update.gradient}
    moved = {
        name
        for update in updates
        for name, record in update.weights.items()
        if name in start.trainable
        and name not in seen
        and name not in update.edited
        and start.weights.get(name) != record
    }
    if not seen or not moved:
        return ""
    return f"the norm of the gradient is unknown: the gradient of {min(moved)} was not recorded"


def passes_begun_late(trace: Trace) -> set[tuple[int, int]]:
    """Return the (step, shard) pairs of passes over a sharded model that lack a gradient, rightly.

    After each start of a rank, a script without the line `observe` is observed only from the middle
    of its first pass on. The gradient of that pass is not recorded.
    """
    late: set[tuple[int, int]] = set()
    begun = set[int]()  # ranks that have made their first pass after a start
    for event in trace.events if trace.traits.shared else ():
        if isinstance(event, Start):
            begun.discard(event.rank)
        elif isinstance(event, Shard) and event.rank not in begun:
            begun.add(event.rank)
            if not event.gradient:
                late.add((event.step, event.shard))
    return late


# --- which ranks took part in a step --------------------------------------------------------------


class Stay(NamedTuple):
    """A range of steps, `first <= step < end`, in which a rank took part."""

    first: int
    end: float


def stays(trace: Trace) -> dict[int, list[Stay]]:
    """Return rank -> its stays. A stay lasts from a start until the rank leaves.

    If the remaining ranks resume at an earlier step, a rank that had left doesn't take part in the
    repeated steps: its stay ends at the earlier step.
    """
    stays_of: dict[int, list[Stay]] = {}
    for event in trace.standing.events:
        if isinstance(event, Start):
            if event.resumed:
                stays_of = {rank: _cut(of_rank, event.step) for rank, of_rank in stays_of.items()}
            of_rank = stays_of.setdefault(event.rank, [])
            if not of_rank or of_rank[-1].end < math.inf:
                of_rank.append(Stay(event.step, math.inf))
        elif isinstance(event, Membership) and event.change == "left":
            of_rank = stays_of.get(event.rank, [])
            if of_rank and of_rank[-1].end == math.inf:
                of_rank[-1] = of_rank[-1]._replace(end=event.step)
    return stays_of


def _cut(of_rank: Sequence[Stay], step: int) -> list[Stay]:
    return [one if one.end == math.inf else one._replace(end=min(one.end, step)) for one in of_rank]


def members(stays_of: Mapping[int, Sequence[Stay]], step: int) -> set[int]:
    """Return the ranks that took part in `step`."""
    return {
        rank
        for rank, of_rank in stays_of.items()
        if any(stay.first <= step < stay.end for stay in of_rank)
    }


def ghosts(trace: Trace) -> list[Update]:
    """Return the updates that a rank recorded between leaving and coming back."""
    gone: dict[int, int] = {}
    updates = []
    for event in trace.standing.events:
        if isinstance(event, Start):
            gone.pop(event.rank, None)
            if event.resumed:
                gone = {rank: min(step, event.step) for rank, step in gone.items()}
        elif isinstance(event, Membership):
            if event.change == "left":
                gone[event.rank] = event.step
            else:
                gone.pop(event.rank, None)
        elif isinstance(event, Update) and event.step >= gone.get(event.rank, math.inf):
            updates.append(event)
    return updates


# --- steps that a trainer skipped -----------------------------------------------------------------


def skipped(trace: Trace) -> set[int]:
    """Return the finite steps in which no rank changed its weights or optimizer state.

    The set is empty unless the workload is a user's own.
    """
    if trace.scenario.workload != "own":
        return set()
    state_of: dict[int, tuple[Tensors, Tensors]] = {}
    rested: dict[tuple[int, int], bool] = {}
    for event in trace.standing.events:
        if isinstance(event, Start):
            state_of[event.rank] = event.weights, event.optimizer
        elif isinstance(event, Update):
            now = event.weights, event.optimizer
            before = state_of.get(event.rank)
            rests = (
                bool(now[0])
                and before is not None
                and all(
                    digests(was) == digests(held) for was, held in zip(before, now, strict=True)
                )
            )
            rested[event.step, event.rank] = rests and event.finite  # no skip if NaN stays
            state_of[event.rank] = now
    ranks = {rank for _, rank in rested}
    steps = {step for step, _ in rested}
    return {step for step in steps if all(rested.get((step, rank)) for rank in ranks)}


def skipped_without_gradients(trace: Trace) -> set[int]:
    """Return the skipped steps in which no rank recorded a gradient."""
    by_step = updates(trace)
    return {
        step
        for step in skipped(trace)
        if not any(update.gradient for update in by_step[step].values())
    }


def too_few_left(trace: Trace, *, least: int) -> str:
    """Return the reason why fewer than `least` steps changed anything; "" if more did."""
    steps = updates(trace).keys()
    left = len(steps - skipped_without_gradients(trace))
    if not steps or left >= least:
        return ""
    return (
        f"{left or 'none'} of {counted(len(steps), 'step')} changed any weight, and the others "
        "applied no gradient, as if a GradScaler had skipped them because its scale was too "
        "large: run longer (--steps), or begin with a smaller scale"
    )


def skip_words(steps: Iterable[int]) -> str:
    """Return words such as `skipped steps 4, 5 on all ranks`."""
    return f"{named('skipped step', steps, most=5)} on all ranks"


# --- other names, and epochs ----------------------------------------------------------------------


# Fields of events that map or list tensor names, except `optimizer` and `extra`.
_BY_NAME = (
    *("weights", "buffers", "local", "shapes", "gradient", "rates"),
    *("kept", "summed", "edited"),
)
_LISTED = ("trainable", "frozen", "decayed")


def event_renamed(event: Event, named: Mapping[str, str]) -> Event:
    """Return `event` with its tensors renamed; `named` maps old names to new ones."""
    if not isinstance(event, Start | Update | Shard | Synchronised):
        return event

    def of(key: str, place: int) -> str:
        parts = [*key.partition("/")]  # parameter/key (optimizer), label/parameter (copy)
        parts[place] = named.get(parts[place], parts[place])
        return "".join(parts)

    changes: dict[str, Any] = {}
    for field in _BY_NAME:
        if tensors := getattr(event, field, None):
            changes[field] = {named.get(name, name): value for name, value in tensors.items()}
    for field in _LISTED:
        if names := getattr(event, field, None):
            changes[field] = tuple(named.get(name, name) for name in names)
    for field, place in (("optimizer", 0), ("extra", -1)):
        if tensors := getattr(event, field, None):
            changes[field] = {of(key, place): value for key, value in tensors.items()}
    return replace(event, **changes)


def derived_epochs(
    events: Sequence[Event], population: Collection[int] | None
) -> list[Event] | None:
    """Return `events` with epochs computed from the samples; None if they can't be computed.

    An epoch is over when each sample of `population` (None: of all samples in the run) was drawn
    once. If a step draws a sample again before that, it could be an error or the beginning of an
    epoch, so the result is None. The run must begin at step 0.
    """
    by_step: dict[int, list[Shard]] = defaultdict(list)
    for event in events:
        if isinstance(event, Start) and event.step > 0:
            return None
        if isinstance(event, Shard):
            by_step[event.step].append(event)
    drawn = {id_ for shards in by_step.values() for shard in shards for id_ in shard.ids}
    whole = drawn if population is None else set(population)
    epochs: dict[int, int] = {}
    epoch, seen = 0, set[int]()
    for step, shards in sorted(by_step.items()):
        ids = [id_ for shard in shards for id_ in shard.ids]
        if len(set(ids)) < len(ids) or any(shard.unknown for shard in shards):
            return None
        if not seen.isdisjoint(ids):
            if not seen >= whole:
                return None
            epoch, seen = epoch + 1, set()
        seen.update(ids)
        epochs[step] = epoch
    return [
        replace(event, epoch=epochs[event.step]) if isinstance(event, Shard) else event
        for event in events
    ]
