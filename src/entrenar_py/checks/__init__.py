"""Judges of traces, one module a family; they know nothing of torch, sockets or devices.

`CHECKS` is the whole table: which check decides which clause, on which runs.
"""

from __future__ import annotations

from entrenar_py.checks import (
    audits,
    coverage,
    devices,
    endurance,
    fallback,
    finiteness,
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
    step_rule,
    weighting,
    wire,
)
from entrenar_py.checks.check import Check
from entrenar_py.contract import CheckTerms, Invariant

__all__ = ["CHECKS", "Check", "bind", "terms"]


# Each has its rows of the table, in this order.
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
    reductions,
    local_sgd,
)
_TABLE: tuple[Check, ...] = tuple(row for family in _FAMILIES for row in family.ROWS)
CHECKS: dict[str, Check] = {check.name: check for check in _TABLE}
_BY_ID: dict[str, Check] = {check.id: check for check in _TABLE}


def bind(invariant: Invariant) -> Check | None:
    """The check that decides `invariant`: the one it names, or the one with its id; or none.

    None, too, where its binding says why nothing can be compared.
    """
    if invariant.binding is not None and invariant.binding.untried:
        return None
    if invariant.check is not None:
        return CHECKS.get(invariant.check)
    return _BY_ID.get(invariant.id)


def terms() -> tuple[CheckTerms, ...]:
    """Every check as clauses see it."""
    return _TABLE
