"""The clauses that a watch checks, selected by a contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from entrenar_py.check import contract
from entrenar_py.check.contract import TOLERANCE_KINDS, CheckTerms, Invariant, Vocabulary
from entrenar_py.shared import shipped
from entrenar_py.shared.errors import UsageError

IDENTITY, FINITENESS, LIVENESS = "replica_identity", "finiteness", "liveness"
# Check -> the clause that it decides without a contract.
ALL = {IDENTITY: "F-DP-001", FINITENESS: "F-DP-003", LIVENESS: "F-TI-004"}


class _Open(Vocabulary):
    """A vocabulary that accepts any check, so that clauses the watch can't check are no errors."""

    def check_of(self, clause: Invariant) -> CheckTerms:
        """Return the check that `clause` names, else the one that ALL has for the clause's id."""
        named = clause.check or next((name for name, id_ in ALL.items() if id_ == clause.id), "")
        return CheckTerms(
            name=named, id=clause.id, tolerance_kinds=TOLERANCE_KINDS, takes_tolerance=True
        )


def select(named: str | Path | None) -> Mapping[str, str]:
    """Return check -> id of the first clause in the contract `named` that the check decides.

    `named` is a file or a shipped contract; None stands for ALL. Raises UsageError if the contract
    has no clause that can be watched, and ContractError if the file is no contract.
    """
    if named is None:
        return ALL
    vocabulary = _Open(checks=(), mutants=lambda: None)
    path = shipped.contract_path(str(named))
    loaded = contract.load(path, vocabulary=vocabulary)
    ids = {vocabulary.check_of(clause).name: clause.id for clause in reversed(loaded.invariants)}
    selected = {check: ids[check] for check in ALL if check in ids}
    if not selected:
        raise UsageError(
            f"contract={str(named)!r}: it has no clause that can be watched; give a contract with "
            f"the check {', '.join(ALL)}"
        )
    return selected
