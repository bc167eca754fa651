"""A probe of the wire without training: which frames decode, and which peers are admitted."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from blake3 import blake3

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.recorder import Recorder
from entrenar_py.train.upstream.frames import LAYOUTS, WIRE_MESSAGES, WireMessage, encode
from entrenar_py.train.upstream.frames import Decoder as OriginalDecoder
from entrenar_py.train.upstream.frames import Received as OriginalReceived
from entrenar_py.train.upstream.frames import Received as OriginallyReceived
from entrenar_py.train.wire import effects, frames, messages, terms
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.frames import CHUNK_BYTES, Buffer, Decoder, Encoder, Received
from entrenar_py.train.wire.messages import Challenge, Heartbeat, Hello, Message, TreeNode
from entrenar_py.train.wire.terms import Run, Terms, Timing

PREFIX = "original: "  # of the names of messages and cases on the original system's wire
NARROW = struct.Struct("<I")
BYTES_MAX = 2**20  # the most bytes of a frame
_HUGE = struct.pack("<Q", 2**62)
_VALUES: dict[str, Any] = {
    "U8": 2**8 - 1,
    "U32": 2**32 - 1,
    "U64": 2**64 - 1,
    "F32": -0.0,
    "Text": "é\n",
    "Sizes": (),
    "Gradients": 0,
}


def letters(odd_floats: bytes) -> Iterator[tuple[WireMessage, bytes]]:
    """Yield every message, with `odd_floats` as gradients if it carries gradients."""
    count = len(odd_floats) // 4
    for kind in WIRE_MESSAGES.values():
        message = kind(**{field.name: _VALUES[str(field.type)] for field in fields(kind)})
        yield message, b""
        if LAYOUTS[kind].has_gradients:
            changes: dict[str, Any] = {"gradients": count}
            if LAYOUTS[kind].has_sizes:
                changes["component_sizes"] = (0, 1, count - 1)
            yield replace(message, **changes), odd_floats


def frames_of(message: WireMessage, gradients: bytes) -> Iterator[bytes]:
    """Yield the frame of a message, and the original program's frame if it differs."""
    yield b"".join(encode(message, gradients))
    if LAYOUTS[type(message)].has_sizes:
        yield b"".join(encode(message, gradients, counts=NARROW))


def decoder() -> OriginalDecoder:
    """Return a decoder of all messages, which allocates the memory for gradients."""

    def room(message: WireMessage, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    return OriginalDecoder(bytes_max=BYTES_MAX, kinds=tuple(WIRE_MESSAGES.values()), room=room)


def digest(received: OriginalReceived) -> str:
    """Return a digest of a message and its gradients."""
    text = repr(received.message).encode()
    return str(blake3(text + b"\n").update(received.gradients or b"").hexdigest(16))


def malformed() -> Iterator[tuple[str, bytes, int]]:
    """Yield the name of a defect, bytes with this defect, and the memory that they claim."""
    claimed = 2**64
    yield "a frame of 4 GiB", struct.pack(">I", 2**32 - 1) + b"\x04", 2**32 - 1
    yield "2^62 gradients", _frame(b"\x04" + bytes(12) + _HUGE + bytes(20)), claimed
    yield "2^62 gradients of a component", _frame(b"\x0a" + bytes(13) + _HUGE), claimed
    sized = b"\x08" + struct.pack("<QIII", 1, 2, 0, 4)
    yield "2^62 components", _frame(sized + _HUGE + bytes(8)), claimed
    yield "2^32 - 1 components", _frame(sized + b"\xff" * 4 + bytes(12)), 2**34
    wrong_sum = sized + struct.pack("<QIIQ", 2, 1, 1, 3) + bytes(12)
    yield "components of another sum", _frame(wrong_sum), 12
    yield "a text of 4 GiB", _frame(b"\x01" + b"\xff" * 4 + bytes(8)), 2**32
    yield "text that is not UTF-8", _frame(b"\x06" + struct.pack("<I", 1) + b"\xff" + bytes(8)), 1
    yield "no tag", _frame(b""), 0
    yield "an unknown tag", _frame(b"\x0c" + bytes(20)), 0
    yield "bytes after the last field", _frame(b"\x07\x00"), 0
    yield "a field too few", _frame(b"\x02" + bytes(4)), 0
    short = b"\x05" + bytes(8) + struct.pack("<Q", 2) + bytes(4) + bytes(4)
    yield "a gradient too few", _frame(short), 8
    yield "a request of another protocol", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 0


def _frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


Got = TypeVar("Got", covariant=True)
KEY = bytes(range(32))
SECRET, NONCE = b"a secret", "0" * 2 * terms.NONCE_BYTES
TERMS = Terms(run="run", manifest="manifest", data="data")
# A quiet NaN with a payload, a signalling NaN, -0.0, 0.0, the smallest number, both infinities.
ODD_FLOATS = bytes.fromhex("4523c17f0100a0ff000000800000000001000000000080ff0000807f")
FLIPS = 64
TWICE = "sent twice"


class Feeds(Protocol[Got]):
    """A decoder."""

    def feed(self, data: bytes) -> Iterator[Got]:
        """Yield each message in `data` as soon as it is complete."""
        ...


def run(scenario: Scenario) -> trace.Trace:
    """Record Carried, Refused and Admission events.

    The scenario's seed determines how frames are cut into pieces, and which bits are flipped.
    """
    recorder = Recorder(scenario)
    rng = random.Random(scenario.seed)
    for message, payload in _letters():
        encoded = b"".join(Encoder(KEY).encode(message, payload))
        sent = _digest(message, payload)
        for most in (1, 7, 2**16) if len(payload) < 2**12 else (2**16, 2**21):
            pieces = _pieces(encoded, most, rng)
            recorder.emit(_carried(message, len(payload), pieces, sent))
    for case, data in _damaged(rng):
        recorder.emit(_refused(case, data))
    for original, gradients in letters(ODD_FLOATS):
        for frame in frames_of(original, gradients):
            for most in (1, 7, 2**16):
                recorder.emit(_carried_originally(original, gradients, frame, most, rng))
    for case, data, claimed_bytes in malformed():
        recorder.emit(_refused_originally(case, data, claimed_bytes))
    for case, hello, entitled in _applicants():
        recorder.emit(_admission(case, hello, entitled))
    return recorder.finish(status="completed")


# --- what goes through ------------------------------------------------------------------------


def _letters() -> Iterator[tuple[Message, bytes]]:
    """Yield every message without payload, and with payloads near chunk size if it carries any."""
    values: dict[str, Any] = {
        "int": 3,
        "int | None": None,
        "str": "é\n",
        "str | None": None,
        "bool": True,
        "Nonce": NONCE,
        "Proof": "f" * 64,
        "Digest": "d" * 64,
        "Digest | None": None,
        "float": float("nan"),
        "tuple[int, ...]": (0, 2**62),
        "tuple[str, ...]": ("é\n", ""),
    }
    sizes = (CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5)
    large = [(ODD_FLOATS * (size // len(ODD_FLOATS) + 1))[:size] for size in sizes]
    for kind in messages.MESSAGES.values():
        message = kind(**{field.name: values[str(field.type)] for field in fields(kind)})
        yield message, b""
        if message.carries:
            yield message, ODD_FLOATS
            yield from ((message, payload) for payload in large)


def _pieces(data: bytes, most: int, rng: random.Random) -> list[bytes]:
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + rng.randint(1, most))
    return [data[start:end] for start, end in pairwise(ends)]


def _carried(message: Message, payload_bytes: int, pieces: list[bytes], sent: str) -> trace.Carried:
    got, _, allocated_bytes = _read(pieces, payload_bytes)
    return trace.Carried(
        message=type(message).__name__,
        payload_bytes=payload_bytes,
        pieces=len(pieces),
        sent=sent,
        got=_digest(got[0].message, got[0].payload) if got else None,
        allocated_bytes=allocated_bytes,
    )


def _digest(message: Message, payload: Buffer) -> str:
    return str(blake3(frames.dump_header(message) + b"\n").update(payload).hexdigest(16))


def _carried_originally(
    message: WireMessage, gradients: bytes, frame: bytes, most: int, rng: random.Random
) -> trace.Carried:
    pieces = _pieces(frame, most, rng)
    got, _, allocated_bytes = _read_by(decoder, pieces)
    sent = digest(OriginallyReceived(message, memoryview(gradients)))
    return trace.Carried(
        message=PREFIX + type(message).__name__,
        payload_bytes=len(gradients),
        pieces=len(pieces),
        sent=sent,
        got=digest(got[0]) if got else None,
        allocated_bytes=allocated_bytes,
    )


def _refused_originally(case: str, data: bytes, claimed_bytes: int) -> trace.Refused:
    # Padding, so that a frame that claims more is not refused only for missing bytes.
    got, error, allocated_bytes = _read_by(decoder, [data + bytes(2**16)])
    return trace.Refused(
        case=PREFIX + case,
        error=None if got else error or "nothing",
        claimed_bytes=claimed_bytes,
        allocated_bytes=allocated_bytes,
    )


def _read(pieces: list[bytes], limit: int) -> tuple[list[Received], str | None, int]:
    return _read_by(lambda: Decoder(lambda kind: limit if kind.carries else 0, KEY), pieces)


def _read_by(
    new_decoder: Callable[[], Feeds[Got]], pieces: list[bytes]
) -> tuple[list[Got], str | None, int]:
    """Decode `pieces`; return the messages, the error's name or None, and the peak allocation."""
    got: list[Got] = []
    error = None
    tracemalloc.start()
    try:
        decoder = new_decoder()
        for piece in pieces:
            for received in decoder.feed(piece):
                got.append(received)
    except Exception as raised:  # noqa: BLE001  (the judge compares its type)
        error = type(raised).__name__
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return got, error, peak_bytes


# --- what is refused --------------------------------------------------------------------------


def _damaged(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield the name of a defect, and an invalid message of this session that has it."""
    node = TreeNode(step=1, round=0, block=0, level=0, index=0, loss=1.0, weight=2.0)
    right = b"".join(Encoder(KEY).encode(node, ODD_FLOATS))
    for name, place, value in (
        ("magic", 0, b"HTTP"),
        ("version", 4, b"\xff"),
        ("tag", 5, b"\xff"),
        ("a later frame first", 6, b"\x00"),
        ("number", 8, b"\x07"),
        ("header of 4 GiB", 16, b"\xff\xff\xff\xff"),
        ("chunk of 4 GiB", 20, b"\xff\xff\xff\xff"),
        ("payload of 2^62 bytes", 24, (2**62).to_bytes(8, "little")),
    ):
        yield name, right[:place] + value + right[place + len(value) :]
    yield "another session's key", b"".join(Encoder(bytes(32)).encode(node, ODD_FLOATS))
    for num_bytes in (1, len(ODD_FLOATS) // 2, len(ODD_FLOATS)):
        yield f"a payload cut by {num_bytes} bytes", right[:-num_bytes]
    yield TWICE, right + right
    yield "a request of another protocol", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4
    foreign = frames.dump_header(Heartbeat())
    many = (b"{}," * 2**19, b'{"step":[' + b"0," * 2**19, b"9" * 2**20, b"[[]," * 2**15)
    for text in (b"[]", b"nonsense", b'{"step":1}', b"[" * 10_000, foreign, *many):
        yield f"header {text[:12]!r}", _with_header(text)
    for _ in range(FLIPS):
        bit = rng.randrange(8 * len(right))
        flipped = bytearray(right)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)


def _with_header(header: bytes) -> bytes:
    """Return the frame of a TreeNode with the header `header` and a correct checksum."""
    prefix = frames.FIELDS.pack(
        *(frames.MAGIC, messages.VERSION, TreeNode.tag, 1, 0, 0, len(header), 0, 0)
    )
    return prefix + frames.checksum_of(KEY, prefix, header, b"") + header


def _refused(case: str, data: bytes) -> trace.Refused:
    # Padding, so that a frame that claims a longer header is not refused only for missing bytes.
    padded = data + bytes(frames.HEADER_BYTES_MAX + frames.PREFIX_BYTES)
    got, error, allocated_bytes = _read([padded], len(ODD_FLOATS))
    right = case == TWICE  # the first of the two is valid
    accepted = len(got) > right
    return trace.Refused(
        case=case,
        error=None if accepted else error or "nothing",
        claimed_bytes=int.from_bytes(data[24:32], "little"),
        allocated_bytes=allocated_bytes,
    )


# --- admission --------------------------------------------------------------------------------


def _applicants() -> Iterator[tuple[str, Hello, bool]]:
    """Yield the name of a case, a Hello, and whether the Hello must be admitted."""
    plain = Hello(
        version=messages.VERSION,
        run="run",
        manifest="manifest",
        data="data",
        backend="cpu",
        rank=0,
        port=None,
        nonce=NONCE,
        proof="",
    )
    yield "right", _proved(plain, SECRET), True
    yield "no proof", plain, False
    yield "wrong secret", _proved(plain, b"another"), False
    yield "no secret", _proved(plain, b""), False
    yield "half a proof", replace(plain, proof=_proved(plain, SECRET).proof[:32]), False
    yield "the proof of another", replace(_proved(plain, SECRET), rank=1), False
    replayed = _proved(plain, SECRET, nonce="1" * len(NONCE))
    yield "a proof from another session", replayed, False
    yield "another run", _proved(replace(plain, run="other"), SECRET), False
    yield "another manifest", _proved(replace(plain, manifest="other"), SECRET), False
    yield "another data set", _proved(replace(plain, data="other"), SECRET), False
    yield "another version", _proved(replace(plain, version=99), SECRET), False
    yield "a rank that is not there", _proved(replace(plain, rank=9), SECRET), False


def _proved(hello: Hello, secret: bytes, nonce: str = NONCE) -> Hello:
    challenge = Challenge(version=messages.VERSION, nonce=nonce)
    return replace(hello, proof=terms.proof_of_worker(secret, challenge, hello))


def _admission(case: str, hello: Hello, entitled: bool) -> trace.Admission:
    run = Run(terms=TERMS, world_size=2, num_shards=2, num_steps=1, num_blocks=1)
    machine = Coordinator(run, secret=SECRET, timing=Timing(), now=0.0)
    machine.connected("peer", NONCE, 0.0)
    done = machine.receive("peer", hello, 0.0)
    refusals = [e.message for e in done if isinstance(e, effects.Send)]
    return trace.Admission(
        case=case,
        entitled=entitled,
        let_in=any(isinstance(effect, effects.Secure) for effect in done),
        answer=", ".join(type(message).__name__ for message in refusals),
    )
