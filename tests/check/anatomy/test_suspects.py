"""Each suspect is seen in a broken script, and not in a right one that looks like it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from entrenar_py.check.anatomy import suspects
from falsification import twins
from falsification.twins import Twin
from tests.check.anatomy import runs

TWINS = twins.family("anatomy")


def test_each_suspect_has_a_broken_and_a_right_twin() -> None:
    """Every row of the table has exactly one of each, and each has its own name."""
    names = Counter(pattern.name for pattern in suspects.PATTERNS)
    assert names == Counter(twin.check for twin in TWINS if twin.check)
    assert names == Counter(name for twin in TWINS for name in twin.wanted)


@pytest.mark.parametrize("twin", TWINS, ids=[twin.name for twin in TWINS])
def test_a_suspect_is_seen_where_it_is_and_nowhere_else(twin: Twin, tmp_path: Path) -> None:
    """A broken twin has its own suspect alone, and a right one has none."""
    records, ended = runs.recorded(twin, tmp_path)
    assert ended.code == 0, ended.tail
    assert not [*tmp_path.glob("auto-*.note.txt")]
    found = suspects.of(records)
    assert {one.name for one in found} == {twin.check} - {""}
    lines = twin.changed().splitlines()
    for one in found:
        assert lines[one.line - 1].strip(), "it points to a line of the script"
