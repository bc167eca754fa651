"""One who asks what a run is: proves itself, checks that it was told by one who knows the secret.

A machine, as the others are, of two messages. It is no worker: whoever drives it builds one from
the answer and connects again, however long building takes.
"""

from __future__ import annotations

import hmac
from dataclasses import replace

from entrenar_py.errors import ProtocolError
from entrenar_py.protocol import handshake
from entrenar_py.protocol.effects import Close, Effect, Finish, Peer, Secure, Send
from entrenar_py.protocol.messages import VERSION, Challenge, Hello, Message, Offer, Refuse
from entrenar_py.protocol.phases import APPLICANT_MAY_HEAR
from entrenar_py.protocol.phases import ApplicantPhase as Phase
from entrenar_py.protocol.terms import UNKNOWN


class Applicant:
    """The machine, for one connection. `offer` is what it was told, once it was."""

    def __init__(self, peer: Peer, nonce: str, *, secret: bytes, backend: str) -> None:
        """`peer` is the connection, `nonce` 32 random hex digits."""
        self.offer: Offer | None = None
        self.phase = Phase.CONNECTED
        self._peer, self._nonce = peer, nonce
        self._secret, self._backend = secret, backend
        self._expected = ""  # the coordinator's proof

    def receive(self, message: Message) -> list[Effect]:
        """A whole message; ProtocolError for one that is not legal now, or not of a coordinator
        that knows the secret.
        """
        if not isinstance(message, APPLICANT_MAY_HEAR[self.phase]):
            raise ProtocolError(f"{type(message).__name__} to an applicant that is {self.phase}")
        match message:
            case Challenge():
                return self._ask(message)
            case Offer():
                return self._take(message)
            case _:
                assert isinstance(message, Refuse)
                return self._end(Finish("failed", f"refused: {message.reason}"))

    def _ask(self, challenge: Challenge) -> list[Effect]:
        if challenge.version != VERSION:
            reason = f"version={challenge.version}: this worker speaks {VERSION}"
            return self._end(Finish("failed", reason))
        hello = Hello(
            version=VERSION,
            run=UNKNOWN.run,
            manifest=UNKNOWN.manifest,
            data=UNKNOWN.data,
            backend=self._backend,
            rank=None,
            port=None,
            nonce=self._nonce,
            proof="",
        )
        proof = handshake.proof_of_worker(self._secret, challenge, hello)
        self._expected = handshake.proof_of_coordinator(self._secret, challenge, hello)
        key = handshake.session_key(self._secret, challenge, hello)
        self.phase = Phase.ASKING
        return [Send(self._peer, replace(hello, proof=proof)), Secure(self._peer, key)]

    def _take(self, offer: Offer) -> list[Effect]:
        if not hmac.compare_digest(offer.proof, self._expected):
            raise ProtocolError("Offer proof: this coordinator does not know the secret")
        self.offer = offer
        return self._end(Finish("completed"))

    def _end(self, finish: Finish) -> list[Effect]:
        self.phase = Phase.OVER
        return [Close(self._peer, finish.reason or finish.status), finish]
