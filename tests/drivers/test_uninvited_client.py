"""A guest says what it has to, notices whether it is let in, and is gone when it is sent away."""

from __future__ import annotations

import asyncio

import pytest

from entrenar_py.drivers.uninvited_client import Guest, visit
from entrenar_py.protocol.frames import FROM_COORDINATOR, Encoder
from entrenar_py.protocol.messages import VERSION, Challenge, Heartbeat, Message, Refuse
from tests.drivers.fakes import (
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

CHALLENGE = Challenge(version=VERSION, nonce="0" * 32)
KEY = bytes(range(32))


def spoken(*messages: Message, key: bytes = KEY) -> bytes:
    """Return the bytes of a coordinator's `messages`, in one piece."""
    encoder = Encoder(key, direction=FROM_COORDINATOR)
    return b"".join(frame for one in messages for frame in encoder.encode(one))


def test_it_speaks_when_it_is_challenged() -> None:
    """All at once, or byte by byte; before that it says nothing."""
    once, slow = Guest(lambda _: b"abc"), Guest(lambda _: b"abc", pace_s=1.0)
    assert once.heard(b"") == []
    assert once.answer == "no challenge"
    assert once.heard(spoken(CHALLENGE)) == [b"abc"]
    assert slow.heard(spoken(CHALLENGE)) == [b"a", b"b", b"c"]
    assert (once.let_in, once.answer) == (False, "nothing")


def test_it_is_told_why_it_is_refused() -> None:
    """And that is its answer."""
    guest = Guest(lambda _: b"")
    assert guest.heard(spoken(CHALLENGE, Refuse(reason="full", retry=True))) == []
    assert (guest.let_in, guest.answer) == (False, "full")


def test_it_notices_that_it_is_let_in() -> None:
    """Only who was let in is spoken to with a key."""
    guest = Guest(lambda _: b"")
    assert guest.heard(spoken(CHALLENGE, Heartbeat())) == []
    assert (guest.let_in, guest.answer) == (True, "as a worker")


@pytest.mark.parametrize("pace_s", [None, 0.001])
def test_a_visit_ends_with_the_run(pace_s: float | None) -> None:
    """Whoever says nothing, or is not done yet, is sent away then; a run without one is as good."""

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
