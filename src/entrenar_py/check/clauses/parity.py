"""F-DP-005: training with many workers is the same as training with one.

Up to three comparisons are made. Losses from step 100 on are compared within the published bound.
Losses and gradients of the first steps are compared, within float32 rounding, with an independently
written single-device trainer. If the trainer promises the same bits for any number of workers, bits
are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
from entrenar_py.check.clauses import knobs, plans, same_bits
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import facts, missing, rounds, run_names
from entrenar_py.check.evidence.needs import ALONE, CONTROLLED, NUDGED, ORACLE, REPEATED, Traces
from entrenar_py.check.evidence.run_names import Words
from entrenar_py.shared import faults
from entrenar_py.shared.trace import Shard, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally

PUBLISHED_TOLERANCE = 0.01  # relative


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Compare every run with the oracle's, and runs that promise the same bits with each other."""
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    tolerance = PUBLISHED_TOLERANCE if invariant.tolerance is None else invariant.tolerance
    compare_with_oracle(tally, runs, tolerance)
    same_bits.compare_worker_counts(tally, runs.own)
    struck = (
        "only runs with planted values or faults were given, and these can't be "
        "compared with one worker's"
    )
    return tally.finding(nothing=missing_model(tally, runs) or struck)


def compare_with_oracle(tally: Tally, runs: Traces, tolerance: float | None) -> list[int]:
    """Compare the first steps of runs with the oracle's run, within rounding.

    If `tolerance` is not None, losses from step 100 on are also compared, within `tolerance`. No
    oracle can run a user's own trainer, so it is compared with its run on one worker. A run with a
    turned knob is compared with the base.

    Return, for each run that took a step, the number of averaged gradients that were compared.
    """
    first = _Followed.of(tally, runs, tolerance)
    second = _Followed()
    if runs.undropped is not None:
        second = _Followed.of(tally, runs.undropped, tolerance)
    for trace in first.masked + second.masked:
        excused = trace.draws_by_shard or second.num_followed or not first.num_followed
        told = other_masks(trace)
        tally.note(told) if excused else tally.miss(told)
    return first.num_gradients + second.num_gradients + knobs.compare(tally, runs)


@dataclass
class _Followed:
    """The numbers of compared runs and gradients, and the runs left out for their dropout masks."""

    num_followed: int = 0
    num_gradients: list[int] = field(default_factory=list)
    masked: list[Trace] = field(default_factory=list)

    @classmethod
    def of(cls, tally: Tally, runs: Traces, tolerance: float | None) -> _Followed:
        done, model = cls(), model_of(runs)
        # Test this early, so that its reason is reported first.
        if model is None and runs.base is not None:
            compared = Compared(runs=runs, model=runs.base, trace=runs.base)
            presuppositions.comparable(tally, presuppositions.SAMPLES, compared)
        base = () if runs.base is None else (runs.base,)
        for trace in (*base, *runs.of(ALONE)):
            if model is None or trace is model or not evidence.is_as_trained(trace):
                continue
            plain = Compared(runs=runs, model=model, trace=trace)
            compared, words = controlled_pair(tally, plain)
            is_masked = compared is plain and not knobs.same_masks(model, trace)
            if is_masked and not _is_explained(compared):
                done.masked.append(trace)
                continue
            if not runs.of(ORACLE):
                tally.note("compared with its own run on one worker, which may have the same bug")
            count = _compare(tally, compared, tolerance, words)
            if trace.of(Update):
                done.num_gradients.append(count)
            done.num_followed += 1
        return done


def _is_explained(compared: Compared) -> bool:
    # With different masks, no equation could explain the difference.
    own = compared.trace.scenario.workload == "own"
    return own and presuppositions.aligned(compared).explanation is not None


def _compare(
    tally: Tally, compared: Compared, tolerance: float | None, words: run_names.Words
) -> int:
    """Compare a run with its model if possible. Return how many gradients were compared."""
    left = presuppositions.comparable(tally, presuppositions.WITH_ONE_WORKER, compared)
    return (
        0
        if left is None
        else run_comparison.compare(
            tally, left.model, left.trace, tolerance, words, sensitivity=left.sensitivity
        )
    )


# --- the run on a single device -------------------------------------------------------------------

# Finds the run on a single device with which a training run is compared, and judges nothing. It is
# a run of the independent trainer. For a user's own trainer, which the independent one can't
# reproduce, it is the user's run on one worker.

# Field of a scenario -> how runs of one command differ in it, with advice. The order matters, since
# the first difference often causes the others.
_DIFFERENT: Mapping[str, str] = {
    "batch_size": "one worker trains on batches of {alone} samples, {workers} on {several}: divide "
    "the global batch by the number of workers ({{share:GLOBAL}} in the command does)",
    "num_samples": "one worker has a data set of {alone} samples, {workers} workers one of "
    "{several}: give all runs the same data",
    "num_steps": "one worker makes {alone} steps, {workers} make {several}: make the same number "
    "of steps with any number of workers ({{steps}} in the command says how many)",
    "learning_rate": "one worker begins with learning rate {alone}, {workers} with {several}: "
    "if it is scaled by the number of workers, turn that off for the check",
}
# Used in place of the numbers of samples if these are guessed from the highest id that was drawn.
_OTHER_SAMPLES = (
    "one worker draws different samples from {workers} workers: draw each "
    "batch for all workers, by the same seed, and give each its share"
)


def model_of(runs: Traces) -> Trace | None:
    """Return the single-device run that the others are compared with, or None."""
    return next(iter(runs.of(ORACLE, ALONE)), None)


def missing_model(tally: Tally, runs: Traces) -> str:
    """Return why no run can be compared with one on a single device, and what to do about it.

    Return "" if a run can be compared.
    """
    model = model_of(runs)
    for trace in runs.own:
        if model is not None and trace is not model:
            return "" if knobs.same_masks(model, trace) else other_masks(trace) + _instead(trace)
    if tally.observed:
        return _another_training(tally, runs)
    if reason := _difference(runs, ["batch_size"]):
        return reason
    reason = (
        "no run of the same training on one worker to compare with: record one with world_size=1"
    )
    if runs.base is not None and runs.base.scenario.world_size == 1:
        reason = "no run on several workers: record the same training with a larger world_size"
    return f"{reason}, and all else equal{runs.nearly(ALONE)}"


def _another_training(tally: Tally, runs: Traces) -> str:
    """Return why a script's run on one worker can't be compared with its run on several.

    Often the global batch differs: most scripts have an option for the batch of one worker.
    """
    near = runs.near.get(ALONE)
    if near is None or runs.base is None:
        return "no run on several workers and one on one worker that both ended without failing"
    for run in (runs.base, near.run):
        # Then the sizes of batch and data are guesses.
        if not any(shard.ids for shard in run.of(Shard)):
            return missing.nothing(tally, "the samples of each step are unknown", facts.IDS)
    others = ", ".join(near.fields)
    otherwise = f"one worker and {runs.base.scenario.world_size} train differently, in {others}"
    return _difference(runs, _DIFFERENT) or otherwise


def _difference(runs: Traces, names: Iterable[str]) -> str:
    """Return how a user's run on one worker differs, in the first of `names` that does; or ""."""
    near = runs.near.get(ALONE)
    if runs.base is None or runs.base.scenario.workload != "own" or near is None:
        return ""
    for name in names:
        alone, several = near.fields.get(name, (0, 0))
        if alone != several:
            workers = runs.base.scenario.world_size
            guessed = name == "num_samples" and runs.base.traits.population == "guessed"
            says = _OTHER_SAMPLES if guessed else _DIFFERENT[name]
            return says.format(alone=alone, several=several, workers=workers)
    return ""


def other_masks(trace: Trace) -> str:
    """Return why a run with dropout or batch normalisation is not compared with a single device."""
    if trace.traits.batch_norm:
        return (
            "batch normalisation uses each rank's own samples: on one worker the training is a "
            "different one, and was not compared"
        )
    if trace.draws_by_shard:
        return "not compared with a single device: there dropout draws different masks"
    system = "the script" if trace.scenario.workload == "own" else trace.scenario.system
    if all(shard.draws is None for shard in trace.of(Shard)):
        return f"under dropout {system} was not compared with one worker, since no Shard has draws"
    return (
        f"under dropout {system} draws its masks per rank: on one worker the training is a "
        "different one, and was not compared"
    )


def _instead(trace: Trace) -> str:
    if trace.traits.batch_norm:
        return ": use SyncBatchNorm, or leave its layers in eval()"
    return ": use dropout 0 in both runs"


# --- controlled pairs of runs ---------------------------------------------------------------------

# The pair of runs by which several workers are compared with one.
#
# It is the plain pair, except in three cases: random numbers rightly differ between the two runs,
# one worker has samples in a different order, or samples that are divided differently influence
# each other. Then it is a pair of runs in which this was controlled: random numbers are the same
# for all samples, and in addition samples come in one order, or all ranks and the one worker have
# the same part of the batch.
#
# A loss that couples samples may be meant to couple those of one rank, or of all ranks. By the
# first meaning, ranks with the same part train as one worker does on this part. By the second, they
# train as one worker does on this part repeated for each rank. If they do neither, and an equation
# explains that, or the two runs on one worker agree with each other, both meanings are ruled out. A
# loss that is a sum over samples has the second meaning, too.

_NUMBERS = "with the same random numbers for all samples"
_ORDER = "with one order of samples for any number of workers"
_SHARES = "with the same samples on all ranks"
_COUNTED = ", where a term of the loss may count once for each rank"


def is_prevented(compared: Compared) -> bool:
    """Return whether only random draws, or coupled samples, keep two runs from being compared."""
    if compared.trace.scenario.workload != "own":
        return False
    masked = not knobs.same_masks(compared.model, compared.trace)
    return presuppositions.are_prevented(WITH_ONE_WORKER, compared, masked=masked)


def is_by_chance(compared: Compared) -> bool:
    """Return whether random numbers keep two runs from being compared."""
    drawn = random_draws.other_contents(compared) or random_draws.drawn_by_rank(compared)
    return bool(drawn or compared.trace.scenario.dropout)


def is_ordered_otherwise(compared: Compared) -> bool:
    """Return whether ranks draw their own samples in step 0, and one worker draws different ones.

    One worker must draw equally many samples. If ranks draw the same samples, they have parts of a
    model, and one worker must draw these samples, too: then return False.
    """
    runs = (compared.model, compared.trace)
    if any(run.scenario.workload != "own" or run.traits.sample_ids == "content" for run in runs):
        return False
    due, got = map(_first_samples, runs)
    samples, others = Counter(chain(*due.values())), Counter(chain(*got.values()))
    have_their_own = len({*map(frozenset, got.values())}) == compared.trace.scenario.world_size
    return have_their_own and samples != others and samples.total() == others.total()


def has_other_rows(model: Trace, trace: Trace) -> bool:
    """Return whether the two runs have different samples in step 0."""
    due, got = (Counter(chain(*_first_samples(run).values())) for run in (model, trace))
    return due != got


def _first_samples(trace: Trace) -> dict[int, list[int]]:
    drawn: dict[int, list[int]] = defaultdict(list)
    for shard in evidence.shards(trace).get(0, ()):
        drawn[shard.rank].extend(shard.ids)
    return drawn


def controlled_pair(tally: Tally, compared: Compared) -> tuple[Compared, Words]:
    """Return the runs to compare instead of the plain ones, and the words for findings.

    Return `compared` itself if no controlled pair is needed or available.
    """
    if is_ordered_otherwise(compared) or is_prevented(compared):
        for words, controlled in (
            (_NUMBERS, alike(compared, faults.COMMON)),
            (_ORDER, alike(compared, faults.ORDERED)),
            (_SHARES, mirrored(compared)),
        ):
            if controlled is not None:
                tally.note(f"compared {words}")
                is_counted = words == _SHARES and not _agree(controlled)
                before = f"{words}{_COUNTED if is_counted else ''}: "
                return controlled, replace(SINGLE, before=before)
    return compared, SINGLE


def alike(compared: Compared, kind: str) -> Compared | None:
    """Return the pair of runs controlled by `kind`: common random numbers, or one order of samples.

    Return None if they can't be compared either.
    """
    controlled = _controlled(compared, kind, kind)
    if controlled is None or is_ordered_otherwise(controlled) or not _are_comparable(controlled):
        return None
    return controlled if _tells(compared, controlled) else None


def mirrored(compared: Compared) -> Compared | None:
    """Return the run in which all ranks have the same samples, and the one-worker run to match.

    Return None if the two can't be compared, or if the result depends on which samples the loss is
    meant to couple.
    """
    once, again = (
        _controlled(compared, kind, faults.MIRRORED) for kind in (faults.MIRRORED, faults.REPEATED)
    )
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
    return _are_comparable(mirrored) and (_is_coupled(plain) or not _agree(mirrored))


def _is_coupled(compared: Compared) -> bool:
    """Return whether the first loss on several workers differs from that on one, or is unknown.

    If the losses are equal, samples don't influence each other, and gradients differ for another
    reason. In that case a mirrored run proves nothing, because equal ranks also hide what each rank
    does to its own gradients before they are added (clipping by value).
    """
    return not copies.have_one_loss(compared)


def _agree(compared: Compared) -> bool:
    trial = Tally("", observed=True)
    model, trace = compared.model, compared.trace
    sensitivity = compared.sensitivity
    num_gradients = run_comparison.compare(trial, model, trace, None, sensitivity=sensitivity)
    return num_gradients > 0 and trial.broken is None and _are_comparable(compared)


def _are_comparable(compared: Compared) -> bool:
    """Return whether two runs can be compared.

    They can't if an update is not finite, since a NaN may come from equal rows.
    """
    updates = (*compared.model.of(Update), *compared.trace.of(Update))
    is_finite = all(update.finite for update in updates)
    return is_finite and presuppositions.are_comparable(WITH_ONE_WORKER, compared)


def _tells(plain: Compared, controlled: Compared) -> bool:
    """Return whether gradients are more than rounding in runs with common random numbers.

    If only chance distinguishes samples (the mean of several answers), they may be only rounding.
    """
    expected = evidence.updates(plain.model)
    floor = rounding_bounds.Bounds.of(expected, plain.model, plain.trace).gradient_floor
    return run_comparison.tells(controlled.model, controlled.trace, floor=floor)


def _controlled(compared: Compared, alone: str, several: str) -> Compared | None:
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

    def counted(shard: Shard) -> Shard:
        return replace(shard, ids=shard.ids * num_ranks, contents=shard.contents * num_ranks)

    events = (counted(event) if isinstance(event, Shard) else event for event in trace.events)
    return replace(trace, events=tuple(events))


ROWS = (
    Check(
        name="parity",
        id="F-DP-005",
        decides="training with many workers has the losses and gradients of one worker",
        spoken_of="single-gpu baseline equivalence convergence pytorch full-batch accumulated "
        "stale",
        judge=judge,
        plan=plans.parity,
        explores=True,
        needs=(ALONE, ORACLE, *knobs.TURNED),
        witnesses=(REPEATED, NUDGED, CONTROLLED),
        tolerance_kinds=("relative",),
        takes_tolerance=True,
        in_step=True,
        takes_turned=True,
        absent=rounds.unlike_one_worker,
    ),
)
