"""Hear which samples a torch DataLoader fetches, and when it hands out each batch.

All loaders of torch, and those that other libraries derive from them, are iterated by a class of
torch's. Its methods are replaced while anybody listens, so that loaders, samplers and iterators
remain the objects that they were.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.data.dataloader import _BaseDataLoaderIter

from entrenar_py.check.observing import iterations


class LoaderListener(iterations.Listener, Protocol):
    """Hears one iteration of a loader: indices as they are drawn, and batches as `item`."""

    def drawn(self, index: Any) -> None:
        """Hear the index, or the list of indices, of a batch that will be handed out later."""

    def failed(self) -> None:
        """Hear that an error was raised in place of a batch."""


# Called with a loader that begins to be iterated; returns None if it isn't concerned.
Begin = Callable[[Any], LoaderListener | None]

_BEGINS: list[Begin] = []
_AROUND: list[Callable[[bool], None]] = []
_ORDERING = ("__init__", "_next_index")  # the methods that draw an epoch's seed, and its order
# By the id of an iterator of a loader. It is gone from here when the iterator is.
_HEARD: dict[int, tuple[weakref.ref[Any], list[LoaderListener]]] = {}


class LoaderHooks:
    """Calls `begin` whenever a loader is iterated, and tells the LoaderListener that it returns."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        for name, make in _METHODS.items():
            iterations.replace(_BaseDataLoaderIter, name, make)
        _BEGINS.append(begin)

    def remove(self) -> None:
        """Put back torch's methods."""
        if self._begin in _BEGINS:
            _BEGINS.remove(self._begin)
            for name in _METHODS:
                iterations.put_back(_BaseDataLoaderIter, name)


class OrderHooks:
    """Calls `around` before a loader draws an epoch's seed or an index, and with True after it."""

    def __init__(self, around: Callable[[bool], None]) -> None:
        self._around = around
        for name in _ORDERING:
            iterations.replace(_BaseDataLoaderIter, name, _METHODS[name])
        _AROUND.append(around)

    def remove(self) -> None:
        """Put back torch's methods."""
        _AROUND.remove(self._around)
        for name in _ORDERING:
            iterations.put_back(_BaseDataLoaderIter, name)


def _ordered(inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
    for around in _AROUND:
        around(False)
    try:
        return inner(*args, **named)
    finally:
        for around in _AROUND:
            around(True)


def _forget(address: int, _: object) -> None:
    _HEARD.pop(address, None)


def _begins(iterator: Any, loader: Any) -> None:
    listeners = [listener for begin in _BEGINS if (listener := begin(loader)) is not None]
    if listeners:
        gone = weakref.ref(iterator, functools.partial(_forget, id(iterator)))
        _HEARD[id(iterator)] = gone, listeners


def _listeners(iterator: Any) -> list[LoaderListener]:
    gone, listeners = _HEARD.get(id(iterator), (None, []))
    return listeners if gone is not None and gone() is iterator else []


# --- torch's methods --------------------------------------------------------------------------


def _telling_init(_: type, inner: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, loader: Any, *args: Any, **named: Any) -> None:  # noqa: N807
        _begins(self, loader)
        _ordered(inner, self, loader, *args, **named)

    return __init__


def _telling_reset(_: type, inner: Callable[..., Any]) -> Callable[..., Any]:
    def _reset(self: Any, *args: Any, **named: Any) -> Any:
        loader = args[0] if args else named.get("loader")
        if loader is not None:
            _begins(self, loader)
        return inner(self, *args, **named)

    return _reset


def _telling_index(_: type, inner: Callable[..., Any]) -> Callable[..., Any]:
    def _next_index(self: Any) -> Any:
        index = _ordered(inner, self)
        for listener in _listeners(self):
            listener.drawn(index)
        return index

    return _next_index


def _telling_next(_: type, inner: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807
        try:
            batch = inner(self)
        except StopIteration:
            for listener in _listeners(self):
                listener.over()
            raise
        except BaseException:
            for listener in _listeners(self):
                listener.failed()
            raise
        for listener in _listeners(self):
            listener.item(batch)
        return batch

    return __next__


_METHODS: dict[str, iterations.Make] = {
    "__init__": _telling_init,
    "_reset": _telling_reset,
    "_next_index": _telling_index,
    "__next__": _telling_next,
}
