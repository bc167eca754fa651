"""Hear where torch's loaders draw seeds and samples, in this process and in their workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from entrenar_py.check.observing import iterations
from entrenar_py.check.observing.iterations import OrderHooks
from entrenar_py.check.observing.random_numbers import RandomNumbers
from entrenar_py.check.observing.sources import positions_of

_FETCHERS = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
_HEARING: list[LoaderDraws] = []


class LoaderDraws:
    """Tells `numbers` when loaders draw: for the order of an epoch, and as they fetch samples.

    Only samples of the data set `trained` count, the one that the script trains on; those of any
    data set if it is None. A worker is forked from this process, and so are these hooks: it writes
    what it draws for its first batch.
    """

    def __init__(self, numbers: RandomNumbers, *, trained: object) -> None:
        self._numbers, self._trained = numbers, trained
        self._begun: set[int] = set()  # fetchers that have fetched, in a worker
        self._order = OrderHooks(self._around_order)
        for kind in _FETCHERS:
            iterations.replace(kind, "fetch", _telling_fetch)
        _HEARING.append(self)

    def remove(self) -> None:
        """Put back torch's methods."""
        if self not in _HEARING:
            return
        self._order.remove()
        for kind in _FETCHERS:
            iterations.put_back(kind, "fetch")
        _HEARING.remove(self)

    def _around_order(self, is_over: bool) -> None:
        if get_worker_info() is None:
            self._numbers.mark(None if is_over else "between")

    def before_fetch(self) -> None:
        """Note that samples are about to be fetched."""
        self._numbers.mark("between" if get_worker_info() is None else None)

    def after_fetch(self, fetcher: Any, index: Any) -> None:
        """Note that the samples at `index` were fetched."""
        counts = self._trained is None or fetcher.dataset is self._trained
        worker = get_worker_info()
        if worker is None:
            self._numbers.mark("loader" if counts else None)
        elif counts and id(fetcher) not in self._begun:
            self._begun.add(id(fetcher))
            self._numbers.mark("loader", worker=worker.id, ids=positions_of(index) or ())


def _telling_fetch(_: type, inner: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(self: Any, index: Any) -> Any:
        for each in _HEARING:
            each.before_fetch()
        try:
            return inner(self, index)
        finally:
            for each in _HEARING:
                each.after_fetch(self, index)

    return fetch
