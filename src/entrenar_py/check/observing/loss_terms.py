"""What a backward pass begins at: the sums and means in it, and by which numbers they are divided.

A script says nowhere by which number it divides a micro-batch's loss. Autograd's graph does: from
the number that `backward` is called on, divisions, products and sums lead to the reductions of the
loss functions. Nodes below these are not looked at.

A loss may be divided by a number of its own (a temperature squared) that happens to be that of the
micro-batches. Beside an equal divisor it is a factor, not another one. It is a number with a
fraction, as Python's `float` is one, or the script's text has it, maybe by a name of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from entrenar_py.check.observing import named_divisors, script_text

_NODES_MAX = 2000  # of one graph, between the loss and its reductions
_MEAN, _SUM = 1, 2  # torch's numbers of reductions
_HALF = 2.0  # any loss may be divided by, as half of a squared error is
# Nodes that hand on a number as it is.
_SAME = frozenset(
    {"ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias"}
)
Terms = tuple[tuple[float, ...], ...]  # of `trace.Shard`


class Begun(NamedTuple):
    """The value that a backward pass begins at, None if it is no number, and its terms."""

    value: float | None = None
    terms: Terms = ()


class Losses:
    """Reads what the backward passes of a process begin at, without a `GradScaler`'s scale."""

    def __init__(self) -> None:
        self._scale: float | None = None
        self._last: float | None = None  # the value that was scaled last

    def scaled(self, scale: float, losses: Any) -> None:
        """Note that a scaler multiplies `losses` by `scale`."""
        self._scale, self._last = scale, value_of(losses)

    def begun(self, tensors: Any, *, is_plain: bool) -> Begun:
        """Return what a pass at `tensors` begins at; `is_plain` if no gradient is given for it."""
        value = value_of(tensors)
        if not is_plain or value is None:
            return Begun(None if self._scale else value)
        root = tensors[0] if isinstance(tensors, list | tuple) else tensors
        walk = _Walk(self._scale)
        terms = walk.terms(root)
        if self._scale and not walk.was_scaled:
            return Begun(None, terms)  # by another scaler, maybe: no loss to compare
        if self._scale:
            value = value / self._scale if math.isfinite(value) else self._last
        return Begun(value, terms)


def value_of(tensors: Any) -> float | None:
    """Return the value of the loss that `backward` is called on, None if that is no number."""
    if isinstance(tensors, list | tuple) and len(tensors) == 1:
        (tensors,) = tensors
    # torch takes generators and edges of its graph, too.
    is_number = isinstance(tensors, Tensor) and tensors.numel() == 1 and not tensors.is_complex()
    return float(tensors.detach()) if is_number else None


@dataclass(frozen=True)
class _Path:
    """The product of the factors from the root to a node, and the divisors among them.

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

    def counted(self) -> tuple[float, ...] | None:
        """Return the divisors without one that is beside an equal one, and a number of the loss.

        Return None if nobody knows whether it is that.
        """
        for divisor in {one for one in self.divisors if self.divisors.count(one) > 1}:
            is_of_loss = self._is_of_loss(divisor)
            if is_of_loss is None:
                return None
            if is_of_loss:
                first = self.divisors.index(divisor)
                return (*self.divisors[:first], *self.divisors[first + 1 :])
        return self.divisors

    def _is_of_loss(self, divisor: float) -> bool | None:
        if divisor in self.floats or script_text.divides_by(divisor):
            return True
        is_half = divisor == _HALF and not named_divisors.are_two_counts()
        return True if is_half else named_divisors.may_be(divisor)


_Term = tuple[float, _Path]  # how many elements, and the path to their sum


class _Walk:
    """One walk from a loss to the reductions in it."""

    def __init__(self, scale: float | None) -> None:
        self._scale, self.was_scaled = scale, False
        self._left = _NODES_MAX

    def terms(self, root: Tensor) -> Terms:
        """Return the terms of `root`; none if it has more than can be looked at."""
        try:
            terms = tuple(self._of((root.grad_fn, root.output_nr), _Path()))
        except RuntimeError:  # the graph was freed by an earlier pass
            return ()
        if self._left <= 0:
            return ()
        if len(terms) > 1:  # a mean of losses is divided by their number
            return tuple((count, path.share, *path.divisors) for count, path in terms)
        known = [(count, path.share, path.counted()) for count, path in terms]
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
        elif name == "_DDPSink":  # hands on all outputs of a wrapped model
            yield from self._of(node.next_functions[output], path)
        elif (onward := self._onward(name, node, path)) is not None:
            for below, its_path in onward:
                yield from self._of(below, its_path)
        else:
            yield 0.0, path

    def _onward(self, name: str, node: Any, path: _Path) -> list[tuple[Any, _Path]] | None:
        """Return the edges below a node that is linear in what they lead to; else None."""
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
        if _kind(child) == "Stack" and len(child.next_functions) == size:  # of losses
            for edge in child.next_functions:
                yield from self._of(edge, path)
            return
        yield size if is_mean else _counted(child, size), path


def _of_function(node: Any, path: _Path) -> _Term:
    """Return the term of one of torch's loss functions."""
    if getattr(node, "_saved_weight", None) is not None:  # of classes, or of each element
        return 0.0, path
    total = _number(getattr(node, "_saved_total_weight", None))
    count = float(node._saved_self.numel()) if total is None else total
    if node._saved_reduction == _MEAN:
        path = path.over(count)
    return (count if node._saved_reduction in (_MEAN, _SUM) else 1.0), path


def _counted(node: Any, size: float) -> float:
    """Return how many of a sum's `size` terms count: those of a mask, or of labels not ignored."""
    while _kind(node) in _SAME:
        node = node.next_functions[0][0]
    if _kind(node) == "Mul":
        mask = next((m for m in (node._saved_self, node._saved_other) if m is not None), None)
        if isinstance(mask, Tensor) and mask.numel() == size and _is_mask(mask):
            return float(mask.detach().sum())
    if _kind(node) == "MaskedFill" and node._saved_mask.numel() == size:  # smoothed labels
        return float((~node._saved_mask).sum())
    if _kind(node) == "Where" and node._saved_condition.numel() == size:
        kept = node._saved_condition
        branches = [edge is not None for edge, _ in node.next_functions[:2]]
        if branches.count(True) == 1:
            return float((kept if branches[0] else ~kept).sum())
    if _kind(node).startswith("NllLoss") and node._saved_reduction not in (_MEAN, _SUM):
        ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # torch shows it unsigned
        return float((node._saved_target != ignored).sum())
    return size


def _is_mask(mask: Tensor) -> bool:
    mask = mask.detach()
    return bool(((mask == 0) | (mask == 1)).all())


def _kind(node: Any) -> str:
    return "" if node is None else re.sub(r"Backward\d*$", "", node.name())


def _is_float(value: Any) -> bool:
    """Return whether what a graph keeps of a divisor was a Python `float`; an `int` is int64."""
    return isinstance(value, float) or (
        isinstance(value, Tensor) and value.dtype == torch.float64 and value.ndim == 0
    )


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) else None
