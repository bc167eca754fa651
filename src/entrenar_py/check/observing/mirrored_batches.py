"""Replaced batches of loaders, so that runs on several workers can be compared with a run on one.

Some samplers have a different order for each number of workers. With a common order, loaders fetch
batches in the order of the data set, and each rank gets its part of each.

With mirrored ranks, the loaders of all ranks fetch the same samples, as if each had the same part.
A loss that couples samples, such as one with negatives from the batch, is different for a different
batch. If all ranks have the same part, they must train as one worker does on this part, or on as
many copies of this part as there are ranks. The loaders of one worker then fetch as many samples as
those of a rank, or these samples repeated.

Only the choice and the number of samples change: they are fetched in the order of the data set. A
script that doesn't use torch's loaders, or that reads a stream, is not changed.

Merged batches are for scripts with a fixed batch size per worker, instead of a global batch size.
One worker then fetches as many batches at once as the full run has workers. Its loaders have the
same length as a worker's loaders in that run, because schedules and the last accumulation of an
epoch depend on the length.

With short epochs, an iteration ends after some batches, and its last batch also lists the samples
that the sampler would have drawn for the remaining ones. Only the end of an epoch shows whether it
has every sample, and how the next one begins. Loaders report the reduced number of batches, since
some scripts count epochs by it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from typing import Any

from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter, _DatasetKind

from entrenar_py.check.observing import FAULTS
from entrenar_py.check.observing.sources import positions_of
from entrenar_py.shared.faults import (
    MERGED,
    MIRRORED,
    OF_LOADERS,
    ORDERED,
    REPEATED,
    SHORTENED,
    Fault,
)

_num_batches = DataLoader.__len__  # as torch counts batches
_CHANGED: set[Fault] = set()  # the faults for which loaders of this process were changed


class LastBatch(list[Any]):
    """The positions of a pass's last batch; `rest` are those of the batches that were left out."""

    rest: tuple[int, ...] = ()


def begin_if_planned() -> None:
    """Make this process's loaders fetch different samples, if the harness has planned that."""
    if os.environ.get(FAULTS, "[]") == "[]":
        return  # a process that may never train need not load torch.distributed.tensor
    from entrenar_py.check.observing import planned_faults

    begin(fault for fault in planned_faults.planned() if fault.kind in OF_LOADERS)


def begin(planned: Iterable[Fault]) -> None:
    """Make this process's loaders fetch different samples, if one of the `planned` faults does so.

    Batches are merged first, and parts are taken of the merged batches: the batch of a worker may
    have an odd number of samples.
    """
    from entrenar_py.check.observing import surroundings

    rank, world_size = surroundings.place()
    for fault in sorted(planned, key=lambda fault: fault.kind != MERGED):
        if fault in _CHANGED:
            continue
        _CHANGED.add(fault)
        if fault.kind in _BY_COUNT:
            drawn, length = _BY_COUNT[fault.kind]
            _change(partial(drawn, count=int(fault.value or 1)))
            _change_length(partial(length, count=int(fault.value or 1)))
        if fault.kind not in (ORDERED, MIRRORED, REPEATED):
            continue
        workers = int(fault.value or 1)
        share = (
            Share(rank=rank, of=world_size)
            if fault.kind == ORDERED
            else Share(
                parts=workers if world_size == 1 else 1,
                copies=workers if fault.kind == REPEATED else 1,
            )
        )
        _change(partial(shares, share=share))


def _change(drawn: Callable[[Iterator[Any], Any], Iterator[Any]]) -> None:
    iterator: Any = _BaseDataLoaderIter
    for name in ("__init__", "_reset"):  # both of these draw an order from the sampler
        setattr(iterator, name, _drawing(getattr(iterator, name), drawn))


def _change_length(length: Callable[[Any, int], int]) -> None:
    """Make all loaders of numbered samples report a changed number of batches.

    `length` returns it, given a loader and the loader's original number of batches.
    """

    def num_batches(self: Any) -> int:
        if self._dataset_kind == _DatasetKind.Iterable:
            return _num_batches(self)
        return length(self, _num_batches(self))

    DataLoader.__len__ = num_batches  # type: ignore[method-assign]


def merged_length(loader: Any, length: int, count: int) -> int:
    """Return the number of batches of a loader if `count` of its `length` batches are merged."""
    return length // count if _drops_last(loader) else -(-length // count)


def _drops_last(loader: Any) -> bool:
    return bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last))


@dataclass(frozen=True, kw_only=True)
class Share:
    """The samples that a loader fetches instead of a batch that it has drawn.

    A batch is divided into `parts`; one of them is fetched, `copies` times. Batches follow one
    another in the data set, in turn for each of the `of` ranks; this is the batch of `rank`.
    """

    parts: int = 1
    copies: int = 1
    rank: int = 0
    of: int = 1


def _drawing(
    inner: Callable[..., Any], drawn: Callable[[Iterator[Any], Any], Iterator[Any]]
) -> Callable[..., Any]:
    @wraps(inner)
    def begin_pass(self: Any, loader: Any, *args: Any, **named: Any) -> Any:
        result = inner(self, loader, *args, **named)
        try:
            len(loader.dataset), len(loader)
        except TypeError:  # a stream
            return result
        self._sampler_iter = drawn(self._sampler_iter, loader)
        return result

    return begin_pass


def shares(drawn: Iterator[Any], loader: Any, share: Share) -> Iterator[Any]:
    """Yield, for each batch that a sampler has drawn, the positions of the share's samples."""
    begin, num_samples = 0, len(loader.dataset)
    for index in drawn:
        positions = positions_of(index)
        size = len(positions) // share.parts if positions and isinstance(index, list) else 0
        if not size:
            yield index
            continue
        first = begin + share.rank * size
        yield [at % num_samples for at in range(first, first + size)] * share.copies
        begin += share.of * size


def merged(drawn: Iterator[Any], loader: Any, count: int) -> Iterator[Any]:
    """Yield the positions of `count` batches at a time, as one batch.

    If a loader drops a last batch that is not full, a group of fewer batches is dropped, too: one
    of the workers would have no batch.
    """
    while batches := [*islice(drawn, count)]:
        if len(batches) < count and _drops_last(loader):
            return
        if all(isinstance(index, list) for index in batches):
            yield [at for index in batches for at in index]
        else:
            yield from batches


def shortened(drawn: Iterator[Any], loader: Any, count: int) -> Iterator[Any]:
    """Yield the first `count` batches; the last of them lists the positions of all later ones."""
    for number, index in enumerate(drawn, start=1):
        positions = positions_of(index)
        if number < count or not positions or not isinstance(index, list):
            yield index
            continue
        last = LastBatch(index)
        left = map(positions_of, islice(drawn, _num_batches(loader)))
        last.rest = tuple(at for batch in left for at in batch or ())
        yield last
        return


# Fault -> what loaders fetch, and their number of batches.
_BY_COUNT: Mapping[str, tuple[Callable[..., Iterator[Any]], Callable[..., int]]] = {
    MERGED: (merged, merged_length),
    SHORTENED: (shortened, lambda _, length, count: min(length, count)),
}
