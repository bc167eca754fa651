"""Traces of local SGD: workers take steps alone, and synchronise at the end of each round.

Such a trace has the promise `rounds`: its replicas agree after each Synchronised event, not after
each step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from entrenar_py.check import evidence
from entrenar_py.check.evidence import missing
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Event, Membership, Start, Synchronised, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.workers import Outer

PROMISE = "rounds"
NOTHING = (
    "no run of workers that step alone and synchronise: record a Synchronised "
    "of each rank whenever they synchronise, in a trace with "
    f'promises=("{PROMISE}",)'
)

OWN_STATE = (
    "each rank's optimizer has a state of its own, since ranks step alone, and "
    "weights are synchronised after rounds"
)
# With these options and the optimizer SGD, local SGD is the same as training on one worker.
AS_ONE = {"inner_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}


def unlike_one_worker(traces: Sequence[Trace]) -> str:
    """Return why a user's runs differ from training on one worker by design; "" if they don't.

    There is such a reason only if every run on several workers is in rounds, and none has options
    that make rounds equal to the training of one worker.
    """
    several = [trace for trace in traces if trace.scenario.world_size > 1]
    if not several or not all(
        are_in(trace)
        and not (
            trace.scenario.optimizer == "sgd" and AS_ONE.items() <= trace.scenario.options.items()
        )
        for trace in several
    ):
        return ""
    return (
        "ranks step alone, and are synchronised after rounds, so they do not train as one worker "
        "does: weights after rounds are judged by F-DP-001 and F-TI-001"
    )


def are_in(trace: Trace) -> bool:
    """Return whether the workers of a run step alone, so that replicas differ within a round."""
    return PROMISE in trace.promises


def nothing(tally: Tally) -> str:
    """Return the reason why a clause about rounds compared nothing: no run has rounds."""
    return missing.told(
        tally,
        trace=NOTHING,
        script="no workers that step alone were synchronised: call obs.synchronised(...) "
        "wherever they were just given the same weights, and make enough steps for "
        "a round (--steps)",
    )


def usable(traces: Iterable[Trace], tally: Tally) -> list[Trace]:
    """Return the runs in rounds that did not fail."""
    return [trace for trace in evidence.usable(traces, tally) if are_in(trace)]


def says_length(tally: Tally, trace: Trace) -> bool:
    """Return whether the number of steps per round is known. If not, count it as missing."""
    known = trace.scenario.workload != "own" or "inner_steps" in trace.scenario.options
    if not known:
        tally.miss(
            missing.told(
                tally,
                trace="the run does not say how many steps its workers make alone: give the option "
                "inner_steps in its scenario",
                script="rounds have several lengths: say how many steps workers make alone, "
                "obs.synchronised(..., inner_steps=k)",
            )
        )
    return known


def says_rule(tally: Tally, trace: Trace) -> bool:
    """Return whether the rule of the outer step is known. If not, count it as missing."""
    options = trace.scenario.options
    stated = {"outer_learning_rate", "outer_momentum"} <= options.keys()
    known = trace.traits.outer != "other" and (trace.scenario.workload != "own" or stated)
    if not known:
        tally.miss(
            missing.told(
                tally,
                trace="the run does not say the rule of its outer step: give the options "
                "outer_learning_rate and outer_momentum in its scenario",
                script="the rule of the outer step is unknown: only torch's SGD with one constant "
                "rate and momentum is known, given to obs.synchronised(optimizer, weights)",
            )
        )
    return known


def rule(scenario: Scenario) -> Outer:
    """Return the schedule and the rule of the outer step, from the options of `scenario`."""
    return Outer.of(scenario.options)


def synchronisations(trace: Trace) -> dict[int, dict[int, Synchronised]]:
    """Return step -> rank -> Synchronised, in step order, without events that a resume undid."""
    by_step: dict[int, dict[int, Synchronised]] = defaultdict(dict)
    for event in trace.standing.of(Synchronised):
        by_step[event.step][event.rank] = event
    return dict(sorted(by_step.items()))


def joiners(trace: Trace) -> list[Start]:
    """Return the Start events of workers that joined during the run."""
    return [event for event, joined in _starts(trace) if joined]


def _starts(trace: Trace) -> Iterator[tuple[Start, bool]]:
    """Yield every Start, and whether it is the first since its rank joined."""
    new: set[int] = set()
    for event in trace.events:
        if isinstance(event, Membership) and event.change == "joined":
            new.add(event.rank)
        elif isinstance(event, Start):
            yield event, event.rank in new
            new.discard(event.rank)


def as_steps(trace: Trace) -> Trace:
    """Return `trace` as if all workers took one common step at the end of each round.

    Each Synchronised becomes an Update, with the state of the outer optimizer.
    """
    updates = evidence.updates(trace)
    begun = {id(start) for start, joined in _starts(trace) if joined or not start.resumed}
    kept: list[Event] = []
    for event in trace.events:
        if isinstance(event, Start):
            if id(event) in begun:
                kept.append(replace(event, optimizer={}, buffers={}))
        elif isinstance(event, Synchronised):
            own = updates.get(event.step, {}).get(event.rank)
            kept.append(_as_update(event, own))
        elif not isinstance(event, Update):
            kept.append(event)
    has_state = any(event.optimizer for event in trace.of(Synchronised))
    if trace.scenario.workload != "own":
        has_state = rule(trace.scenario).outer_momentum > 0
    outer = "momentum" if has_state else "sgd"
    return replace(trace, scenario=trace.scenario.with_(optimizer=outer), events=tuple(kept))


def _as_update(event: Synchronised, own: Update | None) -> Update:
    return Update(
        step=event.step,
        rank=event.rank,
        loss=None if own is None else own.loss,
        weight=0.0 if own is None else own.weight,
        learning_rate=0.0 if own is None else own.learning_rate,
        finite=all(evidence.non_finite({name: one}) is None for name, one in event.weights.items()),
        weights=event.weights,
        optimizer=event.optimizer,
        buffers=event.buffers,
    )


def usual_length(meetings: Sequence[Sequence[int]]) -> int | None:
    """Return the number of steps of a round; None if it is unknown.

    `meetings` has, for each rank, the steps after which it synchronised. The last round may be
    shorter. If all ranks have the same rounds, these must all have one length. If ranks differ,
    return the most common length.
    """
    if not meetings:
        return None
    rounds = [
        [step - before for before, step in zip((-1, *steps), steps, strict=False)]
        for steps in meetings
    ]
    if all(lengths == rounds[0] for lengths in rounds):
        whole = rounds[0][:-1] or rounds[0]
        return whole[0] if len({*whole}) == 1 and rounds[0][-1] <= whole[0] else None
    ((length, _),) = Counter(length for lengths in rounds for length in lengths).most_common(1)
    return length
