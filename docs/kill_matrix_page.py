"""docs/kill-matrix.md: what each check decides, and which planted bugs it finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from entrenar_py.check import kill_matrix as matrix
from entrenar_py.check.kill_matrix import Row


def page(
    rows: Sequence[Row],
    scripts: Sequence[Sequence[str]] = (),
    checks: Sequence[Sequence[str]] = (),
) -> str:
    """Return the text of the page. It is the same on every machine on which all rows are right.

    Each item of `scripts` has the cells of a bug in a script: bug, script, source, clause, place.
    Each item of `checks` has a check's name, id, claim, tolerance kinds and own scenarios.
    """
    return "\n".join(_lines(rows, scripts, checks)) + "\n"


def _lines(
    rows: Sequence[Row], scripts: Sequence[Sequence[str]], checks: Sequence[Sequence[str]]
) -> Iterator[str]:
    yield "# Checks and the kill matrix"
    yield ""
    yield "<!-- Written by `make docs`; a test says when it is out of date. -->"
    yield ""
    yield (
        "This page shows which bugs the checks find, and where. `entrenar-check --mutants` plants "
        "each bug (a *mutant*) in a trainer; the code is in `falsification/`. A clause *kills* a "
        "mutant if the mutant falsifies it. It kills it *for the right reason* if the finding also "
        "names the place where the bug was planted. Correct trainers that work in unusual ways "
        "(*benign variants*) must falsify no clause: they are *silent*."
    )
    yield ""
    yield f"{matrix.summary(rows)}."
    yield ""
    yield "## Checks"
    yield ""
    yield (
        "A clause of a contract names the check that decides it, or has the check's id "
        "([the format](contract-format.md#checks)). If a clause has no scenarios, the check's own "
        "are used."
    )
    yield ""
    yield "| check | id | decides | tolerance kinds | own scenarios |"
    yield "|---|---|---|---|---|"
    yield from (_line(*cells) for cells in checks)
    yield ""
    yield "## Mutants"
    yield ""
    yield (
        "There is one row for each clause that must find the mutant. The column *source* names a "
        "published project or paper with the bug; *classic* means a well-known mistake without a "
        "single source. A place such as `8 for 9` means that the trainer gave 8 where 9 was "
        "expected."
    )
    yield ""
    yield "| mutant | bug | source | clause | verdict | planted and found at | place |"
    yield "|---|---|---|---|---|---|---|"
    yield from map(_mutant_line, matrix.of_mutants(rows))
    yield ""
    yield "## Benign variants"
    yield ""
    yield (
        "A variant is judged by the clauses that it was written for. If it is a trainer, it is "
        "also judged by every clause with a check that explores random scenarios and applies to "
        "this trainer. *Inconclusive* means that the run has nothing for the clause to compare, "
        "for instance no stop to resume from."
    )
    yield ""
    yield "| variant | what it does | held | inconclusive | wrong |"
    yield "|---|---|---|---|---|"
    yield from map(_benign_line, matrix.of_benign(rows).values())
    yield ""
    yield "## Bugs in scripts"
    yield ""
    yield (
        "These are scripts of `examples/user_trainers` with some lines changed, and the clause "
        "that finds each bug. Tests, `make twins` and `make integrations` run them; `--mutants` "
        "does not."
    )
    yield ""
    yield "| bug | script | source | clause | found at |"
    yield "|---|---|---|---|---|"
    yield from (_line(*cells) for cells in scripts)


def _mutant_line(row: Row) -> str:
    variant = row.variant
    return _line(
        f"`{variant.name}`",
        variant.summary,
        variant.source,
        row.invariant,
        row.outcome,
        matrix.planted(variant),
        "right" if row.place_right else "**wrong**",
    )


def _benign_line(tried: Sequence[Row]) -> str:
    return _line(
        f"`{tried[0].variant.name}`",
        tried[0].variant.summary,
        _ids(row.invariant for row in tried if row.silent),
        _ids(row.invariant for row in tried if row.right and not row.silent),
        _ids(f"**{row.invariant} {row.outcome}**" for row in tried if not row.right),
    )


def _ids(found: Iterator[str]) -> str:
    return ", ".join(sorted(found)) or "none"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
