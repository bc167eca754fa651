"""The terms of a run: admission and its proofs, timeouts, the answer to an applicant."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.wire import frames, messages, terms
from entrenar_py.train.wire.frames import NO_KEY
from entrenar_py.train.wire.messages import VERSION, Challenge, Hello, Refuse
from entrenar_py.train.wire.terms import (
    NONCE_BYTES,
    Admission,
    Terms,
    Timing,
    admit,
    proof_of_coordinator,
    proof_of_worker,
    session_key,
)
from tests.train.wire.speech import said

USES = (proof_of_worker, proof_of_coordinator, session_key)
Use = Callable[[bytes, Challenge, Hello], str | bytes]
SECRET = b"open sesame"
CHALLENGE = Challenge(version=VERSION, nonce="0" * 32)
HELLO = Hello(
    version=VERSION,
    run="r",
    manifest="m",
    data="d",
    backend="cpu",
    rank=None,
    port=None,
    nonce="1" * 32,
    proof="",
)


@pytest.mark.parametrize("use", USES)
@given(data=st.data())
def test_it_depends_on_all_that_was_said(use: Use, data: st.DataObject) -> None:
    """Another secret, challenge or hello gives another proof and another key."""
    # HMAC fills a short key up with zero bytes, so secrets that differ in these alone are one.
    secrets = st.binary(max_size=40).map(lambda secret: secret.rstrip(b"\0"))
    heard = st.tuples(secrets, said(Challenge), said(Hello))
    one, other = data.draw(heard), data.draw(heard)
    blank = [(secret, asked, replace(hello, proof="")) for secret, asked, hello in (one, other)]
    assert (use(*one) == use(*other)) == (blank[0] == blank[1])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1},
        {"run": "other"},
        {"manifest": "other"},
        {"data": "other"},
        {"backend": "cuda"},
        {"rank": 0},
        {"nonce": "2" * 32},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_field_of_a_hello_counts(use: Use, changes: dict[str, object]) -> None:
    """A changed field makes the proof wrong."""
    changed = Hello(**{**asdict(HELLO), **changes})
    assert use(SECRET, CHALLENGE, HELLO) != use(SECRET, CHALLENGE, changed)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("changes", [{"version": 1}, {"nonce": "2" * 32}])
def test_every_field_of_a_challenge_counts(use: Use, changes: dict[str, object]) -> None:
    """A proof for one challenge is wrong for any other."""
    changed = Challenge(**{**asdict(CHALLENGE), **changes})
    assert use(SECRET, CHALLENGE, HELLO) != use(SECRET, changed, HELLO)


@pytest.mark.parametrize("use", USES)
def test_the_secret_counts_and_the_proof_does_not(use: Use) -> None:
    """The field `proof` is not covered; the secret is needed."""
    assert use(SECRET, CHALLENGE, HELLO) == use(SECRET, CHALLENGE, replace(HELLO, proof="a" * 64))
    assert use(SECRET, CHALLENGE, HELLO) != use(b"", CHALLENGE, HELLO)


def test_each_use_is_another() -> None:
    """A worker's proof is neither the coordinator's nor the session's key."""
    made = {
        proof_of_worker(SECRET, CHALLENGE, HELLO),
        proof_of_coordinator(SECRET, CHALLENGE, HELLO),
        session_key(SECRET, CHALLENGE, HELLO).hex(),
    }
    assert len(made) == 3
    assert all(len(bytes.fromhex(one)) == 32 for one in made)
    assert NO_KEY.hex() not in made


def test_it_is_what_the_docs_say() -> None:
    """HMAC-SHA256 of the use and both messages, a line each, with an empty proof."""
    lines = ["worker", *map(_canonical, (asdict(CHALLENGE), asdict(HELLO)))]
    expected = hmac.new(SECRET, "\n".join(lines).encode(), hashlib.sha256).hexdigest()
    assert proof_of_worker(SECRET, CHALLENGE, replace(HELLO, proof="x")) == expected
    assert NONCE_BYTES == 16


def _canonical(record: dict[str, object]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


TERMS = Terms(run="r", manifest="m", data="d")

MANIFEST = "manifest='x': this run has 'm': it trains something else now; start this worker again"


def hello(*, secret: bytes = SECRET, **changes: Any) -> Hello:
    """Return a hello that fits, or with some fields changed; its proof is always right."""
    fields: dict[str, Any] = {
        "version": VERSION,
        "run": "r",
        "manifest": "m",
        "data": "d",
        "backend": "cpu",
        "rank": None,
        "port": None,
        "nonce": "1" * 32,
        "proof": "",
    }
    said = Hello(**{**fields, **changes})
    return replace(said, proof=terms.proof_of_worker(secret, CHALLENGE, said))


def answer(
    said: Hello, *, taken: Collection[int | None] = (), barred: Collection[int] = ()
) -> Admission | Refuse:
    """Return the answer of `admit` in a run of three workers."""
    rules: dict[str, Any] = {"world_size": 3, "taken": taken, "barred": barred}
    return admit(said, CHALLENGE, TERMS, secret=SECRET, **rules)


def test_a_barred_rank_is_nobodys() -> None:
    """A hello for it is refused for good; one without a rank gets another."""
    reason = "rank=0: it was caught with wrong results too often"
    assert answer(hello(rank=0), barred={0}) == Refuse(reason=reason, retry=False)
    admitted = answer(hello(), barred={0})
    assert isinstance(admitted, Admission)
    assert admitted.rank == 1
    assert isinstance(answer(hello(rank=0, secret=b"?"), barred={0}), Refuse)


@pytest.mark.parametrize(
    ("changes", "taken", "reason", "retry"),
    [
        ({"version": 1}, (), "version=1: this run has 3", False),
        ({"run": "x"}, (), "run='x': this run has 'r'", False),
        ({"manifest": "x"}, (), MANIFEST, False),
        ({"data": "x"}, (), "data='x': this run has 'd'", False),
        ({"run": "x", "data": "x"}, (), "run='x': this run has 'r'", False),
        ({"rank": 3}, (), "rank=3: this run has ranks 0 to 2", False),
        ({"rank": 1}, (1,), "rank=1: a live worker has it", True),
        ({"rank": 1}, (0, 1, 2), "all 3 ranks are taken by live workers", True),
        ({}, (2, 0, None, 1), "all 3 ranks are taken by live workers", True),
    ],
)
def test_a_refusal_says_why(
    changes: dict[str, Any], taken: Collection[int | None], reason: str, retry: bool
) -> None:
    """It has the given value, the right one, and whether a later try may succeed."""
    assert answer(hello(**changes), taken=taken) == Refuse(reason=reason, retry=retry)


@given(stranger=said(Hello), taken=st.sets(st.integers(0, 3)))
def test_a_stranger_learns_nothing(stranger: Hello, taken: set[int]) -> None:
    """Without the secret the answer is always the same."""
    refusal = Refuse(reason="wrong secret", retry=False)
    assert answer(stranger, taken=taken) == refusal
    assert answer(hello(secret=b"other"), taken=taken) == refusal


def test_a_proof_is_of_this_challenge() -> None:
    """A proof for another connection's challenge is refused."""
    other = Challenge(version=VERSION, nonce="f" * 32)
    said = replace(hello(), proof=terms.proof_of_worker(SECRET, other, hello()))
    assert answer(said) == Refuse(reason="wrong secret", retry=False)


@pytest.mark.parametrize(
    ("rank", "taken", "given"),
    [(None, (), 0), (None, (0, None), 1), (None, (1, 2), 0), (2, (), 2), (1, (0, 2), 1)],
)
def test_a_worker_is_let_in(rank: int | None, taken: Collection[int | None], given: int) -> None:
    """It gets the rank that it requests or the lowest free one, with proof and key."""
    said = hello(rank=rank)
    assert answer(said, taken=taken) == Admission(
        rank=given,
        proof=terms.proof_of_coordinator(SECRET, CHALLENGE, said),
        key=terms.session_key(SECRET, CHALLENGE, said),
    )


@given(name=st.sampled_from(["run", "manifest", "data"]), data=st.data())
def test_every_refusal_fits_its_frame(name: str, data: st.DataObject) -> None:
    """Even if a worker's name for the run is as long as can be."""
    longest = "\U0001f600" * messages.TEXT_CHARS_MAX
    text = data.draw(st.just(longest) | st.text(st.characters(exclude_categories=["Cs"])))
    changes: dict[str, Any] = {name: text + "x"}
    refusal = answer(hello(**changes))
    assert isinstance(refusal, Refuse)
    header = frames.dump_header(refusal)
    assert len(header) <= frames.UNKEYED_HEADER_BYTES_MAX
    assert frames.parse_header(Refuse.tag, header) == refusal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heartbeat_s": 0.0}, "heartbeat_s=0.0: use a number of seconds > 0"),
        ({"dead_after_s": "soon"}, "dead_after_s='soon': use a number"),
        ({"gather_s": float("inf")}, "gather_s=inf"),
        ({"hello_s": True}, "hello_s=True"),
        ({"heartbeat_s": 30.0}, "dead between two heartbeats"),
    ],
)
def test_what_is_no_time(changes: dict[str, Any], message: str) -> None:
    """A timeout of zero, infinity or another type is refused, by name."""
    with pytest.raises(UsageError, match=message):
        Timing(**changes)


def test_one_who_asks_is_answered() -> None:
    """An applicant with the secret is answered, even if all ranks are taken."""
    said = hello(run="", manifest="", data="", rank=9)
    assert answer(said, taken=(0, 1, 2)) == Admission(
        proof=terms.proof_of_coordinator(SECRET, CHALLENGE, said),
        key=terms.session_key(SECRET, CHALLENGE, said),
    )
    stranger = hello(secret=b"other", run="", manifest="", data="")
    assert answer(stranger) == Refuse(reason="wrong secret", retry=False)
