"""A worker's links to the other workers of a mesh: who connects, who proves what, who is silent.

Of two workers the one of lower rank connects. The handshake is the coordinator's: who is connected
to challenges, who connects says hello, both prove that they know the secret. What is to be said
before that is done waits.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from entrenar_py.errors import ProtocolError
from entrenar_py.protocol import effects as do
from entrenar_py.protocol import handshake, terms
from entrenar_py.protocol.effects import Effect, Peer
from entrenar_py.protocol.messages import (
    VERSION,
    Accept,
    Challenge,
    Heartbeat,
    Hello,
    Message,
    Refuse,
)
from entrenar_py.protocol.terms import Terms, Timing

AGAIN = "it has connected again"


@dataclass(slots=True)
class Link:
    """One connection. `rank` is the other's, once it has said; `proof` what it is to prove."""

    nonce: str
    heard: float
    said: float
    rank: int | None = None
    proof: str = ""
    dial: do.Dial | None = None  # how it was made, if from here
    ready: bool = False


@dataclass(slots=True)
class Links:
    """All of one worker's. `own` is its rank, once it has a group; `addresses` are the others'."""

    terms: Terms
    secret: bytes
    backend: str
    timing: Timing
    own: int | None = None
    addresses: Mapping[int, str] = field(default_factory=dict)
    _links: dict[Peer, Link] = field(default_factory=dict)
    _dialing: set[do.Dial] = field(default_factory=set)
    _waiting: dict[int, list[Message]] = field(default_factory=dict)

    def group(self, own: int, addresses: Mapping[int, str]) -> list[Effect]:
        """From now on this worker is `own`, and talks to those at `addresses`."""
        self.own, self.addresses = own, addresses
        self._waiting.clear()
        dials = {do.Dial(rank, address) for rank, address in addresses.items() if rank > own}
        effects: list[Effect] = []
        for peer, link in list(self._links.items()):
            # Who connected to us may know of a later group than we do.
            if link.dial is not None and link.dial not in dials:
                effects += self._close(peer, "it is not in the group any more")
        there = {link.dial for link in self._links.values()} | self._dialing
        wanted = sorted(dials - there, key=lambda dial: dial.rank)
        self._dialing |= set(wanted)
        return [*effects, *wanted]

    def say(self, rank: int, message: Message) -> list[Effect]:
        """Tells `rank`, now or when it can be told."""
        for peer, link in self._links.items():
            if link.rank == rank and link.ready:
                return [do.Send(peer, message)]
        self._waiting.setdefault(rank, []).append(message)
        return []

    def rank_of(self, peer: Peer) -> int | None:
        """Return the rank at the other end, if that is proved."""
        link = self._links.get(peer)
        return link.rank if link is not None and link.ready else None

    def has(self, peer: Peer) -> bool:
        """Return whether `peer` is one of these."""
        return peer in self._links

    # --- what is told to it -----------------------------------------------------------------------

    def accepted(self, peer: Peer, nonce: str, now: float) -> list[Effect]:
        """Someone has connected."""
        self._links[peer] = Link(nonce, now, now)
        return [do.Send(peer, Challenge(version=VERSION, nonce=nonce))]

    def dialed(self, peer: Peer, dial: do.Dial, nonce: str, now: float) -> list[Effect]:
        """The connection that was asked for is there."""
        self._dialing.discard(dial)
        if self.addresses.get(dial.rank) != dial.address:
            return [do.Close(peer, "it is not in the group any more")]
        self._links[peer] = Link(nonce, now, now, rank=dial.rank, dial=dial)
        return []

    def undialable(self, dial: do.Dial) -> bool:
        """It can't be made; whether it is still wanted."""
        self._dialing.discard(dial)
        return self.addresses.get(dial.rank) == dial.address

    def heard(self, peer: Peer, now: float) -> None:
        """A whole frame came."""
        link = self._links.get(peer)
        if link is not None and link.ready:
            link.heard = now

    def greet(self, peer: Peer, message: Message, now: float) -> tuple[list[Effect], int | None]:
        """A message of a link that is not ready; ProtocolError for what does not belong there.

        Also which rank, if any, has another link with it: what went over that may be lost.
        """
        link = self._links[peer]
        match message:
            case Challenge() if link.dial is not None and not link.proof:
                return self._hello(peer, link, message), None
            case Hello() if link.dial is None and link.rank is None:
                return self._admit(peer, link, message, now)
            case Accept() if link.proof and hmac.compare_digest(message.proof, link.proof):
                return self._ready(peer, link, now), None
            case Refuse():
                raise ProtocolError(f"refused: {message.reason}")
        raise ProtocolError(f"{type(message).__name__} from a worker that has proved nothing")

    def lost(self, peer: Peer, reason: str) -> tuple[list[Effect], int | None]:
        """A link is gone, or what came over it made no sense; whose it was, if in the group."""
        rank = self._links[peer].rank
        return self._close(peer, reason), rank if rank in self.addresses else None

    def tick(self, now: float) -> tuple[list[Effect], list[tuple[Peer, str]]]:
        """Time has passed: heartbeats to send, and who is silent."""
        effects: list[Effect] = []
        silent = []
        for peer, link in self._links.items():
            patience = self.timing.dead_after_s if link.ready else self.timing.hello_s
            if now - link.heard >= patience:
                silent.append((peer, f"silent for {now - link.heard:.1f} s"))
            elif link.ready and now - link.said >= self.timing.heartbeat_s:
                link.said = now
                effects.append(do.Send(peer, Heartbeat()))
        return effects, silent

    def close(self) -> list[Effect]:
        """Ends them all."""
        self.own, self.addresses = None, {}
        self._dialing.clear()
        self._waiting.clear()
        return [one for peer in list(self._links) for one in self._close(peer, "the stay is over")]

    # --- small things -----------------------------------------------------------------------------

    def _hello(self, peer: Peer, link: Link, challenge: Challenge) -> list[Effect]:
        greeting = terms.greet(
            challenge,
            self.terms,
            secret=self.secret,
            backend=self.backend,
            nonce=link.nonce,
            rank=self.own,
        )
        link.proof = greeting.expected
        return [do.Send(peer, greeting.hello), do.Secure(peer, greeting.key)]

    def _admit(
        self, peer: Peer, link: Link, hello: Hello, now: float
    ) -> tuple[list[Effect], int | None]:
        challenge = Challenge(version=VERSION, nonce=link.nonce)
        refusal = terms.refusal(hello, challenge, self.terms, secret=self.secret)
        if refusal is not None:
            return [do.Send(peer, refusal), *self._close(peer, f"refused: {refusal.reason}")], None
        if hello.rank in (None, self.own):
            raise ProtocolError(f"Hello rank={hello.rank}: this worker's own, or no rank")
        before = [old for old, one in self._links.items() if one.rank == hello.rank]
        effects = [one for old in before for one in self._close(old, AGAIN)]
        link.rank = hello.rank
        key = handshake.session_key(self.secret, challenge, hello)
        proof = handshake.proof_of_coordinator(self.secret, challenge, hello)
        accepted: list[Effect] = [do.Secure(peer, key), do.Send(peer, Accept(proof=proof))]
        ready = self._ready(peer, link, now)
        return [*effects, *accepted, *ready], hello.rank if before else None

    def _ready(self, peer: Peer, link: Link, now: float) -> list[Effect]:
        assert link.rank is not None, "it has said who it is"
        link.ready, link.heard = True, now
        return [do.Send(peer, message) for message in self._waiting.pop(link.rank, [])]

    def _close(self, peer: Peer, reason: str) -> list[Effect]:
        del self._links[peer]
        return [do.Close(peer, reason)]
