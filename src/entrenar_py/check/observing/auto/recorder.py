"""The Observer of a script without the line `observe`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from entrenar_py.check.observing import surroundings, tensors
from entrenar_py.check.observing.auto.follower import guarded
from entrenar_py.check.observing.batches import blocks_of
from entrenar_py.check.observing.generators import States
from entrenar_py.check.observing.loss_terms import Begun
from entrenar_py.check.observing.observer import Observer
from entrenar_py.check.observing.outer_synchronisation import OuterOptimizer
from entrenar_py.check.observing.seen_samples import Batches, SeenSamples
from entrenar_py.shared.errors import UsageError


class Recorder(Observer):
    """Records one rank, with arguments of `observe` that are derived from the script's objects.

    Samples are identified by the model's inputs, and losses are the values on which `backward` is
    called. `called` is the module that is about to be called; None in a backward pass. Numbers that
    were drawn after the generators had the states `drawn_since` belong to the first batch.
    `give_up` is called with the reason if something fails later. `stepped` is called after a step
    that no hook of torch reports. Raises UsageError in the same cases as `observe`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loader_batches: Batches,
        called: nn.Module | None,
        *,
        drawn_since: States,
        give_up: Callable[[str], None],
        stepped: Callable[[], object],
    ) -> None:
        self._is_off, self._tell_why, self._partitions_stepped = False, give_up, stepped
        self._seen = SeenSamples(loader_batches)
        super().__init__(
            model,
            tuple(optimizers),
            seen=self._seen,
            facts={"auto": True, "replicas": surroundings.are_replicas(model)},
        )
        self._first_step = self.num_steps
        self._random.since(drawn_since)
        if called is not None:
            for own in self._entrances.of(called):
                # Hooks that are set now aren't called before this pass.
                self._entrances.enter(own, called, (), {})

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that are observed."""
        return self._subject.optimizers

    def is_off(self) -> bool:
        """Return whether the observation has failed."""
        return self._is_off

    def give_up(self, reason: str) -> None:
        """End the observation, and report the reason to the follower."""
        self._is_off = True
        self._tell_why(reason)

    _before_forward = guarded(Observer._before_forward)
    _after_forward = guarded(Observer._after_forward)
    _before_backward = guarded(Observer._before_backward)
    _after_backward = guarded(Observer._after_backward)
    _within_backward = guarded(Observer._within_backward)
    _record_gradients = guarded(Observer._record_gradients)
    _look_at_sum = guarded(Observer._look_at_sum)
    _step_begins = guarded(Observer._step_begins)
    _take_inner = guarded(Observer._take_inner)
    _after_step = guarded(Observer._after_step)

    # --- called by the follower -------------------------------------------------------------------

    def backward_begins(self, begun: Begun) -> None:
        """Record where a backward pass begins: the object on which `backward` is called."""
        self._micro_batches.backward_begins(begun)

    def was_called(self, inputs: Any) -> None:
        """Record a pass before this record began, of a model that is trained through copies."""
        self._micro_batches.before_forward(inputs, blocks_of(inputs))
        self._micro_batches.after_forward(inputs, is_training=True)

    def backward_ended(self) -> None:
        """Record that the backward pass is over."""
        self._micro_batches.backward_ended()

    def saved(self) -> None:
        """Record that the script saves a file."""
        self._facts.saved()

    @guarded
    def _before_partitions(self, index: int) -> None:
        limit = getattr(self._subject.zero, "clip_grad", 0.0)
        if limit > 0:
            self.clipped(self._subject.trained.values(), limit, 2.0)
        super()._before_partitions(index)

    @guarded
    def _after_partitions(self, index: int, skipped: bool) -> None:
        super()._after_partitions(index, skipped)
        self._partitions_stepped()

    def closure_ran(self, optimizer: torch.optim.Optimizer, *, again: bool) -> None:
        """Record that a step's closure ran, in a step that began before this record."""
        if again:
            self._micro_batches.clear()
            return
        for index, own in enumerate(self.optimizers):
            if own is optimizer:
                self._before_step(index)

    def stranger_steps(self, optimizer: torch.optim.Optimizer) -> str:
        """Handle a step of an optimizer that isn't observed.

        Return where the record ends because of that, "" if it goes on.

        If it steps copies of the model's parameters, it may be the outer optimizer of ranks that
        step alone, and its rule is recorded. If it steps parameters that are observed, a new phase
        of the training begins, and the steps before it are the record. Raises UsageError if these
        are less than two: a script may create its optimizer again in each step.
        """
        stepped = tensors.stepped_by(optimizer)
        if not stepped.isdisjoint(self._subject.parameters.values()):
            name, number = type(optimizer).__name__, self.num_steps
            if number - self._first_step < 2:
                raise UsageError(
                    f"in step {number} a new optimizer ({name}) steps the model instead of the "
                    "first one: keep one optimizer, or write observe(model, optimizer) into the "
                    "script for the one that is to be checked"
                )
            return f"before step {number}, where a new optimizer ({name}) begins to step the model"
        shapes = Counter(tuple(tensor.shape) for tensor in stepped)
        if stepped and shapes <= Counter(tuple(t.shape) for t in self._subject.trained.values()):
            outer = OuterOptimizer(optimizer=optimizer, weights={}, inner_steps=None)
            self._recording.synchronised(outer.rule())
        return ""

    def step_ended(self) -> None:
        """Record that an optimizer has stepped, and write new facts about the script."""
        self._note_facts()

    def fail(self, problem: str) -> None:
        """End the record with a problem, since everything after it is unknown."""
        self._remove_hooks()
        self._recording.close(problem)

    def withdraw(self) -> None:
        """Remove the record, since the script observes itself."""
        self._remove_hooks()
        self._recording.remove()
