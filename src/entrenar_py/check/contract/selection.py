"""The ids by which a person selects clauses of a contract."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from entrenar_py.check.contract.records import Contract
from entrenar_py.shared.errors import UsageError


def ids_of(contract: Contract) -> dict[str, None]:
    """Return the ids that select clauses. A statement's id selects all clauses made from it."""
    return {name: None for clause in contract.invariants for name in (clause.id, clause.item)}


def require_ids(
    wanted: Iterable[str], ids: Collection[str], where: str, *, field: str = ""
) -> None:
    """Raise UsageError about `field` for the first of `wanted` that is not in `ids`."""
    for clause in wanted:
        if clause not in ids:
            message = f"id {clause!r} is not in {where}: it has {', '.join(ids)}"
            raise UsageError(message, field=field)
