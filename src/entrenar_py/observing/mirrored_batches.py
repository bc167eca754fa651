"""Mirrored ranks: the loaders of all ranks fetch the same samples, as if each had the same share.

A loss that couples samples, such as one with negatives from the batch, is another one on another
batch. If all ranks have one share, the training must be that of one worker on this share, or on as
many copies of it as there are ranks. One worker's loaders then fetch as many samples as a rank's
do, or that, repeated.

Only which samples are fetched is changed, and how many: they come in the order of the data set. A
script that doesn't use torch's loaders, or whose data set is a stream, is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from entrenar_py.faults import MIRRORED, REPEATED, Fault
from entrenar_py.observing import process_rank
from entrenar_py.observing.sources import positions_of


def begin(planned: Sequence[Fault]) -> None:
    """Have this process's loaders fetch what all ranks do, if one of the `planned` faults is so."""
    for fault in planned:
        if fault.kind in (MIRRORED, REPEATED):
            workers = int(fault.value or 1)
            parts = workers if process_rank.place()[1] == 1 else 1
            copies = workers if fault.kind == REPEATED else 1
            iterator: Any = _BaseDataLoaderIter
            for name in ("__init__", "_reset"):  # each of them asks the sampler for an order
                inner = getattr(iterator, name)
                setattr(iterator, name, _drawing(inner, parts, copies))


def _drawing(inner: Callable[..., Any], parts: int, copies: int) -> Callable[..., Any]:
    @wraps(inner)
    def begin_pass(self: Any, loader: Any, *args: Any, **named: Any) -> Any:
        result = inner(self, loader, *args, **named)
        try:
            num_samples = len(loader.dataset)
        except TypeError:  # a stream
            return result
        self._sampler_iter = _shares(self._sampler_iter, num_samples, parts, copies)
        return result

    return begin_pass


def _shares(drawn: Iterator[Any], num_samples: int, parts: int, copies: int) -> Iterator[Any]:
    """Yield the positions of a share's samples for each batch that a sampler has drawn."""
    begin = 0
    for index in drawn:
        positions = positions_of(index)
        share = len(positions) // parts if positions and isinstance(index, list) else 0
        if not share:
            yield index
            continue
        yield [at % num_samples for at in range(begin, begin + share)] * copies
        begin += share
