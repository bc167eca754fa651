"""The outer step, which ends a round of local SGD: when it is taken, by which workers and rule.

The outer step is recomputed in float64 from each worker's weights at the end of its round.

Within a round workers must not communicate about the training. In the harness's own trainers any
collective within a round breaks this. A user's script may call collectives for other reasons (a
barrier, the mean of a loss for the log, a broadcast to a worker that returned). So for a script the
gradient that a rank stepped with decides: its own, or the mean of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, facts, missing, precision, rounds
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Halt,
    Membership,
    Shard,
    Start,
    Synchronised,
    TensorRecord,
    Tensors,
    Trace,
    Update,
    record_tensor,
)
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import counted

# Relative bound on the weights, 16 u with u = 2^-24, for up to about ten workers: one rounding of
# each worker's distance from the outer weights, some of the mean of these, and one of the final
# sum.
BOUND = 2.0**-20
SKETCHED = 2.0**-14  # bound for large models: sketches are projections in float32
ROUNDINGS = 16  # allowed for weights in 16 bits: their outer copy may have more bits
# The error of a pseudo-gradient that is sent and added in bfloat16, relative to its length.
SENT_IN_16_BITS = 2.0**-7
MOMENTUM = "momentum_buffer"


def judge_schedule(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that workers synchronise at the end of each round, and don't communicate within it."""
    tally = missing.tally_for(invariant, traces)
    for trace in rounds.usable(traces, tally):
        if rounds.says_length(tally, trace):
            _on_time(tally, trace)
        compare_silence(tally, trace)
    return tally.finding(nothing=rounds.nothing(tally))


def _on_time(tally: Tally, trace: Trace) -> None:
    scenario, meetings = trace.scenario, rounds.synchronisations(trace)
    rule = rounds.rule(scenario)
    halted = min((halt.step for halt in trace.of(Halt)), default=scenario.num_steps)
    updates = evidence.updates(trace)
    for step in sorted(updates.keys() | meetings.keys()):
        due = rule.ends_round(step, scenario.num_steps)
        if step >= halted and step not in meetings:
            continue
        if step not in meetings and _is_cut_off(scenario, step):
            tally.miss(
                f"the run ends in the middle of a round, after step {step}, and its last "
                "steps are not synchronised: run it for whole rounds (--steps), or "
                "synchronise at the end"
            )
            continue
        if step not in meetings and _is_unseen(trace, step):
            tally.miss(
                "it is unknown whether workers were synchronised after the last step, "
                f"{step}: call obs.synchronised(...) wherever they are"
            )
            continue
        for rank in sorted(updates.get(step, {}).keys() | meetings.get(step, {}).keys()):
            came = rank in meetings.get(step, {})
            message = f"rank {rank} {'synchronised' if came else 'did not synchronise'} with the"
            message += f" others after step {step}: a round has {rule.inner_steps} steps"
            place = {"step": step, "rank": rank, "scenario": scenario}
            tally.check(came == due and rank in updates.get(step, {}), message, **place)


def _is_cut_off(scenario: Scenario, step: int) -> bool:
    # The harness chooses the number of steps, so the script is not blamed for a round that is cut
    # short.
    length = rounds.rule(scenario).inner_steps
    is_last = scenario.workload == "own" and step + 1 == scenario.num_steps
    return is_last and (step + 1) % length != 0


def _is_unseen(trace: Trace, step: int) -> bool:
    # Weights show a synchronisation only in the next step.
    is_last = trace.scenario.workload == "own" and step + 1 == trace.scenario.num_steps
    return is_last and all(one.collectives_alone is None for one in trace.of(Synchronised))


def judge(invariant: Invariant, traces: Traces) -> Finding:
    """Judge every outer step of every worker: the weights, and the outer momentum."""
    tally = missing.tally_for(invariant, traces)
    for trace in rounds.usable(traces, tally):
        if rounds.says_rule(tally, trace):
            follow(tally, trace)
    return tally.finding(nothing=rounds.nothing(tally))


def judge_weighting(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that each sample counts the same in a user's rounds, whichever worker draws it.

    If workers with unequal numbers of samples count equally, that may be on purpose. It is counted
    as missing.
    """
    tally = missing.tally_for(invariant, traces)
    for trace in rounds.usable(traces, tally):
        tried = Tally("", observed=True)
        follow(tried, trace)
        if tried.broken is not None and ALIKE in tried.broken.message:
            tally.miss(
                "workers draw different numbers of samples, and have equal weight in the "
                "average: right if each worker should count once, wrong if each sample should "
                "count equally; local-sgd-v1.yaml demands the second"
            )
        elif rounds.says_rule(tally, trace):
            follow(tally, trace)
    return tally.finding(nothing=rounds.nothing(tally))


def follow(tally: Tally, trace: Trace) -> None:
    """Compare the outer steps of one run with those that its rule gives."""
    start = next((begin for begin in trace.of(Start) if begin.step == 0), None)
    met = rounds.synchronisations(trace)
    names = {name for by_rank in met.values() for one in by_rank.values() for name in one.weights}
    begun = {} if start is None else _trained(start.weights, start)
    before = evidence.vectors({name: t for name, t in begun.items() if name in names})
    if start is None or before is None:
        missing.ask(tally, "the initial weights are unknown", facts.START_WITH_VALUES)
        return
    momentum: Vectors = {}
    earlier = -1
    updates = evidence.updates(trace)
    for step, by_rank in met.items():
        of_ranks = shares(trace, updates.get(step, {}), earlier, step)
        inner = _inner(updates.get(step, {}), start)
        if not of_ranks or inner is None:
            why = f"the outer step after step {step} can't be recomputed"
            missing.ask(tally, why, facts.WEIGHTS_AND_SHARDS)
            return
        round_ = Round(before=before, momentum=momentum, inner=inner, shares=of_ranks)
        weights, kept = _outer(trace, round_)
        for event in (by_rank[rank] for rank in sorted(by_rank)):
            if not _was_rounded(tally, trace, event, before, weights):
                _compare(tally, trace, event, round_, start)
        lowest = by_rank[min(by_rank)]
        before = evidence.vectors(_trained(lowest.weights, start)) or {**weights}
        momentum = _momentum(lowest) if lowest.optimizer else kept
        earlier = step


def shares(trace: Trace, there: Mapping[int, Update], earlier: int, step: int) -> dict[int, float]:
    """Return rank -> its fraction of the round's samples; {} if samples were not recorded.

    Samples from before a worker joined don't count.
    """
    joined = {one.rank: one.step for one in trace.of(Membership) if one.change == "joined"}
    counts = dict.fromkeys(there, 0.0)
    for shard in trace.standing.of(Shard):
        came = joined.get(shard.rank, 0)
        first = max(earlier + 1, came if came <= step else 0)
        if shard.rank in counts and first <= shard.step <= step:
            counts[shard.rank] += shard.weight
    total = sum(counts.values())
    return {rank: count / total for rank, count in counts.items()} if total else {}


def _inner(there: Mapping[int, Update], start: Start) -> dict[int, Vectors] | None:
    weights = {
        rank: evidence.vectors(_trained(update.weights, start)) for rank, update in there.items()
    }
    known: dict[int, Vectors] = {rank: one for rank, one in weights.items() if one is not None}
    return known if len(known) == len(weights) else None


def _outer(trace: Trace, round_: Round, *, other: bool = False) -> tuple[Vectors, Vectors]:
    """Return weights and momentum after the outer step, as in torch (Sutskever et al. 2013).

    With `other`, Nesterov's look-ahead is left out if the run's rule has it, and used if it
    doesn't.
    """
    rule = rounds.rule(trace.scenario)
    looks_ahead = (trace.traits.outer == "nesterov") != other
    weights, kept = {}, {}
    for name, value in round_.mean.items():
        gradient = round_.before[name].astype(np.float64) - value
        momentum = round_.momentum.get(name, np.zeros_like(gradient))
        kept[name] = rule.outer_momentum * momentum + gradient
        move = gradient + rule.outer_momentum * kept[name] if looks_ahead else kept[name]
        weights[name] = round_.before[name] - rule.outer_learning_rate * move
    return weights, kept if rule.outer_momentum else {}


def _compare(tally: Tally, trace: Trace, event: Synchronised, round_: Round, start: Start) -> None:
    place = evidence.place(trace, event)
    weights, kept = _outer(trace, round_)
    expected, got = _records(weights), _trained(event.weights, start)
    bound = max(BOUND, ROUNDINGS * precision.unit_of(event.weights))
    if any(record.sketch is not None for record in got.values()):
        got, bound = _records(evidence.vectors(got) or {}), max(bound, SKETCHED)
    message = _not_followed(trace)
    values = evidence.vectors(got)
    if values is not None and not _are_close(weights, values, bound):
        message += explain(
            round_,
            values,
            event.rank,
            lambda one: _outer(trace, one)[0],
            lambda one: _outer(trace, one, other=True)[0],
        )
    done = closeness.compare_close(tally, expected, got, bound, message, **place)
    momentum = {f"{name}/{MOMENTUM}": value for name, value in kept.items()}
    floor = BOUND * (closeness.norm_l2(expected) or 0.0)
    message = "the outer momentum does not follow from the mean pseudo-gradients"
    own = {name: event.optimizer[name] for name in momentum if name in event.optimizer}
    if momentum and event.optimizer:
        done &= closeness.compare_close(
            tally, _records(momentum), own, BOUND, message, floor, **place
        )
    if not done:
        fact = facts.values_of("Synchronised.weights and .optimizer")
        missing.ask(tally, f"the outer step after step {event.step} was not compared", fact)


def _not_followed(trace: Trace) -> str:
    """Return the message for an outer step that does not follow the rule."""
    rule = rounds.rule(trace.scenario)
    if rule.outer_learning_rate == 1 and not rule.outer_momentum:
        return "the weights after a round are not the mean of the workers' weights"
    name = "Nesterov's rule" if trace.traits.outer == "nesterov" else "the rule of momentum"
    return f"the outer weights are not the result of {name} on the mean pseudo-gradient"


def _are_close(expected: Vectors, got: Vectors, bound: float) -> bool:
    return all(
        name in got
        and got[name].shape == value.shape
        and float(np.linalg.norm(got[name] - value)) <= bound * float(np.linalg.norm(value))
        for name, value in expected.items()
    )


def _was_rounded(
    tally: Tally, trace: Trace, event: Synchronised, before: Vectors, weights: Vectors
) -> bool:
    """Return whether a user's outer step differs from the rule's only by rounding to 16 bits.

    If so, it is counted as missing, since pseudo-gradients may be sent in 16 bits on purpose.
    """
    got = evidence.vectors(event.weights)
    if trace.scenario.workload != "own" or got is None or not weights.keys() <= got.keys():
        return False
    if any(got[name].shape != value.shape for name, value in weights.items()):
        return False
    off = moved = size = 0.0
    for name, value in weights.items():
        off += float(np.square(got[name] - value).sum())
        moved += float(np.square(value - before[name]).sum())
        size += float(np.square(value).sum())
    if off <= BOUND**2 * size or not off <= SENT_IN_16_BITS**2 * moved:
        return False
    tally.miss(
        f"the outer step after step {event.step} is off by {math.sqrt(off / moved):.2g} of its "
        "length, as if pseudo-gradients were rounded to 16 bits on their way: send them in float32"
    )
    return True


def _momentum(event: Synchronised) -> Vectors:
    moments = {
        name.removesuffix(f"/{MOMENTUM}"): record.values()
        for name, record in event.optimizer.items()
        if name.endswith(MOMENTUM)
    }
    return {name: value for name, value in moments.items() if value is not None}


def _trained(tensors: Tensors, start: Start) -> Tensors:
    return {name: tensors[name] for name in start.trainable if name in tensors}


def _records(vectors: Vectors) -> dict[str, TensorRecord]:
    return {name: record_tensor(value, values=True) for name, value in vectors.items()}


# --- causes of a different step -------------------------------------------------------------------

Vectors = Mapping[str, NDArray[Any]]

ALIKE = "workers have equal weight, whatever their numbers of samples"

# The first words of the causes.
_BEGINNINGS = (
    ALIKE,
    "nothing was changed since the round",
    "the worker went on from its own weights",
    "the pseudo-gradient has the wrong sign",
    "pseudo-gradients are added",
    "the mean is divided by the workers",
    "the workers' weights are added",
    "the outer momentum was lost",
    "Nesterov's look-ahead is applied",
    "only rank",
)
_ALIKE = 1e-3  # fraction of the step's length; causes are much further apart than this


@dataclass(frozen=True, kw_only=True)
class Round:
    """The quantities from which an outer step is computed.

    `before` has the outer weights with which all workers began the round, and `momentum` the outer
    momentum. `inner` maps each worker to its weights at the end of the round, and `shares` to its
    fraction of the samples.
    """

    before: Vectors
    momentum: Vectors
    inner: Mapping[int, Vectors]
    shares: Mapping[int, float]

    @property
    def mean(self) -> dict[str, NDArray[np.float64]]:
        """The mean of the workers' weights, weighted by their fractions of the samples."""
        return {
            name: np.sum(
                [
                    share * self.inner[rank][name].astype(np.float64)
                    for rank, share in self.shares.items()
                ],
                axis=0,
            )
            for name in self.before
        }


Step = Callable[[Round], Vectors]  # returns the outer weights after the round


def explain(round_: Round, got: Vectors, rank: int, step: Step, other: Step) -> str:
    """Return what caused a worker's weights `got`, to end a message; "" if no known cause fits.

    `step` computes the right outer step, and `other` the step with the other type of momentum.
    """
    if any(name not in got or got[name].shape != v.shape for name, v in round_.before.items()):
        return ""
    due = step(round_)
    scale = _distance(due, round_.before) or 1.0
    for words, weights in _causes(round_, rank, step, other):
        if _distance(weights, got) <= _ALIKE * scale < _distance(weights, due):
            return f": {words}"
    return ""


def is_named(message: str) -> bool:
    """Return whether a message about an outer step ends with a cause that `explain` returned."""
    return any(f": {words}" in message for words in _BEGINNINGS)


def _causes(round_: Round, rank: int, step: Step, other: Step) -> Iterator[tuple[str, Vectors]]:
    """Yield each cause in words, with the weights that it would lead to."""
    yield "nothing was changed since the round began", round_.before
    if rank in round_.inner:
        yield "the worker went on from its own weights", round_.inner[rank]
    mean, num_workers = round_.mean, len(round_.shares)
    alike = dict.fromkeys(round_.shares, 1.0 / num_workers)
    yield ALIKE, step(replace(round_, shares=alike))
    for words, factor in (
        ("the pseudo-gradient has the wrong sign", -1.0),
        ("pseudo-gradients are added, and not divided by the workers", float(num_workers)),
        ("the mean is divided by the workers once more", 1.0 / num_workers),
    ):
        moved = {
            name: round_.before[name] + factor * (value - round_.before[name])
            for name, value in mean.items()
        }
        yield words, step(replace(round_, inner={rank: moved}, shares={rank: 1.0}))
    added = {name: num_workers * value for name, value in mean.items()}
    yield "the workers' weights are added, and not divided by their number", added
    yield "the outer momentum was lost", step(replace(round_, momentum={}))
    yield "Nesterov's look-ahead is in only one of rule and step", other(round_)
    for alone in round_.inner:
        words = f"only rank {alone}'s weights count"
        yield words, step(replace(round_, shares={alone: 1.0}))


def _distance(one: Vectors, other: Vectors) -> float:
    return float(
        np.sqrt(sum(np.square(one[name].astype(np.float64) - other[name]).sum() for name in one))
    )


# --- silence within rounds ------------------------------------------------------------------------

# The largest angle between gradients of one direction, also in 16 bits. Clipping keeps the
# direction.
_ANGLE = 1e-2

Vector = NDArray[np.float64]


def compare_silence(tally: Tally, trace: Trace) -> None:
    """Check that workers don't communicate within their rounds."""
    meetings = trace.of(Synchronised)
    if trace.scenario.workload == "own":
        _own_gradients(tally, trace)
    else:
        for event in meetings:
            if event.collectives_alone is not None:
                called = event.collectives_alone
                message = f"rank {event.rank} called {called} collectives within a round"
                tally.equal(0, called, message, **evidence.place(trace, event))
    if meetings and not any(event.collectives_alone is not None for event in meetings):
        why = "it is unknown how many collectives were called within rounds"
        missing.ask(tally, why, facts.COLLECTIVES_ALONE)
    if counts := [event.collectives for event in meetings if event.collectives is not None]:
        tally.note(f"the largest number of collectives at the end of a round: {max(counts)}")


def _own_gradients(tally: Tally, trace: Trace) -> None:
    """Check that each worker steps with its own gradient, as far as directions show."""
    summed = _sums(trace)
    unknown: set[tuple[int, int]] = set()  # (step, rank)
    for step, by_rank in evidence.ranks_by_step(trace):
        of_step = {rank: summed.get((step, rank)) for rank in by_rank}
        every = _added(one for one in of_step.values() if one is not None)
        for rank, update in by_rank.items():
            applied, own = _vector(update.gradient), of_step[rank]
            if applied is not None and own is not None and _alike(applied, own):
                tally.compared += 1
            elif applied is not None and every is not None and _alike(applied, every):
                message = (
                    f"rank {rank} stepped with the mean of all ranks' gradients: within a round "
                    "each worker steps with its own"
                )
                tally.check(False, message, **evidence.place(trace, update))
            else:
                unknown.add((step, rank))
    _tell_collectives(tally, trace, unknown)


def _tell_collectives(tally: Tally, trace: Trace, unknown: set[tuple[int, int]]) -> None:
    """Count a round as held if it called no collective, or if its collectives shared no gradient.

    `unknown` has the (step, rank) of steps with a gradient that may be the rank's own or not.
    """
    begun: dict[int, int] = {}
    called_any = False
    for event in trace.of(Synchronised):
        first = begun.get(event.rank, 0)
        begun[event.rank] = event.step + 1
        if not event.collectives_alone:
            tally.compared += event.collectives_alone == 0
            continue
        if any((step, event.rank) in unknown for step in range(first, event.step + 1)):
            called = counted(event.collectives_alone, "collective")
            tally.miss(
                f"rank {event.rank} called {called} within the round that ends with step "
                f"{event.step}, and it is unknown whether they shared gradients: check with a "
                "model of up to 65,536 parameters, and clip by the norm alone"
            )
        else:
            called_any = True
    if called_any:
        tally.note(
            "collectives were called within rounds: that is not an error, since each "
            "step was made with the rank's own gradient"
        )


def _sums(trace: Trace) -> Mapping[tuple[int, int], Vector]:
    """Return (step, rank) -> the sum of the rank's micro-batch gradients, as a flat vector."""
    terms: dict[tuple[int, int], list[Vector | None]] = {}
    for shard in trace.standing.of(Shard):
        if trace.traits.shared:
            continue  # ranks share micro-batches, so none has a gradient of its own
        terms.setdefault((shard.step, shard.rank), []).append(_vector(shard.gradient))
    sums = {}
    for place, vectors in terms.items():
        known = [vector for vector in vectors if vector is not None]
        total = _added(known) if len(known) == len(vectors) else None
        if total is not None:
            sums[place] = total
    return sums


def _vector(tensors: Tensors) -> Vector | None:
    values = evidence.vectors(tensors)
    if values is None:
        return None
    return np.concatenate([values[name].astype(np.float64) for name in sorted(values)])


def _added(vectors: Iterable[Any]) -> Vector | None:
    total: Vector | None = None
    for vector in vectors:
        if total is not None and vector.shape != total.shape:
            return None
        total = vector if total is None else total + vector
    return total


def _alike(vector: Vector, other: Vector) -> bool:
    if vector.shape != other.shape or not (np.isfinite(vector).all() and np.isfinite(other).all()):
        return False
    sizes = float(np.linalg.norm(vector)), float(np.linalg.norm(other))
    if not all(sizes):
        return sizes == (0.0, 0.0)
    return float(np.linalg.norm(vector / sizes[0] - other / sizes[1])) <= _ANGLE
