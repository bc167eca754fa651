"""Bytes <-> messages: framing, integrity, bounds.

A message travels as one frame, or as several if its payload is longer than CHUNK_BYTES. The first
frame carries the header and the first chunk, each later frame one more chunk. The prefix of a
frame:

    bytes   0- 3  magic "ENTP"
            4     version
            5     tag of the message
            6     1 in a message's first frame, 0 in a later one
            7     0 to the coordinator, 1 from it: neither end accepts its own frames
            8-15  number of this frame in its direction, from 0
           16-19  bytes of the header, 0 in a later frame
           20-23  bytes of the chunk
           24-31  bytes of the message's whole payload
           32-47  checksum: GMAC of bytes 0-31, the header and the chunk; its nonce is bytes 4-15

All integers are little-endian. The frame number reveals a frame that was lost, repeated or
reordered. The key belongs to the session (`terms.session_key`), so nobody else can write a frame of
the session.

The checksum is GMAC (NIST SP 800-38D), which is AES-256-GCM without a text to encrypt. Processors
have instructions for it: 64 MB take 5 ms, compared with 11 ms for keyed BLAKE3. XXH3 would take 2.5
ms, but anyone could forge it. GMAC is insecure if a key is ever used with the same nonce twice.
Here the nonce contains direction and frame number, which no two frames of a session share, and a
session's key is derived from two fresh nonces. Unkeyed frames use a key of zeros, which still
reveals accidental damage.
"""

from __future__ import annotations

import hmac
import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from entrenar_py.shared.codec import Form, Schema, many, plain, whole
from entrenar_py.shared.errors import ProtocolError, UsageError
from entrenar_py.shared.untrusted import json_text
from entrenar_py.train.wire.messages import (
    LIST_MAX,
    MESSAGES,
    TEXT_CHARS_MAX,
    VERSION,
    Challenge,
    Hello,
    Message,
    Refuse,
)


def dump_header(message: Message) -> bytes:
    """Return the fields of `message` as one JSON object: sorted keys, no spaces, ASCII."""
    return _ENCODER.encode(_SCHEMAS[message.tag].dump(message)).encode()


def parse_header(tag: int, header: bytes) -> Message:
    """Return the message with type `tag` and the fields in `header`.

    Raises ProtocolError for anything that `dump_header` wouldn't write; it names the wrong field.
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
    if dump_header(message) != header:
        raise ProtocolError(f"{schema.kind.__name__}: its header is not in canonical form")
    return message


def _require_few(kind: type[Message], header: bytes) -> None:
    """Raise ProtocolError for a header with too many values, before JSON spends memory on them."""
    num_fields = len(fields(kind)) + 1  # a single unknown field gets a better message later
    in_texts = TEXT_CHARS_MAX * num_fields  # punctuation inside strings
    if len(header) <= in_texts:
        return
    for mark, most in ((b",", LIST_MAX), (b":", num_fields), (b"[", num_fields), (b"{", 1)):
        if header.count(mark) > most + in_texts:
            raise ProtocolError(
                f"{kind.__name__}: {header.count(mark)} times {mark.decode()!r} in its header: "
                f"{most + in_texts} are possible"
            )


# Created once: `json.dumps` with options would create a new encoder on each call.
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


MAGIC = b"ENTP"
CHUNK_BYTES = 2**22
JOINED_BYTES_MAX = 2**17  # up to this size, copying a frame costs less than three calls
HEADER_BYTES_MAX = 2**21  # room for the longest list of the longest numbers
UNKEYED_HEADER_BYTES_MAX = 2**12  # the most memory that a peer without a proof can make us allocate

FIELDS = struct.Struct("<4sBBBBQIIQ")
_NONCE = slice(4, 16)  # fields of the nonce: version, tag, first, direction, number
_CHECKSUM_BYTES = 16
PREFIX_BYTES = FIELDS.size + _CHECKSUM_BYTES

Buffer: TypeAlias = bytes | bytearray | memoryview
# Returns the most payload bytes that a message of this type may have now; 0 if none are allowed.
Limit = Callable[[type[Message]], int]
# Returns memory of exactly this many bytes for a message's payload (see Decoder).
Room = Callable[[Message, int], memoryview]


# Only these messages are legal before a session has a key, and their frames never use it.
NO_KEY = bytes(32)
TO_COORDINATOR, FROM_COORDINATOR = 0, 1
UNKEYED = (Challenge, Hello, Refuse)


@dataclass(frozen=True, slots=True)
class Received:
    """A whole message; `payload` is the memory that a decoder's `room` returned, or empty."""

    message: Message
    payload: memoryview


def new_room(message: Message, num_bytes: int) -> memoryview:
    """Return new memory for a payload, not zeroed: zeroing would take longer than receiving."""
    return np.empty(num_bytes, np.uint8).data


class Encoder:
    """Encodes one direction of a connection; `key` is the session key."""

    version = VERSION

    def __init__(self, key: bytes = NO_KEY, *, direction: int = TO_COORDINATOR) -> None:
        self.key = key
        self._direction = direction
        self._number = 0

    def encode(self, message: Message, payload: Buffer = b"") -> Iterator[bytes | memoryview]:
        """Yield the bytes of each frame of `message`: prefix and header, then a view of a chunk."""
        whole = memoryview(payload).cast("B")
        assert message.carries or not whole.nbytes, f"{message} carries nothing"
        header = dump_header(message)
        assert len(header) <= header_bytes_max(type(message)), f"{type(message)} is too long"
        key = NO_KEY if isinstance(message, UNKEYED) else self.key
        for start in range(0, max(whole.nbytes, 1), CHUNK_BYTES):
            chunk = whole[start : start + CHUNK_BYTES]
            fields = FIELDS.pack(
                *(MAGIC, self.version, message.tag, start == 0, self._direction, self._number),
                *(len(header), chunk.nbytes, whole.nbytes),
            )
            self._number += 1
            yield fields + checksum_of(key, fields, header, chunk) + header
            if chunk.nbytes:
                yield chunk
            header = b""


class Decoder:
    """Decodes one direction of a connection; `key` is the session key.

    Write received bytes into `buffer()`, and call `filled` with their number.

    `room` returns the memory for a payload. It is called after the size was found to be within
    `limit`, and never for an empty payload; it may raise ProtocolError. The decoder owns the memory
    until `filled` returns the message; after that the caller owns it. Until then, the message
    passed to `room` and the bytes in the memory are unverified and may be damaged.
    """

    version = VERSION

    def __init__(
        self,
        limit: Limit,
        key: bytes = NO_KEY,
        *,
        direction: int = TO_COORDINATOR,
        room: Room = new_room,
    ) -> None:
        self.key = key
        self._direction = direction
        self._limit, self._room = limit, room
        self._number = 0
        self._received: Received | None = None  # being received, until its last frame
        self._at = 0  # number of its payload bytes received
        self._prefix = bytearray(PREFIX_BYTES)
        self._header = bytearray()
        self._chunk = memoryview(b"")
        self._rest = memoryview(self._prefix)  # of the prefix, header or chunk
        self._advance: Callable[[], Received | None] = self._end_prefix

    @property
    def num_frames(self) -> int:
        """Return the number of complete frames with a correct checksum so far."""
        return self._number

    @property
    def in_work(self) -> type[Message] | None:
        """Return the type of the message that is being received; None between messages."""
        return None if self._received is None else type(self._received.message)

    def buffer(self) -> memoryview:
        """Return the memory for the next received bytes; it is never empty."""
        return self._rest

    def filled(self, num_bytes: int) -> Received | None:
        """Return the message that the `num_bytes` bytes written to `buffer()` complete, or None.

        Raises ProtocolError for a frame that is malformed, damaged, out of turn or too long. After
        that, nothing more can be read from this peer.
        """
        self._rest = self._rest[num_bytes:]
        done = None
        while not self._rest.nbytes:  # a header or a chunk may be empty
            done = self._advance()
        return done

    def feed(self, data: Buffer) -> Iterator[Received]:
        """Yield each message in `data` as soon as it is complete."""
        left = memoryview(data)
        while left.nbytes:
            num_bytes = min(self._rest.nbytes, left.nbytes)
            self._rest[:num_bytes] = left[:num_bytes]
            left = left[num_bytes:]
            received = self.filled(num_bytes)
            if received is not None:
                yield received

    def _end_prefix(self) -> None:
        magic, version, tag, first, direction, number, *sizes = FIELDS.unpack_from(self._prefix)
        header_bytes, chunk_bytes, whole_bytes = sizes
        _require(magic == MAGIC, f"magic={magic!r}: not a frame of this protocol")
        ours = self.version
        _require(version == ours, f"version={version}: this end speaks version {ours}")
        _require(tag in MESSAGES, f"tag={tag}: no message has it")
        _require(number == self._number, f"frame {number} came where {self._number} was due")
        in_turn = direction == self._direction and first == (self._received is None)
        _require(in_turn, "a frame out of its turn")
        if self._received is None:
            due = self._due_first(MESSAGES[tag], header_bytes, whole_bytes)
        else:
            due = self._due_later(self._received, MESSAGES[tag], header_bytes, whole_bytes)
        most = min(due, CHUNK_BYTES)
        _require(chunk_bytes == most, f"chunk_bytes={chunk_bytes}: use {most}")
        self._header = bytearray(header_bytes)
        self._rest = memoryview(self._header)
        self._advance = self._end_header

    def _due_first(self, kind: type[Message], header_bytes: int, whole_bytes: int) -> int:
        """Check the first frame of a message; return how many payload bytes follow it."""
        name, longest = kind.__name__, header_bytes_max(kind)
        keyed = kind in UNKEYED or self.key != NO_KEY
        _require(keyed, f"{name} from a stranger: prove yourself first")
        _require(
            0 < header_bytes <= longest, f"{name} header_bytes={header_bytes}: use 1 to {longest}"
        )
        most = self._limit(kind) if kind.carries else 0
        _require(
            whole_bytes <= most,
            f"{name} with a payload of {whole_bytes} bytes: {most} are allowed now",
        )
        return whole_bytes

    def _due_later(
        self, received: Received, kind: type[Message], header_bytes: int, whole_bytes: int
    ) -> int:
        """Check a later frame of a message; return how many payload bytes follow it."""
        known = type(received.message) is kind and header_bytes == 0
        _require(known, "a frame of another message came in between")
        whole = len(received.payload)
        _require(whole_bytes == whole, f"payload_bytes={whole_bytes}: it began with {whole}")
        return whole - self._at

    def _end_header(self) -> None:
        _, _, tag, *_, chunk_bytes, whole_bytes = FIELDS.unpack_from(self._prefix)
        if self._received is None:
            message = parse_header(tag, bytes(self._header))
            self._received = Received(message, self._room_for(message, whole_bytes))
            self._at = 0
        self._chunk = self._received.payload[self._at : self._at + chunk_bytes]
        self._rest = self._chunk
        self._advance = self._end_frame

    def _room_for(self, message: Message, num_bytes: int) -> memoryview:
        if num_bytes == 0:
            return memoryview(b"")
        room = self._room(message, num_bytes).cast("B")
        assert room.nbytes == num_bytes, f"room of {room.nbytes} bytes for {num_bytes}"
        return room

    def _end_frame(self) -> Received | None:
        received = self._received
        assert received is not None, "_end_header made it"
        key = NO_KEY if isinstance(received.message, UNKEYED) else self.key
        fields, checksum = self._prefix[: FIELDS.size], self._prefix[FIELDS.size :]
        right = checksum_of(key, fields, self._header, self._chunk)
        _require(hmac.compare_digest(right, checksum), "checksum: damaged, or not of this session")
        self._number += 1
        self._at += self._chunk.nbytes
        self._rest, self._advance = memoryview(self._prefix), self._end_prefix
        if self._at < len(received.payload):
            return None
        self._received = None
        return received


def header_bytes_max(kind: type[Message]) -> int:
    """Return the most bytes that the header of a message of this type may have."""
    return UNKEYED_HEADER_BYTES_MAX if kind in UNKEYED else HEADER_BYTES_MAX


def checksum_of(key: bytes, fields: Buffer, header: Buffer, chunk: Buffer) -> bytes:
    """Return the checksum of a frame with these fields, header and chunk."""
    nonce = bytes(fields[_NONCE])
    if len(header) + len(chunk) <= JOINED_BYTES_MAX:
        return _cipher(key).encrypt(nonce, b"", b"".join((fields, header, chunk)))
    mac = Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()
    for part in (fields, header, chunk):
        mac.authenticate_additional_data(part)
    mac.finalize()
    return mac.tag


@lru_cache
def _cipher(key: bytes) -> AESGCM:
    return AESGCM(key)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ProtocolError(message)
