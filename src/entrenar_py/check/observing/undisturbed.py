"""Run a model's forward pass without leaving a trace of it in the script.

Kept are the states of all generators, buffers, and the attributes of modules: counters, caches, and
losses that a forward pass leaves behind for the script.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from entrenar_py.check.observing.generators import Generators

_CONTAINERS = (dict, OrderedDict, list, set, deque)
_OWN = "entrenar_py"


@contextmanager
def undisturbed(model: nn.Module, generators: Generators) -> Iterator[Callable[[], None]]:
    """Give a function that sets the generators back, and leave all as it was at the end.

    Modules that the script compiles run as they are written.
    """
    states, modules, held = generators.kept(), [*map(_Module, model.modules())], _tensors(model)
    copies = [(tensor, tensor.detach().clone()) for tensor in held]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _eager():
                yield lambda: generators.restore(states)
    finally:
        generators.restore(states)
        for module in modules:
            module.restore()
        with torch.no_grad():
            for tensor, before in copies:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run as they are written.

    Nothing is compiled before dynamo is imported, which takes seconds.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def own_hook(model: nn.Module) -> str:
    """Return the name of a module in `model` with a hook of the script's own, "" if there is none.

    Such a hook may count passes, or keep what it sees. Hooks of `model` itself are not called by
    its `forward`.
    """
    for name, module in model.named_modules():
        if module is model:
            continue
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not _is_of_library(hook):
                return str(name)
    return ""


def _is_of_library(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)
    module = str(getattr(hook, "__module__", None) or type(hook).__module__)
    top = module.partition(".")[0]
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return top == _OWN or "site-packages" in file or "dist-packages" in file


def _tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that a forward pass may write to: buffers, and attributes of modules."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    found = [*model.buffers(), *(one for one in attributes if type(one) is Tensor)]
    kept = {id(tensor): tensor for tensor in found}
    return [one for one in kept.values() if not (one.is_meta or one.is_inference())]


class _Module:
    """The attributes of a module, and the contents of its containers."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._before = dict(self._attributes)
        self._contents = [
            (value, value.copy()) for value in self._before.values() if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        """Set the attributes back, each container in place."""
        if not _are_same(self._attributes, self._before):
            self._attributes.clear()
            self._attributes.update(self._before)
        for container, before in self._contents:
            if not _are_same(container, before):
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(before)


def _are_same(now: Any, before: Any) -> bool:
    if isinstance(now, set):
        return bool(now == before)
    parts = [
        [*one.items()] if isinstance(one, dict) else [*enumerate(one)] for one in (now, before)
    ]
    if len(parts[0]) != len(parts[1]):
        return False
    return all(a[0] == b[0] and a[1] is b[1] for a, b in zip(*parts, strict=True))
