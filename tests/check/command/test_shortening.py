"""A command is run again to see whole epochs: with short ones, or for some more steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.check.command.run_settings import RunSettings
from entrenar_py.check.command.witnesses import Shortening
from entrenar_py.check.evidence.needs import NUDGED, SHORTENED
from entrenar_py.shared.faults import steps_of
from entrenar_py.shared.trace import End, Event, Shard, Trace
from tests import traces
from tests.check.clauses.micro_batch_traces import STEPS, summed, trace_of

TWO = RunSettings(world_size=2, seed=0)


def run(*, num_samples: int = 20, limited: bool = True) -> Trace:
    """Return a run of three steps of four samples, ended by the harness if `limited`."""
    trace = traces.was(
        trace_of([summed(step) for step in range(STEPS)]), losses="backward", sample_ids="seen"
    )
    scenario = trace.scenario.with_(num_samples=num_samples)
    environment = {"ended": "by entrenar-check"} if limited else {}
    return replace(trace, scenario=scenario, environment=environment)


def failed(trace: Trace) -> Trace:
    return replace(trace, events=(*trace.events[:-1], End(status="failed", reason="0 / 0")))


def planned(usual: Trace, short: Trace | None) -> dict[str, RunSettings]:
    """Return what is planned after the first run, or after the run with short epochs."""
    shortening = Shortening({SHORTENED})
    first = shortening.after(TWO, usual)
    return first if short is None else shortening.after(next(iter(first.values())), short)


def test_short_epochs_are_tried_first() -> None:
    """Nothing else is, where nobody needs the end of an epoch, or the run shows it."""
    assert [*planned(run(), None)] == ["2-workers-short-epochs"]
    assert not Shortening({NUDGED}).after(TWO, run())


def test_a_script_that_fails_with_short_epochs_goes_on_into_the_second() -> None:
    """Five steps are an epoch, and four more show ten samples of the next order."""
    (name, settings), *_ = planned(run(), failed(run())).items()
    assert name == "2-workers-two-epochs"
    assert steps_of(settings.faults) == 9


def test_a_sampler_without_an_end_is_not_shortened() -> None:
    """The run with short epochs shows no end either."""
    assert [*planned(run(), run())] == ["2-workers-two-epochs"]


@pytest.mark.parametrize(
    "usual",
    [run(num_samples=400), run(limited=False)],
    ids=["too far", "the script ends by itself"],
)
def test_no_more_steps_where_they_show_nothing(usual: Trace) -> None:
    assert planned(usual, failed(usual)) == {}


def ended(trace: Trace) -> Trace:
    """Return the run with a second epoch, which begins with the last step."""
    events: list[Event] = []
    for event in trace.events:
        is_second = isinstance(event, Shard) and event.step > 1
        events.append(replace(event, epoch=1) if is_second else event)  # type: ignore[call-arg]
    return replace(trace, events=tuple(events))


def test_short_epochs_that_show_their_ends_are_enough() -> None:
    assert planned(run(), ended(run())) == {}


def test_a_script_that_heeds_the_number_of_an_epoch_is_brought_to_later_ones() -> None:
    """An average that is put in after the third; what short epochs don't show, no more steps do."""
    usual = ended(run())
    usual = replace(usual, scenario=usual.scenario.with_(num_steps=8))
    assert planned(usual, None) == {}
    by_epoch = traces.was(usual, by_epoch="train.py:8")
    assert [*planned(by_epoch, None)] == ["2-workers-short-epochs"]
    assert planned(by_epoch, failed(by_epoch)) == {}
    several = by_epoch.scenario.with_(num_steps=3)
    assert planned(replace(by_epoch, scenario=several), None) == {}
