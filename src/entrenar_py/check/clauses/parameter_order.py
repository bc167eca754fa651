"""Compare a run with one whose optimizer was built with its parameters in another order.

Nobody knows the rule of an optimizer of the script's own. But whatever it is, a step follows from
the gradients, and not from the order in which a loop comes to the parameters. It does where state
is kept by place and slips, where one buffer serves several tensors, or where the step is counted
for each. One worker steps so, too, so that no other pair of runs shows it. Other differences may be
meant (rates, decay or turns by place), and are noted.

Only steps that begin with the same bits are compared: weights and gradients. A sum over parameters
(a norm to clip by) is rounded otherwise in another order, and the steps after that begin otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.clauses import order_causes
from entrenar_py.check.clauses.order_causes import Groups
from entrenar_py.check.evidence import closeness, factors, precision
from entrenar_py.check.evidence.needs import REORDERED, Traces
from entrenar_py.shared.trace import Drawn, Ruled, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import counted

_ALIKE = 5e-3  # of a movement: how far two may be apart. Some are computed in 16 bits
_ROUNDINGS = 4  # of a weight, in which its movement ends
_BEFORE = "with the parameters of each group in another order: "

Factors = Mapping[str, float]  # of tensors' movements


@dataclass(frozen=True)
class _Step:
    """A step of a rank in both runs, and the weights before it, which are the same."""

    before: Tensors
    usual: Update
    turned: Update
    gradients: Sequence[Tensors]  # of the steps so far, with this one

    def moved(self) -> tuple[set[str], set[str]]:
        """Return the names of the tensors that move in each run."""
        usual, turned = (
            {n for n, r in update.weights.items() if r.digest != self.before[n].digest}
            for update in (self.usual, self.turned)
        )
        return usual, turned

    def moves(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return how a tensor moves in both runs; None if that is not known."""
        places = self.before, self.usual.weights, self.turned.weights
        vectors = [tensors[name].vector() if name in tensors else None for tensors in places]
        first, *ends = [v if v is None else v.astype(np.float64) for v in vectors]
        if first is None or any(end is None or end.shape != first.shape for end in ends):
            return None
        due, got = (end - first for end in ends if end is not None)
        return due, got

    def allowed(self, name: str, due: NDArray[np.float64]) -> float:
        """Return how far two movements may be apart, by their L2 norm."""
        record, unit = self.before[name], precision.unit_of(self.before)
        size = math.sqrt(record.square() or 0.0)
        allowed = _ALIKE * float(np.linalg.norm(due)) + _ROUNDINGS * unit * size
        return allowed * (closeness.PROJECTED if record.sketch is not None else 1.0)


def is_wanted(trace: Trace) -> bool:
    """Return whether a run like `trace` is to be made in another order.

    It is for optimizers of the script's own classes, built for this training. The order of the
    pairs of parameters is changed, so that a group needs two of them.
    """
    is_fresh = all(start.step == 0 and not start.resumed for start in trace.of(Start))
    is_own = trace.traits.rule == "own" and trace.traits.steps == "model"
    several = any(event.derived and len(event.names) > 3 for event in trace.of(Ruled))
    return is_fresh and is_own and several


def compare(tally: Tally, runs: Traces) -> None:
    """Check that the movement of each tensor is the same in both orders."""
    pair = runs.witnesses.get(REORDERED, ())
    if len(pair) != 2 or any(run.end.status == "failed" for run in pair):
        return
    usual, turned = pair
    groups = [_groups(run) for run in pair]
    if not _are_reordered(*groups):
        tally.note(f"{_BEFORE}the script puts them in its own")
        return
    num_steps = 0
    for step in _steps(usual, turned):
        moved, others = step.moved()
        if moved != others:
            tally.note(
                f"{_BEFORE}step {step.usual.step} was not compared: other tensors move, so they "
                "may have their turns by place"
            )
            break
        if not _compare(tally, usual, step, groups):
            break
        num_steps += bool(moved)
    if num_steps:
        tally.note(f"{_BEFORE}{counted(num_steps, 'step')} the same")


def _groups(trace: Trace) -> Groups:
    """Return the tensors of each group, as they are in the first step of the first rank."""
    first = next(iter(trace.of(Ruled)), None)
    return [
        event.names
        for event in trace.of(Ruled)
        if first is not None and (event.step, event.rank) == (first.step, first.rank)
    ]


def _are_reordered(usual: Groups, turned: Groups) -> bool:
    return usual != turned and [*map(sorted, usual)] == [*map(sorted, turned)]


def _steps(usual: Trace, turned: Trace) -> Iterator[_Step]:
    """Yield the steps that begin alike in both runs, up to the first that doesn't.

    What draws random numbers as it steps draws others for a tensor in another order.
    """
    drawn = {
        (event.step, event.rank)
        for run in (usual, turned)
        for event in run.of(Drawn)
        if event.where == "step"
    }
    gradients: dict[int, list[Tensors]] = {}
    others = {(step.step, step.rank): (before, step) for before, step in _updates(turned)}
    for before, update in _updates(usual):
        place = update.step, update.rank
        if place not in others or place in drawn:
            return
        began, other = others[place]
        are_alike = _have_same_bits(before, began) and _have_same_bits(
            update.gradient, other.gradient
        )
        rates = [(one.learning_rate, {**one.rates}) for one in (update, other)]
        are_known = update.weights.keys() | other.weights.keys() <= before.keys()
        is_finite = update.finite and other.finite
        if not (are_alike and are_known and rates[0] == rates[1] and is_finite):
            return
        so_far = gradients.setdefault(update.rank, [])
        so_far.append(update.gradient)
        yield _Step(before, update, other, so_far)


def _updates(trace: Trace) -> Iterator[tuple[Tensors, Update]]:
    """Yield each update, with the weights before it."""
    weights: dict[int, Tensors] = {}
    for event in trace.standing.events:
        if isinstance(event, Start):
            weights[event.rank] = event.weights
        elif isinstance(event, Update):
            yield {**weights.get(event.rank, {}), **event.edited}, event
            weights[event.rank] = {**weights.get(event.rank, {}), **event.weights}


def _have_same_bits(left: Tensors, right: Tensors) -> bool:
    return {n: r.digest for n, r in left.items()} == {n: r.digest for n, r in right.items()}


def _compare(tally: Tally, trace: Trace, step: _Step, orders: Sequence[Groups]) -> bool:
    """Compare the movements of one step. Return whether they are known, and the same.

    What doesn't move, at a rate of zero, say, counts for nothing.
    """
    names = step.moved()[0] & step.usual.gradient.keys()
    moves = {name: both for name in sorted(names) if (both := step.moves(name)) is not None}
    wrong = {
        name
        for name, (due, got) in moves.items()
        if np.linalg.norm(got - due) > step.allowed(name, due)
    }
    cause = _cause(trace, step, moves, orders) if wrong else ""
    if wrong and not cause:
        tally.note(
            f"{_BEFORE}in step {step.usual.step}, {', '.join(sorted(wrong))} move otherwise. No "
            "equation shows a mistake, so that may be meant"
        )
        return False
    for name, (due, got) in moves.items():
        factor = factors.of(due, got, None, _ALIKE) if name in wrong else ""
        tally.check(
            name not in wrong,
            f"{_BEFORE}{name} moves otherwise, from the same weights and gradients"
            f"{factor and f' ({factor})'}: {cause}; a step must not depend on the order of the "
            "parameters",
            tensor=name,
            expected=f"a movement of norm {np.linalg.norm(due):.6g}",
            got=f"one of {np.linalg.norm(got):.6g}, {np.linalg.norm(got - due):.2g} apart",
            **evidence.place(trace, step.usual),
        )
    return len(moves) == len(names) and not wrong


def _cause(trace: Trace, step: _Step, moves: order_causes.Moves, orders: Sequence[Groups]) -> str:
    """Return which mistake explains all that moves otherwise; "" if none is known to."""
    constants = next((event.constants for event in trace.of(Ruled) if event.constants), {})
    if factors_of := _factors(step, moves):
        return order_causes.of_factors(factors_of, step.usual.step, orders, constants)
    return order_causes.of_momenta(moves, step.gradients, orders, constants)


def _factors(step: _Step, moves: order_causes.Moves) -> Factors:
    """Return by which number each movement is multiplied in the other order; none if one is not."""
    multiples = {}
    for name, (due, got) in moves.items():
        square = float(due @ due)
        if not square:
            continue
        multiples[name] = factor = float(got @ due) / square
        if np.linalg.norm(got - factor * due) > step.allowed(name, got):
            return {}
    return multiples
