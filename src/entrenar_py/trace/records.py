"""An event as a plain record that JSON can hold, and back: nothing of files or chains.

What comes back has the types that the event's annotations name, or there is no event: a record may
come from a file that someone wrote by hand, or from a peer that lies.
"""

from __future__ import annotations

import math
import reprlib
import sys
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any
from weakref import WeakValueDictionary

from entrenar_py.trace.events import Event
from entrenar_py.trace.kinds import EVENTS
from entrenar_py.trace.tensors import TensorRecord

# What a record of other keys or types makes `from_record` raise.
NOT_AN_EVENT = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)

_INT_MAX = 2**63 - 1
_ITEM_BYTES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
_DEPTH_MAX = 16  # of what a trainer notes in its own words (`progress`, `fault`)

Reader = Callable[[Any], Any]


def to_record(event: Event) -> dict[str, Any]:
    """The fields of `event`, and its kind, as JSON can hold them."""
    return {"kind": event.kind} | {f.name: _plain(getattr(event, f.name)) for f in fields(event)}


def from_record(record: dict[str, Any]) -> Event:
    """The event that `to_record` gave; one of `NOT_AN_EVENT` for anything else."""
    kind = EVENTS.get(record.pop("kind", ""))
    if kind is None:
        raise ValueError(f"unknown kind; known are {', '.join(EVENTS)}")
    readers = _READERS[kind]
    if unknown := record.keys() - readers.keys():
        raise ValueError(f"key {reprlib.repr(min(unknown))}: a {kind.kind} has none of that name")
    values = {}
    for name, value in record.items():
        try:
            values[name] = readers[name](value)
        except ValueError as error:
            raise ValueError(f"{name}={reprlib.repr(value)}: {error}") from error
    return kind(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, TensorRecord):
        if value.data is None:
            return value.digest
        return [value.digest, value.data, value.dtype]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN; "nan", "inf", "-inf" stand for them
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


# --- what may stand in a field, by its annotation -------------------------------------------------


def _int(value: Any) -> int:
    if type(value) is not int or not -_INT_MAX <= value <= _INT_MAX:
        raise ValueError("use a whole number of at most 63 bits")
    return value


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if value in ("nan", "inf", "-inf") or type(value) is int:
        return float(value)
    raise ValueError("use a number, or nan, inf, -inf")


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("use true or false")
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("use text")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("use a list")
    return value


def _tuple(*read: Reader) -> Reader:
    """A reader of exactly these."""
    return lambda value: tuple(one(item) for one, item in zip(read, _list(value), strict=True))


def _tuple_of(read: Reader) -> Reader:
    """A reader of any number of these."""
    return lambda value: tuple(map(read, _list(value)))


def _optional(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def _tensor(value: Any) -> TensorRecord:
    if type(value) is str:
        return _digest(value)
    digest, data, dtype = _tuple(_str, _str, _str)(value)
    if dtype not in _ITEM_BYTES or len(b64decode(data, validate=True)) % _ITEM_BYTES[dtype]:
        raise ValueError(f"use base64 of whole numbers or floats: {', '.join(_ITEM_BYTES)}")
    return TensorRecord(digest, data, dtype)


# Ranks that agree share most of their records. A record goes when no trace holds it: a coordinator
# reads events for weeks.
_SHARED: WeakValueDictionary[str, TensorRecord] = WeakValueDictionary()


def _digest(digest: str) -> TensorRecord:
    """Return the one record of all tensors that have this digest."""
    record = _SHARED.get(digest)
    if record is None:
        record = _SHARED[digest] = TensorRecord(digest)
    return record


def _tensors(value: Any) -> dict[str, TensorRecord]:
    if type(value) is not dict:
        raise ValueError("use a mapping from names to digests")
    return {sys.intern(name): _tensor(item) for name, item in value.items()}


def _words(value: Any) -> dict[str, Any]:
    if type(value) is not dict or _depth(value, _DEPTH_MAX) > _DEPTH_MAX:
        raise ValueError(f"use a mapping of at most {_DEPTH_MAX} levels")
    return value


def _floats(value: Any) -> dict[str, float]:
    if type(value) is not dict:
        raise ValueError("use a mapping from names to numbers")
    return {name: _float(item) for name, item in value.items()}


def _depth(value: Any, left: int) -> int:
    """How many levels of lists and mappings there are; no more than one beyond `left`."""
    if not isinstance(value, dict | list) or left < 0:
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, left - 1) for item in inner), default=0)


_BY_ANNOTATION: dict[str, Reader] = {
    "bool": _bool,
    "int": _int,
    "int | None": _optional(_int),
    "float": _float,
    "float | None": _optional(_float),
    "Mapping[str, float]": _floats,
    "str": _str,
    "str | None": _optional(_str),
    "tuple[int, ...]": _tuple_of(_int),
    "tuple[int, int, int]": _tuple(_int, _int, _int),
    "tuple[str, ...]": _tuple_of(_str),
    "tuple[str, ...] | None": _optional(_tuple_of(_str)),
    "tuple[tuple[str, tuple[int, ...], str], ...]": _tuple_of(_tuple(_str, _tuple_of(_int), _str)),
    "Tensors": _tensors,
    "Mapping[str, Any]": _words,
}
_READERS: dict[type[Event], dict[str, Reader]] = {
    kind: {field.name: _BY_ANNOTATION[str(field.type)] for field in fields(kind)}
    for kind in EVENTS.values()
}
