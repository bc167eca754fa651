"""Test whether a rank's results depend on which samples are together in a batch.

The loss of a batch is not a sum over its samples if it has a load-balancing term, negatives from
the batch, or advantages that are normalised in the batch. Then the ranks' gradients are right,
although no combination of them is the gradient of one worker. (They are wrong if the script
declares which samples a loss is over, `loss_over`.) BatchNorm and similar layers keep statistics of
a rank's own samples, so these also rightly depend on how a batch is divided.

A rank may also divide a loss by the number of its own elements: tokens, boxes, pixels. The mean
over ranks is then a mean of means. If it is the only loss, the gradient of one worker shows this:
it is a combination of the ranks' gradients. With a second loss, which is divided rightly, no
combination gives it. But the terms of both runs (`Shard.terms`) show it: a term counts as much on
each rank as on one worker, and one worker has as many elements as all ranks together. Elements that
samples only have together (pairs, mined negatives) don't add up in this way.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from entrenar_py.check import evidence
from entrenar_py.check.causes import explanations, loss_terms, rounding_bounds
from entrenar_py.check.causes.rounding_bounds import GRADIENT_BOUND
from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.evidence import precision, step_sums
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.faults import MIRRORED
from entrenar_py.shared.trace import Shard, Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed

# A fraction of the usual distance of two gradients. The float32 error is far below it.
SHARE = 0.2


def lacking(compared: Compared) -> str:
    """Return why, and in which step, samples may influence each other; "" if they don't.

    Also return "" if both runs divide batches equally. A gradient that is not reduced, is weighted
    wrongly or has a factor is still a combination of the micro-batches' gradients. If losses agree
    and gradients don't, the gradients are wrong.
    """
    model, trace = compared.model, compared.trace
    broken = compared.difference
    step = None if broken is None else broken.step
    if step is None or step >= rounding_bounds.ROUNDING_STEPS:
        return ""  # later steps are judged by combinations only
    if _cuts(trace, step) == _cuts(model, step):
        return ""
    if _is_declared_equal(model, trace, step):
        return ""
    if _losses_agree(model, trace, step) or not _is_apart(model, trace, step):
        return ""
    if _has_changed_sums(model, trace, step):
        return ""
    return (
        f"in step {step} no combination of the micro-batches' gradients in {run_name(trace)} is "
        f"the gradient of {run_name(model)}: the loss of a batch may not be a sum over its "
        "samples (a load-balancing term, negatives from the batch, advantages normalised in it), "
        f"or ranks compute a different loss: {_advice(model, trace)}"
    )


def broken(compared: Compared) -> Mapping[str, Any] | None:
    """Return the counterexample of a loss that is also over padding; None if it isn't.

    Such a loss has as many elements per sample as the longest sample of the batch. So a sample has
    more elements in a batch with longer samples.
    """
    model, trace = compared.model, compared.trace
    both = [evidence.shards(run) for run in (model, trace)]
    pairs = [
        pair for step in sorted(both[0].keys() & both[1].keys()) for pair in _joined(step, *both)
    ]
    first = next((pair for pair in pairs if len(_widths(pair[1])) > 1), None)
    if first is None or not all(_is_padded(whole, parts) for whole, parts in pairs):
        return None
    whole, parts = first
    counts = " + ".join(f"{part.terms[0][0]:g}" for part in parts)
    return {
        "message": (
            f"the loss of {len(whole.ids)} samples covers {whole.terms[0][0]:g} elements as one "
            f"batch, and {counts} as {len(parts)} batches: padding up to the longest sample "
            "counts in the loss; leave it out of the loss, for example by ignore_index, and out "
            "of the divisor"
        ),
        **evidence.place(trace, parts[0]),
    }


def _joined(
    step: int, model: Mapping[int, Sequence[Shard]], trace: Mapping[int, Sequence[Shard]]
) -> Iterator[tuple[Shard, list[Shard]]]:
    for whole in model[step]:
        parts = [part for part in trace[step] if part.ids and {*part.ids} <= {*whole.ids}]
        if len(parts) > 1 and sum(len(part.ids) for part in parts) == len(whole.ids):
            yield whole, parts


def _is_padded(whole: Shard, parts: Sequence[Shard]) -> bool:
    """Return whether each term has as many elements per sample as the longest of the parts."""
    numbers = [len(shard.terms) for shard in (whole, *parts)]
    if len({*numbers}) > 1 or not numbers[0]:
        return False
    return all(
        whole.terms[at][0] == len(whole.ids) * max(_widths(parts, at)) > 0
        and all(width.is_integer() for width in _widths(parts, at))
        for at in range(numbers[0])
    )


def _widths(parts: Sequence[Shard], at: int = 0) -> set[float]:
    if not all(len(part.terms) > at for part in parts):
        return {0.0}
    return {part.terms[at][0] / len(part.ids) for part in parts}


def _is_declared_equal(model: Trace, trace: Trace, step: int) -> bool:
    declared = {run.traits.loss_over for run in (model, trace)}
    if declared == {"micro-batch"}:
        return _cuts_of_all_ranks(model, step) == _cuts_of_all_ranks(trace, step)
    return declared == {"batch"}


def _advice(model: Trace, trace: Trace) -> str:
    off = "turn such terms off for this check"
    declared = {run.traits.loss_over for run in (model, trace)}
    if declared == {"micro-batch"}:
        return (
            "the loss is declared to span a micro-batch of all ranks, but the runs cut different "
            f"micro-batches: cut the same ones for any number of workers, or {off}"
        )
    if len(declared) > 1:
        return f"the runs declare loss_over differently: declare the same in all, or {off}"
    return (
        "if all ranks should compute the loss of the whole batch, declare observe(..., "
        f'loss_over="batch"), or "micro-batch" if each rank has its own loss; if not, {off}'
    )


def _has_changed_sums(model: Trace, trace: Trace, step: int) -> bool:
    update, other = (evidence.any_rank(evidence.updates(run)[step]) for run in (trace, model))
    return bool(explanations.changes(trace, update, other, rounding_bounds.GRADIENT_BOUND))


def _cuts(trace: Trace, step: int) -> set[frozenset[int]]:
    return {frozenset(shard.ids) for shard in evidence.shards(trace).get(step, ())}


def _cuts_of_all_ranks(trace: Trace, step: int) -> list[set[int]]:
    by_rank: dict[int, list[Shard]] = defaultdict(list)
    for shard in evidence.shards(trace).get(step, ()):
        by_rank[shard.rank].append(shard)
    micro_batches = zip_longest(*by_rank.values())
    return [{id_ for shard in parts if shard for id_ in shard.ids} for parts in micro_batches]


def _losses_agree(model: Trace, trace: Trace, step: int) -> bool:
    """Return whether the step's loss is known in both runs, and equal within rounding."""
    if "backward" in (model.traits.losses, trace.traits.losses):
        return False
    runs = (evidence.with_losses(model), evidence.with_losses(trace))
    losses = [evidence.any_rank(evidence.updates(run)[step]).loss for run in runs]
    bound = rounding_bounds.Bounds.of(evidence.updates(model), model, trace).loss_moved
    known = [loss for loss in losses if loss is not None]
    return len(known) == len(losses) and math.isclose(*known, rel_tol=bound)


def _is_apart(model: Trace, trace: Trace, step: int) -> bool:
    due = step_sums.total(evidence.updates(model)[step], evidence.shards(model)[step])
    shards = evidence.shards(trace)[step]
    return (
        due is not None and explanations.is_combination(due, shards, _bound(model, trace)) is False
    )


def _bound(model: Trace, trace: Trace) -> float:
    bounds = rounding_bounds.Bounds.of(evidence.updates(model), model, trace)
    is_coarse = precision.unit(model, trace) > precision.FLOAT32
    return bounds.gradient if is_coarse else SHARE * bounds.gradient


# --- statistics of a rank's own samples -----------------------------------------------------------


def other_statistics(compared: Compared) -> str:
    """Return why runs that divide batches differently can't be compared; "" if they can.

    Buffers that depend on a rank's samples may have no effect (a counter, a monitor). Then the runs
    agree, and can be compared.
    """
    names = _statistics(compared.trace) or _statistics(compared.model)
    if not names or _division(compared.trace) == _division(compared.model):
        return ""
    is_mirrored = any(fault.kind == MIRRORED for fault in compared.trace.scenario.faults)
    if is_mirrored or compared.difference is None:
        return ""
    return (
        f"buffers depend on the samples of a rank ({listed(names, most=2)}), and the runs differ "
        "where the buffers may have an effect: divided differently, the batch trains a different "
        "model; use statistics of all ranks (SyncBatchNorm), or if the script's own layers "
        f'synchronise them, declare observe(..., synchronised_buffers=("{names[0]}",))'
    )


def _division(trace: Trace) -> tuple[int, int]:
    return trace.scenario.world_size, trace.scenario.accumulation


def _statistics(trace: Trace) -> list[str]:
    updates = (evidence.any_rank(by_rank) for by_rank in evidence.updates(trace).values())
    first = next((update.local for update in updates if update.local), {})
    return [name for name, record in first.items() if record.dtype.startswith("float")]


# --- losses that ranks divide by numbers of their own ---------------------------------------------


_PLACES_MIN = 2  # micro-batches, since the numbers in a single one may be chance


class _Term(NamedTuple):
    """A term of a loss with equal elements: their number (`size`), and the weight of their mean.

    Recorded terms with the same share are joined.
    """

    size: float
    whole: float


class _Place(NamedTuple):
    """A micro-batch of a step on each rank, with each rank's count of a term's elements.

    `is_own` is true if each rank divides the term by its own count.
    """

    shards: Sequence[Shard]
    counts: Sequence[float]
    is_own: bool


def judge_rank_means(tally: Tally, trace: Trace, model: Trace) -> None:
    """Report as missing whether ranks may divide a loss by their own numbers of elements.

    Some scripts do so on purpose (YOLO), others divide by the elements of all ranks (DETR). `model`
    is the run on one worker.
    """
    runs = (trace, model)
    declared = any(run.traits.losses != "backward" or run.traits.loss_over for run in runs)
    if declared or trace.scenario.workload != "own" or trace.scenario.world_size == 1:
        return
    places = [*_places(trace, model)]
    if len(places) < _PLACES_MIN or not all(place.is_own for place in places):
        tally.compared += len(places)
        return
    first = places[0]
    shown = listed(
        [
            f"{count:g} on rank {shard.rank}"
            for shard, count in zip(first.shards, first.counts, strict=True)
        ],
        most=4,
    )
    tally.miss(
        f"each rank divides one of its losses by its own number of elements, {shown}, and one "
        f"worker divides it by the number of all elements (step {first.shards[0].step}): right "
        'if each rank\'s mean is meant, observe(..., loss_over="micro-batch"), wrong if each '
        "element should count equally: then divide by the number on all ranks, summed by an "
        "all-reduce"
    )


def _places(trace: Trace, model: Trace) -> Iterator[_Place]:
    """Yield micro-batches in which ranks have unequal numbers of elements.

    One worker has as many elements as all ranks together.
    """
    alone, shards = evidence.shards(model), evidence.shards(trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        if not _is_plain_sum(by_rank, shards.get(step, ())):
            continue
        of_ranks = [[s for s in shards[step] if s.rank == rank] for rank in sorted(by_rank)]
        for whole, *parts in zip(alone.get(step, ()), *of_ranks, strict=False):
            if (place := _place(whole, parts)) is not None:
                yield place


def _place(whole: Shard, parts: Sequence[Shard]) -> _Place | None:
    """Return a micro-batch of the same samples with unequal numbers of elements in its parts."""
    ids = Counter(id_ for part in parts for id_ in part.ids)
    if not ids or ids != Counter(whole.ids):
        return None
    known = [_terms(shard) for shard in (whole, *parts)]
    if len({*map(len, known)}) != 1:
        return None
    for due, *terms in zip(*known, strict=True):
        counts = [term.size for term in terms]
        if not loss_terms.alike(min(counts), max(counts)) and loss_terms.alike(
            sum(counts), due.size
        ):
            is_own = all(loss_terms.alike(term.whole, due.whole) for term in terms)
            return _Place(parts, counts, is_own)
    return None


def _terms(shard: Shard) -> list[_Term]:
    """Return a micro-batch's known terms in order. Terms with the same share are joined.

    Joined terms may be one loss that is added up sample by sample.
    """
    counts: dict[float, float] = {}
    for count, share, *_ in shard.terms:
        if count and share and math.isfinite(share):
            counts[share] = counts.get(share, 0.0) + count
    return [_Term(count, abs(share) * count) for share, count in counts.items()]


def _is_plain_sum(by_rank: Mapping[int, Update], shards: Sequence[Shard]) -> bool:
    # A script may weight gradients by numbers of elements. Then the ranks' gradients don't add up
    # plainly.
    total = step_sums.total(by_rank, shards)
    applied = evidence.vectors(evidence.any_rank(by_rank).gradient)
    if total is None or applied is None or total.keys() != applied.keys():
        return bool(shards) and not any(shard.gradient for shard in shards)
    return step_sums.is_divided(total, applied, GRADIENT_BOUND)
