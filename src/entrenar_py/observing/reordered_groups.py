"""Build optimizers of the script's own classes with the parameters of each group in another order.

A step must not depend on the order. The class is given another one as it is built, and never later:
what it keeps by place, such as moments in a list, fits its parameters in any order. Two that follow
each other may belong together (a weight and its bias, both matrices of an adapter), so that pairs
stay as they are, and come in reverse order.

What comes with parameters by place (a list of their names or rates), or a state that is loaded
before the first step, would not fit. Then, or if a generator of the optimizer's own draws for one
parameter after the other, the order stays as it is. Recorded rules show which order a run had.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from entrenar_py.faults import are_reordered
from entrenar_py.observing import call_sites, planned_faults

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PARAMS = "params"
_building = False  # an optimizer that another one builds has the order that it is given
_unstepped: WeakSet[torch.optim.Optimizer] = WeakSet()  # in another order, and yet to step


def begin_if_planned() -> None:
    """Have classes of the script get parameters in another order, if a fault plans that.

    Each class has its constructor replaced as it is defined: torch's own base class sees too late
    what a class does with the parameters before it hands them on.
    """
    if are_reordered(planned_faults.planned()):
        kind: Any = torch.optim.Optimizer
        kind.__init_subclass__ = classmethod(_defined)


def in_another_order(params: list[Any]) -> list[Any]:
    """Return pairs of parameters in reverse order; a last one without another stays the last."""
    pairs = [params[at : at + 2] for at in range(0, len(params) - 1, 2)]
    return [*(one for pair in reversed(pairs) for one in pair), *params[2 * len(pairs) :]]


def _defined(kind: Any, /, **named: Any) -> None:
    super(torch.optim.Optimizer, kind).__init_subclass__(**named)
    if call_sites.is_own_class(kind):
        kind.__init__ = _reordering(kind.__init__)


def _reordering(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *given: Any, **named: Any) -> None:
        global _building
        if _building:
            original(self, *given, **named)
            return
        _building = True
        try:
            given, is_changed = _reordered(given, named)
            original(self, *given, **named)
        finally:
            _building = False
        if is_changed:
            _unstepped.add(self)
            self.register_step_pre_hook(lambda *_: _unstepped.discard(self))
            self.register_load_state_dict_pre_hook(lambda *_: _put_back(self))
        if any(isinstance(value, _GENERATORS) for value in _values(self)):
            _put_back(self)

    return init


def _reordered(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], bool]:
    """Return the arguments of a constructor with its parameters in another order, if that fits.

    `named` and groups are changed in place, these as torch does: the script may keep them.
    """
    params = given[0] if given else named.get(_PARAMS)
    if not isinstance(params, Iterable) or isinstance(params, Tensor | nn.Module | Mapping | str):
        return given, False
    params = [*params]
    groups = [group for group in params if isinstance(group, dict) and _PARAMS in group]
    for group in groups:
        group[_PARAMS] = [group[_PARAMS]] if _is_one(group[_PARAMS]) else [*group[_PARAMS]]
    sizes = {len(params), *(len(group[_PARAMS]) for group in groups)}
    others = [*given[1:], *(value for name, value in named.items() if name != _PARAMS)]
    others += [value for group in groups for name, value in group.items() if name != _PARAMS]
    is_changed = not any(_goes_with(value, sizes) for value in others)
    if is_changed:
        for group in groups:
            group[_PARAMS] = in_another_order(group[_PARAMS])
        if not groups and all(map(_is_one, params)):
            params = in_another_order(params)
    if given:
        return (params, *given[1:]), is_changed
    named[_PARAMS] = params
    return given, is_changed


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


def _put_back(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has not stepped its parameters in the usual order.

    What it keeps by place doesn't fit any more. Nothing is judged then, as the rules show.
    """
    if optimizer in _unstepped:
        _unstepped.discard(optimizer)
        for group in optimizer.param_groups:
            group[_PARAMS] = in_another_order(group[_PARAMS])
