"""The kill matrix: run every planted bug against the clauses that claim to detect it.

A clause kills a mutant when the mutant falsifies it, and for the right reason only when the finding
names the planted place. On a benign variant every clause that it lists as `tried` must hold, and no
clause may be falsified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from entrenar_py.check import clauses as checks
from entrenar_py.check import contract
from entrenar_py.check.contract import Invariant
from entrenar_py.check.harness import plan
from entrenar_py.check.harness.runner import Runner
from entrenar_py.check.kill_matrix import tables
from entrenar_py.check.kill_matrix.rows import Row, all_right, summary
from entrenar_py.check.reports import terminal
from entrenar_py.check.reports.report import EXIT_INCONCLUSIVE
from entrenar_py.shared import mutants, shipped, systems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.mutants import Variant

__all__ = [
    "Row",
    "all_right",
    "invariants",
    "judges",
    "planted_bugs",
    "run",
    "show",
    "summary",
]


def invariants() -> dict[str, Invariant]:
    """Return every clause of the shipped contracts that a check decides, by id.

    Raises ContractError if a clause names a mutant that is not in the catalogue.
    """
    known = contract.Vocabulary(checks=checks.terms(), mutants=planted_bugs)
    loaded = [contract.load(path, vocabulary=known) for path in shipped.shipped_contracts()]
    clauses = [clause for loaded_contract in loaded for clause in loaded_contract.invariants]
    return {clause.id: clause for clause in clauses if checks.bind(clause)}


def planted_bugs() -> tuple[str, ...]:
    """Return the names of all mutants; UsageError if the mutants are not installed."""
    return tuple(name for name, variant in mutants.catalogue().items() if not variant.benign)


def judges(variant: Variant, invariants: Mapping[str, Invariant]) -> list[str]:
    """Return the ids of the clauses that judge `variant`, each once.

    A mutant is judged by the clauses it names and the clauses that name it. A benign variant is
    judged by the clauses it is tried on and by every clause whose check applies to any training.
    """
    if variant.benign:
        system = variant.scenario.system
        others = [name for name, clause in invariants.items() if _explores(clause, system)]
        return list(dict.fromkeys((*variant.tried, *others)))
    claiming = [name for name, clause in invariants.items() if variant.name in clause.mutants]
    return list(dict.fromkeys((*variant.invariants, *claiming)))


def run(
    variants: Sequence[Variant],
    invariants: Mapping[str, Invariant],
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Judge each variant by its clauses. Return the rows, and pass each to `on_row` at once.

    Raises UsageError for a clause that is not in `invariants`.
    """
    runner = Runner()
    rows = []
    for variant in variants:
        for wanted in judges(variant, invariants):
            if wanted not in invariants:
                raise UsageError(
                    f"variant {variant.name}: clause {wanted!r} is not in the contracts; "
                    f"they have {', '.join(invariants)}"
                )
            clause = invariants[wanted]
            check = checks.bind(clause)
            assert check is not None, "invariants() gives no other"
            finding = runner.try_scenario(clause, check, variant.subject())
            rows.append(Row(variant=variant, invariant=wanted, finding=finding))
            on_row(rows[-1])
    return rows


def show(console: Console) -> int:
    """Run the whole matrix and print it to `console`. Return 0 if all rows are right, else 1.

    When interrupted, print the rows that are known so far, and return 4.
    """
    variants = list(mutants.catalogue().values())
    rows: list[Row] = []
    interrupted = False
    with console.status("planting bugs") as status:

        def on_row(row: Row) -> None:
            rows.append(row)
            status.update(f"{row.variant.name} against {row.invariant}")

        try:
            run(variants, invariants(), on_row)
        except KeyboardInterrupt:
            interrupted = True
    for table in (tables.mutants(rows), tables.benign(rows)):
        terminal.print_table(console, table)
    console.print(summary(rows), soft_wrap=True)
    for row in rows:
        if not row.right:
            line = f"{row.variant.name}, {row.invariant}: {row.complaint}"
            console.print(line, markup=False, soft_wrap=True)
    if interrupted:
        tried = len({row.variant.name for row in rows})
        console.print(f"interrupted in variant {tried} of {len(variants)}")
        return EXIT_INCONCLUSIVE
    return 0 if all_right(rows) else 1


def _explores(clause: Invariant, system: str) -> bool:
    """Return whether `system` is a trainer, and the clause's check has its id and fits any run."""
    check = checks.bind(clause)
    if check is None or check.id != clause.id or system not in systems.TRAINERS:
        return False
    return check.explores and plan.applies(check, system)
