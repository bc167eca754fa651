"""Hooks that report when an object or a loader is iterated, and the items that it yields.

A method of the object's class is replaced by one that also reports, and is restored at the end. So
the object keeps its class, and copying, pickling and iterating it work as before.

All loaders of torch, and loaders that libraries derive from them, are iterated by torch's class
`_BaseDataLoaderIter`. The methods of this class are replaced while there are listeners.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from types import FunctionType, GeneratorType
from typing import Any, Protocol

from torch.utils.data.dataloader import _BaseDataLoaderIter


class Listener(Protocol):
    """Receives the items of one iteration, and is called at its end."""

    def item(self, item: Any) -> None:
        """Receive an item, before the script gets it."""

    def over(self) -> None:
        """Called when there are no more items."""


class IterationHooks:
    """Calls `begin` whenever `source` is iterated, and reports items to the Listener it returns.

    Nothing is reported if Python doesn't allow changes to the class of the object or of its
    iterator. A built-in iterator of Python (of a list, say) is wrapped in an iterator that passes
    on all calls.
    """

    def __init__(self, source: Any, begin: Callable[[], Listener]) -> None:
        self.source, self.begin = source, begin
        self._methods: list[tuple[type, str]] = []
        if self._replace(type(source), "__iter__", _telling_iter):
            _HOOKED[id(source)] = self

    def remove(self) -> None:
        """Restore the methods of the classes."""
        _HOOKED.pop(id(self.source), None)
        for kind, name in self._methods:
            put_back(kind, name)
        self._methods.clear()

    def follow(self, iterator: Any) -> Any:
        """Return `iterator`, or a wrapper of it, such that its items are reported."""
        listener = self.begin()
        if type(iterator) is GeneratorType:
            told: Any = _told(iterator, listener)
            told.__name__, told.__qualname__ = iterator.__name__, iterator.__qualname__
            return told
        if type(iterator).__module__ in _PYTHONS_OWN:
            return _Telling(iterator, listener)
        with suppress(TypeError):  # the object doesn't allow weak references
            gone = weakref.ref(iterator, functools.partial(_forget, id(iterator)))
            if self._replace(type(iterator), "__next__", _telling_next):
                _FOLLOWED[id(iterator)] = gone, listener
        return iterator

    def _replace(self, kind: type, name: str, make: Make) -> bool:
        if (kind, name) in self._methods:
            return True
        if replaced := replace(kind, name, make):
            self._methods.append((kind, name))
        return replaced


# --- methods of classes -----------------------------------------------------------------------

Make = Callable[[type, Callable[..., Any]], Callable[..., Any]]


class _Replaced:
    """A method that replaces the method of a class, and how often the replacement was requested."""

    def __init__(self, method: Callable[..., Any], before: Any) -> None:
        self.method, self.before, self.count = method, before, 0


_ABSENT = object()  # marks a method that the class inherits instead of defining it
_REPLACED: dict[tuple[type, str], _Replaced] = {}


def replace(kind: type, name: str, make: Make) -> bool:
    """Replace the method `name` of `kind` with the result of `make(kind, method)`.

    Return whether this was possible. It is not for a class written in C, nor if the attribute isn't
    a function. `put_back` undoes the replacement.
    """
    if (replaced := _REPLACED.get((kind, name))) is None:
        before: Any = kind.__dict__.get(name, _ABSENT)
        inner = functools.partial(_inherited, kind, name) if before is _ABSENT else before
        if before is not _ABSENT and not isinstance(before, FunctionType):
            return False
        method = make(kind, inner)
        if isinstance(before, FunctionType):
            functools.update_wrapper(method, before)
        try:
            type.__setattr__(kind, name, method)
        except TypeError:
            return False
        replaced = _REPLACED[kind, name] = _Replaced(method, before)
    replaced.count += 1
    return True


def put_back(kind: type, name: str) -> None:
    """Undo one `replace`.

    When all are undone, the class gets its method back, unless the script has changed it meanwhile.
    """
    replaced = _REPLACED[kind, name]
    replaced.count -= 1
    if replaced.count:
        return
    del _REPLACED[kind, name]
    if kind.__dict__.get(name) is not replaced.method:
        return
    if replaced.before is _ABSENT:
        type.__delattr__(kind, name)
    else:
        type.__setattr__(kind, name, replaced.before)


def _inherited(kind: type, name: str, self: Any, *args: Any, **named: Any) -> Any:
    return getattr(super(kind, self), name)(*args, **named)


# --- replacements -----------------------------------------------------------------------------

# Modules of Python's built-in iterators, such as those of lists.
_PYTHONS_OWN = ("builtins", "itertools")
# Id of the source -> its hooks, which refer to the source, so the id isn't reused.
_HOOKED: dict[int, IterationHooks] = {}
# Id of an iterator -> the iterator and its listener. The entry is removed when the iterator is
# freed.
_FOLLOWED: dict[int, tuple[weakref.ref[Any], Listener]] = {}


def _forget(address: int, _: object) -> None:
    _FOLLOWED.pop(address, None)


def _telling_iter(kind: type, inner: Callable[..., Any]) -> Callable[..., Any]:
    def __iter__(self: Any) -> Any:  # noqa: N807
        iterator = inner(self)
        hooks = _HOOKED.get(id(self))
        # Avoid a second report: the subclass's own replaced method reports, and called this one by
        # super().
        if hooks is None or hooks.source is not self or type(self) is not kind:
            return iterator
        return hooks.follow(iterator)

    return __iter__


def _telling_next(kind: type, inner: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807
        gone, listener = _FOLLOWED.get(id(self), (None, None))
        if listener is None or gone is None or gone() is not self or type(self) is not kind:
            return inner(self)
        try:
            item = inner(self)
        except StopIteration:
            listener.over()
            raise
        listener.item(item)
        return item

    return __next__


def _told(inner: Generator[Any, Any, Any], listener: Listener) -> Generator[Any, Any, Any]:
    """Yield what `inner` yields, as `yield from` does, and report each item to `listener`."""
    proceed: Callable[[], Any] = functools.partial(next, inner)
    while True:
        try:
            item = proceed()
        except StopIteration as end:
            listener.over()
            return end.value
        listener.item(item)
        try:
            sent = yield item
        except GeneratorExit:
            inner.close()
            raise
        except BaseException as error:  # noqa: BLE001  (the script throws it into its generator)
            proceed = functools.partial(inner.throw, error)
        else:
            proceed = functools.partial(inner.send, sent)


class _Telling:
    """Wraps a built-in iterator to report its items; `__class__` is the class of `inner`."""

    __slots__ = ("_inner", "_listener")

    def __init__(self, inner: Iterator[Any], listener: Listener) -> None:
        self._inner, self._listener = inner, listener

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self._inner)
        except StopIteration:
            self._listener.over()
            raise
        self._listener.item(item)
        return item

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)

    def __length_hint__(self) -> int:
        return self._inner.__length_hint__() if hasattr(self._inner, "__length_hint__") else 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._inner.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# --- torch's loaders ------------------------------------------------------------------------------


class LoaderListener(Listener, Protocol):
    """Receives one iteration over a loader: indices as they are drawn, then batches, by `item`."""

    def drawn(self, index: Any) -> None:
        """Receive the index, or the list of indices, of a batch that the loader yields later."""

    def failed(self) -> None:
        """Called when an error was raised instead of a batch."""


# Called with a loader when an iteration over it begins. Returns None to ignore the iteration.
Begin = Callable[[Any], LoaderListener | None]

_BEGINS: list[Begin] = []
_AROUND: list[Callable[[bool], None]] = []
# The methods that draw an epoch's seed, and its order of samples.
_ORDERING = ("__init__", "_next_index")
# Id of a loader's iterator -> the iterator and its listeners. The entry is removed when the
# iterator is freed.
_HEARD: dict[int, tuple[weakref.ref[Any], list[LoaderListener]]] = {}


class LoaderHooks:
    """Calls `begin` whenever a loader is iterated, and reports to the LoaderListener it returns."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        for name, make in _METHODS.items():
            replace(_BaseDataLoaderIter, name, make)
        _BEGINS.append(begin)

    def remove(self) -> None:
        """Restore torch's methods."""
        if self._begin in _BEGINS:
            _BEGINS.remove(self._begin)
            for name in _METHODS:
                put_back(_BaseDataLoaderIter, name)


class OrderHooks:
    """Calls `around(False)` before a loader draws a seed or an index, and `around(True)` after."""

    def __init__(self, around: Callable[[bool], None]) -> None:
        self._around = around
        for name in _ORDERING:
            replace(_BaseDataLoaderIter, name, _METHODS[name])
        _AROUND.append(around)

    def remove(self) -> None:
        """Restore torch's methods."""
        _AROUND.remove(self._around)
        for name in _ORDERING:
            put_back(_BaseDataLoaderIter, name)


def _ordered(inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
    for around in _AROUND:
        around(False)
    try:
        return inner(*args, **named)
    finally:
        for around in _AROUND:
            around(True)


def _forget_loader(address: int, _: object) -> None:
    _HEARD.pop(address, None)


def _begins(iterator: Any, loader: Any) -> None:
    listeners = [listener for begin in _BEGINS if (listener := begin(loader)) is not None]
    if listeners:
        gone = weakref.ref(iterator, functools.partial(_forget_loader, id(iterator)))
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
        is_first = args[1] if len(args) > 1 else named.get("first_iter", False)  # within __init__
        if loader is not None and not is_first:
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


def _telling_next_batch(_: type, inner: Callable[..., Any]) -> Callable[..., Any]:
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


_METHODS: dict[str, Make] = {
    "__init__": _telling_init,
    "_reset": _telling_reset,
    "_next_index": _telling_index,
    "__next__": _telling_next_batch,
}
