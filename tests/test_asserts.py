"""Asserts only check: without them (`python -O`) everything behaves the same."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import has_adapter

ROOT = Path(__file__).parents[1]
CHECKED = ("src", "falsification", "examples", "docs")
SMOKE_S = 300.0

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


@pytest.mark.slow
def test_the_main_commands_without_asserts(tmp_path: Path) -> None:
    """The main commands work under `python -O`.

    These are a service with a worker (on a wgpu adapter if there is one), the verification of its
    ledger, by which it is trained again on the same backend, and the judging of a contract.
    """
    backend = "wgpu" if has_adapter() else "cpu"
    told = [sys.executable, "-O", "-m", "tests.smoke", str(tmp_path), backend]
    ended = subprocess.run(
        told, cwd=ROOT, capture_output=True, text=True, timeout=SMOKE_S, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    worked = [line for line in ended.stdout.splitlines() if line.endswith(": ok")]
    assert len(worked) == 4
    assert f"worker: backend {backend}: " in ended.stdout
    assert f"verified: trained again on {backend} (" in ended.stdout
