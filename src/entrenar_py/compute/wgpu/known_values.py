"""The values of tensors that follow from no input, while a function is traced without values.

A branch on such a tensor (a mask made of positions, say) is decided while capturing.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

NUM_ELEMENTS_MAX = 2**18  # of a tensor whose values are followed

_RANDOM = torch.Tag.nondeterministic_seeded


class KnownValues:
    """For each traced tensor whose values are known, a tensor that has them."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def operands(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with known values for traced tensors; None if one isn't known."""
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if any(self._of(one) is None for one in tensors):
            return None

        def take(one: Any) -> Any:
            return self._of(one) if isinstance(one, Tensor) else one

        taken: tuple[Any, Any] = pytree.tree_map(take, (args, kwargs))
        return taken

    def compute(self, func: Any, operands: tuple[Any, Any]) -> Any:
        """Return the result of `func` on known operands, outside of the trace."""
        args, kwargs = operands
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)

    def follow(self, func: Any, args: Any, operands: tuple[Any, Any] | None, result: Any) -> None:
        """Note the values of `result`, traced tensors that `func` made of known operands or none.

        If `func` writes to a tensor, its values stay known only if those of all operands are.
        """
        if operands is None or _RANDOM in func.tags:
            if func._schema.is_mutable:
                self._forget(func, args)
            return
        made = [one for one in pytree.tree_leaves(result) if isinstance(one, FakeTensor)]
        if made and all(one.numel() <= NUM_ELEMENTS_MAX for one in made):
            found = pytree.tree_leaves(self.compute(func, operands))
            values = [one for one in found if isinstance(one, Tensor)]
            for traced, value in zip(made, values, strict=True):
                self._known[traced] = value
        elif func._schema.is_mutable:
            self._forget(func, args)

    def _of(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, FakeTensor):
            return self._known.get(tensor)
        return tensor if tensor.numel() <= NUM_ELEMENTS_MAX else None

    def _forget(self, func: Any, args: Any) -> None:
        """Forget what shares memory with a tensor that `func` writes to."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for written in pytree.tree_leaves(value):
                known = self._known.get(written) if isinstance(written, FakeTensor) else None
                if known is not None:
                    memory = known.untyped_storage()._cdata
                    for traced, other in list(self._known.items()):
                        if other.untyped_storage()._cdata == memory:
                            del self._known[traced]
