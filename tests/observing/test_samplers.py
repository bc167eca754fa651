"""Loaders and samplers report the ids of samples, and otherwise work as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from entrenar_py.observing.samplers import Draws, InOrder

DATA = TensorDataset(torch.arange(7.0))


def handed_out(loader: DataLoader[tuple[torch.Tensor, ...]], draws: Draws) -> list[tuple[int, ...]]:
    """Return the reported ids of each batch, after a comparison with the batch."""
    told = []
    for (batch,) in loader:
        told.append(draws.take()[1])
        assert list(told[-1]) == batch.tolist()
    return told


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_tells_each_batch_when_it_is_handed_out(num_workers: int) -> None:
    """Batches are reported when they are yielded, however far the loader's workers are ahead."""
    loader = DataLoader(DATA, batch_size=3, shuffle=True, num_workers=num_workers)
    draws = Draws(loader)
    assert sorted(i for ids in handed_out(loader, draws) for i in ids) == list(range(7))
    assert (draws.num_samples, draws.drop_last) == (7, False)


def test_epochs_are_counted() -> None:
    """Each iteration is an epoch, and batches left from the one before are forgotten."""
    loader = DataLoader(DATA, batch_size=2)
    draws = Draws(loader)
    next(iter(loader))
    assert draws.take() == (0, (0, 1))
    assert handed_out(loader, draws)[0] == (0, 1)
    assert draws.take() == (1, ())


def test_a_batch_that_was_skipped_is_not_told() -> None:
    """Only the last batch since the previous report counts."""
    loader = DataLoader(DATA, batch_size=2)
    draws, batches = Draws(loader), iter(loader)
    next(batches)
    next(batches)
    assert draws.take() == (0, (2, 3))


def test_samplers() -> None:
    """A batch sampler reports its batches, a sampler all samples since the last report."""
    batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=True)
    draws = Draws(batches)
    assert [(list(batch), draws.take()[1]) for batch in batches] == [
        ([0, 1], (0, 1)),
        ([2, 3], (2, 3)),
    ]
    assert (draws.num_samples, draws.drop_last) == (5, True)
    assert Draws(DataLoader(DATA, batch_sampler=batches)).drop_last
    single = SequentialSampler(range(3))
    draws = Draws(single)
    assert list(single) == [0, 1, 2]
    assert draws.take() == (0, (0, 1, 2))


def test_it_stays_what_it_was() -> None:
    """Class, length and attributes of a watched object stay the same."""
    sampler = RandomSampler(DATA)
    Draws(sampler)
    assert isinstance(sampler, RandomSampler)
    assert type(sampler).__name__ == "RandomSampler"
    assert len(sampler) == 7


def test_what_can_t_be_watched_tells_nothing() -> None:
    """An object whose class can't be changed reports nothing, and is iterated as before."""
    loader = DataLoader(DATA, batch_sampler=[[0, 1], [2]])
    draws = Draws(loader)
    assert [draws.take()[1] for _ in loader] == [(), ()]


class Prepared:
    """A loader around a loader, as accelerate makes them.

    It is one batch ahead, and its `__class__` is that of the inner loader.
    """

    def __init__(self, inner: DataLoader[tuple[torch.Tensor, ...]]) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.inner)

    def __iter__(self) -> Iterator[Any]:
        fetched = None
        for batch in self.inner:
            if fetched is not None:
                yield fetched
            fetched = batch
        yield fetched


def test_a_loader_around_a_loader() -> None:
    """Each batch is reported when the outer loader yields it."""
    loader = Prepared(DataLoader(DATA, batch_size=2, shuffle=True))
    draws = Draws(loader)
    told = handed_out(loader, draws)  # type: ignore[arg-type]
    assert sorted(i for ids in told for i in ids) == list(range(7))


def test_batches_that_are_used_in_order() -> None:
    """Batches are reported in order, however many are fetched before the first is used."""
    loader = DataLoader(DATA, batch_size=3)
    draws = Draws(InOrder(loader))
    for epoch in range(2):
        assert len(list(loader)) == 3
        assert [draws.take() for _ in range(3)] == [
            (epoch, ids) for ids in ((0, 1, 2), (3, 4, 5), (6,))
        ]
    assert draws.take() == (1, ())


class DataLoaderDispatcher(DataLoader[tuple[torch.Tensor, ...]]):
    """A loader with the name of accelerate's: the first rank draws for all, and sends out parts."""


def test_what_one_rank_draws_for_all_is_nobodys() -> None:
    """No samples are reported, rather than wrong ones; the size of the data set is known."""
    loader = DataLoaderDispatcher(DATA, batch_size=4)
    draws = Draws(loader)
    assert [draws.take()[1] for _ in loader] == [(), ()]
    assert draws.num_samples == 7


def test_keys_that_are_no_numbers_are_unknown() -> None:
    """Samples whose keys are not numbers are reported as unknown."""
    names = BatchSampler(["a", "b"], 2, drop_last=False)  # type: ignore[list-item]
    draws = Draws(names)
    assert len(list(names)) == 1
    assert draws.take() == (0, ())
