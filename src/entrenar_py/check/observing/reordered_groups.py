"""Build optimizers of the script's own classes with the parameters of each group in another order.

A step must not depend on the order. The class is given another one as it is built, and never later:
what it keeps by place, such as moments in a list, fits its parameters in any order. Those that
follow each other in one module (a weight and its bias) may belong together, so that modules come in
reverse order, and each is left as it is.

What comes with parameters by place (a list of their names or rates), or a state that is loaded
before the first step, would not fit. Then the order stays as it is; and if the constructor draws
random numbers, or keeps a generator, for one parameter after the other. What is drawn in a step is
counted, by a generator of its own as well, so that no such step is compared. Recorded rules show
which order a run had.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from entrenar_py.check.observing import call_sites, generators, planned_faults
from entrenar_py.shared.faults import are_reordered

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PARAMS = "params"
# An optimizer that another one builds or steps has the order that it is given, and draws within its
# step. Both run in one thread of a process, which trains one model: so one flag for all will do.
_is_within = False
# In another order, and yet to step: the usual place of each parameter.
_unstepped: WeakKeyDictionary[torch.optim.Optimizer, Mapping[int, int]] = WeakKeyDictionary()


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that draw random numbers, by whichever generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.num += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


_draws: _Draws | None = None  # of this process, if the fault is planned


def states() -> generators.States:
    """Return how many operations have drawn as optimizers were built and stepped, if counted."""
    return {} if _draws is None else {"an optimizer": str(_draws.num)}


def begin_if_planned() -> None:
    """Have classes of the script get parameters in another order, if a fault plans that.

    Each class has its constructor replaced as it is defined: torch's own base class sees too late
    what a class does with the parameters before it hands them on. That stays so for the life of
    the process: a script may define a class at any time, and this run is made for nothing else.
    """
    global _draws
    if are_reordered(planned_faults.planned()):
        _draws = _Draws()
        kind: Any = torch.optim.Optimizer
        kind.__init_subclass__ = classmethod(_defined)


def in_another_order(params: list[Any], owners: Mapping[int, int]) -> list[Any]:
    """Return parameters, module by module in reverse order.

    `owners` has the module of each tensor. Where it is unknown, one begins with a matrix.
    """
    modules: list[list[Any]] = []
    last: Tensor | None = None
    for one in params:
        tensor = _tensor(one)
        owner = owners.get(id(tensor))
        is_known = last is not None and None not in (owner, owners.get(id(last)))
        if last is None or (owner != owners.get(id(last)) if is_known else tensor.dim() > 1):
            modules.append([])
        modules[-1].append(one)
        last = tensor
    return [one for module in reversed(modules) for one in module]


def _owners() -> dict[int, int]:
    """Return by a parameter's identity that of the module which it belongs to."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    return {
        id(parameter): id(module)
        for module in modules
        for parameter in object.__getattribute__(module, "__dict__").get("_parameters", {}).values()
    }


def _defined(kind: Any, /, **named: Any) -> None:
    super(torch.optim.Optimizer, kind).__init_subclass__(**named)
    if call_sites.is_own_class(kind):
        kind.__init__ = _reordering(kind.__init__)
        if "step" in vars(kind):
            kind.step = _counting(kind.step)


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that counts what is drawn as it runs, unless that is counted already."""

    @wraps(original)
    def counted(self: Any, *given: Any, **named: Any) -> Any:
        global _is_within
        if _is_within or _draws is None:
            return original(self, *given, **named)
        _is_within = True
        try:
            with _draws:
                return original(self, *given, **named)
        finally:
            _is_within = False

    return counted


def _reordering(original: Callable[..., None]) -> Callable[..., None]:
    build = _counting(original)

    @wraps(original)
    def init(self: Any, *given: Any, **named: Any) -> None:
        if _is_within:
            original(self, *given, **named)
            return
        given, usual = _reordered(given, named)
        before = {**states(), **generators.global_states()}
        build(self, *given, **named)
        if usual:
            _unstepped[self] = usual
            self.register_step_pre_hook(_forget)
            self.register_load_state_dict_pre_hook(lambda *_: _put_back(self))
        draws = before != {**states(), **generators.global_states()}
        if draws or any(isinstance(value, _GENERATORS) for value in _values(self)):
            _put_back(self)

    return init


def _reordered(
    given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[int, int]]:
    """Return the arguments of a constructor with its parameters in another order, if that fits.

    Return with them the usual places of the parameters that come in another order, by identity.
    `named` and groups are changed in place, these as torch does: the script may keep them.
    """
    params = given[0] if given else named.get(_PARAMS)
    if not isinstance(params, Iterable) or isinstance(params, Tensor | nn.Module | Mapping | str):
        return given, {}
    params = [*params]
    groups = [group for group in params if isinstance(group, dict) and _PARAMS in group]
    for group in groups:
        group[_PARAMS] = [group[_PARAMS]] if _is_one(group[_PARAMS]) else [*group[_PARAMS]]
    sizes = {len(params), *(len(group[_PARAMS]) for group in groups)}
    others = [*given[1:], *(value for name, value in named.items() if name != _PARAMS)]
    others += [value for group in groups for name, value in group.items() if name != _PARAMS]
    usual: dict[int, int] = {}
    if not any(_goes_with(value, sizes) for value in others):
        owners = _owners()
        for group in groups:
            usual |= _places(group[_PARAMS])
            group[_PARAMS] = in_another_order(group[_PARAMS], owners)
        if not groups and all(map(_is_one, params)):
            usual = _places(params)
            params = in_another_order(params, owners)
    if given:
        return (params, *given[1:]), usual
    named[_PARAMS] = params
    return given, usual


def _tensor(one: Any) -> Tensor:
    """Return a parameter that may come with its name."""
    tensor: Tensor = one[1] if isinstance(one, tuple) else one
    return tensor


def _places(params: list[Any]) -> dict[int, int]:
    return {id(_tensor(one)): place for place, one in enumerate(params)}


def _is_one(value: object) -> bool:
    """Return whether a value is a parameter, or one with its name."""
    is_named = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Tensor)
    return isinstance(value, Tensor) or is_named


def _goes_with(value: object, sizes: set[int]) -> bool:
    """Return whether a value may have an entry for each parameter. A pair of betas has none."""
    if isinstance(value, tuple) and all(isinstance(entry, int | float) for entry in value):
        return False
    if isinstance(value, Tensor):
        return value.dim() > 0 and len(value) in sizes
    return isinstance(value, list | tuple | dict) and len(value) in sizes


def _values(optimizer: Any) -> Iterator[Any]:
    yield from vars(optimizer).values()
    for group in optimizer.param_groups:
        yield from group.values()


def _forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _unstepped.pop(optimizer, None)


def _put_back(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has not stepped its parameters in the usual order.

    What it keeps by place doesn't fit any more. Nothing is judged then, as the rules show. One that
    was built in the usual order, or has stepped since, is left as it is: it has no places here.
    """
    usual = _unstepped.pop(optimizer, {})
    for group in optimizer.param_groups if usual else ():
        group[_PARAMS] = sorted(group[_PARAMS], key=lambda one: usual.get(id(one), len(usual)))
