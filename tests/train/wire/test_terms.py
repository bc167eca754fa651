"""Admission checks the secret first, then the terms of the run, then the rank."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.wire import frames, messages, terms
from entrenar_py.train.wire.messages import VERSION, Challenge, Hello, Refuse
from entrenar_py.train.wire.terms import Admission, Terms, Timing, admit
from tests.train.wire.speech import said

TERMS = Terms(run="r", manifest="m", data="d")
SECRET = b"open sesame"
CHALLENGE = Challenge(version=VERSION, nonce="0" * 32)

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
    reason = "rank=0: it was caught too often with wrong results"
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
