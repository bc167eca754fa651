"""Judges how much each micro-batch's reported loss counts in the applied gradient, for F-TI-001.

A backward pass begins at some value. Its derivative with respect to the mean loss that the script
reports (the shard's `slope`), divided by the number by which gradients are divided, is how much the
micro-batch counts. It should be the micro-batch's fraction of the step's samples or tokens.
Clipping, and terms other than the loss, change it by the same factor for all micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from entrenar_py.check import evidence
from entrenar_py.check.evidence import factors, step_sums
from entrenar_py.shared.trace import Shard, Trace, Update
from entrenar_py.shared.verdict import Tally

# A slope has the precision of the loss, which may be bfloat16: 2^-8. A wrong fraction is off by
# more, since weights are counts: 17 samples weighted as 16 are off by 6 %.
BOUND = 0.02


def judge(tally: Tally, trace: Trace) -> None:
    """Judge the steps of a user's trainer in which each micro-batch has a known `slope`."""
    if trace.scenario.workload != "own":
        return
    common: dict[int, float] = {}
    counted: dict[int, Sequence[Shard]] = {}
    shards = evidence.shards(trace)
    for step, by_rank in evidence.ranks_by_step(trace):
        counting = _told(by_rank, shards.get(step, ()))
        if counting is None:
            continue
        _shares(tally, trace, counting)
        factor = _factor(trace, by_rank, counting) if step_sums.are_apart(counting) else None
        if factor is not None:
            common[step], counted[step] = factor, counting
    _common(tally, trace, common)
    _alike(tally, trace, common, counted)


def _told(by_rank: Mapping[int, Update], shards: Sequence[Shard]) -> list[Shard] | None:
    """Return the micro-batches that the step applied; None if the slope of one is unknown."""
    kept = step_sums.held(by_rank, shards)
    known = all(
        shard.slope and math.isfinite(shard.slope) and shard.slope > 0 and shard.weight > 0
        for shard in kept
        if shard.weight or shard.ids
    )
    counted = [shard for shard in kept if shard.weight]
    return counted if known and counted else None


def _shares(tally: Tally, trace: Trace, counting: Sequence[Shard]) -> None:
    """Check that each micro-batch of a step counts in proportion to its samples or tokens."""
    weight = sum(shard.weight for shard in counting)
    slope = sum(shard.slope or 0.0 for shard in counting)
    for shard in counting:
        due, got = shard.weight / weight, (shard.slope or 0.0) / slope
        tally.check(
            abs(got - due) <= BOUND * due,
            f"the loss of micro-batch {shard.shard} counts {got / due:.3g} times as much as its "
            f"share, a weight of {shard.weight:g} in {weight:g}, which could mean: a mean of "
            "means",
            expected=f"{due:.6g} of the step",
            got=f"{got:.6g} of the step",
            **evidence.place(trace, shard),
        )


def _factor(trace: Trace, by_rank: Mapping[int, Update], counting: Sequence[Shard]) -> float | None:
    """Return how many times the mean loss's gradient was applied; None if unknown."""
    update = evidence.any_rank(by_rank)
    applied = evidence.vectors(update.gradient)
    total = step_sums.total(by_rank, counting)
    if applied is None or total is None or applied.keys() != total.keys():
        return None
    names = sorted(applied)
    ratio = factors.ratio(step_sums.joined(total, names), step_sums.joined(applied, names), BOUND)
    if ratio is None or ratio <= 0:
        return None
    return ratio * sum(shard.slope or 0.0 for shard in counting)


def _alike(
    tally: Tally,
    trace: Trace,
    factor_of: Mapping[int, float],
    counted: Mapping[int, Sequence[Shard]],
) -> None:
    """Check that steps with more or larger micro-batches than usual are divided by more.

    Clipping may change the factor of a step by any number, but hardly by exactly this one.
    """
    usual = _usual(factor_of)
    if usual is None:
        return
    sizes = {step: _sizes(told) for step, told in counted.items()}
    for step, factor in sorted(factor_of.items()):
        ratio = factor / factor_of[usual]
        if abs(ratio - 1) <= BOUND:
            continue
        for name, size, due in zip(
            ("micro-batches", "weight"), sizes[step], sizes[usual], strict=True
        ):
            if size == due or abs(ratio - size / due) > BOUND * ratio:
                continue
            place = evidence.place(trace, evidence.any_rank(evidence.updates(trace)[step]))
            meaning = (
                "the last of an epoch are left for the next step"
                if size > due and name == "micro-batches"
                else "the number is that of full steps only"
            )
            tally.check(
                False,
                f"{size:g} {name} are divided by the same number as {due:g} in step "
                f"{usual}, so their samples count {ratio:.3g} times as much, which could "
                f"mean: {meaning}",
                expected="1",
                got=f"{ratio:.6g}",
                **place,
            )
            break


def _usual(factor_of: Mapping[int, float]) -> int | None:
    for step, factor in sorted(factor_of.items()):
        alike = [other for other in factor_of.values() if abs(other / factor - 1) <= BOUND]
        if 2 * len(alike) >= len(factor_of):
            return step if len(alike) < len(factor_of) else None
    return None


def _sizes(shards: Sequence[Shard]) -> tuple[float, float]:
    return len(shards), sum(shard.weight for shard in shards)


def _common(tally: Tally, trace: Trace, factor_of: Mapping[int, float]) -> None:
    """Check that the mean loss's gradient is not applied several times over in all steps.

    A factor that varies is clipping. A factor below 1 may be the weight of one of several losses.
    """
    if len(factor_of) < 2:
        return
    first = next(iter(factor_of))
    factor = factor_of[first]
    if any(abs(other - factor) > BOUND * factor for other in factor_of.values()):
        return
    if abs(factor - 1) <= BOUND:
        tally.compared += 1
        return
    simple = factors.named(factor, trace.scenario, BOUND)
    if simple is None or not simple[1]:
        return
    shown, reason = simple
    words = (
        f"in every step {shown} times the gradient of the mean loss is applied ({reason}), which "
        "could mean: "
    )
    weights = {shard.weight for shard in trace.of(Shard)}
    if factor < 1:
        tally.note(f"{words}it is divided once too often, or the loss is one term of several")
    elif weights == {1.0}:
        tally.note(f"{words}losses are added instead of averaged")
    elif reason.startswith("2^"):
        tally.note(f"{words}the loss is scaled, and gradients are not unscaled")
    else:
        place = evidence.place(trace, evidence.any_rank(evidence.updates(trace)[first]))
        message = f"{words}a sum over micro-batches or ranks is not divided"
        tally.check(False, message, expected="1", got=f"{factor:.6g}", **place)
