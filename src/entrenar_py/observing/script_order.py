"""Which lines of a script run only after what it is doing now.

A script may load a checkpoint though it resumes from none: it tests its best weights once it has
trained. Such a line comes after the statement that trains, in a function that is running, outside
of the loops around that statement. Or it is in a function that is used in such lines alone. What
can't be told so (a callback, a function that is known by a text, or that nobody calls) may run
earlier.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py.observing import call_sites

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_MODULE = "<module>"


def come_later(pattern: re.Pattern[str], texts: Mapping[str, str]) -> bool:
    """Return whether lines of a script fit, and all of them run only after what runs now."""
    by_file = {_absolute(file): text for file, text in texts.items()}
    try:
        with warnings.catch_warnings():  # Python has told of them already
            warnings.simplefilter("ignore")
            trees = {file: ast.parse(text) for file, text in by_file.items()}
    except (SyntaxError, ValueError):  # a template, or for another Python
        return False
    order = _Order(trees, _running())
    lines = [
        (file, number)
        for file, text in by_file.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line.partition("#")[0]) and not line.lstrip().startswith("def ")
    ]
    return bool(lines) and all(order.is_later(*line) for line in lines)


def _running() -> dict[tuple[str, str, int], int]:
    """Return the line that runs now, by a function's file, name and first line."""
    running: dict[tuple[str, str, int], int] = {}
    for frame in call_sites.own_frames():
        code = frame.f_code
        first = 0 if code.co_name == _MODULE else code.co_firstlineno
        running.setdefault((_absolute(code.co_filename), code.co_name, first), frame.f_lineno)
    return running


def _absolute(file: str) -> str:
    return str(Path(file).absolute())


@dataclass
class _Order:
    """A script's statements in `trees`, and the lines of its functions that run now."""

    trees: Mapping[str, ast.Module]
    running: Mapping[tuple[str, str, int], int]
    _known: set[str] = field(default_factory=set)  # names of functions that were looked at

    def is_later(self, file: str, line: int) -> bool:
        """Return whether a line runs only after what runs now."""
        scope = _scope(self.trees[file], line)
        now = self.running.get((file, *_named(scope)))
        if now is not None:
            return _comes_after(scope, line, now)
        return not isinstance(scope, ast.Module) and self._is_used_later(scope)

    def _is_used_later(self, function: _Function) -> bool:
        """Return whether a function is used, and only in lines that run later."""
        name = function.name
        if name in self._known:
            return True  # by itself
        self._known.add(name)
        if name.startswith("__") or any(_is_hidden(name, node) for _, node in self._nodes()):
            return False
        inside = range(function.lineno, (function.end_lineno or 0) + 1)
        uses = [
            (file, node.lineno)
            for file, node in self._nodes()
            if (isinstance(node, ast.Name) and node.id == name)
            or (isinstance(node, ast.Attribute) and node.attr == name)
        ]
        others = [use for use in uses if use[1] not in inside]
        return bool(others) and all(self.is_later(*use) for use in others)

    def _nodes(self) -> Iterator[tuple[str, ast.AST]]:
        for file, tree in self.trees.items():
            yield from ((file, node) for node in ast.walk(tree))


def _is_hidden(name: str, node: ast.AST) -> bool:
    """Return whether a function of that name may be called by another one, or by a text."""
    if isinstance(node, ast.alias):
        return node.name == name and node.asname is not None
    texts: list[ast.expr] = []
    if isinstance(node, ast.Call) and _called(node) in ("getattr", "methodcaller"):
        texts = node.args
    if isinstance(node, ast.Subscript) and _called(node.value) in ("globals", "locals", "vars"):
        texts = [node.slice]
    return any(isinstance(text, ast.Constant) and text.value == name for text in texts)


def _called(node: ast.AST) -> str:
    """Return the name of the function that is called."""
    function = getattr(node, "func", None)
    return str(getattr(function, "id", getattr(function, "attr", "")))


def _scope(tree: ast.Module, line: int) -> ast.Module | _Function:
    """Return the innermost function that has the line, or the module."""
    inner = [node for node in ast.walk(tree) if isinstance(node, _Function) and _has(node, line)]
    return max(inner, key=lambda node: node.lineno, default=tree)


def _named(scope: ast.Module | _Function) -> tuple[str, int]:
    """Return the name and the first line that the scope's code has."""
    if isinstance(scope, ast.Module):
        return _MODULE, 0
    return scope.name, min([scope.lineno, *(one.lineno for one in scope.decorator_list)])


def _comes_after(scope: ast.AST, line: int, now: int) -> bool:
    """Return whether a line comes after the statement at `now`, and not again before it.

    What handles an error of that statement may be followed by another trial.
    """
    nodes = [*ast.walk(scope)]
    running = [node for node in nodes if isinstance(node, ast.stmt) and _has(node, now)]
    statement = max(running, key=lambda node: node.lineno, default=None)
    if statement is None or line <= (statement.end_lineno or line):
        return False
    around = (*_LOOPS, ast.ExceptHandler)
    return not any(
        isinstance(node, around)
        and _has(node, line)
        and (_has(node, now) or isinstance(node, ast.ExceptHandler))
        for node in nodes
    )


def _has(node: ast.stmt | ast.ExceptHandler, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
