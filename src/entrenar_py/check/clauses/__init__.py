"""The checks, which judge traces. Related ones share a module. None uses torch, sockets or devices.

`CHECKS` is the whole table: which check decides which clause, on which runs.
"""

from __future__ import annotations

from dataclasses import replace

from entrenar_py.check.clauses import (
    audits,
    averages,
    coverage,
    devices,
    endurance,
    fallback,
    finiteness,
    language_model,
    liveness,
    local_sgd,
    manifest,
    memory,
    optimizer_state,
    parameter_share,
    parity,
    randomness,
    recovery,
    reductions,
    replica_identity,
    resume,
    same_bits,
    soft_targets,
    step_rule,
    teacher_rows,
    tuned_samples,
    tuned_stages,
    tuned_steps,
    tuned_strategies,
    tuned_weights,
    weighting,
    wire,
)
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import CheckTerms, Invariant

__all__ = ["CHECKS", "Check", "bind", "terms"]

# The modules with rows of the table, in the table's order.
_FAMILIES = (
    replica_identity,
    coverage,
    finiteness,
    fallback,
    parity,
    recovery,
    devices,
    manifest,
    memory,
    weighting,
    optimizer_state,
    resume,
    liveness,
    randomness,
    same_bits,
    step_rule,
    parameter_share,
    wire,
    endurance,
    audits,
    averages,
    reductions,
    local_sgd,
    tuned_weights,
    tuned_samples,
    tuned_steps,
    tuned_strategies,
    tuned_stages,
    soft_targets,
    teacher_rows,
    language_model,
)
_TABLE: tuple[Check, ...] = tuple(
    replace(row, in_rounds=local_sgd.IN_ROUNDS.get(row.name))
    for family in _FAMILIES
    for row in family.ROWS
)
CHECKS: dict[str, Check] = {check.name: check for check in _TABLE}
_BY_ID: dict[str, Check] = {check.id: check for check in _TABLE}


def bind(invariant: Invariant) -> Check | None:
    """Return the check that `invariant` names, or if it names none, the check with its id.

    None if there is no such check, or if the invariant's binding says that it can't be tried.
    """
    if invariant.binding is not None and invariant.binding.untried:
        return None
    if invariant.check is not None:
        return CHECKS.get(invariant.check)
    return _BY_ID.get(invariant.id)


def terms() -> tuple[CheckTerms, ...]:
    """Return every check, as the CheckTerms that loading a contract needs."""
    return _TABLE
