"""Searches a script's text for what a run may not reach, or what no hook can observe.

`come_later` determines whether lines run only after what the script is doing now. A script may load
a checkpoint although it doesn't resume: it tests its best weights after training. Such a line comes
after the statement that trains, in a running function, outside the loops around that statement. Or
it is in a function that is used only in such lines. Any other line may run earlier (one in a
callback, or in a function that is looked up by a string or never called).

`line_again` returns a line that runs in each step: a line in the loop that steps, under no
condition, or in a function that is called from such a line. The function may also be a generator
over which that loop runs, if the line is in a loop of the generator.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py.check.observing import call_sites
from entrenar_py.shared import mutants

_TEXT_BYTES_MAX = 2**22
# Calls that select rows by random numbers, so that a row may be repeated before all rows were drawn
# ...
SELECTS = re.compile(
    r"\b(randint|random_integers|randrange|integers|choices?|multinomial)\s*\(|\bsample\([^()]*,"
)
# ... and calls that go through rows in random order, each row once.
_ORDERS = re.compile(r"\b(randperm|shuffle|permutation|permuted|\w*Sampler|set_epoch)\b")
_BY_EPOCH = re.compile(  # code that begins, or runs, at some epochs; not a loop over all epochs
    r"^(?!\s*while\b).*?(\b\w*epoch\w*\s*(?:[<>]=?|[=!]=|%)\s*[\w.]"
    r"|[\w.)\]]\s*(?:[<>]=?|[=!]=)\s*\w*epoch\w*\b)"
)
# Code that may in any way put rows into a random order.
SHUFFLES = re.compile(
    r"(randperm|permutation|permuted|shuffl\w*\s*(?:\(|=(?!\s*False))|set_epoch|choices?\s*\("
    r"|multinomial|RandomSampler|DistributedSampler(?!\([^()]*shuffle=False)|\bsample\s*\("
    r"|\brand\s*\(|random\s*\(\s*\))"
)

# An import statement, perhaps over several lines in brackets. It contains names of functions, but
# doesn't call them.
_IMPORT = re.compile(r"^[ \t]*(?:from\s+\S+\s+)?import\b(?:\s*\([^)]*\)|(?:\\\n|[^\n;])*)", re.M)


def texts() -> tuple[dict[str, str], dict[str, str]]:
    """Return file -> text, for the script's modules, and for libraries that call the step.

    A machine may import additional modules whenever Python starts. So a module belongs to the
    script only if it is in the folder of the script or in the working directory. The catalogue of
    planted bugs is in the working directory of our own trainers, and is no part of them.
    """
    loaded = [
        getattr(module, "__file__", None)
        for name, module in [*sys.modules.items()]
        if name.partition(".")[0] != mutants.PACKAGE
    ]
    calling = {*_calling()}
    files = filter(call_sites.is_own, {*filter(None, loaded), *calling})
    own = {file for file in files if file in calling or _is_near(file)}
    return _read(own), _read(calling - own)


@functools.cache
def parsed(text: str) -> ast.Module | None:
    """Return the parsed text; None for a template, or for code of a different Python version."""
    try:
        with warnings.catch_warnings():  # Python has already shown these warnings
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def first(
    pattern: re.Pattern[str], texts: Mapping[str, str], without: frozenset[str] = frozenset()
) -> str:
    """Return the place of the first matching line, such as `train.py:12`; "" if there is none.

    Lines in functions named in `without` don't count, except for calls of a base class. Names that
    are only imported don't count either.
    """
    for file, text in texts.items():
        called = _IMPORT.sub(lambda match: "\n" * match[0].count("\n"), text)
        for number, line in enumerate(called.splitlines(), start=1):
            match = pattern.search(line.partition("#")[0])
            if match is None or line.lstrip().startswith("def "):
                continue
            if match[1] not in without or "super()" in line:
                return f"{Path(file).name}:{number}"
    return ""


def selecting_line() -> str:
    """Return the first line of the script that may select its rows by random numbers.

    Return "" if there is none, or if the script puts anything into a random order, which may be its
    rows.
    """
    own, _ = texts()
    return "" if first(_ORDERS, own) else first(SELECTS, own)


def line_by_epoch() -> str:
    """Return the first line of the script that compares an epoch number; "" if none does."""
    own, _ = texts()
    return first(_BY_EPOCH, own)


def shuffles() -> bool:
    """Return whether any line of the script may put rows into a random order."""
    own, _ = texts()
    return not own or bool(first(SHUFFLES, own))


def _is_near(file: str) -> bool:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path.cwd(), *([] if script is None else [Path(script).absolute().parent])]
    return any(Path(file).absolute().is_relative_to(folder) for folder in folders)


def _calling() -> Iterator[str]:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in file and not call_sites.is_ours(file):
            yield file
        frame = frame.f_back  # type: ignore[assignment]


def _read(files: Iterable[str]) -> dict[str, str]:
    texts = {}
    for file in sorted(files):
        path = Path(file)
        if path.suffix == ".py" and path.is_file() and path.stat().st_size <= _TEXT_BYTES_MAX:
            texts[file] = path.read_text(encoding="utf-8", errors="replace")
    return texts


# --- the order of lines ---------------------------------------------------------------------------


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_Loop = ast.For | ast.While
_MODULE = "<module>"
_CHARS_MAX = 2**20  # texts of this length are parsed in about a second
Line = tuple[str, int]  # a file and a line number
_Within = tuple[str, ast.AST, _Loop]  # the file and the function that contain a loop, and the loop


def come_later(pattern: re.Pattern[str], texts: Mapping[str, str]) -> bool:
    """Return whether there are matching lines, and all of them run only after what runs now."""
    lines = [*_fitting(pattern, texts)]
    order = _Order.of(texts) if lines else None  # parsing is what takes long
    return order is not None and all(order.is_later(*line) for line in lines)


def line_again(pattern: re.Pattern[str], texts: Mapping[str, str]) -> str:
    """Return the place (`train.py:12`) of the first matching line that every step of a loop runs.

    The loop is the innermost one that is now running, except for a loop over micro-batches. Returns
    "" if there is no such line.
    """
    order = _Order.of(texts)
    if order is None:
        return ""
    within = order.loop_of_steps()
    again = (line for line in _fitting(pattern, texts) if order.is_repeated(line, within))
    return next((f"{Path(file).name}:{number}" for file, number in again), "")


def are_alike(pattern: re.Pattern[str], texts: Mapping[str, str]) -> bool:
    """Return whether a matching line draws each micro-batch of a step in the same way.

    The line must be in a loop over micro-batches that counts them, and the count may only decide
    about synchronisation. The loop must not take its data in turn, as from several tasks.
    """
    order = _Order.of(texts)
    within = None if order is None else order.loop_of_micro_batches()
    if order is None or within is None or not _counts(within[2]) or order.takes_turns(within[2]):
        return False
    return any(order.is_repeated(line, within, is_alike=True) for line in _fitting(pattern, texts))


def functions_apart(texts: Mapping[str, str]) -> frozenset[str]:
    """Return the names of functions that are called, but not in a step like the current one.

    They are not running, and are not called in the loop that steps, nor in a function that is
    called there. A function is left out if it may be called under another name.
    """
    order = _Order.of(texts)
    return frozenset() if order is None else order.apart()


def _counts(loop: _Loop) -> bool:
    """Return whether a loop has one backward pass, and its counter only decides about syncs.

    The code may compare the counter, but not use it otherwise.
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
    return {ast.unparse(node.target) for node in _all(scope) if isinstance(node, ast.AugAssign)}


def _counts_by(loop: _Loop, line: int) -> bool:
    """Return whether a line in `loop` depends on what the loop counts or assigns elsewhere.

    It does, too, if the line's result selects something that depends on it: `rows = randint(...)`,
    then `task[rows]`.
    """
    own = [node for node in _all(loop) if getattr(node, "lineno", 0) == line]
    drawn = _names(own, ast.Store)
    # In `[data[at] for at in rows]` the selection is by `at`.
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
    names = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute)]
    return {ast.unparse(n) for n in names if context is None or isinstance(n.ctx, context)}


def _turns(call: ast.AST) -> bool:
    """Return whether a call takes the next item, or one of several items at random.

    A call that takes an item by its name (`batch.pop("labels")`) does neither.
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
    for file, text in texts.items():
        for number, line in enumerate(text.splitlines(), start=1):
            if pattern.search(line.partition("#")[0]) and not line.lstrip().startswith("def "):
                yield _absolute(file), number


def _running() -> dict[tuple[str, str, int], int]:
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
    """The statements of a script, and the current lines of its running functions.

    `trees` has file -> parsed text. `running` has (file, function, its first line) -> current line.
    """

    trees: Mapping[str, ast.Module]
    running: Mapping[tuple[str, str, int], int]
    _known: set[str] = field(default_factory=set)  # names of functions that were examined

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> _Order | None:
        """Return the order of the lines that run now.

        Return None if the texts are too long, or one of them can't be parsed.
        """
        if sum(map(len, texts.values())) > _CHARS_MAX:
            return None
        known = {_absolute(file): parsed(text) for file, text in texts.items()}
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
            return True  # the function uses itself
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
        """Return whether a line certainly runs in each iteration of a loop.

        `inside` has the names of the functions between the loop and the line that were already
        followed. If `is_alike`, the line must also not depend on anything that changes from
        iteration to iteration.
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
        """Return the names of functions that are called, but not where training steps."""
        left, known = self._within_step(), set[str]()
        every = [node for _, node in self._nodes() if isinstance(node, _Function)]
        left += [function for function in every if not self._is_only_called(function)]
        while left:
            known |= {function.name for function in left if isinstance(function, _Function)}
            names = {
                name.rpartition(".")[2] for function in left for name in _names(_all(function))
            } - known
            left = [function for function in every if function.name in names]
        return frozenset(function.name for function in every) - known

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
        name = function.name
        is_special = name.startswith("__") or name == "forward" or bool(function.decorator_list)
        if is_special or any(_is_hidden(name, node) for _, node in self._nodes()):
            return False
        calls = sum(_called(node) == name for _, node in self._nodes())
        return calls > 0 and calls == len([*self._uses(function, inside=True)])

    def loop_of_micro_batches(self) -> _Within | None:
        """Return the running loop over the micro-batches of a step; None if there is none."""
        around = self._around()
        return around[0] if around and _is_within_a_step(around[0][2]) else None

    def loop_of_steps(self) -> _Within | None:
        """Return the innermost loop around what runs now; None if there is none.

        If this is a loop over the micro-batches of a step, return the next loop around it.
        """
        around = self._around()
        is_inner = len(around) > 1 and _is_within_a_step(around[0][2])
        return next(iter(around[is_inner:]), None)

    def _around(self) -> list[_Within]:
        for file, scope, now in self._scopes():
            around = [n for n in ast.walk(scope) if isinstance(n, _Loop) and _has(n, now)]
            if around:
                return [(file, scope, n) for n in sorted(around, key=lambda n: -n.lineno)]
        return []

    def _scopes(self) -> Iterator[tuple[str, ast.Module | _Function, int]]:
        for (file, name, first), now in self.running.items():
            tree = self.trees.get(file)
            scope = None if tree is None else _scope(tree, now)
            if scope is not None and _named(scope) == (name, first):
                yield file, scope, now

    def _uses(self, function: _Function, *, inside: bool = False) -> Iterator[Line]:
        """Yield the lines outside a function that use its name; if `inside`, also lines in it."""
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
    calls = {_called(node) for node in ast.walk(loop)}
    return "backward" in calls and "step" not in calls


def _is_hidden(name: str, node: ast.AST) -> bool:
    """Return whether a function may be called under another name, or by a string."""
    if isinstance(node, ast.alias):
        return node.name == name and node.asname is not None
    texts: list[ast.expr] = []
    if isinstance(node, ast.Call) and _called(node) in ("getattr", "methodcaller"):
        texts = node.args
    if isinstance(node, ast.Subscript) and _called(node.value) in ("globals", "locals", "vars"):
        texts = [node.slice]
    return any(isinstance(text, ast.Constant) and text.value == name for text in texts)


def _called(node: ast.AST) -> str:
    function = getattr(node, "func", None)
    return str(getattr(function, "id", getattr(function, "attr", "")))


def _scope(tree: ast.Module, line: int) -> ast.Module | _Function:
    inner = [node for node in ast.walk(tree) if isinstance(node, _Function) and _has(node, line)]
    return max(inner, key=lambda node: node.lineno, default=tree)


def _named(scope: ast.Module | _Function) -> tuple[str, int]:
    if isinstance(scope, ast.Module):
        return _MODULE, 0
    return scope.name, min([scope.lineno, *(one.lineno for one in scope.decorator_list)])


def _comes_after(scope: ast.AST, line: int, now: int) -> bool:
    """Return whether a line comes after the statement at `now`, and not again before it.

    A line in a handler for errors of this statement doesn't count, since another attempt may
    follow.
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
    outer = within or [scope]
    return any(
        isinstance(node, ast.If | ast.ExceptHandler) and _has(node, line) and node not in outer
        for one in outer
        for node in ast.walk(one)
    )


def _has(node: ast.stmt | ast.ExceptHandler, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
