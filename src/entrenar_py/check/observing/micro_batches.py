"""The micro-batches of a rank's current step, from their forward passes to their records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from entrenar_py.check.observing import contents
from entrenar_py.check.observing.batches import Block
from entrenar_py.check.observing.borders import Borders
from entrenar_py.check.observing.contents import Contents
from entrenar_py.check.observing.loss_terms import Begun
from entrenar_py.check.observing.random_numbers import RandomNumbers
from entrenar_py.check.observing.samples import Samples
from entrenar_py.check.rank_files import whole_model
from entrenar_py.shared import trace


@dataclass(frozen=True)
class _Loss:
    """The mean loss of a micro-batch, as the script reports it.

    `slopes` has one number for each backward pass: the derivative, with respect to this loss, of
    the value at which the pass began.
    """

    mean: float
    weight: float
    slopes: list[Tensor] = field(default_factory=list)

    def slope(self) -> float | None:
        """Return the derivative; None unless the loss was in exactly one backward pass."""
        return float(self.slopes[0]) if len(self.slopes) == 1 else None


class MicroBatches:
    """The micro-batches of one step; `done` are the ones with a completed backward pass.

    A micro-batch is one backward pass and the forward passes before it. Its `gradient` is what the
    backward pass added to the gradients, including passes nested in it. Its `draws` is a digest of
    the generators' states before its first forward pass; only generators from which that pass drew
    numbers (for dropout) count. The script may report a micro-batch's loss before or after the
    backward pass. Each rank numbers its own micro-batches from 0.
    """

    def __init__(self, rank: int, samples: Samples, random: RandomNumbers) -> None:
        self.done: list[trace.Shard] = []
        self.samples = samples
        self._rank, self._random = rank, random
        self._losses: list[_Loss] = []
        # The value at which the current backward pass began. It counts as the loss unless the
        # script reports one.
        self._begun = Begun()
        self._tells_losses = False
        self.has_backward_losses = False  # whether a recorded loss is a value from `backward`
        # Whether the last forward pass with gradients was in evaluation mode.
        self._is_evaluating = False
        # Since the last micro-batch: whether a pass trained nothing, and whether one was made with
        # weights that are not those of the last step.
        self._has_evaluated = self.is_swapped = False
        self._num_written = 0
        self._draws: str | None = None
        self._is_in_forward = False
        self._given: list[Contents] = []  # the contents of each forward pass's inputs
        self.borders: Borders | None = None  # hears of losses in the order of execution

    @property
    def num_written(self) -> int:
        """The number of the step's micro-batches before its latest optimizer step."""
        return self._num_written

    @property
    def index(self) -> int:
        """The index of this rank's current micro-batch in the step, from 0."""
        return self._num_written + len(self.done)

    def tell_loss(self, value: float | Tensor, weight: float) -> None:
        """Record the mean loss of a micro-batch, over `weight` samples or tokens."""
        mean = value.detach() if isinstance(value, Tensor) else value
        loss = _Loss(float(mean), float(weight))
        if isinstance(value, Tensor) and value.grad_fn is not None:
            value.register_hook(loss.slopes.append)  # type: ignore[no-untyped-call]
        self._losses.append(loss)
        self._tells_losses = True

    def backward_begins(self, begun: Begun) -> None:
        """Record the value and the terms at which a backward pass begins."""
        self._begun = begun
        if self.borders is not None:
            self.borders.loss(begun.value, begun.scale)

    def backward_ended(self) -> None:
        """Called when the backward pass is over."""
        self._begun = Begun()

    def before_forward(self, inputs: Any, blocks: list[Block]) -> None:
        """Record the samples of a forward pass, and its `inputs`.

        `blocks` are the memory blocks of its inputs.
        """
        self._is_evaluating = False
        self.samples.forward(blocks)
        self._given.append(contents.contents_of(inputs))
        if self._random.mark("batch")[1]:
            self.samples.drew()
        self._is_in_forward = True

    def aside(self, blocks: list[Block], *, trains: bool) -> None:
        """Record a pass without gradients, or (`trains`) one in evaluation mode with gradients."""
        self.samples.aside(blocks, trains=trains)
        self._is_evaluating |= trains

    def evaluated(self) -> None:
        """Called after a pass in evaluation mode that trains nothing."""
        self._has_evaluated = True

    def after_forward(self, inputs: Any, *, is_training: bool) -> None:
        """Record a forward pass's inputs, and whether random numbers were drawn if it trains."""
        grown = torch.is_grad_enabled()
        if self.samples.given(inputs, trains=is_training and grown, may_train=grown):
            self._draws, self._given = None, self._given[-1:]
        if not self._is_in_forward:
            return
        self._is_in_forward = False
        before, drawn = self._random.mark("forward")
        if drawn and self._draws is None:
            states = " ".join(f"{name} {before[name]}" for name in drawn)
            self._draws = blake3(states.encode()).hexdigest(16)

    def after_backward(self, step: int, gradient: trace.Tensors, *, finite: bool) -> None:
        """Called when the backward pass of a micro-batch of `step` is over."""
        self.samples.settle()
        drawn, loss = self.samples.take(), self._begun.value
        weight = float(len(drawn.ids) or drawn.num_made)
        self.done.append(
            trace.Shard(
                step=step,
                epoch=drawn.epoch,
                rank=self._rank,
                shard=self.index,
                ids=drawn.ids,
                loss_sum=None if loss is None else loss * max(weight, 1.0),
                weight=weight,
                finite=finite and (loss is None or loss - loss == 0),
                draws=self._draws,
                contents=contents.of_samples(self._given, len(drawn.ids)),
                gradient=gradient,
                unknown=drawn.unknown,
                made=drawn.num_made > 0,
                evaluating=self._is_evaluating,
                evaluated=self._has_evaluated,
                swapped=self.is_swapped,
                terms=self._begun.terms,
            )
        )
        self._draws, self._given, self._has_evaluated, self.is_swapped = None, [], False, False

    def within_backward(self, gradient: trace.Tensors, *, finite: bool) -> None:
        """Add the gradient of a nested pass to the micro-batch that was completed last."""
        if self.done:
            last = self.done[-1]
            total = whole_model.total([last.gradient, gradient])
            self.done[-1] = replace(last, finite=last.finite and finite, gradient=total)

    def forget_repeated(self) -> bool:
        """Forget the completed micro-batches if the next pass repeats them at different weights.

        The pass repeats them if the script has drawn no new samples. Return whether they were
        forgotten.
        """
        ids = tuple(id_ for shard in self.done for id_ in shard.ids)
        if ids and not self.samples.are_new:
            self.done.clear()
            self.samples.repeat(ids)
            return True
        return False

    def forget_evaluations(self) -> bool:
        """Forget the completed micro-batches if they evaluate the model and the next pass trains.

        An attack on the model in evaluation mode, say. Their gradients were cleared. They stay if
        the next pass has no new samples: then they may make its inputs. Return whether they were
        forgotten.
        """
        evaluate = not self._num_written and all(shard.evaluating for shard in self.done)
        if self._is_evaluating or not evaluate or not self.samples.are_new:
            return False
        if any(shard.ids for shard in self.done) and not self.samples.forget_evaluations():
            return False
        self.done.clear()
        self._has_evaluated = True
        return True

    def forget_gradients(self) -> None:
        """Forget the gradients of the completed micro-batches. Their samples still count."""
        self.done = [replace(shard, gradient={}) for shard in self.done]

    def excuse(self, *, only_unknown: bool = False) -> None:
        """Mark completed micro-batches finite, without gradients: the loss scale was too large.

        With `only_unknown`, leave those with a known gradient.
        """
        self.done = [
            shard if only_unknown and shard.gradient else replace(shard, finite=True, gradient={})
            for shard in self.done
        ]

    def clear(self) -> None:
        """Forget the completed micro-batches, and the reported losses."""
        self.done.clear()
        self._losses.clear()

    def take_ahead(self, first: int) -> list[trace.Shard]:
        """Return and forget the completed micro-batches from number `first` on."""
        place = max(0, first - self._num_written)
        ahead = self.done[place:]
        del self.done[place:]
        return ahead

    def give_ahead(self, shards: Iterable[trace.Shard], step: int) -> None:
        """Put micro-batches that `take_ahead` returned at the beginning of `step`."""
        self.done = [replace(s, step=step, shard=index) for index, s in enumerate(shards)]

    def take_losses_ahead(self) -> list[_Loss]:
        """Return and forget the reported losses of micro-batches that are not completed."""
        ahead = self._losses[len(self.done) :]
        del self._losses[len(self.done) :]
        return ahead

    def give_losses(self, losses: Iterable[_Loss]) -> None:
        """Put back losses that `take_losses_ahead` returned."""
        self._losses.extend(losses)

    def written(self) -> list[trace.Shard]:
        """Return and forget the records of the completed micro-batches, with their losses."""
        shards = list(self.done)
        if self._tells_losses:
            shards = [replace(shard, loss_sum=None) for shard in shards]
        else:
            self.has_backward_losses |= any(shard.loss_sum is not None for shard in shards)
        for index, (shard, loss) in enumerate(zip(self.done, self._losses, strict=False)):
            finite = shard.finite and loss.mean - loss.mean == 0
            shards[index] = replace(
                shards[index],
                loss_sum=loss.mean * loss.weight,
                weight=loss.weight,
                finite=finite,
                slope=loss.slope(),
            )
        self._num_written += len(shards)
        self.clear()
        return shards

    def end_step(self, num_ahead: int = 0) -> None:
        """Number the micro-batches of the next step from 0; `num_ahead` of them are completed."""
        self._num_written = 0
        self.samples.end_step(num_ahead)
