"""Makes the script's own optimizers get their parameters in a different order in each group.

A class gets the changed order when an optimizer is created, and never later. So whatever it keeps
in the order of its parameters, such as moments in a list, matches the parameters in any order. A
weight and the vectors after it may belong together, so they stay together, and the weights come in
reverse order. An optimizer may nevertheless depend on the order, through lists that are passed
along with the parameters, or through random numbers drawn for one parameter after another. This is
no mistake, and no equation of `causes/parameter_order` reports it as one. Recorded rules show which
order a run had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from entrenar_py.check.observing import call_sites

_PARAMS = "params"
# A class that is derived from another class of the script, or creates an object of one, passes its
# own order on. One flag is sufficient: a process creates optimizers in one thread.
_is_within = False


def begin() -> None:
    """Make the script's optimizer classes get reordered parameters.

    The constructor of each class is replaced when the class is defined: torch's base class would be
    called too late, after the class has used the parameters. The replacement is never undone, since
    a script may define a class at any time, and this run is made for nothing else.
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
    """Return parameters, or groups of parameters, in a different order; any other object as it is.

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
    """Return parameters in reverse order, but keep the vectors after a matrix with the matrix.

    Items may be (name, parameter) pairs. If there are only vectors, they are returned in reverse. A
    list with anything other than tensors is returned as it is.
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
