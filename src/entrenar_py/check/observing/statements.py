"""The statements of a source file by line, with the names that each uses.

A compound statement counts up to its body. The harness and the processes of a run read the same
file, so this module needs only Python.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_VARIABLES = "environ"  # of the environment: read without a call


@dataclass(frozen=True, eq=False)
class Statement:
    """One statement: its lines, and the names in it.

    `names` are the variables that it reads or writes. `words` are the functions and methods that it
    calls, by their last names, and the keywords that it gives.
    """

    first: int
    last: int
    names: tuple[str, ...]
    words: frozenset[str]
    is_loop: bool


def by_line(text: str) -> Mapping[int, Statement]:
    """Return the statement of each line of a file; none if it can't be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    lines: dict[int, Statement] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            statement = _statement(node)
            lines.update(dict.fromkeys(range(statement.first, statement.last + 1), statement))
    return lines


def _statement(node: ast.stmt) -> Statement:
    body = getattr(node, "body", None)
    last = node.end_lineno or node.lineno
    if isinstance(body, list) and body:
        last = max(node.lineno, body[0].lineno - 1)
    names, words = dict[str, None](), set[str]()
    for part in _parts(node):
        for inner in ast.walk(part):
            if isinstance(inner, ast.Name):
                names[inner.id] = None
            elif isinstance(inner, ast.keyword) and inner.arg:
                words.add(inner.arg)
            elif isinstance(inner, ast.Attribute) and inner.attr == _VARIABLES:
                words.add(inner.attr)
            if isinstance(inner, ast.Call):
                words.add(getattr(inner.func, "id", "") or getattr(inner.func, "attr", ""))
    is_loop = isinstance(node, ast.For | ast.AsyncFor)
    return Statement(node.lineno, last, tuple(names), frozenset(words), is_loop)


def _parts(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield what a statement evaluates itself, without the statements inside it."""
    if not isinstance(getattr(node, "body", None), list):
        yield node
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield from node.decorator_list
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
