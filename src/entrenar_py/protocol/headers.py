"""A message's fields as bytes, and back: one canonical JSON object, and nothing that is not one."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from entrenar_py.errors import ProtocolError
from entrenar_py.protocol.messages import LIST_MAX, MESSAGES, TEXT_CHARS_MAX, Message


def dump(message: Message) -> bytes:
    """The fields of `message` as one canonical JSON object: sorted keys, no spaces, ASCII."""
    record = {name: _plain(getattr(message, name)) for name, _ in _FIELDS[type(message)]}
    return _ENCODER.encode(record).encode()


def parse(tag: int, header: bytes) -> Message:
    """The message of kind `tag` whose fields are `header`.

    ProtocolError, naming the field, for anything but what `dump` writes.
    """
    kind = MESSAGES.get(tag)
    if kind is None:
        raise ProtocolError(f"tag={tag}: no message has it")
    _require_few(kind, header)
    try:
        record = _DECODER.decode(header.decode("ascii"))
    except (RecursionError, ValueError) as error:
        raise ProtocolError(f"{kind.__name__}: its header can't be read ({error})") from error
    if not isinstance(record, dict):
        raise ProtocolError(f"{kind.__name__}: its header is a {type(record).__name__}")
    names = {name for name, _ in _FIELDS[kind]}
    for problem, odd in (("missing", names - set(record)), ("unknown", set(record) - names)):
        if odd:
            raise ProtocolError(f"{kind.__name__} {reprlib.repr(min(odd))}: {problem}")
    values = {name: _checked(kind, name, wanted, record[name]) for name, wanted in _FIELDS[kind]}
    message = kind(**values)
    if dump(message) != header:
        raise ProtocolError(f"{kind.__name__}: its header is not in canonical form")
    return message


def _require_few(kind: type[Message], header: bytes) -> None:
    """ProtocolError for more values than a header can have: JSON would make 25 bytes of each."""
    num_fields = len(_FIELDS[kind]) + 1  # one more is better named than counted
    in_texts = TEXT_CHARS_MAX * num_fields  # where such a mark is no structure
    for mark, most in ((b",", LIST_MAX), (b":", num_fields), (b"[", num_fields), (b"{", 1)):
        if header.count(mark) > most + in_texts:
            raise ProtocolError(
                f"{kind.__name__}: {header.count(mark)} times {mark.decode()!r} in its header: "
                f"{most + in_texts} are possible"
            )


# Name and type of each field.
_FIELDS = {
    kind: [(field.name, str(field.type)) for field in fields(kind)] for kind in MESSAGES.values()
}


def _record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{reprlib.repr(name)} stands in it {times} times")
    return record


# Made once: `json.dumps` and `json.loads` with options of one's own make them each time.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_record)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN; "nan", "inf", "-inf" stand for them
    return list(value) if isinstance(value, tuple) else value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("use a whole number from 0 to 2**63 - 1")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > TEXT_CHARS_MAX:
        raise ValueError(f"use text of at most {TEXT_CHARS_MAX} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("use whole characters: half of a surrogate pair is none")
    return value


def _hex(digits: int) -> Callable[[Any], str]:
    form = re.compile(f"[0-9a-f]{{{digits}}}")

    def read(value: Any) -> str:
        if not isinstance(value, str) or form.fullmatch(value) is None:
            raise ValueError(f"use {digits} lower-case hex digits")
        return value

    return read


def _real(value: Any) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if not isinstance(value, float):
        raise ValueError("use a number with a decimal point, or nan, inf, -inf")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > LIST_MAX:
        raise ValueError(f"use a list of at most {LIST_MAX} whole numbers")
    return tuple(map(_whole, value))


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > LIST_MAX:
        raise ValueError(f"use a list of at most {LIST_MAX} texts")
    return tuple(map(_text, value))


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("use true or false")
    return value


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "bool": _flag,
    "int": _whole,
    "int | None": _optional(_whole),
    "Nonce": _hex(32),
    "Proof": _hex(64),
    "str": _text,
    "str | None": _optional(_text),
    "float": _real,
    "tuple[int, ...]": _numbers,
    "tuple[str, ...]": _texts,
}


def _checked(kind: type[Message], name: str, wanted: str, value: Any) -> Any:
    try:
        return _READERS[wanted](value)
    except ValueError as error:
        shown = reprlib.repr(value)  # short, and not deep
        raise ProtocolError(f"{kind.__name__} {name}={shown}: {error}") from error
