"""The machine of the coordinator: averaging block by block, and losses of workers in a step."""

from __future__ import annotations

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import Average
from entrenar_py.train.wire.phases import Stage
from tests.train.wire.situations import computed, link_of, node
from tests.train.wire.star import Link, Star, run_of


def two_of_a_step(num_blocks: int) -> tuple[Star, Link, Link]:
    """Return two workers that have to deliver shards 0 and 1, and 2 and 3, of step 0."""
    star = Star(run_of(num_blocks=num_blocks, awaited={0: (0, 1)}))
    first, second = link_of(star.arrive()), link_of(star.arrive())
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    return star, first, second


def test_a_block_is_averaged_when_every_shard_of_it_is_there() -> None:
    """It is sent at once, before other blocks come."""
    star, first, second = two_of_a_step(3)
    star.say_above(first, computed(0, 1))
    star.say_above(second, computed(2, 3))
    for block in (2, 1):
        left, right = node(level=1, block=block), node(level=1, index=1, block=block)
        assert star.say_above(first, left) == [do.Keep(0, left)]
        assert star.say_above(second, right) == [do.Keep(1, right), do.Reduce(0, block)]
        average = Average(step=0, round=0, block=block, loss=1.0, weight=1.0)
        assert star.effects[-2:] == [do.Send(0, average), do.Send(1, average)]
    assert star.record.averaged == [2, 1]
    stages = [star.coordinator.stage]
    for said in (node(level=1), node(level=1, index=1)):
        star.say_above((first, second)[said.index], said)
        stages.append(star.coordinator.stage)
    assert stages == [Stage.COMPUTING, Stage.COMPUTING, Stage.STAGING]


def test_what_is_averaged_stays_when_its_worker_is_lost() -> None:
    """The worker that takes over delivers every block; an averaged block isn't counted again."""
    star, first, second = two_of_a_step(2)
    for link, index, shards in ((first, 0, (0, 1)), (second, 1, (2, 3))):
        star.say_above(link, computed(*shards))
        star.say_above(link, node(level=1, index=index, block=1))
    assert star.record.averaged == [1]
    star.cut(second)
    star.say_above(first, node(level=1, index=0))
    again = [computed(2, 3), node(level=1, index=1, block=1), node(level=1, index=1)]
    assert [star.say_above(first, said) for said in again] == [
        [do.Keep(0, again[0])],
        [],
        [do.Keep(0, again[2]), do.Deliver(0), do.Reduce(0, 0)],
    ]
    assert star.coordinator.stage is Stage.STAGING


def test_what_is_not_averaged_is_void_when_its_worker_is_lost() -> None:
    """Blocks of an incomplete delivery are missing again."""
    star, first, second = two_of_a_step(2)
    star.say_above(second, computed(2, 3))
    star.say_above(second, node(level=1, index=1, block=1))
    star.say_above(second, node(level=0, index=3, block=0))
    star.cut(second)
    star.say_above(first, computed(0, 1))
    for block in (1, 0):
        star.say_above(first, node(level=1, block=block))
        assert star.record.averaged == []
    star.say_above(first, computed(2, 3))
    for block in (1, 0):
        star.say_above(first, node(level=1, index=1, block=block))
    assert star.record.averaged == [1, 0]


def test_what_was_wholly_delivered_outlives_its_worker() -> None:
    """A complete delivery is not computed again."""
    star, first, second = two_of_a_step(2)
    star.say_above(second, computed(2, 3))
    for block in (1, 0):
        star.say_above(second, node(level=1, index=1, block=block))
    star.cut(second)
    assert star.coordinator.peers[first.peer].assigned == [(0, 1)]
    star.deliver()
    assert len(star.record.state) == 2


def test_what_is_being_averaged_stays_when_its_worker_is_lost() -> None:
    """A complete block is not computed again, and the step waits for its average."""
    star = Star(run_of(num_blocks=2, awaited={0: (0, 1)}), beside=True)
    first, second = link_of(star.arrive()), link_of(star.arrive())
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    for link, index, shards in ((first, 0, (0, 1)), (second, 1, (2, 3))):
        star.say_above(link, computed(*shards))
        star.say_above(link, node(level=1, index=index, block=1))
    assert list(star.reducing) == [do.Reduce(0, 1)]
    star.cut(second)
    star.say_above(first, node(level=1, index=0))
    again = [computed(2, 3), node(level=1, index=1, block=1), node(level=1, index=1)]
    assert [len(star.say_above(first, said)) for said in again] == [1, 0, 3]
    assert list(star.reducing) == [do.Reduce(0, 1), do.Reduce(0, 0)]
    stages = []
    for _ in range(2):
        star.reduce()
        stages.append(star.coordinator.stage)
    assert stages == [Stage.COMPUTING, Stage.STAGING]


def test_a_step_that_everyone_left_is_averaged_anew() -> None:
    """Averages in progress are forgotten."""
    star = Star(run_of(awaited={0: (0,)}), beside=True)
    star.arrive()
    star.until(lambda: bool(star.reducing))
    star.cut(link_of(star.stations[0]))
    assert (star.coordinator.stage, list(star.reducing)) == (Stage.GATHERING, [])
    assert star.finish().status == "completed"
    assert len(star.record.state) == 2
