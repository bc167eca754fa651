"""docs/ARCHITECTURE.md: each room has a row, and each path that is named exists."""

from __future__ import annotations

import re
from pathlib import Path

import entrenar_py
from tests.test_architecture import FLOORS

ROOT = Path(__file__).parents[2]
SOURCE = Path(entrenar_py.__file__).parent
PAGE = (ROOT / "docs/ARCHITECTURE.md").read_text("utf-8")
ROOMS = PAGE.partition("## Rooms")[2].partition("\n## ")[0]


def test_every_room_has_a_row() -> None:
    """Every module and package at the top has a row, and every package below one."""
    packages = {path.parent for path in SOURCE.rglob("__init__.py")} - {SOURCE}
    names = {f"{path.relative_to(SOURCE).as_posix()}/" for path in packages}
    names |= {path.name for path in SOURCE.glob("*.py") if path.name != "__init__.py"}
    rows = set(re.findall(r"^\| `([^`]+)` \|", ROOMS, flags=re.MULTILINE))
    assert names - rows == set()
    assert {
        row for row in rows if not (SOURCE / row).exists() and not (ROOT / row).exists()
    } == set()


def test_every_room_is_on_its_floor() -> None:
    """The drawing has each room on the floor that tests/test_architecture.py requires."""
    drawing = PAGE.partition("## Floors")[2].partition("```\n")[2].partition("```")[0]
    drawn = {
        word: int(line.split()[0])
        for line in drawing.splitlines()
        for word in re.findall(r"[a-z_]+", line)
        if word in FLOORS
    }
    assert drawn == {name: floor for name, floor in FLOORS.items() if name}


def test_every_path_is_there() -> None:
    """Every path exists below src/entrenar_py or below the root."""
    paths = re.findall(r"`([a-z_0-9]+(?:/[A-Za-z_0-9.-]+)*(?:/|\.py))`", PAGE)
    assert paths
    assert [
        path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()
    ] == []
