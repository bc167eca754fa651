"""The numbers of samples in the data set that a script began with, before it was split up.

A position in a `Subset` (of `random_split`, say) is another sample on each rank whose subset is
another. So positions are followed down to the data set at the bottom.
"""

from __future__ import annotations

import reprlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from entrenar_py.shared.errors import UsageError

_DEPTH_MAX = 16
_SEARCHED_MAX = 2**22  # positions up to which a split data set is looked through


class Numbering:
    """The numbers of the samples of `data`, from 0 to `size` - 1; `size` is None if unknown.

    Parts of one data set that were put together again (`ConcatDataset`) have the numbers that they
    have in it. Different data sets are numbered one after the other. If a part occurs twice, each
    position is a sample of its own.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._first: dict[int, int] = {}  # id of a data set at the bottom -> its first number
        self._bottoms: list[Any] = []  # kept, so that no id is given twice
        self.size: int | None = 0
        for bottom in _bottoms(data, _DEPTH_MAX):
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
        """The identities of the data sets at the bottom."""
        return tuple(self._first)

    def _look_through(self) -> None:
        length = length_of(self._data) or 0
        if length > _SEARCHED_MAX:
            self._is_plain, self.size = True, length
            return
        try:
            numbers = tuple(map(self._number, range(length)))
        except (IndexError, TypeError, ValueError):  # a subset that is none
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
        except (IndexError, TypeError, ValueError):  # the data was changed meanwhile
            return position

    def selected(self, positions: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """Return the numbers of all samples of the data, or of those at `positions`, sorted.

        None stands for all numbers from 0 to `size` - 1.
        """
        if positions is None:
            return self._selected
        numbers = sorted({self.of(position) for position in positions})
        return None if self.size is not None and len(numbers) == self.size else tuple(numbers)

    def _number(self, position: int) -> int:
        data: Any = self._data
        for _ in range(_DEPTH_MAX):
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


def declared(dataset: Any, drawn: Numbering | None) -> Numbering:
    """Return the numbers of the samples of a data set that a script declares to draw in an epoch.

    `dataset` may be their number. `drawn` are the numbers of what its sampler draws from, if known.
    Raises UsageError for a `dataset` without a length, or without samples, or of other samples.
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
            f"dataset={reprlib.repr(dataset)}: sampler= draws from another data set, so samples "
            "have other numbers; give the one that it draws from, or a Subset of that"
        )
    return numbering


def length_of(data: Any) -> int | None:
    """Return the number of samples of a data set, or of a sampler; None if it doesn't say."""
    if isinstance(data, IterableDataset):
        return None  # torch warns of what it says
    with suppress(Exception):  # code of the script, which need not call it
        return len(data)
    return None


def _is_split(data: Any) -> bool:
    inner = _inner(data)
    return isinstance(data, Subset | ConcatDataset) or (inner is not None and _is_split(inner))


def _bottoms(data: Any, depth: int) -> Iterator[Any]:
    """Yield the data sets at the bottom of subsets and concatenations, in their order."""
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
    """Return the split data set in a data set that only changes its samples, else None.

    Such a data set holds one other, of the same length.
    """
    attributes = getattr(data, "__dict__", None)
    if isinstance(data, Subset | ConcatDataset | IterableDataset):
        return None
    if depth == 0 or not isinstance(attributes, dict):
        return None
    held = [value for value in attributes.values() if isinstance(value, Dataset)]
    if len(held) != 1:
        return None
    (inner,) = held
    if not isinstance(inner, Subset | ConcatDataset) and _inner(inner, depth - 1) is None:
        return None
    length = length_of(data)
    return inner if length is not None and length == length_of(inner) else None
