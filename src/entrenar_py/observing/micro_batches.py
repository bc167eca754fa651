"""The micro-batches of the step that a rank is in, from the forward pass to the record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from entrenar_py import trace
from entrenar_py.observing import tensors
from entrenar_py.observing.samplers import Samples
from entrenar_py.rank_files import whole_tensors


@dataclass(kw_only=True)
class MicroBatch:
    """One backward pass, and the forward passes that led to it.

    `draws` is a digest of the generators' state before dropout drew, None if nothing was drawn;
    `gradient` is what the pass alone added.
    """

    epoch: int
    ids: tuple[int, ...]
    draws: str | None
    finite: bool
    gradient: trace.Tensors

    def add(self, gradient: trace.Tensors, *, finite: bool) -> None:
        """Add what a backward pass within this one gave."""
        both = self.gradient.keys() & gradient.keys()
        sums = whole_tensors.total(
            {name: terms[name] for name in both} for terms in (self.gradient, gradient)
        )
        self.finite = self.finite and finite
        self.gradient = {**self.gradient, **gradient, **sums}

    def shard(
        self, *, step: int, rank: int, index: int, loss: tuple[float, float] | None
    ) -> trace.Shard:
        """Return its record, as micro-batch `index` of this rank in `step`.

        `loss` is a mean and its weight. Micro-batches of all ranks are numbered when their files
        are put together.
        """
        mean, weight = (None, len(self.ids)) if loss is None else loss
        return trace.Shard(
            step=step,
            epoch=self.epoch,
            rank=rank,
            shard=index,
            ids=self.ids,
            loss_sum=None if mean is None else mean * weight,
            weight=float(weight),
            finite=self.finite and (mean is None or mean - mean == 0),
            draws=self.draws,
            gradient=self.gradient,
        )


class MicroBatches:
    """Those of one step: in the forward pass, then `done` with the backward one, then written.

    The losses that a script tells, one for each, may be ahead of them.
    """

    def __init__(self, model: torch.nn.Module, samples: Samples) -> None:
        self.done: list[MicroBatch] = []
        self.samples = samples
        self._model = model
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

    def after_backward(self, gradient: trace.Tensors, *, finite: bool) -> None:
        """Note that a micro-batch is done."""
        self.samples.collect()
        self.done.append(
            MicroBatch(
                epoch=self.samples.epoch,
                ids=tuple(self.samples.ids),
                draws=self._draws,
                finite=finite,
                gradient=gradient,
            )
        )
        self._state_before, self._draws, self.samples.ids = "", None, []

    def forget_repeated(self) -> None:
        """Forget those that are done, if they are about to be made again at other weights.

        No new samples were drawn then: the same ones are those of the pass that begins.
        """
        ids = [] if self.samples.ids else [id_ for micro in self.done for id_ in micro.ids]
        if ids:
            self.done.clear()
            self.samples.ids = ids

    def excuse(self) -> None:
        """Blame no micro-batch for values that are not finite: the loss scale was too large."""
        for micro in self.done:
            micro.finite, micro.gradient = True, {}

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

    def written(self, *, step: int, rank: int) -> list[trace.Shard]:
        """Return the records of those that are done, with their losses, and forget them."""
        losses = dict(enumerate(self._losses))
        shards = [
            micro.shard(step=step, rank=rank, index=self._num_written + n, loss=losses.get(n))
            for n, micro in enumerate(self.done)
        ]
        self._num_written += len(shards)
        self.clear()
        return shards

    def end_step(self) -> None:
        """Count from 0 again."""
        self._num_written = 0
