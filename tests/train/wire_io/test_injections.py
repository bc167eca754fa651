"""Faults of messages, and a client that takes no part."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.wire.frames import FROM_COORDINATOR, Encoder
from entrenar_py.train.wire.messages import VERSION, Challenge, Heartbeat, Message, Refuse
from entrenar_py.train.wire_io.injections import Fate, Guest, Meddling, bent, unmeddled, visit
from tests.train.wire_io.fakes import (
    COMPLETED,
    LOOPBACK,
    FakeServer,
    client_of,
    free_port,
    go,
    listening,
    run_of,
    take_part,
)

DATA = st.binary(min_size=1, max_size=99)


@given(DATA, st.integers())
def test_one_bit_is_flipped(data: bytes, seed: int) -> None:
    """Exactly one bit, and the same one for the same seed."""
    flipped = bent(Meddling(Fate.FLIP), data, random.Random(seed))
    assert len(flipped) == len(data)
    assert sum((a ^ b).bit_count() for a, b in zip(data, flipped, strict=True)) == 1
    assert flipped == bent(Meddling(Fate.FLIP), data, random.Random(seed))


@given(DATA)
def test_what_changes_the_bytes(data: bytes) -> None:
    """Duplicate, truncation and flip change the bytes; other faults don't."""
    rng = random.Random(0)
    assert bent(Meddling(Fate.DUPLICATE), data, rng) == data * 2
    assert data.startswith(bent(Meddling(Fate.TRUNCATE), data, rng))
    assert len(bent(Meddling(Fate.TRUNCATE), data, rng)) == len(data) // 2
    for fate in set(Fate) - {Fate.DUPLICATE, Fate.TRUNCATE, Fate.FLIP}:
        assert bent(Meddling(fate), data, rng) == data


def test_nothing_befalls_anything() -> None:
    """The default injects no fault."""
    unmeddled(0, True, Heartbeat())


CHALLENGE = Challenge(version=VERSION, nonce="0" * 32)
KEY = bytes(range(32))


def spoken(*messages: Message, key: bytes = KEY) -> bytes:
    """Return the bytes of a coordinator's `messages`, in one piece."""
    encoder = Encoder(key, direction=FROM_COORDINATOR)
    return b"".join(frame for one in messages for frame in encoder.encode(one))


def test_it_speaks_when_it_is_challenged() -> None:
    """It sends nothing before the challenge, then all at once or byte by byte."""
    once, slow = Guest(lambda _: b"abc"), Guest(lambda _: b"abc", pace_s=1.0)
    assert once.heard(b"") == []
    assert once.answer == "no challenge"
    assert once.heard(spoken(CHALLENGE)) == [b"abc"]
    assert slow.heard(spoken(CHALLENGE)) == [b"a", b"b", b"c"]
    assert (once.let_in, once.answer) == (False, "nothing")


def test_it_is_told_why_it_is_refused() -> None:
    """`answer` is the coordinator's reason."""
    guest = Guest(lambda _: b"")
    assert guest.heard(spoken(CHALLENGE, Refuse(reason="full", retry=True))) == []
    assert (guest.let_in, guest.answer) == (False, "full")


def test_it_notices_that_it_is_let_in() -> None:
    """Only an admitted peer gets frames with a key."""
    guest = Guest(lambda _: b"")
    assert guest.heard(spoken(CHALLENGE, Heartbeat())) == []
    assert (guest.let_in, guest.answer) == (True, "as a worker")


@pytest.mark.parametrize("pace_s", [None, 0.001])
def test_a_visit_ends_with_the_run(pace_s: float | None) -> None:
    """The client is disconnected when the run ends, even while it sends."""

    async def story() -> None:
        server, port = await listening(run_of(), FakeServer())
        guest = Guest(lambda _: b"x" if pace_s is None else bytes(10**5), pace_s=pace_s)
        visiting = asyncio.ensure_future(visit(guest, LOOPBACK, port))
        running = asyncio.ensure_future(server.finish())
        finishes = await take_part([client_of(0), client_of(1)], port)
        assert [await running, *finishes] == [COMPLETED] * 3
        await visiting
        assert (guest.let_in, guest.answer) == (False, "nothing")

    go(story())


def test_nobody_is_there() -> None:
    """A visit to a run that is over ends at once."""
    guest = Guest(lambda _: b"")
    go(visit(guest, LOOPBACK, free_port()))
    assert guest.answer == "no challenge"
