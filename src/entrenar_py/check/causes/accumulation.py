"""Explain an applied gradient that is not the sum of its step's micro-batches.

Each explanation is exact within rounding: the gradient still contains that of an earlier step, a
micro-batch is missing, only one rank's samples are in it, or a tensor has a factor of its own.
Scripts also change gradients on purpose (noise, centralisation, a limit for each layer). Such a
gradient has no explanation here, and is no counterexample. If a script adds up gradients in its own
buffer, they are read as if it used the parameters' gradients (`seen_through`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import rounding_bounds
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.evidence import factors, step_sums
from entrenar_py.shared.trace import Shard, Start, Trace, Update
from entrenar_py.shared.wording import listed

Vector = NDArray[np.float64]
Vectors = Mapping[str, NDArray[Any]]

# The smallest eigenvalue of the matrix of cosines between gradients. Below this, one gradient is so
# close to a combination of the others that a sum can't tell them apart.
_APART = 5e-7
_EVEN = 1e-3  # relative: two factors of gradients in a sum are equal if they differ by less
# Minimum number of elements, since short vectors are multiples of each other by chance.
_TELLING_MIN = 3
_ELEMENTS_MIN = 8  # elements of all tensors together, at least
_FAR = 10.0  # times the bound: a gradient further away is a different one


@dataclass(frozen=True)
class Applied:
    """The gradient that a rank applied in a step. `off` names the tensors that need an explanation.

    `total` has the sums over the step's micro-batches, and `mean` the applied gradient. The sums of
    the other tensors were divided by `divisor`. `bound` is the relative rounding error.
    """

    trace: Trace
    update: Update
    total: Vectors
    mean: Vectors
    divisor: float
    off: Collection[str]
    bound: float

    def by_other_divisors(self) -> Iterator[Applied]:
        """Yield this record with each other divisor that explains the gradients of some tensors."""
        size = float(np.linalg.norm(step_sums.joined(self.mean, self.mean)))
        for divisor in step_sums.divisors(self.total, self.mean, self.bound):
            off = step_sums.off(self.total, self.mean, divisor, self.bound * divisor * size)
            if off and off != self.off:
                yield replace(self, divisor=divisor, off=off)

    @property
    def applied(self) -> Vector:
        """The applied gradient of the tensors that `off` names, as one flat vector."""
        return self.flat(self.mean)

    @property
    def shards(self) -> list[Shard]:
        """The step's micro-batches with a gradient."""
        return self.shards_of(self.update.step)

    def shards_of(self, step: int) -> list[Shard]:
        """Return the micro-batches of `step` that have a gradient."""
        return [shard for shard in evidence.shards(self.trace).get(step, ()) if shard.gradient]

    def flat(self, vectors: Vectors) -> Vector:
        """Return the vectors of the tensors in `off` as one vector; missing ones are zeros."""
        names = sorted(self.off)
        return np.concatenate(
            [
                np.asarray(vectors.get(name, np.zeros(self.mean[name].shape)), np.float64)
                for name in names
            ]
        )

    def sum_of(self, shards: Sequence[Shard]) -> Vector | None:
        """Return the sum of the shards' gradients as one vector of the tensors in `off`.

        None if values are unknown or shapes differ.
        """
        total: Vector | None = None
        for shard in shards:
            values = evidence.vectors(shard.gradient)
            if values is None:
                return None
            if not self._fits(values):
                return None
            term = self.flat(values)
            total = term if total is None else total + term
        return total

    def earlier(self) -> Update | None:
        """Return the rank's update of the step before, if its gradient has the tensors in `off`.

        Return None otherwise.
        """
        before = _before(self.trace, self.update)
        known = None if before is None else evidence.vectors(before.gradient)
        if known is None or not known.keys() >= set(self.off) or not self._fits(known):
            return None
        return before

    def _fits(self, values: Vectors) -> bool:
        return all(values[n].shape == self.mean[n].shape for n in self.off if n in values)

    @property
    def is_whole(self) -> bool:
        """True if the applied gradient is a multiple of the sum over all micro-batches.

        Then a sum over some of the micro-batches explains nothing: it may be equal only because the
        other micro-batches have no gradient for these tensors.
        """
        return self.is_times(self.sum_of(self.shards))

    def is_times(self, vector: Vector | None) -> bool:
        """Return whether the applied gradient is a positive multiple of `vector`."""
        if vector is None or np.count_nonzero(vector) < _TELLING_MIN:
            return False
        factor = factors.ratio(vector, self.applied, self.bound)
        return factor is not None and factor > 0


def stepped_again(trace: Trace, update: Update) -> Explanation | None:
    """Return an explanation if `update` applied the gradient of the step before once more."""
    before, now = _before(trace, update), update.gradient
    if before is None or not now or not now.keys() <= before.gradient.keys():
        return None
    if any(before.gradient[name].digest != record.digest for name, record in now.items()):
        return None
    values = evidence.vectors(now)
    is_zero = values is not None and not any(vector.any() for vector in values.values())
    if is_zero:
        return None
    since = min(update.kept.values(), default=update.step - 1)
    return Explanation(
        f"is step {update.step - 1}'s gradient again, which could mean: the optimizer stepped "
        f"without a backward pass since step {since}"
    )


def moved_without_pass(trace: Trace, update: Update) -> tuple[str, str] | None:
    """Return a tensor that a step without a gradient moved, and what that could mean; or None."""
    gradient = evidence.vectors(update.gradient)
    if gradient is None or any(vector.any() for vector in gradient.values()):
        return None
    before = _before(trace, update)
    starts = (start for start in trace.standing.of(Start) if start.rank == update.rank)
    state = before or next((start for start in starts if start.step == update.step), None)
    if state is None:
        return None
    weights = {**state.weights, **update.edited}
    for name in gradient:
        known = name in weights and name in update.weights
        if known and weights[name].digest != update.weights[name].digest:
            return name, (
                f"{name} moved without a backward pass and by a gradient of zero, which "
                "could mean: a step that only creates the optimizer's state"
            )
    return None


def is_kept(trace: Trace, update: Update, total: Vectors, mean: Vectors, bound: float) -> bool:
    """Return whether a tensor's applied gradient may still contain that of the step before.

    `total` has the sums over the step's micro-batches, and `mean` the applied gradient.
    """
    before = _before(trace, update)
    known = None if before is None else evidence.vectors(before.gradient)
    if not update.kept or known is None:
        return bool(update.kept)
    added = {name: mean[name] - known[name] for name in mean if name in known}
    return any(
        vector.size >= _TELLING_MIN and factors.ratio(total[name], vector, bound) is not None
        for name, vector in added.items()
    )


def of_earlier_steps(trace: Trace, update: Update) -> list[str]:
    """Return the tensors for which the gradient contains passes of earlier steps that had to wait.

    One of several optimizers may step less often than the others, and apply what the passes of
    several steps have added up.
    """
    updates = evidence.updates(trace)

    def waited(name: str, since: int) -> bool:
        between = (updates.get(step, {}).get(update.rank) for step in range(since, update.step))
        return all(one is not None and one.gradient and name not in one.gradient for one in between)

    return sorted(name for name, since in update.kept.items() if waited(name, since))


def of_evaluation(
    by_rank: Mapping[int, Update], shards: Sequence[Shard], bound: float
) -> tuple[str, Explanation] | None:
    """Return the tensor and the explanation if passes in evaluation mode were applied; or None.

    A script evaluates, or inspects gradients, and does not clear them before it trains again. The
    passes of both modes together must give the applied gradient, and the passes in training mode
    alone must not.
    """
    passes = step_sums.held(by_rank, shards)
    training = [shard for shard in passes if not shard.evaluating]
    if len(training) == len(passes) or {s.rank for s in training} != {s.rank for s in passes}:
        return None
    applied = evidence.vectors(evidence.any_rank(by_rank).gradient)
    sums = [step_sums.total(by_rank, chosen) for chosen in (passes, training)]
    if applied is None or any(total is None or total.keys() != applied.keys() for total in sums):
        return None
    got = step_sums.joined(applied, applied)
    whole, part = (step_sums.joined(total or {}, applied) for total in sums)
    if got.size < _ELEMENTS_MIN or factors.ratio(whole, got, bound) is None:
        return None
    if factors.ratio(part, got, _FAR * bound) is not None:
        return None
    return min(applied), Explanation(
        f"contains the gradients of {len(passes) - len(training)} backward passes in evaluation "
        f"mode and {len(training)} in training mode, which could mean: gradients of an "
        "evaluation are not cleared"
    )


def _before(trace: Trace, update: Update) -> Update | None:
    return evidence.updates(trace).get(update.step - 1, {}).get(update.rank)


def _again(step: Applied) -> Explanation | None:
    """Explain a gradient with the same bits as the one that was applied before."""
    before, now = step.earlier(), step.update.gradient
    if before is None or not step.applied.any():
        return None
    if any(before.gradient[name].digest != now[name].digest for name in step.off):
        return None
    return Explanation(
        f"is step {step.update.step - 1}'s gradient again, although a backward pass was made, "
        "which could mean: the new gradient is applied late or never"
    )


def _kept(step: Applied) -> Explanation | None:
    """Explain a gradient that is the sum of this step's gradient and the one applied before."""
    before, own = step.earlier(), step.sum_of(step.shards)
    if before is None or own is None:
        return None
    known = evidence.vectors(before.gradient)
    assert known is not None, "earlier() returns updates with values"
    parts = _parts([step.flat(known), own], step.applied, step.bound)
    if parts is None:
        return None
    kept = [name for name in step.off if name in step.update.kept]
    # The gradient that is left over is either not reduced again, or added over ranks. Clipping
    # shortens all of it, so without a record of what was cleared only the factor 1 is certain.
    # Momentum that a script computes itself has a different factor.
    share = parts[0] / parts[1]
    natural = any(
        abs(share - number) <= step.bound * number for number in (1, step.trace.scenario.world_size)
    )
    if not (kept and natural) and abs(parts[0] - 1) > step.bound:
        return None
    since = min((step.update.kept[name] for name in kept), default=step.update.step - 1)
    return Explanation(
        f"is this step's gradient plus the one that step {step.update.step - 1} applied, which "
        f"could mean: gradients are not cleared since step {since}"
    )


def _late(step: Applied) -> Explanation | None:
    number = step.update.step - 1
    if not step.is_times(step.sum_of(step.shards_of(number))):
        return None
    return Explanation(
        f"is the gradient of step {number}'s samples, which could mean: it is applied a step late"
    )


def _left(step: Applied) -> Explanation | None:
    """Explain a gradient that also contains the last backward passes before this step's.

    These passes came after the step before, as for a separate loss, or were applied in it.
    """
    number, own = step.update.step - 1, step.flat(step.total)
    before = step.earlier()
    known = None if before is None else evidence.vectors(before.gradient)
    passes = _by_rank(shard for shard in step.shards_of(number) if shard.gradient.keys() & step.off)
    most = max(map(len, passes.values()), default=0)
    for count in range(1, most + 1):
        tail = step.sum_of([shard for shards in passes.values() for shard in shards[-count:]])
        if tail is None:
            continue
        for kept in ([], *([[step.flat(known)]] if known else [])):
            parts = _parts([own, tail, *kept], step.applied, step.bound)
            if parts is None or abs(parts[1] / parts[0] - 1) > _EVEN:
                continue
            if kept and not _is_natural(step, parts[2], parts[0]):
                continue
            last = "the last of" if count == 1 else f"the last {count} of"
            which = "all" if count == most else last
            applied = f", and what step {number} applied" if kept else ""
            return Explanation(
                f"is the sum over step {number + 1}'s samples and {which} {most} backward passes "
                f"of step {number}{applied}, which could mean: gradients are not cleared after "
                f"step {number}"
            )
    return None


def _carried(step: Applied) -> Explanation | None:
    """Explain a step that applies the last micro-batches of the step before in place of its own."""
    number = step.update.step - 1
    before, own = _by_rank(step.shards_of(number)), _by_rank(step.shards)
    most = max(map(len, own.values()), default=0)
    for count in range(1, most):
        tail = [shard for shards in before.values() for shard in shards[-count:]]
        head = [shard for shards in own.values() for shard in shards[:-count]]
        if tail and step.is_times(step.sum_of([*tail, *head])):
            last = "the last" if count == 1 else f"the last {count}"
            return Explanation(
                f"is the sum over all but {last} of {most} micro-batches, and over {last} of "
                f"step {number}, which could mean: {last} of a step come after the reduction"
            )
    return None


def _is_natural(step: Applied, kept: float, own: float) -> bool:
    """Return whether a gradient that was applied before is contained with a natural factor.

    `kept` is its factor, and `own` that of this step's gradient. They are equal, or `kept` is 1
    (not reduced again) or the number of workers times as large (added over ranks).
    """
    numbers = (own, own * step.trace.scenario.world_size, 1.0)
    return any(abs(kept - number) <= _EVEN * number for number in numbers)


def _some_micro_batches(step: Applied) -> Explanation | None:
    """Explain a gradient that lacks micro-batches, the same ones on each rank."""
    by_rank = _by_rank(step.shards)
    most = max(map(len, by_rank.values()), default=0)
    if most < 2 or step.is_whole:
        return None
    for place, words, meaning in _PARTS:
        chosen = [shard for shards in by_rank.values() for shard in shards[place]]
        if step.is_times(step.sum_of(chosen)):
            return Explanation(
                f"is the sum over {words} of {most} micro-batches, which could mean: {meaning}"
            )
    return None


_PARTS = (
    (slice(-1, None), "the last", "gradients are cleared between the micro-batches of a step"),
    (slice(None, 1), "the first", "later micro-batches are left out of the sum or its reduction"),
    (slice(None, -1), "all but the last", "the last one comes after the reduction"),
    (slice(1, None), "all but the first", "gradients are cleared after the first"),
)


def _one_rank(step: Applied) -> Explanation | None:
    """Explain a gradient that contains only one rank's samples."""
    by_rank = _by_rank(step.shards)
    if len(by_rank) < 2 or step.is_whole:
        return None
    for rank, shards in by_rank.items():
        if not step.is_times(step.sum_of(shards)):
            continue
        if rank != step.update.rank:
            return Explanation(
                f"is the gradient of rank {rank}'s samples alone, which could mean: it is "
                "broadcast, not reduced"
            )
        return Explanation(
            f"is the gradient of rank {rank}'s own samples alone",
            is_wrong=False,
            advice="gradients are reduced inside of optimizer.step(), or never: F-DP-001 compares "
            "the weights",
        )
    return None


def _uneven_parts(step: Applied) -> Explanation | None:
    """Explain a gradient with one rank's part, or one micro-batch of each rank, twice or never."""
    by_rank = _by_rank(step.shards)
    sizes = {(len(shard.ids), shard.weight) for shard in step.shards}
    if len(sizes) != 1 or step.is_whole or step.trace.traits.losses == "backward":
        return None  # here parts with more samples or tokens count more
    ranks = {f"rank {rank}'s samples": shards for rank, shards in by_rank.items()}
    columns = [*zip(*by_rank.values(), strict=False)]
    micro_batches = {f"micro-batch {n} of each rank": shards for n, shards in enumerate(columns)}
    for parts in (ranks, micro_batches):
        terms = [step.sum_of(shards) for shards in parts.values()]
        known = [term for term in terms if term is not None]
        if len(known) < max(2, len(terms)):
            continue
        for name, own in zip(parts, known, strict=True):
            rest = np.sum([term for term in known if term is not own], axis=0)
            if len(known) > 2 and step.is_times(rest):
                return Explanation(
                    f"lacks the gradient of {name}, which could mean: it is not reduced"
                )
            shares = _parts([rest, own], step.applied, step.bound)
            if shares is not None and abs(shares[1] / shares[0] - 2) <= _EVEN:
                return Explanation(
                    f"contains the gradient of {name} twice, which could mean: it is added twice"
                )
    return None


def own_factor(step: Applied) -> Explanation | None:
    """Return an explanation if each tensor in `off` has a simple factor of its own."""
    shown = []
    for name in sorted(step.off):
        right = step.total[name] / step.divisor
        factor = factors.ratio(right, step.mean[name], step.bound)
        if factor is None or factors.named(factor, step.trace.scenario, step.bound) is None:
            return None
        shown.append(factors.of(right, step.mean[name], step.trace.scenario, step.bound))
    if len(step.off) >= len(step.mean):
        return None
    words = listed([*dict.fromkeys(shown)], most=2).removeprefix("it ")
    return Explanation(f"{words}, compared with the other tensors")


def _parts(terms: Sequence[Vector], got: Vector, bound: float) -> list[float] | None:
    """Return the positive factors with which `terms` add up to `got` within rounding; or None."""
    norm = float(np.linalg.norm(got))
    sizes = [float(np.linalg.norm(term)) for term in terms]
    if np.count_nonzero(got) <= _TELLING_MIN * (len(terms) - 1) or not all(sizes) or not norm:
        return None
    columns = np.stack([term / size for term, size in zip(terms, sizes, strict=True)], axis=1)
    if np.linalg.eigvalsh(columns.T @ columns)[0] < _APART:
        return None
    parts = np.linalg.lstsq(columns, got, rcond=None)[0]
    if np.linalg.norm(columns @ parts - got) > bound * norm or parts.min() <= 10 * bound * norm:
        return None
    return [float(part / size) for part, size in zip(parts, sizes, strict=True)]


def _by_rank(shards: Iterable[Shard]) -> dict[int, list[Shard]]:
    by_rank: dict[int, list[Shard]] = {}
    for shard in shards:
        by_rank.setdefault(shard.rank, []).append(shard)
    return by_rank


LIST = (
    _again,
    _kept,
    _late,
    _left,
    _carried,
    _some_micro_batches,
    _one_rank,
    _uneven_parts,
    own_factor,
)
# Explanations that hold for some tensors, by whatever number the others are divided: these may be
# clipped separately on purpose.
LEFT_IN = (_kept, _left)


# --- sums that a script makes outside the hooks ---------------------------------------------------


def seen_through(trace: Trace) -> Trace:
    """Return `trace` without `summed` in the steps that applied the sum of all micro-batches.

    `summed` says which micro-batches the parameters' gradients contain. It misleads if a script
    adds these gradients to its own buffer after each backward pass, clears them, and passes the
    buffer to the optimizer.

    Passes that add to no gradient are joined with the micro-batches that come after them.
    """
    trace = _without_returned(trace)
    shards = evidence.shards(trace)
    bound = rounding_bounds.Bounds.of({}, trace).gradient
    all_held = {
        step
        for step, by_rank in evidence.updates(trace).items()
        if any(update.summed for update in by_rank.values())
        and applies_all(by_rank, shards.get(step, ()), bound)
    }
    if not all_held:
        return trace
    return evidence.replaced(
        trace, Update, lambda update: {"summed": {}} if update.step in all_held else {}
    )


def _without_returned(trace: Trace) -> Trace:
    """Return `trace` without passes of `torch.autograd.grad` that added to no gradient.

    An inner loop or a penalty uses such passes. They have no loss. Their samples are joined with
    those of the step's next backward pass that has a loss.
    """
    updates, events, pending = evidence.updates(trace), [], dict[int, list[Shard]]()
    told = {(s.step, s.rank) for s in trace.of(Shard) if s.loss_sum is not None}
    for event in trace.events:
        if isinstance(event, Shard) and (event.step, event.rank) in told:
            by_rank = updates.get(event.step, {})
            if event.loss_sum is None and event.gradient and not step_sums.summed(by_rank, event):
                pending.setdefault(event.rank, []).append(event)
                continue
            event = _joined([*pending.pop(event.rank, ()), event])
        events.append(event)
    left = [shard for shards in pending.values() for shard in shards]
    return trace if left or len(events) == len(trace.events) else replace(trace, events=(*events,))


def _joined(shards: Sequence[Shard]) -> Shard:
    contents = [zip(s.ids, s.contents or [None] * len(s.ids), strict=False) for s in shards]
    by_id = dict(pair for one in contents for pair in one)
    known = tuple(content for content in by_id.values() if content is not None)
    last, weight = shards[-1], sum(shard.weight for shard in shards)
    loss = last.loss_sum and last.loss_sum * weight / (last.weight or 1.0)
    return replace(last, ids=tuple(by_id), contents=known, weight=weight, loss_sum=loss)


def are_applied(trace: Trace, steps: Collection[int]) -> bool:
    """Return whether in each of `steps` the sum of all micro-batches' gradients was applied."""
    updates, shards = evidence.updates(trace), evidence.shards(trace)
    bound = rounding_bounds.Bounds.of({}, trace).gradient
    return all(
        step in updates and applies_all(updates[step], shards.get(step, ()), bound)
        for step in steps
    )


def applies_all(by_rank: Mapping[int, Update], shards: Sequence[Shard], bound: float) -> bool:
    """Return whether the applied gradient is the sum of all shards', divided by one number."""
    everything = {rank: replace(update, summed={}) for rank, update in by_rank.items()}
    total = step_sums.total(everything, shards)
    mean = evidence.vectors(evidence.any_rank(by_rank).gradient)
    return total is not None and mean is not None and step_sums.is_divided(total, mean, bound)
