"""The file of a configuration: found, read, with the place of each key."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


TEXT = """\
# a = 1
[tool.first]
plain = 1 # b = 2
"quo\\u0041ted.key" = [1, "], {", {inner = 'it', "two" = \"\"\"
[not.a.table] \\\"\"\" \"\"\"\"\"},
  2024-01-01 07:32:00]
dotted.'x y' . z = '''a = '' ]'''
[[many]]
n = 1_000
[[many]]
[many.below]
empty = [
  # nothing
]
last = {}
"""


def test_places() -> None:
    """Each place is the line and column of a key or element; strings and comments hold no keys."""
    found = toml_file.scan(TEXT)
    first = ("tool", "first")
    assert found[first] == (2, 7)
    assert found[*first, "plain"] == (3, 1)
    quoted = (*first, "quoAted.key")
    assert found[quoted] == (4, 1)
    assert found[*quoted, 2, "two"] == (4, TEXT.splitlines()[3].index('"two"') + 1)
    assert found[*quoted, 3] == (6, 3)
    assert found[*first, "dotted", "x y", "z"] == (7, 16)
    assert found["many", 1, "below", "empty"] == (12, 1)
    assert found["many", 1, "below", "last"] == (15, 1)
    assert set(found) == {*_paths(tomllib.loads(TEXT))}


def _paths(value: Any, path: toml_file.KeyPath = ()) -> Iterator[toml_file.KeyPath]:
    """Yield every path in the parsed text."""
    if path:
        yield path
    members = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        members = dict(enumerate(value))
    for key, member in members.items():
        yield from _paths(member, (*path, key))


KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), min_size=1, max_size=4)
LEAVES = st.one_of(st.integers(-9, 9), st.booleans(), KEYS, st.just("# [x] = {"))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def _quoted(value: Any) -> str:
    """Return a number or a string in a notation that JSON and TOML share."""
    return json.dumps(value, ensure_ascii=False)


def _written(value: Any) -> str:
    """Return `value` as inline TOML; JSON's strings are TOML's."""
    if isinstance(value, dict):
        pairs = ", ".join(f"{_quoted(key)} = {_written(one)}" for key, one in value.items())
        return f"{{ {pairs} }}"
    if isinstance(value, list):
        return f"[ # [{{\n {', '.join(map(_written, value))} ]"
    return _quoted(value)


@settings(max_examples=40)
@given(st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, max_size=3), max_size=3))
def test_every_key_and_element_has_a_place(tables: dict[str, dict[str, Any]]) -> None:
    """For any text, every key and element has a place, and the key is found at it."""
    lines = []
    for name, table in tables.items():
        lines += [
            f"[{_quoted(name)}] # ]",
            *(f" {_quoted(key)}=\t{_written(one)}" for key, one in table.items()),
        ]
    text = "\n".join(lines)
    assert tomllib.loads(text) == tables
    found = toml_file.scan(text)
    assert set(found) == {*_paths(tables)}
    rows = text.split("\n")
    for path, (line, column) in found.items():
        if isinstance(path[-1], str):
            assert rows[line - 1][column - 1 :].startswith(_quoted(path[-1]))
