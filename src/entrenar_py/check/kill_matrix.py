"""The kill matrix: every planted bug against the clauses that claim to detect it.

A clause kills a mutant if the mutant falsifies it. The kill has the right reason only if the
finding names the planted place. On a benign variant, every clause in its `tried` must hold, and no
clause may be falsified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from entrenar_py.check import clauses as checks
from entrenar_py.check import contract
from entrenar_py.check.contract import Invariant
from entrenar_py.check.harness import plan
from entrenar_py.check.harness.runner import Runner
from entrenar_py.check.reports import terminal
from entrenar_py.check.reports.report import EXIT_INCONCLUSIVE
from entrenar_py.shared import mutants, package_data, systems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.verdict import Counterexample, Finding, Verdict


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant judged by one clause."""

    variant: Variant
    invariant: str
    finding: Finding

    @property
    def killed(self) -> bool:
        """True if the clause was falsified. A crashed run is inconclusive, so it is not a kill."""
        return self.finding.verdict is Verdict.FALSIFIED

    @property
    def silent(self) -> bool:
        """True if the clause held, which needs at least one comparison."""
        return self.finding.verdict is Verdict.HELD

    @property
    def place_right(self) -> bool:
        """True if the counterexample has the same value in each field of the planted place."""
        broken = self.finding.counterexample
        return broken is not None and all(
            getattr(broken, name) == value for name, value in self.variant.place.items()
        )

    @property
    def right(self) -> bool:
        """True if the mutant was killed for the right reason, or the benign variant passed.

        On a benign variant the clauses in `tried` must hold. All other clauses may also be
        inconclusive, because such a small run may give them nothing to compare.
        """
        if not self.variant.benign:
            return self.killed and self.place_right
        return self.silent or not (self.killed or self.invariant in self.variant.tried)

    @property
    def outcome(self) -> str:
        """`killed`, `SURVIVED`, or the verdict on a benign variant; in capitals if it is wrong."""
        if not self.variant.benign:
            return "killed" if self.killed else "SURVIVED"
        verdict = self.finding.verdict
        return str(verdict) if self.right else verdict.upper()

    @property
    def complaint(self) -> str:
        """The reason why the row is not right."""
        if self.killed and not self.variant.benign:
            broken = self.finding.counterexample
            pointed = "nothing" if broken is None else broken.place() or broken.message
            return (
                f"the finding points at {pointed}, but the bug was planted at "
                f"{planted(self.variant)}"
            )
        return self.finding.reason or "no check found it"


def planted(variant: Variant) -> str:
    """Return the planted place as text, in the words of `Counterexample.place()`."""
    place = Counterexample(message="", **variant.place)
    values = "" if place.got is None else f"{place.got} for {place.expected}"
    return ", ".join(filter(None, (place.place(), values)))


def of_mutants(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of mutants, without those of benign variants."""
    return [row for row in rows if not row.variant.benign]


def of_benign(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return name of a benign variant -> its rows."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.variant.benign:
            by_name.setdefault(row.variant.name, []).append(row)
    return by_name


def all_right(rows: Sequence[Row]) -> bool:
    """Return whether there are rows, and all of them are right."""
    return bool(rows) and all(row.right for row in rows)


def summary(rows: Sequence[Row]) -> str:
    """Return a line: how many mutants were killed rightly, how many benign variants passed."""
    right: dict[str, bool] = {}
    for row in rows:
        right[row.variant.name] = right.get(row.variant.name, True) and row.right
    benign = of_benign(rows)
    mutants = right.keys() - benign.keys()
    killed, silent = (sum(right[name] for name in names) for names in (mutants, benign))
    return (
        f"{killed} of {len(mutants)} mutants killed for the right reason, "
        f"{silent} of {len(benign)} benign variants silent"
    )


def mutants_table(rows: Sequence[Row]) -> Table:
    """Return the table of mutants: which clause killed each, and the place in its finding."""
    shown = _table(
        "mutant", "source", "clause", "verdict", "found at", "place", long=("source", "found at")
    )
    for row in of_mutants(rows):
        broken = row.finding.counterexample
        shown.add_row(
            row.variant.name,
            row.variant.source,
            row.invariant,
            row.outcome,
            "" if broken is None else broken.place(),
            "right" if row.place_right else "wrong",
            style=None if row.right else "bold red",
        )
    return shown


def benign_table(rows: Sequence[Row]) -> Table:
    """Return the table of benign variants: clauses that held, were inconclusive, or were wrong."""
    shown = _table(
        "benign variant", "held", "inconclusive", "wrong", long=("inconclusive", "wrong")
    )
    for name, tried in of_benign(rows).items():
        wrong = [row for row in tried if not row.right]
        shown.add_row(
            name,
            f"{sum(row.silent for row in tried)} of {len(tried)}",
            ", ".join(row.invariant for row in tried if row.right and not row.silent),
            ", ".join(f"{row.invariant} {row.outcome}" for row in wrong),
            style="bold red" if wrong else None,
        )
    return shown


def _table(*titles: str, long: Sequence[str]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        shown.add_column(title, no_wrap=title not in long, overflow="fold")
    return shown


__all__ = [
    "Row",
    "all_right",
    "invariants",
    "judges",
    "run",
    "show",
    "summary",
]


def invariants() -> dict[str, Invariant]:
    """Return id -> clause for the clauses of the shipped contracts that a check decides.

    Raises ContractError if a clause names a mutant that is not in the catalogue.
    """
    known = contract.Vocabulary(checks=checks.terms(), mutants=mutants.names)
    loaded = [contract.load(path, vocabulary=known) for path in package_data.shipped_contracts()]
    clauses = [clause for loaded_contract in loaded for clause in loaded_contract.invariants]
    return {clause.id: clause for clause in clauses if checks.bind(clause)}


def judges(variant: Variant, invariants: Mapping[str, Invariant]) -> list[str]:
    """Return the ids of the clauses that judge `variant`, each once.

    A mutant is judged by the clauses it names and the clauses that name it. A benign variant is
    judged by the clauses in `tried`, and by every clause with a check for any training.
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
    """Judge each variant by its clauses, and return the rows.

    Each row is passed to `on_row` as soon as it is known. Raises UsageError if a variant names a
    clause that is not in `invariants`.
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

    After an interrupt, print the rows that are known so far, and return 4.
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
    for table in (mutants_table(rows), benign_table(rows)):
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
    check = checks.bind(clause)
    if check is None or check.id != clause.id or system not in systems.TRAINERS:
        return False
    return check.explores and plan.applies(check, system)
