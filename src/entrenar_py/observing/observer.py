"""Records a training script by torch's own hooks, and plants in it what is to go wrong."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entrenar_py import trace
from entrenar_py.faults import Fault
from entrenar_py.observing import FAULTS, FOLDER, Observation, rank_file, tensors
from entrenar_py.observing.draws import Draws
from entrenar_py.observing.rank_file import RankFile


@dataclass(kw_only=True)
class _MicroBatch:
    """What is known of one backward pass."""

    epoch: int
    ids: tuple[int, ...]
    draws: str | None
    finite: bool
    gradient: trace.Tensors
    loss: tuple[float, float] | None = None  # mean, weight


class Observer(Observation):
    """One rank's. Steps are those of the optimizer, micro-batches backward passes.

    What a rank starts from is recorded when it first goes forward: a wrapper may have changed it
    until then.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sampler: Any = None,
        step: int = 0,
    ) -> None:
        self._model, self._optimizer, self._step = tensors.unwrapped(model), optimizer, step
        tensors.require_whole(self._model)
        self._parameters = dict(self._model.named_parameters())
        self._trained = {n: p for n, p in self._parameters.items() if p.requires_grad}
        self._names: dict[Tensor, str] = {p: name for name, p in self._parameters.items()}
        num_elements = sum(one.numel() for one in self._parameters.values())
        self._values = num_elements <= tensors.VALUES_MAX
        self._draws = None if sampler is None else Draws(sampler)
        self._faults = [Fault.from_dict(one) for one in json.loads(os.environ.get(FAULTS, "[]"))]
        self._rank, world_size = rank_file.environment_rank()
        self._started = False
        self._ids: list[int] = []  # of the forward passes since the last backward
        self._epoch = 0
        self._told: list[int] | None = None  # samples, by the script
        self._losses: list[tuple[float, float]] = []
        self._micros: list[_MicroBatch] = []
        # The generators' state before the forward pass; the same again if something was drawn.
        self._random: tuple[str, str | None] = ("", None)
        self._gradient: trace.Tensors = {}
        self._norm: float | None = None  # before clipping, where the script says when that is
        self._applied_norm: float | None = None
        self._file = RankFile(
            Path(os.environ[FOLDER]),
            {
                "rank": self._rank,
                "world_size": world_size,
                "pid": os.getpid(),
                "values": self._values,
                "num_samples": None if self._draws is None else self._draws.num_samples,
                "drop_last": self._draws is not None and self._draws.drop_last,
                "versions": {"torch": str(torch.__version__)},
                **tensors.facts(self._model, optimizer),
            },
        )
        self._hook()
        # Written by a signal's handler, wherever this process waits: a run that hangs is asked.
        self._stack = self._file.stack.open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stack)
        atexit.register(self._leave)

    # --- what the script tells --------------------------------------------------------------------

    def samples(self, ids: Iterable[int], *, epoch: int | None = None) -> None:
        self._told = [*(self._told or []), *map(int, ids)]
        self._epoch = self._epoch if epoch is None else epoch

    def loss(self, value: float | Tensor, weight: float) -> None:
        mean = value.detach() if isinstance(value, Tensor) else value
        self._losses.append((float(mean), float(weight)))

    def reduced(self) -> None:
        gradients = self._gradients()
        self._gradient, self._norm = self._records(gradients), tensors.norm(gradients.values())

    def halted(
        self,
        reason: str,
        *,
        rank: int | None = None,
        micro_batch: int | None = None,
        tensor: str | None = None,
        ids: Iterable[int] = (),
    ) -> None:
        self._write_shards()
        halt = trace.Halt(
            step=self._step,
            reason=reason,
            rank=rank,
            shard=micro_batch,
            tensor=tensor,
            ids=tuple(map(int, ids)),
        )
        self._file.append([halt])

    def close(self) -> None:
        super().close()
        self._file.close()
        for handle in self._handles:
            handle.remove()
        faulthandler.unregister(signal.SIGUSR1)
        self._stack.close()
        atexit.unregister(self._leave)

    # --- what torch tells -------------------------------------------------------------------------

    def _hook(self) -> None:
        self._handles: list[Any] = [
            self._model.register_forward_pre_hook(lambda *_: self._before_forward()),
            self._model.register_forward_hook(lambda *_: self._after_forward()),
            # Before the hook that records them: gradients are recorded as they were made wrong.
            *(_HOOKS[one.kind](self, one) for one in self._faults if self._strikes_here(one)),
            torch.autograd.graph.register_multi_grad_hook(
                list(self._trained.values()), self._after_backward, mode="all"
            ),
            self._optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            self._optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def _strikes_here(self, fault: Fault) -> bool:
        return fault.kind in _HOOKS and fault.rank in (None, self._rank)

    def _strikes_now(self, fault: Fault) -> bool:
        """Whether `fault` is of this micro-batch: a shard is one of this rank, of this step."""
        return fault.step == self._step and fault.shard in (None, len(self._micros))

    def _spoil_gradient(self, fault: Fault) -> Any:
        name, element = fault.tensor or next(iter(self._trained)), fault.element or 0

        def spoil(gradient: Tensor) -> Tensor | None:
            if not self._strikes_now(fault):
                return None
            self._note_fault(fault)
            spoiled = gradient.clone()
            spoiled.view(-1)[element] = float(fault.value or "nan")
            return spoiled

        return self._trained[name].register_hook(spoil)  # type: ignore[no-untyped-call]

    def _spoil_loss(self, fault: Fault) -> Any:
        def spoil(_module: Any, _inputs: Any, output: Any) -> Tensor | None:
            if not (isinstance(output, Tensor) and self._strikes_now(fault)):
                return None
            self._note_fault(fault)
            # The value of the output alone: its gradient stays.
            return output + (float(fault.value or "nan") - output.detach())

        return self._model.register_forward_hook(spoil)

    def _note_fault(self, fault: Fault) -> None:
        event = trace.Injected(
            fault=fault.to_dict(), step=self._step, rank=self._rank, shard=len(self._micros)
        )
        self._file.append([event])

    def _before_forward(self) -> None:
        if not self._model.training:
            return
        self._start()
        self._collect()
        if not self._random[0]:
            self._random = (tensors.random_state(self._model), None)

    def _after_forward(self) -> None:
        before, drawn = self._random
        if before and drawn is None and tensors.random_state(self._model) != before:
            self._random = (before, before)

    def _after_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self._start()
        named = dict(zip(self._trained, gradients, strict=True))
        self._collect()
        self._micros.append(
            _MicroBatch(
                epoch=self._epoch,
                ids=tuple(self._ids),
                draws=self._random[1],
                finite=tensors.is_finite(iter(gradients)),
                gradient=self._records(named) if self._values else {},
            )
        )
        self._random, self._ids = ("", None), []
        self._perhaps_die()

    def _before_step(self) -> None:
        self._start()
        self._write_shards()
        gradients = self._gradients()
        if self._norm is None:
            self._gradient = self._records(gradients)
        else:
            self._applied_norm = tensors.norm(gradients.values())

    def _after_step(self) -> None:
        self._file.append(
            [
                trace.Update(
                    step=self._step,
                    rank=self._rank,
                    loss=None,
                    weight=0.0,  # of all ranks together: known when their files are
                    learning_rate=float(self._optimizer.param_groups[0]["lr"]),
                    finite=tensors.is_finite(iter(self._parameters.values())),
                    gradient=self._gradient,
                    grad_norm=self._norm,
                    applied_norm=self._applied_norm,
                    weights=self._records(self._parameters),
                    optimizer=self._optimizer_state(),
                )
            ]
        )
        self._step += 1
        self._norm = self._applied_norm = None

    def _perhaps_die(self) -> None:
        """Kills this process if that is planned here; once, since it may be started again."""
        for fault in self._faults:
            if fault.kind != "leave" or self._file.life:
                continue
            if (fault.rank, fault.step) == (self._rank, self._step):
                place = {"step": self._step, "rank": self._rank}
                gone = trace.Membership(**place, change="left", reason="killed (SIGKILL)")
                self._file.append([trace.Injected(fault=fault.to_dict(), **place), gone])
                os.kill(os.getpid(), signal.SIGKILL)

    # --- what is recorded -------------------------------------------------------------------------

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        groups = self._optimizer.param_groups
        decayed = {p for group in groups if group.get("weight_decay") for p in group["params"]}
        start = trace.Start(
            step=self._step,
            rank=self._rank,
            trainable=tuple(self._trained),
            frozen=tuple(name for name in self._parameters if name not in self._trained),
            decayed=tuple(name for name, p in self._parameters.items() if p in decayed),
            resumed=self._step > 0,
            weights=self._records(self._parameters),
            optimizer=self._optimizer_state(),
        )
        self._file.append([start])

    def _write_shards(self) -> None:
        for micro, loss in zip(self._micros, self._losses, strict=False):
            micro.loss = loss
        self._file.append(map(self._shard, range(len(self._micros)), self._micros))
        self._micros.clear()
        self._losses.clear()

    def _gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self._trained.items()}

    def _optimizer_state(self) -> trace.Tensors:
        return self._records(dict(tensors.optimizer_state(self._optimizer, self._names)))

    def _records(self, named: Mapping[str, Tensor | None]) -> trace.Tensors:
        return {
            name: tensors.record(tensor, values=self._values)
            for name, tensor in named.items()
            if tensor is not None
        }

    def _collect(self) -> None:
        """Notes the samples of a forward pass; a batch that none was made of was skipped."""
        if self._told is not None:
            self._ids += self._told
            self._told = None
        elif self._draws is not None:
            epoch, ids = self._draws.take()
            self._ids += ids
            self._epoch = epoch if ids else self._epoch

    def _shard(self, index: int, micro: _MicroBatch) -> trace.Shard:
        mean, weight = (None, len(micro.ids)) if micro.loss is None else micro.loss
        return trace.Shard(
            step=self._step,
            epoch=micro.epoch,
            rank=self._rank,
            shard=index,  # of this rank: all are numbered when their files are put together
            ids=micro.ids,
            loss_sum=None if mean is None else mean * weight,
            weight=float(weight),
            finite=micro.finite and (mean is None or mean - mean == 0),
            draws=micro.draws,
            gradient=micro.gradient,
        )

    def _leave(self) -> None:
        """The process ends by itself, well or by an exception."""
        error = getattr(sys, "last_value", None)
        self._file.close("" if error is None else f"{type(error).__name__}: {error}")


# What a planted value does, by its kind.
_HOOKS: dict[str, Callable[[Observer, Fault], Any]] = {
    "non_finite_gradient": Observer._spoil_gradient,
    "huge_gradient": Observer._spoil_gradient,
    "non_finite_loss": Observer._spoil_loss,
}
