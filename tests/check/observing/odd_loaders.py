"""Loaders as people write them. Each function returns one, over eight samples of four numbers."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

SIZE = 8


class Points(Dataset[Tensor]):
    """Points with noise from all generators, as augmentation draws it."""

    def __init__(self) -> None:
        self.x = torch.arange(4.0 * SIZE).reshape(SIZE, 4) / 10

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return self.x[index] + 0.01 * noise


class Itself:
    """A loader that is its own iterator, and begins again when it is iterated."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Itself:
        self.at = 0
        return self

    def __next__(self) -> Tensor:
        if self.at >= SIZE:
            raise StopIteration
        self.at += 2
        return Points().x[self.at - 2 : self.at]


class Endless(Itself):
    """An iterator that never begins again by itself, and never ends."""

    __slots__ = ()

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> Tensor:
        self.at = (self.at + 2) % SIZE
        return Points().x[self.at : self.at + 2]


class Generating:
    """A generator that can be sent the next position, and returns a value at its end."""

    batch_size = 2

    def __iter__(self) -> Iterator[Tensor]:
        at = 0
        try:
            while at < SIZE:
                sent = yield Points().x[at : at + 2]
                at = at + 2 if sent is None else sent
        except ValueError:  # that the script throws into it
            yield Points().x[:1]

    def __len__(self) -> int:
        return SIZE // 2


class Zipped:
    """An iterator of Python's own."""

    def __iter__(self) -> Iterator[Any]:
        return zip(torch.split(Points().x[:4], 2), itertools.count())


class Slotted:
    """An object without attributes of its own, or weak references, that yields lists of numbers."""

    __slots__ = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5]])


class Unfriendly:
    """A loader that can't be compared, hashed, measured, or asked for what it lacks."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __len__(self) -> int:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"no {name}")

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.Tensor.clone, torch.split(Points().x, 3))


class Failing(Itself):
    """A loader that breaks in its third batch."""

    def __next__(self) -> Tensor:
        if self.at == 4:
            self.at += 2
            raise OSError("a bad disk")
        return super().__next__()


class Knowing(DataLoader[Tensor]):
    """A loader that relies on what it is, and what its iterator is, and fetches one batch ahead."""

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        assert type(self) is Knowing
        batches = super().__iter__()
        assert "DataLoaderIter" in type(batches).__name__
        before = None
        for batch in batches:
            if before is not None:
                yield before
            before = batch
        if before is not None:
            yield before


class Threaded:
    """A loader around a loader, that a thread reads ahead."""

    def __init__(self, inner: Any) -> None:
        self.loader = inner

    def __iter__(self) -> Iterator[Any]:
        fetched: queue.Queue[Any] = queue.Queue(maxsize=2)
        thread = threading.Thread(target=self._fetch, args=(fetched,), daemon=True)
        thread.start()
        while (batch := fetched.get()) is not None:
            yield batch
        thread.join()

    def _fetch(self, fetched: queue.Queue[Any]) -> None:
        for batch in [*self.loader]:
            fetched.put(batch)
        fetched.put(None)


class Around:
    """A loader around a loader, that passes on what it is asked."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


class Stateful:
    """A loader with a state, that goes on where it stood."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def __iter__(self) -> Iterator[Tensor]:
        for batch in torch.split(Points().x, 2)[self.done :]:
            self.done += 1
            yield batch
        self.done = 0


class Blocks(Sampler[list[int]]):
    """A batch sampler whose batches are arrays, and which draws from Python's generator."""

    def __iter__(self) -> Iterator[Any]:
        order = [*range(SIZE)]
        random.shuffle(order)
        return iter(np.array(order).reshape(-1, 4))

    def __len__(self) -> int:
        return 2


class Deeper(Blocks):
    """A sampler that changes what its parent draws."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch[::-1]


class Stream(IterableDataset[Tensor]):
    """Points without numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from Points().x


class Listed(list[Any]):
    """A list of batches."""


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Points(), batch_size=3, shuffle=True),
    "own generator": lambda: DataLoader(
        Points(), batch_size=3, shuffle=True, drop_last=True, generator=_generator()
    ),
    "single": lambda: DataLoader(Points(), batch_size=None, sampler=RandomSampler(Points())),
    "blocks": lambda: DataLoader(Points(), batch_sampler=Blocks()),
    "deeper": lambda: DataLoader(Points(), batch_sampler=Deeper()),
    "lists": lambda: DataLoader(Points(), batch_sampler=[[0, 1], [2, 3, 4]]),
    "weighted": lambda: DataLoader(
        Points(), batch_size=2, sampler=WeightedRandomSampler([1.0] * SIZE, 6)
    ),
    "subset": lambda: DataLoader(Subset(Points(), [5, 3, 1, 0]), batch_size=2),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "knowing": lambda: Knowing(Points(), batch_size=2, shuffle=True),
    "threaded": lambda: Threaded(DataLoader(Points(), batch_size=2)),
    "threaded around itself": lambda: Threaded(Itself()),
    "around": lambda: Around(DataLoader(Points(), batch_size=2, shuffle=True)),
    "around around": lambda: Around(Around(Generating())),
    "a batch sampler": lambda: BatchSampler(RandomSampler(range(SIZE)), 2, drop_last=False),
    "a sampler": lambda: RandomSampler(range(SIZE), generator=_generator()),
    "deeper blocks": Deeper,
    "itself": Itself,
    "endless": Endless,
    "generating": Generating,
    "a generator": lambda: iter(Generating()),
    "zipped": Zipped,
    "slotted": Slotted,
    "unfriendly": Unfriendly,
    "failing": Failing,
    "stateful": Stateful,
    "listed": lambda: Listed(torch.split(Points().x, 2)),
    "a list": lambda: [*torch.split(Points().x, 2)],
    "a map": lambda: map(torch.Tensor.clone, torch.split(Points().x, 2)),
}
