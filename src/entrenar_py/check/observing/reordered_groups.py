"""Optimizers of the script's own classes, built with a different parameter order in each group.

A class gets the changed order when it is built, and never later: what it keeps by place, such as
moments in a list, then fits its parameters in any order. A weight and the vectors after it may
belong together, so they stay together, and the weights come in reverse order. An optimizer may
still not fit: lists that come with the parameters, or random numbers drawn for one parameter after
the other, then belong to different tensors. That is no mistake, and no equation of
`causes/parameter_order` reports it as one. Recorded rules show which order a run had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from entrenar_py.check.observing import call_sites

_PARAMS = "params"
# A class that is derived from another class of the script, or builds one, passes on its own order.
# Optimizers are built in one thread of a process, so one flag for all is sufficient.
_is_within = False


def begin() -> None:
    """Make classes of the script receive reordered parameters.

    The constructor of each class is replaced when the class is defined: torch's base class would be
    called too late, after the class has used the parameters. This remains for the life of the
    process, since a script may define a class at any time, and this run is made for nothing else.
    """
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
    """Return parameters, or groups of them, in a different order; any other object as it is.

    Groups are changed in place, as torch does, since the script may keep them.
    """
    if not isinstance(params, Iterable) or isinstance(params, Tensor | nn.Module | Mapping | str):
        return params
    params = [*params]
    for group in params:
        if isinstance(group, dict) and isinstance(group.get(_PARAMS), Iterable):
            group[_PARAMS] = _reordered(group[_PARAMS])
    return in_another_order(params)


def in_another_order(params: list[Any]) -> list[Any]:
    """Return parameters, which may have names, in reverse; vectors stay after their matrix.

    If there are only vectors, they come in reverse. A list with anything other than tensors is
    returned as it is.
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
