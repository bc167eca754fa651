"""Who checks the checker: every planted bug against the clauses that claim to see it.

A mutant is killed when such a clause is falsified, and for the right reason only when the finding
names the planted place. Benign variants must leave every clause they are tried on held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from entrenar_py import checks, contract, mutants, shipped
from entrenar_py.contract import Invariant
from entrenar_py.errors import UsageError
from entrenar_py.mutants import Variant
from entrenar_py.runner import Runner
from entrenar_py.verdict import Counterexample, Finding, Verdict

# Bugs known from elsewhere that no data-parallel trainer can have: what they need, and their names.
NOT_EXPRESSIBLE: Mapping[str, str] = {
    "tensor parallelism": "CLIP-TP-RANK, CLIP-COUNT, TP-PARTIAL, SP-LN-AVG, DISPATCH-DP",
    "pipeline stages": "TIED-PP, PP-GAS-POW, CKPT-RESHARD-NAME",
    "experts": "EP-SCALE",
    "a sharded average of the weights": "EMA-SHARD",
}

_PIPE_CHARS = 180  # in a pipe a row should be a line


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant judged by one clause."""

    variant: Variant
    invariant: str
    finding: Finding

    @property
    def killed(self) -> bool:
        """Whether the clause was falsified; a crashed run is inconclusive and kills nothing."""
        return self.finding.verdict is Verdict.FALSIFIED

    @property
    def silent(self) -> bool:
        """Whether the clause held, with something compared."""
        return self.finding.verdict is Verdict.HELD

    @property
    def place_right(self) -> bool:
        """Whether the counterexample names the planted place, in every field that is known."""
        found = self.finding.counterexample
        return found is not None and all(
            getattr(found, name) == value for name, value in self.variant.place.items()
        )

    @property
    def right(self) -> bool:
        """A mutant killed for the right reason, or a benign variant left alone."""
        return self.silent if self.variant.benign else self.killed and self.place_right


def invariants() -> dict[str, Invariant]:
    """Every clause of the shipped contracts that a check decides, by id."""
    loaded = [
        contract.load(path, covers=lambda clause: checks.bind(clause) is not None)
        for path in shipped.shipped_contracts()
    ]
    return {clause.id: clause for one in loaded for clause in one.invariants if checks.bind(clause)}


def run(
    variants: Sequence[Variant],
    invariants: Mapping[str, Invariant],
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A row for each variant and each clause it names, in order; `on_row` hears of each at once.

    Raises UsageError for a clause that is not among `invariants`.
    """
    runner = Runner()
    rows = []
    for variant in variants:
        for wanted in variant.tried if variant.benign else variant.invariants:
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


def all_right(rows: Sequence[Row]) -> bool:
    """Whether there are rows, and every mutant died where it should and nothing benign alarmed."""
    return bool(rows) and all(row.right for row in rows)


def show(console: Console) -> int:
    """Runs the whole matrix and prints it to `console`; 0 if all is right, 1 if not."""
    with console.status("planting bugs") as status:
        rows = run(
            list(mutants.catalogue().values()),
            invariants(),
            on_row=lambda row: status.update(f"{row.variant.name} against {row.invariant}"),
        )
    shown = table(rows)
    shown.width = None if console.is_terminal else _PIPE_CHARS
    console.print(shown, crop=False)
    console.print(summary(rows))
    for row in rows:
        if not row.right:
            console.print(f"{row.variant.name}, {row.invariant}: {_complaint(row)}", markup=False)
    return 0 if all_right(rows) else 1


def table(rows: Sequence[Row]) -> Table:
    """The matrix for a terminal: one line a row."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("variant", "source", "clause", "verdict", "finding pointed at", "place"):
        # What is searched for stays in one piece; the long ones fold, never cut.
        whole = title not in ("source", "finding pointed at")
        shown.add_column(title, no_wrap=whole, overflow="fold")
    for row in rows:
        found = row.finding.counterexample
        shown.add_row(
            row.variant.name,
            row.variant.source,
            row.invariant,
            _outcome(row),
            "" if found is None else found.place(),
            "" if row.variant.benign else "right" if row.place_right else "wrong",
            style=None if row.right else "bold red",
        )
    return shown


def summary(rows: Sequence[Row]) -> str:
    """`70 of 70 mutants killed for the right reason, 20 of 20 benign variants silent`."""
    right: dict[str, bool] = {}
    for row in rows:
        right[row.variant.name] = right.get(row.variant.name, True) and row.right
    benign = {row.variant.name for row in rows if row.variant.benign}
    planted = set(right) - benign
    killed, silent = (sum(right[name] for name in names) for names in (planted, benign))
    return (
        f"{killed} of {len(planted)} mutants killed for the right reason, "
        f"{silent} of {len(benign)} benign variants silent"
    )


def markdown(rows: Sequence[Row]) -> str:
    """The matrix as a page of the documentation; the same on every machine where all is right."""
    return "\n".join(_page(rows)) + "\n"


def _page(rows: Sequence[Row]) -> Iterator[str]:
    yield "# The kill matrix"
    yield ""
    yield "<!-- Written by `kill_matrix.markdown`; a test says when it is out of date. -->"
    yield ""
    yield (
        "A check that can't fail is worth nothing. So bugs are planted in the trainers, most of "
        "them bugs that shipped in well-known projects, and each must be *killed*: a clause that "
        "claims to see it is falsified, and the finding names the planted place. Trainers that are "
        "right in another way must leave every check silent. `entrenar-check --mutants` runs all "
        "of it; the code is in `falsification/`."
    )
    yield ""
    yield f"{summary(rows)}."
    yield ""
    yield "## Mutants"
    yield ""
    yield "| mutant | bug | source | clause | verdict | planted and found at | place |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        if not row.variant.benign:
            yield _mutant_line(row)
    yield ""
    yield "## Benign variants"
    yield ""
    yield "| variant | what it does | clauses | alarms |"
    yield "|---|---|---|---|"
    yield from _benign_lines(rows)
    yield ""
    yield "## Not expressible here"
    yield ""
    yield "Bugs that need what a data-parallel trainer does not have:"
    yield ""
    for what, names in NOT_EXPRESSIBLE.items():
        yield f"- {what}: {names}"


def _mutant_line(row: Row) -> str:
    variant = row.variant
    verdict = "right" if row.place_right else "**wrong**"
    cells = (
        f"`{variant.name}`",
        variant.summary,
        variant.source,
        row.invariant,
        _outcome(row),
        _planted(variant),
        verdict,
    )
    return f"| {' | '.join(cells)} |"


def _benign_lines(rows: Sequence[Row]) -> Iterator[str]:
    by_variant: dict[str, list[Row]] = {}
    for row in rows:
        if row.variant.benign:
            by_variant.setdefault(row.variant.name, []).append(row)
    for name, tried in by_variant.items():
        clauses = ", ".join(row.invariant for row in tried)
        alarms = ", ".join(f"**{row.invariant}**" for row in tried if not row.silent) or "none"
        yield f"| `{name}` | {tried[0].variant.summary} | {clauses} | {alarms} |"


def _planted(variant: Variant) -> str:
    """The planted place as a counterexample would name it."""
    place = Counterexample(message="", **variant.place)
    values = "" if place.got is None else f"{place.got} for {place.expected}"
    return ", ".join(filter(None, (place.place(), values)))


def _outcome(row: Row) -> str:
    if row.variant.benign:
        return "silent" if row.silent else row.finding.verdict.upper()
    return "killed" if row.killed else "SURVIVED"


def _complaint(row: Row) -> str:
    """Why a row is not right."""
    if row.killed and not row.variant.benign:
        found = row.finding.counterexample
        pointed = "nothing" if found is None else found.place() or found.message
        return f"the finding points at {pointed}, planted was {_planted(row.variant)}"
    return row.finding.reason or "no check saw it"
