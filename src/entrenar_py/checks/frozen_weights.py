"""Explain how a tensor that requires no gradient moved, where nobody declared whether it may.

What a script writes there on purpose (an average, a memory, a codebook) looks like no error. Two
things that people do by mistake follow exactly from what was recorded: adapters are added to the
weights that they adapt and stay in use beside them, and weight decay by hand shrinks all tensors of
a network, frozen ones among them. `weight_averages.follow_others` has the benign moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from entrenar_py.checks import precision
from entrenar_py.checks.explanations import Explanation
from entrenar_py.trace import Start, TensorRecord, Tensors, Trace, Update

Values = NDArray[np.float64]

_UNIT = 16 * precision.FLOAT32  # of a product of adapters and a sum
_SHRUNK_LEAST = 0.9  # of a weight, after one step's decay
_ALIKE = 1e-5
_PARTS_MAX = 3  # of a name, below the module that holds a weight and its adapters


@dataclass(frozen=True)
class Moves:
    """The moves of the frozen tensors `names` of one rank, from `start` on over its `updates`."""

    trace: Trace
    start: Start
    updates: Sequence[Update]
    names: Sequence[str]

    def of(self, name: str) -> Iterator[tuple[Update, Tensors, Values, Values]]:
        """Yield each move of a tensor: the step's update, all weights before it, and both values.

        Nothing is yielded of moves without values.
        """
        held = [self.start.weights, *(update.weights for update in self.updates)]
        for update, (before, after) in zip(self.updates, pairwise(held), strict=True):
            if name not in before or name not in after:
                continue
            was, now = before[name].values(), after[name].values()
            if before[name].digest != after[name].digest and was is not None and now is not None:
                yield update, before, was.astype(np.float64), now.astype(np.float64)


def explained(moves: Moves) -> Explanation | None:
    """Return the error that all moves follow from, if there is one."""
    return _merged(moves) or _shrunk(moves)


def _merged(moves: Moves) -> Explanation | None:
    """Adapters were added to the weights that they adapt, and go on as they are."""
    pairs = [_merge(moves, name) for name in moves.names]
    known = [pair for pair in pairs if pair is not None]
    if not known or len(known) < len(pairs):
        return None
    return Explanation(
        f"it moved by the product of {known[0][0]} and {known[0][1]}, which go on beside it: "
        "adapters were merged into what they adapt, to save or to serve it, and not taken out",
        tensor=moves.names[0],
    )


def _merge(moves: Moves, name: str) -> tuple[str, str] | None:
    """Return the adapters of which a tensor's moves are multiples, if they stay as they are."""
    shapes = moves.trace.shapes
    shape, made = shapes.get(name, ()), [*moves.of(name)]
    near = [other for other in moves.start.trainable if _share_a_module(name, other)]
    for first in near:
        for second in near:
            inner = shapes.get(first, ())[:1]
            flat = (*shapes.get(second, ()), *shapes.get(first, ()))
            if len(shape) != 2 or flat != (shape[0], *inner, *inner, shape[1]):
                continue
            if made and all(
                _is_multiple(now - was, was, [*_products(move, held, (second, first), shapes)])
                for move, held, was, now in made
            ):
                return first, second
    return None


def _share_a_module(name: str, other: str) -> bool:
    """Return whether two tensors are in one small part of the model, as a layer's adapters are."""
    parts, others = name.split("."), other.split(".")
    common = 0
    while parts[common : common + 1] == others[common : common + 1] and common < len(parts):
        common += 1
    return max(len(parts), len(others)) - common <= _PARTS_MAX


def _products(
    update: Update, before: Tensors, pair: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Values]:
    """Yield the products that may be in a weight: of the adapters before the step, and after it.

    Adapters that the script has changed itself were emptied when they were merged, as is right.
    """
    if not update.edited.keys().isdisjoint(pair):
        return
    for held in (before, update.weights):
        values = [held[name].values() if name in held else None for name in pair]
        factors = [
            value.astype(np.float64).reshape(shapes[name])
            for name, value in zip(pair, values, strict=True)
            if value is not None
        ]
        if len(factors) == len(pair):
            yield (factors[0] @ factors[1]).ravel()


def _is_multiple(move: Values, was: Values, products: Sequence[Values]) -> bool:
    """Return whether a tensor moved by a positive multiple of one of `products`."""
    for product in products:
        square = float(product @ product)
        scale = float(product @ move) / square if square else 0.0
        size = np.abs(was) + float(np.linalg.norm(scale * product))
        if scale > 0 and bool((np.abs(move - scale * product) <= _UNIT * size).all()):
            return True
    return False


def _shrunk(moves: Moves) -> Explanation | None:
    """All frozen tensors are multiplied by one number below 1, in the same steps."""
    frozen = {name for name in moves.start.frozen if _is_telling(moves.start.weights.get(name))}
    factors: dict[int, dict[str, float | None]] = {}
    for name in moves.names:
        for update, _, was, now in moves.of(name):
            factors.setdefault(update.step, {})[name] = _factor(was, now)
    numbers = [number for named in factors.values() for number in named.values()]
    known = [number for number in numbers if number is not None]
    if len(known) < max(2, len(numbers)) or max(known) - min(known) > _ALIKE:
        return None
    if len(frozen) < 2 or any(named.keys() != frozen for named in factors.values()):
        return None
    return Explanation(
        f"all {len(frozen)} tensors that require no gradient are multiplied by {known[0]:.6g}: "
        "the script decays weights by hand, those of a frozen network among them",
        tensor=moves.names[0],
    )


def _factor(was: Values, now: Values) -> float | None:
    """Return the number by which a tensor is multiplied to shrink it; None if there is none."""
    square = float(was @ was)
    factor = float(was @ now) / square if square else 0.0
    fits = bool((np.abs(now - factor * was) <= 2 * precision.FLOAT32 * np.abs(was)).all())
    return factor if fits and _SHRUNK_LEAST <= factor < 1 - _ALIKE else None


def _is_telling(record: TensorRecord | None) -> bool:
    values = None if record is None else record.values()
    return values is not None and bool(values.any())
