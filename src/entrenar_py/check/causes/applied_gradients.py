"""Test whether the recorded gradients moved the weights, and undo what an optimizer did to them.

Gradients are read when a step begins. Some optimizers divide or reduce them in their own step:

- A script may add gradients over workers or micro-batches, and take the mean only when it moves the
  weights. Then its gradients are larger than those of one worker, by the same factor on all
  tensors, while its weights move like those of one worker. With plain SGD the division may be part
  of the learning rate. Adam moves weights by the same amount whatever factor gradients have. So a
  step counts as dividing only if the optimizer's state agrees as well, or if it has no state and
  moves weights in proportion to gradients.
- An optimizer that reduces gradients itself (ZeRO by hand, Horovod) gets different gradients on
  each rank. The mean of these counts as the applied gradient if it equals one worker's gradient,
  and if weights move like those of one worker.
- An optimizer that shards its state moves each tensor on one rank, its owner, and sends the weights
  to the others. So ranks agree even if nobody reduced the gradients. Then each tensor is trained on
  the samples of its owner only, which is wrong.
- An optimizer may step copies of the weights (masters in float32, or shards), which are not
  recorded. The copies begin as the weights do, move by the optimizer's rule, and are written back,
  rounded to the weights' dtype. So they are recomputed from the first step on, and all weights must
  be their rounded values. If some weight isn't, nothing is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from entrenar_py.check import evidence
from entrenar_py.check.causes import common_steps, copies, rounding_bounds, update_rule
from entrenar_py.check.causes.rounding_bounds import ROUNDING_STEPS, Bounds
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.causes.update_rule import Expected, Rule
from entrenar_py.check.evidence import closeness, missing, precision, rounds, step_sums
from entrenar_py.check.evidence.needs import Traces
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import (
    Injected,
    Shard,
    Start,
    Tensors,
    Trace,
    Update,
    record_tensor,
)
from entrenar_py.shared.verdict import Tally


def unreduced(compared: Compared) -> str:
    """Return why a run's gradients were not reduced when the optimizer got them; "" if they were.

    They were not if they differ between ranks, and yet all ranks move a tensor to the same values.
    """
    for trace in (compared.trace, compared.model):
        if rounds.are_in(trace) or common_steps.first_meeting(trace):
            continue  # each worker steps with its own gradient, and Adam's first moves are the same
        if place := _reduced_later(trace):
            step, name = place
            return (
                f"in {run_name(trace)} ranks hand different gradients of {name} to the "
                f"optimizer in step {step}, but change it equally: the optimizer reduces "
                "them itself; call obs.reduced() where they are reduced, before they are "
                "clipped"
            )
    return ""


def reduces_later(trace: Trace) -> bool:
    """Return whether ranks give an optimizer different gradients that move weights equally."""
    alone = rounds.are_in(trace) or common_steps.first_meeting(trace)
    return not alone and _reduced_later(trace) is not None


def _reduced_later(trace: Trace) -> tuple[int, str] | None:
    """Return the first step and tensor with different gradients and equal moves on all ranks.

    Return None if there is none. A tensor with a single element may move equally by chance, since
    Adam's first moves are +-rate. It counts only if no other tensor moved differently.
    """
    before: Mapping[int, Tensors] = {
        start.rank: start.weights for start in reversed(trace.of(Start)) if start.step == 0
    }
    for step, by_rank in evidence.ranks_by_step(trace):
        gradients = evidence.any_rank(by_rank).gradient
        apart = [
            name
            for name in gradients
            if _num_values(name, [update.gradient for update in by_rank.values()]) > 1
        ]
        alike = [
            name
            for name in apart
            if _num_values(name, [update.weights for update in by_rank.values()]) == 1
            and _has_moved(name, before, by_rank)
        ]
        sure = alike if alike == apart else [name for name in alike if gradients[name].size != 1]
        if sure:
            return step, sure[0]
        before = {rank: update.weights for rank, update in by_rank.items()}
    return None


def _num_values(name: str, of_ranks: list[Tensors]) -> int:
    if not all(name in tensors for tensors in of_ranks):
        return 0
    return len({tensors[name].digest for tensors in of_ranks})


def _has_moved(name: str, before: Mapping[int, Tensors], by_rank: Mapping[int, Update]) -> bool:
    return all(
        rank in before
        and name in before[rank]
        and before[rank][name].digest != update.weights[name].digest
        for rank, update in by_rank.items()
    )


def without_gradients(compared: Compared) -> Compared:
    """Return the comparison without gradients: losses, weights and learning rates remain."""
    return compared.both(_without_gradients)


def _without_gradients(trace: Trace) -> Trace:
    trace = evidence.replaced(trace, Shard, lambda _: {"gradient": {}})
    return evidence.replaced(
        trace, Update, lambda _: {"gradient": {}, "grad_norm": None, "applied_norm": None}
    )


def skipped_unseen(compared: Compared) -> str:
    """Return why ranks may have skipped a step without a record of it; "" if they haven't.

    Ranks with a value that is not finite skip the step. The other ranks have finite values, and
    seem to take the step with more micro-batches than the step before, while all weights stay
    finite. Then an optimizer that reduces gradients itself dropped their gradients, and the
    micro-batches of the next step were counted with the dropped ones.
    """
    trace = compared.trace
    updates = evidence.updates(trace)
    counts = Counter((shard.step, shard.rank) for shard in trace.of(Shard))
    struck: dict[int, set[int]] = {}
    planted = (one for one in trace.of(Injected) if one.fault["kind"].startswith("non_finite_"))
    places = [(one.step or 0, one.rank or 0) for one in planted]
    places += [(shard.step, shard.rank) for shard in trace.of(Shard) if not shard.finite]
    for step, rank in places:
        struck.setdefault(step, set()).add(rank)
    if not all(update.finite for update in trace.of(Update)):
        return ""
    for step, ranks in sorted(struck.items()):
        others = updates.get(step, {}).keys() - ranks
        if others and all(counts[step, rank] > counts[step - 1, rank] > 0 for rank in others):
            return (
                f"{missing.named(ranks)} skipped step {step} because of a non-finite value, "
                f"and {missing.named(others)} may have dropped finite gradients in it: call "
                "obs.skipped() on every rank where the script, or its optimizer, skips a "
                "step"
            )
    return ""


def copies_stepped(compared: Compared) -> str:
    """Return why updates can't be recomputed, if the optimizer steps copies of the weights.

    Return "" if it steps the model's own weights.
    """
    if compared.trace.traits.steps == "model":
        return ""
    return (
        "the optimizer steps copies of the model's weights (float32 masters, or shards) that are "
        "written back later, so its updates can't be recomputed from the model's weights"
    )


# --- optimizers that divide or reduce gradients in their own step ---------------------------------


_STEPS_MIN = 2  # since weights may agree by chance in a single step
_ALIKE = 0.01  # relative, L2: the largest distance of two equal movements, apart from rounding
_APART_MIN = 10 * _ALIKE  # a factor closer to 1 could not be distinguished from 1
_ULP = 2.0**-23
_NOISE_MAX = 0.1  # the largest part of a movement that may be rounding of the weights


def reduced(tally: Tally, compared: Compared) -> Compared:
    """Return the comparison with the ranks' mean gradient, if the optimizer itself reduces."""
    if compared.alone is None or not unreduced(compared):
        return compared
    alone = compared.alone
    return compared.both(lambda trace: _reduced(tally, trace, alone))


def _reduced(tally: Tally, trace: Trace, alone: Trace) -> Trace:
    """Return a run with the ranks' mean gradient, if its steps are then those of `alone`.

    Otherwise return `trace`. Both the plain mean and the mean weighted by the ranks' numbers of
    samples are tried.
    """
    if not reduces_later(trace):
        return trace
    for is_weighted in (False, True):
        mean = _with_means(trace, is_weighted=is_weighted)
        if mean is not None and _makes_the_steps_of(copies.aligned(alone, trace), mean):
            tally.note(
                f"in {run_name(trace)} the optimizer reduces gradients in its step: the "
                "mean of the gradients is judged, since it is the gradient of the run on "
                "one worker, and weights change equally"
            )
            return mean
    return trace


def _with_means(trace: Trace, *, is_weighted: bool) -> Trace | None:
    """Return a run in which all ranks have the mean of their gradients; None if one is unknown.

    If `is_weighted`, the mean is weighted by the ranks' numbers of samples.
    """
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
    return evidence.replaced(
        trace,
        Update,
        lambda update: (
            {"gradient": means[update.step], "grad_norm": None, "applied_norm": None}
            if update.step in means
            else {}
        ),
    )


def _mean(of_ranks: Sequence[Tensors], counts: Sequence[float]) -> Tensors | None:
    """Return the ranks' mean weighted by `counts`; None if values are unknown or shapes differ."""
    if any(record.values() is None for tensors in of_ranks for record in tensors.values()):
        return None
    known = [values for tensors in of_ranks if (values := evidence.vectors(tensors)) is not None]
    total = sum(counts)
    if not total or len(known) < len(of_ranks):
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
    """Return whether the gradients and the movements of weights are those of `model`."""
    expected, updates = evidence.updates(model), evidence.updates(trace)
    bounds = Bounds.of(expected, model, trace)
    movements = dict(_movements(trace)), dict(_movements(model))
    steps = sorted(expected.keys() & updates.keys())[:ROUNDING_STEPS]
    for step in steps:
        due = evidence.any_rank(expected[step])
        bound = bounds.gradient_at(step)
        for rank, update in updates[step].items():
            number = step_sums.ratio(due.gradient, update.gradient, bound)
            wanted, got = movements[1].get((step, due.rank)), movements[0].get((step, rank))
            unit = precision.unit_of(update.weights)
            if number is None or abs(number - 1) > bound or not _move_alike(wanted, got, unit):
                return False
    return len(steps) >= _STEPS_MIN


def undone(tally: Tally, compared: Compared) -> Compared:
    """Return the comparison with gradients divided by the number by which the step divides them.

    A note says so.
    """
    factor = factor_of(compared)
    if factor is None:
        return compared
    trace = compared.trace
    ratio = _rate_ratio(compared.model, trace, factor)
    note = (
        f"in {run_name(trace)} gradients are {factor:.4g} times as large as in the other run, "
        "and weights change equally: the optimizer's "
        + (
            "learning rate is divided by that factor"
            if ratio
            else "step divides the gradients itself"
        )
    )
    tally.note(note)
    trace = _divided(trace, factor, ratio or 1.0)
    return replace(compared, trace=trace, model=trace if compared.is_one_run else compared.model)


def in_rate(compared: Compared) -> float:
    """Return the number by which the learning rates of `compared.trace` are divided; 1 if by none.

    This number is also the factor between its gradients and those of `compared.model`.
    """
    if compared.is_one_run or compared.trace.scenario.workload != "own":
        return 1.0
    factor = factor_of(compared)
    return (factor and _rate_ratio(compared.model, compared.trace, factor)) or 1.0


def _rate_ratio(model: Trace, trace: Trace, factor: float) -> float | None:
    """Return the number by which all learning rates are divided; None if it isn't `factor`."""
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
    """Return the number by which the steps of `compared.trace` divide gradients; or None.

    The run is compared with `compared.model`. If that is the same run, it is compared with the run
    on one worker and with the base run, in which no knob is turned.
    """
    trace = compared.trace
    models = (compared.alone, compared.runs.base) if compared.is_one_run else (compared.model,)
    for model in models:
        if model is None or model is trace:
            continue
        factor = _factor(copies.aligned(model, trace), trace)
        if factor is not None:
            return factor
    return None


def _factor(model: Trace, trace: Trace) -> float | None:
    """Return the common factor of gradients that move weights equally; None if there is none."""
    expected, updates = evidence.updates(model), evidence.updates(trace)
    bounds = Bounds.of(expected, model, trace)
    factor, num_steps = 0.0, 0
    movements = dict(_movements(trace)), dict(_movements(model))
    for step in sorted(expected.keys() & updates.keys())[:ROUNDING_STEPS]:
        due = evidence.any_rank(expected[step])
        for rank, update in updates[step].items():
            bound = bounds.gradient_at(step)
            number = step_sums.ratio(due.gradient, update.gradient, bound)
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


def _follows_size(due: Update, update: Update, model: Trace, trace: Trace) -> bool:
    """Return whether weights would have moved differently if the step did not divide."""
    states = [_large(one.optimizer) for one in (due, update)]
    if not any(states):
        return not (
            trace.scenario.optimizer == "adamw" or rounding_bounds.is_adaptive(model, trace)
        )
    number = step_sums.ratio(states[0], states[1], _ALIKE)
    # Momentum grows with gradients, and the learning rate compensates for both.
    ratio = due.learning_rate / update.learning_rate if update.learning_rate else 1.0
    return number is not None and min(abs(number - 1), abs(number - ratio)) <= _ALIKE


def _large(tensors: Tensors) -> Tensors:
    return {
        name: record
        for name, record in tensors.items()
        if record.dtype.startswith(("float", "bfloat")) and (record.size or 0) > 1
    }


def _movements(trace: Trace) -> Iterator[tuple[tuple[int, int], tuple[step_sums.Vector, float]]]:
    """Yield (step, rank), with the movement of all tensors, flat, and the norm of the weights."""
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
    """Return whether two movements are equal, and clearly larger than roundings of the weights.

    With the unit roundoff `unit` of the weights, roundings may be a larger part of a movement.
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
    """Return `trace` with gradients divided by `factor`, and learning rates times `of_rate`."""

    def shorter(norm: float | None) -> float | None:
        return None if norm is None else norm / factor

    return evidence.replaced(
        trace,
        Update,
        lambda update: {
            "gradient": evidence.times(update.gradient, 1 / factor),
            "grad_norm": shorter(update.grad_norm),
            "applied_norm": shorter(update.applied_norm),
            "learning_rate": update.learning_rate * of_rate,
            "rates": {name: rate * of_rate for name, rate in update.rates.items()},
        },
    )


# --- ranks that step tensors alone, and send them to the others -----------------------------------


_OWN_ALIKE = 1e-4  # relative, L2: roundings of a sum and of clipping


def stepped_alone(compared: Compared) -> Mapping[str, Any] | None:
    """Return the counterexample of a tensor that is trained on one rank's samples only; or None."""
    for trace in (compared.trace, compared.model):
        steps = [*evidence.ranks_by_step(trace)]
        if len(steps) < _STEPS_MIN or len(steps[0][1]) < 2:
            continue
        owners = _owners(trace, steps)
        if owners and _have_own_gradients(trace, steps, owners):
            name, rank = min(owners.items())
            return {
                "message": f"all ranks move {name} by the gradient of rank {rank}'s own samples, "
                "and not by the mean of all ranks': gradients are never reduced, but weights "
                "are copied between ranks; call the model that reduces them (not "
                "model.module), or reduce them before the step",
                "tensor": name,
                "expected": "the mean of all ranks' gradients",
                "got": f"rank {rank}'s gradient",
                **evidence.place(trace, steps[0][1][rank]),
            }
    return None


def _owners(trace: Trace, steps: list[tuple[int, Mapping[int, Update]]]) -> dict[str, int]:
    """Return tensor -> the only rank with gradients that explain its moves on all ranks.

    The rank must be the same in every step. Return {} unless all tensors with gradients have one.
    """
    names = {name for _, by_rank in steps for u in by_rank.values() for name in u.gradient}
    if not all(_are_apart(name, by_rank) for _, by_rank in steps for name in names):
        return {}
    followed = _followed(trace)
    of_all = {name: followed.get(name, set()) for name in names}
    if any(len(ranks) != 1 for ranks in of_all.values()):
        return {}
    return {name: min(ranks) for name, ranks in of_all.items()}


def _are_apart(name: str, by_rank: Mapping[int, Update]) -> bool:
    updates = by_rank.values()
    if not all(name in u.gradient and name in u.weights for u in updates):
        return False
    unlike = len({u.gradient[name].digest for u in updates}) == len(by_rank)
    return unlike and len({u.weights[name].digest for u in updates}) == 1


def _followed(trace: Trace) -> dict[str, set[int]]:
    """Return tensor -> the ranks with gradients that explain its moves by the rule in all steps."""
    follows: dict[str, dict[int, bool]] = {}
    for update, expected in update_rule.followed(trace):
        rounding = update_rule.rounding(trace, update)
        for name in update.gradient:
            due = expected.get(name)
            is_so = due is not None and update_rule.is_met(update, name, due, rounding)
            of_rank = follows.setdefault(name, {})
            of_rank[update.rank] = of_rank.get(update.rank, True) and bool(is_so)
    return {name: {rank for rank, is_so in of.items() if is_so} for name, of in follows.items()}


def _have_own_gradients(
    trace: Trace, steps: list[tuple[int, Mapping[int, Update]]], owners: Mapping[str, int]
) -> bool:
    """Return whether owners' gradients are those of their own samples, which no other rank has."""
    shards = evidence.shards(trace)
    return all(
        step_sums.are_apart(shards.get(step, ()))
        and all(
            _is_own(
                by_rank[rank],
                [one for one in shards[step] if one.rank == rank],
                {name for name, owner in owners.items() if owner == rank},
            )
            for rank in {*owners.values()}
        )
        for step, by_rank in steps
    )


def _is_own(update: Update, shards: Collection[Shard], names: Collection[str]) -> bool:
    """Return whether the gradient is a multiple of the sum of the rank's own micro-batches."""
    total, applied = (
        step_sums.total({update.rank: update}, shards),
        evidence.vectors(update.gradient),
    )
    if not shards or not total or applied is None or not {*names} <= total.keys():
        return False
    own, got = (step_sums.joined(vectors, names) for vectors in (total, applied))
    if own.shape != got.shape or not own.any():
        return False
    number = step_sums.divisor({"": own}, {"": got})
    return number is not None and bool(
        np.linalg.norm(own - number * got) <= _OWN_ALIKE * np.linalg.norm(own)
    )


# --- copies that an optimizer steps instead of the weights ----------------------------------------


# Units of a weight: the rounding of its copy, and of the first weight if the copy has more bits.
_ROUNDINGS = 2


def follow_copies(tally: Tally, runs: Traces, trace: Trace) -> bool:
    """Count each weight of each step that follows from copies, which step by the optimizer's rule.

    Return whether all weights follow, in every step of every rank. Only then they are counted.
    """
    compared = reduced(tally, Compared(runs=runs, model=trace, trace=trace))
    if trace.traits.steps == "model" or trace.traits.rule != "known":
        return False
    # It is not recorded which copies have weight decay: either the known ones, or all.
    decayed = evidence.replaced(compared.trace, Start, lambda start: {"decayed": start.trainable})
    for decaying in (compared.trace, decayed):
        counts = [_num_followed(update, copies) for update, copies in _steps_of_copies(decaying)]
        if counts and all(counts):
            tally.compared += sum(counts)
            tally.note(
                "the optimizer steps copies of the weights: from the first step on, all weights "
                "equal such copies after its rule, rounded"
            )
            return True
    return False


def _steps_of_copies(trace: Trace) -> Iterator[tuple[Update, dict[str, Expected] | None]]:
    """Yield each update with the copies after it, or with None if the copies are unknown."""
    rules: dict[int, Rule] = {}
    for event in trace.standing.events:
        if not isinstance(event, Update):
            update_rule.prepare(rules, event, trace)
            continue
        rule = rules.get(event.rank)
        bare = replace(event, edited={})  # weights that are written back don't edit a copy
        expected = None if rule is None else dict(rule.step(bare))
        yield event, expected
        if rule is not None and expected:
            copies = {n: record_tensor(e.weight, values=True) for n, e in expected.items()}
            rule.weights = {**event.weights, **copies}


def _num_followed(update: Update, expected: dict[str, Expected] | None) -> int:
    """Return the number of tensors that equal their rounded copies; 0 if any tensor doesn't.

    Also return 0 if a copy or a weight is unknown.
    """
    if not expected or expected.keys() != update.gradient.keys():
        return 0
    unit = precision.unit_of(update.weights)
    kept = (update.step + 1) * (update_rule.UPDATE_ULPS + update.step) * precision.FLOAT32
    share = kept + (_ROUNDINGS * unit if unit > precision.FLOAT32 else 0.0)
    for name, copy in expected.items():
        weight = update.weights[name].values()
        if weight is None or weight.shape != copy.weight.shape:
            return 0
        allowed = share * (np.abs(copy.weight) + copy.moved)
        if not bool((np.abs(copy.weight - weight.astype(np.float64)) <= allowed).all()):
            return 0
    return len(expected)
