"""Hypothesis strategies for all messages, and helpers that encode and decode them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TypeVar

import pytest
from hypothesis import strategies as st

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire.frames import Decoder, Encoder, Received
from entrenar_py.train.wire.messages import MESSAGES, TEXT_CHARS_MAX, Message

Kind = TypeVar("Kind", bound=Message)

KEY = bytes(range(32))
INT_MAX = 2**63 - 1

_ints = st.integers(0, INT_MAX)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
_FIELDS: dict[str, st.SearchStrategy[object]] = {
    "bool": st.booleans(),
    "int": _ints,
    "int | None": st.none() | _ints,
    "Nonce": st.binary(min_size=16, max_size=16).map(bytes.hex),
    "Proof": st.binary(min_size=32, max_size=32).map(bytes.hex),
    "Digest": _digests,
    "Digest | None": st.none() | _digests,
    "str": _texts | st.just("\U0001f600" * TEXT_CHARS_MAX),
    "str | None": st.none() | _texts,
    "float": st.floats(),
    "tuple[int, ...]": st.lists(_ints, max_size=5).map(tuple),
    "tuple[str, ...]": st.lists(_texts, max_size=5).map(tuple),
}
# What fits an unkeyed header, too.
_SHORT = _FIELDS | {"str": _texts}


def said(kind: type[Kind], *, short: bool = False) -> st.SearchStrategy[Kind]:
    """Generate messages of this kind; with `short` not with the longest texts."""
    of_type = _SHORT if short else _FIELDS
    return st.builds(kind, **{field.name: of_type[str(field.type)] for field in fields(kind)})


def anything(
    kinds: Iterable[type[Message]] = tuple(MESSAGES.values()),
) -> st.SearchStrategy[Message]:
    """Generate messages of any of these kinds that fit a frame."""
    return st.one_of([said(kind, short=True) for kind in kinds])


def written(encoder: Encoder, message: Message, payload: bytes = b"") -> list[bytes]:
    """Return the frames of `message`, each in one piece."""
    frames: list[bytes] = []
    for piece in encoder.encode(message, payload):
        if isinstance(piece, memoryview):  # the chunk of the frame that was begun
            frames[-1] += piece
        else:
            frames.append(piece)
    return frames


def feed(decoder: Decoder, data: bytes, cuts: Iterable[int] = ()) -> list[Received]:
    """Return the messages decoded from `data` in pieces that end at `cuts`, and at its end."""
    got: list[Received] = []
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    at = 0
    for end in ends:
        got += decoder.feed(data[at:end])
        at = end
    return got


def refused(decoder: Decoder, *pieces: bytes, why: str = ".") -> list[Received]:
    """Return the messages decoded before one of `pieces` is refused; the reason matches `why`."""
    got = []
    with pytest.raises(ProtocolError, match=why):  # noqa: PT012 - any of them may be the one
        for piece in pieces:
            got += feed(decoder, piece)
    return got
