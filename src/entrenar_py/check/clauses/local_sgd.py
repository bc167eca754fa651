"""Clauses for local SGD, where workers meet after each round: agreement, parity and finiteness.

In local SGD, DiLoCo and federated averaging each rank steps with its own gradient, and now and then
all ranks get the same weights. A script may report this with `obs.synchronised()`. Otherwise the
weights of the ranks show it: they differ, and before a later step they are equal again, changed by
something other than the optimizer.

The rule of the outer step is the observed one (of an optimizer that steps copies of the
parameters), or the mean, or a rate and a momentum that explain the outer steps of all rounds by the
ranks' mean movement. Ranks that only move closer to each other, or that share a part of the model
at a time, follow no such rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import resumes
from entrenar_py.check.clauses import finiteness, outer_step, parity, plans, replicas
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing, rounds
from entrenar_py.check.evidence.needs import ALONE, ORACLE, POISONED, SAVED, Traces
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Event,
    Halt,
    Injected,
    Shard,
    Start,
    Synchronised,
    Tensors,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import listed


def plan_scenario(**changes: Any) -> Scenario:
    """Return a scenario of three workers, two epochs, and rounds of 2, 2 and 1 steps.

    Workers have unequal numbers of samples. `changes` replaces or adds fields of the scenario.
    """
    usual = plans.mlp(
        system="local_sgd",
        num_steps=5,
        width=8,
        optimizer="adamw",
        learning_rate=0.01,
        detail="values",
        options={"inner_steps": 2},
    )
    return usual.with_(**changes)


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan a run without faults, and one in which a worker dies in a round and returns later."""
    moves = (Fault(kind="leave", rank=1, step=1), Fault(kind="join", rank=1, step=3))
    return [plan_scenario(), plan_scenario(faults=moves)]


def plan_parity(invariant: Invariant) -> list[Scenario]:
    """Plan plain SGD, synchronised after every step, with the plain mean as the outer step."""
    return [plan_scenario(optimizer="sgd", learning_rate=0.05, options=rounds.AS_ONE)]


def plan_non_finite(invariant: Invariant) -> list[Scenario]:
    """Plan a run without faults, and one with a NaN in the middle of one worker's round."""
    bad = Fault(kind="non_finite_gradient", rank=1, step=2, value="nan")
    return [plan_scenario(), plan_scenario(faults=(bad,))]


def judge_agreement(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that workers have equal tensors after an outer step, and joiners start with them."""
    tally = missing.tally_for(invariant, traces)
    for trace in rounds.usable(traces, tally):
        replicas.compare(tally, rounds.as_steps(trace))
        _joined(tally, trace)
        _left_apart(tally, trace)
    return tally.finding(nothing=rounds.nothing(tally))


def _left_apart(tally: Tally, trace: Trace) -> None:
    """Count as missing the tensors that differ between ranks and that no round synchronises.

    They may be each rank's own, or forgotten.
    """
    names = {name for start in trace.of(Start) for name in start.trainable}
    met = {name for event in trace.of(Synchronised) for name in event.weights}
    apart = [
        name
        for name in sorted(names - met)
        if len({u.weights[name].digest for u in trace.of(Update) if name in u.weights}) > 1
    ]
    if apart and met:
        tally.miss(
            f"{listed(apart, most=2)} differ between ranks, and no round synchronises "
            "them: right if each rank keeps its own, wrong if they were forgotten; "
            "call obs.synchronised() where a round ends to have all weights compared"
        )


def _joined(tally: Tally, trace: Trace) -> None:
    """Check that a worker that joins starts with the weights of the last outer step."""
    synchronisations = rounds.synchronisations(trace)
    for start in rounds.joiners(trace):
        earlier = [step for step in synchronisations if step < start.step]
        if not earlier:
            continue
        by_rank = synchronisations[max(earlier)]
        outer = by_rank[min(by_rank)].weights
        message = f"rank {start.rank} joined with weights that differ from the outer ones"
        place = {**evidence.place(trace, start), "step": start.step - 1}
        closeness.compare_exact(tally, outer, start.weights, message, **place)


def judge_parity(invariant: Invariant, runs: Traces) -> Finding:
    """Judge runs with rounds of one step by the oracle's losses and weights after each step.

    Only plain SGD with the mean as the outer step is compared.
    """
    tally = missing.tally_for(invariant, runs)
    runs = evidence.usable_runs(runs, tally)
    base = None
    for trace in rounds.usable(() if runs.base is None else (runs.base,), tally):
        options = {**rounds.AS_ONE, **trace.scenario.options}
        if trace.scenario.optimizer == "sgd" and options == {**options, **rounds.AS_ONE}:
            base = rounds.as_steps(trace)
        else:
            tally.miss(
                missing.told(
                    tally,
                    trace="local SGD equals synchronous SGD only with optimizer=sgd and options "
                    f"{rounds.AS_ONE}",
                    script="local SGD equals training on one worker only in rounds of one step, "
                    "with plain SGD inside, outer rate 1 and outer momentum 0: run the script in "
                    "this way",
                )
            )
    runs = replace(runs, base=base)
    if base is not None and base.scenario.workload == "own":
        last = max(evidence.updates(base), default=-1)
        witnesses = runs.witnesses.get(ALONE, ())
        alone = tuple(_until(_in_steps(witness), last) for witness in witnesses)
        runs = replace(runs, beside={ALONE: alone} if base.scenario.world_size > 1 else {})
    if base is not None:
        parity.compare_with_oracle(tally, runs, None)
    is_other = base is None and tally.observed  # a script that takes common steps
    why = "" if is_other else parity.missing_model(tally, runs)
    return tally.finding(nothing=why or rounds.nothing(tally))


def _in_steps(trace: Trace) -> Trace:
    return rounds.as_steps(trace) if rounds.are_in(trace) else trace


def _until(trace: Trace, last: int) -> Trace:
    """Return a run without the events after step `last`.

    A synchronisation after the last step is not observed.
    """
    kept = (event for event in trace.events if (getattr(event, "step", None) or 0) <= last)
    return replace(trace, events=tuple(kept))


def judge_finiteness(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that a NaN in a worker's round halts all before the outer step, and is located."""
    tally = missing.tally_for(invariant, traces)
    kept = rounds.usable(traces, tally)
    if not kept:
        return tally.finding(nothing=rounds.nothing(tally))
    for trace in kept:
        if trace.scenario.workload == "own":
            compare_finiteness(tally, trace)
            continue
        finiteness.compare(tally, rounds.as_steps(trace))
        bad = {(halt.rank, halt.step) for halt in trace.of(Halt)}
        for update in trace.of(Update):
            message = f"rank {update.rank} updated its own weights with a non-finite value"
            is_good = (update.rank, update.step) not in bad
            tally.check(is_good, message, **evidence.place(trace, update))
    return tally.finding(nothing=rounds.nothing(tally))


def judge_state(invariant: Invariant, traces: Traces) -> Finding:
    """Judge the state that ranks resume with.

    The state of an inner optimizer is each rank's own, and need not agree.
    """
    tally = missing.tally_for(invariant, traces)
    stopped = traces.of(SAVED)
    for run in evidence.usable(stopped or traces, tally):
        resumes.compare_state(tally, traces.base if stopped else None, run, ("optimizer",))
    return tally.finding(nothing=rounds.OWN_STATE)


# Check -> the judge of its clause for a user's runs with workers that step alone.
IN_ROUNDS: Mapping[str, Callable[[Invariant, Traces], Finding]] = {
    "replica_identity": judge_agreement,
    "finiteness": judge_finiteness,
    "parity": judge_parity,
    "weighting": outer_step.judge_weighting,
    "optimizer_state": judge_state,
}


# --- values that are not finite -------------------------------------------------------------------

Place = tuple[int, int]  # step, rank


def compare_finiteness(tally: Tally, trace: Trace) -> None:
    """Judge one run of a user's trainer, step by step and round by round."""
    bad = _bad_places(trace)
    stopped = min((place for place in bad if not _has_stepped(trace, place)), default=None)
    state: dict[int, tuple[Tensors, Tensors]] = {}
    for event in trace.standing.events:
        if isinstance(event, Start):
            state[event.rank] = event.weights, event.optimizer
        elif isinstance(event, Update):
            before, now = state.get(event.rank, ({}, {})), (event.weights, event.optimizer)
            rested = bool(event.weights) and all(map(evidence.are_equal, before, now))
            state[event.rank] = now
            _judge_step(tally, trace, event, is_bad=(event.step, event.rank) in bad, rested=rested)
        elif isinstance(event, Synchronised):
            state[event.rank] = event.weights, state.get(event.rank, ({}, {}))[1]
            _judge_round(tally, trace, event, stopped)
    if stopped is not None:
        step, rank = stopped
        ended = trace.end.status == "halted" or bool(trace.of(Halt))
        message = f"training went on without rank {rank}, which had a non-finite value"
        tally.check(ended, message, step=step, rank=rank, scenario=trace.scenario)
        if ended:
            tally.note(f"with a non-finite value on rank {rank} the run stopped by itself")


def _bad_places(trace: Trace) -> set[Place]:
    places = {(shard.step, shard.rank) for shard in trace.of(Shard) if not shard.finite}
    return places | {
        (event.step or 0, event.rank or 0)
        for event in trace.of(Injected)
        if str(event.fault.get("kind")).startswith("non_finite_")
    }


def _has_stepped(trace: Trace, place: Place) -> bool:
    step, rank = place
    return rank in evidence.updates(trace).get(step, {})


def _judge_step(tally: Tally, trace: Trace, update: Update, *, is_bad: bool, rested: bool) -> None:
    place = evidence.place(trace, update)
    if is_bad and rested and update.finite:
        tally.compared += 1
        tally.note(f"rank {update.rank} skipped its step {update.step}: a value is not finite")
        return
    if is_bad and update.finite and trace.traits.losses == "backward":
        tally.miss(
            f"rank {update.rank} went on after a non-finite value in step "
            f"{update.step}, and it is unknown whether it skipped that step: call "
            "obs.synchronised() where a round ends"
        )
        return
    message = f"rank {update.rank} updated its own weights with a non-finite value"
    found = evidence.non_finite(update.weights) or (None, None)
    shown = {"tensor": found[0], "element": found[1]}
    tally.check(update.finite and not is_bad, message, **shown, **place)


def _judge_round(tally: Tally, trace: Trace, event: Synchronised, stopped: Place | None) -> None:
    place = evidence.place(trace, event)
    if stopped is not None and event.step >= stopped[0]:
        message = (
            f"an outer step was made after step {event.step}, although rank "
            f"{stopped[1]} had a non-finite value in step {stopped[0]}, and stopped"
        )
        tally.check(False, message, **place)
        return
    found = evidence.non_finite(event.weights) or (None, None)
    message = f"rank {event.rank} was given weights that are not finite"
    tally.check(found[0] is None, message, tensor=found[0], element=found[1], **place)


# --- rounds that a script does not report ---------------------------------------------------------

_SHARED_MAX = 0.1  # share of gradient elements that ranks which step alone may have in common
_MET_MIN = 0.5  # share of the elements that had differed that must be equal after a round
_OFF = 1e-3  # largest error of a rule for the outer step, as a fraction of the step's length
_SHORT = 2e-4  # relative: a rate or momentum this close to a short decimal is taken as that decimal
_DIGITS = 3

Vector = NDArray[np.float64]
Met = Mapping[int, Mapping[int, Tensors]]  # step -> rank -> the weights that the rank got after it


def seen(trace: Trace) -> Trace:
    """Return `trace` with a Synchronised event wherever ranks that step alone got equal weights.

    If the run has no such rounds, or reports them, return it unchanged.
    """
    if trace.scenario.workload != "own" or trace.traits.shared or rounds.are_in(trace):
        return trace
    met, names = _meetings(trace)
    if not met:
        return trace
    lengths = rounds.usual_length([sorted(met)])
    options = {**trace.scenario.options, **({} if lengths is None else {"inner_steps": lengths})}
    trace = replace(
        trace,
        scenario=trace.scenario.with_(options=options),
        promises=(*trace.promises, rounds.PROMISE),
        events=tuple(_with_meetings(trace, met, names)),
    )
    return _with_rule(trace)


# --- when -----------------------------------------------------------------------------------------


def _meetings(trace: Trace) -> tuple[Met, Set[str]]:
    """Return step -> rank -> the weights that ranks got, and the names of the synchronised tensors.

    In each round the same tensors must be synchronised, and all others of the model stay as they
    are. Otherwise return no rounds.
    """
    met: dict[int, dict[int, Tensors]] = {}
    kinds: set[frozenset[str]] = set()
    before: Mapping[int, Update] = {}
    last = -1
    for step, by_rank in evidence.ranks_by_step(trace):
        if before and before.keys() == by_rank.keys() and _step_alone(before):
            edited = frozenset(name for update in by_rank.values() for name in update.edited)
            weights: dict[int, Tensors] = {
                rank: {name: by_rank[rank].edited.get(name, held) for name, held in of.items()}
                for rank, of in ((rank, update.weights) for rank, update in before.items())
            }
            if edited and _are_equal_again({r: u.weights for r, u in before.items()}, weights):
                met[last] = weights
                kinds.add(edited)
        before, last = by_rank, step
    if len(kinds) != 1:
        return {}, frozenset()
    (names,) = kinds
    return met, names


def _step_alone(by_rank: Mapping[int, Update]) -> bool:
    """Return whether ranks stepped with their own gradients, and have different weights now."""
    if len(by_rank) < 2:
        return False
    gradients = [update.gradient for update in by_rank.values()]
    names = set.intersection(*(set(of) for of in gradients))
    apart = _apart({rank: update.gradient for rank, update in by_rank.items()}, names)
    sizes = {name: gradients[0][name].size or 0 for name in names}
    moving = {name for name in names - apart if _is_there(gradients[0], name)}
    total = sum(sizes[name] for name in apart | moving)
    shared = sum(sizes[name] for name in moving)
    return bool(
        apart
        and shared <= _SHARED_MAX * total
        and _apart({rank: update.weights for rank, update in by_rank.items()}, apart)
    )


def _is_there(gradient: Tensors, name: str) -> bool:
    """Return whether a gradient isn't zero.

    It is zero for a tensor that took no part in the step.
    """
    values = gradient[name].elements()
    return values is None or bool(np.any(values))


def _apart(tensors: Mapping[int, Tensors], names: Set[str]) -> set[str]:
    return {
        name
        for name in names
        if len({of[name].digest if name in of else "" for of in tensors.values()}) > 1
    }


def _are_equal_again(before: Mapping[int, Tensors], after: Mapping[int, Tensors]) -> bool:
    first = next(iter(before.values()))
    parted = _apart(before, {*first})
    sizes = {name: first[name].size or 0 for name in parted}
    met = sum(sizes[name] for name in parted - _apart(after, parted))
    return bool(met) and met >= _MET_MIN * sum(sizes.values())


def _with_meetings(trace: Trace, met: Met, names: Set[str]) -> Iterator[Event]:
    """Yield the events, with a Synchronised event in place of the edits of each round."""
    after = {step + 1 for step in met}
    for event in trace.events:
        if isinstance(event, Update) and event.step in after:
            kept = {name: record for name, record in event.edited.items() if name not in names}
            event = replace(event, edited=kept)
        yield event
        if isinstance(event, Update) and event.rank in met.get(event.step, {}):
            weights = met[event.step][event.rank]
            yield Synchronised(
                step=event.step,
                rank=event.rank,
                weights={name: record for name, record in weights.items() if name in names},
            )


# --- by which rule --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """A rate and a momentum of the outer step, and the type of momentum as in `Traits.outer`."""

    rate: float
    momentum: float = 0.0
    kind: str = "nesterov"

    def of(self, trace: Trace) -> Trace:
        """Return the run with this rule in its scenario and traits."""
        options = {
            **trace.scenario.options,
            "outer_learning_rate": self.rate,
            "outer_momentum": self.momentum,
        }
        return replace(
            trace,
            scenario=trace.scenario.with_(options=options),
            traits=replace(trace.traits, outer=self.kind),
        )


_MEAN = _Rule(1.0)


def _with_rule(trace: Trace) -> Trace:
    """Return the run with the rule that all of its outer steps follow.

    They may follow none, but differ from the observed rule, or from the mean, by one known error.
    Then that rule is used. Otherwise the rule is unknown.
    """
    is_known = "outer_momentum" in trace.scenario.options and trace.traits.outer != "other"
    known = [trace] if is_known else []
    for candidate in (*known, _MEAN.of(trace)):
        if _follows(candidate) is None:
            return candidate
    unknown = replace(trace, traits=replace(trace.traits, outer="other"))
    if _is_a_choice(trace) or (not is_known and _is_a_multiple(trace)):
        return unknown
    # An error of the observed rule is tested before a fitted rule, since a fitted rate may hide it.
    if is_known and _follows(trace):
        return trace
    fitted = [rule.of(trace) for rule in _fitted(trace)]
    right = (one for one in fitted if _follows(one) is None)
    wrong = (one for one in (_MEAN.of(trace), *fitted) if _follows(one))
    return next(right, None) or next(wrong, unknown)


def _follows(trace: Trace) -> bool | None:
    tried = Tally("", observed=True)
    outer_step.follow(tried, trace)
    return None if tried.broken is None else outer_step.is_named(tried.broken.message)


def _is_a_choice(trace: Trace) -> bool:
    """Return whether each round gives all ranks the weights of one of them, not always rank 0's.

    Population-based training does so: it continues from its best member.
    """
    chosen: set[int] = set()
    for step, by_rank in rounds.synchronisations(trace).items():
        weights = by_rank[min(by_rank)].weights
        own = [
            rank
            for rank, update in evidence.updates(trace).get(step, {}).items()
            if all(update.weights[name].digest == record.digest for name, record in weights.items())
        ]
        if not own:
            return False
        chosen.add(own[0])
    return chosen != {0}


def _is_a_multiple(trace: Trace) -> bool:
    """Return whether the first outer step is the mean movement times or over the number of workers.

    Such a step may have a rate of 2, for example, or be a sum that nothing divides.
    """
    first = next(_moves(trace), None)
    share = None if first is None else _share(*first)
    size = float(trace.scenario.world_size)
    return share is not None and any(math.isclose(share, s, rel_tol=_OFF) for s in (size, 1 / size))


def _fitted(trace: Trace) -> Iterator[_Rule]:
    """Yield the rules that explain the first two outer steps by the ranks' mean movements."""
    moves = list(_moves(trace))
    share = _share(*moves[0]) if moves else None
    if not share or _is_a_multiple(trace):
        return
    rate = abs(share)
    if len(moves) > 1:
        (first, _), (second, move) = moves[:2]
        left = move - share * second
        kept = (_share(first, left) or 0.0) / share
        if 0 < kept < 1:
            yield _Rule(_short(rate), _short(kept), "momentum")
            ahead = (kept + math.sqrt(kept * kept + 4 * kept)) / 2
            if ahead < 1:
                yield _Rule(_short(rate / (1 + ahead)), _short(ahead))
    yield _Rule(_short(rate))


def _moves(trace: Trace) -> Iterator[tuple[Vector, Vector]]:
    """Yield for each round the mean movement of the ranks and the movement of the outer weights."""
    met = rounds.synchronisations(trace)
    names = {name for by_rank in met.values() for one in by_rank.values() for name in one.weights}
    start = next((begin for begin in trace.of(Start) if begin.step == 0), None)
    before = None if start is None else _flat(start.weights, names)
    updates, earlier = evidence.updates(trace), -1
    for step, by_rank in met.items():
        shares = outer_step.shares(trace, updates.get(step, {}), earlier, step)
        inner = {rank: _flat(updates[step][rank].weights, names) for rank in shares}
        after = _flat(by_rank[min(by_rank)].weights, names)
        if before is None or after is None or not shares:
            return
        mean = np.zeros_like(before)
        for rank, share in shares.items():
            vector = inner[rank]
            if vector is None or vector.shape != before.shape:
                return
            mean += share * vector
        yield mean - before, after - before
        before, earlier = after, step


def _flat(tensors: Tensors, names: Set[str]) -> Vector | None:
    values = evidence.vectors({name: tensors[name] for name in sorted(names) if name in tensors})
    if values is None or values.keys() != names:
        return None
    return np.concatenate([value.astype(np.float64) for value in values.values()])


def _share(of: Vector, move: Vector) -> float | None:
    size = float(np.vdot(of, of))
    share = float(np.vdot(of, move)) / size if size else math.nan
    return share if math.isfinite(share) else None


def _short(number: float) -> float:
    """Return the short decimal that `number` is, except for rounding; if none, return `number`."""
    decimals: Sequence[float] = [float(f"{number:.{d}g}") for d in range(1, _DIGITS + 1)]
    return next((d for d in decimals if math.isclose(d, number, rel_tol=_SHORT)), number)


ROWS = (
    Check(
        name="outer_agreement",
        id="F-LS-001",
        decides="after every outer step all workers hold the same weights and outer momentum",
        spoken_of="diloco local-sgd outer",
        judge=judge_agreement,
        plan=plan,
        takes_commands=True,
    ),
    Check(
        name="outer_schedule",
        id="F-LS-002",
        decides="workers synchronise when a round ends, and do not communicate within it",
        spoken_of="diloco inner-steps communication rounds",
        judge=outer_step.judge_schedule,
        plan=plan,
        takes_commands=True,
    ),
    Check(
        name="outer_step",
        id="F-LS-003",
        decides="the outer step is Nesterov's, along the mean pseudo-gradient of the members",
        spoken_of="diloco nesterov pseudo-gradient outer",
        judge=outer_step.judge,
        plan=plan,
        takes_commands=True,
    ),
    Check(
        name="outer_parity",
        id="F-LS-004",
        decides="with rounds of one plain SGD step, local SGD equals training on a single device",
        spoken_of="diloco local-sgd single",
        judge=judge_parity,
        plan=plan_parity,
        needs=(ORACLE,),
        witnesses=(ALONE,),
        tolerance_kinds=("relative",),
        takes_commands=True,
    ),
    Check(
        name="outer_finiteness",
        id="F-LS-005",
        decides="NaN or Inf in one worker's round halts all workers before the outer step",
        spoken_of="diloco local-sgd nan",
        judge=judge_finiteness,
        plan=plan_non_finite,
        needs=(POISONED,),
        takes_commands=True,
    ),
)
