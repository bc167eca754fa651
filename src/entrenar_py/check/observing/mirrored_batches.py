"""Changes the batches of loaders, to compare a run on several workers with a run on one.

Common order: some samplers draw a different order for each number of workers. So loaders fetch
batches in the order of the data set, and each rank gets its part of each batch.

Mirrored ranks: the loaders of all ranks fetch the same samples, as if each rank had the same part
of the batch. This is for a loss that couples samples, such as one that takes negatives from the
batch, since its value for a batch isn't the mean of its values for the parts. If all ranks have the
same part, they must train as one worker does on this part, or on as many copies of it as there are
ranks. So the loaders of the run on one worker fetch as many samples as those of a rank do, or these
samples repeated.

Only the choice and the number of samples change, and they are fetched in the order of the data set.
A script is not affected if it doesn't use torch's loaders, or reads a stream.

Merged batches: for scripts with a fixed batch size per worker instead of a global batch size. In
the run on one worker, loaders fetch as many batches at once as the full run has workers. The length
of these loaders is that of a worker's loaders in the full run, because schedules and the last
accumulation of an epoch depend on it.

Short epochs: an iteration ends after a few batches, and its last batch also lists the samples that
the sampler would have drawn for the batches left out. Only the end of an epoch shows whether it has
every sample, and how the next epoch begins. Loaders report the reduced number of batches, since
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

_num_batches = DataLoader.__len__  # torch's own number of batches
_CHANGED: set[Fault] = set()  # the faults for which this process's loaders were already changed


class LastBatch(list[Any]):
    """The positions in the last batch of an iteration; `rest` are those of the batches left out."""

    rest: tuple[int, ...] = ()


def begin_if_planned() -> None:
    """Make this process's loaders fetch different samples, if the harness planned that."""
    if os.environ.get(FAULTS, "[]") == "[]":
        return  # don't load torch.distributed.tensor into a process that may never train
    from entrenar_py.check.observing import planned_faults

    begin(fault for fault in planned_faults.planned() if fault.kind in OF_LOADERS)


def begin(planned: Iterable[Fault]) -> None:
    """Make this process's loaders fetch different samples, if one of the faults `planned` does so.

    Batches are merged first, and then parts are taken of the merged batches, since the batch of a
    worker may have an odd number of samples.
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
    for name in ("__init__", "_reset"):  # both methods draw an order from the sampler
        setattr(iterator, name, _drawing(getattr(iterator, name), drawn))


def _change_length(length: Callable[[Any, int], int]) -> None:
    """Make all loaders of data sets with a length report a different number of batches.

    `length(loader, number)` returns it, given the loader's original number of batches.
    """

    def num_batches(self: Any) -> int:
        if self._dataset_kind == _DatasetKind.Iterable:
            return _num_batches(self)
        return length(self, _num_batches(self))

    DataLoader.__len__ = num_batches  # type: ignore[method-assign]


def merged_length(loader: Any, length: int, count: int) -> int:
    """Return a loader's number of batches if each `count` of its `length` batches are merged."""
    return length // count if _drops_last(loader) else -(-length // count)


def _drops_last(loader: Any) -> bool:
    return bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last))


@dataclass(frozen=True, kw_only=True)
class Share:
    """The samples that a loader fetches instead of a batch that its sampler has drawn.

    A batch is divided into `parts` parts; the loader fetches one of them, `copies` times. Batches
    follow one another in the data set, in turn for each of the `of` ranks; this is the batch of
    `rank`.
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
        except TypeError:  # the data set is a stream, without a length
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
    """Yield the positions of each `count` batches as one batch.

    If a loader drops a last batch that is not full, a last group of fewer than `count` batches is
    dropped, too: in the full run, one of the workers would have no batch.
    """
    while batches := [*islice(drawn, count)]:
        if len(batches) < count and _drops_last(loader):
            return
        if all(isinstance(index, list) for index in batches):
            yield [at for index in batches for at in index]
        else:
            yield from batches


def shortened(drawn: Iterator[Any], loader: Any, count: int) -> Iterator[Any]:
    """Yield the first `count` batches.

    The last one also has, in `rest`, the positions of later ones.
    """
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


# Fault -> (generator of the batches that loaders fetch, function for their number of batches).
_BY_COUNT: Mapping[str, tuple[Callable[..., Iterator[Any]], Callable[..., int]]] = {
    MERGED: (merged, merged_length),
    SHORTENED: (shortened, lambda _, length, count: min(length, count)),
}
