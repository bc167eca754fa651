"""What peers say to each other: one record a message, one table of them all.

A message is a small record of plain fields, and for some a payload of raw bytes (tensors in the
manifest's order, little-endian, or trace events as JSON lines). The table `MESSAGES` is the only
definition: the codec, the machines and the docs read it.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

from entrenar_py.errors import ProtocolError

VERSION = 2
TEXT_CHARS_MAX = 1_000
LIST_MAX = 2**16

# Lower-case hex digits: 32 that are fresh, 64 that are an HMAC-SHA256.
Nonce: TypeAlias = str
Proof: TypeAlias = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One thing said. `tag` names it on the wire; `carries` says what its payload is, if any."""

    tag: ClassVar[int]
    carries: ClassVar[str] = ""


# --- joining ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge(Message):
    """Coordinator, to whoever connects: prove with `nonce` (32 hex digits) that you may join."""

    tag: ClassVar[int] = 1
    version: int
    nonce: Nonce


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Worker: who I am, and the proof.

    `run` names the run, `manifest` and `data` are digests of the tensors and of the data set,
    `backend` names what it computes on. `rank` is the one it had, or None; `port` is where it
    hears other workers, or None. `proof` is of the secret, the challenge and everything else in
    here. Where `run`, `manifest` and `data` are all empty the worker does not know the run, and
    asks what it is. A worker says hello to another one, too.
    """

    tag: ClassVar[int] = 2
    version: int
    run: str
    manifest: str
    data: str
    backend: str
    rank: int | None
    port: int | None
    nonce: Nonce
    proof: Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Coordinator: you are `rank`; the payload is the whole state before `step`.

    The vector that is reduced travels in `blocks` parts as equal as can be. `resumed`: the run goes
    on from a checkpoint, and starts with this step.
    """

    tag: ClassVar[int] = 3
    carries: ClassVar[str] = "state"
    rank: int
    step: int
    blocks: int
    resumed: bool
    proof: Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Message):
    """Coordinator: you can't join, and why; the connection ends. `retry`: it may change."""

    tag: ClassVar[int] = 4
    reason: str
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Message):
    """Worker: I hold the state before `step`; the payload is the event that records it."""

    tag: ClassVar[int] = 5
    carries: ClassVar[str] = "events"
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Message):
    """Coordinator, to a hello without terms: what the run is, and how long either waits here.

    The payload is its scenario, one JSON object. `heartbeat_s` and `dead_after_s` are in seconds.
    """

    tag: ClassVar[int] = 6
    carries: ClassVar[str] = "scenario"
    heartbeat_s: float
    dead_after_s: float
    proof: Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept(Message):
    """Worker, to another that said hello: so do I know the secret."""

    tag: ClassVar[int] = 9
    proof: Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Message):
    """Coordinator: give me the state before `step`."""

    tag: ClassVar[int] = 7
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Message):
    """Worker: the whole state before `step`."""

    tag: ClassVar[int] = 8
    carries: ClassVar[str] = "state"
    step: int


# --- a step -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign(Message):
    """Coordinator: compute these logical `shards` of `step`."""

    tag: ClassVar[int] = 10
    step: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed(Message):
    """Worker: `shards` of `step` are computed, their nodes follow; the payload records each."""

    tag: ClassVar[int] = 11
    carries: ClassVar[str] = "events"
    step: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode(Message):
    """Worker: `block` of node (`level`, `index`) of the reduction tree of `step`, in the payload.

    `loss` is the summed loss of the shards under it, `weight` what they count. It goes to who
    averages the block: the coordinator, or in a mesh one of the workers. `round` is the mesh's
    (`Group`), 0 without.
    """

    tag: ClassVar[int] = 12
    carries: ClassVar[str] = "block"
    step: int
    round: int
    block: int
    level: int
    index: int
    loss: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite(Message):
    """Worker: the gradient (or, without a tensor, the loss) of `shard` is NaN or Inf.

    The payload records the shards up to it.
    """

    tag: ClassVar[int] = 13
    carries: ClassVar[str] = "events"
    step: int
    shard: int
    tensor: str | None
    element: int | None
    loss: float
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Average(Message):
    """`block` of the averaged gradient of `step`, before clipping, from who averaged it.

    Hold it, do not step yet. `loss` is summed over the samples (or tokens) that `weight` counts.
    """

    tag: ClassVar[int] = 14
    carries: ClassVar[str] = "block"
    step: int
    round: int
    block: int
    loss: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged(Message):
    """Worker: I hold every block of `step`."""

    tag: ClassVar[int] = 15
    step: int
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Message):
    """Coordinator: everyone holds it; make `step`."""

    tag: ClassVar[int] = 16
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied(Message):
    """Worker: `step` is made; the payload is the event that records what I hold now."""

    tag: ClassVar[int] = 17
    carries: ClassVar[str] = "events"
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Message):
    """Coordinator of a mesh: from `step` on `ranks` exchange blocks, at `addresses`.

    A new `round` begins whenever somebody has come or gone: what was sent in an earlier one is
    void, and everyone sends its nodes again. `holders` is the rank that has each shard of this
    step; in the next ones each of `ranks` has its run of them. Block b is averaged by the worker
    that is number b mod n of the n `ranks`.
    """

    tag: ClassVar[int] = 30
    step: int
    round: int
    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial(Message):
    """Worker of a ring, to the next: `block` summed over the `hops` + 1 workers it came through.

    `loss` is summed over the same shards, `weight` what they count.
    """

    tag: ClassVar[int] = 33
    carries: ClassVar[str] = "block"
    step: int
    round: int
    block: int
    hops: int
    loss: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable(Message):
    """Worker of a mesh: in `round` I can't exchange anything with `rank`, and why."""

    tag: ClassVar[int] = 31
    round: int
    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow(Message):
    """Worker of a mesh: the average of `block` of `step` is not finite, though every shard was."""

    tag: ClassVar[int] = 32
    step: int
    block: int


# --- any time ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Either: I am alive, however long what I do takes."""

    tag: ClassVar[int] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Message):
    """Worker: I go, and why; give my shards to others."""

    tag: ClassVar[int] = 21
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt(Message):
    """Coordinator: stop before any update of `step`, and why."""

    tag: ClassVar[int] = 22
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown(Message):
    """Coordinator: the run is over; `problem` says why it could not go on, None if it is done."""

    tag: ClassVar[int] = 23
    problem: str | None


MESSAGES: dict[int, type[Message]] = {
    kind.tag: kind
    for kind in (
        *(Challenge, Hello, Welcome, Refuse, Loaded, Offer, Fetch, State, Accept),
        *(Assign, Computed, TreeNode, NonFinite, Average, Staged, Commit, Applied),
        *(Group, Partial, Unreachable, Overflow),
        *(Heartbeat, Leave, Halt, Shutdown),
    )
}


# --- a message's fields as bytes ----------------------------------------------------------------


def dump(message: Message) -> bytes:
    """The fields of `message` as one canonical JSON object: sorted keys, no spaces, ASCII."""
    record = {field.name: _plain(getattr(message, field.name)) for field in fields(message)}
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse(tag: int, header: bytes) -> Message:
    """The message of kind `tag` whose fields are `header`.

    ProtocolError, naming the field, for anything but what `dump` writes.
    """
    kind = MESSAGES.get(tag)
    if kind is None:
        raise ProtocolError(f"tag={tag}: no message has it")
    _require_few(kind, header)
    try:
        record = json.loads(header, object_pairs_hook=_record)
    except (RecursionError, ValueError) as error:
        raise ProtocolError(f"{kind.__name__}: its header can't be read ({error})") from error
    if not isinstance(record, dict):
        raise ProtocolError(f"{kind.__name__}: its header is a {type(record).__name__}")
    names = {field.name for field in fields(kind)}
    for problem, odd in (("missing", names - set(record)), ("unknown", set(record) - names)):
        if odd:
            raise ProtocolError(f"{kind.__name__} {reprlib.repr(min(odd))}: {problem}")
    values = {
        field.name: _checked(kind, field.name, str(field.type), record[field.name])
        for field in fields(kind)
    }
    message = kind(**values)
    if dump(message) != header:
        raise ProtocolError(f"{kind.__name__}: its header is not in canonical form")
    return message


def brief(text: str) -> str:
    """`text` as a message may hold it: what is too long loses its middle."""
    half = TEXT_CHARS_MAX // 2 - 5
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:half]} ... {text[-half:]}"


def _require_few(kind: type[Message], header: bytes) -> None:
    """ProtocolError for more values than a header can have: JSON would make 25 bytes of each."""
    num_fields = len(fields(kind)) + 1  # one more is better named than counted
    in_texts = TEXT_CHARS_MAX * num_fields  # where such a mark is no structure
    for mark, most in ((b",", LIST_MAX), (b":", num_fields), (b"[", num_fields), (b"{", 1)):
        if header.count(mark) > most + in_texts:
            raise ProtocolError(
                f"{kind.__name__}: {header.count(mark)} times {mark.decode()!r} in its header: "
                f"{most + in_texts} are possible"
            )


def _record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{reprlib.repr(name)} stands in it {times} times")
    return record


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
