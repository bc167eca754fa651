"""The place where a configuration is found, and files that don't count."""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path

import pytest

from entrenar_py.check.project import init, location, reading
from entrenar_py.shared.errors import ContractError, UsageError

TABLE = "[tool.entrenar-check]\n"


def test_the_nearest_counts(tmp_path: Path) -> None:
    """The nearest file in this folder or above counts, but no pyproject.toml without the table."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert location.find(inner) is None
    outer = tmp_path / location.SHARED
    outer.write_text(TABLE)
    (inner / location.SHARED).write_text('[project]\nname = "entrenar-check"\n')
    assert location.find(inner) == outer
    (tmp_path / "a" / location.OWN).write_text("")
    assert location.find(inner) == tmp_path / "a" / location.OWN


@pytest.mark.parametrize("mark", location.ROOT_MARKS)
def test_not_above_a_repository(tmp_path: Path, mark: str) -> None:
    """A file above the repository's root is ignored, one at it counts; `.git` may be a file."""
    (tmp_path / location.SHARED).write_text(TABLE)
    inner = tmp_path / "repository" / "src"
    inner.mkdir(parents=True)
    (tmp_path / "repository" / mark).touch()
    assert location.find(inner) is None
    (tmp_path / "repository" / location.SHARED).write_text(TABLE)
    assert location.find(inner) == tmp_path / "repository" / location.SHARED


def test_two_in_one_folder(tmp_path: Path) -> None:
    """Two configurations in one folder are ambiguous, and refused."""
    (tmp_path / location.OWN).write_text("")
    (tmp_path / location.SHARED).write_text(TABLE)
    with pytest.raises(UsageError, match="both configure entrenar-check; keep one of them"):
        location.find(tmp_path)


def test_a_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file above this folder is refused if another user owns it, who could choose what is run."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / location.OWN).write_text("")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    os.chown(tmp_path / location.OWN, 54321, -1) if os.geteuid() == 0 else None
    with pytest.raises(UsageError, match=r"belongs to another user \(uid \d+\).*--config FILE"):
        location.find(inner)
    assert location.find(tmp_path) == tmp_path / location.OWN


def test_what_can_not_be_read(tmp_path: Path) -> None:
    """A pipe, a very large file and a file that isn't text are refused."""
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    large, bytes_ = tmp_path / "large.toml", tmp_path / "bytes.toml"
    large.write_bytes(b"#" * (location.BYTES_MAX + 1))
    bytes_.write_bytes(b"# \xff")
    told = {pipe: "it is a pipe; give a file", large: "at most 1048576", bytes_: "not UTF-8 text"}
    for path, message in told.items():
        with pytest.raises(UsageError, match=message):
            location.read(path)
    with pytest.raises(UsageError, match="No such file"):
        location.read(tmp_path / "none.toml")


def test_a_foreign_file_that_is_broken_is_of_no_concern(tmp_path: Path) -> None:
    """An invalid pyproject.toml that doesn't name this command is ignored."""
    (tmp_path / location.SHARED).write_bytes(b"[broken \xff")
    assert location.find(tmp_path) is None


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 2000 + "]" * 2000])
def test_what_tomllib_itself_can_not_read(tmp_path: Path, value: str) -> None:
    """A number or a nesting beyond Python's limits is reported as invalid TOML."""
    for name in (location.OWN, location.SHARED):
        path = tmp_path / name
        path.write_text(f"{TABLE}steps = {value}\n")
        assert location.find(tmp_path) == path
        with pytest.raises(ContractError, match="no TOML: "):
            reading.load(path)
        with chdir(tmp_path), pytest.raises(UsageError):
            init.run([])
        path.unlink()


def test_a_configuration_that_links_to_itself_is_told(tmp_path: Path) -> None:
    """A configuration that links to itself is reported, not ignored."""
    (tmp_path / location.OWN).symlink_to(location.OWN)
    assert location._counts(tmp_path / location.OWN)
