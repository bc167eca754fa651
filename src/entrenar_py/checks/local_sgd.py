"""Clauses of synchronous training, where workers step alone: they hold of rounds, not of steps."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.checks import evidence, finiteness, oracles, parity, replica_identity, rounds
from entrenar_py.contract import Invariant
from entrenar_py.faults import Fault
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Halt, Trace, Update
from entrenar_py.verdict import Finding, Tally

_AS_ONE = {"inner_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}


def scenario(*, faults: tuple[Fault, ...] = (), **changes: object) -> Scenario:
    """Three workers, unequal shares, two epochs, rounds of two steps and a last one of one."""
    usual: dict[str, object] = {
        "system": "local_sgd",
        "workload": "mlp",
        "world_size": 3,
        "seed": 0,
        "num_shards": 5,
        "num_samples": 21,
        "batch_size": 8,
        "num_steps": 5,
        "width": 8,
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "detail": "values",
        "options": {"inner_steps": 2},
    }
    return Scenario.from_dict({**usual, **changes}).with_(faults=faults)


def plan(invariant: Invariant) -> list[Scenario]:
    """Undisturbed; and a worker that dies in a round and comes back in a later one."""
    moves = (Fault(kind="leave", rank=1, step=1), Fault(kind="join", rank=1, step=3))
    return [scenario(), scenario(faults=moves)]


def plan_parity(invariant: Invariant) -> list[Scenario]:
    """Plain SGD inside, synchronised after every step, and the mean taken as it is."""
    return [scenario(optimizer="sgd", learning_rate=0.05, options=_AS_ONE)]


def plan_non_finite(invariant: Invariant) -> list[Scenario]:
    """Calm, and a NaN in the middle of one worker's round."""
    bad = Fault(kind="non_finite_gradient", rank=1, step=2, value="nan")
    return [scenario(), scenario(faults=(bad,))]


def parity_family(scenario: Scenario) -> list[Scenario]:
    """The run, and the single device's by the independent trainer."""
    return evidence.distinct([scenario, oracles.oracle(scenario)])


def judge_agreement(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Every outer step, every worker, every tensor, the outer momentum; and who joins."""
    tally = Tally(invariant.id)
    for trace in rounds.usable(traces, tally):
        replica_identity.compare(tally, rounds.as_steps(trace))
        _joined(tally, trace)
    return tally.finding(nothing=rounds.NOTHING)


def _joined(tally: Tally, trace: Trace) -> None:
    """Who joins begins at the outer weights, whatever it held when it went away."""
    synchronisations = rounds.synchronisations(trace)
    for start in rounds.joiners(trace):
        earlier = [step for step in synchronisations if step < start.step]
        if not earlier:
            continue
        by_rank = synchronisations[max(earlier)]
        evidence.compare_exact(
            tally,
            by_rank[min(by_rank)].weights,
            start.weights,
            f"rank {start.rank} joined with other weights than the outer ones",
            step=start.step - 1,
            rank=start.rank,
            scenario=trace.scenario,
        )


def judge_parity(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Of runs in rounds of one step: the weights after each, and the losses."""
    tally = Tally(invariant.id)
    kept: list[Trace] = []
    for trace in rounds.usable(traces, tally):
        options = {**_AS_ONE, **trace.scenario.options}
        if trace.scenario.optimizer == "sgd" and options == {**options, **_AS_ONE}:
            kept.append(rounds.as_steps(trace))
        else:
            tally.miss(f"only with optimizer sgd and {_AS_ONE} is local SGD synchronous SGD")
    models = [one for one in evidence.usable(traces, tally) if not rounds.are_in(one)]
    if kept:
        parity.compare_with_oracle(tally, [*kept, *models], None)
    return tally.finding(nothing=oracles.missing_model([*kept, *models]) or rounds.NOTHING)


def judge_finiteness(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """A NaN in a worker's round: no outer step is made of it, and everyone halts, naming it."""
    tally = Tally(invariant.id)
    kept = rounds.usable(traces, tally)
    if not kept:
        return tally.finding(nothing=rounds.NOTHING)
    for trace in kept:
        finiteness.compare(tally, rounds.as_steps(trace))
        bad = {(halt.rank, halt.step) for halt in trace.of(Halt)}
        for update in trace.of(Update):
            tally.check(
                (update.rank, update.step) not in bad,
                f"rank {update.rank} moved its own weights by what is not finite",
                step=update.step,
                rank=update.rank,
                scenario=trace.scenario,
            )
    return tally.finding(nothing=rounds.NOTHING)
