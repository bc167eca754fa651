"""Handwritten rows: a mutant and a benign variant, with findings of clauses on them."""

from __future__ import annotations

from entrenar_py.check.kill_matrix import Row
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Counterexample, Finding, Verdict, inconclusive

SCENARIO = Scenario(system="reference", workload="linear", world_size=2, seed=0)
MUTANT = Variant(
    name="planted",
    summary="a bug",
    plants={},
    scenario=SCENARIO,
    source="somewhere #1",
    invariants=("F-DP-001",),
    place={"step": 1, "rank": 0},
)
BENIGN = Variant(
    name="harmless", summary="no bug", plants={}, scenario=SCENARIO, tried=("F-DP-001",)
)
HELD = Finding(invariant="F-DP-001", verdict=Verdict.HELD, compared=3)
UNKNOWN = inconclusive("F-DP-001", "the run crashed")


def falsified(step: int | None = None, rank: int | None = None) -> Finding:
    """Return a finding whose counterexample has this place."""
    found = Counterexample(message="broken", step=step, rank=rank)
    return Finding(
        invariant="F-DP-001",
        verdict=Verdict.FALSIFIED,
        compared=1,
        reason="broken",
        counterexample=found,
    )


def row(variant: Variant, finding: Finding, *, invariant: str = "F-DP-001") -> Row:
    """Return the row of `variant` judged by `invariant`."""
    return Row(variant=variant, invariant=invariant, finding=finding)
