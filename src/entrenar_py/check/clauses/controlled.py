"""The pair of runs by which several workers are compared with one.

It is the plain one, unless random numbers rightly differ between the two, one worker has samples in
another order, or samples that are cut otherwise act on each other. Then it is a pair in which that
was controlled: random numbers are alike for all samples, and besides samples come in one order, or
all ranks have the same share, and so does one worker.

A loss that couples samples may be meant to couple those of a rank, or of all ranks. By the first
meaning ranks that have one share train as one worker does on this share, by the second one as on so
many copies of it. If they do neither, and an equation explains that, or the two agree with each
other, no meaning does. A loss that is a sum over samples has the second meaning, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

from entrenar_py.check import evidence
from entrenar_py.check.causes import (
    copies,
    presuppositions,
    random_draws,
    rounding_bounds,
    run_comparison,
)
from entrenar_py.check.causes.presuppositions import WITH_ONE_WORKER
from entrenar_py.check.causes.run_comparison import SINGLE, Compared
from entrenar_py.check.clauses import oracles
from entrenar_py.check.evidence.needs import CONTROLLED
from entrenar_py.check.evidence.run_names import Words
from entrenar_py.shared.faults import COMMON, MIRRORED, ORDERED, REPEATED
from entrenar_py.shared.trace import Shard, Trace, Update
from entrenar_py.shared.verdict import Tally

_NUMBERS = "with random numbers that are alike for all samples"
_ORDER = "with one order of samples for any number of workers"
_SHARES = "with the same samples on all ranks"
_COUNTED = ", where a term of the loss may count once for each rank"


def is_prevented(compared: Compared) -> bool:
    """Return whether draws, or coupled samples, alone keep two runs from being compared."""
    if compared.trace.scenario.workload != "own":
        return False
    masked = not oracles.same_masks(compared.model, compared.trace)
    return presuppositions.are_prevented(WITH_ONE_WORKER, compared, masked=masked)


def is_by_chance(compared: Compared) -> bool:
    """Return whether it is random numbers that keep two runs from being compared."""
    drawn = random_draws.other_contents(compared) or random_draws.drawn_by_rank(compared)
    return bool(drawn or compared.trace.scenario.dropout)


def is_ordered_otherwise(compared: Compared) -> bool:
    """Return whether ranks draw their own samples in step 0, and one worker as many others.

    Ranks that draw the same ones hold parts of a model, and must have the same.
    """
    runs = (compared.model, compared.trace)
    if any(run.scenario.workload != "own" or run.traits.sample_ids == "content" for run in runs):
        return False
    due, got = map(_first_samples, runs)
    samples, others = Counter(chain(*due.values())), Counter(chain(*got.values()))
    have_their_own = len({*map(frozenset, got.values())}) == compared.trace.scenario.world_size
    return have_their_own and samples != others and samples.total() == others.total()


def has_other_rows(model: Trace, trace: Trace) -> bool:
    """Return whether the runs have other samples in step 0."""
    due, got = (Counter(chain(*_first_samples(run).values())) for run in (model, trace))
    return due != got


def _first_samples(trace: Trace) -> dict[int, list[int]]:
    """Return the samples of step 0 by rank."""
    drawn: dict[int, list[int]] = defaultdict(list)
    for shard in evidence.shards(trace).get(0, ()):
        drawn[shard.rank].extend(shard.ids)
    return drawn


def pair(tally: Tally, compared: Compared) -> tuple[Compared, Words]:
    """Return the runs to compare in place of the plain ones, with the words for findings."""
    if is_ordered_otherwise(compared) or is_prevented(compared):
        for words, controlled in (
            (_NUMBERS, alike(compared, COMMON)),
            (_ORDER, alike(compared, ORDERED)),
            (_SHARES, mirrored(compared)),
        ):
            if controlled is not None:
                tally.note(f"compared {words}")
                is_counted = words == _SHARES and not _agree(controlled)
                before = f"{words}{_COUNTED if is_counted else ''}: "
                return controlled, replace(SINGLE, before=before)
    return compared, SINGLE


def alike(compared: Compared, kind: str) -> Compared | None:
    """Return the runs with common random numbers, or with one order of samples, too.

    Return None if these can't be compared either.
    """
    controlled = _controlled(compared, kind, kind)
    if controlled is None or is_ordered_otherwise(controlled) or not _are_comparable(controlled):
        return None
    return controlled if _tells(compared, controlled) else None


def mirrored(compared: Compared) -> Compared | None:
    """Return the run whose ranks have one share, and the one on one worker that it must be like.

    Return None if they can't be compared, or if what the loss of a share is meant to be decides.
    """
    once, again = (_controlled(compared, kind, MIRRORED) for kind in (MIRRORED, REPEATED))
    if once is None or not _have_one_share(once.trace):
        return None
    once = replace(once, model=_for_each(once.model, compared.trace.scenario.world_size))
    if not _agree(once):
        if again is None:
            return None
        if _agree(again) or (once.explanation is None and again.explanation is not None):
            once = again
        elif once.explanation is None and not _agree(replace(once, trace=again.model)):
            return None
    return once if _is_decided(compared, once) else None


def _is_decided(plain: Compared, mirrored: Compared) -> bool:
    """Return whether mirrored runs decide: equal ones do only where a loss couples samples."""
    return _are_comparable(mirrored) and (_is_coupled(plain) or not _agree(mirrored))


def _is_coupled(compared: Compared) -> bool:
    """Return whether the first loss is another one on several workers, or unknown.

    It is the same if samples don't act on each other, and gradients differ for another reason. What
    each rank does to its own before they are added (clipping by value) is alike for equal ranks.
    """
    return not copies.have_one_loss(compared)


def _agree(compared: Compared) -> bool:
    """Return whether two runs are comparable, and their gradients were found to be the same."""
    trial = Tally("", observed=True)
    model, trace = compared.model, compared.trace
    sensitivity = compared.sensitivity
    num_gradients = run_comparison.compare(trial, model, trace, None, sensitivity=sensitivity)
    return num_gradients > 0 and trial.broken is None and _are_comparable(compared)


def _are_comparable(compared: Compared) -> bool:
    """Return whether two runs can be compared. A NaN may come from rows that are alike."""
    updates = (*compared.model.of(Update), *compared.trace.of(Update))
    is_finite = all(update.finite for update in updates)
    return is_finite and presuppositions.are_comparable(WITH_ONE_WORKER, compared)


def _tells(plain: Compared, controlled: Compared) -> bool:
    """Return whether more than rounding is left of the gradients where numbers are alike.

    What tells samples apart by chance (the mean of several answers) may leave none.
    """
    expected = evidence.updates(plain.model)
    floor = rounding_bounds.Bounds.of(expected, plain.model, plain.trace).gradient_floor
    return run_comparison.tells(controlled.model, controlled.trace, floor=floor)


def _controlled(compared: Compared, alone: str, several: str) -> Compared | None:
    """Return the runs in which the faults `alone` and `several` are planned, None without them."""
    runs = compared.runs.witnesses.get(CONTROLLED, ())
    size = compared.trace.scenario.world_size
    model, trace = _find(runs, alone, 1, size), _find(runs, several, size, size)
    return None if model is None or trace is None else replace(compared, model=model, trace=trace)


def _find(runs: Iterable[Trace], kind: str, num_workers: int, shared_by: int) -> Trace | None:
    return next(
        (
            run
            for run in runs
            for fault in run.scenario.faults
            if run.scenario.world_size == num_workers and fault.kind == kind
            if fault.value is None or int(fault.value) == shared_by
        ),
        None,
    )


def _have_one_share(trace: Trace) -> bool:
    """Return whether all ranks were given the same samples in each micro-batch."""
    by_rank: Mapping[int, list[Shard]] = defaultdict(list)
    for shard in trace.of(Shard):
        by_rank[shard.rank].append(shard)
    shares = [*by_rank.values()]
    is_whole = len(shares) == trace.scenario.world_size
    return is_whole and all(_are_alike(shares[0], other) for other in shares)


def _are_alike(first: list[Shard], second: list[Shard]) -> bool:
    return len(first) == len(second) and all(
        (mine.step, mine.ids) == (theirs.step, theirs.ids)
        and all(
            random_draws.are_alike(due, got, random_draws.CONTENTS_BOUND_MOVED)
            for due, got in zip(mine.contents, theirs.contents, strict=False)
        )
        for mine, theirs in zip(first, second, strict=True)
    )


def _for_each(trace: Trace, num_ranks: int) -> Trace:
    """Return a run of one worker whose samples are counted as those of so many ranks."""

    def counted(shard: Shard) -> Shard:
        return replace(shard, ids=shard.ids * num_ranks, contents=shard.contents * num_ranks)

    events = (counted(event) if isinstance(event, Shard) else event for event in trace.events)
    return replace(trace, events=tuple(events))
