"""Recognise optimizers that divide or reduce gradients in their own step: a benign explanation.

Gradients are read as a step begins. A script may add them over workers or micro-batches, and take
the mean only where it moves the weights: in an optimizer of its own. Its
gradients are then larger than those of one worker, by one number on all tensors, and its weights
move as those of one worker do. Plain SGD may have the mean in its learning rate: it is divided by
the number that gradients aren't.

Adam moves weights alike whatever their gradients are multiplied by. So a step counts as dividing
only if its state agrees as well, or if it has none and moves weights in proportion to gradients.

An optimizer that reduces gradients itself (ZeRO by hand, Horovod) is given other ones on each rank.
Their mean counts as what it applies, if that is one worker's gradient, and if weights move as those
of one worker do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import applied_gradients, step_shape, tensor_names
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.causes.run_comparison import ROUNDING_STEPS, Bounds
from entrenar_py.check.evidence import closeness, factors, precision, step_sums
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import Start, Tensors, Trace, Update, record_tensor
from entrenar_py.shared.verdict import Tally

_STEPS_MIN = 2  # in a single step weights may agree by chance
_ALIKE = 0.01  # relative, L2: how far apart two runs' movements may be, roundings aside
_APART_MIN = 10 * _ALIKE  # a factor that is nearer to 1 could not be told from none
_ULP = 2.0**-23
_NOISE_MAX = 0.1  # of a movement, that rounding of the weights may be


def reduced(tally: Tally, compared: Compared) -> Compared:
    """Return the comparison with the ranks' mean gradient, if the optimizer reduces by itself."""
    if compared.alone is None or not applied_gradients.unreduced(compared):
        return compared
    alone = compared.alone
    trace, model = (_reduced(tally, one, alone) for one in (compared.trace, compared.model))
    return replace(compared, trace=trace, model=trace if compared.is_one_run else model)


def _reduced(tally: Tally, trace: Trace, alone: Trace) -> Trace:
    """Return a run with the ranks' mean gradient, if its steps are those of the run on one worker.

    Ranks with unequal numbers of samples count by these, or alike.
    """
    if not applied_gradients.reduces_later(trace):
        return trace
    for is_weighted in (False, True):
        mean = _with_means(trace, is_weighted=is_weighted)
        if mean is not None and _makes_the_steps_of(tensor_names.aligned(alone, trace), mean):
            note = (
                f"in {run_name(trace)} the optimizer reduces gradients in its step: their mean is "
                "judged, since it is the gradient of the run on one worker, and weights move alike"
            )
            if note not in tally.notes:
                tally.note(note)
            return mean
    return trace


def _with_means(trace: Trace, *, is_weighted: bool) -> Trace | None:
    """Return a run in which all ranks have the mean of their gradients; None if one is unknown."""
    means: dict[int, Tensors] = {}
    shards = evidence.shards(trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        counts = [
            sum(one.weight for one in shards.get(step, ()) if one.rank == rank)
            if is_weighted
            else 1
            for rank in by_rank
        ]
        mean = _mean([update.gradient for update in by_rank.values()], counts)
        if mean is None:
            return None
        means[step] = mean
    events = (
        replace(e, gradient=means[e.step], grad_norm=None, applied_norm=None)
        if isinstance(e, Update) and e.step in means
        else e
        for e in trace.events
    )
    return replace(trace, events=tuple(events))


def _mean(held: Sequence[Tensors], counts: Sequence[float]) -> Tensors | None:
    """Return the mean of the ranks' tensors by `counts`; None if values are unknown or unlike."""
    if any(record.values() is None for tensors in held for record in tensors.values()):
        return None
    known = [values for tensors in held if (values := evidence.vectors(tensors)) is not None]
    total = sum(counts)
    if not total or len(known) < len(held):
        return None
    shapes = [step_sums.shapes(each) for each in known]
    if any(shape != shapes[0] for shape in shapes):
        return None
    return {
        name: record_tensor(
            np.sum([c / total * each[name] for c, each in zip(counts, known, strict=True)], axis=0),
            values=True,
        )
        for name in known[0]
    }


def _makes_the_steps_of(model: Trace, trace: Trace) -> bool:
    """Return whether gradients are those of `model`, and all weights move as its own do."""
    expected, made = evidence.updates(model), evidence.updates(trace)
    bounds = Bounds.of(expected, model, trace)
    movements = dict(_movements(trace)), dict(_movements(model))
    steps = sorted(expected.keys() & made.keys())[:ROUNDING_STEPS]
    for step in steps:
        due = evidence.any_rank(expected[step])
        bound = bounds.gradient_moved if step else bounds.gradient
        for rank, update in made[step].items():
            number = _times(due.gradient, update.gradient, bound)
            wanted, got = movements[1].get((step, due.rank)), movements[0].get((step, rank))
            unit = precision.unit_of(update.weights)
            if number is None or abs(number - 1) > bound or not _move_alike(wanted, got, unit):
                return False
    return len(steps) >= _STEPS_MIN


def undone(tally: Tally, compared: Compared) -> Compared:
    """Return the comparison with each gradient as the step divides it, and note that it does."""
    factor = factor_of(compared)
    if factor is None:
        return compared
    trace = compared.trace
    ratio = _rate_ratio(compared.model, trace, factor)
    note = (
        f"in {run_name(trace)} gradients are {factor:.4g} times as large as in the run that it is "
        "compared with, and weights move alike: the optimizer's "
        + ("learning rate is divided by that" if ratio else "step divides them by itself")
    )
    if note not in tally.notes:
        tally.note(note)
    trace = _divided(trace, factor, ratio or 1.0)
    return replace(compared, trace=trace, model=trace if compared.is_one_run else compared.model)


def in_rate(compared: Compared) -> float:
    """Return by which number the learning rates of `compared.trace` are divided; 1 for none.

    Its gradients are as many times as large as those of `compared.model`.
    """
    if compared.is_one_run or compared.trace.scenario.workload != "own":
        return 1.0
    factor = factor_of(compared)
    return (factor and _rate_ratio(compared.model, compared.trace, factor)) or 1.0


def _rate_ratio(model: Trace, trace: Trace, factor: float) -> float | None:
    """Return by which number all learning rates are divided in `trace`, if that is `factor`."""
    expected = evidence.updates(model)
    pairs = [
        pair
        for step, by_rank in evidence.updates(trace).items()
        if step in expected
        for update in by_rank.values()
        for pair in closeness.rates_of(evidence.any_rank(expected[step]), update).values()
    ]
    due, got = next((pair for pair in pairs if all(pair)), (0.0, 0.0))
    ratio = due / got if got else 0.0
    same = all(math.isclose(a, ratio * b, rel_tol=closeness.RATE_BOUND) for a, b in pairs)
    return ratio if same and abs(ratio - factor) <= _ALIKE * factor else None


def factor_of(compared: Compared) -> float | None:
    """Return the number that the steps of `compared.trace` divide gradients by; None for none.

    They are compared with `compared.model`; or if that is the same run, with the run on one worker
    and the one whose knobs aren't turned.
    """
    trace = compared.trace
    models = (compared.alone, compared.runs.base) if compared.is_one_run else (compared.model,)
    for model in models:
        if model is None or model is trace:
            continue
        factor = _factor(tensor_names.aligned(model, trace), trace)
        if factor is not None:
            return factor
    return None


def _factor(model: Trace, trace: Trace) -> float | None:
    """Return how many times as large gradients are where weights move alike; None if not so."""
    expected, made = evidence.updates(model), evidence.updates(trace)
    bounds = Bounds.of(expected, model, trace)
    factor, num_steps = 0.0, 0
    movements = dict(_movements(trace)), dict(_movements(model))
    for step in sorted(expected.keys() & made.keys())[:ROUNDING_STEPS]:
        due = evidence.any_rank(expected[step])
        for rank, update in made[step].items():
            bound = bounds.gradient_moved if step else bounds.gradient
            number = _times(due.gradient, update.gradient, bound)
            factor = factor or number or 0.0
            if number is None or factor <= 0 or abs(factor - 1) < _APART_MIN:
                return None
            if abs(number - factor) > bound * factor:
                return None
            got, wanted = movements[0].get((step, rank)), movements[1].get((step, due.rank))
            if not (_move_alike(wanted, got) and _follows_size(due, update, model, trace)):
                return None
        num_steps += 1
    return factor if num_steps >= _STEPS_MIN else None


def _times(expected: Tensors, got: Tensors, bound: float) -> float | None:
    """Return the number that all tensors' elements together are multiplied by, or None."""
    left, right = evidence.vectors(expected), evidence.vectors(got)
    if left is None or right is None or left.keys() != right.keys():
        return None
    if any(left[name].shape != right[name].shape for name in left):
        return None
    return factors.ratio(step_sums.joined(left, left), step_sums.joined(right, left), bound)


def _follows_size(due: Update, update: Update, model: Trace, trace: Trace) -> bool:
    """Return whether weights would have moved otherwise, had the step not divided."""
    states = [_large(one.optimizer) for one in (due, update)]
    if not any(states):
        return not (trace.scenario.optimizer == "adamw" or step_shape.is_adaptive(model, trace))
    number = _times(states[0], states[1], _ALIKE)
    # Momentum grows with gradients, and the learning rate makes up for both.
    ratio = due.learning_rate / update.learning_rate if update.learning_rate else 1.0
    return number is not None and min(abs(number - 1), abs(number - ratio)) <= _ALIKE


def _large(tensors: Tensors) -> Tensors:
    """Return the tensors of floats that are no counters."""
    return {
        name: record
        for name, record in tensors.items()
        if record.dtype.startswith(("float", "bfloat")) and (record.size or 0) > 1
    }


def _movements(trace: Trace) -> Iterator[tuple[tuple[int, int], tuple[step_sums.Vector, float]]]:
    """Yield step and rank, with how far all tensors moved, flat, and the norm of their weights."""
    before: dict[int, Tensors] = {
        start.rank: start.weights for start in reversed(trace.of(Start)) if start.step == 0
    }
    for step, by_rank in evidence.ranks_by_step(trace):
        for rank, update in by_rank.items():
            names = [name for name in update.gradient if name in update.weights]
            old = evidence.vectors(_chosen({**before.get(rank, {}), **update.edited}, names))
            new = evidence.vectors(_chosen(update.weights, names))
            before[rank] = update.weights
            if not old or not new or step_sums.shapes(old) != step_sums.shapes(new):
                continue
            after = step_sums.joined(new, new)
            yield (step, rank), (after - step_sums.joined(old, new), float(np.linalg.norm(after)))


def _chosen(tensors: Tensors, names: Collection[str]) -> Tensors:
    return {name: tensors[name] for name in names if name in tensors}


def _move_alike(
    due: tuple[step_sums.Vector, float] | None,
    got: tuple[step_sums.Vector, float] | None,
    unit: float = 0.0,
) -> bool:
    """Return whether two movements are known to be alike, by more than roundings of the weights.

    Of weights whose unit is `unit`, roundings may be a larger part of a movement.
    """
    if due is None or got is None or due[0].shape != got[0].shape:
        return False
    size = float(np.linalg.norm(due[0]))
    noise = max(_ULP, unit) * due[1]
    if not size or not math.isfinite(size) or noise > (_NOISE_MAX if unit else _ALIKE) * size:
        return False
    allowed = max(closeness.PROJECTED * _ALIKE * size, 2 * noise if unit else 0.0)
    return float(np.linalg.norm(got[0] - due[0])) <= allowed


def _divided(trace: Trace, factor: float, of_rate: float) -> Trace:
    """Return `trace` with the gradients of each step's rule, and learning rates times `of_rate`."""

    def shorter(norm: float | None) -> float | None:
        return None if norm is None else norm / factor

    events = (
        replace(
            event,
            gradient=evidence.times(event.gradient, 1 / factor),
            grad_norm=shorter(event.grad_norm),
            applied_norm=shorter(event.applied_norm),
            learning_rate=event.learning_rate * of_rate,
            rates={name: rate * of_rate for name, rate in event.rates.items()},
        )
        if isinstance(event, Update)
        else event
        for event in trace.events
    )
    return replace(trace, events=tuple(events))
