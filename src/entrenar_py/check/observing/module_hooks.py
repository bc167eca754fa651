"""Hooks of a model that stay behind when the script copies or saves the model."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from entrenar_py.shared import hook_calls

LOOKS_MAX = 3  # for modules that the script has compiled since


class OwnHook:
    """Calls `call` with a hook's arguments after the module, if the module is `model` itself.

    A copy of the model (an average of its weights), or a model that is loaded again, has a function
    of Python's own in its place that does nothing. So it does nothing where the model is compiled.
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
    other hooks, and `after(model, inputs, output)` after it. The script calls the module `called`:
    the model, or a compiled module that contains it, where hooks of the model itself are compiled
    away. `inputs` are the positional and the named arguments.

    A model without a forward pass (an agent with an actor and a critic) can't be called itself. The
    script calls methods of it, and the first of its modules that one calls is what is being called.
    """

    def __init__(
        self, model: nn.Module, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        is_list = isinstance(model, nn.ModuleList | nn.ModuleDict)
        self.models = tuple(model.children()) if is_list else (model,)
        self._before, self._after = before, after
        self._called: dict[nn.Module, nn.Module] = {}  # model -> what is being called of it
        self._firsts: dict[tuple[nn.Module, nn.Module], Any] = {}
        self._handles: list[Any] = []
        self._was_entered, self._are_new, self._num_looks = False, False, LOOKS_MAX
        for own in self.models:
            self._hook(own, own)
        self._silent = [own for own in self.models if type(own).forward is nn.Module.forward]
        self._calls = register_module_forward_pre_hook(self._begins) if self._silent else None
        self._look_up()

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        """Take a module in training for what is called of a model without a forward pass."""
        if hook_calls.is_traced() or not (module.training and torch.is_grad_enabled()):
            return
        model = next((own for own in self._silent if module in {*own.modules()}), None)
        if model is not None:
            self._hook(model, module)  # hooks that are set now aren't called before this pass
            self.enter(model, module, inputs, {})

    def _heard(self, called: nn.Module) -> None:
        """Note that a module is called: models without a forward pass that have it are known."""
        self._silent = [own for own in self._silent if called not in {*own.modules()}]
        if self._calls is not None and not self._silent:
            self._calls.remove()
            self._calls = None

    def _look_up(self) -> bool:
        """Hook the compiled modules that contain a model; return whether there are new ones."""
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
        """Note that a forward pass begins, unless it is part of one that is known."""
        if self._called.get(model, called) is called:
            self._called[model], self._was_entered = called, True
            self._heard(called)
            self._before(model, called, inputs)

    def settle(self) -> None:
        """Note that a backward pass begins. Look for new modules if no forward pass was seen.

        That is done a few times only, as it takes some 50 ms.
        """
        self._called.clear()  # an exception may have ended a forward pass
        was_seen, self._was_entered = self._was_entered, False
        if not was_seen and self._num_looks:
            self._num_looks -= 1
            self._are_new |= self._look_up()

    def are_new(self) -> bool:
        """Return whether compiled modules were found since the last call."""
        found, self._are_new = self._are_new, False
        return found

    def is_first(self, model: nn.Module, called: nn.Module) -> bool:
        """Return whether the hook came before all others; else have it come first from now on.

        Such a hook may replace the parameters.
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
    """Return for each model the compiled modules that contain it: their hooks aren't traced.

    All objects are looked at, as modules don't know what contains them. There is none before
    dynamo is imported.
    """
    found: dict[nn.Module, list[nn.Module]] = {model: [] for model in models}
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    for thing in gc.get_objects() if dynamo is not None else ():
        kind = type(thing)
        if not issubclass(kind, nn.Module) or "_modules" not in vars(thing):
            continue  # the latter is not made yet
        if issubclass(kind, dynamo.OptimizedModule) or thing._compiled_call_impl is not None:
            parts = set(thing.modules())
            for model, outer in found.items():
                if thing is not model and model in parts:
                    outer.append(thing)
    return found
