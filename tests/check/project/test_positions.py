"""The places of keys and elements of a TOML text, compared with what `tomllib` reads."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.check.project import toml_file

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
