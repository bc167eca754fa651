"""Judges of traces, one module a family; they know nothing of torch, sockets or devices.

`CHECKS` is the whole table: which check decides which clause, on which runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from entrenar_py.checks import (
    coverage,
    fallback,
    finiteness,
    liveness,
    manifest,
    matmul,
    memory,
    parity,
    plans,
    randomness,
    recovery,
    replica_identity,
    resume,
    same_bits,
    step_rule,
    weighting,
)
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Trace
from entrenar_py.verdict import Finding


def alone(scenario: Scenario) -> list[Scenario]:
    """A family of one: the run is judged by itself."""
    return [scenario]


@dataclass(frozen=True, kw_only=True)
class Check:
    """How one kind of clause is decided.

    `plan` gives the scenarios of a clause that brings none. `family` gives the runs that one
    scenario is judged on, itself first. `judge` takes the traces of any number of families.
    `explores` tells whether random scenarios around the plan make sense.
    """

    name: str
    id: str
    judge: Callable[[Invariant, Sequence[Trace]], Finding]
    plan: Callable[[Invariant], list[Scenario]]
    family: Callable[[Scenario], list[Scenario]] = alone
    explores: bool = True


_TABLE = (
    Check(
        name="replica_identity",
        id="F-DP-001",
        judge=replica_identity.judge,
        plan=plans.training,
    ),
    Check(
        name="coverage",
        id="F-DP-002",
        judge=coverage.judge,
        plan=plans.epochs,
        family=coverage.family,
    ),
    Check(name="finiteness", id="F-DP-003", judge=finiteness.judge, plan=plans.non_finite),
    Check(
        name="fallback",
        id="F-DP-004",
        judge=fallback.judge,
        plan=fallback.plan,
        explores=False,
    ),
    Check(
        name="parity",
        id="F-DP-005",
        judge=parity.judge,
        plan=plans.parity,
        family=parity.family,
    ),
    Check(
        name="recovery",
        id="F-DP-006",
        judge=recovery.judge,
        plan=plans.departures,
        family=recovery.family,
    ),
    Check(name="matmul", id="F-WGPU-001", judge=matmul.judge, plan=matmul.plan, explores=False),
    Check(
        name="manifest", id="F-HET-001", judge=manifest.judge, plan=manifest.plan, explores=False
    ),
    Check(name="memory", id="F-HET-002", judge=memory.judge, plan=memory.plan, explores=False),
    Check(
        name="weighting",
        id="F-TI-001",
        judge=weighting.judge,
        plan=plans.parity,
        family=parity.family,
    ),
    Check(
        name="optimizer_state",
        id="F-TI-002",
        judge=replica_identity.judge_state,
        plan=plans.stops,
    ),
    Check(name="resume", id="F-TI-003", judge=resume.judge, plan=plans.stops, family=resume.family),
    Check(name="liveness", id="F-TI-004", judge=liveness.judge, plan=plans.movement),
    Check(
        name="randomness",
        id="F-TI-005",
        judge=randomness.judge,
        plan=plans.random_streams,
        family=randomness.family,
    ),
    Check(
        name="worker_count",
        id="F-TI-006",
        judge=same_bits.judge_worker_count,
        plan=plans.training,
        family=same_bits.worker_counts,
    ),
    Check(
        name="determinism",
        id="F-TI-007",
        judge=same_bits.judge_determinism,
        plan=plans.training,
        family=same_bits.repeated,
    ),
    Check(name="step_rule", id="F-TI-008", judge=step_rule.judge, plan=plans.step_rules),
)

CHECKS: dict[str, Check] = {check.name: check for check in _TABLE}
_BY_ID: dict[str, Check] = {check.id: check for check in _TABLE}


def bind(invariant: Invariant) -> Check | None:
    """The check that decides `invariant`: the one it names, or the one with its id; or none."""
    if invariant.check is not None:
        return CHECKS.get(invariant.check)
    return _BY_ID.get(invariant.id)
