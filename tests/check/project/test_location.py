"""The place where a configuration is found, and files that don't count."""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path

import pytest

from entrenar_py.check.project import configuration, init, toml_file
from entrenar_py.shared.errors import ContractError, UsageError

TABLE = "[tool.entrenar-check]\n"


def test_the_nearest_counts(tmp_path: Path) -> None:
    """The nearest file in this folder or above counts, but no pyproject.toml without the table."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert toml_file.find(inner) is None
    outer = tmp_path / toml_file.SHARED
    outer.write_text(TABLE)
    (inner / toml_file.SHARED).write_text('[project]\nname = "entrenar-check"\n')
    assert toml_file.find(inner) == outer
    (tmp_path / "a" / toml_file.OWN).write_text("")
    assert toml_file.find(inner) == tmp_path / "a" / toml_file.OWN


@pytest.mark.parametrize("mark", toml_file.ROOT_MARKS)
def test_not_above_a_repository(tmp_path: Path, mark: str) -> None:
    """A file above the repository's root is ignored, one at it counts; `.git` may be a file."""
    (tmp_path / toml_file.SHARED).write_text(TABLE)
    inner = tmp_path / "repository" / "src"
    inner.mkdir(parents=True)
    (tmp_path / "repository" / mark).touch()
    assert toml_file.find(inner) is None
    (tmp_path / "repository" / toml_file.SHARED).write_text(TABLE)
    assert toml_file.find(inner) == tmp_path / "repository" / toml_file.SHARED


def test_two_in_one_folder(tmp_path: Path) -> None:
    """Two configurations in one folder are ambiguous, and refused."""
    (tmp_path / toml_file.OWN).write_text("")
    (tmp_path / toml_file.SHARED).write_text(TABLE)
    with pytest.raises(UsageError, match="both configure entrenar-check; keep one of them"):
        toml_file.find(tmp_path)


def test_a_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file above this folder is refused if another user owns it, who could choose what is run."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / toml_file.OWN).write_text("")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    os.chown(tmp_path / toml_file.OWN, 54321, -1) if os.geteuid() == 0 else None
    with pytest.raises(UsageError, match=r"belongs to another user \(uid \d+\).*--config FILE"):
        toml_file.find(inner)
    assert toml_file.find(tmp_path) == tmp_path / toml_file.OWN


def test_what_can_not_be_read(tmp_path: Path) -> None:
    """A pipe, a very large file and a file that isn't text are refused."""
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    large, bytes_ = tmp_path / "large.toml", tmp_path / "bytes.toml"
    large.write_bytes(b"#" * (toml_file.BYTES_MAX + 1))
    bytes_.write_bytes(b"# \xff")
    told = {pipe: "it is a pipe; give a file", large: "at most 1048576", bytes_: "not UTF-8 text"}
    for path, message in told.items():
        with pytest.raises(UsageError, match=message):
            toml_file.read(path)
    with pytest.raises(UsageError, match="No such file"):
        toml_file.read(tmp_path / "none.toml")


def test_a_foreign_file_that_is_broken_is_of_no_concern(tmp_path: Path) -> None:
    """An invalid pyproject.toml that doesn't name this command is ignored."""
    (tmp_path / toml_file.SHARED).write_bytes(b"[broken \xff")
    assert toml_file.find(tmp_path) is None


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 2000 + "]" * 2000])
def test_what_tomllib_itself_can_not_read(tmp_path: Path, value: str) -> None:
    """A number or a nesting beyond Python's limits is reported as invalid TOML."""
    for name in (toml_file.OWN, toml_file.SHARED):
        path = tmp_path / name
        path.write_text(f"{TABLE}steps = {value}\n")
        assert toml_file.find(tmp_path) == path
        with pytest.raises(ContractError, match="no TOML: "):
            configuration.load(path)
        with chdir(tmp_path), pytest.raises(UsageError):
            init.run([])
        path.unlink()


def test_a_configuration_that_links_to_itself_is_told(tmp_path: Path) -> None:
    """A configuration that links to itself is reported, not ignored."""
    (tmp_path / toml_file.OWN).symlink_to(toml_file.OWN)
    assert toml_file._counts(tmp_path / toml_file.OWN)
