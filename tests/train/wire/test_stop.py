"""A run stopped from outside: it finishes or abandons its step, saves, and tells the workers."""

from __future__ import annotations

from functools import partial

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import Shutdown, Stage
from tests.train.wire.star import Star, run_of

WHY = "asked to"
STOPPED = do.Finish("stopped", WHY)
IN_WORK = (Stage.COMPUTING, Stage.STAGING, Stage.APPLYING)


def reach(stage: Stage) -> Star:
    """Return a star with two workers in the first of two steps, in `stage`."""
    star = Star(run_of(awaited={0: (0, 1)}))
    star.arrive()
    star.arrive()
    star.until(partial(_stands, star, stage))
    return star


def _stands(star: Star, stage: Stage) -> bool:
    return star.coordinator.stage is stage


def _last(star: Star) -> list[do.Effect]:
    """Return the effects after the last step, without messages."""
    kinds = (do.Apply, do.Gather, do.Save, do.Finish)
    return [one for one in star.effects if isinstance(one, kinds)]


@pytest.mark.parametrize("stage", IN_WORK)
def test_the_step_in_work_is_finished(stage: Stage) -> None:
    """Then its state is saved, all workers are told why, and no other step begins."""
    star = reach(stage)
    star.stop(WHY)
    star.deliver()
    assert _last(star) == [do.Apply(0), do.Gather(1), do.Save(1), STOPPED]
    assert [one.finished for one in star.stations] == 2 * [do.Finish("failed", WHY)]
    assert [one.state for one in star.stations] == 2 * [star.record.state]


@pytest.mark.parametrize("stage", IN_WORK)
def test_at_once_the_step_in_work_is_given_up(stage: Stage) -> None:
    """No worker has reported the step: the state before it is saved."""
    star = reach(stage)
    star.stop(WHY)
    star.stop(WHY, at_once=True)
    star.deliver()
    assert _last(star) == [do.Save(0), STOPPED]
    assert [one.finished for one in star.stations] == 2 * [do.Finish("failed", WHY)]


def test_what_a_worker_made_stays_made() -> None:
    """At once after the first of two Applied: the state after the step is saved."""
    star = reach(Stage.APPLYING)
    star.until(lambda: len(star.record.state) == 1)
    assert star.coordinator.stage is Stage.APPLYING
    star.stop(WHY, at_once=True)
    assert _last(star) == [do.Apply(0), do.Save(1), STOPPED]


def test_a_run_without_workers_ends_at_once() -> None:
    """It does not wait for any."""
    star = Star(run_of())
    star.stop(WHY)
    assert _last(star) == [do.Save(0), STOPPED]
    star.stop(WHY, at_once=True)
    assert star.finished == STOPPED


def test_who_waits_to_be_let_in_hears_it_too() -> None:
    """A waiting worker is told, since it would reconnect for ever."""
    star = reach(Stage.COMPUTING)
    late = star.arrive()
    star.until(lambda: any(one.rank == 2 for one in star.coordinator.peers.values()), first=-1)
    star.stop(WHY)
    star.deliver()
    told = [one for one in star.effects if isinstance(one, do.Send)]
    assert sum(one.message == Shutdown(problem=WHY) for one in told) == 3
    assert late.finished == do.Finish("failed", WHY)


def test_a_run_that_loses_all_its_workers_stops_too() -> None:
    """The current step is abandoned; the last state is saved."""
    star = reach(Stage.COMPUTING)
    star.stop(WHY)
    for station in star.stations:
        assert station.link is not None
        star.cut(station.link)
    assert _last(star) == [do.Gather(0), do.Save(0), STOPPED]


def test_the_end_waits_for_the_last_state() -> None:
    """Workers are told before it is saved; the run is over after that."""
    star = Star(run_of(), beside=True)
    star.arrive()
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    star.stop(WHY, at_once=True)
    assert _last(star) == [do.Save(0)]
    assert isinstance(star.effects[-3], do.Send)
    star.stop(WHY, at_once=True)
    assert star.finished is None
    star.reduce()
    assert star.finished == STOPPED


def test_a_state_is_saved_once_though_the_run_stops_at_once() -> None:
    """A save in progress is the last one."""
    star = Star(run_of(saves={0}), beside=True)
    star.arrive()
    star.until(lambda: bool(star.reducing))
    assert _last(star) == [do.Save(0)]
    star.stop(WHY, at_once=True)
    assert star.finished is None
    star.reduce()
    assert _last(star) == [do.Save(0), STOPPED]


@pytest.mark.parametrize("num_awaited", [1, 2, 3])
def test_a_run_begins_with_as_many_as_it_waits_for(num_awaited: int) -> None:
    """Their ranks don't matter; later it continues with fewer."""
    star = Star(run_of(num_awaited=num_awaited))
    for rank in (2, 0, 1)[:num_awaited]:
        star.deliver()
        assert star.coordinator.stage is Stage.GATHERING
        star.arrive(rank)
    star.until(partial(_stands, star, Stage.COMPUTING))
    for station in star.stations[1:]:
        assert station.link is not None
        star.cut(station.link)
    assert star.finish().status == "completed"
