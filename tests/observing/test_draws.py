"""Which samples are told of loaders and samplers, and that they are what they were."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from entrenar_py.observing.draws import Draws

DATA = TensorDataset(torch.arange(7.0))


def handed_out(loader: DataLoader[tuple[torch.Tensor, ...]], draws: Draws) -> list[tuple[int, ...]]:
    """What is told of each batch, which is what it holds."""
    told = []
    for (batch,) in loader:
        told.append(draws.take()[1])
        assert list(told[-1]) == batch.tolist()
    return told


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_tells_each_batch_when_it_is_handed_out(num_workers: int) -> None:
    """However far its workers are ahead."""
    loader = DataLoader(DATA, batch_size=3, shuffle=True, num_workers=num_workers)
    draws = Draws(loader)
    assert sorted(i for ids in handed_out(loader, draws) for i in ids) == list(range(7))
    assert (draws.num_samples, draws.drop_last) == (7, False)


def test_epochs_are_counted() -> None:
    """By how often it is gone through; what was left of the one before is forgotten."""
    loader = DataLoader(DATA, batch_size=2)
    draws = Draws(loader)
    next(iter(loader))
    assert draws.take() == (0, (0, 1))
    assert handed_out(loader, draws)[0] == (0, 1)
    assert draws.take() == (1, ())


def test_a_batch_that_was_skipped_is_not_told() -> None:
    """Of those since the last time the last one counts."""
    loader = DataLoader(DATA, batch_size=2)
    draws, batches = Draws(loader), iter(loader)
    next(batches)
    next(batches)
    assert draws.take() == (0, (2, 3))


def test_samplers() -> None:
    """A batch sampler tells its batches, a sampler all samples since the last time."""
    batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=True)
    draws = Draws(batches)
    assert [(list(batch), draws.take()[1]) for batch in batches] == [
        ([0, 1], (0, 1)),
        ([2, 3], (2, 3)),
    ]
    assert (draws.num_samples, draws.drop_last) == (5, True)
    single = SequentialSampler(range(3))
    draws = Draws(single)
    assert list(single) == [0, 1, 2]
    assert draws.take() == (0, (0, 1, 2))


def test_it_stays_what_it_was() -> None:
    """Its class, its length, its attributes."""
    sampler = RandomSampler(DATA)
    Draws(sampler)
    assert isinstance(sampler, RandomSampler)
    assert type(sampler).__name__ == "RandomSampler"
    assert len(sampler) == 7


def test_what_can_t_be_watched_tells_nothing() -> None:
    """And is gone through as ever."""
    loader = DataLoader(DATA, batch_sampler=[[0, 1], [2]])
    draws = Draws(loader)
    assert [draws.take()[1] for _ in loader] == [(), ()]


def test_keys_that_are_no_numbers_are_unknown() -> None:
    """Nothing is made up of them."""
    names = BatchSampler(["a", "b"], 2, drop_last=False)  # type: ignore[list-item]
    draws = Draws(names)
    assert len(list(names)) == 1
    assert draws.take() == (0, ())
