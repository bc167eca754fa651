"""Numbers of its own by which a script divides a loss, by name: `loss / heads`, `kl / self.tasks`.

Such a number may happen to be that of the micro-batches. The text says which names count those: a
remainder by it decides when to step, a loop over it calls `backward`, or it is called so.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from entrenar_py.check.observing import call_sites, script_order, script_text

_COUNTING = re.compile(r"accum|micro|(?:^|_)gas(?:$|_)|update_freq|iter_size", re.IGNORECASE)
# What a loss is called, or a call that makes one number of many.
_LOSS = re.compile(
    r"loss|nll|kl|ce\b|entropy|err|cost|obj|mse|criteri|penalty|elbo|energy|\.(?:sum|mean)\(", re.I
)
_Scope = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _Divisor:
    """A dotted `name` that a script divides by in a `file`, in a `function` ("" for none).

    `owner` is the class of `self` there. A name that `is_local` is that function's own. What is
    divided `is_loss` if it is called like one, or is a sum or mean.
    """

    file: str
    name: str
    function: str
    owner: str
    is_local: bool
    is_loss: bool

    def may_be(self, number: float, apart: Collection[str]) -> bool | None:
        """Return whether it has this value; None if nothing that runs now knows a loss's divisor.

        Functions that are `apart` from what runs now have no part in the loss.
        """
        if self.function in apart:
            return False
        values = [*self._values()] or _attributes(self.owner, self.name)
        if values:
            return any(_is_equal(value, number) for value in values)
        return None if self.function and self.is_loss else False

    def _values(self) -> Iterator[Any]:
        root, *path = self.name.split(".")
        for holder in self._variables(root):
            value = holder.get(root)
            for name in path:
                value = inspect.getattr_static(value, name, None)
            if value is not None:
                yield value

    def _variables(self, root: str) -> Iterator[dict[str, Any]]:
        """Yield the variables of functions that run now, and those of the divisor's file."""
        for frame in call_sites.own_frames():
            if frame.f_code.co_filename != self.file:
                continue
            variables = call_sites.local_variables(frame)
            is_same = frame.f_code.co_name == self.function
            is_owner = type(variables.get("self")).__name__ == self.owner
            if (is_same or not self.is_local) if root != "self" else is_owner:
                yield variables
        if not self.is_local:
            modules = [*sys.modules.values()]
            yield from (vars(m) for m in modules if getattr(m, "__file__", None) == self.file)


def may_be(number: float) -> bool | None:
    """Return whether the script divides by a `number` that counts no micro-batches.

    Return None if it may: the value of what it divides a loss by is unknown.
    """
    own = _divisors().own
    running = ((f.f_code.co_filename, f.f_lineno) for f in call_sites.own_frames())
    apart = _apart(tuple(running)) if own else ()
    answers = {divisor.may_be(number, apart) for divisor in own}
    return True if True in answers else None if None in answers else False


@functools.cache
def _attributes(owner: str, name: str) -> tuple[Any, ...]:
    """Return what `self.name` is of all objects of a script's class `owner`, looked up once."""
    root, _, attribute = name.partition(".")
    if root != "self" or not owner or "." in attribute:
        return ()
    objects = [one for one in gc.get_objects() if type(one).__name__ == owner]
    own = [
        o.__dict__ for o in objects if call_sites.is_own_class(type(o)) and hasattr(o, "__dict__")
    ]
    return tuple(held[attribute] for held in own if attribute in held)


@functools.cache
def _apart(_: tuple[tuple[str, int], ...]) -> frozenset[str]:
    """Return the functions that have no part in a step, once for the lines that run now."""
    own, _libraries = script_text.texts()
    return script_order.apart(own)


def are_two_counts() -> bool:
    """Return whether a loss is divided by the micro-batches at two places, as the text has it.

    One of them is the script's. The other one is, too, or a library's that calls `backward` now.
    """
    places = len(_divisors().counts)
    return places > 1 or (places == 1 and _is_in_engine())


def _is_in_engine() -> bool:
    """Return whether a library's function that runs now knows the number of micro-batches."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not call_sites.is_own(frame.f_code.co_filename):
        if not call_sites.is_ours(frame.f_code.co_filename) and any(
            map(_COUNTING.search, frame.f_code.co_names)
        ):
            return True
        frame = frame.f_back
    return False


class _Divisors(NamedTuple):
    """The divisors that count no micro-batches, and those of losses that do."""

    own: tuple[_Divisor, ...]
    counts: tuple[_Divisor, ...]


@functools.cache
def _divisors() -> _Divisors:
    own, _ = script_text.texts()
    known = {file: script_text.parsed(text) for file, text in own.items()}
    trees = {file: tree for file, tree in known.items() if tree is not None}
    counting = {name for tree in trees.values() for name in _counting(tree)}
    kept: list[_Divisor] = []
    counts: list[_Divisor] = []
    for divisor in (one for file, tree in trees.items() for one in _of(file, tree, ())):
        name = _last(divisor.name)
        if name not in counting and not _COUNTING.search(name):
            kept.append(divisor)
        elif divisor.is_loss:
            counts.append(divisor)
    return _Divisors(tuple(kept), tuple(counts))


def _of(file: str, node: ast.AST, scopes: Sequence[_Scope]) -> Iterator[_Divisor]:
    """Yield what is divided by below a node, but for running counts and shares of a constant."""
    for child in ast.iter_child_nodes(node):
        name, divided = _division(child)
        if name and not isinstance(divided, ast.Constant) and not _runs(name, scopes):
            inside = scopes[-1] if scopes and not isinstance(scopes[-1], ast.ClassDef) else None
            yield _Divisor(
                file=file,
                name=name,
                function="" if inside is None else inside.name,
                owner=next((s.name for s in scopes[::-1] if isinstance(s, ast.ClassDef)), ""),
                is_local=inside is not None and name.partition(".")[0] in _locals(inside),
                is_loss=bool(_LOSS.search(ast.unparse(divided))),
            )
        yield from _of(file, child, (*scopes, child) if isinstance(child, _Scope) else scopes)


def _locals(function: ast.AST) -> set[str]:
    """Return the names that a function is given or assigns."""
    given = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return given | {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _division(node: ast.AST) -> tuple[str, ast.AST]:
    """Return the dotted name that a node divides by, "" if it is none, and what is divided."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _dotted(node.right), node.left
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return _dotted(node.value), node.target
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_division = node.args and node.func.attr in ("div", "div_", "true_divide")
        return (_dotted(node.args[-1]), node) if is_division else ("", node)
    return "", node


def _runs(name: str, scopes: Sequence[_Scope]) -> bool:
    """Return whether a function or class increases a name: it counts what was seen until then."""
    return any(
        isinstance(node, ast.AugAssign) and _dotted(node.target) == name
        for scope in scopes
        for node in ast.walk(scope)
    )


def _counting(tree: ast.AST) -> Iterator[str]:
    """Yield the names that count micro-batches, as a text uses them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            yield _last(_dotted(node.right))
        if isinstance(node, ast.For) and _calls(node.body, "backward"):
            yield from _names(node.iter)
        if isinstance(node, ast.If | ast.While) and _calls(node.body, "step"):
            yield from _names(node.test)
        if isinstance(node, ast.keyword) and _COUNTING.search(node.arg or ""):
            yield _last(_dotted(node.value))


def _calls(body: Sequence[ast.stmt], method: str) -> bool:
    return any(
        isinstance(node, ast.Call) and getattr(node.func, "attr", "") == method
        for statement in body
        for node in ast.walk(statement)
    )


def _names(node: ast.expr) -> Iterator[str]:
    return (_last(_dotted(inner)) for inner in ast.walk(node) if isinstance(inner, ast.expr))


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c`, or "" if an expression is no such name."""
    if isinstance(node, ast.Name):
        return node.id
    outer = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{outer}.{node.attr}" if outer and isinstance(node, ast.Attribute) else ""


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_equal(value: Any, number: float) -> bool:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim)
    return is_number and float(value) == number
