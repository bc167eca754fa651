"""docs/ARCHITECTURE.md: each room has a row, and each path that is named exists."""

from __future__ import annotations

import re
from pathlib import Path

import entrenar_py
from tests.test_architecture import DOORS, WINGS

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


def test_every_wing_and_door_is_drawn() -> None:
    """The drawing has each wing and each door that tests/test_architecture.py knows."""
    drawing = PAGE.partition("## Wings")[2].partition("```\n")[2].partition("```")[0]
    doors, *rows = drawing.splitlines()
    assert set(re.findall(r"[a-z_]+", doors.partition("  ")[0])) == DOORS - {""}
    drawn = {name for row in rows for name in re.findall(r"\b([a-z]+)/ ", row)}
    assert drawn == set(WINGS)


def test_every_path_is_there() -> None:
    """Every path exists below src/entrenar_py or below the root."""
    paths = re.findall(r"`([a-z_0-9]+(?:/[A-Za-z_0-9.-]+)*(?:/|\.py))`", PAGE)
    assert paths
    assert [
        path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()
    ] == []
