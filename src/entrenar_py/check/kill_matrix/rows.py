"""The rows of the kill matrix: one variant judged by one clause, and whether that is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        """Return whether the clause was falsified. A crashed run is inconclusive, so no kill."""
        return self.finding.verdict is Verdict.FALSIFIED

    @property
    def silent(self) -> bool:
        """Return whether the clause held, which needs at least one comparison."""
        return self.finding.verdict is Verdict.HELD

    @property
    def place_right(self) -> bool:
        """Return whether the counterexample has the value of each field of the planted place."""
        broken = self.finding.counterexample
        return broken is not None and all(
            getattr(broken, name) == value for name, value in self.variant.place.items()
        )

    @property
    def right(self) -> bool:
        """Return whether the mutant was killed for the right reason, or the benign variant passed.

        On a benign variant the clauses in `tried` must hold. All others may also be inconclusive,
        because so small a run may give them nothing to compare.
        """
        if not self.variant.benign:
            return self.killed and self.place_right
        return self.silent or not (self.killed or self.invariant in self.variant.tried)

    @property
    def outcome(self) -> str:
        """Return `killed`, `SURVIVED`, or the verdict on a benign variant, in capitals if wrong."""
        if not self.variant.benign:
            return "killed" if self.killed else "SURVIVED"
        verdict = self.finding.verdict
        return str(verdict) if self.right else verdict.upper()

    @property
    def complaint(self) -> str:
        """Return why the row is not right."""
        if self.killed and not self.variant.benign:
            broken = self.finding.counterexample
            pointed = "nothing" if broken is None else broken.place() or broken.message
            return f"the finding points at {pointed}, planted was {planted(self.variant)}"
        return self.finding.reason or "no check saw it"


def planted(variant: Variant) -> str:
    """Return the planted place as text, in the words of `Counterexample.place()`."""
    place = Counterexample(message="", **variant.place)
    values = "" if place.got is None else f"{place.got} for {place.expected}"
    return ", ".join(filter(None, (place.place(), values)))


def of_mutants(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of mutants."""
    return [row for row in rows if not row.variant.benign]


def of_benign(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each benign variant, by its name."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.variant.benign:
            by_name.setdefault(row.variant.name, []).append(row)
    return by_name


def all_right(rows: Sequence[Row]) -> bool:
    """Return whether there are rows, and all of them are right."""
    return bool(rows) and all(row.right for row in rows)


def summary(rows: Sequence[Row]) -> str:
    """Return a line: how many mutants were rightly killed, how many benign variants were silent."""
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
