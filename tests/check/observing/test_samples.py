"""The samples of a forward pass, from the batches that a loader or a sampler handed out."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from entrenar_py.check.observing import batches as handed
from entrenar_py.check.observing import mirrored_batches, samples
from entrenar_py.check.observing.batches import blocks_of
from entrenar_py.check.observing.samples import Drawn, Draws
from entrenar_py.check.observing.sources import InOrder

DATA = TensorDataset(torch.arange(7.0))
Loader = DataLoader[tuple[torch.Tensor, ...]]


@pytest.fixture
def watch() -> Iterator[Any]:
    """Return `Draws`, whose methods are put back at the end."""
    made: list[Draws] = []

    def make(source: Any, **options: Any) -> Draws:
        made.append(Draws(source, **options))
        made[-1].listen()
        return made[-1]

    yield make
    for draws in made:
        draws.remove()


def used(draws: Draws, batch: Any, *, copied: bool = False) -> Drawn | None:
    """Return the samples of a step that is made with `batch`, or with a copy of it."""
    given = [tensor.clone() for tensor in batch] if copied else batch
    drawn = draws.use(blocks_of(given))
    draws.end_micro_batch()
    draws.end_step()
    return drawn


def unknown(why: str, epoch: int = 0) -> Drawn:
    """Return samples that are not known."""
    return Drawn(None, epoch, why)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("copied", [False, True])
def test_batches_that_are_used_as_they_come(num_workers: int, copied: bool, watch: Any) -> None:
    """A step has the batch that it is given, or a copy of, however far workers are ahead."""
    loader = DataLoader(DATA, batch_size=3, shuffle=True, num_workers=num_workers)
    draws = watch(loader)
    for epoch in range(2):
        for (batch,) in loader:
            drawn = used(draws, [batch], copied=copied)
            assert drawn == (tuple(map(int, batch)), epoch, "")


def test_a_shortened_epoch_has_its_samples_with_the_last_batch(watch: Any) -> None:
    """So that an epoch shows whole in a short run; a batch that is used again has them once."""
    whole = ([0, 1], [2, 3], [4, 5], [6])
    loader: Loader = DataLoader(DATA, batch_sampler=whole)
    short = [*mirrored_batches.shortened(iter(whole), loader, 2)]
    draws = watch(loader := DataLoader(DATA, batch_sampler=short))
    drawn = [draws.use(blocks_of(batch)) for batch in loader for _ in range(2)]
    assert [one.ids for one in drawn] == [(0, 1), (), (2, 3, 4, 5, 6), ()]


def test_a_persistent_loader_has_epochs(watch: Any) -> None:
    """Workers that stay begin an epoch whenever the loader is iterated."""
    loader = DataLoader(DATA, batch_size=4, num_workers=1, persistent_workers=True)
    draws = watch(loader)
    drawn = [used(draws, batch) for _ in range(2) for batch in loader]
    assert [(one.ids, one.epoch) for one in drawn if one] == [
        *(((0, 1, 2, 3), 0), ((4, 5, 6), 0), ((0, 1, 2, 3), 1), ((4, 5, 6), 1))
    ]


def test_batches_that_are_fetched_ahead(watch: Any) -> None:
    """Each step has its own batch if it is given that; which copy it has can't be seen."""
    loader = DataLoader(DATA, batch_size=3)
    draws = watch(loader)
    batches = list(loader)
    assert [used(draws, batch) for batch in reversed(batches)] == [
        *(((6,), 0, ""), ((3, 4, 5), 0, ""), ((0, 1, 2), 0, ""))
    ]
    batches = list(loader)
    assert used(draws, batches[0], copied=True) == unknown(samples.AHEAD, 1)
    assert used(draws, batches[1], copied=True) == unknown(samples.NONE, 1)


def test_batches_without_memory_of_their_own(watch: Any) -> None:
    """Sparse batches are known where they are used as they come, and else said to be unknown."""
    loader = DataLoader(DATA, batch_size=3)
    draws = watch(loader)
    for (batch,) in loader:
        assert used(draws, [batch.to_sparse()]) == (tuple(map(int, batch)), 0, "")
    sparse = [x.to_sparse() for (x,) in loader]
    assert used(draws, sparse[:1]) == unknown(samples.AHEAD, 1)


def fetch(loader: Loader, fetched: queue.Queue[Any]) -> None:
    for batch in loader:
        fetched.put(batch)


def test_a_thread_that_fetches(watch: Any) -> None:
    """Batches from a queue are recognised, and copies of them are not guessed."""
    loader = DataLoader(DATA, batch_size=3)
    draws = watch(loader)
    for copied in (False, True):
        fetched: queue.Queue[Any] = queue.Queue()
        thread = threading.Thread(target=fetch, args=(loader, fetched))
        thread.start()
        thread.join()
        drawn = [used(draws, fetched.get(), copied=copied) for _ in range(3)]
        if copied:
            assert all(one is not None and one.ids is None for one in drawn)
        else:
            assert [one and one.ids for one in drawn] == [(0, 1, 2), (3, 4, 5), (6,)]


def test_batches_that_are_skipped(watch: Any) -> None:
    """Batches that no step is given count for none; a resumed run may begin with such."""
    loader = DataLoader(DATA, batch_size=2)
    for copied, resumed, ids in ((False, False, (4, 5)), (True, True, (4, 5)), (True, False, None)):
        draws = watch(loader, resumed=resumed)
        batches = iter(loader)
        batch = [next(batches) for _ in range(3)][-1]
        drawn = used(draws, batch, copied=copied)
        assert drawn is not None
        assert drawn.ids == ids


def test_a_short_batch_that_the_script_drops(watch: Any) -> None:
    """A last, short batch that is never used shows that the script drops it."""
    loader = DataLoader(DATA, batch_size=3)
    draws = watch(loader)
    for epoch in range(2):
        assert draws.epochs.drops_last is (epoch > 1)
        for batch in loader:
            if len(batch[0]) == 3:
                drawn = used(draws, batch, copied=True)
                assert drawn is not None
                assert drawn.epoch == epoch
    assert draws.epochs.drops_last


def test_parts_of_a_batch(watch: Any) -> None:
    """Micro-batches that are cut from a batch have the samples of their rows, once."""
    loader = DataLoader(DATA, batch_size=4)
    draws = watch(loader)
    for (batch,), ids in zip(loader, ((0, 1, 2, 3), (4, 5, 6)), strict=True):
        first, second = batch.split([2, len(batch) - 2])
        for part, own in ((first, ids[:2]), (second, ids[2:]), (second, ())):
            assert draws.use(blocks_of([part])) == (own, 0, "")
        draws.end_micro_batch()
        draws.end_step()


def test_a_batch_that_is_used_again(watch: Any) -> None:
    """A further pass of a step has no new samples; in a later step they are not known."""
    (batch,) = itertools.islice(loader := DataLoader(DATA, batch_size=4), 1)
    draws = watch(loader)
    cycled = itertools.cycle(loader)
    batch = next(cycled)
    assert draws.use(blocks_of(batch)) == ((0, 1, 2, 3), 0, "")
    assert draws.use(blocks_of(batch)) == ((), 0, "")
    assert draws.use(blocks_of([batch[0].clone()])) is None
    draws.end_micro_batch()
    draws.end_step()
    assert used(draws, batch) == unknown(samples.AGAIN)
    assert used(draws, batch, copied=True) == unknown(samples.NONE)


def test_an_evaluation_on_the_same_loader(watch: Any) -> None:
    """Epochs are counted by the passes through a loader that train."""
    loader = DataLoader(DATA, batch_size=3)
    draws = watch(loader)
    epochs = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            drawn = used(draws, batch)
            epochs.append(drawn and drawn.epoch)
            if number == 1:
                for (held_out,) in loader:
                    draws.skip(blocks_of([held_out]))
    assert epochs == [0, 0, 0, 1, 1, 1]


def test_what_a_script_iterates_itself(watch: Any) -> None:
    """A batch sampler's batches and a sampler's samples are known as the script draws them."""
    batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=True)
    draws = watch(batches)
    assert [(batch, used(draws, [])) for batch in batches] == [
        ([0, 1], ((0, 1), 0, "")),
        ([2, 3], ((2, 3), 0, "")),
    ]
    assert (draws.source.numbering.size, draws.source.drop_last) == (5, True)
    single = SequentialSampler(range(3))
    draws = watch(single)
    assert list(single) == [0, 1, 2]
    assert used(draws, [torch.zeros(3, 1)]) == ((0, 1, 2), 0, "")
    assert list(single) == [0, 1, 2]
    assert used(draws, [torch.zeros(2, 1)]) == unknown(samples.AHEAD, 1)


def test_a_sampler_in_a_loader(watch: Any) -> None:
    """A sampler is followed through the loader that fetches what it draws."""
    sampler = RandomSampler(DATA)
    loader = DataLoader(DATA, batch_size=3, sampler=sampler)
    draws = watch(sampler)
    for (batch,) in loader:
        assert used(draws, [batch]) == (tuple(map(int, batch)), 0, "")


def test_a_list_of_batches(watch: Any) -> None:
    """What a loader draws from a list is known, though nobody hears how a list is iterated."""
    loader = DataLoader(DATA, batch_sampler=[[0, 1], [2]])
    draws = watch(loader)
    assert [used(draws, batch) for batch in loader] == [((0, 1), 0, ""), ((2,), 0, "")]
    assert not draws.source.is_thorough
    draws = watch([[0, 1], [2]])
    assert used(draws, [torch.zeros(2)]) == unknown(samples.NONE)


class Prepared:
    """A loader around a loader, as accelerate makes them.

    It is one batch ahead, and its `__class__` is that of the inner loader.
    """

    def __init__(self, inner: Loader) -> None:
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


def test_a_loader_around_a_loader(watch: Any) -> None:
    """Each step has the batch that it is given, not the one that was fetched meanwhile."""
    loader = Prepared(DataLoader(DATA, batch_size=2, shuffle=True))
    draws = watch(loader)
    for (batch,) in loader:
        assert used(draws, [batch]) == (tuple(map(int, batch)), 0, "")


def test_batches_that_are_used_in_order(watch: Any) -> None:
    """Copies are given their samples in order, if the loader is said to be used so."""
    loader = DataLoader(DATA, batch_size=3)
    draws = watch(InOrder(loader))
    for epoch in range(2):
        assert [used(draws, batch, copied=True) for batch in list(loader)] == [
            (ids, epoch, "") for ids in ((0, 1, 2), (3, 4, 5), (6,))
        ]


class DataLoaderDispatcher(Loader):
    """A loader with the name of accelerate's: the first rank draws for all, and sends out parts."""


class Stream(IterableDataset[torch.Tensor]):
    """Three numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(3.0))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoaderDispatcher(DATA, batch_size=4), samples.OTHERS),
        (DataLoader(Stream(), batch_size=2), samples.STREAM),
        (DataLoader({"a": torch.zeros(1)}, sampler=["a"]), handed.KEYS),  # type: ignore[arg-type]
        (DataLoader(DATA, num_workers=2, in_order=False), handed.DISORDER),
    ],
)
def test_samples_that_have_no_numbers(loader: Iterable[Any], why: str, watch: Any) -> None:
    """The samples are unknown, rather than wrong, and the reason is said."""
    draws = watch(loader)
    for batch in loader:
        drawn = used(draws, batch)
        assert drawn is not None
        assert (drawn.ids, drawn.why) == (None, why)


def test_an_error_of_the_data_set(watch: Any) -> None:
    """A batch that can't be fetched is not taken for the next one."""

    class Broken(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(float([0, 1, 2, 3, 1 // (index != 1)][index - 4 * (index == 1)]))

    loader = DataLoader(Broken())
    draws, batches = watch(loader), iter(loader)
    got: list[Any] = []
    for _ in range(4):
        try:
            got.append(used(draws, [next(batches)]))
        except ZeroDivisionError:
            got.append(None)
    assert [one and one.ids for one in got] == [(0,), None, (2,), (3,)]
