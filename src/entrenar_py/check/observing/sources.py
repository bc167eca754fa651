"""Facts about a loader or a sampler: its data set, its samplers, and what they draw.

A sample's number is its index in the data set with which the script began, before splitting it. A
position in a `Subset` (of `random_split`, say) would not identify a sample, since ranks may have
different subsets. So positions are traced back to the original data set.
"""

from __future__ import annotations

import inspect
import re
import reprlib
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from entrenar_py.check.observing import call_sites, script_text
from entrenar_py.shared.errors import UsageError

Ids = tuple[int, ...]  # numbers of samples

_SPLITS_MAX = 16
_SEARCHED_MAX = 2**22  # positions up to which a split data set is searched


class Numbering:
    """Numbers the samples of `data` from 0 to `size` - 1; `size` is None if it is unknown.

    Parts of one data set that were joined again (`ConcatDataset`) keep their numbers in that data
    set. Different data sets are numbered one after the other. If a part occurs twice, each position
    counts as a separate sample.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._first: dict[int, int] = {}  # id of an original data set -> its first number
        self._bottoms: list[Any] = []  # the original data sets, kept so that no id is reused
        self.size: int | None = 0
        for bottom in _bottoms(data, _SPLITS_MAX):
            length = length_of(bottom)
            if length is None or self.size is None:
                self.size = None
            elif id(bottom) not in self._first:
                self._first[id(bottom)] = self.size
                self._bottoms.append(bottom)
                self.size += length
        self._selected: tuple[int, ...] | None = None
        self._is_plain = self.size is None or not _is_split(data)
        if self._is_plain:
            self.size = length_of(data)
        else:
            self._look_through()

    @property
    def bottoms(self) -> tuple[int, ...]:
        """The ids of the original data sets."""
        return tuple(self._first)

    def _look_through(self) -> None:
        length = length_of(self._data) or 0
        if length > _SEARCHED_MAX:
            self._is_plain, self.size = True, length
            return
        try:
            numbers = tuple(map(self._number, range(length)))
        except (IndexError, TypeError, ValueError):  # a subset with invalid indices
            numbers = ()
        if len(set(numbers)) < length or not numbers:
            self._is_plain, self.size = True, length
        elif length < (self.size or 0):
            self._selected = tuple(sorted(numbers))

    def of(self, position: int) -> int:
        """Return the number of the sample at `position` of the data."""
        if self._is_plain:
            return position
        try:
            return self._number(position)
        except (IndexError, TypeError, ValueError):  # the data was changed in the meantime
            return position

    def selected(self, positions: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """Return the sorted numbers of all samples of the data, or of those at `positions`.

        None stands for all numbers from 0 to `size` - 1.
        """
        if positions is None:
            return self._selected
        numbers = sorted({self.of(position) for position in positions})
        return None if self.size is not None and len(numbers) == self.size else tuple(numbers)

    def _number(self, position: int) -> int:
        data: Any = self._data
        for _ in range(_SPLITS_MAX):
            if isinstance(data, Subset):
                data, position = data.dataset, int(data.indices[position])
            elif isinstance(data, ConcatDataset):
                part = bisect_right(data.cumulative_sizes, position)
                position -= data.cumulative_sizes[part - 1] if part else 0
                data = data.datasets[part]
            elif (inner := _inner(data)) is not None:
                data = inner
            else:
                break
        length = length_of(data) or 0
        position += length if position < 0 else 0
        if not 0 <= position < length:
            raise IndexError(position)
        return self._first[id(data)] + position


def declared_numbering(dataset: Any, drawn: Numbering | None) -> Numbering:
    """Return the numbering of the data set that a script declares as an epoch's samples.

    `dataset` may be a number of samples instead. `drawn` is the numbering of the data from which
    the sampler draws, if known. Raises UsageError for a `dataset` without a length or without
    samples, and for one with samples from another data set than the sampler's.
    """
    numbering = Numbering(range(dataset) if type(dataset) is int else dataset)
    if not numbering.size:
        raise UsageError(
            f"dataset={reprlib.repr(dataset)}: give a data set with a length, a Subset of it, or "
            "the number of its samples, 1 or more; leave it out for a stream"
        )
    known = drawn is not None and drawn.bottoms and type(dataset) is not int
    if drawn is not None and known and set(numbering.bottoms) - set(drawn.bottoms):
        raise UsageError(
            f"dataset={reprlib.repr(dataset)}: sampler= draws from another data set, so "
            "samples have different numbers; give the data set that the sampler draws "
            "from, or a Subset of it"
        )
    return numbering


def length_of(data: Any) -> int | None:
    """Return the number of samples of a data set, or of a sampler; None if it has no length."""
    if isinstance(data, IterableDataset):
        return None  # torch would warn about the length of a stream
    with suppress(Exception):  # the script's code may not define a length
        return len(data)
    return None


def _is_split(data: Any) -> bool:
    inner = _inner(data)
    return isinstance(data, Subset | ConcatDataset) or (inner is not None and _is_split(inner))


def _bottoms(data: Any, depth: int) -> Iterator[Any]:
    """Yield the original data sets of subsets and concatenations, in their order."""
    if depth and isinstance(data, Subset):
        yield from _bottoms(data.dataset, depth - 1)
    elif depth and isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from _bottoms(part, depth - 1)
    elif depth and (inner := _inner(data)) is not None:
        yield from _bottoms(inner, depth - 1)
    else:
        yield data


def _inner(data: Any, depth: int = 3) -> Any:
    """Return the split data set inside `data`, if `data` only changes the samples; otherwise None.

    Such a data set has exactly one other data set as an attribute, of the same length.
    """
    attributes = getattr(data, "__dict__", None)
    if isinstance(data, Subset | ConcatDataset | IterableDataset):
        return None
    if depth == 0 or not isinstance(attributes, dict):
        return None
    data_sets = [value for value in attributes.values() if isinstance(value, Dataset)]
    if len(data_sets) != 1:
        return None
    (inner,) = data_sets
    if not isinstance(inner, Subset | ConcatDataset) and _inner(inner, depth - 1) is None:
        return None
    length = length_of(data)
    return inner if length is not None and length == length_of(inner) else None


# --- loaders and samplers -------------------------------------------------------------------------


_DEPTH_MAX = 8
_DISPATCHER = "DataLoaderDispatcher"  # accelerate's loader class with dispatch_batches=True
# Calls by which a sampler of the script draws samples with replacement, and calls that order the
# samples, each once.
_CALL = r"(?:[^()]|\([^()]*\))*"
_REPLACES = re.compile(
    rf"\bmultinomial\({_CALL}?(?:replacement\s*=\s*True|,\s*True\b)|\bchoices\("
    rf"|\brandint\(|\.integers\(|\brandom\.choice\((?!{_CALL}replace\s*=\s*False)"
)
_ORDERS = re.compile(r"\b(randperm|shuffle|permutation|permuted)\(")
# Samplers of these libraries begin an epoch with each iteration. They draw every sample of a data
# set in it, except for those that `_draws_fewer` knows.
_THOROUGH = ("torch", "torchdata", "accelerate", "transformers", "lightning", "pytorch_lightning")


@dataclass(frozen=True)
class InOrder:
    """Marks a loader that the script reads several batches ahead, but uses in order."""

    source: Any


class _Weakly:
    """A weak reference to an object, or a strong one if the object allows no weak reference.

    The script decides when its loader, and the loader's workers, are freed.
    """

    def __init__(self, held: Any) -> None:
        try:
            self.held: Callable[[], Any] = weakref.ref(held)
        except TypeError:
            self.held = lambda: held


class Source:
    """A DataLoader, a batch sampler or a sampler; or an object that wraps a loader.

    - `numbering`: the numbers of the samples of its data set.
    - `selected`: the samples that all ranks together draw in an epoch; None for all samples.
    - `has_passes`: an iteration is an epoch; False if a sampler of the script decides.
    - `is_thorough`: it has passes, and every selected sample is drawn in each.
    - `is_sequential`: samples are drawn in the order of the data set (a `Subset` may have any).
    - `is_ordered`: it is sequential, or the order is a list of indices, or a sampler of the script
      decides it, and no line of the sampler, or of the script, makes it random.
    - `splits`: a sampler gives each rank its part of the data set.
    - `drop_last`: an incomplete last batch is dropped.
    - `replacement`: samples are drawn with replacement.
    - `is_accelerate_s`: it is a loader that accelerate has prepared.
    - `is_dispatched`: one rank iterates it for all ranks (accelerate with `dispatch_batches`), so
      no rank knows its own samples.

    Raises UsageError for an object that can't be iterated.
    """

    def __init__(self, source: Any) -> None:
        if not hasattr(source, "__iter__"):
            raise UsageError(
                f"sampler={source!r}: give the DataLoader, batch sampler or sampler that draws the "
                "samples, or leave it out and report them by samples(ids)"
            )
        self._given = _Weakly(source)
        loaders = [*_loaders(source)]
        self.has_loader = bool(loaders)
        self.is_accelerate_s = _library_of(source) == "accelerate"
        self.is_dispatched = any(_is_dispatcher(each) for each in [source, *loaders])
        parts = [part for each in loaders or [source] for part in _parts(each, _DEPTH_MAX)]
        self._concerned = {id(part): _Weakly(part) for part in parts}
        self.drop_last = any(bool(_attribute(part, "drop_last")) for part in parts)
        self.replacement = any(map(_replaces, parts))
        self.splits = any(_splits(part) for part in parts)
        self.numbering = Numbering(_data_of(parts))
        samplers = [part for part in parts if not isinstance(part, DataLoader)]
        self.has_passes = all(map(_is_known, samplers))
        self.is_thorough = self.has_passes and not any(map(_draws_fewer, samplers))
        self.is_sequential = self.has_passes and any(map(_is_sequential, samplers))
        self.is_ordered = self.is_sequential or _are_ordered(samplers)
        self.selected = self.numbering.selected()
        for part in samplers:
            if isinstance(part, SubsetRandomSampler):
                self.selected = self.numbering.selected([*map(int, part.indices)])

    @property
    def drawn_from(self) -> tuple[Any, ...]:
        """The original data sets and the selected samples.

        Two loaders with equal values draw from the same samples.
        """
        return self.numbering.bottoms, self.selected

    @property
    def given(self) -> Any:
        """The loader or sampler; None if the script has freed it."""
        return self._given.held()

    def concerns(self, loader: Any) -> bool:
        """Return whether `loader` is the source, is inside it, or has the same sampler."""
        return any(
            (known := self._concerned.get(id(part))) is not None and known.held() is part
            for part in _parts(loader, _DEPTH_MAX)
        )


def data_set(given: Any) -> Any:
    """Return the data set of a loader or sampler, or None if it has none."""
    return _data_of([part for each in _all_loaders(given) for part in _parts(each, _DEPTH_MAX)])


def generators(given: Any) -> list[Any]:
    """Return the generators of a loader or sampler, which draw an epoch's seed and order."""
    parts = [part for each in _all_loaders(given) for part in _parts(each, _DEPTH_MAX)]
    return [_attribute(part, "generator") for part in parts]


def _all_loaders(given: Any) -> list[Any]:
    inner = given.source if isinstance(given, InOrder) else given
    return [*_loaders(inner)] or [inner]


def positions_of(index: Any) -> Ids | None:
    """Return the positions in a sampler's sample or batch; None for any other object."""
    if isinstance(index, np.ndarray | torch.Tensor):
        index = index.tolist() if index.ndim < 2 else None
    if not isinstance(index, list) and type(index) not in (tuple, range):
        index = (index,)
    positions = tuple(map(_position, index))
    known = tuple(position for position in positions if position is not None)
    return known if len(known) == len(positions) else None


def _position(index: Any) -> int | None:
    if isinstance(index, torch.Tensor) and index.ndim == 0:
        index = index.item()
    if isinstance(index, bool) or not isinstance(index, Integral):
        return None
    return int(index)


def _attribute(holder: Any, name: str) -> Any:
    # the script may define the attribute as a property that raises
    with suppress(Exception):
        return getattr(holder, name, None)
    return None


def _loaders(loader: Any) -> Iterator[Any]:
    """Yield `loader` if it is a DataLoader, otherwise the DataLoaders among its attributes."""
    if issubclass(type(loader), DataLoader):
        yield loader
        return
    attributes = getattr(loader, "__dict__", None)
    for value in attributes.values() if isinstance(attributes, dict) else ():
        if issubclass(type(value), DataLoader):
            yield value


def _parts(part: Any, depth: int) -> Iterator[Any]:
    yield part
    for name in ("batch_sampler", "sampler"):
        inner = _attribute(part, name)
        if inner is not None and depth:
            yield from _parts(inner, depth - 1)


def _data_of(parts: list[Any]) -> Any:
    for part in parts:
        for name in ("dataset", "data_source"):
            data = _attribute(part, name)
            if data is not None:
                return data
    return None


def _splits(part: Any) -> bool:
    ranks = [_attribute(part, name) for name in ("num_replicas", "num_processes")]
    return any(isinstance(number, int) and number > 1 for number in ranks)


def _replaces(part: Any) -> bool:
    """Return whether a sampler draws with replacement, according to its attribute or its code."""
    said = _attribute(part, "replacement")
    if _surplus(part) > 0:
        return True
    if said is not None or isinstance(part, DataLoader) or _is_known(part):
        return said is True
    try:
        text = inspect.getsource(type(part))
    except (OSError, TypeError):  # the source of the class may not exist
        return False
    # If the code also puts samples in order, its random number may be a seed.
    return bool(_REPLACES.search(text)) and not _ORDERS.search(text)


def _are_ordered(samplers: list[Any]) -> bool:
    deciding = [one for one in samplers if not _is_known(one)]
    if all(map(_is_written, deciding)) and not script_text.shuffles():
        return bool(deciding)
    return bool(deciding) and all(map(_is_fixed, deciding))


def _is_fixed(sampler: Any) -> bool:
    """Return whether a sampler surely has the same order in each epoch, by what it is.

    The rest of the script may shuffle other things, such as a split that is made once.
    """
    if isinstance(sampler, list | tuple | range | np.ndarray | torch.Tensor):
        return True
    if not _is_written(sampler) or hasattr(type(sampler), "set_epoch"):
        return False
    return not script_text.SHUFFLES.search(inspect.getsource(type(sampler)))


def _is_sequential(sampler: Any) -> bool:
    if isinstance(sampler, DistributedSampler):
        return not sampler.shuffle
    return isinstance(sampler, SequentialSampler)


def _is_written(sampler: Any) -> bool:
    try:
        return call_sites.is_own(inspect.getfile(type(sampler)))
    except (OSError, TypeError):  # the source of the class may not exist
        return False


def _is_dispatcher(loader: Any) -> bool:
    return any(kind.__name__ == _DISPATCHER for kind in type(loader).__mro__)


def _is_known(sampler: Any) -> bool:
    return _library_of(sampler) in _THOROUGH


def _draws_fewer(sampler: Any) -> bool:
    """Return whether a sampler of torch draws only some of its samples, each at most once."""
    return _surplus(sampler) < 0 and not sampler.replacement


def _surplus(sampler: Any) -> int:
    """Return how many samples a sampler of torch draws in addition to one of each."""
    if isinstance(sampler, RandomSampler):
        size = length_of(sampler.data_source)
    elif isinstance(sampler, WeightedRandomSampler):
        size = len(sampler.weights)
    else:
        return 0
    return 0 if size is None else sampler.num_samples - size


def _library_of(part: Any) -> str:
    return type(part).__module__.partition(".")[0]
