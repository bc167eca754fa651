"""The place of a clause, as services that show findings beside a file want it, and its level.

SARIF viewers and GitHub alike: a path below the checkout, and one of three levels.
"""

from __future__ import annotations

from pathlib import Path

from entrenar_py.reports.report import Entry
from entrenar_py.verdict import Verdict


def below(path: str, root: Path) -> str | None:
    """Return `path` relative to the folder `root`, with forward slashes; None if it isn't below."""
    found = Path(path).resolve()
    return (
        found.relative_to(root.resolve()).as_posix()
        if found.is_relative_to(root.resolve())
        else None
    )


def level(entry: Entry, *, allow_inconclusive: bool) -> str | None:
    """Return `error` for what is falsified, `warning` for what is inconclusive, or `note` where the
    user allows that; None for what held.
    """
    if entry.verdict is Verdict.FALSIFIED:
        return "error"
    if entry.verdict is Verdict.INCONCLUSIVE:
        return "note" if allow_inconclusive else "warning"
    return None
