"""The micro-batches of a step, from the forward pass to the record."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from entrenar_py.check.observing.generators import Generators
from entrenar_py.check.observing.micro_batches import MicroBatches
from entrenar_py.check.observing.random_numbers import RandomNumbers
from entrenar_py.check.observing.samples import Samples


@pytest.fixture
def micro_batches() -> MicroBatches:
    """Return the micro-batches of a small model, whose samples a script reports."""
    generators = Generators(nn.Linear(1, 1), objects={})
    draws = RandomNumbers(generators, 1, lambda: (0, 0), lambda _: None)
    return MicroBatches(1, Samples(None), draws)


def go_through(micro_batches: MicroBatches, *ids: int, draw: bool = False) -> None:
    micro_batches.samples.tell(ids, None)
    micro_batches.before_forward((), [])
    if draw:
        torch.rand(1)
    micro_batches.after_forward((), is_training=True)
    micro_batches.after_backward(0, {}, finite=True)


def test_each_is_numbered_and_has_its_loss(micro_batches: MicroBatches) -> None:
    """Numbers continue after those written before; a loss that was not reported is unknown."""
    micro_batches.tell_loss(0.5, 2)
    go_through(micro_batches, 0, 1)
    (first,) = micro_batches.written()
    go_through(micro_batches, 2, 3, draw=True)
    (second,) = micro_batches.written()
    assert (first.shard, first.ids, first.loss_sum, first.draws) == (0, (0, 1), 1.0, None)
    assert (second.shard, second.ids, second.loss_sum) == (1, (2, 3), None)
    assert second.draws is not None
    micro_batches.end_step()
    assert micro_batches.index == 0


def test_the_same_samples_again(micro_batches: MicroBatches) -> None:
    """A pass without new samples has those of the pass before, and they count once."""
    go_through(micro_batches, 0, 1)
    micro_batches.forget_repeated()
    assert micro_batches.done == []
    micro_batches.after_backward(0, {}, finite=True)
    micro_batches.samples.tell([2], None)
    micro_batches.samples.settle()
    micro_batches.forget_repeated()
    assert [micro.ids for micro in micro_batches.done] == [(0, 1)]


def test_losses_ahead(micro_batches: MicroBatches) -> None:
    """A loss that is reported before its backward pass isn't taken for the last pass's."""
    go_through(micro_batches, 0)
    for mean in (1.0, 2.0):
        micro_batches.tell_loss(mean, 1)
    ahead = micro_batches.take_losses_ahead()
    assert [shard.loss_sum for shard in micro_batches.written()] == [1.0]
    micro_batches.give_losses(ahead)
    go_through(micro_batches, 1)
    assert [shard.loss_sum for shard in micro_batches.written()] == [2.0]


def test_a_loss_that_is_not_finite(micro_batches: MicroBatches) -> None:
    """A loss that isn't finite is recorded, even if the gradients are excused."""
    go_through(micro_batches, 0)
    micro_batches.within_backward({}, finite=False)
    micro_batches.excuse()
    micro_batches.tell_loss(float("nan"), 1)
    (shard,) = micro_batches.written()
    assert not shard.finite
