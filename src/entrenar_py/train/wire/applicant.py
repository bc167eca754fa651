"""An applicant asks which run there is, and checks that the coordinator knows the secret.

An applicant is a state machine, but not a worker. Its driver builds a worker from the answer, and
connects again.
"""

from __future__ import annotations

import hmac

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.messages import VERSION, Challenge, Message, Offer, Refuse
from entrenar_py.train.wire.phases import APPLICANT_MAY_HEAR
from entrenar_py.train.wire.phases import ApplicantPhase as Phase
from entrenar_py.train.wire.terms import UNKNOWN, greet


class Applicant:
    """The state machine of one connection. `offer` is the coordinator's answer, if it has come."""

    def __init__(self, peer: Peer, nonce: str, *, secret: bytes, backend: str) -> None:
        """`peer` is the connection, `nonce` 32 random hex digits."""
        self.offer: Offer | None = None
        self.phase = Phase.CONNECTED
        self._peer, self._nonce = peer, nonce
        self._secret, self._backend = secret, backend
        self._expected = ""  # the coordinator's proof

    def receive(self, message: Message) -> list[Effect]:
        """Return the effects of a message; ProtocolError if it is illegal or its proof is wrong."""
        if not isinstance(message, APPLICANT_MAY_HEAR[self.phase]):
            raise ProtocolError(f"{type(message).__name__} to an applicant that is {self.phase}")
        return self._turn(message)

    def _turn(self, message: Message) -> list[Effect]:
        match message:
            case Challenge():
                return self._ask(message)
            case Offer():
                return self._take(message)
            case _:
                assert isinstance(message, Refuse)
                return self._end(do.Finish("failed", f"refused: {message.reason}"))

    def _ask(self, challenge: Challenge) -> list[Effect]:
        if challenge.version != VERSION:
            reason = f"version={challenge.version}: this worker speaks {VERSION}"
            return self._end(do.Finish("failed", reason))
        greeting = greet(
            challenge, UNKNOWN, secret=self._secret, backend=self._backend, nonce=self._nonce
        )
        self._expected, self.phase = greeting.expected, Phase.ASKING
        return [do.Send(self._peer, greeting.hello), do.Secure(self._peer, greeting.key)]

    def _take(self, offer: Offer) -> list[Effect]:
        self._require_proof(offer)
        self.offer = offer
        return self._end(do.Finish("completed"))

    def _require_proof(self, offer: Offer) -> None:
        if not hmac.compare_digest(offer.proof, self._expected):
            raise ProtocolError("Offer proof: this coordinator does not know the secret")

    def _end(self, finish: do.Finish) -> list[Effect]:
        self.phase = Phase.OVER
        return [do.Close(self._peer, finish.reason or finish.status), finish]
