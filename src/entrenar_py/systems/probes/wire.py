"""The wire without training: what the codec carries and refuses, and which peers are admitted."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from blake3 import blake3

from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.probes import original_frames
from entrenar_py.train.coordinator.recorder import Recorder
from entrenar_py.train.upstream.frames import Received as OriginallyReceived
from entrenar_py.train.upstream.messages import WireMessage
from entrenar_py.train.wire import effects, frames, messages, terms
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.frames import CHUNK_BYTES, Buffer, Decoder, Encoder, Received
from entrenar_py.train.wire.messages import Challenge, Heartbeat, Hello, Message, TreeNode
from entrenar_py.train.wire.terms import Run, Terms, Timing

Got = TypeVar("Got", covariant=True)
KEY = bytes(range(32))
SECRET, NONCE = b"a secret", "0" * 2 * terms.NONCE_BYTES
TERMS = Terms(run="run", manifest="manifest", data="data")
# A quiet NaN with a payload, a signalling one, -0.0, 0.0, the smallest number, both infinities.
ODD_FLOATS = bytes.fromhex("4523c17f0100a0ff000000800000000001000000000080ff0000807f")
FLIPS = 64
TWICE = "sent twice"


class Feeds(Protocol[Got]):
    """A decoder."""

    def feed(self, data: bytes) -> Iterator[Got]:
        """Take all of `data`, and yield each message as soon as it is complete."""
        ...


def run(scenario: Scenario) -> trace.Trace:
    """Record Carried, Refused and Admission events; the seed draws pieces and flipped bits."""
    recorder = Recorder(scenario)
    rng = random.Random(scenario.seed)
    for message, payload in _letters():
        for most in (1, 7, 2**16) if len(payload) < 2**12 else (2**16, 2**21):
            recorder.emit(_carried(message, payload, most, rng))
    for case, data in _damaged(rng):
        recorder.emit(_refused(case, data))
    for original, gradients in original_frames.letters(ODD_FLOATS):
        for frame in original_frames.frames_of(original, gradients):
            for most in (1, 7, 2**16):
                recorder.emit(_carried_originally(original, gradients, frame, most, rng))
    for case, data, claimed_bytes in original_frames.malformed():
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
    for kind in messages.MESSAGES.values():
        message = kind(**{field.name: values[str(field.type)] for field in fields(kind)})
        yield message, b""
        if message.carries:
            yield message, ODD_FLOATS
            for num_bytes in (CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5):
                repeats = num_bytes // len(ODD_FLOATS) + 1
                yield message, (ODD_FLOATS * repeats)[:num_bytes]


def _pieces(data: bytes, most: int, rng: random.Random) -> list[bytes]:
    """Cut `data` into pieces of at most `most` bytes."""
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + rng.randint(1, most))
    return [data[start:end] for start, end in pairwise(ends)]


def _carried(message: Message, payload: bytes, most: int, rng: random.Random) -> trace.Carried:
    pieces = _pieces(b"".join(Encoder(KEY).encode(message, payload)), most, rng)
    got, _, allocated_bytes = _read(pieces, len(payload))
    return trace.Carried(
        message=type(message).__name__,
        payload_bytes=len(payload),
        pieces=len(pieces),
        sent=_digest(message, payload),
        got=_digest(got[0].message, got[0].payload) if got else None,
        allocated_bytes=allocated_bytes,
    )


def _digest(message: Message, payload: Buffer) -> str:
    return str(blake3(frames.dump_header(message) + b"\n").update(payload).hexdigest(16))


def _carried_originally(
    message: WireMessage, gradients: bytes, frame: bytes, most: int, rng: random.Random
) -> trace.Carried:
    pieces = _pieces(frame, most, rng)
    got, _, allocated_bytes = _read_by(original_frames.decoder, pieces)
    sent = original_frames.digest(OriginallyReceived(message, memoryview(gradients)))
    return trace.Carried(
        message=original_frames.PREFIX + type(message).__name__,
        payload_bytes=len(gradients),
        pieces=len(pieces),
        sent=sent,
        got=original_frames.digest(got[0]) if got else None,
        allocated_bytes=allocated_bytes,
    )


def _refused_originally(case: str, data: bytes, claimed_bytes: int) -> trace.Refused:
    # Padding, so that a frame that claims more is not refused only for missing bytes.
    got, error, allocated_bytes = _read_by(original_frames.decoder, [data + bytes(2**16)])
    return trace.Refused(
        case=original_frames.PREFIX + case,
        error=None if got else error or "nothing",
        claimed_bytes=claimed_bytes,
        allocated_bytes=allocated_bytes,
    )


def _read(pieces: list[bytes], limit: int) -> tuple[list[Received], str | None, int]:
    """Decode `pieces` of our own frames, with payloads up to `limit` bytes."""
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
    """Yield (name of a defect, bytes that have it): they are no valid message of this session."""
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
