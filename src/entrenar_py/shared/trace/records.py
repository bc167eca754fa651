"""Conversion of events to dicts that JSON can hold, and back.

A record may come from a file written by hand or from a lying peer. It becomes an event only if its
values have the types of the event's annotations.
"""

from __future__ import annotations

import reprlib
import sys
from base64 import b64decode
from typing import Any
from weakref import WeakValueDictionary

from entrenar_py.shared.codec import WORDS, Form, Schema, whole
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.trace import (
    averaging_events,
    device_events,
    elastic_events,
    events,
    script_events,
    service_events,
    token_events,
    tuning_events,
)
from entrenar_py.shared.trace.events import Event
from entrenar_py.shared.trace.script_events import FILE_BYTES_MAX, LINE_MAX, SITES, is_source_file
from entrenar_py.shared.trace.tensors import Sketch, TensorRecord, Tensors

# The classes of events by their names in a file.
EVENTS: dict[str, type[Event]] = {
    event.kind: event
    for module in (
        *(events, device_events, script_events),
        *(averaging_events, service_events, token_events, tuning_events),
        elastic_events,
    )
    for event in vars(module).values()
    if isinstance(event, type) and issubclass(event, Event) and event is not Event
}
_ITEM_BITS = {
    "int": (8, 16, 32, 64),
    "uint": (8, 16, 32, 64),
    "float": (16, 32, 64),
    "complex": (64, 128),
}
_ITEM_BYTES = {"bool": 1} | {
    f"{kind}{bits}": bits // 8 for kind, sizes in _ITEM_BITS.items() for bits in sizes
}


def to_record(event: Event) -> dict[str, Any]:
    """Return the kind and the fields of `event` as a dict that JSON can hold.

    Raises UsageError for a value that `from_record` would refuse.
    """
    return {"kind": event.kind} | _SCHEMAS[event.kind].dump(event)


def from_record(record: Any) -> Event:
    """Return the event that `to_record` wrote as `record`. Raises UsageError for anything else."""
    if not isinstance(record, dict):
        raise UsageError(f"an event is a mapping, not a {type(record).__name__}")
    kind = record.get("kind")
    schema = _SCHEMAS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        raise UsageError(f"kind={reprlib.repr(kind)}: known are {', '.join(EVENTS)}", field="kind")
    return schema.load({name: value for name, value in record.items() if name != "kind"})


# --- tensors ----------------------------------------------------------------------------------


def _read_tensor(value: Any) -> TensorRecord:
    if type(value) is str:
        return _of_digest(value)
    if type(value) is list and [*map(type, value)] == [str, str, str, int]:
        digest, text, dtype, size = value
        if dtype not in _ITEM_BYTES:
            raise ValueError(f"use a dtype of {', '.join(_ITEM_BYTES)}")
        return TensorRecord(digest, None, dtype, Sketch.from_text(size, text))
    if type(value) is not list or [*map(type, value)] != [str, str, str]:
        raise ValueError("use a digest, or a list of digest, data and dtype (and size)")
    digest, data, dtype = value
    _require_data(data, dtype)
    return TensorRecord(digest, data, dtype)


# Ranks that agree have equal tensors, and share their records here. The references are weak, so
# that a coordinator, which reads events for weeks, frees a record when no trace holds it.
_SHARED: WeakValueDictionary[str, TensorRecord] = WeakValueDictionary()


def _of_digest(digest: str) -> TensorRecord:
    """Return the record, shared by all traces, of the tensors with this digest."""
    record = _SHARED.get(digest)
    if record is None:
        record = _SHARED[digest] = TensorRecord(digest)
    return record


def _read_tensors(value: Any) -> dict[str, TensorRecord]:
    if type(value) is not dict:
        raise ValueError("use a mapping from names to digests")
    return {sys.intern(name): _read_tensor(item) for name, item in value.items()}


def _write_tensors(tensors: Tensors) -> dict[str, Any]:
    return {name: _write_tensor(tensor) for name, tensor in tensors.items()}


def _write_tensor(tensor: TensorRecord) -> str | list[str | int]:
    if tensor.sketch is not None:
        return [tensor.digest, tensor.sketch.to_text(), tensor.dtype, tensor.sketch.size]
    if tensor.data is None:
        return tensor.digest
    _require_data(tensor.data, tensor.dtype)
    return [tensor.digest, tensor.data, tensor.dtype]


def _require_data(data: str, dtype: str) -> None:
    if dtype not in _ITEM_BYTES or len(b64decode(data, validate=True)) % _ITEM_BYTES[dtype]:
        raise ValueError(f"use base64 of whole numbers or floats: {', '.join(_ITEM_BYTES)}")


def _site_name(value: Any) -> str:
    if type(value) is not str or value not in SITES:
        raise ValueError(f"use one of {', '.join(SITES)}")
    return value


def _source_file(value: Any) -> str:
    if type(value) is not str or not is_source_file(value):
        raise ValueError(f"use a path of at most {FILE_BYTES_MAX} bytes")
    return value


_FORMS = {
    "Tensors": Form(_read_tensors, _write_tensors),
    "Mapping[str, Any]": WORDS,
    "SiteName": Form(_site_name, _site_name),
    "SourceFile": Form(_source_file, _source_file),
    "SourceLine": whole(1, LINE_MAX, advice=f"use a whole number from 1 to {LINE_MAX}"),
}
_SCHEMAS: dict[str, Schema[Event]] = {
    name: Schema(kind, what=name, forms=_FORMS) for name, kind in EVENTS.items()
}
