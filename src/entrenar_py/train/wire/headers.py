"""Converts a message's fields to canonical JSON bytes and back, and rejects all other bytes."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

from entrenar_py.shared.codec import Form, Schema, many, plain, whole
from entrenar_py.shared.errors import ProtocolError, UsageError
from entrenar_py.shared.untrusted import json_text
from entrenar_py.train.wire.messages import LIST_MAX, MESSAGES, TEXT_CHARS_MAX, Message


def dump(message: Message) -> bytes:
    """Return the fields of `message` as one JSON object: sorted keys, no spaces, ASCII."""
    return _ENCODER.encode(_SCHEMAS[message.tag].dump(message)).encode()


def parse(tag: int, header: bytes) -> Message:
    """Return the message of kind `tag` whose fields are `header`.

    Raises ProtocolError for anything but what `dump` writes; it names a field that is wrong.
    """
    schema = _SCHEMAS.get(tag)
    if schema is None:
        raise ProtocolError(f"tag={tag}: no message has it")
    _require_few(schema.kind, header)
    try:
        record = json_text.load(header.decode("ascii"), names_once=True)
    except ValueError as error:
        name = schema.kind.__name__
        raise ProtocolError(f"{name}: its header can't be read ({error})") from error
    try:
        message = schema.load(record)
    except UsageError as error:
        raise ProtocolError(str(error)) from error
    if dump(message) != header:
        raise ProtocolError(f"{schema.kind.__name__}: its header is not in canonical form")
    return message


def _require_few(kind: type[Message], header: bytes) -> None:
    """Raise ProtocolError for a header with too many values, before JSON spends memory on them."""
    num_fields = len(fields(kind)) + 1  # one unknown field gets a better message later
    in_texts = TEXT_CHARS_MAX * num_fields  # marks inside of strings
    if len(header) <= in_texts:
        return
    for mark, most in ((b",", LIST_MAX), (b":", num_fields), (b"[", num_fields), (b"{", 1)):
        if header.count(mark) > most + in_texts:
            raise ProtocolError(
                f"{kind.__name__}: {header.count(mark)} times {mark.decode()!r} in its header: "
                f"{most + in_texts} are possible"
            )


# Made once: `json.dumps` with options would make a new one on each call.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > TEXT_CHARS_MAX:
        raise ValueError(f"use text of at most {TEXT_CHARS_MAX} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("use valid Unicode: lone surrogates are not allowed")
    return value


def _hex(digits: int) -> Form:
    pattern = re.compile(f"[0-9a-f]{{{digits}}}")

    def read(value: Any) -> str:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            raise ValueError(f"use {digits} lower-case hex digits")
        return value

    return Form(read)


def _real(value: Any) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if not isinstance(value, float):
        raise ValueError("use a number with a decimal point, or nan, inf, -inf")
    return value


_INT = whole(0, advice="use a whole number from 0 to 2**63 - 1")
_FORMS = {
    "int": _INT,
    "float": Form(_real, plain),
    "str": Form(_text),
    "Nonce": _hex(32),
    "Proof": _hex(64),
    "Digest": _hex(64),
    "tuple[int, ...]": many(_INT, most=LIST_MAX),
    "tuple[str, ...]": many(Form(_text), most=LIST_MAX),
}
_SCHEMAS: dict[int, Schema[Message]] = {
    tag: Schema(kind, what=kind.__name__, forms=_FORMS) for tag, kind in MESSAGES.items()
}
