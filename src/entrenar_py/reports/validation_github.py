"""Findings of validation for GitHub's runners: annotations at the contracts' lines, a summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from entrenar_py.contract.validation import Level, RuleFinding, Validation
from entrenar_py.reports import evidence, github, validation

_LEVELS = {Level.ERROR: "error", Level.WARNING: "warning", Level.INFO: "note"}


def annotate(found: Validation, *, root: Path) -> Iterator[str]:
    """Yield a line for each finding that counts, worst first: a runner shows ten a kind.

    `root` is the folder of the checkout: what lies elsewhere has no line to stand at.
    """
    told = [finding for finding in found.findings if finding.counts]
    for finding in sorted(told, key=lambda one: list(_LEVELS).index(one.level)):
        yield github.command(
            _LEVELS[finding.level],
            evidence.one_line(finding.message),
            title=finding.rule.id,
            at=finding.at,
            root=root,
        )


def summary(found: Validation) -> str:
    """Return the Markdown page: a verdict for each contract, a row for each finding."""
    lines = []
    for line in validation.verdicts(found):
        lines += [f"### {github.markdown(line)}", ""]
    if found.findings:
        lines += ["| level | rule | place | finding |", "|---|---|---|---|"]
        lines += map(_row, found.findings)
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(finding: RuleFinding) -> str:
    by = finding.suppressed
    level = str(finding.level) if by is None else f"suppressed until {by.until}: {by.reason}"
    place = finding.item if finding.at is None else str(finding.at)
    cells = (level, finding.rule.id, place, finding.message)
    return f"| {' | '.join(map(github.markdown, cells))} |"
