"""State that a model hands on from one pass to the next, such as the memory of a recurrent one.

It is among a pass's inputs, and no sample: it follows from the weights, so the same row comes with
another state in each epoch, and on another number of workers. It is known by its storage, which an
earlier pass has returned, also if it was detached since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from entrenar_py.check.observing import row_digests


class Carried:
    """Tells what is new in a pass's inputs from what earlier passes have returned."""

    def __init__(self) -> None:
        self._returned: set[StorageWeakRef] = set()

    def fresh(self, inputs: Any) -> Any:
        """Return the inputs without carried state; all of them if nothing else is left."""
        if not self._returned:
            return inputs
        tensors = [*row_digests.tensors_in(inputs)]
        fresh = [tensor for tensor in tensors if self._returned.isdisjoint(_storages([tensor]))]
        return fresh if len(fresh) < len(tensors) and any(t.dim() for t in fresh) else inputs

    def note(self, inputs: Any, output: Any) -> None:
        """Note what a pass has returned, but for what it was given itself."""
        self._returned = {ref for ref in self._returned if not ref.expired()}  # type: ignore[no-untyped-call]
        fresh = {*_storages(row_digests.tensors_in(output))}
        self._returned |= fresh - {*_storages(row_digests.tensors_in(inputs))}


def _storages(tensors: Iterable[Tensor]) -> Iterator[StorageWeakRef]:
    """Yield the storages of plain tensors."""
    for tensor in tensors:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if type(tensor) is Tensor and tensor.layout is torch.strided and not wrapped:
            yield StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
