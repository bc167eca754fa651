"""The paths of reports are checked before the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import arguments


def test_new_file_is_not_created(tmp_path: Path) -> None:
    """A writable path is accepted, and no file is created."""
    arguments.require_writable(tmp_path / "report.json", "json")
    assert list(tmp_path.iterdir()) == []


def test_existing_file_is_not_touched(tmp_path: Path) -> None:
    """A writable file is accepted and keeps its content and time."""
    path = tmp_path / "report.json"
    path.write_text("old")
    before = path.stat()
    arguments.require_writable(path, "json")
    assert path.read_text() == "old"
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_link_is_judged_by_its_target(tmp_path: Path) -> None:
    """A dangling link is accepted only if its target can be written."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "new.json")
    arguments.require_writable(link, "json")
    link.unlink()
    link.symlink_to(tmp_path / "no folder" / "new.json")
    with pytest.raises(UsageError, match="no folder does not exist"):
        arguments.require_writable(link, "json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", r"--junit .*: is a directory; give a path to a file"),
        ("missing/report.xml", r"missing does not exist; create it first"),
        ("file/report.xml", r"Not a directory; give a path to a file"),
        ("x" * 300, r"File name too long"),
    ],
)
def test_impossible_path_is_refused(tmp_path: Path, name: str, message: str) -> None:
    """A directory, a missing folder, a file as folder and an endless name are usage errors."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=message):
        arguments.require_writable(tmp_path / name, "junit")


@pytest.mark.parametrize("exists", [True, False])
def test_missing_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """Without permission for the file, or for the folder of a new file, a path is refused."""
    path = tmp_path / "report.json"
    if exists:
        path.write_text("old")
    # Tests may run as root, which permission bits don't stop.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match=r"--json .*: no permission to write"):
        arguments.require_writable(path, "json")


def test_write_names_the_path(tmp_path: Path) -> None:
    """A file that can't be written is a usage error with the path and the system's message."""
    path = tmp_path / "report.json"
    arguments.write_file("new é\n", path)
    assert path.read_bytes() == "new é\n".encode()
    with pytest.raises(UsageError, match=r"can't be written \(Is a directory\)"):
        arguments.write_file("new", tmp_path)


def test_a_record_is_written_as_json(tmp_path: Path) -> None:
    """A record is written as JSON with a line end."""
    arguments.write_file({"a": [1, None]}, tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text() == '{\n  "a": [\n    1,\n    null\n  ]\n}\n'
