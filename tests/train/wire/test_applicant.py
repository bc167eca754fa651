"""The machine of an applicant: it proves itself, and trusts only a coordinator that does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.applicant import Applicant
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.messages import (
    MESSAGES,
    VERSION,
    Challenge,
    Hello,
    Message,
    Offer,
    Refuse,
)
from entrenar_py.train.wire.phases import APPLICANT_MAY_HEAR, ApplicantPhase
from tests.train.wire.samples import SAMPLES
from tests.train.wire.star import SECRET, TIMING, run_of
from tests.train.wire.test_fetcher import fetching

PEER = "up"
CHALLENGE = Challenge(version=VERSION, nonce="0" * 32)


def new(secret: bytes = SECRET) -> Applicant:
    """Return an applicant that has just connected."""
    return Applicant(PEER, "1" * 32, secret=secret, backend="cpu")


def hello(machine: Applicant) -> Hello:
    """Return the applicant's answer to the challenge."""
    said, _ = machine.receive(CHALLENGE)
    assert isinstance(said, do.Send)
    assert isinstance(said.message, Hello)
    return said.message


def coordinator() -> Coordinator:
    """Return a coordinator to which peer `down` has connected, after it has sent CHALLENGE."""
    machine = Coordinator(run_of(), secret=SECRET, timing=TIMING, now=0.0)
    machine.connected("down", CHALLENGE.nonce, 0.0)
    return machine


def reach(phase: ApplicantPhase) -> Applicant:
    """Return an applicant in this phase; only one that fetches files is ever FETCHING."""
    if phase is ApplicantPhase.FETCHING:
        return fetching().fetcher
    machine = new()
    if phase is not ApplicantPhase.CONNECTED:
        machine.receive(CHALLENGE)
    if phase is ApplicantPhase.OVER:
        machine.receive(Refuse(reason="no", retry=False))
    return machine


def test_it_asks_and_is_told() -> None:
    """Its hello names no run; the offer is keyed, and the connection ends after it."""
    machine, above = new(), coordinator()
    said = hello(machine)
    assert (said.run, said.manifest, said.data, said.rank) == ("", "", "", None)
    secure, send, close = above.receive("down", said, 0.0)
    key = terms.session_key(SECRET, CHALLENGE, said)
    assert secure == do.Secure("down", key)
    assert isinstance(send, do.Send)
    assert isinstance(send.message, Offer)
    assert (send.message.heartbeat_s, send.message.dead_after_s) == (5.0, 30.0)
    assert close == do.Close("down", "told what the run is")
    assert above.peers == {}
    done = [do.Close(PEER, "completed"), do.Finish("completed")]
    assert machine.receive(send.message) == done
    assert machine.offer == send.message


def test_the_key_is_set_before_anything_else_is_read() -> None:
    """A forged offer fails the checksum of its frame."""
    machine = new()
    said, secure = machine.receive(CHALLENGE)
    assert isinstance(said, do.Send)
    assert isinstance(said.message, Hello)
    assert secure == do.Secure(PEER, terms.session_key(SECRET, CHALLENGE, said.message))


@pytest.mark.parametrize("proof", ["0" * 64, "worker's own"])
def test_an_offer_without_the_secret_is_not_believed(proof: str) -> None:
    """A made-up proof and a reflected one are refused."""
    machine = new()
    said = hello(machine)
    proof = said.proof if "own" in proof else proof
    offer = Offer(heartbeat_s=1.0, dead_after_s=2.0, package=None, proof=proof)
    with pytest.raises(ProtocolError, match="this coordinator does not know the secret"):
        machine.receive(offer)
    assert machine.offer is None


@pytest.mark.parametrize(
    "changes",
    [{"proof": "0" * 64}, {"backend": "cuda"}, {"nonce": "2" * 32}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_stranger_is_told_nothing(changes: dict[str, Any]) -> None:
    """A peer with a wrong secret or an altered hello gets no scenario."""
    said = replace(hello(new()), **changes)
    send, close = coordinator().receive("down", said, 0.0)
    refusal = Refuse(reason="wrong secret", retry=False)
    assert send == do.Send("down", refusal)
    assert close == do.Close("down", "refused: wrong secret")


@pytest.mark.parametrize("given", ["run", "manifest", "data"])
def test_half_a_question_is_none(given: str) -> None:
    """A hello with only part of the run's terms asks to join, and is refused."""
    named: dict[str, Any] = {given: "x"}
    said = replace(hello(new()), **named)
    said = replace(said, proof=terms.proof_of_worker(SECRET, CHALLENGE, said))
    send, _ = coordinator().receive("down", said, 0.0)
    assert isinstance(send, do.Send)
    assert isinstance(send.message, Refuse)
    assert send.message.reason.endswith(": this run has 'r'")


def test_another_version_is_told_so() -> None:
    """Either end checks the version before anything else."""
    later = replace(CHALLENGE, version=VERSION + 1)
    finish = new().receive(later)[-1]
    assert finish == do.Finish("failed", f"version={VERSION + 1}: this worker speaks {VERSION}")
    said = replace(hello(new()), version=VERSION + 1)
    said = replace(said, proof=terms.proof_of_worker(SECRET, CHALLENGE, said))
    send, _ = coordinator().receive("down", said, 0.0)
    reason = f"version={VERSION + 1}: this run has {VERSION}"
    assert send == do.Send("down", Refuse(reason=reason, retry=False))


def test_a_refusal_is_the_end() -> None:
    """It finishes with the coordinator's reason."""
    machine = reach(ApplicantPhase.ASKING)
    close, finish = machine.receive(Refuse(reason="wrong secret", retry=False))
    assert close == do.Close(PEER, "refused: wrong secret")
    assert finish == do.Finish("failed", "refused: wrong secret")


ILLEGAL: list[tuple[ApplicantPhase, type[Message]]] = [
    (phase, kind)
    for phase, legal in APPLICANT_MAY_HEAR.items()
    for kind in MESSAGES.values()
    if kind not in legal
]


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL)
def test_what_is_not_legal_is_refused(phase: ApplicantPhase, kind: type[Message]) -> None:
    """In each phase every message that the table does not list is refused."""
    with pytest.raises(ProtocolError, match=f"{kind.__name__} to an applicant that is {phase}"):
        reach(phase).receive(SAMPLES[kind][0])
