"""Frames and their headers: what is carried bit for bit, what is refused, and what is bounded."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import frames
from entrenar_py.train.wire.frames import (
    CHUNK_BYTES,
    NO_KEY,
    PREFIX_BYTES,
    UNKEYED,
    UNKEYED_HEADER_BYTES_MAX,
    Decoder,
    Encoder,
)
from entrenar_py.train.wire.messages import (
    LIST_MAX,
    MESSAGES,
    TEXT_CHARS_MAX,
    VERSION,
    Assign,
    Average,
    Challenge,
    Commit,
    Computed,
    Heartbeat,
    Hello,
    Message,
    NonFinite,
    Refuse,
    TreeNode,
    Welcome,
)
from tests.train.wire.speech import INT_MAX, KEY, anything, feed, refused, said, written

KINDS = st.sampled_from(sorted(MESSAGES.values(), key=lambda kind: kind.tag))
OF_ALL_KINDS = settings(max_examples=6 * settings().max_examples)  # there are some thirty
HELLO: dict[str, object] = {
    "backend": "cpu",
    "data": "d",
    "manifest": "m",
    "nonce": "0" * 32,
    "proof": "a" * 64,
    "port": None,
    "rank": None,
    "run": "r",
    "version": 1,
}
TREE_NODE: dict[str, object] = {
    "block": 0,
    "index": 0,
    "level": 0,
    "loss": 1.0,
    "round": 0,
    "step": 0,
    "weight": 1.0,
}
WELCOME: dict[str, object] = {
    "blocks": 1,
    "proof": "0" * 64,
    "rank": 0,
    "resumed": False,
    "step": 0,
}


def header(record: object) -> bytes:
    """Return `record` in canonical form."""
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def refusal(tag: int, sent: bytes) -> str | None:
    """Return why `sent` is refused, or None; then `dump` must write the same bytes."""
    try:
        assert frames.dump_header(frames.parse_header(tag, sent)) == sent
    except ProtocolError as error:
        return str(error)
    return None


@OF_ALL_KINDS
@given(kind=KINDS, data=st.data())
def test_what_is_written_is_read_back(kind: type[Message], data: st.DataObject) -> None:
    """Every field keeps its bits: -0.0, NaN, infinities, largest numbers, any script."""
    message = data.draw(said(kind))
    assert repr(frames.parse_header(kind.tag, frames.dump_header(message))) == repr(message)


@OF_ALL_KINDS
@given(kind=KINDS, data=st.data())
def test_two_messages_never_look_alike(kind: type[Message], data: st.DataObject) -> None:
    """Headers are equal exactly if the messages are."""
    one, other = data.draw(said(kind)), data.draw(said(kind))
    assert (frames.dump_header(one) == frames.dump_header(other)) == (repr(one) == repr(other))


@OF_ALL_KINDS
@given(kind=KINDS, junk=st.binary(max_size=60))
def test_junk_is_refused(kind: type[Message], junk: bytes) -> None:
    """Any bytes are either canonical, or raise a ProtocolError that names the message."""
    complaint = refusal(kind.tag, junk)
    assert complaint is None or complaint.startswith(kind.__name__)


@OF_ALL_KINDS
@given(
    kind=KINDS,
    data=st.data(),
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=5,
    ),
)
def test_any_value_in_any_field(kind: type[Message], data: st.DataObject, value: object) -> None:
    """A field's value is read exactly, or refused with the field's name."""
    record = json.loads(frames.dump_header(data.draw(said(kind, short=True))))
    name = data.draw(st.sampled_from(sorted(record) or ["odd"]))
    changed = header(record | {name: value})
    complaint = refusal(kind.tag, changed)
    named = f"{kind.__name__} {name}=", f"{kind.__name__} key={name!r}: allowed"
    assert complaint is None or complaint.startswith(named) or "canonical" in complaint


@pytest.mark.parametrize(
    ("tag", "changes", "complaint"),
    [
        (2, {"version": True}, "Hello version=True: use a whole number"),
        (2, {"version": 1.0}, r"Hello version=1.0: use a whole number"),
        (2, {"version": -1}, "Hello version=-1: use a whole number"),
        (2, {"version": 2**63}, "Hello version=9223372036854775808: use a whole number"),
        (2, {"version": None}, "Hello version=None: use a whole number"),
        (2, {"rank": False}, "Hello rank=False: use a whole number"),
        (2, {"rank": "0"}, "Hello rank='0': use a whole number"),
        (2, {"run": 1}, "Hello run=1: use text of at most 1000 characters"),
        (2, {"run": "x" * (TEXT_CHARS_MAX + 1)}, r"Hello run='x+\.\.\.x+': use text of at most"),
        (2, {"backend": "\ud800"}, r"Hello backend='\\ud800': use valid Unicode"),
        (2, {"nonce": "0" * 31}, "Hello nonce='0.*0': use 32 lower-case hex digits"),
        (2, {"nonce": "0" * 32 + "\n"}, "Hello nonce=.*: use 32 lower-case hex digits"),
        (2, {"nonce": "٣" * 32}, "Hello nonce=.*: use 32 lower-case hex digits"),
        (2, {"proof": "A" * 64}, "Hello proof='A.*': use 64 lower-case hex digits"),
        (2, {"proof": None}, "Hello proof=None: use 64 lower-case hex digits"),
        (2, {"more": 1}, "Hello key='more': allowed are version, run, "),
        (12, {"loss": 1}, "TreeNode loss=1: use a number with a decimal point"),
        (12, {"loss": True}, "TreeNode loss=True: use a number"),
        (12, {"loss": "NaN"}, "TreeNode loss='NaN': use a number"),
        (12, {"loss": "infinity"}, "TreeNode loss='infinity': use a number"),
        (12, {"loss": None}, "TreeNode loss=None: use a number"),
        (12, {"step": [[[]]]}, r"TreeNode step=\[\[\[\]\]\]: use a whole number"),
        (10, {"step": 0, "shards": "0"}, "Assign shards='0': use a list of at most"),
        (10, {"step": 0, "shards": [True]}, r"Assign shards=\[True\]: use a whole number"),
        (10, {"step": 0, "shards": [-1]}, r"Assign shards=\[-1\]: use a whole number"),
        (10, {"step": 0, "shards": [0] * (LIST_MAX + 1)}, "Assign shards=.*: use a list of at"),
        (3, {"resumed": 0}, "Welcome resumed=0: use true"),
        (3, {"blocks": -1}, "Welcome blocks=-1: use a whole number"),
        (12, {"block": 0.0}, "TreeNode block=0.0: use a whole number"),
        (23, {"problem": 5}, "Shutdown problem=5: use text"),
        (16, {}, "Commit without step"),
    ],
)
def test_a_wrong_field_is_named(tag: int, changes: dict[str, object], complaint: str) -> None:
    """The error has message, field, the value, shortened, and the allowed ones."""
    usual: dict[str, object] = {2: HELLO, 3: WELCOME, 12: TREE_NODE}.get(tag, {})
    with pytest.raises(ProtocolError, match=f"^{complaint}") as caught:
        frames.parse_header(tag, header({**usual, **changes}))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"", "its header can't be read"),
        (b"\xff", "its header can't be read"),
        (b"{", "its header can't be read"),
        (b'{"step":1', "its header can't be read"),
        (b'{"step":1}x', "its header can't be read"),
        (b'{"step":1,"step":1}', "its header can't be read ('step' appears 2 times)"),
        (b'{"step":' + b"[" * 65 + b"]" * 65 + b"}", "its header can't be read (nested more"),
        (b'{"step":' + b"[" * 10**6 + b"]" * 10**6 + b"}", "1000000 times '[' in its header: "),
        (b'{"step":[' + b"0," * 10**6 + b"0]}", "1000000 times ',' in its header: 67536 are poss"),
        (b"[" + b"{}," * 3000 + b"{}]", "3001 times '{' in its header: 2001 are possible"),
        (b'{"step":1' + b',"x":1' * 3000 + b"}", "3001 times ':' in its header: 2002 are possible"),
        (b'{"step":' + b"9" * 10**6 + b"}", "its header can't be read"),
        (b'{"step":' + b"[" * 60 + b"]" * 60 + b"}", "use a whole number"),
        (b'{"step":' + b"9" * 4_000 + b"}", "use a whole number"),
        (b"[]", "Commit []: use a mapping of step"),
        (b"null", "Commit None: use a mapping of step"),
        (b'{"step": 1}', "not in canonical form"),
        (b'{"step":1}\n', "not in canonical form"),
        (b'{"step":01}', "its header can't be read"),
        (b'{"\\u0073tep":1}', "not in canonical form"),
        ('{"step":1}'.encode("utf-16"), "its header can't be read"),
        (b'{"' + b"x" * 10**6 + b'":1}', "Commit key='xxx"),
        (b'{"step":1,"' + b"x" * 10**6 + b'":1}', "xxx': allowed are step"),
    ],
    ids=range(23),
)
def test_another_form_is_refused(sent: bytes, complaint: str) -> None:
    """Invalid, deep, long or doubled JSON is refused, and any spelling but `dump`'s."""
    with pytest.raises(ProtocolError) as caught:
        frames.parse_header(16, sent)
    assert str(caught.value).startswith("Commit")
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("spelled", [b"NaN", b"-Infinity", b"1e999", b"1.50", b"1.5e0", b"-0"])
def test_numbers_have_one_spelling(spelled: bytes) -> None:
    """Literals that Python accepts beyond JSON, and longer spellings, are refused."""
    assert refusal(12, header(TREE_NODE)) is None
    sent = header(TREE_NODE).replace(b'"loss":1.0', b'"loss":' + spelled)
    with pytest.raises(ProtocolError, match="TreeNode"):
        frames.parse_header(12, sent)


@pytest.mark.parametrize("tag", [0, 19, 26, 255])
def test_an_unknown_tag_is_refused(tag: int) -> None:
    """The error names the tag."""
    with pytest.raises(ProtocolError, match=f"tag={tag}: no message has it"):
        frames.parse_header(tag, b"{}")


def test_the_longest_of_everything_fits_a_frame() -> None:
    """The longest header that `parse` allows is within the limit of `frames`."""
    longest = NonFinite(
        step=INT_MAX,
        shard=INT_MAX,
        tensor="\U0001f600" * TEXT_CHARS_MAX,
        element=INT_MAX,
        loss=-math.pi * 1e-300,
        ids=(INT_MAX,) * LIST_MAX,
    )
    sent = frames.dump_header(longest)
    assert len(sent) <= frames.HEADER_BYTES_MAX
    assert frames.parse_header(longest.tag, sent) == longest


CARRYING = [kind for kind in MESSAGES.values() if kind.carries]
LIMIT = 2**20
NODE = TreeNode(step=3, round=0, block=0, level=1, index=2, loss=0.5, weight=8.0)
MIB = 2**20


@contextmanager
def short_chunks() -> Iterator[None]:
    """Use chunks of 16 bytes, so that a small payload takes many frames."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "CHUNK_BYTES", 16)
        yield


def decoder(limit: int = LIMIT, key: bytes = KEY) -> Decoder:
    """Return a decoder that allows payloads of `limit` bytes."""
    return Decoder(lambda kind: limit, key)


def signed(frame: bytes, key: bytes = KEY) -> bytes:
    """Return `frame` with the right checksum for its content."""
    checksum = AESGCM(key).encrypt(frame[4:16], b"", frame[:32] + frame[48:])
    return frame[:32] + checksum + frame[48:]


def changed(frame: bytes, at: int, form: str, value: int) -> bytes:
    """Return `frame` with another value at byte `at` of its prefix, and a checksum that fits."""
    copy = bytearray(frame)
    struct.pack_into(form, copy, at, value)
    return signed(bytes(copy))


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that `work` had allocated at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- what is said is heard --------------------------------------------------------------------


@given(
    sent=st.lists(
        st.tuples(anything(CARRYING), st.binary(max_size=100))
        | st.tuples(anything(), st.just(b"")),
        max_size=5,
    ),
    cuts=st.lists(st.integers(min_value=0), max_size=40),
)
def test_any_split_is_put_together(sent: list[tuple[Message, bytes]], cuts: list[int]) -> None:
    """Messages come complete and in order, wherever the stream was cut."""
    with short_chunks():
        encoder = Encoder(KEY)
        data = b"".join(frame for one in sent for frame in written(encoder, *one))
        got = feed(decoder(), data, cuts)
    assert [(repr(one.message), bytes(one.payload)) for one in got] == [
        (repr(message), payload) for message, payload in sent
    ]


@pytest.mark.parametrize(
    "size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]
)
def test_chunks_of_full_size(size: int) -> None:
    """A payload around a multiple of the chunk size takes the right number of frames."""
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    sent = written(Encoder(KEY), NODE, payload)
    assert len(sent) == max(1, -(-size // CHUNK_BYTES))
    (got,) = feed(decoder(2 * CHUNK_BYTES), b"".join(sent))
    assert got.message == NODE
    assert got.payload == payload


def test_a_payload_keeps_its_bits() -> None:
    """NaN payloads and -0.0 arrive unchanged."""
    payload = struct.pack("<4I", 0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000)
    (got,) = feed(decoder(), b"".join(written(Encoder(KEY), NODE, payload)))
    assert got.payload == payload


def test_the_key_may_come_between_messages() -> None:
    """A session starts without a key and continues with one, on one stream."""
    reader, encoder = decoder(key=NO_KEY), Encoder()
    challenge = Challenge(version=VERSION, nonce="0" * 32)
    (first,) = feed(reader, b"".join(written(encoder, challenge)))
    reader.key = encoder.key = KEY
    (second,) = feed(reader, b"".join(written(encoder, Heartbeat())))
    assert (first.message, second.message) == (challenge, Heartbeat())


# --- what is not as it was sent ---------------------------------------------------------------


@given(message=anything(CARRYING), payload=st.binary(max_size=40), place=st.integers(min_value=0))
def test_a_flipped_bit_is_never_delivered(message: Message, payload: bytes, place: int) -> None:
    """It causes an error, at once or when more bytes have come."""
    with short_chunks():
        data = bytearray(b"".join(written(Encoder(KEY), message, payload)))
        place %= 8 * len(data)
        data[place // 8] ^= 1 << place % 8
        # A bit of a length may make it wait for more.
        assert refused(decoder(limit=40), bytes(data), bytes(2 * frames.HEADER_BYTES_MAX)) == []


@given(payload=st.binary(max_size=60), data=st.data())
def test_what_is_cut_off_is_not_delivered(payload: bytes, data: st.DataObject) -> None:
    """No message is returned before its last byte has come."""
    with short_chunks():
        whole = b"".join(written(Encoder(KEY), NODE, payload))
        end = data.draw(st.integers(0, len(whole) - 1))
        assert feed(decoder(), whole[:end]) == []


@given(data=st.data())
def test_every_frame_has_its_place(data: st.DataObject) -> None:
    """A repeated, swapped or dropped frame is refused; messages before it are right."""
    sent: tuple[tuple[Message, bytes], ...] = (
        (NODE, bytes(range(50))),
        (Commit(step=1), b""),
        (NODE, b"x" * 20),
        (Heartbeat(), b""),
    )
    with short_chunks():
        encoder = Encoder(KEY)
        row = [frame for one in sent for frame in written(encoder, *one)]
        first = data.draw(st.integers(0, len(row) - 2))
        later = data.draw(st.integers(first + 1, len(row) - 1))
        fate = data.draw(st.sampled_from(["repeated", "swapped", "dropped"]))
        if fate == "repeated":
            row.insert(later, row[first])
        elif fate == "swapped":
            row[first], row[later] = row[later], row[first]
        else:
            del row[first]
        got = refused(decoder(), *row, why="due")
    told = [(one.message, bytes(one.payload)) for one in got]
    assert told == list(sent[: len(got)])


@given(message=anything([one for one in MESSAGES.values() if one not in UNKEYED]))
def test_another_key_is_refused(message: Message) -> None:
    """A frame of another session, or without a key, is refused."""
    for key in (bytes(32), bytes(range(1, 33))):
        with pytest.raises(ProtocolError, match="checksum"):
            feed(decoder(), b"".join(written(Encoder(key), message)))


def test_the_key_covers_all_of_a_frame() -> None:
    """No byte of a frame can be changed without the key."""
    (frame,) = written(Encoder(KEY), NODE, b"12345678")
    for place in range(len(frame)):
        forged = bytearray(frame)
        forged[place] ^= 1
        more = bytes(2 * frames.HEADER_BYTES_MAX)
        assert refused(decoder(), signed(bytes(forged), NO_KEY), more) == []


def test_a_frame_sent_back_is_refused() -> None:
    """An end never accepts its own frames as the other end's."""
    ours = Encoder(KEY, direction=frames.FROM_COORDINATOR)
    (frame,) = written(ours, Heartbeat())
    with pytest.raises(ProtocolError, match="out of its turn"):
        feed(decoder(), frame)


# --- what is not a frame, or not now ----------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "form", "value", "complaint"),
    [
        (0, "B", 0, "magic=b'\\\\x00NTP': not a frame"),
        (4, "B", 1, "version=1: this end speaks version 3"),
        (5, "B", 0, "tag=0: no message has it"),
        (6, "B", 0, "out of its turn"),
        (6, "B", 2, "out of its turn"),
        (7, "B", 1, "out of its turn"),
        (8, "<Q", 1, "frame 1 came where 0 was due"),
        (8, "<Q", 2**63, "frame 9223372036854775808 came where 0 was due"),
        (16, "<I", 0, "TreeNode header_bytes=0: use 1 to"),
        (16, "<I", 2**21 + 1, "TreeNode header_bytes=2097153: use 1 to 2097152"),
        (16, "<I", 2**32 - 1, "TreeNode header_bytes=4294967295: use 1 to 2097152"),
        (20, "<I", 0, "chunk_bytes=0: use 8"),
        (20, "<I", 2**32 - 1, "chunk_bytes=4294967295: use 8"),
        (24, "<Q", 7, "chunk_bytes=8: use 7"),
        (24, "<Q", 2**20 + 1, "a payload of 1048577 bytes: 1048576 are allowed now"),
        (24, "<Q", 2**62, "a payload of 4611686018427387904 bytes: 1048576 are allowed now"),
    ],
)
def test_a_wrong_prefix_is_refused(at: int, form: str, value: int, complaint: str) -> None:
    """Even with a right checksum, at its last byte; the error names the wrong field."""
    (frame,) = written(Encoder(KEY), NODE, b"12345678")
    reader = decoder()
    wrong = changed(frame, at, form, value)
    assert feed(reader, wrong[: PREFIX_BYTES - 1]) == []
    with pytest.raises(ProtocolError, match=complaint):
        feed(reader, wrong[PREFIX_BYTES - 1 : PREFIX_BYTES])


@pytest.mark.parametrize("claim", [2**20 + 1, 2**40, 2**62, 2**64 - 1])
def test_a_claimed_size_allocates_nothing(claim: int) -> None:
    """48 bytes that announce 2**62 are refused before any allocation."""
    frame = changed(written(Encoder(KEY), NODE, b"12345678")[0], 24, "<Q", claim)
    reader = decoder()

    def read() -> None:
        assert feed(reader, frame[:41]) == []
        with pytest.raises(ProtocolError, match="are allowed now"):
            feed(reader, frame[41:PREFIX_BYTES])

    assert peak_bytes(read) < 64 * 1024


def test_the_limit_is_of_the_kind_and_of_the_moment() -> None:
    """Each kind of message has its own limit, and limits may change during a connection."""
    allowed: dict[type[Message], int] = {TreeNode: 8}
    reader = Decoder(lambda kind: allowed.get(kind, 0), KEY)
    encoder = Encoder(KEY)
    assert feed(reader, written(encoder, NODE, b"12345678")[0])
    allowed[TreeNode] = 7
    with pytest.raises(ProtocolError, match="TreeNode with a payload of 8 bytes: 7 are allowed"):
        feed(reader, written(encoder, NODE, b"12345678")[0])
    average = written(Encoder(KEY), Average(step=0, round=0, block=0, loss=0.0, weight=1.0), b"1")
    with pytest.raises(ProtocolError, match="Average with a payload of 1 bytes: 0 are allowed"):
        feed(Decoder(lambda kind: allowed.get(kind, 0), KEY), average[0])


@pytest.mark.parametrize(
    "kind", [kind for kind in MESSAGES.values() if not kind.carries], ids=lambda kind: kind.__name__
)
@given(data=st.data())
def test_what_carries_nothing_brings_nothing(kind: type[Message], data: st.DataObject) -> None:
    """A kind without payload can't be sent or received with one."""
    message = data.draw(said(kind, short=True))
    with pytest.raises(AssertionError, match="carries nothing"):
        written(Encoder(KEY), message, b"x")
    (frame,) = written(Encoder(KEY), message)
    key = NO_KEY if kind in UNKEYED else KEY
    forged = bytearray(frame)
    struct.pack_into("<IQ", forged, 20, 1, 1)
    with pytest.raises(ProtocolError, match=f"{kind.__name__} with a payload of 1 bytes: 0 are"):
        feed(decoder(), signed(bytes(forged) + b"x", key))


def test_a_message_is_finished_before_the_next() -> None:
    """Frames of another message, of another size, or with a second header are refused."""
    with short_chunks():
        encoder = Encoder(KEY)
        first, second, *_ = written(encoder, NODE, bytes(60))
        other = changed(written(Encoder(KEY), Heartbeat())[0], 8, "<Q", 1)
        computed = Computed(step=3, shards=(0,))
        later = written(Encoder(KEY), computed, bytes(60))[1]
        for wrong, complaint in (
            (other, "a frame out of its turn"),
            (changed(other, 6, "B", 0), "a frame of another message came in between"),
            (later, "a frame of another message came in between"),
            (changed(second, 16, "<I", 1), "a frame of another message came in between"),
            (changed(second, 24, "<Q", 61), "payload_bytes=61: it began with 60"),
            (changed(second, 20, "<I", 15), "chunk_bytes=15: use 16"),
            (changed(second, 6, "B", 1), "a frame out of its turn"),
        ):
            reader = decoder()
            assert feed(reader, first) == []
            with pytest.raises(ProtocolError, match=complaint):
                feed(reader, wrong)


def test_a_header_is_checked_like_any() -> None:
    """A frame with a right checksum and a bad header is refused."""
    (frame,) = written(Encoder(KEY), Commit(step=1))
    wrong = signed(frame.replace(b'{"step":1}', b'{"step":x}'))
    with pytest.raises(ProtocolError, match="Commit: its header can't be read"):
        feed(decoder(), wrong)


def test_an_end_refuses_to_send_what_no_end_would_take() -> None:
    """Sending a header that is too long is an assertion error."""
    hello = Hello(
        version=VERSION,
        run="\U0001f600" * 400,
        manifest="m",
        data="d",
        backend="cpu",
        rank=None,
        port=None,
        nonce="0" * 32,
        proof="0" * 64,
    )
    with pytest.raises(AssertionError, match="too long"):
        written(Encoder(), hello)


# --- strangers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [kind for kind in MESSAGES.values() if kind not in UNKEYED],
    ids=lambda kind: kind.__name__,
)
@given(data=st.data())
def test_a_stranger_says_nothing_else(kind: type[Message], data: st.DataObject) -> None:
    """Without a key only handshake messages are read; others fail at the prefix."""
    (frame,) = written(Encoder(), data.draw(said(kind, short=True)))
    with pytest.raises(ProtocolError, match=f"{kind.__name__} from a stranger"):
        feed(decoder(key=NO_KEY), frame[:PREFIX_BYTES])


@pytest.mark.parametrize("kind", UNKEYED, ids=lambda kind: kind.__name__)
def test_a_stranger_is_brief(kind: type[Message]) -> None:
    """Messages before any proof are limited to 4 KiB, with or without a key."""
    message = {
        Challenge: Challenge(version=VERSION, nonce="0" * 32),
        Hello: Hello(
            version=VERSION,
            run="r",
            manifest="m",
            data="d",
            backend="b",
            rank=0,
            port=7000,
            nonce="0" * 32,
            proof="0" * 64,
        ),
        Refuse: Refuse(reason="no", retry=False),
    }[kind]
    assert UNKEYED_HEADER_BYTES_MAX == 4096
    frame = bytearray(written(Encoder(), message)[0])
    for claim, most in ((4096, None), (4097, 4096), (2**21, 4096)):
        struct.pack_into("<I", frame, 16, claim)
        for key in (NO_KEY, KEY):
            reader = decoder(key=key)
            if most is None:
                assert feed(reader, bytes(frame)) == []
                continue
            with pytest.raises(ProtocolError, match=f"header_bytes={claim}: use 1 to 4096"):
                feed(reader, bytes(frame))


@pytest.mark.parametrize(("said_bytes", "each_kib"), [(0, 2), (47, 2), (48 + 4095, 6)])
def test_a_thousand_strangers_cost_little(said_bytes: int, each_kib: int) -> None:
    """The codecs of a connection take 2 KiB while silent, 6 KiB for the longest hello."""
    frame = bytearray(written(Encoder(), Refuse(reason="", retry=False))[0].ljust(48 + 4095, b"x"))
    struct.pack_into("<I", frame, 16, 4096)
    held = []

    def listen() -> None:
        for _ in range(1000):
            held.append((decoder(key=NO_KEY), Encoder()))
            assert feed(held[-1][0], bytes(frame[:said_bytes])) == []

    assert peak_bytes(listen) < 1000 * each_kib * 1024


# --- memory -----------------------------------------------------------------------------------


def test_a_payload_goes_where_the_receiver_says() -> None:
    """It is written into its room, over all frames; an empty payload needs none."""
    own = bytearray(60)
    asked: list[tuple[Message, int]] = []

    def room(message: Message, num_bytes: int) -> memoryview:
        asked.append((message, num_bytes))
        return memoryview(own)[:num_bytes]

    reader = Decoder(lambda kind: 60, KEY, room=room)
    encoder = Encoder(KEY)
    with short_chunks():
        for payload in (bytes(range(60)), b"", b"x" * 17):
            (got,) = feed(reader, b"".join(written(encoder, NODE, payload)))
            assert bytes(got.payload) == payload
            assert own.startswith(payload)
        assert feed(reader, b"".join(written(encoder, Heartbeat())))
    assert asked == [(NODE, 60), (NODE, 17)]


def test_a_message_may_have_no_room() -> None:
    """`room` may refuse a message."""

    def room(message: Message, num_bytes: int) -> memoryview:
        raise ProtocolError(f"{num_bytes} bytes of nobody's")

    (frame,) = written(Encoder(KEY), NODE, b"12345678")
    with pytest.raises(ProtocolError, match="8 bytes of nobody's"):
        feed(Decoder(lambda kind: 8, KEY, room=room), frame)


@pytest.mark.parametrize("num_bytes", [7, 9])
def test_room_of_another_size_is_our_mistake(num_bytes: int) -> None:
    """Room of a wrong size is an assertion error."""
    reader = Decoder(lambda kind: 8, KEY, room=lambda *_: memoryview(bytearray(num_bytes)))
    (frame,) = written(Encoder(KEY), NODE, b"12345678")
    with pytest.raises(AssertionError, match=f"room of {num_bytes} bytes for 8"):
        feed(reader, frame)


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [(5, 0, "no message has it"), (24, 9, "9 bytes: 8 are allowed"), (48, 0, "can't be read")],
)
def test_no_room_is_asked_for_what_is_refused(place: int, value: int, complaint: str) -> None:
    """`room` is called after prefix, sizes and header were checked."""

    def room(message: Message, num_bytes: int) -> memoryview:
        raise AssertionError("asked")

    frame = bytearray(written(Encoder(KEY), NODE, b"12345678")[0])
    frame[place] = value
    with pytest.raises(ProtocolError, match=complaint):
        feed(Decoder(lambda kind: 8, KEY, room=room), bytes(frame))


def test_a_large_payload_is_held_once() -> None:
    """Both ends together take less than 3 MiB more than the 64 MiB of payload."""
    payload = bytes(64 * MIB)
    welcome = Welcome(rank=0, step=0, blocks=1, resumed=False, proof="0" * 64)
    reader = decoder(64 * MIB)

    def cross() -> None:
        pieces = Encoder(KEY).encode(welcome, payload)
        (got,) = (one for piece in pieces for one in reader.feed(piece))
        assert got.payload == payload

    assert peak_bytes(cross) < 67 * MIB


def test_a_long_list_fits() -> None:
    """The shards of a large run fit in one message."""
    assign = Assign(step=0, shards=tuple(range(2**16)))
    (got,) = feed(decoder(), b"".join(written(Encoder(KEY), assign)))
    assert got.message == assign
