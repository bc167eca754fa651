"""Records a training script by torch's own hooks, and plants in it what is to go wrong."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entrenar_py import trace
from entrenar_py.observing import (
    FOLDER,
    Observation,
    arguments,
    backward,
    dtensors,
    grad_scaler,
    tensors,
    unsharded_parameters,
)
from entrenar_py.observing.backward import BackwardPass, Unwritten
from entrenar_py.observing.buffers import Buffers
from entrenar_py.observing.closures import Arguments, looked_at
from entrenar_py.observing.fault_timing import Strikes
from entrenar_py.observing.gradients_ready import Passes
from entrenar_py.observing.outer_synchronisation import Together
from entrenar_py.observing.reduced_gradients import Summed
from entrenar_py.observing.samplers import Samples
from entrenar_py.observing.subject import Subject
from entrenar_py.rank_files import rank_file
from entrenar_py.rank_files.rank_file import RankFile


class Observer(Observation):
    """One rank's. Steps are those of the optimizers, micro-batches backward passes.

    What a rank starts from is recorded when it first goes forward: a wrapper may have changed it
    until then. Of several optimizers a step is over when each has made one, or one makes another.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        sampler: Any = None,
        scheduler: Any = None,
        step: int = 0,
        layout: Any = None,
        tied: Iterable[Iterable[str]] = (),
    ) -> None:
        self._rank, world_size = rank_file.environment_rank()
        self._optimizers = arguments.optimizers(model, optimizer)
        self._subject = Subject(
            model,
            self._optimizers,
            declared=dtensors.declared(layout, tied, world_size),
            world_size=world_size,
        )
        self._model, self._step = self._subject.model, arguments.steps("step", step, least=0)
        self._buffers = Buffers(self._model)
        self._scheduler = scheduler
        self._constants = tensors.constants(self._optimizers)
        self._samples = Samples(sampler)
        self._strikes = Strikes(self._rank, self._place, self._write)
        self._started = False
        self._passes = Unwritten()
        self._summed = Summed()
        self._compression = ""
        self._sharded = unsharded_parameters.BackwardPasses(
            self._before_backward, self._after_sharded_backward
        )
        # The generators' state before the forward pass; the same again if something was drawn.
        self._random: tuple[str, str | None] = ("", None)
        self._gradient: dict[str, trace.TensorRecord] = {}
        self._norm: float | None = None  # before clipping, where the script says when that is
        self._applied_norm: float | None = None
        self._stepped: set[int] = set()  # optimizers, in this step
        self._together = Together(self._rank)
        self._file = RankFile(
            Path(os.environ[FOLDER]),
            {
                "rank": self._rank,
                "world_size": world_size,
                "pid": os.getpid(),
                "values": self._subject.values,
                "versions": {"torch": str(torch.__version__)},
                **self._samples.facts(),
                **tensors.facts(self._model, self._optimizers),
            },
        )
        self._hook()
        # Written by a signal's handler, wherever this process waits: a run that hangs is asked.
        self._stack = self._file.stack.open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stack)
        atexit.register(self._leave)

    # --- what the script tells --------------------------------------------------------------------

    def samples(self, ids: Iterable[int], *, epoch: int | None = None) -> None:
        self._samples.tell(ids, epoch)

    def loss(self, value: float | Tensor, weight: float) -> None:
        mean = value.detach() if isinstance(value, Tensor) else value
        self._passes.losses.append((float(mean), float(weight)))

    def skipped(self) -> None:
        if self._passes.made:
            self._skip_step()

    def reduced(self) -> None:
        gradients = self._subject.gradients()
        self._gradient = dict(self._subject.record(gradients))
        self._norm = tensors.norm(gradients.values())

    def halted(
        self,
        reason: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        micro_batch: int | None = None,
        tensor: str | None = None,
        ids: Iterable[int] = (),
    ) -> None:
        self._write_shards()
        halt = trace.Halt(
            step=self._step if step is None else step,
            reason=reason,
            rank=rank,
            shard=micro_batch,
            tensor=tensor,
            ids=tuple(map(int, ids)),
        )
        self._write([halt])

    def synchronised(self, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> None:
        held, step = self._buffers.held(), self._step - 1
        self._write([self._together.event(self._subject, optimizer, weights, held, step)])

    def close(self) -> None:
        super().close()
        if self._passes.made and self._summed.has_overflowed():
            self._skip_step()
        self._end_step()
        self._file.close()
        for handle in (*self._handles, *self._parameter_handles):
            handle.remove()
        faulthandler.unregister(signal.SIGUSR1)
        self._stack.close()
        atexit.unregister(self._leave)

    # --- what torch tells -------------------------------------------------------------------------

    def _hook(self) -> None:
        # The first of all: what others do before a forward pass changes the parameters.
        self._first = self._model.register_forward_pre_hook(
            lambda *_: self._before_forward(), prepend=True
        )
        self._handles: list[Any] = [
            self._model.register_forward_hook(lambda *called: self._after_forward(called[-1])),
            *(
                hooked
                for index, optimizer in enumerate(self._optimizers)
                for hooked in (
                    optimizer.register_step_pre_hook(partial(self._step_begins, index)),
                    optimizer.register_step_post_hook(partial(self._after_step, index)),
                )
            ),
        ]
        self._parameter_handles: list[Any] = []
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        for handle in self._parameter_handles:
            handle.remove()
        # Before the hook that records them: gradients are recorded as they were made wrong.
        self._parameter_handles = self._strikes.hooks(self._subject)
        self._backward: unsharded_parameters.BackwardPasses | Passes = self._sharded
        if self._subject.is_fully_sharded:
            self._parameter_handles += self._sharded.watch(self._model)
            return
        trained = list(self._subject.trained.values())
        self._backward = Passes(trained, self._before_backward, self._after_backward, self._add)
        self._parameter_handles.append(self._backward)

    def _place(self) -> tuple[int, int]:
        """The step, and the micro-batch of this rank."""
        return self._step, self._passes.num_written + len(self._passes.made)

    def _before_forward(self) -> None:
        self._buffers.before_forward()
        if not (self._model.training and torch.is_grad_enabled()):
            return
        if next(iter(self._model._forward_pre_hooks)) == self._first.id:
            self._start()
        else:  # wrapped since: seen when its parameters are its own again, at the step at last
            self._first.remove()
            self._first = self._model.register_forward_pre_hook(
                lambda *_: self._before_forward(), prepend=True
            )
        self._summed.expect()
        if self._compression != (compression := backward.compression()):
            self._compression = compression
            self._file.compress(compression)
        self._samples.collect()
        if not self._random[0]:
            self._random = (tensors.random_state(self._model), None)

    def _after_forward(self, output: Any) -> None:
        if (local := self._buffers.after_forward()) is not None:
            self._file.leave_out(local)
        before, drawn = self._random
        if before and drawn is None and tensors.random_state(self._model) != before:
            self._random = (before, before)
        if self._model.training:
            sharded = dtensors.is_fully_sharded(self._model)
            (self._sharded if sharded else self._backward).expect(output)

    def _before_backward(self) -> None:
        """Looks whether gradients of passes before are gone, and no optimizer was asked to step."""
        self._samples.collect()
        if not self._passes.made or self._subject.has_gradients():
            return
        if (
            self._summed.was_reduced and not self._samples.ids
        ):  # the same again, at other weights: only this pass counts
            self._samples.ids = self._passes.made_again()
        if self._passes.made and self._summed.has_overflowed():
            self._skip_step()

    def _after_sharded_backward(self, finite: bool) -> None:
        self._start()
        self._end_micro({}, finite=finite)
        self._look_at_sum()

    def _after_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self._start()
        named = dict(zip(self._subject.trained, gradients, strict=True))
        records = self._subject.record(named) if self._subject.values else {}
        self._end_micro(records, finite=tensors.is_finite(gradients))
        backward.call_last(self._look_at_sum)

    def _add(self, gradients: Sequence[Tensor | None]) -> None:
        """What a pass within a backward pass adds to that one's."""
        named = dict(zip(self._subject.trained, gradients, strict=True))
        records = self._subject.record(named) if self._subject.values else {}
        self._passes.add(records, finite=tensors.is_finite(gradients))
        backward.call_last(self._look_at_sum)

    def _look_at_sum(self) -> None:
        self._summed.look(self._subject.gradients().values())

    def _skip_step(self) -> None:
        """Gradients that were not finite are gone, and no optimizer was asked to step: as a
        `GradScaler` does whose scale was too large. That is a step that moves nothing.
        """
        ahead = self._passes.losses[len(self._passes.made) :]  # of a pass that is about to begin
        self._excuse()
        self._stepped.add(0)
        self._end_step()
        self._passes.losses.extend(ahead)

    def _excuse(self) -> None:
        """Only the scale is known to be at fault; of a loss or a planted value it is told."""
        self._passes.excuse()
        self._gradient, self._norm = {}, None

    def _end_micro(self, records: trace.Tensors, *, finite: bool) -> None:
        self._samples.collect()
        self._passes.made.append(
            BackwardPass(
                epoch=self._samples.epoch,
                ids=tuple(self._samples.ids),
                draws=self._random[1],
                finite=finite,
                gradient=records,
            )
        )
        self._random, self._samples.ids = ("", None), []
        if not self._file.life:  # else it has died before, and was started again
            self._strikes.perhaps_die()

    def _step_begins(self, index: int, _: Any, *called: Any) -> Arguments | None:
        kept = (self._passes.made, self._passes.losses)
        return looked_at(partial(self._before_step, index), kept, *called)

    def _before_step(self, index: int) -> None:
        self._start()
        if index in self._stepped:
            self._end_step()
        optimizer, due = self._optimizers[index], list[str]()
        if grad_scaler.has_overflowed(optimizer):
            self._excuse()
        else:
            due = self._subject.stepped_by(index, alone=not self._stepped)
        self._write_shards()
        gradients = grad_scaler.unscaled(self._subject.gradients(), optimizer)
        if self._norm is None:
            self._gradient |= self._subject.record({name: gradients[name] for name in due})
        elif not self._stepped:
            self._applied_norm = tensors.norm(gradients.values())

    def _write_shards(self) -> None:
        self._write(self._passes.taken(step=self._step, rank=self._rank))

    def _after_step(self, index: int, *_: Any) -> None:
        self._stepped.add(index)
        if len(self._stepped) == len(self._optimizers):
            self._end_step()

    def _end_step(self) -> None:
        """Records what the optimizers made of it, if any did."""
        if not self._stepped:
            return
        self._write_shards()
        if self._constants != tensors.constants(self._optimizers):
            self._constants = tensors.constants(self._optimizers)
            self._file.change()
        made = self._subject.update(self._step, self._rank, self._gradient, self._buffers.held())
        made = replace(made, grad_norm=self._norm, applied_norm=self._applied_norm)
        self._write([made])
        self._stepped.clear()
        self._gradient = {}
        self._together.stepped()
        self._norm = self._applied_norm = None
        self._passes.num_written = 0
        self._summed.forget()
        self._step += 1

    # --- what is recorded -------------------------------------------------------------------------

    def _write(self, events: Sequence[trace.Event]) -> None:
        """Behind what is new of where the pieces lie that `events` have."""
        if (news := self._subject.news()) is not None:
            self._file.arrange(news)
        self._file.append(events)

    def _start(self) -> None:
        if self._subject.look_up():
            self._hook_parameters()
        if self._started:
            return
        self._started = True
        progress = tensors.progress(self._scheduler)
        held = self._buffers.held()
        self._write([self._subject.start(self._step, self._rank, progress, held)])

    def _leave(self) -> None:
        """The process ends by itself, well or by an exception."""
        error = getattr(sys, "last_value", None)
        self._file.close("" if error is None else f"{type(error).__name__}: {error}")
