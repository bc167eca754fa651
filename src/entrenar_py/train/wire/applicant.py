"""Peers that are not workers yet: they ask for the run's terms, or fetch its files."""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Iterable

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.messages import (
    APPLICANT_MAY_HEAR,
    VERSION,
    ApplicantPhase,
    Challenge,
    Halt,
    Heartbeat,
    Message,
    Offer,
    Piece,
    Refuse,
    Shutdown,
    Want,
)
from entrenar_py.train.wire.terms import UNKNOWN, WANTED_MAX, Part, Timing, greet


class Applicant:
    """The state machine of an applicant's connection.

    `offer` is the coordinator's answer, None until it arrives.
    """

    def __init__(self, peer: Peer, nonce: str, *, secret: bytes, backend: str) -> None:
        """Start with the connection `peer`; `nonce` has 32 random hex digits."""
        self.offer: Offer | None = None
        self.phase = ApplicantPhase.CONNECTED
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
            reason = f"version={challenge.version}: this worker speaks version {VERSION}"
            return self._end(do.Finish("failed", reason))
        greeting = greet(
            challenge, UNKNOWN, secret=self._secret, backend=self._backend, nonce=self._nonce
        )
        self._expected, self.phase = greeting.expected, ApplicantPhase.ASKING
        return [do.Send(self._peer, greeting.hello), do.Secure(self._peer, greeting.key)]

    def _take(self, offer: Offer) -> list[Effect]:
        self._require_proof(offer)
        self.offer = offer
        return self._end(do.Finish("completed"))

    def _require_proof(self, offer: Offer) -> None:
        if not hmac.compare_digest(offer.proof, self._expected):
            raise ProtocolError("Offer proof: this coordinator does not know the secret")

    def _end(self, finish: do.Finish) -> list[Effect]:
        self.phase = ApplicantPhase.OVER
        return [do.Close(self._peer, finish.reason or finish.status), finish]


# A fetcher downloads files of a run's package from the coordinator before it joins as a worker.
#
# It is an applicant that stays connected: it asks for the run's terms, then requests a few pieces
# at a time. Its driver stores the pieces. If the connection is lost, the driver reconnects and
# requests the missing pieces.


class Fetcher(Applicant):
    """The state machine of a fetcher's connection. Times are seconds on a monotonic clock."""

    def __init__(
        self,
        peer: Peer,
        nonce: str,
        *,
        secret: bytes,
        backend: str,
        package: str,
        parts: Iterable[Part],
        timing: Timing,
        patience_s: float,
        now: float,
    ) -> None:
        """Start with a connection and the missing `parts` of the package with digest `package`.

        The connection is closed after `patience_s` seconds without a byte of these parts.
        """
        super().__init__(peer, nonce, secret=secret, backend=backend)
        self._package, self.timing = package, timing
        self._wanted = iter([(part.file, at) for part in parts for at in part.offsets()])
        self._due: deque[Want] = deque()  # requested and not yet received, in this order
        self._patience_s = patience_s
        self._heard = self._said = self._progressed = now

    def progressed(self, now: float) -> None:
        """Note that bytes of a piece arrived."""
        self._progressed = now

    def heard(self, now: float) -> None:
        """Note that a whole frame arrived."""
        self._heard = now

    def tick(self, now: float) -> list[Effect]:
        """Return a heartbeat if one is due.

        Raises ProtocolError if the coordinator is silent too long, or sends only heartbeats.
        """
        silence_s, waited_s = now - self._heard, now - self._progressed
        if self.phase is ApplicantPhase.OVER:
            return []
        if silence_s >= self.timing.dead_after_s:
            raise ProtocolError(f"the coordinator was silent for {silence_s:.1f} s")
        if waited_s >= self._patience_s:
            raise ProtocolError(f"the coordinator is alive, and sent no byte for {waited_s:.1f} s")
        if self.phase is not ApplicantPhase.FETCHING or now - self._said < self.timing.heartbeat_s:
            return []
        self._said = now
        return [do.Send(self._peer, Heartbeat())]

    def _turn(self, message: Message) -> list[Effect]:
        match message:
            case Piece():
                return self._store(message)
            case Refuse(reason=reason) | Halt(reason=reason):
                return self._end(do.Finish("failed", f"refused: {reason}"))
            case Shutdown(problem=problem):
                reason = "the run is complete" if problem is None else problem
                return self._end(do.Finish("failed", f"the run is over: {reason}"))
            case Heartbeat():
                return []
            case _:
                return super()._turn(message)

    def _take(self, offer: Offer) -> list[Effect]:
        self._require_proof(offer)
        self.offer = offer
        if offer.package != self._package:
            reason = "the coordinator now has a different run; start this worker again"
            return self._end(do.Finish("failed", reason))
        self.phase = ApplicantPhase.FETCHING
        return [effect for _ in range(WANTED_MAX) for effect in self._want()] or self._done()

    def _want(self) -> list[Effect]:
        for file, offset in self._wanted:
            self._due.append(Want(file=file, offset=offset))
            return [do.Send(self._peer, self._due[-1])]
        return []

    def _store(self, piece: Piece) -> list[Effect]:
        due = self._due.popleft() if self._due else None
        if due != Want(file=piece.file, offset=piece.offset):
            raise ProtocolError(f"Piece file={piece.file} offset={piece.offset}: it is not due")
        stored = do.Store(piece.file, piece.offset)
        more = self._want()
        return [stored, *more] if self._due else [stored, *self._done()]

    def _done(self) -> list[Effect]:
        return self._end(do.Finish("completed"))
