"""Where a clause stands as seen from a checkout, and how loudly it is told."""

from __future__ import annotations

from pathlib import Path

from entrenar_py.reports import places
from entrenar_py.reports.report import Report


def test_below(tmp_path: Path) -> None:
    """A file of the checkout by its path in it, whatever way it was given; others not at all."""
    assert places.below(str(tmp_path / "a" / ".." / "b" / "c.yaml"), tmp_path) == "b/c.yaml"
    assert places.below(str(tmp_path.parent / "c.yaml"), tmp_path) is None


def test_level(full: Report) -> None:
    """Falsified is an error whatever was allowed; inconclusive a warning, or a note if allowed."""
    strict = [places.level(entry, allow_inconclusive=False) for entry in full.ranked]
    allowed = [places.level(entry, allow_inconclusive=True) for entry in full.ranked]
    assert strict == ["error", "warning", None, None]
    assert allowed == ["error", "note", None, None]
