"""Counts the dropout masks that modules beside the model draw, though nothing of them trains.

A teacher or a reference model in training mode is another function in each step. Neither its
weights nor its buffers show that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook

from entrenar_py.shared import hook_calls


class FrozenDropout:
    """The number of masks of each module that was named to `watch`.

    The hook is torch's global one: modules with hooks of their own could not be pickled.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._labels: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # by dropout
        self._is_hooked = False

    def watch(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """Count the masks of these modules from here on, by the labels that they have."""
        for label, module in named:
            if label and may_draw(module):
                self._counts[label] += 0
                drawing = (part for part in module.modules() if isinstance(part, _DropoutNd))
                self._labels.update((part, label) for part in drawing if part not in self._labels)
        if self._labels and not self._is_hooked:
            self._is_hooked = True
            register_module_forward_hook(self._count)

    def counts(self) -> dict[str, Tensor]:
        """Return the numbers of masks by `masks of label/num_masks`."""
        return {f"masks of {n}/num_masks": torch.tensor(c) for n, c in self._counts.items()}

    @hook_calls.outside
    def _count(self, module: nn.Module, *_: Any) -> None:
        label = self._labels.get(module) if module.training else None
        if label is not None:
            self._counts[label] += 1


def may_draw(module: nn.Module) -> bool:
    """Return whether a module has dropout and nothing that trains."""
    has_dropout = any(isinstance(part, _DropoutNd) and part.p > 0 for part in module.modules())
    return has_dropout and not any(p.requires_grad for p in module.parameters())
