"""The sums and means that make up the loss of a backward pass, and the divisors of each.

A script doesn't declare by which number it divides the loss of a micro-batch, but autograd's graph
shows it. The walk starts at the number on which `backward` is called, and follows divisions,
products and sums up to the reductions (sum or mean) of the loss functions. The nodes from which the
reductions were computed are not examined.

A script may also divide a loss by an unrelated number (a temperature squared, say) that happens to
equal the number of micro-batches. Then the graph has two equal divisors, although the loss is
divided by the number of micro-batches only once. The unrelated number is recognised because it is a
Python `float`, or from the script's text, in which it may have a name: `loss / heads`, `kl /
self.tasks`. The text also shows which names count micro-batches: the script steps depending on a
remainder by the name, a loop over it calls `backward`, or the name itself is a usual one for this
count.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import math
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from entrenar_py.check.observing import call_sites, script_text

_NODES_MAX = 2000  # nodes to examine per graph, between the loss and its reductions
_MEAN, _SUM = 1, 2  # torch's constants for the kind of reduction
_HALF = 2.0  # a factor that may belong to any loss: a squared error is often halved
# Nodes that don't change the value.
_SAME = frozenset(
    {"ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias"}
)
Terms = tuple[tuple[float, ...], ...]  # the type of `trace.Shard.terms`


class Begun(NamedTuple):
    """The value of the loss at which a backward pass begins (None if unknown), and its terms.

    A `GradScaler` has multiplied the loss by `scale`; the value is without it.
    """

    value: float | None = None
    terms: Terms = ()
    scale: float = 1.0


class Losses:
    """Reads the values at which backward passes begin, without the scale of a `GradScaler`."""

    def __init__(self) -> None:
        self._scale: float | None = None
        self._last: float | None = None  # the value that a scaler multiplied last

    def scaled(self, scale: float, losses: Any) -> None:
        """Called when a scaler multiplies `losses` by `scale`."""
        self._scale, self._last = scale, value_of(losses)

    def begun(self, tensors: Any, *, is_plain: bool) -> Begun:
        """Return the value and the terms of `tensors`, where a pass begins.

        `is_plain` is true if the script passes no gradient for `tensors` to `backward`.
        """
        value = value_of(tensors)
        if not is_plain or value is None:
            return Begun(None if self._scale else value)
        root = tensors[0] if isinstance(tensors, list | tuple) else tensors
        walk = _Walk(self._scale)
        terms = walk.terms(root)
        if self._scale and not walk.was_scaled:
            # Perhaps another scaler multiplied the loss, so its own value is unknown.
            return Begun(None, terms)
        if self._scale:
            value = value / self._scale if math.isfinite(value) else self._last
        return Begun(value, terms, self._scale or 1.0)


def value_of(tensors: Any) -> float | None:
    """Return the value of the loss on which `backward` is called; None if it isn't a scalar."""
    if isinstance(tensors, list | tuple) and len(tensors) == 1:
        (tensors,) = tensors
    # `backward` also accepts generators of tensors, and graph edges.
    is_number = isinstance(tensors, Tensor) and tensors.numel() == 1 and not tensors.is_complex()
    return float(tensors.detach()) if is_number else None


@dataclass(frozen=True)
class _Path:
    """The product of the factors from the root to a node, and the divisors among these factors.

    `floats` are the divisors that are a Python `float`.
    """

    share: float = 1.0
    divisors: tuple[float, ...] = ()
    floats: tuple[float, ...] = ()
    is_scaled: bool = False

    def times(self, factor: float) -> _Path:
        return replace(self, share=self.share * factor)

    def over(self, divisor: float, *, is_float: bool = False) -> _Path:
        share = self.share / divisor if divisor else math.nan
        floats = (*self.floats, *[divisor] * is_float)
        return replace(self, share=share, divisors=(*self.divisors, divisor), floats=floats)

    def counted(self, count: float) -> tuple[float, ...] | None:
        """Return the divisors, except those that belong to the loss.

        Of two equal divisors, one is left out if it belongs to the loss itself rather than to the
        average over micro-batches. The divisor that makes the term a mean over its `count` elements
        is neither. Return None if that can't be determined.
        """
        own = self.divisors
        for divisor in {one for one in own if own.count(one) > 1 + (one == count)}:
            is_of_loss = self._is_of_loss(divisor)
            if is_of_loss is None:
                return None
            if is_of_loss:
                first = self.divisors.index(divisor)
                return (*self.divisors[:first], *self.divisors[first + 1 :])
        return self.divisors

    def _is_of_loss(self, divisor: float) -> bool | None:
        if divisor in self.floats or divides_by(divisor):
            return True
        is_half = divisor == _HALF and not are_two_counts()
        return True if is_half else may_divide_by(divisor)


_Term = tuple[float, _Path]  # (number of elements in a sum, path from the root to the sum)


class _Walk:
    """A walk through the graph, from a loss to the reductions in it."""

    def __init__(self, scale: float | None) -> None:
        self._scale, self.was_scaled = scale, False
        self._left = _NODES_MAX

    def terms(self, root: Tensor) -> Terms:
        """Return the terms of `root`; () if they can't be determined, or are too many."""
        try:
            terms = tuple(self._of((root.grad_fn, root.output_nr), _Path()))
        except RuntimeError:  # an earlier pass has freed the graph
            return ()
        if self._left <= 0:
            return ()
        if len(terms) > 1:  # the script divides a mean of several losses by their number
            return tuple((count, path.share, *path.divisors) for count, path in terms)
        known = [(count, path.share, path.counted(count)) for count, path in terms]
        return tuple((count, share, *own) for count, share, own in known if own is not None)

    def _of(self, edge: tuple[Any, int], path: _Path) -> Iterator[_Term]:
        node, output = edge
        self._left -= 1
        if self._left <= 0 or node is None:
            return
        name = _kind(node)
        if hasattr(node, "_saved_reduction"):
            yield _of_function(node, path)
        elif name in ("Sum", "Mean"):
            yield from self._of_sum(node, path, is_mean=name == "Mean")
        elif name == "_DDPSink":  # passes all outputs of a wrapped model on
            yield from self._of(node.next_functions[output], path)
        elif (onward := self._onward(name, node, path)) is not None:
            for below, its_path in onward:
                yield from self._of(below, its_path)
        else:
            yield 0.0, path

    def _onward(self, name: str, node: Any, path: _Path) -> list[tuple[Any, _Path]] | None:
        """Return (edge, path) for each input of a linear node; None for any other node."""
        edges = node.next_functions
        if name in _SAME:
            return [(edges[0], path)]
        if name in ("Neg", "Rsub"):
            return [(edges[0], path.times(-1.0))]
        if name in ("Add", "Sub"):
            alpha = _number(getattr(node, "_saved_alpha", 1.0)) or 1.0
            signs = (1.0, alpha if name == "Add" else -alpha)
            both = zip(edges, signs, strict=False)
            return [(edge, path.times(sign)) for edge, sign in both]
        if name not in ("Mul", "Div") or sum(node is not None for node, _ in edges) != 1:
            return None
        at = next(n for n, (node, _) in enumerate(edges) if node is not None)
        factor = getattr(node, "_saved_self" if at else "_saved_other", None)
        number = _number(factor)
        if number is None or (name == "Div" and at):
            return None
        if name == "Div":
            return [(edges[at], path.over(number, is_float=_is_float(factor)))]
        if number == self._scale and not path.is_scaled:
            self.was_scaled = True
            return [(edges[at], replace(path, is_scaled=True))]
        return [(edges[at], path.times(number))]

    def _of_sum(self, node: Any, path: _Path, *, is_mean: bool) -> Iterator[_Term]:
        child, size = node.next_functions[0][0], float(math.prod(node._saved_self_sym_sizes))
        if is_mean:
            path = path.over(size)
        if _kind(child) == "Stack" and len(child.next_functions) == size:  # a stack of losses
            for edge in child.next_functions:
                yield from self._of(edge, path)
            return
        yield size if is_mean else _counted(child, size), path


def _of_function(node: Any, path: _Path) -> _Term:
    """Return the term of a node that belongs to a loss function of torch."""
    if getattr(node, "_saved_weight", None) is not None:  # classes or elements have weights
        return 0.0, path
    total = _number(getattr(node, "_saved_total_weight", None))
    count = float(node._saved_self.numel()) if total is None else total
    if node._saved_reduction == _MEAN:
        path = path.over(count)
    return (count if node._saved_reduction in (_MEAN, _SUM) else 1.0), path


def _counted(node: Any, size: float) -> float:
    """Return how many of a sum's `size` terms count: not the masked ones, nor ignored labels."""
    while _kind(node) in _SAME:
        node = node.next_functions[0][0]
    if _kind(node) == "Mul":
        mask = next((m for m in (node._saved_self, node._saved_other) if m is not None), None)
        if isinstance(mask, Tensor) and mask.numel() == size and _is_mask(mask):
            return float(mask.detach().sum())
    # From a cross-entropy with label smoothing.
    if _kind(node) == "MaskedFill" and node._saved_mask.numel() == size:
        return float((~node._saved_mask).sum())
    if _kind(node) == "Where" and node._saved_condition.numel() == size:
        kept = node._saved_condition
        branches = [edge is not None for edge, _ in node.next_functions[:2]]
        if branches.count(True) == 1:
            return float((kept if branches[0] else ~kept).sum())
    if _kind(node).startswith("NllLoss") and node._saved_reduction not in (_MEAN, _SUM):
        # Torch returns this signed number as unsigned.
        ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63
        return float((node._saved_target != ignored).sum())
    return size


def _is_mask(mask: Tensor) -> bool:
    mask = mask.detach()
    return bool(((mask == 0) | (mask == 1)).all())


def _kind(node: Any) -> str:
    return "" if node is None else re.sub(r"Backward\d*$", "", node.name())


def _is_float(value: Any) -> bool:
    # Autograd saves an `int` divisor as int64.
    return isinstance(value, float) or (
        isinstance(value, Tensor) and value.dtype == torch.float64 and value.ndim == 0
    )


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) else None


# --- divisors in the script's text ----------------------------------------------------------------


_COUNTING = re.compile(r"accum|micro|(?:^|_)gas(?:$|_)|update_freq|iter_size", re.IGNORECASE)
# Names of losses, and calls that reduce many numbers to one.
_LOSS = re.compile(
    r"loss|nll|kl|ce\b|entropy|err|cost|obj|mse|criteri|penalty|elbo|energy|\.(?:sum|mean)\(", re.I
)
_FACTOR_MAX = 64  # larger constants in a divisor (a product or a power) are not counts
_Scope = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _Divisor:
    """A name by which a script divides in `file`, in `function` ("" at module level).

    The name may be dotted, such as `self.tasks`; then `owner` is the class of `self`, otherwise "".
    `is_local` says that the name is a local variable of the function. `is_loss` says that the
    dividend's name is one of a loss, or that the dividend is a sum or a mean.
    """

    file: str
    name: str
    function: str
    owner: str
    is_local: bool
    is_loss: bool

    def may_be(self, number: float, apart: Collection[str]) -> bool | None:
        """Return whether the name has the value `number`.

        Return None if a loss is divided by the name, but its value is unknown. Functions named in
        `apart` are not called in the current step, so they have no part in its loss.
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
        """Yield the variables of the running functions, then the globals of the divisor's file."""
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


def divides_by(number: float) -> bool:
    """Return whether the script's text divides by a constant equal to `number`.

    The constant may be written as it is (`/ 4`), as a power (`/ T**2`), or as a factor of a divisor
    (`/ (2 * variance)`).
    """
    is_count = 0 < number < math.inf
    return is_count and any(_may_equal(divisor, number) for divisor in _divisors().written)


def may_divide_by(number: float) -> bool | None:
    """Return whether the script divides by a name with value `number`, not a micro-batch count.

    Return None if that is possible, but unknown: a loss is divided by a name with an unknown value.
    """
    own = _divisors().own
    running = ((f.f_code.co_filename, f.f_lineno) for f in call_sites.own_frames())
    apart = _apart(tuple(running)) if own else ()
    answers = {divisor.may_be(number, apart) for divisor in own}
    return True if True in answers else None if None in answers else False


@functools.cache
def _attributes(owner: str, name: str) -> tuple[Any, ...]:
    """Return the values of `self.name` in all objects of a script's class `owner`.

    They are determined once per name. `name` is a dotted name; the result is () if it doesn't begin
    with `self`.
    """
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
    own, _libraries = script_text.texts()
    return script_text.functions_apart(own)


def are_two_counts() -> bool:
    """Return whether a loss is divided by the number of micro-batches in two places.

    One place is in the script's text. The other place is in its text, too, or in a library function
    that is calling `backward` now.
    """
    places = len(_divisors().counts)
    return places > 1 or (places == 1 and _is_in_engine())


def _is_in_engine() -> bool:
    """Return whether a running library function uses a name that counts micro-batches."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not call_sites.is_own(frame.f_code.co_filename):
        if not call_sites.is_ours(frame.f_code.co_filename) and any(
            map(_COUNTING.search, frame.f_code.co_names)
        ):
            return True
        frame = frame.f_back
    return False


class _Divisors(NamedTuple):
    """The divisors in a script: other names than micro-batch counts, and counts that divide losses.

    `written` are divisors that are constants, or expressions of constants.
    """

    own: tuple[_Divisor, ...]
    counts: tuple[_Divisor, ...]
    written: tuple[ast.expr, ...]


@functools.cache
def _divisors() -> _Divisors:
    own, _ = script_text.texts()
    known = {file: script_text.parsed(text) for file, text in own.items()}
    trees = {file: tree for file, tree in known.items() if tree is not None}
    counting = {name for tree in trees.values() for name in _counting(tree)}
    kept: list[_Divisor] = []
    counts: list[_Divisor] = []
    by = (_division(node)[0] for tree in trees.values() for node in ast.walk(tree))
    for divisor in (one for file, tree in trees.items() for one in _of(file, tree, ())):
        name = _last(divisor.name)
        if name not in counting and not _COUNTING.search(name):
            kept.append(divisor)
        elif divisor.is_loss:
            counts.append(divisor)
    written = (divisor for divisor in by if isinstance(divisor, ast.BinOp | ast.Constant))
    return _Divisors(tuple(kept), tuple(counts), tuple(written))


def _of(file: str, node: ast.AST, scopes: Sequence[_Scope]) -> Iterator[_Divisor]:
    """Yield the divisors in the code of `node`, except running counts and divisors of constants."""
    for child in ast.iter_child_nodes(node):
        divisor, divided = _division(child)
        name = "" if divisor is None else _dotted(divisor)
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
    given = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return given | {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _division(node: ast.AST) -> tuple[ast.expr | None, ast.AST]:
    """Return the divisor and the dividend of a node; (None, ...) if the node isn't a division."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.right, node.left
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.value, node.target
    if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
        return (node.args[-1] if node.func.attr in ("div", "div_", "true_divide") else None), node
    return None, node


def _runs(name: str, scopes: Sequence[_Scope]) -> bool:
    # A name that the code increases is a running count of what was seen so far.
    return any(
        isinstance(node, ast.AugAssign) and _dotted(node.target) == name
        for scope in scopes
        for node in ast.walk(scope)
    )


def _counting(tree: ast.AST) -> Iterator[str]:
    """Yield the names that count micro-batches in a script's code."""
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
    if isinstance(node, ast.Name):
        return node.id
    outer = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{outer}.{node.attr}" if outer and isinstance(node, ast.Attribute) else ""


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_equal(value: Any, number: float) -> bool:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim)
    return is_number and float(value) == number


def _may_equal(divisor: ast.expr, number: float) -> bool:
    known = _constant(divisor)
    if known is not None or not isinstance(divisor, ast.BinOp):
        return known == number
    left, right = _constant(divisor.left), _constant(divisor.right)
    if isinstance(divisor.op, ast.Pow) and right is not None and right > 1:
        return math.isclose(round(number ** (1 / right)) ** right, number)
    factor = right if left is None else left
    return isinstance(divisor.op, ast.Mult) and bool(factor) and number % (factor or 1) == 0


def _constant(node: ast.expr) -> float | None:
    """Return the value of a number, or of a product or power of numbers; None for anything else."""
    if isinstance(node, ast.Constant):
        return float(node.value) if isinstance(node.value, int | float) else None
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult | ast.Pow):
        return None
    left, right = _constant(node.left), _constant(node.right)
    if left is None or right is None or max(left, right) > _FACTOR_MAX:
        return None
    return left * right if isinstance(node.op, ast.Mult) else left**right
