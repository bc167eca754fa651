"""Explain how a tensor that requires no gradient moved, where nobody declared whether it may.

What a script writes there on purpose (a memory, a codebook) looks like no error. Two things that
people do by mistake follow exactly from what was recorded: adapters are added to the weights that
they adapt and stay in use beside them, and weight decay by hand shrinks all tensors of a network,
frozen ones among them. Adapters that begin anew when they are merged are right, and so is what is
taken out again; averages are in `weight_averages.follow_others`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.evidence import precision
from entrenar_py.shared.trace import Start, TensorRecord, Tensors, Trace, Update

Values = NDArray[np.float64]

_UNIT = 16 * precision.FLOAT32  # of a product of adapters and a sum
_ROUNDING = 4 * precision.FLOAT32  # of a sum and a difference
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
    """Return what all moves follow from, if there is one."""
    return _rounded(moves) or _merged(moves) or _shrunk(moves)


def _rounded(moves: Moves) -> Explanation | None:
    """What was added to a weight was taken out again, which leaves a rounding."""
    steps = [(was, now) for name in moves.names for _, _, was, now in moves.of(name)]
    if not steps or not all(map(_is_rounding, *zip(*steps, strict=True))):
        return None
    words = "moved by no more than a rounding: what was added to it was taken out again"
    return Explanation(words, is_wrong=False)


def _is_rounding(was: Values, now: Values) -> bool:
    return bool(np.linalg.norm(now - was) <= _ROUNDING * np.linalg.norm(was))


def _merged(moves: Moves) -> Explanation | None:
    """Adapters were added to the weights that they adapt, and go on as they are, or begin anew."""
    merges = [_merge(moves, name) for name in moves.names]
    known = [merge for merge in merges if merge is not None]
    if not known or len(known) < len(merges):
        return None
    first, second, _ = known[0]
    told = f"moved by the product of {first} and {second}"
    if all(are_emptied for *_, are_emptied in known):
        return Explanation(f"{told}, which begin anew from zero", is_wrong=False)
    if any(are_emptied for *_, are_emptied in known):
        return None
    return Explanation(
        f"it {told}, which go on beside it: adapters were merged into what they adapt, to save or "
        "to serve it, and not taken out",
        tensor=moves.names[0],
    )


def _merge(moves: Moves, name: str) -> tuple[str, str, bool] | None:
    """Return the adapters of which a tensor's moves are multiples, and whether they were emptied.

    None if there are none, or if the script changed them otherwise as they were merged.
    """
    shapes = moves.trace.shapes
    shape, made = shapes.get(name, ()), [*moves.of(name)]
    near = [other for other in moves.start.trainable if _share_a_module(name, other)]
    for pair in permutations(near, 2):
        second, first = pair
        inner = shapes.get(first, ())[:1]
        flat = (*shapes.get(second, ()), *shapes.get(first, ()))
        if len(shape) != 2 or flat != (shape[0], *inner, *inner, shape[1]):
            continue
        if made and all(
            _is_multiple(now - was, was, [*_products(move, held, pair, shapes)])
            for move, held, was, now in made
        ):
            edits = [move.edited[n].values() for move, *_ in made for n in pair if n in move.edited]
            if all(edit is not None and not edit.any() for edit in edits):
                return first, second, bool(edits)
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
    """Yield the products that may be in a weight: of the adapters before the step, and after it."""
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
