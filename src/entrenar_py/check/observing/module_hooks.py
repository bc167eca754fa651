"""Hooks of a model that report its forward passes and its backward passes.

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

LOOKS_MAX = 3  # how often to search for modules that the script has compiled meanwhile


class OwnHook:
    """A hook of `model`: calls `call` with the hook's arguments, except the module.

    The hook does nothing while the model is being compiled. In a copy of the model (an average of
    its weights, say) or in a loaded model, the hook is replaced by a function of Python's that does
    nothing.
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
    """The modules that a script calls: the model, or, for a list of models, each of these.

    `before(model, called, inputs)` is called before each forward pass of a model, ahead of all
    other hooks, and `after(model, inputs, output)` after the pass. `called` is the module that the
    script calls: the model, or a compiled module that contains the model, since hooks of the model
    itself don't run in compiled code. `inputs` are the positional and the named arguments.

    A model without a `forward` method (an agent with an actor and a critic) can't be called itself.
    The script calls other methods of the model, and the first module that such a method calls
    counts as `called`.
    """

    def __init__(
        self, model: nn.Module, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        is_list = isinstance(model, nn.ModuleList | nn.ModuleDict)
        self.models = tuple(model.children()) if is_list else (model,)
        self._before, self._after = before, after
        # Model -> the `called` module of its current forward pass.
        self._called: dict[nn.Module, nn.Module] = {}
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
            self._hook(model, module)  # hooks that are set now don't run before this pass
            self.enter(model, module, inputs, {})

    def _heard(self, called: nn.Module) -> None:
        self._silent = [own for own in self._silent if called not in {*own.modules()}]
        if self._calls is not None and not self._silent:
            self._calls.remove()
            self._calls = None

    def _look_up(self) -> bool:
        """Hook the compiled modules that contain a model. Return whether any of them are new."""
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
        """Report that a forward pass begins, unless another module has begun it."""
        if self._called.get(model, called) is called:
            self._called[model], self._was_entered = called, True
            self._heard(called)
            self._before(model, called, inputs)

    def settle(self) -> None:
        """Called when a backward pass begins.

        If no forward pass was reported since the last backward pass, search for compiled modules.
        This takes about 50 ms, so it is done at most LOOKS_MAX times.
        """
        self._called.clear()  # an exception may have ended a forward pass
        was_seen, self._was_entered = self._was_entered, False
        if not was_seen and self._num_looks:
            self._num_looks -= 1
            self._are_new |= self._look_up()

    def are_new(self) -> bool:
        """Return whether compiled modules were discovered since the last call of this method."""
        found, self._are_new = self._are_new, False
        return found

    def is_first(self, model: nn.Module, called: nn.Module) -> bool:
        """Return whether our hook is the first of the module's hooks; if not, make it the first.

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
    """Return model -> the compiled modules that contain the model; their hooks aren't compiled.

    All objects are searched, since a module doesn't know its containers. The lists are empty as
    long as dynamo isn't imported.
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


# --- gradients, as soon as they exist -------------------------------------------------------------


Taken = TypeVar("Taken")
# At most a 1 / _PARTS share of all gradients is kept at a time, so a pass waits for its GPU about
# _PARTS times.
_PARTS = 4
_BYTES_MIN = 2**26  # bytes of gradients that may be kept even for a small model


@dataclass
class _Pass(Generic[Taken]):
    """A backward pass: how many gradients it computes, which are kept, and which were taken.

    `held` and `taken` have the index of the tensor as key.
    """

    num_expected: int
    held: dict[int, Tensor] = field(default_factory=dict)
    taken: dict[int, Taken] = field(default_factory=dict)
    held_bytes: int = 0


class GradientHooks(Generic[Taken]):
    """Calls `begin` before the first of `tensors` gets a gradient in a pass, `tell` after the last.

    Gradients are passed to `take`, with the index of their tensor as key, a few at a time, and are
    not kept afterwards. `take` returns what to report for each. `tell` gets these results in the
    order of `tensors`, with None for a tensor without a gradient. If a pass is nested in another
    pass that was already reported (as with reentrant checkpoints), `add` gets its results instead.

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
        # Autograd's number of the outer pass, which begins at the model's output.
        self._outer: int | None = None
        # Whether the outer pass has begun, and whether it was reported.
        self._begun = self._told = False
        self._passes: dict[int, _Pass[Taken]] = {}
        self._handles: list[Any] = [
            tensor.register_hook(partial(self._hear, index))  # type: ignore[no-untyped-call]
            for index, tensor in enumerate(tensors)
        ]

    def expect(self, output: Any) -> None:
        """Hook `output` of a forward pass, since a backward pass will begin there.

        Passes nested in this backward pass count as parts of it.
        """
        if torch._C._current_graph_task_id() < 0:
            self._outer = None  # an exception may have ended the last backward pass
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
        except RuntimeError:  # torch can't determine this within torch.autograd.grad
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
    """Return a gradient that may be kept until it is recorded, without an effect on `.grad`.

    Autograd moves a dense gradient into `.grad`, but copies it if anything else refers to it. The
    copy of a DTensor may have a different placement: torch 2.11 reduces a partial sum, and gathers
    uneven shards. So a DTensor is copied here. A sparse gradient is copied, too: autograd doesn't
    copy it, and a wrapper may change its memory.
    """
    if isinstance(gradient, DTensor):
        return tensors.copied(gradient)
    return gradient.clone() if gradient.is_sparse else gradient


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def call_last(call: Callable[[], None]) -> None:
    """Call `call` at the end of the current backward pass, after all other callbacks in its queue.

    Callbacks may still be queued while the queue is processed. So a first callback queues `call`.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(hook_calls.ours(lambda: queue(hook_calls.ours(lambda: call()))))


# --- backward passes ------------------------------------------------------------------------------


# Arguments: the names of the parameters with gradients from a pass, the records that could be made
# of these gradients, and whether all of them are finite.
Gave = Callable[[Collection[str], trace.Tensors, bool], None]


class _Given(NamedTuple):
    """The record of a gradient (None if it can't be recorded), and whether it is finite."""

    record: trace.TensorRecord | None
    finite: bool


class BackwardHooks:
    """Calls `begun` before a backward pass adds to any gradient, and `ended` with what it added.

    `recorded` returns the records of gradients and whether these are finite, or None. `added` is
    called with what a nested pass adds, and `summed` when all parameters have their gradients.

    For a sharded model, `ended` gets no names, since the remaining gradients are pieces of sums
    over all ranks. It gets records of this rank's gradients of whole parameters, provided that
    values are recorded and that each parameter had exactly one gradient in the pass.
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
        # so far, and the names and records of these gradients. `_seen` are the names of the
        # parameters that were hooked while they were whole.
        self._ending, self._finite = False, True
        self._seen: set[str] = set()
        self._given: list[tuple[str, trace.TensorRecord]] = []
        self._handles: list[Any] = []
        self.set()

    def set(self) -> None:
        """Hook the parameters that the model has now; remove the hooks of earlier ones."""
        self.remove()
        with tensors.requiring_gradients(self._subject.trained.values()):
            self._set()

    def _set(self) -> None:
        # These hooks come before the recording hooks, so planted values are recorded.
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
        """Hook `output` of a forward pass, since a backward pass will begin there.

        This matters for a sharded model: hooks of its pieces run only when a sum is reduced.
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
