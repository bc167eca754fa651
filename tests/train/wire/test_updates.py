"""A star in which the server updates: which weights are sent, and when."""

from __future__ import annotations

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import Average, Commit, Message, Stage, Weights
from tests.train.wire.situations import computed, link_of, node
from tests.train.wire.star import Link, Star, closing, run_of


def weights(block: int, step: int = 0) -> Weights:
    """Return the coordinator's message with `block`."""
    return Weights(step=step, block=block, loss=1.0, weight=1.0)


def serving(*, beside: bool = False) -> tuple[Star, Link, Link]:
    """Return a star with two workers that have delivered step 0 except the root of block 0."""
    star = Star(run_of(num_blocks=2, awaited={0: (0, 1)}, server_updates=True), beside=beside)
    first, second = link_of(star.arrive()), link_of(star.arrive())
    star.until(lambda: star.coordinator.stage is Stage.COMPUTING)
    for link, index, shards in ((first, 0, (0, 1)), (second, 1, (2, 3))):
        star.say_above(link, computed(*shards))
        star.say_above(link, node(level=1, index=index, block=1))
    star.say_above(first, node(level=1, index=0))
    return star, first, second


def sent(star: Star, *kinds: type[Message]) -> list[do.Send]:
    """Return the sent messages of these kinds, in order."""
    return [one for one in star.effects if isinstance(one, do.Send) and type(one.message) in kinds]


def test_nothing_goes_down_before_every_block_is_averaged() -> None:
    """Clipping needs the whole gradient; then all blocks go out."""
    star, _, second = serving()
    assert star.record.averaged == [1]
    assert sent(star, Average, Weights) == []
    star.say_above(second, node(level=1, index=1))
    assert star.record.averaged == [1, 0]
    assert sent(star, Average, Weights) == [
        do.Send(peer, weights(block)) for block in (1, 0) for peer in (0, 1)
    ]
    assert star.coordinator.stage is Stage.STAGING


def test_the_step_waits_until_it_is_prepared() -> None:
    """No weights are sent while the step is prepared in the background."""
    star, _, second = serving(beside=True)
    star.say_above(second, node(level=1, index=1))
    star.reduce()
    star.reduce()
    assert list(star.reducing) == [do.Prepare(0)]
    assert (star.coordinator.stage, sent(star, Weights)) == (Stage.COMPUTING, [])
    star.reduce()
    assert star.coordinator.stage is Stage.STAGING
    assert len(sent(star, Weights)) == 4


def test_who_is_lost_while_it_is_prepared_is_not_sent_any() -> None:
    """Its shards are averaged, and not computed again."""
    star, first, second = serving(beside=True)
    star.say_above(second, node(level=1, index=1))
    star.reduce()
    star.reduce()
    star.cut(second)
    assert star.coordinator.peers[first.peer].assigned == []
    star.reduce()
    assert sent(star, Weights) == [do.Send(0, weights(block)) for block in (1, 0)]


@pytest.mark.parametrize("stage", [Stage.COMPUTING, Stage.STAGING])
def test_a_step_that_nobody_uses_did_not_happen(stage: Stage) -> None:
    """All are lost before its commit: it is made again."""
    star, first, second = serving(beside=True)
    star.say_above(second, node(level=1, index=1))
    star.reduce()
    star.reduce()
    assert list(star.reducing) == [do.Prepare(0)]
    if stage is Stage.STAGING:
        star.reduce()
    assert star.coordinator.stage is stage
    star.cut(first)
    star.cut(second)
    assert (star.coordinator.stage, star.coordinator.step) == (Stage.GATHERING, 0)
    assert (list(star.reducing), len(star.record.state)) == ([], 0)
    assert star.finish().status == "completed"
    assert star.record.state == ((0, 0, 1, 2, 3), (1, 0, 1, 2, 3))


def test_weights_are_used_when_everyone_holds_them() -> None:
    """No state changes before the commit; the server's follows the first Applied."""
    star = Star(run_of(num_blocks=2, awaited={0: (0, 1)}, server_updates=True))
    workers = [star.arrive(), star.arrive()]
    star.until(lambda: bool(sent(star, Commit)))
    assert [len(one.state) for one in workers] == [0, 0]
    star.until(lambda: any(one.state for one in workers))
    assert len(star.record.state) == 0
    star.until(lambda: star.coordinator.step == 1)
    assert {star.record.state, *(one.state for one in workers)} == {((0, 0, 1, 2, 3),)}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((weights(1), weights(1)), "Weights block=1: it was already received"),
        ((weights(2),), "Weights block=2: it was already received, or there is no such block"),
        ((weights(0, step=1),), "step=1: this worker is at step 0"),
    ],
)
def test_what_is_not_due_ends_the_connection(said: tuple[Weights, ...], why: str) -> None:
    """A second or unknown block, or one of another step."""
    star = Star(run_of(num_blocks=2, awaited={0: (0, 1)}, server_updates=True))
    machine = star.arrive().machine
    star.arrive()
    star.until(lambda: bool(star.stations[0].jobs))
    star.work(star.stations[0])
    *before, last = said
    for one in before:
        assert [type(effect) for effect in machine.receive(one, star.now)] == [do.Hold]
    closed = closing(machine.receive(last, star.now))
    assert closed.reason.startswith(why)
