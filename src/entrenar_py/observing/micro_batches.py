"""The micro-batches of the step that a rank is in, from the forward pass to the record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from entrenar_py import trace
from entrenar_py.observing import tensors
from entrenar_py.observing.samplers import Samples
from entrenar_py.rank_files import whole_tensors


class MicroBatches:
    """Those of one step: in the forward pass, then `done` with the backward one, then written.

    Each is one backward pass, and the forward passes that led to it. Its `gradient` is what the
    pass alone added, `draws` a digest of the generators' state before dropout drew. The losses that
    a script tells, one for each, may be ahead of them. Those of all ranks are numbered when their
    files are put together.
    """

    def __init__(self, model: torch.nn.Module, rank: int, samples: Samples) -> None:
        self.done: list[trace.Shard] = []
        self.samples = samples
        self._model, self._rank = model, rank
        self._losses: list[tuple[float, float]] = []
        self._num_written = 0
        # Digests of the generators' state before the forward pass ("" for no pass), and of the same
        # if something was drawn in it.
        self._state_before = ""
        self._draws: str | None = None

    @property
    def index(self) -> int:
        """The number of the micro-batch that this rank is in, from 0."""
        return self._num_written + len(self.done)

    def tell_loss(self, value: float | Tensor, weight: float) -> None:
        """Note the mean loss of a micro-batch, over `weight` samples or tokens."""
        mean = value.detach() if isinstance(value, Tensor) else value
        self._losses.append((float(mean), float(weight)))

    def before_forward(self) -> None:
        """Note the samples of a forward pass, and the state that it draws from."""
        self.samples.collect()
        if not self._state_before:
            self._state_before = tensors.random_state(self._model)

    def after_forward(self) -> None:
        """Note whether the forward pass has drawn something."""
        before = self._state_before
        if before and self._draws is None and tensors.random_state(self._model) != before:
            self._draws = before

    def after_backward(self, step: int, gradient: trace.Tensors, *, finite: bool) -> None:
        """Note that a micro-batch of `step` is done."""
        self.samples.collect()
        self.done.append(
            trace.Shard(
                step=step,
                epoch=self.samples.epoch,
                rank=self._rank,
                shard=self.index,
                ids=tuple(self.samples.ids),
                loss_sum=None,
                weight=float(len(self.samples.ids)),
                finite=finite,
                draws=self._draws,
                gradient=gradient,
            )
        )
        self._state_before, self._draws, self.samples.ids = "", None, []

    def within_backward(self, gradient: trace.Tensors, *, finite: bool) -> None:
        """Add what a backward pass within the last one gave."""
        if self.done:
            last = self.done[-1]
            total = whole_tensors.total([last.gradient, gradient])
            self.done[-1] = replace(last, finite=last.finite and finite, gradient=total)

    def forget_repeated(self) -> None:
        """Forget those that are done, if they are about to be made again at other weights.

        No new samples were drawn then: the same ones are those of the pass that begins.
        """
        ids = [] if self.samples.ids else [id_ for shard in self.done for id_ in shard.ids]
        if ids:
            self.done.clear()
            self.samples.ids = ids

    def excuse(self) -> None:
        """Blame no micro-batch for values that are not finite: the loss scale was too large."""
        self.done = [replace(shard, finite=True, gradient={}) for shard in self.done]

    def clear(self) -> None:
        """Forget what was noted of passes that have no effect: a closure is run again."""
        self.done.clear()
        self._losses.clear()

    def take_losses_ahead(self) -> list[tuple[float, float]]:
        """Return the losses of passes that are not done, and forget them."""
        ahead = self._losses[len(self.done) :]
        del self._losses[len(self.done) :]
        return ahead

    def give_losses(self, losses: Iterable[tuple[float, float]]) -> None:
        """Note losses that were taken."""
        self._losses.extend(losses)

    def written(self) -> list[trace.Shard]:
        """Return the records of those that are done, with their losses, and forget them."""
        shards = list(self.done)
        for index, (shard, (mean, weight)) in enumerate(zip(self.done, self._losses, strict=False)):
            finite = shard.finite and mean - mean == 0
            shards[index] = replace(shard, loss_sum=mean * weight, weight=weight, finite=finite)
        self._num_written += len(shards)
        self.clear()
        return shards

    def end_step(self) -> None:
        """Count from 0 again."""
        self._num_written = 0
