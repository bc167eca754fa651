"""A learning rate that changes is compared with that of the same steps in other runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from entrenar_py.check.clauses import step_rule
from entrenar_py.check.evidence.needs import ALONE, REPEATED, Need, Runs
from entrenar_py.shared.trace import End, Trace, Update
from entrenar_py.shared.verdict import Tally
from tests.check.clauses import traces


def scheduled(*, factor: float = 1.0, **changes: object) -> Trace:
    """Return a script's run whose rate falls from step to step, times `factor` from step 2 on."""
    ran = traces.run(traces.scenario(**changes))
    events = tuple(
        replace(event, learning_rate=0.5**event.step * (factor if event.step >= 2 else 1.0))
        if isinstance(event, Update)
        else event
        for event in ran.events
    )
    subject = ran.scenario.with_(workload="own", system="command")
    return traces.was(replace(ran, scenario=subject, events=events), schedule="other")


def scored(trace: Trace, best: Mapping[int, float]) -> Trace:
    """Return a run whose schedule follows a metric that is so good at best, by step."""
    return replace(
        trace,
        events=tuple(
            replace(event, metric=best.get(event.step)) if isinstance(event, Update) else event
            for event in trace.events
        ),
    )


def compared(**witnesses: Trace) -> Tally:
    """Return the tally of a run beside runs `again` and `alone`."""
    needs: dict[str, Need] = {"again": REPEATED, "alone": ALONE}
    beside = {needs[name]: (run,) for name, run in witnesses.items()}
    tally = Tally("F-TI-008", observed=True)
    step_rule.compare_schedule(tally, Runs(scheduled(), witnesses=beside))
    return tally


def test_equal_rates_count() -> None:
    """Each step is compared with each of the other runs."""
    again, alone = scheduled(repeat=1), scheduled(world_size=1)
    tally = compared(again=again, alone=alone)
    num_steps = len({update.step for update in again.of(Update)})
    assert (tally.compared, tally.missing) == (2 * num_steps, [])


@pytest.mark.parametrize("name", ["again", "alone"])
def test_other_rates_are_missing_evidence(name: str) -> None:
    """A rate that depends on the number of workers may be meant so: it is no alarm."""
    (why,) = compared(**{name: scheduled(factor=2.0, world_size=1)}).missing
    assert why.startswith("the learning rate of step 2 is 0.25 in the run on 3 workers and 0.5 in ")


def test_a_longer_schedule_of_smaller_batches_is_no_reason() -> None:
    """One worker with batches of a worker's size has more steps, and a schedule as long as they."""
    again, alone = scheduled(repeat=1), scheduled(factor=2.0, world_size=1, batch_size=4)
    tally = compared(again=again, alone=alone)
    assert (tally.compared, tally.missing) == (len({u.step for u in again.of(Update)}), [])


def test_other_metrics_are_a_reason_for_other_rates() -> None:
    """One worker may rightly have other weights, whose score reaches its plateau elsewhere."""
    best = {0: 0.9, 1: 0.5, 2: 0.4}
    tally = Tally("F-TI-008", observed=True)
    alone = scored(scheduled(factor=2.0, world_size=1), {**best, 2: 0.45})
    again = scored(scheduled(repeat=1), best)
    beside = {REPEATED: (again,), ALONE: (alone,)}
    step_rule.compare_schedule(tally, Runs(scored(scheduled(), best), witnesses=beside))
    num_steps = len({update.step for update in again.of(Update)})
    assert (tally.compared, tally.missing) == (num_steps + 2, [])


def test_one_metric_is_no_reason_for_other_rates() -> None:
    """Nor are other metrics of a run on the same number of workers."""
    best = {0: 0.9, 1: 0.5, 2: 0.4}
    for changes, others in (({"world_size": 1}, best), ({"repeat": 1}, {**best, 2: 0.45})):
        tally = Tally("F-TI-008", observed=True)
        other = scored(scheduled(factor=2.0, **changes), others)
        beside: dict[Need, tuple[Trace, ...]] = {ALONE: (other,)}
        step_rule.compare_schedule(tally, Runs(scored(scheduled(), best), witnesses=beside))
        assert len(tally.missing) == 1


def test_a_difference_is_told_once() -> None:
    """The run made again and the run on one worker find the same difference, in the same words."""
    several, again = scheduled(factor=2.0), scheduled(factor=2.0, repeat=1)
    alone = scheduled(world_size=1)
    found = set()
    for base in (several, again, alone):
        tally = Tally("F-TI-008", observed=True)
        beside = {REPEATED: (several, again), ALONE: (alone,)}
        step_rule.compare_schedule(tally, Runs(base, witnesses=beside))
        found |= set(tally.missing)
    assert len(found) == 1


def test_without_another_run_it_is_open() -> None:
    """A failed run is no witness."""
    failed = replace(scheduled(), events=(End(status="failed", reason="x"),))
    for tally in (compared(), compared(alone=failed)):
        assert tally.missing == [
            "the learning rate changes by a schedule that is not known here, and there is no other "
            "run to compare it with"
        ]


def following(*metrics: float | None) -> Tally:
    """Return the tally on a run whose ranks' schedules follow these metrics from step 1 on."""
    ran = traces.run(traces.scenario(world_size=len(metrics)))
    events = tuple(
        replace(event, metric=metrics[event.rank])
        if isinstance(event, Update) and event.step >= 1
        else event
        for event in ran.events
    )
    tally = Tally("F-TI-008", observed=True)
    step_rule.compare_metrics(tally, replace(ran, events=events))
    return tally


def test_ranks_follow_one_metric() -> None:
    """Ranks that follow metrics of their own share a rate until one of them doesn't improve."""
    broken = following(0.5, 0.6, 0.5).broken
    assert broken is not None
    assert (broken.step, broken.rank) == (1, 1)
    assert "0.6 at best, and 0.5 on rank 0" in broken.message
    tally = following(0.5, 0.5 + 1e-7, 0.5)
    assert tally.broken is None
    assert tally.compared > 0
    assert following(0.5, None, 0.6).compared == 0  # the last of a pipeline alone has a loss
