"""The messages of the original system's wire, their framing, and its bounds.

A frame begins with a big-endian u32, the number of bytes that follow. Then come the tag, one byte,
and the little-endian fields, in the order in which the records list them.

Every length and count is compared with the frame's announced length before memory is allocated for
it. Gradients are received into memory that the owner of the decoder provides, and are sent from
their own memory, so only one copy exists.

The count of `component_sizes` is a u64, as in every vector, but workers of the original system
write a u32. The sizes add up to the number of gradients, and all counts must fit the length of the
frame, so only one of the two readings can be right. `Decoder.counts` says which, so that a worker
is answered in its own format.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias, dataclass_transform

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire.frames import Buffer

U8: TypeAlias = int
U32: TypeAlias = int
U64: TypeAlias = int
F32: TypeAlias = float
Text: TypeAlias = str  # u32, the number of bytes, then UTF-8
Sizes: TypeAlias = tuple[int, ...]  # u64, the count, then a u32 each
# u64, the count, then a float32 each. A record has only the count; the values are its payload.
Gradients: TypeAlias = int

COORDINATOR, WORKER, EITHER = "coordinator", "worker", "either"


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class WireMessage:
    """A message of the type `tag`; `sender` is COORDINATOR, WORKER or EITHER.

    Every subclass is a frozen dataclass with the message's fields.
    """

    tag: ClassVar[int]
    sender: ClassVar[str]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class JoinRequest(WireMessage):
    """Request to take part; the first message of a connection."""

    tag: ClassVar[int] = 0x01
    sender: ClassVar[str] = WORKER
    node_id: Text
    gpu_count: U32
    backend: Text


class JoinAccepted(WireMessage):
    """The worker takes part as `worker_id`; `total_workers` is the number of places."""

    tag: ClassVar[int] = 0x02
    sender: ClassVar[str] = COORDINATOR
    worker_id: U32
    total_workers: U32


class ShardAssignment(WireMessage):
    """Request for the gradient of samples `start` to `end` - 1, at the weights before `step`."""

    tag: ClassVar[int] = 0x03
    sender: ClassVar[str] = COORDINATOR
    step: U64
    start: U64
    end: U64


class GradientPayload(WireMessage):
    """The mean gradient and the mean loss over the `total` samples of the worker's shard.

    `correct` samples were predicted correctly. It is the last message of a shard, unless the
    configuration lists `components`.
    """

    tag: ClassVar[int] = 0x04
    sender: ClassVar[str] = WORKER
    step: U64
    worker_id: U32
    gradients: Gradients
    loss: F32
    correct: U64
    total: U64


class AveragedGradient(WireMessage):
    """The mean of all shards' gradients and losses, each weighted by its `total`."""

    tag: ClassVar[int] = 0x05
    sender: ClassVar[str] = COORDINATOR
    step: U64
    gradients: Gradients
    loss: F32


class Heartbeat(WireMessage):
    """Sign that the worker is alive. It gets no answer. `timestamp_ms` is not read."""

    tag: ClassVar[int] = 0x06
    sender: ClassVar[str] = EITHER
    node_id: Text
    timestamp_ms: U64


class Shutdown(WireMessage):
    """The run is over: complete, halted or stopped. No more averages follow."""

    tag: ClassVar[int] = 0x07
    sender: ClassVar[str] = COORDINATOR


class BlockGradient(WireMessage):
    """The mean gradient of one of `num_blocks` blocks over the worker's shard.

    The gradients of the block's components are concatenated. `component_sizes` has their lengths,
    which add up to the number of `gradients`.
    """

    tag: ClassVar[int] = 0x08
    sender: ClassVar[str] = WORKER
    step: U64
    worker_id: U32
    block: U32
    num_blocks: U32
    component_sizes: Sizes
    gradients: Gradients


class AveragedBlock(WireMessage):
    """The mean of all shards' gradients of a block, each weighted by the shard's samples."""

    tag: ClassVar[int] = 0x09
    sender: ClassVar[str] = COORDINATOR
    step: U64
    block: U32
    component_sizes: Sizes
    gradients: Gradients


class NonBlock(WireMessage):
    """The mean gradient of a component outside of all blocks (a head, a norm, an embedding)."""

    tag: ClassVar[int] = 0x0A
    sender: ClassVar[str] = WORKER
    step: U64
    worker_id: U32
    component: U8
    gradients: Gradients


class AveragedNonBlock(WireMessage):
    """The mean of all shards' gradients of a component, each weighted by the shard's samples."""

    tag: ClassVar[int] = 0x0B
    sender: ClassVar[str] = COORDINATOR
    step: U64
    component: U8
    gradients: Gradients


WIRE_MESSAGES: dict[int, type[WireMessage]] = {
    kind.tag: kind
    for kind in (
        *(JoinRequest, JoinAccepted, ShardAssignment, GradientPayload, AveragedGradient),
        *(Heartbeat, Shutdown, BlockGradient, AveragedBlock, NonBlock, AveragedNonBlock),
    )
}
FROM_WORKERS = tuple(k for k in WIRE_MESSAGES.values() if k.sender in (WORKER, EITHER))

Upload: TypeAlias = GradientPayload | BlockGradient | NonBlock
UPLOADS = (GradientPayload, BlockGradient, NonBlock)


class Part(NamedTuple):
    """A part of the gradient, sent and averaged separately: the tag of its upload, and a number."""

    tag: int
    number: int

    def __str__(self) -> str:
        if self.tag == GradientPayload.tag:
            return "the gradient"
        noun = "block" if self.tag == BlockGradient.tag else "component"
        return f"{noun} {self.number}"


WHOLE = Part(GradientPayload.tag, 0)


def part_of(upload: Upload) -> Part:
    """Return the part that `upload` carries."""
    if isinstance(upload, BlockGradient):
        return Part(upload.tag, upload.block)
    return WHOLE if isinstance(upload, GradientPayload) else Part(upload.tag, upload.component)


LENGTH = struct.Struct(">I")
LENGTH_MAX = 2**32 - 1
# limit of the original system; a configuration may set a different one
FRAME_BYTES_MAX = 100_000_000
TEXT_BYTES_MAX = 1024
COMPONENTS_MAX = 4096
# The longest frame without gradients, the most that a connection may send before it takes part.
SHORT_BYTES_MAX = 1 + 2 * (4 + TEXT_BYTES_MAX) + 4

NUMBERS: Mapping[str, str] = {"U8": "B", "U32": "I", "U64": "Q", "F32": "f"}
COUNT = struct.Struct("<Q")
FLOAT_BYTES = 4
_SHORT_COUNT = struct.Struct("<I")
_WASTE = memoryview(bytearray(2**16))  # for gradients that are read but not kept

# Returns memory for the gradients of a message that has begun; None discards them. The fields after
# the gradients are 0, because they have not arrived yet.
Room: TypeAlias = Callable[[WireMessage, int], memoryview | None]


@dataclass(frozen=True)
class Layout:
    """The fields of one type of message, before (`head`) and after (`tail`) its gradients.

    Both hold (name, form). A type without gradients has all fields in `head`.
    """

    head: tuple[tuple[str, str], ...]
    tail: tuple[tuple[str, str], ...]
    has_gradients: bool

    @cached_property
    def has_sizes(self) -> bool:
        """True if component sizes come before the gradients."""
        return any(form == "Sizes" for _, form in self.head)

    @cached_property
    def fixed(self) -> struct.Struct:
        """The fixed-size fields of `head`."""
        return _numbers(self.head)

    @cached_property
    def rest(self) -> struct.Struct:
        """The fixed-size fields of `tail`."""
        return _numbers(self.tail)


def _numbers(forms: tuple[tuple[str, str], ...]) -> struct.Struct:
    return struct.Struct("<" + "".join(NUMBERS.get(form, "") for _, form in forms))


def _layout(kind: type[WireMessage]) -> Layout:
    forms = tuple((field.name, str(field.type)) for field in fields(kind))
    names = [form for _, form in forms]
    at = names.index("Gradients") if "Gradients" in names else len(forms)
    return Layout(forms[:at], forms[at + 1 :], at < len(forms))


LAYOUTS: dict[type[WireMessage], Layout] = {k: _layout(k) for k in WIRE_MESSAGES.values()}


@dataclass(frozen=True, slots=True)
class Received:
    """A whole message; `gradients` is the memory from `room`, or None."""

    message: WireMessage
    gradients: memoryview | None


def encode(
    message: WireMessage, gradients: Buffer = b"", *, counts: struct.Struct = COUNT
) -> Iterator[Buffer]:
    """Yield the frame of `message` in pieces; the second piece is `gradients` itself.

    `counts` is the format of the count of component sizes.
    """
    layout, values = LAYOUTS[type(message)], _bytes(memoryview(gradients))
    head = bytearray([message.tag])
    for name, form in layout.head:
        head += _written(getattr(message, name), form, counts)
    tail = b"".join(_written(getattr(message, name), form, counts) for name, form in layout.tail)
    if layout.has_gradients:
        num_gradients = getattr(message, "gradients")  # noqa: B009  (not of every kind)
        assert values.nbytes == FLOAT_BYTES * num_gradients, f"{values.nbytes} bytes of {message}"
        head += COUNT.pack(num_gradients)
    length = len(head) + values.nbytes + len(tail)
    assert length <= LENGTH_MAX, f"a frame of {length} bytes"
    yield LENGTH.pack(length) + head
    if values.nbytes:
        yield values
    if tail:
        yield tail


def _written(value: Any, form: str, counts: struct.Struct) -> bytes:
    if form == "Text":
        text = str(value).encode()
        return _SHORT_COUNT.pack(len(text)) + text
    if form == "Sizes":
        return counts.pack(len(value)) + struct.pack(f"<{len(value)}I", *value)
    return struct.pack(f"<{NUMBERS[form]}", value)


class Decoder:
    """Decodes one direction of a connection.

    Write received bytes into `buffer()`, and call `filled` with their number. A frame with more
    than `bytes_max` bytes after its length field, or a message of a type not in `kinds`, is refused
    before the rest of it is read. Both limits may be changed between messages.
    """

    def __init__(self, *, bytes_max: int, kinds: Collection[type[WireMessage]], room: Room) -> None:
        self.bytes_max, self.kinds = bytes_max, kinds
        self.counts = COUNT  # the format of the last received count of component sizes
        self._room = room
        self._length = 0  # length of the current frame, without its tag
        self._kind = next(iter(WIRE_MESSAGES.values()))
        self._head = bytearray()
        self._values: dict[str, Any] = {}
        self._kept: memoryview | None = None
        self._left = 0  # bytes of the gradients still to come
        self._rest = memoryview(b"")
        self._advance: Callable[[], Received | None] = self._end_length
        self._collect(LENGTH.size, self._end_length)

    def buffer(self) -> memoryview:
        """Return the memory for the next received bytes; it is never empty."""
        return self._rest

    def filled(self, num_bytes: int) -> Received | None:
        """Return the message that the `num_bytes` bytes written to `buffer()` complete, or None.

        Raises ProtocolError for a frame that is malformed, too long or not one of `kinds`. After
        that, nothing more can be read from this peer.
        """
        self._rest = self._rest[num_bytes:]
        done = None
        while not self._rest.nbytes:  # a head or a vector may be empty
            done = self._advance() or done
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

    # --- the beginning of a frame -----------------------------------------------------------------

    def _collect(self, num_bytes: int, then: Callable[[], Received | None]) -> None:
        known = len(self._head)
        self._head = self._head + bytes(num_bytes - known)
        self._rest, self._advance = memoryview(self._head)[known:], then

    def _end_length(self) -> None:
        (length,) = LENGTH.unpack(self._head)
        _require(length > 0, "length=0: a frame has a tag at least")
        _require(
            length <= self.bytes_max,
            f"length={length}: a frame may have {self.bytes_max} bytes now",
        )
        self._length = length - 1
        self._head = bytearray()
        self._collect(1, self._end_tag)

    def _end_tag(self) -> None:
        tag = self._head[0]
        kind = WIRE_MESSAGES.get(tag)
        _require(kind is not None, f"tag={tag:#04x}: no message has it")
        assert kind is not None
        _require(kind in self.kinds, f"{kind.__name__} is not allowed now")
        self._kind, layout = kind, LAYOUTS[kind]
        least = layout.fixed.size + layout.rest.size
        least += COUNT.size * layout.has_gradients + _SHORT_COUNT.size * layout.has_sizes
        least += _SHORT_COUNT.size * sum(form == "Text" for _, form in layout.head)
        self._require_length(self._length >= least, f"at least {least + 1}")
        self._head = bytearray()
        if not layout.has_gradients:
            most = SHORT_BYTES_MAX - 1
            self._require_length(self._length <= most, f"at most {most + 1}")
            self._collect(self._length, self._end_short)
        else:
            then = self._end_sizes if layout.has_sizes else self._end_head
            self._collect(layout.fixed.size + COUNT.size, then)

    def _require_length(self, holds: bool, allowed: str) -> None:
        name = self._kind.__name__
        _require(holds, f"{name} in a frame of {self._length + 1} bytes: use {allowed}")

    # --- a message without gradients --------------------------------------------------------------

    def _end_short(self) -> Received:
        values, at = dict[str, Any](), 0
        for name, form in LAYOUTS[self._kind].head:
            if form == "Text":
                values[name], at = self._text(name, at)
                continue
            number = struct.Struct(f"<{NUMBERS[form]}")
            self._require_length(at + number.size <= self._length, "more")
            (values[name],) = number.unpack_from(self._head, at)
            at += number.size
        self._require_length(at == self._length, f"{at + 1}")
        return self._end(self._kind(**values), None)

    def _text(self, name: str, at: int) -> tuple[str, int]:
        """Return the text that begins at `at`, and where it ends."""
        begin = at + _SHORT_COUNT.size
        self._require_length(begin <= self._length, "more")
        (num_bytes,) = _SHORT_COUNT.unpack_from(self._head, at)
        what = f"{self._kind.__name__}.{name}"
        _require(num_bytes <= TEXT_BYTES_MAX, f"{what}: {num_bytes} bytes: use {TEXT_BYTES_MAX}")
        self._require_length(begin + num_bytes <= self._length, "more")
        try:
            return self._head[begin : begin + num_bytes].decode(), begin + num_bytes
        except UnicodeDecodeError as error:
            raise ProtocolError(f"{what}: not UTF-8 ({error.reason})") from error

    # --- a message with gradients -----------------------------------------------------------------

    def _end_sizes(self) -> None:
        """Read to the end of the longer of the two heads that the count may mean."""
        ends = [self._head_end(counts) for counts in _COUNTS]
        self._collect(max(end or len(self._head) for end in ends), self._end_sized_head)

    def _head_end(self, counts: struct.Struct) -> int | None:
        """Return the end of the head if `counts` is the format of its count.

        The result is None if that is past the frame's end, or if there are too many sizes.
        """
        at = LAYOUTS[self._kind].fixed.size
        (count,) = counts.unpack_from(self._head, at)
        end = int(at + counts.size + FLOAT_BYTES * count + COUNT.size)
        return end if count <= COMPONENTS_MAX and end <= self._length else None

    def _end_sized_head(self) -> None:
        problems = []
        for counts in _COUNTS:
            problem = self._try_counts(counts)
            if not problem:
                return
            problems.append(f"{problem} (with a count of {counts.size} bytes)")
        raise ProtocolError(f"{self._kind.__name__}: {'; '.join(problems)}")

    def _try_counts(self, counts: struct.Struct) -> str:
        """Continue with the gradients if `counts` is the count's format.

        If not, return the reason.
        """
        end, begin = self._head_end(counts), LAYOUTS[self._kind].fixed.size + counts.size
        if end is None:
            (count,) = counts.unpack_from(self._head, begin - counts.size)
            return f"component_sizes has {count}: use {COMPONENTS_MAX} at most, that fit in a frame"
        num_sizes = (end - COUNT.size - begin) // FLOAT_BYTES
        sizes = struct.unpack_from(f"<{num_sizes}I", self._head, begin)
        (count,) = COUNT.unpack_from(self._head, end - COUNT.size)
        if problem := self._unfit(end, count):
            return problem
        if sum(sizes) != count:
            return f"gradients={count}: its component_sizes add up to {sum(sizes)}"
        self.counts, self._values = counts, {"component_sizes": sizes}
        self._begin_gradients(end, count)
        return ""

    def _end_head(self) -> None:
        end = len(self._head)
        (count,) = COUNT.unpack_from(self._head, end - COUNT.size)
        problem = self._unfit(end, count)
        _require(not problem, f"{self._kind.__name__}: {problem}")
        self._values = {}
        self._begin_gradients(end, count)

    def _unfit(self, head_end: int, count: int) -> str:
        """Return why `count` gradients after a head of `head_end` bytes don't fit this frame."""
        due = head_end + FLOAT_BYTES * count + LAYOUTS[self._kind].rest.size
        if due == self._length:
            return ""
        return (
            f"gradients={count}: its frame would have {due + 1} bytes, but it has "
            f"{self._length + 1}"
        )

    def _begin_gradients(self, head_end: int, count: int) -> None:
        layout, early = LAYOUTS[self._kind], self._head[head_end:]
        names = [name for name, form in layout.head if form in NUMBERS]
        self._values |= dict(zip(names, layout.fixed.unpack_from(self._head), strict=True))
        self._values["gradients"] = count
        none_yet = {name: 0 for name, _ in layout.tail}
        num_bytes = FLOAT_BYTES * count
        kept = self._room(self._kind(**self._values, **none_yet), num_bytes)
        self._kept = None if kept is None else _bytes(kept)
        if self._kept is not None and num_bytes:
            assert self._kept.nbytes == num_bytes, f"room of {self._kept.nbytes} for {num_bytes}"
            self._kept[: len(early)] = early
        self._left = num_bytes - len(early)
        self._head = bytearray()
        self._go_on()

    def _go_on(self) -> None:
        """Read the next bytes of the gradients, or the tail after them."""
        if not self._left:
            self._collect(LAYOUTS[self._kind].rest.size, self._end_gradients)
            return
        if self._kept is None:
            self._rest = _WASTE[: self._left]
        else:
            self._rest = self._kept[self._kept.nbytes - self._left :]
        come = self._rest.nbytes

        def advance() -> None:
            self._left -= come
            self._go_on()

        self._advance = advance

    def _end_gradients(self) -> Received:
        layout = LAYOUTS[self._kind]
        numbers = layout.rest.unpack(self._head)
        tail = {name: number for (name, _), number in zip(layout.tail, numbers, strict=True)}
        return self._end(self._kind(**self._values, **tail), self._kept)

    def _end(self, message: WireMessage, gradients: memoryview | None) -> Received:
        self._head, self._kept = bytearray(), None
        self._collect(LENGTH.size, self._end_length)
        return Received(message, gradients)


_COUNTS = (COUNT, _SHORT_COUNT)


def _bytes(view: memoryview) -> memoryview:
    """Return the bytes of `view`; an empty view can't be cast."""
    return view.cast("B") if view.nbytes else memoryview(b"")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ProtocolError(message)
