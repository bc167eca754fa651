"""Runs in which draws and shares are controlled, in place of those that rightly differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.causes import copies
from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import ALONE, CONTROLLED, Runs
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Drawn, Event, Shard, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests.check.causes.test_presuppositions import changed, own
from tests.check.clauses import traces
from tests.check.clauses.test_batches_apart import coupled

NAME = min(copies.known_names(own(1)))


def planned(trace: Trace, kind: str, value: str | None = None) -> Trace:
    """Return a run of the same numbers in which a control was planned."""
    fault = Fault(kind=kind, step=0, value=value)
    return replace(trace, scenario=trace.scenario.with_(faults=(fault,)))


def by_rank(trace: Trace, where: str = "forward") -> Trace:
    """Return a run whose ranks draw their own numbers in the forward pass of step 0."""
    ranks = range(trace.scenario.world_size)
    size = trace.scenario.world_size
    drawn = [
        Drawn(
            step=0,
            rank=rank,
            micro_batch=0,
            where=where,
            generator="torch",
            before=f"{rank}",
            after=f"{rank}-{size}",
        )
        for rank in ranks
    ]
    return replace(trace, events=(*drawn, *trace.events))


def off(trace: Trace, times: float = 1.0, by: float = 0.0) -> Trace:
    """Return a run whose applied gradient of one tensor is another one in step 0."""
    gradient = changed(traces.one(trace, Update, step=0).gradient, NAME, times=times, by=by)
    return traces.altered(trace, Update, {"step": 0}, gradient=gradient)


def with_other_loss(trace: Trace) -> Trace:
    """Return a run whose samples act on each other: its loss in step 0 is another one."""
    events = (
        replace(event, loss_sum=2 * event.loss_sum)
        if isinstance(event, Shard) and event.step == 0 and event.loss_sum is not None
        else event
        for event in trace.events
    )
    return replace(trace, events=tuple(events))


def judged(plain: Trace, alone: Trace, *controlled: Trace) -> Finding:
    """Return the finding of F-DP-005, with the runs that are `controlled` as witnesses."""
    runs = Runs(plain, {ALONE: (alone,)}, witnesses={CONTROLLED: controlled})
    return CHECKS["parity"].judge(traces.clause("parity"), runs)


MASKED = by_rank(off(own(2), by=0.3)), by_rank(own(1))


def numbered(trace: Trace) -> Trace:
    return planned(trace, "common_numbers")


def test_masks_by_rank_are_no_excuse() -> None:
    """Without them the same script is compared: it holds, or it is broken."""
    assert judged(*MASKED).verdict is Verdict.INCONCLUSIVE
    held = judged(*MASKED, numbered(own(2)), numbered(own(1)))
    assert held.verdict is Verdict.HELD, held
    assert "compared with random numbers that are alike for all samples" in held.notes
    place = traces.broken(judged(*MASKED, numbered(off(own(2), times=2.0)), numbered(own(1))))
    assert (place.step, place.tensor) == (0, NAME)
    assert place.message.startswith("with random numbers that are alike for all samples: ")


def reordered(trace: Trace) -> Trace:
    """Return a run whose samples have the numbers of others."""
    events = [
        replace(event, ids=tuple((id_ + 1) % 12 for id_ in event.ids))
        if isinstance(event, Shard)
        else event
        for event in trace.events
    ]
    return replace(trace, events=tuple(events))


def test_another_order_on_one_worker_is_no_excuse() -> None:
    """Some samplers cut other batches for each number of workers; loaders can have one order."""
    plain = own(2), reordered(own(1))
    assert "draws other samples" in judged(*plain).reason
    two, one = (planned(own(size), "common_order") for size in (2, 1))
    held = judged(*plain, two, one)
    assert held.verdict is Verdict.HELD, held
    assert "compared with one order of samples for any number of workers" in held.notes
    wrong = planned(off(own(2), times=2.0), "common_order")
    assert "with one order of samples" in traces.broken(judged(*plain, wrong, one)).message
    still = judged(*plain, two, planned(reordered(own(1)), "common_order"))
    assert "draws other samples" in still.reason, "not fetched by a loader"
    again = traces.altered(own(2), Shard, {"step": 0, "rank": 1, "shard": 3}, ids=(0,))
    shared = traces.altered(own(2), Shard, {"step": 0}, ids=(0,))
    for run, verdict in ((again, Verdict.HELD), (shared, Verdict.INCONCLUSIVE)):
        finding = judged(run, reordered(own(1)), two, one)
        assert finding.verdict is verdict, "with replacement, and ranks that share a batch"


def test_draws_that_could_not_be_made_alike() -> None:
    """A generator that still moves by rank keeps the question open."""
    unlike = judged(*MASKED, numbered(by_rank(off(own(2), by=0.3))), numbered(by_rank(own(1))))
    assert unlike.verdict is Verdict.INCONCLUSIVE
    assert "draws random numbers in the model's forward pass" in unlike.reason


def test_a_control_that_leaves_no_gradient_compares_nothing() -> None:
    """Advantages over answers that are alike are zero, in any trainer; the next control is tried.

    What is left may also be their rounding.
    """
    for times in (0.0, 1e-9):
        nothing = [numbered(shrunk(own(size), times)) for size in (2, 1)]
        assert judged(*MASKED, *nothing).verdict is Verdict.INCONCLUSIVE
        ordered = [planned(own(size), "common_order") for size in (2, 1)]
        held = judged(*MASKED, *nothing, *ordered)
        assert held.verdict is Verdict.HELD
        assert "compared with one order of samples for any number of workers" in held.notes
    mirrored_ones = [mirrored(own(1)), alone(own(1)), repeated(own(1))]
    empty = judged(*COUPLED, *map(traces.without_gradients, mirrored_ones))
    assert empty.verdict is Verdict.INCONCLUSIVE, empty


def shrunk(trace: Trace, times: float) -> Trace:
    """Return a run whose gradients are so many times as large."""
    events = (
        replace(event, gradient=_times(event.gradient, times))
        if isinstance(event, Shard | Update)
        else event
        for event in trace.events
    )
    return replace(trace, events=tuple(events))


def _times(tensors: Tensors, times: float) -> Tensors:
    for name in tensors:
        tensors = changed(tensors, name, times=times)
    return tensors


def test_plain_runs_that_can_be_compared_are() -> None:
    """Controlled runs decide nothing that the plain ones do."""
    wrong = numbered(off(own(2), times=2.0)), numbered(own(1))
    assert judged(own(2), own(1), *wrong).verdict is Verdict.HELD
    traces.broken(judged(off(own(2), times=2.0), own(1), numbered(own(2)), numbered(own(1))))


def test_a_training_that_only_the_control_breaks() -> None:
    """NaNs that come from equal numbers are no finding."""
    spoiled = traces.altered(own(2), Update, {"step": 3}, finite=False)
    finding = judged(*MASKED, numbered(spoiled), numbered(own(1)))
    assert finding.verdict is Verdict.INCONCLUSIVE, finding


# --- mirrored ranks -------------------------------------------------------------------------------
UNCOUPLED = own(2), coupled(own(1), 0, loss=99.0)
COUPLED = with_other_loss(UNCOUPLED[0]), UNCOUPLED[1]


def mirrored(share: Trace) -> Trace:
    """Return a run on two workers that both train as `share` does."""

    def doubled(event: Event) -> list[Event]:
        twin: Any = event
        return [event, replace(twin, rank=1)] if hasattr(event, "rank") else [event]

    events = tuple(one for event in share.events for one in doubled(event))
    scenario = share.scenario.with_(world_size=2)
    return planned(replace(share, scenario=scenario, events=events), "mirrored_ranks", "2")


def alone(share: Trace) -> Trace:
    return planned(share, "mirrored_ranks", "2")


def repeated(share: Trace) -> Trace:
    """Return the run of one worker on two copies of each share."""
    events: list[Event] = [
        replace(event, ids=event.ids * 2) if isinstance(event, Shard) else event
        for event in share.events
    ]
    return planned(replace(share, events=tuple(events)), "repeated_share", "2")


def test_ranks_with_one_share_train_as_one_worker_on_it() -> None:
    """By either meaning of a loss that couples samples: those of a rank, or those of all."""
    assert judged(*COUPLED).verdict is Verdict.INCONCLUSIVE
    by_one = judged(*COUPLED, mirrored(own(1)), alone(own(1)))
    assert by_one.verdict is Verdict.HELD, by_one
    assert "compared with the same samples on all ranks" in by_one.notes
    other = alone(off(own(1), by=0.7))
    by_all = judged(*COUPLED, mirrored(own(1)), other, repeated(own(1)))
    assert by_all.verdict is Verdict.HELD, by_all


def test_equal_ranks_say_nothing_of_a_loss_that_couples_no_samples() -> None:
    """What each rank does to its own gradient (clipping by value) is alike for equal ranks."""
    shares = mirrored(own(1)), alone(own(1))
    assert judged(*UNCOUPLED, *shares).verdict is Verdict.INCONCLUSIVE
    assert judged(*COUPLED, *shares).verdict is Verdict.HELD


def test_a_term_that_counts_once_for_each_rank() -> None:
    """Ranks that train as neither does are wrong, if both meanings are one."""
    wrong = mirrored(off(own(1), by=0.7))
    place = traces.broken(judged(*COUPLED, wrong, alone(own(1)), repeated(own(1))))
    assert (place.step, place.tensor) == (0, NAME)
    assert "a term of the loss may count once for each rank: " in place.message
    unlike = judged(*COUPLED, wrong, alone(own(1)), repeated(off(own(1), by=0.3)))
    assert unlike.verdict is Verdict.INCONCLUSIVE, "a mixture of the two"
    assert judged(*COUPLED, wrong, alone(own(1))).verdict is Verdict.INCONCLUSIVE, "not run"


def test_ranks_that_were_not_mirrored() -> None:
    """A script that cuts its batches by hand gives each rank a share of its own."""
    cut = planned(own(2), "mirrored_ranks", "2")
    finding = judged(*COUPLED, cut, alone(own(1)))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "may not be a sum over its samples" in finding.reason


@pytest.mark.parametrize("shards", [0, 3])
def test_a_run_without_shards_has_no_share(shards: int) -> None:
    """Nothing is compared if no micro-batches were recorded, or of one rank only."""
    run = traces.without(mirrored(own(1)), Shard, **({} if not shards else {"rank": 1}))
    finding = judged(*COUPLED, run, alone(own(1)))
    assert finding.verdict is Verdict.INCONCLUSIVE
