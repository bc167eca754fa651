"""The samples that a DataLoader or a sampler yields, and their epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from entrenar_py.errors import UsageError

Ids = tuple[int, ...]


@dataclass(frozen=True)
class InOrder:
    """A loader that is read several batches ahead, and whose batches are used in order."""

    source: Any


class Draws:
    """The samples of a `source`, batch by batch as it yields them.

    An epoch begins whenever it is iterated anew. `num_samples` is the size of its data set, None if
    unknown. `drop_last` tells whether it drops an incomplete batch, and `replacement` whether it
    may draw a sample again. If one rank iterates it for all (accelerate with `dispatch_batches`),
    no rank knows its own samples, and none are given. With `in_order`, `take` skips no batch.

    Raises UsageError for a `source` that can't be iterated.
    """

    def __init__(self, source: Any) -> None:
        self.in_order = isinstance(source, InOrder)
        source = source.source if isinstance(source, InOrder) else source
        if not hasattr(source, "__iter__"):
            raise UsageError(
                f"sampler={source!r}: give the DataLoader, batch sampler or sampler that draws the "
                "samples, or leave it out and report them by samples(ids)"
            )
        self._epoch = -1
        self._ahead: deque[Ids] = deque()  # batches that are drawn and not yet handed out
        self._handed: deque[tuple[int, Ids]] = deque()  # the last batch; with in_order, all
        self.num_samples = _size_of(source)
        parts = [*_parts(source)]
        self.drop_last = any(bool(getattr(part, "drop_last", False)) for part in parts)
        self.replacement = any(getattr(part, "replacement", False) is True for part in parts)
        if any(kind.__name__ == _DISPATCHER for kind in type(source).__mro__):
            return
        if isinstance(source, DataLoader):
            inner = source.batch_sampler if source.batch_sampler is not None else source.sampler
            _watch(inner, self._draw)
            _watch(source, self._hand_out, self._begin)
        else:
            batches = hasattr(source, "batch_size")
            _watch(source, self._draw_batch if batches else self._draw_one, self._begin)

    def take(self) -> tuple[int, Ids]:
        """Return the epoch and the samples of the batch that was yielded last.

        There are no samples if no batch was yielded since the last call, or if samples have no
        numbers. With `in_order` the batch is the first that was not taken yet.
        """
        return self._handed.popleft() if self._handed else (max(self._epoch, 0), ())

    def _begin(self) -> None:
        self._epoch += 1
        self._ahead.clear()

    def _draw(self, drawn: Any) -> None:
        try:
            ids = tuple(map(int, drawn)) if isinstance(drawn, Iterable) else (int(drawn),)
        except (TypeError, ValueError):  # keys of another kind
            ids = ()
        self._ahead.append(ids)

    def _hand_out(self, batch: Any = None) -> None:
        if not self.in_order:
            self._handed.clear()
        self._handed.append((max(self._epoch, 0), self._ahead.popleft() if self._ahead else ()))

    def _draw_one(self, drawn: Any) -> None:
        """Add a sampler's next sample to the batch of all samples since the last forward pass."""
        self._draw(drawn)
        before = self._handed.popleft()[1] if self._handed else ()
        self._handed.append((max(self._epoch, 0), before + self._ahead.popleft()))

    def _draw_batch(self, drawn: Any) -> None:
        self._draw(drawn)
        self._hand_out()


class Samples:
    """The samples of the forward passes since the last backward pass: `ids`, of `epoch`.

    The script reports them, or else they are taken from `source` as it draws them.
    """

    def __init__(self, source: Any) -> None:
        self.draws = None if source is None else Draws(source)
        self.ids: list[int] = []
        self.epoch = 0
        self._told: list[int] | None = None

    def tell(self, ids: Iterable[int], epoch: int | None) -> None:
        """Note that `ids` are the next samples, by default of the same epoch as those before."""
        self._told = [*(self._told or []), *map(int, ids)]
        self.epoch = self.epoch if epoch is None else epoch

    def collect(self) -> None:
        """Add the samples of a forward pass; a batch that no pass used is skipped."""
        if self._told is not None:
            self.ids += self._told
            self._told = None
        elif self.draws is not None and not (self.draws.in_order and self.ids):
            epoch, ids = self.draws.take()
            self.ids += ids
            self.epoch = epoch if ids else self.epoch

    def facts(self) -> dict[str, Any]:
        """Return what the sampler shows of the data, as JSON can hold it."""
        names = ("num_samples", "drop_last", "replacement")
        return {} if self.draws is None else {name: getattr(self.draws, name) for name in names}


_DISPATCHER = "DataLoaderDispatcher"  # accelerate's, with dispatch_batches=True
_SET_CLASS = object.__dict__["__class__"].__set__


class _TellingIterator:
    """An iterator that calls `tell` with each item; its other attributes are those of `inner`."""

    def __init__(self, inner: Iterator[Any], tell: Callable[[Any], None]) -> None:
        self._inner, self._tell = inner, tell

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._inner)
        self._tell(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _watch(
    source: Any, tell: Callable[[Any], None], begin: Callable[[], None] = lambda: None
) -> None:
    """Call `begin` whenever `source` is iterated from here on, and `tell` with each item.

    `source` stays the same object, and gets a class of its own, since `for` looks for `__iter__` in
    the class. If an object's class can't be changed (a list of batches), its samples stay unknown.
    """
    kind = type(source)

    def go_through(self: Any) -> Iterator[Any]:
        begin()
        return _TellingIterator(iter(kind.__iter__(self)), tell)

    with suppress(TypeError):
        # Not by assignment: accelerate's loaders override `__class__` to look like torch's.
        _SET_CLASS(source, type(kind.__name__, (kind,), {"__iter__": go_through}))


def _parts(source: Any) -> Iterator[Any]:
    """Yield `source`, and the samplers inside it."""
    yield source
    for name in ("batch_sampler", "sampler"):
        inner = getattr(source, name, None)
        if inner is not None:
            yield from _parts(inner)


def _size_of(source: Any) -> int | None:
    for part in _parts(source):
        for name in ("dataset", "data_source"):
            data = getattr(part, name, None)
            if isinstance(data, Sized):
                return len(data)
    return None
