"""Tell lines of a script that run only after what it is doing now, or again in each step.

A script may load a checkpoint though it resumes from none: it tests its best weights once it has
trained. Such a line comes after the statement that trains, in a function that is running, outside
of the loops around that statement. Or it is in a function that is used in such lines alone. What
can't be told so (a callback, a function that is known by a text, or that nobody calls) may run
earlier.

A line runs in each step if it is in the loop that steps, under no condition, or in a function that
is called there so. A generator is as good, if the line is in a loop of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py.check.observing import call_sites, script_text

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_Loop = ast.For | ast.While
_MODULE = "<module>"
_CHARS_MAX = 2**20  # which are read in a second
Line = tuple[str, int]  # a file and a number
_Within = tuple[str, ast.AST, _Loop]  # the file and the function that have a loop


def come_later(pattern: re.Pattern[str], texts: Mapping[str, str]) -> bool:
    """Return whether lines of a script fit, and all of them run only after what runs now."""
    order, lines = _Order.of(texts), [*_fitting(pattern, texts)]
    return order is not None and bool(lines) and all(order.is_later(*line) for line in lines)


def line_again(pattern: re.Pattern[str], texts: Mapping[str, str]) -> str:
    """Return the first line that fits and runs in each turn of the loop that runs now.

    As `train.py:12`; "" if there is none.
    """
    order = _Order.of(texts)
    if order is None:
        return ""
    within = order.loop_of_steps()
    again = (line for line in _fitting(pattern, texts) if order.is_repeated(line, within))
    return next((f"{Path(file).name}:{number}" for file, number in again), "")


def are_alike(pattern: re.Pattern[str], texts: Mapping[str, str]) -> bool:
    """Return whether a line that fits draws each micro-batch of a step, in the same way.

    The loop through the micro-batches counts them, and nothing but what is synchronised depends on
    the count. Nor does the loop take its data in turn, as from several tasks.
    """
    order = _Order.of(texts)
    within = None if order is None else order.loop_of_micro_batches()
    if order is None or within is None or not _counts(within[2]) or order.takes_turns(within[2]):
        return False
    return any(order.is_repeated(line, within, is_alike=True) for line in _fitting(pattern, texts))


def apart(texts: Mapping[str, str]) -> frozenset[str]:
    """Return the names of functions that are called, but not in a step like the one that runs now.

    They are not running, and the loop that steps calls none of them, nor does what is called there.
    A function that has another name, too, may be called by that.
    """
    order = _Order.of(texts)
    return frozenset() if order is None else order.apart()


def _counts(loop: _Loop) -> bool:
    """Return whether a loop of one backward pass goes through numbers that decide nothing else.

    They are compared at most, to synchronise.
    """
    if isinstance(loop, ast.While) or not isinstance(loop.target, ast.Name):
        return False
    number = loop.target.id
    nodes = [node for part in loop.body for node in ast.walk(part)]
    if [_called(node) for node in nodes].count("backward") != 1:
        return False
    compared = {id(n) for c in nodes if isinstance(c, ast.Compare) for n in ast.walk(c)}
    tests = [n for n in nodes if isinstance(n, ast.If | ast.IfExp) and "no_sync" not in ast.dump(n)]
    decides = {id(node) for one in tests for node in ast.walk(one.test)}
    uses = {id(node) for node in nodes if isinstance(node, ast.Name) and node.id == number}
    return _called(loop.iter) in ("range", "trange") and uses <= compared - decides


def _counted(scope: ast.AST) -> set[str]:
    """Return the names that are counted up or down, as they are written."""
    return {ast.unparse(node.target) for node in _all(scope) if isinstance(node, ast.AugAssign)}


def _counts_by(loop: _Loop, line: int) -> bool:
    """Return whether a line of a loop follows from what the loop counts or assigns elsewhere.

    So may be what is selected by the line's result: `rows = randint(...)`, `task[rows]`.
    """
    own = [node for node in _all(loop) if getattr(node, "lineno", 0) == line]
    drawn = _names(own, ast.Store)
    # In `[data[at] for at in rows]` it is selected by `at`.
    turns = [node for node in _all(loop) if isinstance(node, ast.comprehension)]
    places = drawn | {n for t in turns if _uses(t.iter, drawn) for n in _names([t.target])}
    others = [node for node in _all(loop) if getattr(node, "lineno", line) != line]
    changed = _names(others, ast.Store) - drawn | _counted(loop)
    selecting = [
        node.value
        for node in _all(loop)
        if isinstance(node, ast.Subscript) and _uses(node.slice, places)
    ]
    return any(_uses(node, changed) for node in (*own, *selecting))


def _uses(node: ast.AST, names: set[str]) -> bool:
    return bool(_names(_all(node), ast.Load) & names)


def _names(nodes: Iterable[ast.AST], context: type[ast.expr_context] | None = None) -> set[str]:
    """Return the names and dotted names among nodes that are read, or assigned."""
    names = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute)]
    return {ast.unparse(n) for n in names if context is None or isinstance(n.ctx, context)}


def _turns(call: ast.AST) -> bool:
    """Return whether a call takes what is next, or one of several at random.

    An entry that is taken by its name (`batch.pop("labels")`) is neither.
    """
    name = _called(call)
    if not name or not isinstance(call, ast.Call):
        return False
    by_name = any(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in call.args)
    is_one = len(call.args) == 1 and not call.keywords
    return (
        name in ("next", "__next__", "rotate", "popleft", "popitem", "send")
        or (name == "pop" and not by_name)
        or (name == "choice" and is_one)
    )


def _all(scope: ast.AST) -> list[ast.AST]:
    return [*ast.walk(scope)]


def _fitting(pattern: re.Pattern[str], texts: Mapping[str, str]) -> Iterator[Line]:
    """Yield the lines that fit, without those that define a function."""
    for file, text in texts.items():
        for number, line in enumerate(text.splitlines(), start=1):
            if pattern.search(line.partition("#")[0]) and not line.lstrip().startswith("def "):
                yield _absolute(file), number


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

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> _Order | None:
        """Return the order of the lines that run now; None if a text can't be read, or is long."""
        if sum(map(len, texts.values())) > _CHARS_MAX:
            return None
        known = {_absolute(file): script_text.parsed(text) for file, text in texts.items()}
        trees = {file: tree for file, tree in known.items() if tree is not None}
        return cls(trees, _running()) if len(trees) == len(known) else None

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
        uses = [*self._uses(function)]
        return bool(uses) and all(self.is_later(*use) for use in uses)

    def is_repeated(
        self,
        line: Line,
        within: _Within | None,
        *,
        is_alike: bool = False,
        inside: frozenset[str] = frozenset(),
    ) -> bool:
        """Return whether a line runs in each turn of a loop, as far as it shows.

        It calls functions in turn, the last one of which has the line in question: those `inside`.
        If it `is_alike`, nothing that it depends on changes from turn to turn.
        """
        file, number = line
        scope = _scope(self.trees[file], number)
        loops = [within[2]] if within is not None and within[:2] == (file, scope) else []
        if any(loop.body[0].lineno <= number for loop in loops if _has(loop, number)):
            is_apart = is_alike and any(_counts_by(loop, number) for loop in loops)
            return not is_apart and not _is_conditional(scope, number, within=loops)
        if isinstance(scope, ast.Module) or scope.name in inside:
            return False
        if is_alike and (_counted(scope) or any(map(_turns, _all(scope)))):
            return False
        yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(scope))
        own = [node for node in ast.walk(scope) if isinstance(node, _LOOPS) and _has(node, number)]
        if (yields and not own) or _is_conditional(scope, number, within=own[-1:]):
            return False
        head = (within[0], within[2].lineno) if within is not None and yields else None
        inside |= {scope.name}
        return any(
            use == head or self.is_repeated(use, within, is_alike=is_alike, inside=inside)
            for use in self._uses(scope)
        )

    def takes_turns(self, loop: _Loop) -> bool:
        """Return whether a loop, or a function that is called in it, takes its data in turn."""
        functions = [node for _, node in self._nodes() if isinstance(node, _Function)]
        known: set[str] = set()
        left = [node for part in loop.body for node in ast.walk(part)]
        while left:
            if any(map(_turns, left)):
                return True
            names = {*map(_called, left)} - known
            known |= names
            left = [n for one in functions if one.name in names for n in ast.walk(one)]
        return False

    def apart(self) -> frozenset[str]:
        """Return the names of functions that are called, and not where training steps."""
        left, known = self._within_step(), set[str]()
        every = [node for _, node in self._nodes() if isinstance(node, _Function)]
        left += [one for one in every if not self._is_only_called(one)]
        while left:
            known |= {one.name for one in left if isinstance(one, _Function)}
            names = {name.rpartition(".")[2] for one in left for name in _names(_all(one))} - known
            left = [one for one in every if one.name in names]
        return frozenset(one.name for one in every) - known

    def _within_step(self) -> list[ast.AST]:
        """Return the functions that run now, from the innermost one to the loop that steps."""
        within: list[ast.AST] = []
        for _, scope, now in self._scopes():
            loops = [n for n in ast.walk(scope) if isinstance(n, _Loop) and _has(n, now)]
            stepping = [n for n in loops if "step" in map(_called, _all(n))]
            within.append(max(stepping, key=lambda n: n.lineno, default=scope))
            if stepping:
                break
        return within

    def _is_only_called(self, function: _Function) -> bool:
        """Return whether a function is called by its name, and is used in no other way."""
        name = function.name
        is_special = name.startswith("__") or name == "forward" or bool(function.decorator_list)
        if is_special or any(_is_hidden(name, node) for _, node in self._nodes()):
            return False
        calls = sum(_called(node) == name for _, node in self._nodes())
        return calls > 0 and calls == len([*self._uses(function, inside=True)])

    def loop_of_micro_batches(self) -> _Within | None:
        """Return the loop through the micro-batches of a step that runs now."""
        around = self._around()
        return around[0] if around and _is_within_a_step(around[0][2]) else None

    def loop_of_steps(self) -> _Within | None:
        """Return the innermost loop around what runs now.

        If that goes through the micro-batches of a step, it is the next one.
        """
        around = self._around()
        is_inner = len(around) > 1 and _is_within_a_step(around[0][2])
        return next(iter(around[is_inner:]), None)

    def _around(self) -> list[_Within]:
        """Return the loops of one function around what runs now, innermost first."""
        for file, scope, now in self._scopes():
            around = [n for n in ast.walk(scope) if isinstance(n, _Loop) and _has(n, now)]
            if around:
                return [(file, scope, n) for n in sorted(around, key=lambda n: -n.lineno)]
        return []

    def _scopes(self) -> Iterator[tuple[str, ast.Module | _Function, int]]:
        """Yield the functions that run now, innermost first, each with its file and its line."""
        for (file, name, first), now in self.running.items():
            tree = self.trees.get(file)
            scope = None if tree is None else _scope(tree, now)
            if scope is not None and _named(scope) == (name, first):
                yield file, scope, now

    def _uses(self, function: _Function, *, inside: bool = False) -> Iterator[Line]:
        """Yield the lines that have a function's name; those `inside` of it only if wanted."""
        name = function.name
        own = range(function.lineno, 0 if inside else (function.end_lineno or 0) + 1)
        for file, node in self._nodes():
            is_name = isinstance(node, ast.Name) and node.id == name
            is_attribute = isinstance(node, ast.Attribute) and node.attr == name
            if (is_name or is_attribute) and node.lineno not in own:  # type: ignore[attr-defined]
                yield file, node.lineno  # type: ignore[attr-defined]

    def _nodes(self) -> Iterator[tuple[str, ast.AST]]:
        for file, tree in self.trees.items():
            yield from ((file, node) for node in ast.walk(tree))


def _is_within_a_step(loop: _Loop) -> bool:
    """Return whether a loop has backward passes, and no step."""
    calls = {_called(node) for node in ast.walk(loop)}
    return "backward" in calls and "step" not in calls


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


def _is_conditional(scope: ast.AST, line: int, *, within: Sequence[ast.AST]) -> bool:
    """Return whether a line depends on a condition in its function, or in the loops around it."""
    outer = within or [scope]
    return any(
        isinstance(node, ast.If | ast.ExceptHandler) and _has(node, line) and node not in outer
        for one in outer
        for node in ast.walk(one)
    )


def _has(node: ast.stmt | ast.ExceptHandler, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
