"""Clauses for local SGD, whose workers meet after each round: agreement, parity and finiteness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import resumes
from entrenar_py.check.clauses import (
    finiteness,
    oracles,
    outer_finiteness,
    outer_step,
    parity,
    plans,
    replica_identity,
)
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing, rounds
from entrenar_py.check.evidence.needs import ALONE, ORACLE, POISONED, SAVED, Traces
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Halt, Start, Synchronised, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally
from entrenar_py.shared.wording import listed


def plan_scenario(**changes: Any) -> Scenario:
    """Return a scenario: three workers, unequal shares, two epochs, rounds of 2, 2 and 1 steps."""
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
    """Plan a run without faults; and one in which a worker dies in a round and comes back later."""
    moves = (Fault(kind="leave", rank=1, step=1), Fault(kind="join", rank=1, step=3))
    return [plan_scenario(), plan_scenario(faults=moves)]


def plan_parity(invariant: Invariant) -> list[Scenario]:
    """Plan plain SGD, synchronised after every step, with the plain mean as the outer step."""
    return [plan_scenario(optimizer="sgd", learning_rate=0.05, options=rounds.AS_ONE)]


def plan_non_finite(invariant: Invariant) -> list[Scenario]:
    """Plan a run without faults; and one with a NaN in the middle of one worker's round."""
    bad = Fault(kind="non_finite_gradient", rank=1, step=2, value="nan")
    return [plan_scenario(), plan_scenario(faults=(bad,))]


def judge_agreement(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that workers hold equal tensors after an outer step, and joiners begin with those."""
    tally = missing.tally_for(invariant, traces)
    for trace in rounds.usable(traces, tally):
        replica_identity.compare(tally, rounds.as_steps(trace))
        _joined(tally, trace)
        _left_apart(tally, trace)
    return tally.finding(nothing=rounds.nothing(tally))


def _left_apart(tally: Tally, trace: Trace) -> None:
    """Count as missing what no round brings together: each rank's own, or forgotten."""
    names = {name for start in trace.of(Start) for name in start.trainable}
    met = {name for event in trace.of(Synchronised) for name in event.weights}
    apart = [
        name
        for name in sorted(names - met)
        if len({u.weights[name].digest for u in trace.of(Update) if name in u.weights}) > 1
    ]
    if apart and met:
        tally.miss(
            f"{listed(apart, most=2)} differ between ranks, and are brought together in no round: "
            "right if each rank keeps its own, wrong if they were forgotten; call "
            "obs.synchronised() where a round ends to have all weights compared"
        )


def _joined(tally: Tally, trace: Trace) -> None:
    """Check that a worker that joins begins with the weights of the last outer step."""
    synchronisations = rounds.synchronisations(trace)
    for start in rounds.joiners(trace):
        earlier = [step for step in synchronisations if step < start.step]
        if not earlier:
            continue
        by_rank = synchronisations[max(earlier)]
        outer = by_rank[min(by_rank)].weights
        message = f"rank {start.rank} joined with other weights than the outer ones"
        place = {**evidence.place(trace, start), "step": start.step - 1}
        closeness.compare_exact(tally, outer, start.weights, message, **place)


def judge_parity(invariant: Invariant, runs: Traces) -> Finding:
    """Judge runs in rounds of one step by the oracle's losses, and its weights after each step."""
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
                    "with plain SGD inside, outer rate 1 and outer momentum 0: run the script so",
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
    is_other = base is None and tally.observed  # a script whose workers don't step alone
    why = "" if is_other else oracles.missing_model(tally, runs)
    return tally.finding(nothing=why or rounds.nothing(tally))


def _in_steps(trace: Trace) -> Trace:
    """Return a run as one in common steps; a user's run on one worker is in rounds, too."""
    return rounds.as_steps(trace) if rounds.are_in(trace) else trace


def _until(trace: Trace, last: int) -> Trace:
    """Return a run without the steps after `last`: a meeting after the last step is not seen."""
    kept = (event for event in trace.events if (getattr(event, "step", None) or 0) <= last)
    return replace(trace, events=tuple(kept))


def judge_finiteness(invariant: Invariant, traces: Traces) -> Finding:
    """Judge that after a NaN in a worker's round all halt before the outer step, and say where."""
    tally = missing.tally_for(invariant, traces)
    kept = rounds.usable(traces, tally)
    if not kept:
        return tally.finding(nothing=rounds.nothing(tally))
    for trace in kept:
        if trace.scenario.workload == "own":
            outer_finiteness.compare(tally, trace)
            continue
        finiteness.compare(tally, rounds.as_steps(trace))
        bad = {(halt.rank, halt.step) for halt in trace.of(Halt)}
        for update in trace.of(Update):
            message = f"rank {update.rank} updated its own weights with a value that is not finite"
            is_good = (update.rank, update.step) not in bad
            tally.check(is_good, message, **evidence.place(trace, update))
    return tally.finding(nothing=rounds.nothing(tally))


def judge_state(invariant: Invariant, traces: Traces) -> Finding:
    """Judge the state that ranks resume with; that of an inner optimizer is each rank's own."""
    tally = missing.tally_for(invariant, traces)
    stopped = traces.of(SAVED)
    for run in evidence.usable(stopped or traces, tally):
        resumes.compare_state(tally, traces.base if stopped else None, run, ("optimizer",))
    return tally.finding(nothing=rounds.OWN_STATE)


# By check: what decides a clause about common steps in a user's runs whose workers step alone.
IN_ROUNDS: Mapping[str, Callable[[Invariant, Traces], Finding]] = {
    "replica_identity": judge_agreement,
    "finiteness": judge_finiteness,
    "parity": judge_parity,
    "weighting": outer_step.judge_weighting,
    "optimizer_state": judge_state,
}

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
        decides="in rounds of one step of plain SGD, local SGD is training on a single device",
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
        decides="NaN or Inf in one worker's round halts everyone before the outer step",
        spoken_of="diloco local-sgd nan",
        judge=judge_finiteness,
        plan=plan_non_finite,
        needs=(POISONED,),
        takes_commands=True,
    ),
)
