"""Records a training script with torch's own hooks, and plants faults in it."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from entrenar_py.check.observing import (
    Observation,
    arguments,
    borders,
    checkpoints,
    common_numbers,
    declarations,
    flat_parameters,
    language,
    replayed_batches,
    sources,
    step_in_work,
    surroundings,
    tensors,
)
from entrenar_py.check.observing.auto import beginning
from entrenar_py.check.observing.batches import blocks_of
from entrenar_py.check.observing.contents import Carried
from entrenar_py.check.observing.generators import Generators
from entrenar_py.check.observing.micro_batches import MicroBatches
from entrenar_py.check.observing.module_hooks import BackwardHooks, Entrances
from entrenar_py.check.observing.outer_synchronisation import OuterSynchronisations
from entrenar_py.check.observing.planned_faults import PlannedFaults, PlannedRates, PlannedStop
from entrenar_py.check.observing.random_numbers import LoaderDraws, RandomNumbers
from entrenar_py.check.observing.recording import Recording
from entrenar_py.check.observing.samples import Samples
from entrenar_py.check.observing.script_facts import ScriptFacts
from entrenar_py.check.observing.step_in_work import Clips, ReducedGradients, StepInWork
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import hook_calls, trace

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def uncollected(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return `function`, changed so that Python collects no garbage while it runs.

    The records of a few hundred tensors are thousands of objects, which are freed by reference
    counting when the function returns. They would nevertheless trigger a garbage collection in each
    step, and every 20 steps one of all objects, which takes 0.15 s with torch loaded.
    """

    @wraps(function)
    def call(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        if not gc.isenabled():
            return function(*given, **named)
        gc.disable()
        try:
            return function(*given, **named)
        finally:
            gc.enable()

    return call


class Observer(Observation):
    """Records one rank: the steps of its optimizers, and its backward passes as micro-batches.

    The initial state is recorded in the first forward pass, since a wrapper may change it until
    then. With several optimizers, a step is over when all of them have stepped, or when one of them
    steps again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        sampler: Any = None,
        dataset: Any = None,
        scheduler: Any = None,
        step: int = 0,
        layout: Any = None,
        tied: Iterable[Iterable[str]] = (),
        seen: Samples | None = None,
        facts: Mapping[str, Any] | None = None,
        **declared: Any,
    ) -> None:
        """Observe with the arguments of `observe`, or observe a script without the line.

        For a script without the line, `seen` identifies the samples, and `facts` are added to the
        header of the record.
        """
        rank, world_size = surroundings.place()
        layout = surroundings.mesh(world_size) if layout is None else layout
        arranged = surroundings.declared(layout, tied, world_size)
        stepped = arguments.optimizers(model, optimizer)
        self._subject = Subject(model, stepped, declared=arranged, rank=rank, world_size=world_size)
        names = [*declarations.names_of(self._subject.model)]
        buffers = self._subject.buffers
        said = declarations.declarations_of(names, buffers.names(), arranged, **declared)
        buffers.synchronised = said.synchronised_of
        self._first_look = declarations.FirstLook(self._subject, said)
        number = arguments.steps("step", step, least=0)
        self._step = StepInWork(self._subject, number, said.averages)
        self._started = False
        self._facts = ScriptFacts(
            seen,
            sampler=sampler,
            dataset=dataset,
            scheduler=scheduler,
            resumed=number > 0,
            rank=rank,
        )
        self._gradients = ReducedGradients()
        self._clips = None if said.clip_norm else Clips()
        self._synchronisations = OuterSynchronisations()
        self._recording = Recording(
            self._subject,
            {
                "rank": rank,
                "world_size": world_size,
                "versions": {
                    "torch": str(torch.__version__),
                    **_accelerator(self._subject.model),
                    **hook_calls.notes(),
                },
                **({"unseeded": True} if beginning.is_unseeded() else {}),
                **(facts or {}),
                **said.facts(),
                **self._facts.header,
            },
        )
        trained, drawing = sources.data_set(sampler), sources.generators(sampler)
        held = {"dataset": trained, **getattr(trained, "__dict__", {})}
        generators = Generators(self._subject.model, objects=held, left_out=drawing)
        # This must precede the hooks that record draws and fetches.
        self._numbers = common_numbers.begin_if_planned()
        # Events of passes since the last step of one of several optimizers.
        self._placed: list[trace.Event] = []
        self._random = RandomNumbers(generators, rank, self._place, self._write_placed)
        self._carried = Carried()
        self._micro_batches = MicroBatches(rank, self._facts.samples, self._random)
        self._loaders = LoaderDraws(self._random, trained=trained)
        self._language = language.of(
            self._subject, generators, self._recording.write, self._random.were_recomputed
        )
        self._late: trace.Update | None = None
        atexit.register(self._write_held)
        if self._numbers is not None:
            self._numbers.reseeded = lambda: self._random.mark(None)
        self._batches = replayed_batches.begin(rank)
        self._faults = PlannedFaults(self._subject, self._place, self._write_placed)
        self._borders = borders.begin_if_planned(self._subject.model, rank)
        self._micro_batches.borders = self._borders
        self._rates = PlannedRates(self._subject)
        self._stop = PlannedStop(rank, world_size, begins=self._step.number)
        self._hook()
        self._facts.listen(self._recording, self._micro_batches, self.skipped, self.clipped)
        # The numbers of passes after which the script has cleared finite gradients within a step:
        # this one, and the one before it.
        self._cleared: set[int] = set()
        self._cleared_before: set[int] = set()

    # --- called by the script ---------------------------------------------------------------------

    @hook_calls.outside
    def samples(
        self, ids: Iterable[int], *, epoch: int | None = None, replacement: bool = False
    ) -> None:
        self._micro_batches.samples.tell(ids, epoch, replacement=replacement)

    @hook_calls.outside
    def loss(self, value: float | Tensor, weight: float) -> None:
        self._micro_batches.tell_loss(value, weight)

    @hook_calls.outside
    def skipped(self) -> None:
        if self._clips is not None:
            self._clips.forget()
        # Without a pass that is left, the first of several optimizers skipped its part.
        if self._micro_batches.done or self._step.stepped:
            self._skip_step()

    @hook_calls.outside
    def reduced(self) -> None:
        self._step.reduced()

    @hook_calls.outside
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
            step=self._step.number if step is None else step,
            reason=reason,
            rank=rank,
            shard=micro_batch,
            tensor=tensor,
            ids=tuple(map(int, ids)),
        )
        self._recording.write([halt])

    @hook_calls.outside
    def synchronised(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        weights: Mapping[str, Tensor] | None = None,
        *,
        inner_steps: int | None = None,
    ) -> None:
        outer = arguments.outer(optimizer, weights, inner_steps)
        self._write_late()
        self._step.forget_weights()
        event = self._synchronisations.event(self._subject, outer, self._step.number - 1)
        if event is not None:
            self._recording.synchronised(outer.rule())
            self._recording.write([event])

    def close(self) -> None:
        super().close()
        if self._micro_batches.done and self._gradients.has_overflowed():
            self._skip_step()
        self._end_step()
        self._write_held()
        atexit.unregister(self._write_held)
        self._language.remove()
        self._recording.close()
        self._remove_hooks()

    @property
    def num_steps(self) -> int:
        """The number of recorded steps, plus the steps taken before the record began."""
        return self._step.number

    @property
    def has_late_weights(self) -> bool:
        """Whether weights of the last step were not yet written back when the step was recorded."""
        return self._late is not None

    def note_limit(self, where: str = "") -> None:
        """Record that the harness, not the script, ends the run: `where`, or after its steps."""
        self._recording.note_limit(where)

    def clipped(self, parameters: Any, max_norm: float | None, norm_type: float) -> None:
        """Called when the gradients of `parameters` are about to be clipped by their norm."""
        clipped = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        own = {id(parameter) for parameter in self._subject.trained.values()}
        if own.isdisjoint(map(id, clipped)):
            return
        if self._clips is not None and max_norm is not None:
            self._clips.note(clipped, max_norm, norm_type)
        self._step.before_clipping()

    def _remove_hooks(self) -> None:
        self._entrances.remove()
        for hooks in (self._facts, self._loaders, self._backward, self._random, self._language):
            hooks.remove()
        for step_hooks in self._step_hooks:
            step_hooks.remove()
        self._inner_steps.remove()
        if self._zero is not None:
            self._zero.remove()

    # --- called by torch's hooks ------------------------------------------------------------------

    def _hook(self) -> None:
        self._entrances = Entrances(self._subject.model, self._before_forward, self._after_forward)
        self._step_hooks: list[step_in_work.StepHooks] = []
        self._zero: flat_parameters.ZeroSteps | None = None
        for index, optimizer in enumerate(self._subject.optimizers):
            self._step_hooks.append(self._hook_steps(index))
            if self._subject.steps_partitions(optimizer):
                self._zero = flat_parameters.ZeroSteps(
                    self._subject.zero,
                    begins=partial(self._before_partitions, index),
                    ends=partial(self._after_partitions, index),
                )
        self._inner_steps = step_in_work.InnerSteps(self._subject.optimizers, self._take_inner)
        self._backward = BackwardHooks(
            self._subject,
            self._faults,
            begun=self._before_backward,
            recorded=self._record_gradients,
            ended=self._after_backward,
            added=self._within_backward,
            summed=self._look_at_sum,
        )

    def _hook_steps(self, index: int) -> step_in_work.StepHooks:
        begins, ends = partial(self._step_begins, index), partial(self._after_step, index)
        return step_in_work.StepHooks(self._subject.optimizers[index], begins, ends)

    def _take_inner(self, index: int, inner: torch.optim.Optimizer) -> None:
        self._step_hooks[index].remove()
        self._subject.step_by(index, inner)
        self._recording.note_inner()
        self._step_hooks[index] = self._hook_steps(index)

    def _place(self, reached: Collection[str] = ()) -> tuple[int, int]:
        """Return the current step, and the index of this rank's current micro-batch.

        `reached` are the names of the parameters that the current backward pass has reached. If
        their optimizers had all stepped before the pass, it belongs to the next step.
        """
        if self._step.is_over(reached):
            return self._step.number + 1, 0
        return self._step.number, self._micro_batches.index

    def _before_forward(self, model: torch.nn.Module, called: Any, inputs: Any) -> None:
        self._subject.buffers.before_forward()
        if self._batches is not None and model.training and torch.is_grad_enabled():
            self._batches.passes(inputs)
        blocks = blocks_of(inputs)
        if self._borders is not None and torch.is_grad_enabled():
            self._borders.begin_pass(*self._place())
        if not (model.training and torch.is_grad_enabled()):
            self._micro_batches.aside(blocks, trains=torch.is_grad_enabled())
            if not torch.is_grad_enabled():
                self._language.aside(model)
                if self._subject.values and not self._micro_batches.is_swapped:
                    edited = self._step.edited_weights(self._subject.trained)
                    self._micro_batches.is_swapped = bool(edited)
                if not model.training:
                    self._micro_batches.evaluated()
            return
        if self._entrances.are_new():
            self._backward.set()  # a planned fault may change the output of the new modules
        if self._entrances.is_first(model, called):
            # If not, a wrapper was added, and parameters are restored before the step.
            self._start()
            self._faults.perhaps_nudge()
        self._faults.note_lasting()
        for hooks in self._step_hooks:
            hooks.come_last()
        self._write_late()
        self._stop.perhaps_end(*self._place())
        self._gradients.expect(called)
        self._recording.compressed(step_in_work.compression(called), self._step.number)
        self._micro_batches.before_forward(inputs, blocks)
        self._language.forward(model, inputs, self._micro_batches.index)

    def _after_forward(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        if (local := self._subject.buffers.after_forward()) is not None:
            self._recording.leave_out(local)
        fresh = self._carried.fresh(inputs)
        self._micro_batches.after_forward(fresh, is_training=model.training)
        if model.training:
            self._carried.note(inputs, output)
            self._backward.expect(output)
        if self._batches is not None and model.training and torch.is_grad_enabled():
            self._batches.passed(inputs)

    def _before_backward(self) -> None:
        """Handle gradients that were cleared without a step: forget them, or record a skip."""
        self._write_late()
        self._stop.perhaps_end(*self._place())
        micro_batches = self._micro_batches
        self._random.begin_backward()
        self._entrances.settle()
        micro_batches.samples.settle()
        self._step.before_backward()
        if micro_batches.done:
            self._step.look_uphill(self._gradients.left)
        if not micro_batches.done or self._subject.has_gradients():
            return
        if self._gradients.was_reduced and micro_batches.forget_repeated():
            self._step.sources.forget_passes()
        elif micro_batches.forget_evaluations():
            self._step.sources.forget_passes()
            self._faults.strike_again()
        elif self._step.has_moved():
            # Gradients at other weights: a sharpness-aware script with other samples.
            micro_batches.forget_gradients()
        elif not self._gradients.has_overflowed():
            self._cleared.add(micro_batches.index)
        elif micro_batches.index not in self._cleared_before:  # otherwise a probe of each step
            self._skip_step()

    def _after_backward(
        self, names: Collection[str], gradients: trace.Tensors, finite: bool
    ) -> None:
        self._start()
        self._random.end_backward()
        if self._step.is_over(names):
            ahead = self._micro_batches.take_losses_ahead()
            self._end_step()
            self._micro_batches.give_losses(ahead)
        elif self._step.has_stepped_any(names):
            self._faults.note_probe()
        number = self._micro_batches.index
        self._step.sources.after_backward(self._step.number, number, names)
        self._micro_batches.after_backward(self._step.number, gradients, finite=finite)
        self._seed_numbers()
        if not self._recording.life:  # otherwise this rank has already died in an earlier life
            self._faults.perhaps_die()

    def _within_backward(
        self, names: Collection[str], gradients: trace.Tensors, finite: bool
    ) -> None:
        number = max(0, self._micro_batches.index - 1)
        self._step.sources.after_backward(self._step.number, number, names)
        self._micro_batches.within_backward(gradients, finite=finite)

    @uncollected
    def _record_gradients(
        self, gradients: Mapping[str, Tensor]
    ) -> tuple[trace.Tensors, bool] | None:
        finite = tensors.is_finite(gradients.values())
        return self._subject.record(gradients, exact=False), finite

    def _look_at_sum(self) -> None:
        self._gradients.look(self._subject.gradients())

    def _skip_step(self) -> None:
        """End a step that changes no weights, or only those of optimizers that have stepped.

        The script cleared the gradients without a call of an optimizer because they were not
        finite, as with a `GradScaler` if its scale was too large.
        """
        ahead = self._micro_batches.take_losses_ahead()  # losses of the pass that is about to begin
        if self._step.stepped:
            # Other optimizers have stepped: what they applied shows which gradient was discarded.
            self._micro_batches.excuse(only_unknown=True)
            self._step.forget_told()
        else:
            self._excuse()
            self._step.stepped.add(0)
        self._end_step()
        self._micro_batches.give_losses(ahead)

    def _excuse(self) -> None:
        """Forget the gradients: they are not finite because the loss scale was too large."""
        self._micro_batches.excuse()
        self._step.excuse()

    def _step_begins(self, index: int, _: Any, *called: Any) -> step_in_work.Arguments | None:
        optimizer = self._subject.optimizers[index]
        if self._subject.steps_partitions(optimizer):
            if self._trains():
                self._step.apply_changed(optimizer, self._subject.in_step_of(optimizer))
            return None
        return step_in_work.look_before_step(
            partial(self._before_step, index), self._micro_batches.clear, *called
        )

    def _trains(self) -> bool:
        # Before training, torch.distributed.checkpoint takes a step to create the optimizer state.
        return self._started or self._subject.has_gradients()

    @uncollected
    def _before_step(self, index: int) -> None:
        if not self._trains():
            return
        self._start()
        self._random.mark("gradient")
        if index in self._step.stepped:
            self._begin_next_step(index)
        optimizer, due = self._subject.optimizers[index], list[str]()
        if step_in_work.has_overflowed(optimizer):
            self._excuse()
        else:
            due = self._subject.stepped_by(index, alone=not self._step.stepped)
        self._write_shards()
        nested = hook_calls.is_nested(optimizer)
        (self._step.apply_changed if nested else self._step.apply)(optimizer, due)
        self._rates.begin_step(self._step.number)
        if self._borders is not None:
            self._borders.before_step(self._step.number, self._subject.optimizers)

    @uncollected
    def _after_step(self, index: int, *_: Any) -> None:
        if not self._trains():
            return
        optimizer = self._subject.optimizers[index]
        if self._subject.steps_partitions(optimizer):
            return
        self._random.mark("step")
        if self._borders is not None:
            self._borders.after_step()
        if not hook_calls.is_nested(optimizer):
            self._end_step_of(index)

    def _before_partitions(self, index: int) -> None:
        self._before_step(index)

    def _after_partitions(self, index: int, skipped: bool) -> None:
        """End a step: DeepSpeed's optimizer has stepped all partitions, or none if `skipped`."""
        if not self._trains():
            return
        self._random.mark("step")
        if skipped:
            self._skip_step()
        else:
            self._end_step_of(index)

    def _end_step_of(self, index: int) -> None:
        self._write_held()
        self._step.applied()
        self._step.stepped.add(index)
        if len(self._step.stepped) == len(self._subject.optimizers):
            self._complete_step()
            self._rates.end_step()
            self._language.stepped(self._step.number - 1)

    def _begin_next_step(self, index: int) -> None:
        """End the step: an optimizer is about to step again, before others have stepped once.

        If a loss reaches parameters of several optimizers, and only one of them takes every step
        (a generator's loss that passes through a discriminator), nothing has shown until now that
        passes since the last step of an optimizer belong to the next step.
        """
        sources, micro_batches = self._step.sources, self._micro_batches
        names = self._subject.stepped_by(index, alone=False)
        first = sources.first_after(micro_batches.num_written, names)
        if first is None:
            self._complete_step()
            return
        ahead = micro_batches.take_ahead(first)
        ahead_of = sources.take_ahead(self._step.number, first)
        losses = micro_batches.take_losses_ahead()
        self._placed = [_in_next_step(event, first) for event in self._placed]
        self._complete_step(len(ahead))
        sources.give_ahead(ahead_of)
        micro_batches.give_ahead(ahead, self._step.number)
        micro_batches.give_losses(losses)

    def _complete_step(self, num_ahead: int = 0) -> None:
        if self._clips is not None:
            self._clips.end_step(self._subject.trained.values())
        self._end_step(num_ahead)

    def _end_step(self, num_ahead: int = 0) -> None:
        """Record the state after the step, if an optimizer has stepped.

        `num_ahead` micro-batches of the next step are already completed.
        """
        if not self._step.stepped:
            return
        self._write_shards()
        self._recording.look_at_optimizers(self._step.number)
        place, metric = self._facts.schedule_place(), self._facts.best_metric()
        update = replace(self._step.end(), schedule=place, metric=metric)
        if self._subject.is_written_back:
            self._late = update
        else:
            self._recording.write([update])
        self._synchronisations.stepped()
        self._micro_batches.end_step(num_ahead)
        self._gradients.forget()
        self._cleared_before, self._cleared = self._cleared, set()
        self._note_facts()
        self._seed_numbers()

    def _seed_numbers(self) -> None:
        if self._numbers is not None:
            self._numbers.seed(self._step.number)

    def _write_late(self) -> None:
        if self._late is not None:
            update, self._late = self._late, None
            self._recording.write([self._step.written_back(update)])

    # --- what is recorded -------------------------------------------------------------------------

    def _write_placed(self, events: Sequence[trace.Event]) -> None:
        """Write events of a pass, or hold them while the pass may belong to the next step."""
        if self._step.stepped and all(_place_of(event) is not None for event in events):
            self._placed += events
        else:
            self._recording.write([*self._take_placed(), *events])

    def _take_placed(self) -> list[trace.Event]:
        events, self._placed = self._placed, []
        return events

    def _write_held(self) -> None:
        self._write_late()
        if self._placed:
            self._recording.write(self._take_placed())

    def _write_shards(self) -> None:
        self._write_held()
        self._recording.sampling(self._micro_batches.samples.news())
        self._recording.write([*self._facts.first_step(), *self._micro_batches.written()])

    def _note_facts(self) -> None:
        seen = {} if self._clips is None else {"clips": self._clips.limit}
        self._facts.write(self._recording, self._micro_batches, **seen)

    def _start(self) -> None:
        """Record the initial state of this rank, once.

        Also look up parameters that were replaced since.
        """
        self._write_late()
        if self._subject.look_up():
            self._backward.set()
        if self._started:
            if checkpoints.was_read() and self._step.edited_weights(self._subject.trained):
                self._start_again()
            return
        self._started = True
        surroundings.keep_groups()
        self._facts.begin(self._subject, lambda: self._step.number)
        start = self._step.start(self._facts.progress())
        self._recording.write([start, *self._first_look.events(start.step)])

    def _start_again(self) -> None:
        self._recording.write([self._step.start(self._facts.progress())])
        if not self._subject.has_gradients():
            self._micro_batches.clear()
            self._step.sources.forget_passes()


def _place_of(event: trace.Event) -> int | None:
    """Return the micro-batch of an event of this process's own pass; None for other events."""
    if isinstance(event, trace.Injected):
        return event.shard
    return event.micro_batch if isinstance(event, trace.Drawn) and event.worker is None else None


def _in_next_step(event: trace.Event, first: int) -> trace.Event:
    """Return `event` in the next step if its micro-batch has number `first` or a later one."""
    place = _place_of(event)
    if place is None or place < first:
        return event
    if isinstance(event, trace.Injected):
        return replace(event, step=(event.step or 0) + 1, shard=place - first)
    assert isinstance(event, trace.Drawn)
    return replace(event, step=event.step + 1, micro_batch=place - first)


def _accelerator(model: torch.nn.Module) -> dict[str, str]:
    place = next((p.device for p in model.parameters() if p.is_cuda), None)
    return {} if place is None else {"accelerator": torch.cuda.get_device_name(place)}
