"""The policy by which a pending connection makes room for a new one, without sockets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.wire_io.pending_connections import Attention, Places, shared_address

GRACE_S = 1.0
HERE, THERE = "10.0.0.1", "10.0.0.2"


def places(most: int, *hosts: str) -> Places[str]:
    """Return places with a guest from each of `hosts`, whose name is its number and its second."""
    made: Places[str] = Places(most, grace_s=GRACE_S)
    for number, host in enumerate(hosts):
        assert made.enter(str(number), host, float(number)) is None
    return made


def test_nobody_goes_while_there_is_room() -> None:
    """All guests stay, for any length of time."""
    made = places(3, HERE, HERE)
    assert made.enter("new", HERE, 1e9) is None
    assert len(made) == 3


def test_the_oldest_goes_once_it_had_its_chance() -> None:
    """Before that the new one has to wait."""
    made = places(2, HERE, HERE)
    assert made.enter("new", HERE, 0.9) == "new"
    assert len(made) == 2
    assert made.enter("new", HERE, 1.0) == "0"
    assert made.enter("another", HERE, 1.0) == "another"
    assert len(made) == 2


def test_an_address_with_more_makes_room_at_once() -> None:
    """Guests of other addresses get in until the places are shared evenly."""
    made = places(4, HERE, HERE, HERE, HERE)
    assert made.enter("a", THERE, 3.0) == "0"
    assert made.enter("b", THERE, 3.0) == "1"
    assert made.enter("c", THERE, 3.0) == "c", "half of them are its own"


def test_a_worker_from_elsewhere_stays_whoever_comes() -> None:
    """A flood from one address does not displace another's only guest."""
    made = places(4, THERE, HERE, HERE, HERE)
    for number in range(4, 1000):
        assert made.enter(str(number), HERE, float(number)) == str(number - 3)


def test_who_was_told_to_go_goes_first() -> None:
    """It needs no grace."""
    made = places(2, HERE, HERE)
    made.linger("1")
    assert made.enter("new", HERE, 0.0) == "1"
    made.linger("0")
    made.linger("of a worker that had no place")
    assert len(made) == 3
    assert made.enter("another", HERE, 0.0) == "0"


def test_who_proved_itself_or_left_takes_no_place() -> None:
    """A second release has no effect."""
    made = places(1, HERE)
    for _ in range(2):
        made.release("0")
    assert len(made) == 0
    assert made.enter("new", HERE, 0.0) is None


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:0:0:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::1", "127.0.0.1", False),
        ("", "", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, alike: bool) -> None:
    """All IPv6 addresses in a /64 count as one."""
    assert (shared_address(one) == shared_address(other)) is alike


@given(
    most=st.integers(1, 6),
    visits=st.lists(
        st.tuples(
            st.sampled_from("abc"),  # whose address
            st.integers(0, 2048).map(lambda n: n / 1024),  # seconds after the one before, exact
            st.sampled_from(["stays", "leaves", "lingers"]),
        ),
        max_size=40,
    ),
)
def test_whatever_happens(most: int, visits: list[tuple[str, float, str]]) -> None:
    """The invariants of places, for any sequence of events.

    There are never more guests than places. Only a guest of the largest address goes before its
    grace, and then the oldest one. An address with less than its share gets in at once, and any
    guest within a grace.
    """
    made: Places[int] = Places(most, grace_s=GRACE_S)
    here: dict[int, tuple[str, float]] = {}
    now = 0.0
    for number, (host, after_s, then) in enumerate(visits):
        now += after_s
        mine = sum(other == host for other, _ in here.values()) + 1
        hosts = {other for other, _ in here.values()} | {host}
        full = len(made) == most
        goes = made.enter(number, host, now)
        if goes == number:
            assert mine > most // len(hosts), "it had less than its share"
            now += GRACE_S
            goes = made.enter(number, host, now)
            assert goes != number, "whoever waits gets in within a grace"
        here[number] = (host, now)
        if goes is not None:
            whose, since = here.pop(goes)
            theirs = [other for other in here.values() if other[0] == whose]
            assert full
            assert now - since >= GRACE_S or len(theirs) >= mine
            assert all(since <= other for _, other in theirs)
        assert len(made) <= most
        if then != "stays":
            del here[number]
            (made.release if then == "leaves" else made.linger)(number)
        if then == "lingers":
            made.release(number)


@given(st.floats(0.001, 0.9), st.integers(1, 5000))
def test_a_worker_in_a_flood_of_its_own_address(proof_s: float, flood_per_s: int) -> None:
    """It gets a place for the whole grace, however many others come."""
    made: Places[int] = Places(16, grace_s=GRACE_S)
    numbers, now = itertools.count(1), 0.0
    while len(made) < 16:
        made.enter(next(numbers), HERE, now)
    while made.enter(0, HERE, now) == 0:
        now += 0.01
    since = now
    for _ in range(min(int(flood_per_s * proof_s), 500)):
        now = min(now + 1 / flood_per_s, since + proof_s)
        assert made.enter(next(numbers), HERE, now) != 0


def test_a_pause_is_no_time() -> None:
    """Nothing was read in a pause, so little of it counts."""
    attention = Attention(10.0, most_s=0.1)
    assert attention.look(10.05) == pytest.approx(0.05)
    assert attention.look(70.0) == pytest.approx(0.15)
    assert attention.look(70.1) == pytest.approx(0.25)
