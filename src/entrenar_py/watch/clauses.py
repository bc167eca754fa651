"""Which clauses a watch holds a training to, by the file of a contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from entrenar_py import contract, shipped
from entrenar_py.contract import TOLERANCE_KINDS, CheckTerms, Invariant, Vocabulary
from entrenar_py.errors import UsageError

IDENTITY, FINITENESS, LIVENESS = "replica_identity", "finiteness", "liveness"
# Check -> the clause that it decides where no contract says another.
ALL = {IDENTITY: "F-DP-001", FINITENESS: "F-DP-003", LIVENESS: "F-TI-004"}


class _Open(Vocabulary):
    """Whatever check a clause names is one: most of them are not the watch's."""

    def check_of(self, clause: Invariant) -> CheckTerms:
        """The check that `clause` names, or the one with its id."""
        named = clause.check or next((name for name, id_ in ALL.items() if id_ == clause.id), "")
        return CheckTerms(
            name=named, id=clause.id, tolerance_kinds=TOLERANCE_KINDS, takes_tolerance=True
        )


def select(given: str | Path | None) -> Mapping[str, str]:
    """Check -> id of the clause of contract `given` that it decides; all three without one.

    Raises UsageError where it has no such clause, ContractError where it is no contract.
    """
    if given is None:
        return ALL
    vocabulary = _Open(checks=(), mutants=lambda: None)
    path = shipped.contract_path(str(given))
    loaded = contract.load(path, vocabulary=vocabulary)
    found = {vocabulary.check_of(one).name: one.id for one in reversed(loaded.invariants)}
    selected = {check: found[check] for check in ALL if check in found}
    if not selected:
        raise UsageError(
            f"contract={str(given)!r}: no clause that can be watched; "
            f"give one with the check {', '.join(ALL)}"
        )
    return selected
