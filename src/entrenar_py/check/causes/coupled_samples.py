"""Test whether the loss of a batch is a sum over its samples, if two runs cut it differently.

It isn't with a load-balancing term, negatives from the batch, or advantages that are normalised in
it. Then the ranks' gradients are right, and no combination of them is that of one worker. But if
the script declares of which samples its loss is (`loss_over`), they are wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes import changed_sums, combinations, run_comparison
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.evidence import precision, step_sums
from entrenar_py.check.evidence.run_names import run_name
from entrenar_py.shared.trace import Shard, Trace

# A share of the usual distance of two gradients. What float32 leaves is far below it.
SHARE = 0.2


def lacking(compared: Compared) -> str:
    """Return in which step samples may act on each other; "" if they don't, or cuts are equal.

    A gradient that is not reduced, is weighted wrongly or has a factor is a combination of the
    micro-batches'. If losses agree and gradients don't, these are wrong.
    """
    model, trace = compared.model, compared.trace
    broken = compared.difference
    step = None if broken is None else broken.step
    if step is None or step >= run_comparison.ROUNDING_STEPS:
        return ""  # of a later step only combinations are judged
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
        f"that of {run_name(model)}: the loss of a batch may not be a sum over its samples (a "
        "load-balancing term, negatives from the batch, advantages normalised in it), or ranks "
        f"compute another one: {_advice(model, trace)}"
    )


def broken(compared: Compared) -> Mapping[str, Any] | None:
    """Return the counterexample of a loss over padding, None if samples act on each other.

    Its batches have as many elements a sample as the longest one of them, so a sample that is
    batched with longer ones has more.
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
            f"the loss of {len(whole.ids)} samples is over {whole.terms[0][0]:g} elements if they "
            f"are one batch, and over {counts} if they are {len(parts)}: padding up to the longest "
            "sample counts; leave it out of the loss, say by ignore_index, and of the number that "
            "divides it"
        ),
        **evidence.place(trace, parts[0]),
    }


def _joined(
    step: int, model: Mapping[int, Sequence[Shard]], trace: Mapping[int, Sequence[Shard]]
) -> Iterator[tuple[Shard, list[Shard]]]:
    """Yield the micro-batches of a step that are several ones in the other run, with these."""
    for whole in model[step]:
        parts = [part for part in trace[step] if part.ids and {*part.ids} <= {*whole.ids}]
        if len(parts) > 1 and sum(len(part.ids) for part in parts) == len(whole.ids):
            yield whole, parts


def _is_padded(whole: Shard, parts: Sequence[Shard]) -> bool:
    """Return whether each term has as many elements a sample as the longest of the parts."""
    numbers = [len(shard.terms) for shard in (whole, *parts)]
    if len({*numbers}) > 1 or not numbers[0]:
        return False
    return all(
        whole.terms[at][0] == len(whole.ids) * max(_widths(parts, at)) > 0
        and all(width.is_integer() for width in _widths(parts, at))
        for at in range(numbers[0])
    )


def _widths(parts: Sequence[Shard], at: int = 0) -> set[float]:
    """Return how many elements a sample a term has in each of the micro-batches; {0} if unknown."""
    if not all(len(part.terms) > at for part in parts):
        return {0.0}
    return {part.terms[at][0] / len(part.ids) for part in parts}


def _is_declared_equal(model: Trace, trace: Trace, step: int) -> bool:
    """Return whether the runs declare losses of the same samples, which all ranks divide."""
    declared = {run.traits.loss_over for run in (model, trace)}
    if declared == {"micro-batch"}:
        return _cuts_of_all_ranks(model, step) == _cuts_of_all_ranks(trace, step)
    return declared == {"batch"}


def _advice(model: Trace, trace: Trace) -> str:
    off = "turn such terms off for this check"
    declared = {run.traits.loss_over for run in (model, trace)}
    if declared == {"micro-batch"}:
        return (
            "the loss is declared to be that of a micro-batch of all ranks, and the runs "
            f"cut different ones: cut the same for any number of workers, or {off}"
        )
    if len(declared) > 1:
        return f"the runs declare loss_over differently: declare the same in all, or {off}"
    return (
        "if all ranks are to compute the loss of the whole batch, say so, observe(..., loss_over="
        f'"batch"), or "micro-batch" if each has one of its own; if not, {off}'
    )


def _has_changed_sums(model: Trace, trace: Trace, step: int) -> bool:
    """Return whether a tensor's gradient is wrong by what no micro-batch gave, coupled or not."""
    update, other = (evidence.any_rank(evidence.updates(run)[step]) for run in (trace, model))
    return bool(changed_sums.of(trace, update, other, run_comparison.GRADIENT_BOUND))


def _cuts(trace: Trace, step: int) -> set[frozenset[int]]:
    """Return the micro-batches of a step as sets of samples."""
    return {frozenset(shard.ids) for shard in evidence.shards(trace).get(step, ())}


def _cuts_of_all_ranks(trace: Trace, step: int) -> list[set[int]]:
    """Return the micro-batches of a step in order, each with the samples of all ranks."""
    by_rank: dict[int, list[Shard]] = defaultdict(list)
    for shard in evidence.shards(trace).get(step, ()):
        by_rank[shard.rank].append(shard)
    micro_batches = zip_longest(*by_rank.values())
    return [{id_ for shard in parts if shard for id_ in shard.ids} for parts in micro_batches]


def _losses_agree(model: Trace, trace: Trace, step: int) -> bool:
    """Return whether the step's loss is known in both runs, and the same within rounding."""
    if "backward" in (model.traits.losses, trace.traits.losses):
        return False
    runs = (evidence.with_losses(model), evidence.with_losses(trace))
    losses = [evidence.any_rank(evidence.updates(run)[step]).loss for run in runs]
    bound = run_comparison.Bounds.of(evidence.updates(model), model, trace).loss_moved
    known = [loss for loss in losses if loss is not None]
    return len(known) == len(losses) and math.isclose(*known, rel_tol=bound)


def _is_apart(model: Trace, trace: Trace, step: int) -> bool:
    """Return whether some tensor's gradient in `model` is no combination of those in `trace`."""
    due = step_sums.total(evidence.updates(model)[step], evidence.shards(model)[step])
    shards = evidence.shards(trace)[step]
    return due is not None and combinations.is_met(due, shards, _bound(model, trace)) is False


def _bound(model: Trace, trace: Trace) -> float:
    bounds = run_comparison.Bounds.of(evidence.updates(model), model, trace)
    is_coarse = precision.unit(model, trace) > precision.FLOAT32
    return bounds.gradient if is_coarse else SHARE * bounds.gradient
