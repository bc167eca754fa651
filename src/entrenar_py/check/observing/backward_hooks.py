"""Hooks on a model's parameters, whole or sharded, that report each backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from entrenar_py.check.observing import dtensors, tensors, unsharded_parameters
from entrenar_py.check.observing.gradients_ready import GradientHooks, call_last
from entrenar_py.check.observing.planned_faults import PlannedFaults
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import hook_calls, trace

# Called with the names of the parameters that a pass adds to, with the records of what it adds, as
# far as these can be made, and with whether all of that is finite.
Gave = Callable[[Collection[str], trace.Tensors, bool], None]


class _Given(NamedTuple):
    """The record of a gradient, None if none can be made, and whether it is finite."""

    record: trace.TensorRecord | None
    finite: bool


class BackwardHooks:
    """Calls `begun` before a backward pass adds to any gradient, and `ended` with what it added.

    `recorded` returns the records of gradients, and whether these are finite, or None. `added` is
    called with what a nested pass adds, and `summed` when all parameters have their gradients. Of a
    sharded model `ended` is told no names: the gradients that remain are pieces of sums over all
    ranks. It gets the records of what this rank's pass gave to whole parameters, if values are
    recorded, and each parameter was seen, and once.
    """

    def __init__(
        self,
        subject: Subject,
        faults: PlannedFaults,
        *,
        begun: Callable[[], None],
        recorded: Callable[[Mapping[str, Tensor]], tuple[trace.Tensors, bool] | None],
        ended: Gave,
        added: Gave,
        summed: Callable[[], None],
    ) -> None:
        self._subject, self._faults = subject, faults
        self._begun, self._ended, self._added, self._summed = begun, ended, added, summed
        self._recorded = recorded
        self._whole: GradientHooks[_Given] | None = None
        # For a sharded model: whether a pass's end is queued, its gradients are finite so far, and
        # what it gave. `_seen` are the parameters that were whole by now.
        self._ending, self._finite = False, True
        self._seen: set[str] = set()
        self._given: list[tuple[str, trace.TensorRecord]] = []
        self._handles: list[Any] = []
        self.set()

    def set(self) -> None:
        """Hook the parameters that the model has now, and remove earlier hooks."""
        self.remove()
        # Before the recording hooks, which then see the gradients with the planted faults.
        self._handles = self._faults.hooks()
        if self._subject.is_fully_sharded:
            self._seen.clear()
            model = self._subject.model
            self._handles += unsharded_parameters.when_whole(model, self._hook_whole)
            self._whole = None
            return
        trained = list(self._subject.trained.values())
        tell, add = partial(self._tell, self._ended), partial(self._tell, self._added)
        self._whole = GradientHooks(trained, self._begun, self._take, tell, add)
        self._handles.append(self._whole)

    def expect(self, output: Any) -> None:
        """Note that a forward pass returned `output`, where a backward pass will begin.

        For a sharded model `output` is hooked: hooks on the pieces run only when a sum is reduced.
        """
        if self._whole is not None and not dtensors.is_fully_sharded(self._subject.model):
            self._whole.expect(output)
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _take(self, gradients: Mapping[int, Tensor]) -> dict[int, _Given]:
        names = [*self._subject.trained]
        records, finite = self._recorded({names[n]: g for n, g in gradients.items()}) or ({}, True)
        return {n: _Given(records.get(names[n]), finite) for n in gradients}

    def _tell(self, gave: Gave, given: Sequence[_Given | None]) -> None:
        added = {n: one for n, one in zip(self._subject.trained, given, strict=True) if one}
        records = {name: one.record for name, one in added.items() if one.record is not None}
        gave([*added], records, all(one.finite for one in added.values()))
        call_last(self._summed)

    # --- a sharded model --------------------------------------------------------------------------

    def _hook_whole(self, name: str, whole: Any) -> Any:
        self._seen.add(name)
        handle = whole.register_hook(partial(self._look, name))
        self._handles.append(handle)
        return handle

    @hook_calls.ours
    def _look(self, name: str, gradient: Tensor) -> None:
        self._finite &= tensors.is_finite([gradient])
        if self._subject.values:
            self._given.append((name, tensors.record(gradient, values=True)))

    @hook_calls.ours
    def _begin(self, _: Tensor) -> None:
        if not self._ending:
            self._ending = True
            self._given.clear()
            self._begun()
            call_last(self._end)

    def _end(self) -> None:
        finite, self._ending, self._finite = self._finite, False, True
        given, self._given = self._given, []
        known = dict(given)
        is_known = len(known) == len(given) and self._seen == self._subject.trained.keys()
        self._ended((), known if is_known else {}, finite)
        self._summed()
