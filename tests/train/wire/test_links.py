"""A worker's links to other workers: connections, admission, queued messages and timeouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Dial, Effect
from entrenar_py.train.wire.mesh_worker import AGAIN, Links
from entrenar_py.train.wire.messages import (
    VERSION,
    Accept,
    Challenge,
    Heartbeat,
    Hello,
    Message,
    Overflow,
    Refuse,
)
from entrenar_py.train.wire.terms import Terms, proof_of_coordinator, session_key
from tests.train.wire.star import SECRET, TERMS, TIMING

HERE, THERE = "0" * 32, "1" * 32  # nonces
TO_2 = Dial(2, "c:2")
ALL = {0: "a:0", 1: "b:1", 2: "c:2"}
SAID, MORE = Overflow(step=0, block=0), Overflow(step=0, block=1)

MANIFEST = "manifest='x': this run has 'm': it trains something else now; start this worker again"


def links(own: int = 1, *, secret: bytes = SECRET, terms: Terms = TERMS) -> Links:
    """Return the links of worker `own`, whose group has ranks 0, 1 and 2."""
    made = Links(terms, secret, "cpu", TIMING)
    made.group(own, {rank: address for rank, address in ALL.items() if rank != own})
    return made


def said(effects: list[Effect]) -> list[Message]:
    """Return the messages among `effects`."""
    return [one.message for one in effects if isinstance(one, do.Send)]


def hello_of(dialer: Links, nonce: str = THERE) -> Hello:
    """Return the hello of `dialer` in answer to a challenge with `nonce`."""
    dialer.dialed("out", TO_2, HERE, 0.0)
    effects, _ = dialer.greet("out", Challenge(version=VERSION, nonce=nonce), 0.0)
    (hello,) = said(effects)
    assert isinstance(hello, Hello)
    return hello


def linked() -> tuple[Links, Links]:
    """Return workers 1 and 2 after their handshake: 1 has the link "out", 2 the link "in"."""
    one, two = links(1), links(2)
    two.accepted("in", THERE, 0.0)
    answer, again = two.greet("in", hello_of(one), 0.0)
    assert again is None
    one.greet("out", said(answer)[0], 0.0)
    assert (one.rank_of("out"), two.rank_of("in")) == (2, 1)
    return one, two


# --- who connects -----------------------------------------------------------------------------


def test_the_lower_rank_connects() -> None:
    """It connects to each higher rank, once."""
    made = Links(TERMS, SECRET, "cpu", TIMING)
    addresses = {0: "a:0", 2: "c:2", 3: "d:3"}
    assert made.group(1, addresses) == [TO_2, Dial(3, "d:3")]
    assert made.group(1, addresses) == [], "they are on their way"
    made.dialed("out", TO_2, HERE, 0.0)
    assert made.group(1, addresses) == [], "and there"
    assert made.group(1, {**addresses, 3: "e:3"}) == [Dial(3, "e:3")]


def test_who_is_not_in_the_group_is_left() -> None:
    """Only dialed links are closed: others may know of a later group."""
    made = links(1)
    made.dialed("out", TO_2, HERE, 0.0)
    made.accepted("in", HERE, 0.0)
    assert made.group(1, {0: "a:0"}) == [do.Close("out", "it is not in the group any more")]
    assert made.has("in")


def test_a_connection_that_comes_too_late_is_closed() -> None:
    """Its worker has left or moved; a failed dial to it is ignored."""
    made = links(1)
    made.group(1, {2: "elsewhere:2"})
    gone = [do.Close("out", "it is not in the group any more")]
    assert made.dialed("out", TO_2, HERE, 0.0) == gone
    assert not made.undialable(TO_2)
    assert made.undialable(Dial(2, "elsewhere:2"))


# --- who is let in ----------------------------------------------------------------------------


def test_both_prove_themselves() -> None:
    """Challenge, hello, accept: all effects, and the same key at both ends."""
    one, two = links(1), links(2)
    challenge = Challenge(version=VERSION, nonce=THERE)
    assert two.accepted("in", THERE, 0.0) == [do.Send("in", challenge)]
    assert one.dialed("out", TO_2, HERE, 0.0) == []
    asked, _ = one.greet("out", challenge, 0.0)
    (hello,) = said(asked)
    assert isinstance(hello, Hello)
    assert (hello.rank, hello.nonce, hello.port) == (1, HERE, None)
    key = session_key(SECRET, challenge, hello)
    assert asked == [do.Send("out", hello), do.Secure("out", key)]
    proof = proof_of_coordinator(SECRET, challenge, hello)
    answer, _ = two.greet("in", hello, 0.0)
    assert answer == [do.Secure("in", key), do.Send("in", Accept(proof=proof))]
    assert one.rank_of("out") is None
    assert one.greet("out", Accept(proof=proof), 0.0) == ([], None)
    assert one.rank_of("out") == 2


@pytest.mark.parametrize(
    ("dialer", "reason"),
    [
        (links(1, secret=b"open barley"), "wrong secret"),
        (links(1, terms=replace(TERMS, run="x")), "run='x': this run has 'r'"),
        (links(1, terms=replace(TERMS, manifest="x")), MANIFEST),
        (links(1, terms=replace(TERMS, data="x")), "data='x': this run has 'd'"),
    ],
)
def test_who_is_of_another_run_is_refused(dialer: Links, reason: str) -> None:
    """The secret is checked first; the worker gets the reason and is disconnected."""
    two = links(2)
    two.accepted("in", THERE, 0.0)
    refusal = Refuse(reason=reason, retry=False)
    effects, _ = two.greet("in", hello_of(dialer), 0.0)
    assert effects == [do.Send("in", refusal), do.Close("in", f"refused: {reason}")]
    assert not two.has("in")
    with pytest.raises(ProtocolError, match=f"refused: {reason}"):
        dialer.greet("out", refusal, 0.0)


def test_a_hello_of_mine_is_refused() -> None:
    """A hello must have a rank, and not this worker's."""
    two = links(2)
    two.accepted("in", THERE, 0.0)
    with pytest.raises(ProtocolError, match="Hello rank=2: this worker's own, or no rank"):
        two.greet("in", hello_of(_of_rank(2)), 0.0)


def _of_rank(rank: int) -> Links:
    made = links(1)
    made.own = rank
    return made


@pytest.mark.parametrize("proof", ["0" * 64, ""])
def test_who_is_connected_to_proves_itself_too(proof: str) -> None:
    """A worker that does not know the secret gets no gradient."""
    one = links(1)
    hello_of(one)
    with pytest.raises(ProtocolError, match="Accept from a worker that has proved nothing"):
        one.greet("out", Accept(proof=proof), 0.0)


@pytest.mark.parametrize("message", [SAID, Heartbeat(), Accept(proof="0" * 64)])
def test_nothing_is_heard_before_that(message: Message) -> None:
    """Neither end accepts other messages before the handshake is complete."""
    made = links(1)
    made.dialed("out", TO_2, HERE, 0.0)
    made.accepted("in", HERE, 0.0)
    for peer in ("in", "out"):
        with pytest.raises(ProtocolError, match="from a worker that has proved nothing"):
            made.greet(peer, message, 0.0)


def test_a_handshake_is_made_once() -> None:
    """A second challenge is refused, and a hello on a dialed link."""
    made, challenge = links(1), Challenge(version=VERSION, nonce=THERE)
    hello = hello_of(made)
    for again in (challenge, hello):
        with pytest.raises(ProtocolError, match="from a worker that has proved nothing"):
            made.greet("out", again, 0.0)
    made.accepted("in", THERE, 0.0)
    with pytest.raises(ProtocolError, match="Challenge from a worker"):
        made.greet("in", challenge, 0.0)


def test_a_new_link_takes_the_place_of_the_old() -> None:
    """Its rank is returned, since messages on the old link may be lost."""
    one, two = linked()
    one.lost("out", "cut")
    two.accepted("in 2", HERE, 1.0)
    effects, again = two.greet("in 2", hello_of(one, HERE), 1.0)
    assert effects[0] == do.Close("in", AGAIN)
    assert again == 1
    assert (two.rank_of("in"), two.rank_of("in 2")) == (None, 1)
    assert two.say(1, SAID) == [do.Send("in 2", SAID)]


# --- what is said -----------------------------------------------------------------------------


def test_what_is_said_early_waits() -> None:
    """Messages wait in order for the handshake; a new round drops them."""
    two = links(2)
    two.accepted("in", THERE, 0.0)
    assert two.say(1, SAID) == []
    assert two.say(1, MORE) == []
    effects, _ = two.greet("in", hello_of(links(1)), 0.0)
    assert effects[-2:] == [do.Send("in", SAID), do.Send("in", MORE)]
    assert two.say(0, SAID) == []
    two.group(2, {0: "a:0", 1: "b:1"})
    two.accepted("in 0", HERE, 0.0)
    effects, _ = two.greet("in 0", hello_of(_of_rank(0), HERE), 0.0)
    assert SAID not in said(effects), "what it was of is void"


def test_a_link_that_is_lost_is_told_of() -> None:
    """The lost link's rank is reported if it is in the group; a stranger's link has none."""
    one, two = linked()
    assert one.lost("out", "cut") == ([do.Close("out", "cut")], 2)
    two.group(2, {0: "a:0"})
    assert two.lost("in", "cut") == ([do.Close("in", "cut")], None)
    two.accepted("stranger", HERE, 0.0)
    assert two.lost("stranger", "garbage") == ([do.Close("stranger", "garbage")], None)


# --- how long it waits ------------------------------------------------------------------------


def test_the_silent_are_named() -> None:
    """A ready link times out after `dead_after_s`, another after `hello_s` whatever it sends."""
    one, _ = linked()
    one.accepted("stranger", HERE, 0.0)
    one.heard("out", 5.0)
    one.heard("stranger", 5.0)
    assert one.tick(9.9)[1] == []
    assert one.tick(10.0)[1] == [("stranger", "silent for 10.0 s")]
    one.lost("stranger", "silent")
    assert one.tick(34.9)[1] == []
    assert one.tick(35.0)[1] == [("out", "silent for 30.0 s")]


def test_each_hears_that_we_live() -> None:
    """Every ready link gets a heartbeat every `heartbeat_s`."""
    one, _ = linked()
    one.accepted("stranger", HERE, 0.0)
    assert one.tick(4.9)[0] == []
    assert one.tick(5.0)[0] == [do.Send("out", Heartbeat())]
    assert one.tick(9.9)[0] == []


def test_all_are_closed_at_the_end_of_a_stay() -> None:
    """The group is empty afterwards."""
    one, _ = linked()
    one.accepted("in", HERE, 0.0)
    over = [do.Close(peer, "this worker left its group") for peer in ("out", "in")]
    assert one.close() == over
    assert not one.undialable(TO_2)
    assert one.dialed("late", TO_2, HERE, 0.0) != []
