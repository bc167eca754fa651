"""Asserts only check: without them (`python -O`) everything behaves the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKED = ("src", "falsification", "examples", "docs")

# What may be called in an assert: it changes nothing, and takes no more than a look.
PURE = {
    *("all", "any", "callable", "frozenset", "hasattr", "isinstance", "issubclass", "len", "max"),
    *("min", "range", "set", "sorted", "sum", "tuple", "type", "zip"),
    *("header_bytes_max", "shape_of"),  # our own
}
PURE_METHODS = {"endswith", "is_absolute", "isdisjoint", "issubset", "issuperset", "startswith"}

_EFFECTS = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def effects(source: str) -> list[tuple[int, str]]:
    """Return line and text of everything in `source` that behaves differently under -O."""
    if "assert" not in source and "__debug__" not in source:
        return []
    return sorted({(found.lineno, ast.unparse(found)) for found in _effects(ast.parse(source))})


def _effects(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "__debug__":
            yield node
        if isinstance(node, ast.Assert):
            yield from (one for one in ast.walk(node) if isinstance(one, _EFFECTS))
            yield from (one for one in ast.walk(node.test) if _is_impure_call(one))  # type: ignore[misc]


def _is_impure_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id not in PURE
    return not (isinstance(node.func, ast.Attribute) and node.func.attr in PURE_METHODS)


def test_no_assert_has_an_effect() -> None:
    """No assert in code that users run has an effect: raise, or call first and assert after."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for folder in CHECKED
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "twins" not in path.parts  # as users write them
        for line, text in effects(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "assert loops.pop() is loop",
        "assert (found := search(text))",
        "assert any(queue.pop() for one in many)",
        "async def f():\n    assert await g()",
        "assert x, (y := 1)",
        "assert open_door()",
        "assert table[key()]",
        "if __debug__:\n    y = 1",
    ],
)
def test_effects_are_seen(source: str) -> None:
    """Effects are found in all the forms that they can have."""
    assert effects(source)


@pytest.mark.parametrize(
    "source",
    [
        "assert isinstance(x, int), describe(x)",
        "assert len({one.name for one in many}) == len(many)",
        "assert name.startswith('a') and all(x > 0 for x in xs)",
    ],
)
def test_checks_are_none(source: str) -> None:
    """Plain checks are no effects; the message of an assert may call anything."""
    assert not effects(source)
