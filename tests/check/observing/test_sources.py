"""What loaders and samplers show: data sets, the numbers of samples, and what is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from entrenar_py.check.observing.samples import Samples
from entrenar_py.check.observing.sources import Numbering, Source
from entrenar_py.shared.errors import UsageError

SIZE = 6


class Balanced(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        weights = torch.ones(SIZE)
        drawn = torch.multinomial(weights, SIZE, replacement=True)
        return iter([int(number) for number in drawn])


class Chosen(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.choices(range(SIZE), k=SIZE))


class Shuffled(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([int(number) for number in torch.randperm(SIZE)])


class Ranked(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        weights = torch.ones(SIZE)
        drawn = torch.multinomial(weights, SIZE, replacement=False)
        return iter([int(number) for number in drawn])

    def knows(self) -> bool:
        return True


class Seeded(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(random.randint(0, 9))
        return iter([int(number) for number in torch.randperm(SIZE, generator=generator)])


@pytest.mark.parametrize(
    ("sampler", "is_thorough", "replaces"),
    [
        (RandomSampler(range(SIZE)), True, False),
        (RandomSampler(range(SIZE), num_samples=SIZE - 2), False, False),
        (RandomSampler(range(SIZE), num_samples=SIZE + 2), True, True),
        (RandomSampler(range(SIZE), replacement=True, num_samples=2), True, True),
        (WeightedRandomSampler([1.0] * SIZE, SIZE - 2, replacement=False), False, False),
        (WeightedRandomSampler([1.0] * SIZE, SIZE, replacement=False), True, False),
    ],
)
def test_samplers_that_draw_some_of_the_samples(
    sampler: Any, is_thorough: bool, replaces: bool
) -> None:
    """A part without replacement is an epoch of unknown samples; more than all comes again."""
    data: Any = range(SIZE)
    source = Source(DataLoader(data, 2, sampler=sampler))
    found = source.is_thorough, source.replacement, source.has_passes
    assert found == (is_thorough, replaces, True)


class Batched(Sampler[list[int]]):
    def __init__(self) -> None:
        self.sampler = SequentialSampler(range(SIZE))

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[number] for number in self.sampler])


def test_samplers_in_the_order_of_the_data() -> None:
    """The order is that of a loader without shuffling; a sampler of the script may change it."""
    data: Any = range(SIZE)

    def distributed(shuffle: bool) -> Any:
        return DistributedSampler(data, num_replicas=2, rank=0, shuffle=shuffle)

    loaders = {
        DataLoader(data, 2): True,
        DataLoader(data, 2, shuffle=True): False,
        DataLoader(data, 2, sampler=distributed(False)): True,
        DataLoader(data, 2, sampler=distributed(True)): False,
        DataLoader(data, batch_sampler=Batched()): False,
    }
    assert [Source(loader).is_sequential for loader in loaders] == [*loaders.values()]


@pytest.mark.parametrize(
    ("sampler", "replaces"),
    [
        (Balanced, True),
        (Chosen, True),
        (Shuffled, False),
        (Ranked, False),
        (Seeded, False),
        (lambda: WeightedRandomSampler([1.0] * SIZE, SIZE), True),
        (lambda: WeightedRandomSampler([1.0] * SIZE, SIZE, replacement=False), False),
    ],
)
def test_samplers_that_draw_samples_again(
    sampler: Callable[[], Sampler[int]], replaces: bool
) -> None:
    """A sampler says so itself, or the text of the script's own class does."""
    assert Source(DataLoader(range(SIZE), sampler=sampler())).replacement is replaces  # type: ignore[arg-type]


class ByLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(SIZE), key=lambda index: -index % 4))


class Epochs(ByLength):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize(
    ("sampler", "is_ordered"),
    [
        (ByLength(), True),
        (Shuffled(), False),
        (Epochs(), False),
        ([3, 1, 0], True),
        (np.array([3, 1, 0]), True),
        (RandomSampler(range(SIZE)), False),
    ],
)
def test_an_order_that_is_the_same_in_each_epoch(sampler: Any, is_ordered: bool) -> None:
    """By what decides it, as this module shuffles other things."""
    assert Source(DataLoader(range(SIZE), sampler=sampler)).is_ordered is is_ordered  # type: ignore[arg-type]


WHOLE = TensorDataset(torch.arange(10.0))
OTHER = TensorDataset(torch.arange(3.0))


class Changed(Dataset[Any]):
    """The samples of another data set, changed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Stream(IterableDataset[Any]):
    """A stream that says how long it is."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("data", "size", "selected", "numbers"),
    [
        (WHOLE, 10, None, {0: 0, 9: 9}),
        (Subset(WHOLE, [7, 2, 5]), 10, (2, 5, 7), {0: 7, 1: 2, 2: 5}),
        (Subset(Subset(WHOLE, [7, 2, 5]), [2, 0]), 10, (5, 7), {0: 5, 1: 7}),
        (Subset(WHOLE, torch.tensor([4, 3])), 10, (3, 4), {1: 3}),  # type: ignore[arg-type]
        (Subset(WHOLE, range(9, -1, -1)), 10, None, {0: 9}),
        (ConcatDataset([WHOLE, OTHER]), 13, None, {10: 10, 12: 12}),
        (ConcatDataset([Subset(WHOLE, [8, 1]), Subset(WHOLE, [3])]), 10, (1, 3, 8), {2: 3}),
        (Changed(Subset(WHOLE, [7, 2])), 10, (2, 7), {0: 7}),
        (Changed(Changed(Subset(WHOLE, [7, 2]))), 10, (2, 7), {0: 7}),
        (Changed(WHOLE), 10, None, {3: 3}),
        (ConcatDataset([OTHER, Subset(OTHER, [1])]), 4, None, {3: 3}),  # one sample twice
        (Subset(WHOLE, [3, -1]), 10, (3, 9), {1: 9}),
        (Subset(WHOLE, [3, 99]), 2, None, {1: 1}),  # no position of the data
        (Stream(), None, None, {2: 2}),
        (None, None, None, {2: 2}),
    ],
)
def test_numbers(
    data: Any, size: int | None, selected: tuple[int, ...] | None, numbers: dict[int, int]
) -> None:
    """Each position has the number of its sample, and a part's samples are known."""
    numbering = Numbering(data)
    assert (numbering.size, numbering.selected()) == (size, selected)
    assert {position: numbering.of(position) for position in numbers} == numbers


def test_a_selection_of_positions() -> None:
    """Positions that a sampler draws from are numbers of the whole data set, too."""
    numbering = Numbering(Subset(WHOLE, [7, 2, 5]))
    assert numbering.selected([2, 0]) == (5, 7)
    assert Numbering(OTHER).selected([2, 1, 0]) is None


@pytest.mark.parametrize(
    ("dataset", "size", "selected"),
    [(WHOLE, 10, None), (Subset(WHOLE, [4, 2]), 10, (2, 4)), (7, 7, None)],
)
def test_a_data_set_that_is_declared(
    dataset: Any, size: int, selected: tuple[int, ...] | None
) -> None:
    """Every epoch draws all of it, whoever draws: it need not be torch's sampler."""
    loader = DataLoader(WHOLE, batch_sampler=[[0, 1], [2]])
    for source in (None, loader):
        samples = Samples(source, dataset)
        facts = samples.facts()
        assert (facts["num_samples"], facts["thorough"]) == (size, True)
        assert samples.selected() == selected
        samples.remove()


@pytest.mark.parametrize("dataset", [0, -1, Stream(), object(), OTHER])
def test_a_data_set_that_can_t_be_declared(dataset: Any) -> None:
    """It has no length, no samples, or not those that the sampler draws from.

    No method of torch's stays replaced.
    """
    before = {**vars(_BaseDataLoaderIter)}
    with pytest.raises(UsageError, match="dataset="):
        Samples(DataLoader(WHOLE), dataset)
    assert {**vars(_BaseDataLoaderIter)} == before
