"""Rounds of ranks that step alone, as their weights show them. Judges nothing.

Local SGD, DiLoCo, federated averaging: each rank steps with a gradient of its own, and now and then
all are given the same weights. A script may say so by `obs.synchronised()`. If it doesn't, the
weights of the ranks do: they part, and are equal again before a later step, changed by something
other than the optimizer.

The rule of the outer step is the one that was seen (an optimizer that steps copies of the
parameters), or the mean, or a rate and a momentum that make all rounds' steps of the ranks' mean
movement. Ranks that only come nearer to each other, or a part of the model at a time, have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check.clauses import outer_causes, outer_step
from entrenar_py.check.evidence import evidence, rounds
from entrenar_py.check.rank_files import observed_run
from entrenar_py.shared.trace import Event, Start, Synchronised, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally

_SHARED_MAX = 0.1  # of the elements of gradients, of ranks that step alone
_MET_MIN = 0.5  # of the elements that had parted, and are equal after a round
_OFF = 1e-3  # of a step's length: by how much a rule of the outer step may miss it
_SHORT = 2e-4  # relative: a rate or momentum this near to a short decimal is meant to be that
_DIGITS = 3

Vector = NDArray[np.float64]
Met = Mapping[int, Mapping[int, Tensors]]  # step -> rank -> the weights that were given after it


def seen(trace: Trace) -> Trace:
    """Return `trace` with a Synchronised wherever ranks that step alone were brought together."""
    if trace.scenario.workload != "own" or trace.traits.shared or rounds.are_in(trace):
        return trace
    met, names = _meetings(trace)
    if not met:
        return trace
    lengths = observed_run.usual_length([sorted(met)])
    options = {**trace.scenario.options, **({} if lengths is None else {"inner_steps": lengths})}
    trace = replace(
        trace,
        scenario=trace.scenario.with_(options=options),
        promises=(*trace.promises, rounds.PROMISE),
        events=tuple(_with_meetings(trace, met, names)),
    )
    return _with_rule(trace)


# --- when -----------------------------------------------------------------------------------------


def _meetings(trace: Trace) -> tuple[Met, Set[str]]:
    """Return when ranks were given which weights, and the tensors; nothing without such rounds.

    In each round the same tensors are brought together. All others of the model stay as they are.
    """
    met: dict[int, dict[int, Tensors]] = {}
    kinds: set[frozenset[str]] = set()
    before: Mapping[int, Update] = {}
    last = -1
    for step, by_rank in evidence.ranks_by_step(trace):
        if before and before.keys() == by_rank.keys() and _step_alone(before):
            edited = frozenset(name for update in by_rank.values() for name in update.edited)
            given: dict[int, Tensors] = {
                rank: {name: by_rank[rank].edited.get(name, held) for name, held in of.items()}
                for rank, of in ((rank, update.weights) for rank, update in before.items())
            }
            if edited and _are_equal_again({r: u.weights for r, u in before.items()}, given):
                met[last] = given
                kinds.add(edited)
        before, last = by_rank, step
    if len(kinds) != 1:
        return {}, frozenset()
    (names,) = kinds
    return met, names


def _step_alone(by_rank: Mapping[int, Update]) -> bool:
    """Return whether ranks made a step with gradients of their own, and have other weights now."""
    if len(by_rank) < 2:
        return False
    gradients = [update.gradient for update in by_rank.values()]
    names = set.intersection(*(set(of) for of in gradients))
    apart = _apart({rank: update.gradient for rank, update in by_rank.items()}, names)
    sizes = {name: gradients[0][name].size or 0 for name in names}
    moving = {name for name in names - apart if _is_there(gradients[0], name)}
    total = sum(sizes[name] for name in apart | moving)
    shared = sum(sizes[name] for name in moving)
    return bool(
        apart
        and shared <= _SHARED_MAX * total
        and _apart({rank: update.weights for rank, update in by_rank.items()}, apart)
    )


def _is_there(gradient: Tensors, name: str) -> bool:
    """Return whether a gradient isn't zero, as one of what took no part in the step is."""
    values = gradient[name].elements()
    return values is None or bool(np.any(values))


def _apart(held: Mapping[int, Tensors], names: Set[str]) -> set[str]:
    """Return which of the tensors `names` ranks have different values of."""
    return {
        name
        for name in names
        if len({of[name].digest if name in of else "" for of in held.values()}) > 1
    }


def _are_equal_again(before: Mapping[int, Tensors], given: Mapping[int, Tensors]) -> bool:
    """Return whether ranks have most of the elements alike now that they had parted in."""
    first = next(iter(before.values()))
    parted = _apart(before, {*first})
    sizes = {name: first[name].size or 0 for name in parted}
    met = sum(sizes[name] for name in parted - _apart(given, parted))
    return bool(met) and met >= _MET_MIN * sum(sizes.values())


def _with_meetings(trace: Trace, met: Met, names: Set[str]) -> Iterator[Event]:
    """Yield the events, with what was given in rounds, and without it as an edit."""
    after = {step + 1 for step in met}
    for event in trace.events:
        if isinstance(event, Update) and event.step in after:
            kept = {name: record for name, record in event.edited.items() if name not in names}
            event = replace(event, edited=kept)
        yield event
        if isinstance(event, Update) and event.rank in met.get(event.step, {}):
            given = met[event.step][event.rank]
            yield Synchronised(
                step=event.step,
                rank=event.rank,
                weights={name: record for name, record in given.items() if name in names},
            )


# --- by which rule --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """A rate and a momentum of the outer step, as `Traits.outer` names its kind."""

    rate: float
    momentum: float = 0.0
    kind: str = "nesterov"

    def of(self, trace: Trace) -> Trace:
        """Return the run with this rule."""
        options = {
            **trace.scenario.options,
            "outer_learning_rate": self.rate,
            "outer_momentum": self.momentum,
        }
        return replace(
            trace,
            scenario=trace.scenario.with_(options=options),
            traits=replace(trace.traits, outer=self.kind),
        )


_MEAN = _Rule(1.0)


def _with_rule(trace: Trace) -> Trace:
    """Return the run with the rule that all of its outer steps follow.

    If none is, but one error explains how they come from the rule that was seen, or from the mean,
    that rule is taken. Else the rule is unknown.
    """
    is_known = "outer_momentum" in trace.scenario.options and trace.traits.outer != "other"
    known = [trace] if is_known else []
    for candidate in (*known, _MEAN.of(trace)):
        if _follows(candidate) is None:
            return candidate
    unknown = replace(trace, traits=replace(trace.traits, outer="other"))
    if _is_a_choice(trace) or (not is_known and _is_a_multiple(trace)):
        return unknown
    # An error of the rule that was seen comes before another rule: it may be a factor of the rate.
    if is_known and _follows(trace):
        return trace
    fitted = [rule.of(trace) for rule in _fitted(trace)]
    right = (one for one in fitted if _follows(one) is None)
    wrong = (one for one in (_MEAN.of(trace), *fitted) if _follows(one))
    return next(right, None) or next(wrong, unknown)


def _follows(trace: Trace) -> bool | None:
    """Return None if all outer steps follow the rule; else whether a known error explains them."""
    tried = Tally("", observed=True)
    outer_step.follow(tried, trace)
    return None if tried.broken is None else outer_causes.is_named(tried.broken.message)


def _is_a_choice(trace: Trace) -> bool:
    """Return whether each round gives all ranks the weights of one of them, not always rank 0's.

    A population that is trained goes on from its best member.
    """
    chosen: set[int] = set()
    for step, by_rank in rounds.synchronisations(trace).items():
        given = by_rank[min(by_rank)].weights
        own = [
            rank
            for rank, update in evidence.updates(trace).get(step, {}).items()
            if all(update.weights[name].digest == record.digest for name, record in given.items())
        ]
        if not own:
            return False
        chosen.add(own[0])
    return chosen != {0}


def _is_a_multiple(trace: Trace) -> bool:
    """Return whether the first outer step is the mean movement times the number of workers.

    Or that divided by it. It may be a rate of 2, or a sum that nothing divides.
    """
    first = next(_moves(trace), None)
    share = None if first is None else _share(*first)
    size = float(trace.scenario.world_size)
    return share is not None and any(math.isclose(share, s, rel_tol=_OFF) for s in (size, 1 / size))


def _fitted(trace: Trace) -> Iterator[_Rule]:
    """Yield the rules that make the first two outer steps of the ranks' mean movements."""
    moves = list(_moves(trace))
    share = _share(*moves[0]) if moves else None
    if not share or _is_a_multiple(trace):
        return
    rate = abs(share)
    if len(moves) > 1:
        (first, _), (second, move) = moves[:2]
        left = move - share * second
        kept = (_share(first, left) or 0.0) / share
        if 0 < kept < 1:
            yield _Rule(_short(rate), _short(kept), "momentum")
            ahead = (kept + math.sqrt(kept * kept + 4 * kept)) / 2
            if ahead < 1:
                yield _Rule(_short(rate / (1 + ahead)), _short(ahead))
    yield _Rule(_short(rate))


def _moves(trace: Trace) -> Iterator[tuple[Vector, Vector]]:
    """Yield for each round the mean movement of the ranks, and that of the outer weights."""
    met = rounds.synchronisations(trace)
    names = {name for by_rank in met.values() for one in by_rank.values() for name in one.weights}
    start = next((begin for begin in trace.of(Start) if begin.step == 0), None)
    before = None if start is None else _flat(start.weights, names)
    updates, earlier = evidence.updates(trace), -1
    for step, by_rank in met.items():
        shares = outer_step.shares(trace, updates.get(step, {}), earlier, step)
        inner = {rank: _flat(updates[step][rank].weights, names) for rank in shares}
        after = _flat(by_rank[min(by_rank)].weights, names)
        if before is None or after is None or not shares:
            return
        mean = np.zeros_like(before)
        for rank, share in shares.items():
            vector = inner[rank]
            if vector is None or vector.shape != before.shape:
                return
            mean += share * vector
        yield mean - before, after - before
        before, earlier = after, step


def _flat(tensors: Tensors, names: Set[str]) -> Vector | None:
    values = evidence.vectors({name: tensors[name] for name in sorted(names) if name in tensors})
    if values is None or values.keys() != names:
        return None
    return np.concatenate([value.astype(np.float64) for value in values.values()])


def _share(of: Vector, move: Vector) -> float | None:
    """Return by which number `of` is to be multiplied to come nearest to `move`."""
    size = float(np.vdot(of, of))
    share = float(np.vdot(of, move)) / size if size else math.nan
    return share if math.isfinite(share) else None


def _short(number: float) -> float:
    """Return a short decimal if `number` is one but for rounding."""
    decimals: Sequence[float] = [float(f"{number:.{d}g}") for d in range(1, _DIGITS + 1)]
    return next((d for d in decimals if math.isclose(d, number, rel_tol=_SHORT)), number)
