"""What the harness plans for this rank: faults, learning rates, and an early end.

A fault plants a value in a tensor, moves weights, or kills the process.

The planned learning rates are those of another run. If a script's batch size is that of a worker,
its learning rate, or the length of its schedule, may rightly depend on the number of workers. Then
a run on one worker that loads the batches of all workers would train differently. So it uses the
learning rates of the run on several workers, and everything else can be compared. It also uses the
other constants that a schedule may change (the momentum of a cycle). For each step, the harness
writes to a file the rate of the first parameter group, the rates of tensors with a different one,
and the constants of each group under the name of its first tensor. The script's own values are
restored after each step, since a schedule may continue from them.

An early end: the process ends before a planned step, as if the job had been stopped. With a smaller
{steps} a script may train differently even before it stops, because its schedule may depend on that
number. So the harness keeps the usual {steps}, and the process ends itself.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from entrenar_py.check.observing import (
    FAULTS,
    FOLDER,
    RATES,
    STOP,
    flat_parameters,
    module_hooks,
    tensors,
)
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import hook_calls, trace
from entrenar_py.shared.faults import LASTING, NUDGED, OF_THE_START, PLANTED, Fault

# How many steps an optimizer (of a critic, say) may take alone before the first pass through its
# parameters.
_WAITS = 3


def planned() -> list[Fault]:
    """Return the faults that the harness planned for this process."""
    return [Fault.from_dict(fields) for fields in json.loads(os.environ.get(FAULTS, "[]"))]


def begin() -> None:
    """Begin the planned faults that need it before the script's first line."""
    for fault in planned():
        if fault.kind in OF_THE_START:
            importlib.import_module(f"entrenar_py.check.observing.{fault.kind}").begin()


class PlannedFaults:
    """Carries out the faults that the harness planned for this process, each once.

    `place` returns the step and the micro-batch of this rank. Its argument is the names of the
    tensors that the current backward pass has reached, if there is one.

    A pass that reaches a tensor after the tensor's optimizer has stepped usually belongs to the
    next step. It may not if other optimizers have yet to step: a generator's pass goes through the
    discriminator, and trains nothing there. So a value is planted in a pass that precedes the
    tensor's step, even if this means waiting for a later step. The wait ends after a few steps if
    one optimizer takes all steps, and no pass through already stepped tensors was seen.
    """

    def __init__(
        self,
        subject: Subject,
        place: Callable[..., tuple[int, int]],
        write: Callable[[Sequence[trace.Event]], None],
    ) -> None:
        self._subject, self._place, self._write = subject, place, write
        self._faults = planned()
        self._struck: dict[Fault, int] = {}  # and in which step
        # Tensor name -> number of passes that gave it a gradient.
        self._passes: Counter[str] = Counter()
        self._saw_probe = False

    def hooks(self) -> list[Any]:
        """Set the hooks that plant the values of this rank's faults; return the hooks."""
        plant = {
            "non_finite_gradient": self._spoil_gradient,
            "huge_gradient": self._spoil_gradient,
            "non_finite_loss": self._spoil_loss,
        }
        trained = self._subject.trained
        return [
            handle
            for fault in self._faults
            if fault.kind in plant
            and fault.rank in (None, self._subject.rank)
            and trained
            # Otherwise the tensor is in another pipeline stage.
            and fault.tensor in (None, *trained)
            for handle in plant[fault.kind](fault)
        ]

    def perhaps_die(self) -> None:
        """Kill this process if a fault is planned for this step, after recording the fault."""
        step, rank = self._place()[0], self._subject.rank
        for fault in self._faults:
            if fault.kind == "leave" and (fault.rank, fault.step) == (rank, step):
                reason = "killed (SIGKILL)"
                left = trace.Membership(step=step, rank=rank, change="left", reason=reason)
                self._write([trace.Injected(fault=fault.to_dict(), step=step, rank=rank), left])
                os.kill(os.getpid(), signal.SIGKILL)

    def perhaps_nudge(self) -> None:
        """Move the weights by a few rounding units if a fault is planned for this step.

        All ranks move copies of a weight in the same way. The states of the script's generators
        don't change.
        """
        for fault in self._faults:
            if fault.kind == NUDGED and self._strikes(fault):
                for name, weights in self._subject.own_weights().items():
                    _nudge(name, weights, float(fault.value or 0))

    def note_lasting(self) -> None:
        """Record the faults that began before training: changes of draws, samples or step count.

        If an optimizer steps copies of the weights, the record begins in the first step.
        """
        for fault in self._faults:
            if fault.kind in LASTING and fault not in self._struck:
                self._record(fault)

    def note_probe(self) -> None:
        """Called for a pass through tensors that have already taken the current step."""
        self._saw_probe = True

    def strike_again(self) -> None:
        """Called when the passes since the last step turn out to train nothing, as an evaluation.

        What was planted in one of them is planted in the next pass: there it shows something.
        """
        step = self._place()[0]
        for fault in [one for one, struck in self._struck.items() if struck == step]:
            if fault.kind in PLANTED:
                del self._struck[fault]

    def _strikes(self, fault: Fault, reached: Collection[str] = ()) -> bool:
        """Return whether `fault` takes effect now, and if so record it.

        It does once, in its step and its shard (a micro-batch of this rank).
        """
        step, shard = self._place(reached)
        if (
            not self._is_due(fault, step, reached)
            or fault.shard not in (None, shard)
            or fault in self._struck
        ):
            return False
        self._record(fault, reached)
        return True

    def _is_due(self, fault: Fault, step: int, reached: Collection[str]) -> bool:
        if not reached:
            return fault.step == step
        is_ahead = step != self._place()[0]
        if is_ahead and self._saw_probe:
            return False
        return step >= (fault.step or 0) + (_WAITS if is_ahead else 0)

    def _record(self, fault: Fault, reached: Collection[str] = ()) -> None:
        (step, shard), fields, rank = self._place(reached), fault.to_dict(), self._subject.rank
        self._struck[fault] = step
        self._write([trace.Injected(fault=fields, step=step, rank=rank, shard=shard)])

    def _spoil_gradient(self, fault: Fault) -> list[Any]:
        """Plant a value in this rank's own gradient of a tensor, before ranks reduce it."""
        subject = self._subject

        @hook_calls.ours
        def spoil(name: str, gradient: Tensor) -> Tensor | None:
            if name != (fault.tensor or self._to_strike(fault, name)):
                return None
            place = _element(subject, name, fault, gradient)
            if place is None or not self._strikes(fault, (name,)):
                return None
            spoiled = tensors.copied(gradient)
            if spoiled.is_sparse:
                spoiled = tensors.local(spoiled).clone()
            tensors.local(spoiled)[place] = float(fault.value or "nan")
            return spoiled.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else spoiled

        def hook(name: str, parameter: Tensor) -> Any:
            return parameter.register_hook(partial(spoil, name))  # type: ignore[no-untyped-call]

        if subject.is_fully_sharded:
            return flat_parameters.when_whole(subject.model, hook)
        return [hook(*named) for named in subject.trained.items()]

    def _to_strike(self, fault: Fault, reached: str) -> str:
        """Return the tensor to change: the first one, or `reached` if passes don't reach the first.

        Until the fault's step, count how many passes reach each tensor.
        """
        if self._place((reached,))[0] != fault.step:
            self._passes[reached] += 1
        first = self._subject.first_held()
        is_used = self._passes[first] == max(self._passes.values(), default=0)
        return first if is_used else reached

    def _spoil_loss(self, fault: Fault) -> list[Any]:
        """Plant a value in the model's output, but leave the output's gradient unchanged."""

        def spoil(_module: Any, _inputs: Any, output: Any) -> Tensor | None:
            if not (isinstance(output, Tensor) and self._strikes(fault)):
                return None
            return output + (float(fault.value or "nan") - output.detach())

        model = self._subject.model
        called = [model, *module_hooks.around([model])[model]]
        return [module.register_forward_hook(hook_calls.outside(spoil)) for module in called]


@torch.no_grad()
def _nudge(name: str, weights: Tensor, share: float) -> None:
    if not (weights.is_floating_point() or weights.is_complex()):
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(0, 2, weights.shape, generator=generator, dtype=torch.int8)
    # Compute this in float32: in a 16-bit dtype 1 + share may be rounded to 1.
    weights.mul_((2 * share * signs.to(weights.device, torch.float32)).add_(1 - share))


def _element(subject: Subject, name: str, fault: Fault, gradient: Tensor) -> tuple[int, ...] | None:
    """Return the index of the element to replace in this rank's part of a gradient.

    Without `fault.element`, that is the first element of the rank's piece. The result is None if
    this rank doesn't have the element, and () for a gradient without dimensions.
    """
    piece = subject.pieces.get(name) if isinstance(gradient, DTensor) else None
    shape = tensors.local(gradient).shape if piece is None else piece.shape
    if fault.element is None:
        place = [0] * len(shape)
    else:
        whole = shape if piece is None else piece.whole
        if fault.element >= math.prod(whole):
            return None
        place = [int(index) for index in torch.unravel_index(torch.tensor(fault.element), whole)]
        if piece is not None:
            place = [at - begin for at, begin in zip(place, piece.offset, strict=True)]
    if not all(0 <= at < size for at, size in zip(place, shape, strict=True)):
        return None
    if piece is not None and tensors.piece_of(gradient) is None:  # the gradient is whole
        place = [at + begin for at, begin in zip(place, piece.offset, strict=True)]
    return tuple(place)


class PlannedRates:
    """Sets the planned learning rates in each step of a single optimizer.

    With several optimizers it sets nothing, since the rates depend on the order of their steps.
    """

    def __init__(self, subject: Subject) -> None:
        file = os.environ.get(RATES) if len(subject.optimizers) == 1 else None
        self._rates = json.loads(Path(file).read_text("utf-8")) if file else {}
        self._subject = subject
        self._own: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def begin_step(self, number: int) -> None:
        """Set the learning rates planned for step `number`, if each group has one.

        A step without a plan keeps the script's own rates.
        """
        self.end_step()
        if str(number) not in self._rates:
            return
        first, others, constants = self._rates[str(number)]
        for group in self._subject.optimizers[0].param_groups:
            rates = {others.get(name, first) for name in self._names(group)}
            # Its tensors have several rates, or the group has no rate of its own.
            if len(rates) != 1 or "lr" not in group:
                self.end_step()
                return
            rate = rates.pop()
            self._own.append((group, {**group}))
            own = group["lr"]
            group["lr"] = torch.full_like(own, rate) if isinstance(own, Tensor) else rate
            for key, value in constants.get(self._names(group)[0], {}).items():
                if key in group and not isinstance(group[key], Tensor):
                    group[key] = tuple(value) if isinstance(value, list) else value

    def end_step(self) -> None:
        """Restore the values that the script had set."""
        for group, own in self._own:
            group.update(own)
        self._own = []

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        return [name for p in group["params"] for name in self._subject.names_of(p)]


PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.01


class PlannedStop:
    """Ends this process before a step, if the harness planned that for this launch.

    By then the script has written the checkpoints of all earlier steps. A rank waits at most
    PATIENCE_S until the other ranks have reached the step, so that none is killed while it writes a
    checkpoint.

    The plan is `6`, or `6 from 3` for a process that should continue after 3 steps. If such a
    process doesn't report the step with which it `begins`, its steps are counted from 0, and it
    ends before its fourth step.
    """

    def __init__(self, rank: int, world_size: int, *, begins: int = 0) -> None:
        planned, _, made = os.environ.get(STOP, "").partition(" from ")
        ahead = int(made) if made and not begins else 0
        self._step = int(planned) - ahead if planned else None
        self._rank, self._world_size = rank, world_size

    def perhaps_end(self, step: int, micro_batch: int) -> None:
        """End the process, with exit code 0, if this is the planned step or a later one."""
        if self._step is None or step < self._step or micro_batch:
            return
        folder = Path(os.environ[FOLDER])
        (folder / f"{self._rank:05}.before-{self._step}").touch()
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if len([*folder.glob(f"*.before-{self._step}")]) >= self._world_size:
                break
            time.sleep(_LOOK_EVERY_S)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)
