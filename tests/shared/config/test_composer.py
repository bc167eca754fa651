"""Bytes to tree: a hostile file ends at once, with one message that has a place."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import MapNode, plain
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import ContractError


def _compose(text: str | bytes) -> tuple[MapNode | None, list[str]]:
    problems = Problems()
    data = text.encode() if isinstance(text, str) else text
    root = composer.compose(data, "c.yaml", problems)
    try:
        problems.settle(strict=False)
    except ContractError as error:
        return root, error.problems
    return root, []


def _data(text: str) -> Any:
    root, problems = _compose(text)
    assert problems == []
    assert root is not None
    return plain(root)


def _only_problem(text: str | bytes) -> str:
    _, problems = _compose(text)
    assert len(problems) == 1
    return problems[0]


def _bomb(levels: int) -> str:
    rows = ["a0: &a0 [lol, lol]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(rows)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "c.yaml:1:1: error: a contract is a mapping (metadata, clauses, ...); found nothing"),
        ("# nothing\n", "c.yaml:1:1: error: a contract is a mapping"),
        ("---\n", "found nothing: the file is empty"),
        (
            "- a\n",
            "c.yaml:1:1: error: a contract is a mapping (metadata, clauses, ...); found a list",
        ),
        ("text", "found a single value"),
        ("a:\n\tb: 1", "c.yaml:2:1: error: invalid YAML: while scanning for the next token"),
        ("a: [1", "invalid YAML: while parsing a flow"),
        ("a: 1\n---\nb: 2", "c.yaml:2:1: error: invalid YAML: a second document"),
        ("a: *b", "c.yaml:1:4: error: invalid YAML: alias *b has no anchor &b before it"),
        (
            "a: &a [*a]",
            "c.yaml:1:8: error: invalid YAML: alias *a is inside its own anchor; remove it",
        ),
        (
            "a: 1\nb: 2\na: 3",
            "c.yaml:3:1: error: key 'a' is given twice, on lines 1 and 3; keep one",
        ),
        ("b: {c: 1, c: 2}", "c.yaml:1:11: error: key 'c' is given twice"),
        ("[1]: a", "c.yaml:1:1: error: a key is one non-empty text"),
        ("? \n: a", "a key is one non-empty text"),
        ("&a b: {*a : 1, b: 2}", "c.yaml:1:16: error: key 'b' is given twice"),
        (
            "a: !!python/object:os.system x",
            "c.yaml:1:4: error: tag 'tag:yaml.org,2002:python/object",
        ),
        ("a: !!python/object/apply:os.system [ls]", "no tag builds an object here"),
        ("a: !!set {x}", "no tag builds an object here"),
        ("a: !mine 1", "tag '!mine'"),
        ("a: !!int x", "'x' is no int; quote it"),
        ("a: !!int ''", "'' is no int"),
        ("a: !!bool perhaps", "'perhaps' is no bool"),
        ("a: 0b_", "'0b_' is no int"),
        ("a: !!int " + "1" * 5000, "is no int"),
        ("<<: 1", "<< takes a mapping or a list of mappings"),
        (b"ok: 1\nab\x00: 1", "c.yaml:2:3: error: control character U+0000"),
        (b"a: \xff", "c.yaml:1:4: error: not UTF-8: byte 0xff"),
        ("a: 1".encode("utf-16"), "c.yaml:1:1: error: not UTF-8"),
    ],
)
def test_what_is_no_contract_is_named_with_its_place(text: str | bytes, problem: str) -> None:
    """Each bad file gives exactly one problem."""
    assert problem in _only_problem(text)


def test_tabs_come_with_advice() -> None:
    """A tab in the indentation is answered with advice to use spaces."""
    assert ": a tab; indent with spaces" in _only_problem("a:\n\tb: 1")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_bomb(10), "values, aliases expanded"),
        ("a: [" + "1," * composer.NODES_MAX + "]", "values, aliases expanded"),
        ("a: " + "[" * 100_000, "nested deeper than 64 levels"),
        ("a: " + "{a: " * 100_000, "nested deeper than 64 levels"),
        ("a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 40 + "*a" + "]" * 40, "nested deeper"),
    ],
)
def test_a_bomb_ends_at_once_in_little_memory(text: str, problem: str) -> None:
    """Nodes and depth are bounded with aliases expanded."""
    tracemalloc.start()
    assert problem in _only_problem(text)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100e6


def test_a_number_in_base_60_is_bounded() -> None:
    """Text too long for a number stays text and is not parsed."""
    text = "1" + ":1" * 100_000
    assert _data(f"a: {text}") == {"a": text}


def test_scalars_follow_the_safe_rules_and_dates_stay_text() -> None:
    """Numbers, booleans and null follow YAML 1.1; dates and keys stay text as written."""
    text = (
        "{a: 1, b: 0.5, c: yes, d: ~, e: 2024-01-02, f: '1', g: !!str 2, h: ! 3, yes: 1e-4, i: =}"
    )
    assert _data(text) == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": None,
        "e": "2024-01-02",
        "f": "1",
        "g": "2",
        "h": "3",
        "yes": "1e-4",
        "i": "=",
    }


def test_merge_keys_fill_in_and_never_overwrite() -> None:
    """The mapping's own keys win over merged ones, and the first source over later ones."""
    text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz: {<<: [*x, *y], a: 0}\nw: {<<: *y}"
    assert _data(text)["z"] == {"a": 0, "b": 1, "c": 2}
    assert _data(text)["w"] == {"b": 2, "c": 2}


def test_a_byte_order_mark_is_no_problem() -> None:
    """A byte order mark, as editors on Windows write, is skipped."""
    assert _data("\ufeffa: 1") == {"a": 1}


def test_a_file_is_refused_by_size_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file of 100 MB is refused without reading its bytes."""
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    tracemalloc.start()
    problems = Problems()
    assert composer.read(path, problems) is None
    assert "100000000 bytes or more; at most" in problems.all[0].message
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["/dev/zero", "no/such/file", ".", "nul\0", "x" * 5000])
def test_what_can_not_be_read_is_told(name: str) -> None:
    """An endless device, a missing file, a folder and impossible names each give one message."""
    problems = Problems()
    assert composer.read(Path(name), problems) is None
    assert [problem.level for problem in problems.all] == ["error"]


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("abc 1:-#'\"\n", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text("abcxyz", min_size=1), _VALUES, min_size=1))
def test_the_tree_holds_what_safe_load_reads(value: dict[str, Any]) -> None:
    """For plain data the tree equals the result of PyYAML's safe_load."""
    text = yaml.safe_dump(value)
    assert _data(text) == yaml.safe_load(text) == value


@given(
    st.text("a1:-*&!<>[]{}?,|'\"#%@ \n\t~.\ufeff\x85\u2028é", max_size=60) | st.binary(max_size=40)
)
def test_any_bytes_give_a_tree_or_problems(noise: str | bytes) -> None:
    """Random bytes give a tree or problems, never an exception."""
    root, problems = _compose(noise)
    assert root is not None or problems
