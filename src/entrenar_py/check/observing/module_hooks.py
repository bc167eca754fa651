"""Hooks of a model: they report its forward passes and its backward passes.

Copies of the model, and saved models, don't contain the hooks.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from entrenar_py.check.observing import flat_parameters, tensors
from entrenar_py.check.observing.subject import Subject
from entrenar_py.shared import hook_calls, trace

if TYPE_CHECKING:
    from entrenar_py.check.observing.planned_faults import PlannedFaults

LOOKS_MAX = 3  # searches for modules that the script compiled later


class OwnHook:
    """Calls `call` with a hook's arguments after the module, if the module is `model` itself.

    In a copy of the model (an average of its weights) or a loaded model, a function of Python's own
    that does nothing takes its place. The hook also does nothing while the model is compiled.
    """

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    @hook_calls.ours
    def __call__(self, module: Any, *called: Any) -> Any:
        if module is not self._model or hook_calls.is_traced():
            return None
        return self._call(*called)

    def __reduce_ex__(self, _: Any) -> Any:
        return getattr, (nullcontext(), "__exit__")


class Entrances:
    """The modules that a script calls: the model, or the models in a list of several.

    `before(model, called, inputs)` is called before each forward pass of a model, ahead of all
    other hooks, and `after(model, inputs, output)` after the pass. `called` is the module that the
    script calls. It is the model, or a compiled module that contains the model, because hooks of
    the model itself are compiled away. `inputs` are the positional and the named arguments.

    A model without a forward pass (an agent with an actor and a critic) can't be called itself. The
    script calls its methods, and the first module that a method calls counts as the called one.
    """

    def __init__(
        self, model: nn.Module, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        is_list = isinstance(model, nn.ModuleList | nn.ModuleDict)
        self.models = tuple(model.children()) if is_list else (model,)
        self._before, self._after = before, after
        self._called: dict[nn.Module, nn.Module] = {}  # model -> the module being called for it
        self._firsts: dict[tuple[nn.Module, nn.Module], Any] = {}
        self._handles: list[Any] = []
        self._was_entered, self._are_new, self._num_looks = False, False, LOOKS_MAX
        for own in self.models:
            self._hook(own, own)
        self._silent = [own for own in self.models if type(own).forward is nn.Module.forward]
        self._calls = register_module_forward_pre_hook(self._begins) if self._silent else None
        self._look_up()

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        if hook_calls.is_traced() or not (module.training and torch.is_grad_enabled()):
            return
        model = next((own for own in self._silent if module in {*own.modules()}), None)
        if model is not None:
            self._hook(model, module)  # hooks that are set now aren't called before this pass
            self.enter(model, module, inputs, {})

    def _heard(self, called: nn.Module) -> None:
        self._silent = [own for own in self._silent if called not in {*own.modules()}]
        if self._calls is not None and not self._silent:
            self._calls.remove()
            self._calls = None

    def _look_up(self) -> bool:
        """Hook the compiled modules that contain a model; return whether there are new modules."""
        fresh = [
            (model, outer)
            for model, outers in around(self.models).items()
            for outer in outers
            if (model, outer) not in self._firsts
        ]
        for model, outer in fresh:
            self._hook(model, outer)
        return bool(fresh)

    def of(self, called: nn.Module) -> list[nn.Module]:
        """Return the models that a call of `called` runs."""
        return [model for model, outer in self._firsts if outer is called]

    def enter(self, model: nn.Module, called: nn.Module, *inputs: Any) -> None:
        """Note that a forward pass begins, unless it is part of a known pass."""
        if self._called.get(model, called) is called:
            self._called[model], self._was_entered = called, True
            self._heard(called)
            self._before(model, called, inputs)

    def settle(self) -> None:
        """Record that a backward pass begins. Search for new modules if no forward pass was seen.

        The search takes about 50 ms, so there are at most LOOKS_MAX of them.
        """
        self._called.clear()  # an exception may have ended a forward pass
        was_seen, self._was_entered = self._was_entered, False
        if not was_seen and self._num_looks:
            self._num_looks -= 1
            self._are_new |= self._look_up()

    def are_new(self) -> bool:
        """Return whether compiled modules were discovered since the last call."""
        found, self._are_new = self._are_new, False
        return found

    def is_first(self, model: nn.Module, called: nn.Module) -> bool:
        """Return whether the hook ran before all others; if not, make it the first from now on.

        A hook that runs earlier may replace the parameters.
        """
        first = self._firsts[model, called]
        if next(iter(called._forward_pre_hooks)) == first.id:
            return True
        first.remove()
        self._hook_first(model, called)
        return False

    def remove(self) -> None:
        """Remove all hooks."""
        calls = [] if self._calls is None else [self._calls]
        for handle in [*self._firsts.values(), *self._handles, *calls]:
            handle.remove()

    def _leave(self, model: nn.Module, called: nn.Module, *passed: Any) -> None:
        if self._called.get(model, called) is called:
            self._called.pop(model, None)
            *inputs, output = passed
            self._after(model, inputs, output)

    def _hook(self, model: nn.Module, called: nn.Module) -> None:
        self._hook_first(model, called)
        hook = OwnHook(called, partial(self._leave, model, called))
        self._handles.append(called.register_forward_hook(hook, with_kwargs=True))

    def _hook_first(self, model: nn.Module, called: nn.Module) -> None:
        hook = OwnHook(called, partial(self.enter, model, called))
        self._firsts[model, called] = called.register_forward_pre_hook(
            hook, prepend=True, with_kwargs=True
        )


def around(models: Iterable[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Return for each model the compiled modules that contain it; their hooks aren't traced.

    All objects are searched, since modules don't know what contains them. The lists are empty until
    dynamo is imported.
    """
    compiled: dict[nn.Module, list[nn.Module]] = {model: [] for model in models}
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    for thing in gc.get_objects() if dynamo is not None else ():
        kind = type(thing)
        if not issubclass(kind, nn.Module) or "_modules" not in vars(thing):
            continue  # a module without _modules is still being constructed
        if issubclass(kind, dynamo.OptimizedModule) or thing._compiled_call_impl is not None:
            parts = set(thing.modules())
            for model, outer in compiled.items():
                if thing is not model and model in parts:
                    outer.append(thing)
    return compiled


# --- gradients as they are ready ------------------------------------------------------------------


Taken = TypeVar("Taken")
# One over the part of all gradients that may be held at once. A GPU is waited for this often.
_PARTS = 4
_BYTES_MIN = 2**26  # may be held even of small models


@dataclass
class _Pass(Generic[Taken]):
    """A backward pass: its number of gradients, and by tensor index those held and those taken."""

    num_expected: int
    held: dict[int, Tensor] = field(default_factory=dict)
    taken: dict[int, Taken] = field(default_factory=dict)
    held_bytes: int = 0


class GradientHooks(Generic[Taken]):
    """Calls `begin` before the first of `tensors` gets a gradient in a pass, `tell` after the last.

    Gradients are passed to `take` by the index of their tensor, a few at a time, and are not held
    any longer. `take` returns what is to be reported for each. `tell` receives these results in the
    order of `tensors`, with None for a tensor without a gradient. If a further pass is nested in
    one that was already reported (reentrant checkpoints), `add` receives its results.

    `torch.autograd.graph.register_multi_grad_hook` is similar, but raises in a pass that computes
    only some gradients (`torch.autograd.grad`), as zero-bubble pipelines do. Here such a pass is
    reported when it ends.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        begin: Callable[[], None],
        take: Callable[[Mapping[int, Tensor]], Mapping[int, Taken]],
        tell: Callable[[Sequence[Taken | None]], None],
        add: Callable[[Sequence[Taken | None]], None],
    ) -> None:
        self._nodes = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in tensors]
        self._begins, self._take, self._tell, self._add = begin, take, tell, add
        self._bytes_max = max(_BYTES_MIN, sum(map(_num_bytes, tensors)) // _PARTS)
        # The outer pass begins at the model's output. Passes are numbered by autograd.
        self._outer: int | None = None
        self._begun = self._told = False  # whether the outer pass has begun, and was reported
        self._passes: dict[int, _Pass[Taken]] = {}
        self._handles: list[Any] = [
            tensor.register_hook(partial(self._hear, index))  # type: ignore[no-untyped-call]
            for index, tensor in enumerate(tensors)
        ]

    def expect(self, output: Any) -> None:
        """Record that a forward pass returned `output`, where a backward pass will begin.

        Passes nested in that backward pass are part of it.
        """
        if torch._C._current_graph_task_id() < 0:
            self._outer = None  # an exception may have ended the last one
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._open)  # type: ignore[no-untyped-call]

    @hook_calls.ours
    def _open(self, _: Tensor) -> None:
        if self._outer is None:
            self._outer = torch._C._current_graph_task_id()
            self._begun = self._told = False
            torch.autograd.Variable._execution_engine.queue_callback(self._close)

    @hook_calls.ours
    def _close(self) -> None:
        self._outer = None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @hook_calls.ours
    def _hear(self, index: int, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._begin(task)
        current = self._passes[task]
        current.held[index] = _own_copy(gradient)
        current.held_bytes += _num_bytes(gradient)
        if len(current.held) + len(current.taken) == current.num_expected:
            self._end(task)
        elif current.held_bytes > self._bytes_max:
            self._take_held(current)

    def _begin(self, task: int) -> None:
        if self._outer is None or not self._begun:
            self._begins()
        self._begun = True
        try:
            count = sum(map(torch._C._will_engine_execute_node, self._nodes))
        except RuntimeError:  # torch can't say in torch.autograd.grad
            count = len(self._nodes) + 1
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        self._passes[task] = _Pass(count)

    def _take_held(self, current: _Pass[Taken]) -> None:
        current.taken.update(self._take(current.held))
        current.held, current.held_bytes = {}, 0

    @hook_calls.ours
    def _end(self, task: int) -> None:
        ended = self._passes.pop(task)
        self._take_held(ended)
        adds = self._outer is not None and self._told
        self._told = True
        (self._add if adds else self._tell)([ended.taken.get(n) for n in range(len(self._nodes))])


def _own_copy(gradient: Tensor) -> Tensor:
    """Return a gradient to hold until it is recorded, so that `.grad` will not change.

    Autograd moves a dense gradient into `.grad`, but copies it if something else holds it. For a
    DTensor that copy may be placed differently: torch 2.11 reduces the terms of a sum, and gathers
    pieces of different sizes. So a DTensor is copied here. A sparse gradient is copied because
    autograd doesn't copy it, and a wrapper may change its memory.
    """
    if isinstance(gradient, DTensor):
        return tensors.copied(gradient)
    return gradient.clone() if gradient.is_sparse else gradient


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def call_last(call: Callable[[], None]) -> None:
    """Call `call` when this backward pass is over, after all callbacks that are queued by then.

    Callbacks may be queued until the pass ends, so a callback at its end queues `call`.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(hook_calls.ours(lambda: queue(hook_calls.ours(lambda: call()))))


# --- backward passes ------------------------------------------------------------------------------


# Called with the names of the parameters to which a pass adds, with the records that could be made
# of what it adds, and with whether all of that is finite.
Gave = Callable[[Collection[str], trace.Tensors, bool], None]


class _Given(NamedTuple):
    """The record of a gradient, or None if it can't be recorded, and whether it is finite."""

    record: trace.TensorRecord | None
    finite: bool


class BackwardHooks:
    """Calls `begun` before a backward pass adds to any gradient, and `ended` with what it added.

    `recorded` returns the records of gradients and whether these are finite, or None. `added` is
    called with what a nested pass adds, and `summed` when all parameters have their gradients. For
    a sharded model, `ended` receives no names, since the gradients that remain are pieces of sums
    over all ranks. It receives records of what this rank's pass gave to whole parameters, provided
    that values are recorded and that each parameter was seen exactly once.
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
        # For a sharded model: whether the end of a pass is queued, whether its gradients are finite
        # so far, and what it gave. `_seen` are the parameters that have been whole.
        self._ending, self._finite = False, True
        self._seen: set[str] = set()
        self._given: list[tuple[str, trace.TensorRecord]] = []
        self._handles: list[Any] = []
        self.set()

    def set(self) -> None:
        """Hook the parameters that the model has now, and remove earlier hooks."""
        self.remove()
        # These come before the recording hooks, which then see gradients with the planted faults.
        self._handles = self._faults.hooks()
        if self._subject.is_fully_sharded:
            self._seen.clear()
            model = self._subject.model
            self._handles += flat_parameters.when_whole(model, self._hook_whole)
            self._whole = None
            return
        trained = list(self._subject.trained.values())
        tell, add = partial(self._tell, self._ended), partial(self._tell, self._added)
        self._whole = GradientHooks(trained, self._begun, self._take, tell, add)
        self._handles.append(self._whole)

    def expect(self, output: Any) -> None:
        """Record that a forward pass returned `output`, where a backward pass will begin.

        For a sharded model `output` itself is hooked, since hooks on pieces run only when a sum is
        reduced.
        """
        if self._whole is not None and not flat_parameters.is_fully_sharded(self._subject.model):
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
