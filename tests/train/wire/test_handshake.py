"""Proofs depend on the secret and both messages, and differ for each use."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.wire.frames import NO_KEY
from entrenar_py.train.wire.messages import VERSION, Challenge, Hello
from entrenar_py.train.wire.terms import (
    NONCE_BYTES,
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
