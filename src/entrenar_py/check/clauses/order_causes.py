"""Say why a step depends on the order of the parameters, if an equation proves the mistake.

Many a right optimizer has a design that depends on places: rates, decay, bits or turns. So a
difference is wrong only if a mistake explains all of it, and in both orders: Adam's corrections
that are counted for each tensor, or a tensor that moves by the momentum of others. What stays in a
buffer then follows from the gradients of the steps so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared.trace import Tensors

Vector = NDArray[np.float64]
Vectors = Mapping[str, Vector]
Moves = Mapping[str, tuple[Vector, Vector]]  # of each tensor in both runs
Groups = Sequence[tuple[str, ...]]  # the names of each group's tensors
Constants = Mapping[str, Any]
# From the index of a group, a place among its tensors with gradients, and a tensor's size.
Key = Callable[[int, int, int], Hashable]

COUNTED = "the step is counted once for each parameter, and not once for all"
# What is said of buffers -> which one a step takes for a tensor.
_BUFFERS: Mapping[str, Key] = {
    "its momentum is not its own: it is kept by place, and places slip where a tensor has no "
    "gradient": lambda group, place, _: (group, place),
    "tensors of one size share their momentum": lambda _, __, size: size,
}
_ALIKE = 2e-2  # of a number: how far it may be from the one of an equation
_SHARES = (0.8, 0.9, 0.95, 0.98, 0.99, 0.999)  # of a momentum, that a step keeps. Many name none
_TELLING_MIN = 16  # elements that differ, whose places and signs have no other reason then
_CORRECTED_MIN = 0.1  # how far from 1 a factor must be that corrections explain


def of_factors(
    factors: Mapping[str, float], step: int, orders: Sequence[Groups], constants: Constants
) -> str:
    """Return that each tensor counts a step, if movements grow as Adam's corrections do then."""
    betas = constants.get("betas")
    if not (isinstance(betas, list | tuple) and len(betas) == 2):
        return ""
    flat = [[name for names in groups for name in names] for groups in orders]
    usual, turned = (
        {name: count for count, name in enumerate(names, 1 + step * len(names))} for names in flat
    )

    def correction(count: int) -> float:
        return math.sqrt(1.0 - float(betas[1]) ** count) / (1.0 - float(betas[0]) ** count)

    if not factors.keys() <= usual.keys() & turned.keys():
        return ""
    due = {name: correction(turned[name]) / correction(usual[name]) for name in factors}
    telling = [name for name in due if abs(due[name] - 1.0) > _CORRECTED_MIN]
    are_those = all(math.isclose(factors[name], due[name], rel_tol=_ALIKE) for name in due)
    return COUNTED if are_those and len(telling) > 1 else ""


def of_momenta(
    moves: Moves, gradients: Sequence[Tensors], orders: Sequence[Groups], constants: Constants
) -> str:
    """Return which momentum of others explains movements in both orders; "" if none does.

    `gradients` are those of each step so far, with this one. Sketches of them say nothing.
    """
    known = [_vectors(one) for one in gradients]
    if not moves.keys() <= known[-1].keys():
        return ""
    for words, key in _BUFFERS.items():
        for beta in sorted(_betas(constants)):
            usual, turned = (_momenta(known, groups, key, beta) for groups in orders)
            if not moves.keys() <= usual.keys() & turned.keys():
                continue
            shifts = {name: turned[name] - usual[name] for name in moves}
            if _are_signs(moves, known[-1], (usual, turned)) or _are_multiples(moves, shifts):
                return words
    return ""


def _vectors(gradients: Tensors) -> Vectors:
    vectors = {name: record.values() for name, record in gradients.items()}
    return {name: v.astype(np.float64) for name, v in vectors.items() if v is not None}


def _betas(constants: Constants) -> set[float]:
    """Return which shares of a momentum a step may keep: constants, and what is usual."""
    shares = {*_SHARES}
    for value in constants.values():
        several = value if isinstance(value, list | tuple) else (value,)
        shares |= {share for share in several if isinstance(share, float) and 0.5 <= share < 1}
    return shares


def _momenta(gradients: Sequence[Vectors], groups: Groups, key: Key, beta: float) -> Vectors:
    """Return what a tensor's buffer has as the last step comes to it; nothing if that can't be."""
    buffers: dict[Hashable, Vector] = {}
    momenta: dict[str, Vector] = {}
    for step in gradients:
        for index, names in enumerate(groups):
            for place, name in enumerate(name for name in names if name in step):
                gradient = step[name]
                which = key(index, place, gradient.size)
                momentum = buffers.get(which, np.zeros_like(gradient))
                if momentum.shape != gradient.shape:
                    return {}
                momenta[name] = momentum
                buffers[which] = beta * momentum + (1 - beta) * gradient
    return momenta


def _are_multiples(moves: Moves, shifts: Vectors) -> bool:
    """Return whether differences are one multiple of those of the momenta, as in SGD."""
    due = np.concatenate([shifts[name] for name in moves])
    got = np.concatenate([turned - usual for usual, turned in moves.values()])
    square = float(due @ due)
    if np.count_nonzero(due) < _TELLING_MIN or not square:
        return False
    factor = float(got @ due) / square
    return bool(factor < 0 and np.linalg.norm(got - factor * due) <= _ALIKE * np.linalg.norm(got))


def _are_signs(moves: Moves, gradients: Vectors, momenta: Sequence[Vectors]) -> bool:
    """Return whether elements move by the sign of gradient and a multiple of momentum.

    Lion does. It is one multiple for all elements, in both orders. Each says how large it is at
    least, or at most.
    """
    num_turned = sum(int((np.sign(a) * np.sign(b) < 0).sum()) for a, b in moves.values())
    if num_turned < _TELLING_MIN:
        return False
    least, most = 0.0, math.inf
    # What has neither gradient nor momentum moves by decay alone, if at all.
    for index, known in enumerate(momenta):
        for name, both in moves.items():
            signs = -np.sign(both[index])
            gradient, momentum = signs * gradients[name], signs * known[name]
            with np.errstate(divide="ignore", invalid="ignore"):
                multiples = -gradient / momentum
            is_against = (np.maximum(momentum, gradient) <= 0) & (momentum + gradient < 0)
            if is_against.any():
                return False
            least = max(least, *multiples[(momentum > 0) & (gradient < 0)], 0.0)
            most = min(most, *multiples[(momentum < 0) & (gradient > 0)], math.inf)
    return least <= most * (1 + _ALIKE)
