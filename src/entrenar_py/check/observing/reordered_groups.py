"""Build optimizers of the script's own classes with the parameters of each group in another order.

A class gets the other order as it is built, and never later: what it keeps by place, such as
moments in a list, fits its parameters in any order. A weight and the vectors after it may belong
together, so these stay as they are, and the weights come in reverse. An optimizer may not fit all
the same: lists that come with the parameters, or random numbers for one after the other, are then
those of other tensors. That is no mistake, and no equation of `causes/parameter_order` takes it for
one. Recorded rules show which order a run had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from entrenar_py.check.observing import call_sites, planned_faults
from entrenar_py.shared.faults import REORDERED, has_kind

_PARAMS = "params"
# A class that is derived from another one of the script's, or builds one, hands on its own order.
# Optimizers are built in one thread of a process, so one flag for all will do.
_is_within = False


def begin_if_planned() -> None:
    """Have classes of the script get parameters in another order, if a fault plans that.

    Each class has its constructor replaced as it is defined: torch's own base class sees too late
    what a class does with the parameters before it hands them on. That stays so for the life of
    the process: a script may define a class at any time, and this run is made for nothing else.
    """
    if has_kind(planned_faults.planned(), REORDERED):
        kind: Any = torch.optim.Optimizer
        kind.__init_subclass__ = classmethod(_defined)


def _defined(kind: Any, /, **named: Any) -> None:
    super(torch.optim.Optimizer, kind).__init_subclass__(**named)
    if call_sites.is_own_class(kind):
        kind.__init__ = _reordering(kind.__init__)


def _reordering(build: Callable[..., None]) -> Callable[..., None]:
    @wraps(build)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        global _is_within
        if _is_within:
            build(self, *arguments, **named)
            return
        if arguments:
            arguments = (_reordered(arguments[0]), *arguments[1:])
        elif _PARAMS in named:
            named[_PARAMS] = _reordered(named[_PARAMS])
        _is_within = True
        try:
            build(self, *arguments, **named)
        finally:
            _is_within = False

    return init


def _reordered(params: Any) -> Any:
    """Return parameters, or groups of them, in another order; anything else as it is.

    Groups are changed in place, as torch does: the script may keep them.
    """
    if not isinstance(params, Iterable) or isinstance(params, Tensor | nn.Module | Mapping | str):
        return params
    params = [*params]
    for group in params:
        if isinstance(group, dict) and isinstance(group.get(_PARAMS), Iterable):
            group[_PARAMS] = _reordered(group[_PARAMS])
    return in_another_order(params)


def in_another_order(params: list[Any]) -> list[Any]:
    """Return parameters, which may have names, in reverse; vectors stay behind their matrix.

    Vectors alone come in reverse. What has anything else in it is returned as it is.
    """
    tensors = [entry[-1] if isinstance(entry, tuple) else entry for entry in params]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return params
    are_vectors = all(tensor.dim() < 2 for tensor in tensors)
    blocks: list[list[Any]] = []
    for entry, tensor in zip(params, tensors, strict=True):
        if not blocks or tensor.dim() > 1 or are_vectors:
            blocks.append([])
        blocks[-1].append(entry)
    return [entry for block in reversed(blocks) for entry in block]
