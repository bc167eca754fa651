"""docs/kill-matrix.md: what each check decides, and which planted bugs it was seen to find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from entrenar_py.check import kill_matrix as matrix
from entrenar_py.check.kill_matrix import Row


def page(
    rows: Sequence[Row],
    scripts: Sequence[Sequence[str]] = (),
    checks: Sequence[Sequence[str]] = (),
) -> str:
    """Return the whole page; the same on every machine where all is right.

    Each of `scripts` has the cells of a bug in a script: what, which script, source, clause, place.
    Each of `checks` has name, id, claim, tolerance kinds and own scenarios of a check.
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
        "each bug in a trainer. Most of these bugs were shipped in well-known projects; their code "
        "is in `falsification/`. A mutant is *killed* if every clause that names it in `mutants` "
        "is falsified, and the finding names the planted place. Correct trainers that work "
        "differently (benign variants) must raise no alarm."
    )
    yield ""
    yield f"{matrix.summary(rows)}."
    yield ""
    yield "## Checks"
    yield ""
    yield (
        "A clause of a contract names the check that decides it, or has the check's id "
        "([the format](contract-format.md#checks)). The check's own scenarios are used for a "
        "clause without any."
    )
    yield ""
    yield "| check | id | decides | tolerance kinds | own scenarios |"
    yield "|---|---|---|---|---|"
    yield from (_line(*cells) for cells in checks)
    yield ""
    yield "## Mutants"
    yield ""
    yield "| mutant | bug | source | clause | verdict | planted and found at | place |"
    yield "|---|---|---|---|---|---|---|"
    yield from map(_mutant_line, matrix.of_mutants(rows))
    yield ""
    yield "## Benign variants"
    yield ""
    yield (
        "Every clause whose check explores random scenarios judges each variant. Inconclusive: "
        "the run has nothing for the clause to compare, for instance no stop to resume from."
    )
    yield ""
    yield "| variant | what it does | held | inconclusive | wrong |"
    yield "|---|---|---|---|---|"
    yield from map(_benign_line, matrix.of_benign(rows).values())
    yield ""
    yield "## Bugs in scripts"
    yield ""
    yield (
        "Scripts of `examples/user_trainers` with some lines changed, and the clause that finds "
        "each bug. Tests, `make twins` and `make integrations` run them; this page does not."
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
