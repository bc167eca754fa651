"""A command is run again with draws and shares controlled, where these keep runs from comparing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.check.clauses.coverage import has_ended_epoch
from entrenar_py.check.command.run_settings import RunSettings
from entrenar_py.check.command.witnesses import Controlling, Shortening
from entrenar_py.check.evidence.needs import CONTROLLED, NUDGED, SHORTENED
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Trace
from tests import traces
from tests.check.causes.test_presuppositions import own
from tests.check.clauses.test_parity import (
    COUPLED,
    MASKED,
    alone,
    by_rank,
    mirrored,
    numbered,
    off,
    reordered,
    repeated,
)
from tests.check.clauses.test_parity import planned as planned_in

TWO, ONE = RunSettings(world_size=2, seed=0), RunSettings(world_size=1, seed=0)


def planned(kind: str, size: int, value: str | None = None) -> RunSettings:
    return replace(ONE, world_size=size, faults=(Fault(kind=kind, step=0, value=value),))


def ordered(trace: Trace) -> Trace:
    return planned_in(trace, "common_order")


NUMBERS = {
    "2-workers-common": planned("common_numbers", 2),
    "1-worker-common": planned("common_numbers", 1),
}
SHARES = {
    "2-workers-mirrored": planned("mirrored_ranks", 2, "2"),
    "1-worker-mirrored-of-2": planned("mirrored_ranks", 1, "2"),
}
ORDER = {
    "2-workers-ordered": planned("common_order", 2),
    "1-worker-ordered": planned("common_order", 1),
}
REPEATED = {"1-worker-repeated-of-2": planned("repeated_share", 1, "2")}


def plans(*made: tuple[RunSettings, Trace], wanted: bool = True) -> list[dict[str, RunSettings]]:
    """Return what is planned after each of the runs that were `made`."""
    controlling = Controlling({CONTROLLED if wanted else NUDGED})
    return [controlling.after(settings, trace) for settings, trace in made]


def test_draws_are_made_alike_first() -> None:
    """If the runs can be compared then, nothing else is run; else ranks get one share."""
    plain = (TWO, MASKED[0]), (ONE, MASKED[1])
    assert plans(*plain) == [{}, NUMBERS]
    two, one = NUMBERS.values()
    assert plans(*plain, (two, numbered(own(2))), (one, numbered(own(1))))[2:] == [{}, {}]
    still = numbered(by_rank(off(own(2), by=0.3))), numbered(by_rank(own(1)))
    assert plans(*plain, (two, still[0]), (one, still[1]))[2:] == [{}, SHARES]


def test_samples_are_put_in_one_order() -> None:
    """If that can't be done, all ranks are given one share."""
    plain = (TWO, MASKED[0]), (ONE, reordered(own(1)))
    assert plans(*plain) == [{}, ORDER]
    both = [(settings, ordered(own(settings.world_size))) for settings in ORDER.values()]
    assert plans(*plain, *both)[2:] == [{}, {}]
    both[1] = (both[1][0], ordered(reordered(own(1))))
    assert plans(*plain, *both)[2:] == [{}, SHARES]


def test_copies_are_tried_if_a_share_does_not_agree() -> None:
    """A loss over all ranks' samples is that of one worker on as many copies of the share."""
    plain = (TWO, COUPLED[0]), (ONE, COUPLED[1])
    assert plans(*plain) == [{}, SHARES]
    two, one = SHARES.values()
    assert plans(*plain, (two, mirrored(own(1))), (one, alone(own(1))))[2:] == [{}, {}]
    unlike = (two, mirrored(own(1))), (one, alone(off(own(1), by=0.7)))
    last = next(iter(REPEATED.values())), repeated(own(1))
    assert plans(*plain, *unlike, last)[2:] == [{}, REPEATED, {}]


@pytest.mark.parametrize("made", [(own(2), own(1)), (off(own(2), times=2.0), own(1))])
def test_runs_that_can_be_compared_need_no_control(made: tuple[Trace, Trace]) -> None:
    """Whether they agree or not."""
    assert plans((TWO, made[0]), (ONE, made[1])) == [{}, {}]


def test_uneven_batches_of_a_worker_are_merged() -> None:
    """As many samples as fit into a number of tokens are others in each step."""
    alone = own(1)
    few = replace(alone, scenario=alone.scenario.with_(batch_size=4))
    assert [*plans((TWO, own(2)), (ONE, few))[1]] == ["1-worker-merged-of-2"]
    assert plans((TWO, own(2)), (ONE, alone))[1] == {}


def test_no_check_needs_it() -> None:
    """The checks of a run decide whether one is controlled at all."""
    assert plans((TWO, MASKED[0]), (ONE, MASKED[1]), wanted=False) == [{}, {}]


def test_short_epochs_are_made_where_samples_are_seen() -> None:
    """A script that reports samples doesn't report those that an epoch leaves out."""
    trace = traces.observed(traces.scenario(num_samples=64), sample_ids="seen")
    assert not has_ended_epoch(trace)
    assert [*Shortening({SHORTENED}).after(TWO, trace)] == ["2-workers-short-epochs"]
    told = traces.was(trace, sample_ids="known", losses="backward")
    assert Shortening({SHORTENED}).after(TWO, told) == {}
