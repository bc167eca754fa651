"""The checks, which judge traces.

Related checks share a module. None uses torch, sockets or devices. The table `CHECKS` says which
check decides which clause, and on which runs.
"""

from __future__ import annotations

from dataclasses import replace

from entrenar_py.check.clauses import (
    audits,
    backends,
    coverage,
    devices,
    distillation,
    elastic,
    fine_tuning,
    finiteness,
    language_model,
    liveness,
    local_sgd,
    parity,
    preferences,
    randomness,
    reductions,
    replicas,
    resume,
    same_bits,
    step_rule,
    tuned_samples,
    weighting,
    wire,
)
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import CheckTerms, Invariant

__all__ = ["CHECKS", "Check", "bind", "terms"]

_FAMILIES = (
    *(audits, backends, coverage, devices, distillation, elastic, fine_tuning, finiteness),
    *(language_model, liveness, local_sgd, parity, preferences, randomness, reductions),
    *(replicas, resume, same_bits, step_rule, tuned_samples, weighting, wire),
)
# The order of the table, and so of lists and pages: by family of clauses, then by number.
_SOURCES = ("DP", "WGPU", "HET", "TI", "PAR", "WP", "RED", "LS", "EL", "FT", "LP", "KD", "LM")


def _place(check: Check) -> tuple[int, str]:
    return _SOURCES.index(check.id.split("-")[1]), check.id


_TABLE: tuple[Check, ...] = tuple(
    replace(row, in_rounds=local_sgd.IN_ROUNDS.get(row.name))
    for row in sorted((row for family in _FAMILIES for row in family.ROWS), key=_place)
)
CHECKS: dict[str, Check] = {check.name: check for check in _TABLE}
_BY_ID: dict[str, Check] = {check.id: check for check in _TABLE}


def bind(invariant: Invariant) -> Check | None:
    """Return the check that `invariant` names; if it names none, the check for its id.

    Return None if there is no such check, or if the invariant's binding says that it is not tried.
    """
    if invariant.binding is not None and invariant.binding.untried:
        return None
    if invariant.check is not None:
        return CHECKS.get(invariant.check)
    return _BY_ID.get(invariant.id)


def terms() -> tuple[CheckTerms, ...]:
    """Return the CheckTerms of all checks, which the loading of a contract needs."""
    return _TABLE
