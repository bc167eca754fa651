"""Compare two runs in which the optimizer gets each group's parameters in different orders.

The update rule of a script's own optimizer is unknown, and the run on one worker uses it, too, so
no other pair of runs shows its mistakes. But a step follows from weights and gradients, and not
from the order in which a loop visits the parameters. So steps that begin with the same bits are
compared. Sums over parameters (a norm to clip by, a flat buffer) are rounded differently in a
different order. Such a step is the same within rounding, but later steps can't be compared.

A larger difference alone is no mistake. An optimizer may by design choose the rate, the decay, the
precision or the next tensor to step by a parameter's place, and noise is drawn for one tensor after
the other. A difference is wrong if one of two known mistakes explains all of it, in both orders:
each tensor increments the counter of Adam's bias corrections (`_COUNTERS`), or a tensor is moved by
another tensor's momentum (`_MOMENTA`). In both, the optimizer's state follows from the gradients so
far. All other differences are only noted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness, factors, precision
from entrenar_py.shared.trace import Ruled, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import counted

Groups = Sequence[tuple[str, ...]]  # the names of each group's tensors
# The movements of a tensor, or the momenta of all tensors: float64 [2, size], in the usual order
# and in the changed order.
Both = NDArray[np.float64]
# Maps the index of a group, a place among its tensors with gradients, and a tensor's size to the
# key of a counter or momentum: visits with equal keys share it.
Key = Callable[[int, int, int], Hashable]

# Relative: the largest distance of two equal movements, as some are computed in 16 bits.
_ALIKE = 5e-3
_ROUNDINGS = 4  # units of a weight, to which its movement is rounded
_EXPLAINED = 2e-2  # relative: the largest distance of a number from the one of an equation
_CORRECTED_MIN = 0.1  # the smallest distance from 1 of a factor that bias corrections explain
_TELLING_MIN = 16  # elements that differ: if so many do, the cause is not another one
# Fractions of a momentum that a step keeps: usual values, since many optimizers name none.
_SHARES = (0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
_BEFORE = "with the parameters of each group in a different order: "

_COUNTED = "the step is counted once for each parameter instead of once"
_COUNTERS: Sequence[Key] = (lambda *_: 0, lambda group, *_: group)
_MOMENTA: Mapping[str, Key] = {
    "it has the momentum of another tensor: momentum is stored by position, "
    "and positions shift where a tensor has no gradient": lambda group, place, _: (group, place),
    "tensors of one size share their momentum": lambda _, __, size: size,
}


def is_wanted(trace: Trace) -> bool:
    """Return whether a run like `trace` should be repeated with parameters in a different order.

    Only optimizers of the script's own classes, created in this training run, are tested. Two
    layers, each with a weight and a bias, are the smallest model with different orders.
    """
    is_fresh = all(start.step == 0 and not start.resumed for start in trace.of(Start))
    is_own = trace.traits.rule == "own" and trace.traits.steps == "model"
    several = any(event.derived and len(event.names) > 3 for event in trace.of(Ruled))
    return is_fresh and is_own and several


def compare(tally: Tally, pair: Sequence[Trace]) -> None:
    """Check that each tensor moves equally in both orders, up to the first step that differs.

    `pair` are the runs in the usual and in the other order; less than two are not compared.
    """
    if len(pair) != 2 or any(run.end.status == "failed" for run in pair):
        return  # a class may require an order
    orders = [*map(_groups, pair)]
    if orders[0] == orders[1] or [*map(sorted, orders[0])] != [*map(sorted, orders[1])]:
        tally.note(f"{_BEFORE}the script sorts them itself")
        return
    gradients: list[Tensors] = []
    num_steps = 0
    for (before, update), (began, other) in zip(*map(_steps, pair), strict=False):
        if not _begin_alike(before, began, update, other):
            break
        gradients.append(update.gradient)
        moves = {name: both for name, both in _moves(before, update, other) if both.any()}
        wrong = _wrong(before, moves)
        cause = _cause(moves, gradients, orders, _constants(pair[0])) if wrong else ""
        if wrong and not cause:
            tally.note(
                f"{_BEFORE}in step {update.step}, {', '.join(sorted(wrong))} move differently. No "
                "equation shows a mistake, so that may be meant"
            )
            break
        for name, both in sorted(moves.items()):
            due, got = np.linalg.norm(both, axis=1)
            tally.check(
                name not in wrong,
                f"{_BEFORE}{name} moves differently, from the same weights and gradients: {cause}; "
                "a step must not depend on the order of the parameters",
                tensor=name,
                expected=f"a movement of norm {due:.6g}",
                got=f"one of {got:.6g}, {_apart(both):.2g} apart",
                **evidence.place(pair[0], update),
            )
        if wrong:
            break
        num_steps += bool(moves)
    if num_steps:
        tally.note(f"{_BEFORE}{counted(num_steps, 'step')} the same")


def _groups(trace: Trace) -> Groups:
    """Return the tensors of each group, as in the first step of the first rank."""
    rules = [*trace.of(Ruled)]
    return [e.names for e in rules if (e.step, e.rank) == (rules[0].step, rules[0].rank)]


def _constants(trace: Trace) -> Mapping[str, Any]:
    return next((event.constants for event in trace.of(Ruled) if event.constants), {})


def _steps(trace: Trace) -> Iterator[tuple[Tensors, Update]]:
    """Yield the weights before each step of the first rank, and its update."""
    weights: Tensors = {}
    for _, by_rank in evidence.ranks_by_step(trace):
        update = evidence.any_rank(by_rank)
        if not weights:
            weights = next((s.weights for s in trace.of(Start) if s.rank == update.rank), {})
        weights = {**weights, **update.edited}
        yield weights, update
        weights = {**weights, **update.weights}


def _begin_alike(before: Tensors, began: Tensors, update: Update, other: Update) -> bool:
    """Return whether a step begins with the same weights, gradients and rates in both runs."""
    pairs = (before, began), (update.gradient, other.gradient)
    return (
        update.step == other.step
        and update.finite
        and other.finite
        and all(evidence.digests(left) == evidence.digests(right) for left, right in pairs)
        and closeness.first_unlike_rates(update, other) is None
    )


def _moves(before: Tensors, update: Update, other: Update) -> Iterator[tuple[str, Both]]:
    """Yield how each tensor with a gradient moves in both runs, as far as that is known."""
    for name in update.gradient.keys() & before.keys():
        places = before, update.weights, other.weights
        vectors = [tensors[name].vector() if name in tensors else None for tensors in places]
        known = [v.astype(np.float64) for v in vectors if v is not None]
        if len({v.shape for v in known}) == 1 and len(known) == len(vectors):
            yield name, np.stack(known[1:]) - known[0]


def _apart(both: Both) -> float:
    return float(np.linalg.norm(both[1] - both[0]))


def _wrong(before: Tensors, moves: Mapping[str, Both]) -> set[str]:
    """Return the tensors that move differently in the changed order, by more than rounding."""
    unit, wrong = precision.unit_of(before), set[str]()
    for name, both in moves.items():
        size = math.sqrt(before[name].square() or 0.0)
        allowed = _ALIKE * float(np.linalg.norm(both[0])) + _ROUNDINGS * unit * size
        scale = 1.0 if before[name].sketch is None else closeness.PROJECTED
        if _apart(both) > allowed * scale:
            wrong.add(name)
    return wrong


# --- mistakes -------------------------------------------------------------------------------------


def _cause(
    moves: Mapping[str, Both],
    gradients: Sequence[Tensors],
    orders: Sequence[Groups],
    constants: Mapping[str, Any],
) -> str:
    """Return which mistake explains all movements in both orders; "" if none is known to.

    `gradients` are those of each step up to this one.
    """
    if not moves.keys() <= {name for names in orders[0] for name in names}:
        return ""
    for key in _COUNTERS:
        if _are_corrections(moves, [_counts(gradients, order, key) for order in orders], constants):
            return _COUNTED
    for words, key in _MOMENTA.items():
        for share in sorted(_shares(constants)):
            momenta = [_momenta(gradients, order, key, share) for order in orders]
            if all(moves.keys() <= known.keys() for known in momenta) and _follow(
                np.hstack([*moves.values()]),
                np.concatenate([_vector(gradients[-1], name) for name in moves]),
                np.stack([np.concatenate([known[name] for name in moves]) for known in momenta]),
            ):
                return words
    return ""


def _visits(
    gradients: Sequence[Tensors], groups: Groups
) -> Iterator[tuple[Tensors, str, int, int]]:
    """Yield, for each visit of a tensor: the step's gradients, the name, group and place."""
    for step in gradients:
        for index, names in enumerate(groups):
            for place, name in enumerate(name for name in names if name in step):
                yield step, name, index, place


def _counts(gradients: Sequence[Tensors], groups: Groups, key: Key) -> Mapping[str, int]:
    """Return tensor -> the value of its counter when the last step visits it."""
    counters = Counter[Hashable]()
    counts = {}
    for _, name, index, place in _visits(gradients, groups):
        which = key(index, place, 0)
        counters[which] += 1
        counts[name] = counters[which]
    return counts


def _are_corrections(
    moves: Mapping[str, Both], counts: Sequence[Mapping[str, int]], constants: Mapping[str, Any]
) -> bool:
    """Return whether Adam's bias corrections with these counts explain each movement."""
    betas = constants.get("betas")
    if not (isinstance(betas, list | tuple) and len(betas) == 2):
        return False

    def correction(count: int) -> float:
        return math.sqrt(1.0 - float(betas[1]) ** count) / (1.0 - float(betas[0]) ** count)

    num_telling = 0
    for name, both in moves.items():
        usual, turned = (correction(count_of[name]) for count_of in counts)
        if np.linalg.norm(both[1] - both[0] * turned / usual) > _EXPLAINED * np.linalg.norm(
            both[1]
        ):
            return False
        num_telling += abs(turned / usual - 1.0) > _CORRECTED_MIN
    return num_telling > 1


def _shares(constants: Mapping[str, Any]) -> set[float]:
    """Return the fractions of a momentum that a step may keep: the constants, and usual values."""
    several = [v if isinstance(v, list | tuple) else (v,) for v in constants.values()]
    values = [value for entries in several for value in entries if isinstance(value, float)]
    return {*_SHARES, *(value for value in values if 0.5 <= value < 1)}


def _vector(tensors: Tensors, name: str) -> NDArray[np.float64]:
    """Return the elements of a tensor; none for a sketch, which has only some of them."""
    values = tensors[name].values()
    return np.zeros(0) if values is None else values.astype(np.float64)


def _momenta(
    gradients: Sequence[Tensors], groups: Groups, key: Key, share: float
) -> Mapping[str, NDArray[np.float64]]:
    """Return tensor -> its momentum when the last step visits it; {} if sizes don't fit."""
    buffers: dict[Hashable, NDArray[np.float64]] = {}
    momenta: dict[str, NDArray[np.float64]] = {}
    for step, name, index, place in _visits(gradients, groups):
        gradient = _vector(step, name)
        which = key(index, place, gradient.size)
        momenta[name] = momentum = buffers.get(which, np.zeros_like(gradient))
        if momentum.shape != gradient.shape or not gradient.size:
            return {}
        buffers[which] = share * momentum + (1 - share) * gradient
    return momenta


def _follow(moves: Both, gradient: NDArray[np.float64], momenta: Both) -> bool:
    """Return whether gradient and momentum explain all moves, as in SGD or (by signs) as in Lion.

    In SGD the movements of the two orders differ by one multiple of the difference of the momenta.
    In Lion one multiple of the momentum, added to the gradient, has the sign of each element's move
    in both orders: each element gives a lower or an upper limit of the multiple. Some elements must
    differ between the orders, and have no other reason to.
    """
    shift = momenta[1] - momenta[0]
    factor = factors.ratio(shift, moves[1] - moves[0], bound=_EXPLAINED)
    if factor is not None and factor < 0 and np.count_nonzero(shift) >= _TELLING_MIN:
        return True
    if (moves[0] * moves[1] < 0).sum() < _TELLING_MIN:
        return False
    signs = -np.sign(moves)
    towards, kept = signs * gradient, signs * momenta
    # Elements with neither gradient nor momentum move only by decay, if at all.
    if ((np.maximum(kept, towards) <= 0) & (kept + towards < 0)).any():
        return False
    multiples = -towards / np.where(kept == 0, 1.0, kept)
    least = multiples[(kept > 0) & (towards < 0)].max(initial=0.0)
    most = multiples[(kept < 0) & (towards > 0)].min(initial=math.inf)
    return bool(least <= most * (1 + _EXPLAINED))
