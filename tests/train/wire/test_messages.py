"""The table of messages, and their bytes."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.wire import frames, messages
from entrenar_py.train.wire.frames import Decoder
from entrenar_py.train.wire.messages import MESSAGES, TEXT_CHARS_MAX, Message
from tests.train.wire.samples import GOLDEN, SAMPLES, vectors
from tests.train.wire.speech import KEY, feed


def test_every_message_is_in_the_table_under_its_own_tag() -> None:
    """No tag is used twice, and no kind is missing."""
    here = [one for one in vars(messages).values() if isinstance(one, type)]
    kinds = {one for one in here if issubclass(one, Message) and one is not Message}
    assert set(MESSAGES.values()) == kinds
    assert all(kind.tag == tag and 0 <= tag < 256 for tag, kind in MESSAGES.items())


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=3_000))
def test_a_brief_text_fits(text: str) -> None:
    """A long text keeps its ends; one that fits is unchanged."""
    brief = messages.brief(text)
    assert len(brief) <= TEXT_CHARS_MAX
    assert brief == text or (text.startswith(brief[:300]) and text.endswith(brief[-300:]))
    frames.parse_header(21, frames.dump_header(messages.Leave(reason=brief)))


ROWS: list[dict[str, Any]] = json.loads(GOLDEN.read_text("utf-8"))


def test_the_same_bytes_are_written() -> None:
    """One frame of each message, with fixed fields and a fixed key. See `samples`."""
    assert [row["message"] for row in ROWS] == [kind.__name__ for kind in MESSAGES.values()]
    assert vectors() == ROWS


def test_the_same_messages_are_read() -> None:
    """All stored frames are decoded as one stream."""
    data = b"".join(bytes.fromhex(row["frame"]) for row in ROWS)
    got = feed(Decoder(lambda kind: 1024, KEY), data)
    assert [(repr(one.message), bytes(one.payload)) for one in got] == [
        (repr(message), payload) for message, payload in SAMPLES.values()
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["message"])
def test_every_byte_is_where_the_docs_say(row: dict[str, Any]) -> None:
    """A frame is parsed here without the package's code."""
    frame = bytes.fromhex(row["frame"])
    header, payload = row["header"].encode(), bytes.fromhex(row["payload"])
    tag = next(tag for tag, kind in MESSAGES.items() if kind.__name__ == row["message"])
    assert frame[0:4] == b"ENTP"
    assert list(frame[4:8]) == [3, tag, 1, 0]
    assert struct.unpack("<QIIQ", frame[8:32]) == (
        *(row["number"], len(header)),
        *(len(payload), len(payload)),
    )
    key = bytes(32) if row["key"] is None else bytes.fromhex(row["key"])
    covered = frame[:32] + header + payload
    assert frame[32:48] == AESGCM(key).encrypt(frame[4:16], b"", covered)
    assert frame[48:] == header + payload
