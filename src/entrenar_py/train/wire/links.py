"""A worker's links to the other workers of a mesh: connections, handshakes and timeouts.

Of two workers the one of lower rank connects. The handshake is as with the coordinator: the worker
that accepts sends a challenge, the one that connects sends a hello, and both prove that they know
the secret. Messages for a worker wait until its link is ready.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import handshake, terms
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.messages import (
    VERSION,
    Accept,
    Challenge,
    Heartbeat,
    Hello,
    Message,
    Refuse,
)
from entrenar_py.train.wire.terms import Terms, Timing

AGAIN = "it has connected again"


@dataclass(slots=True)
class Link:
    """One connection. `rank` is the other worker's, or None; `proof` is expected in its Accept."""

    nonce: str
    heard: float
    said: float
    rank: int | None = None
    proof: str = ""
    dial: do.Dial | None = None  # the effect that made it, if made by this worker
    ready: bool = False


@dataclass(slots=True)
class Links:
    """All links of one worker. `own` is its rank in the group; `addresses` are the others'."""

    terms: Terms
    secret: bytes
    backend: str
    timing: Timing
    num_ranks: int | None = None  # of the run, if they are known beforehand
    own: int | None = None
    addresses: Mapping[int, str] = field(default_factory=dict)
    _links: dict[Peer, Link] = field(default_factory=dict)
    _dialing: set[do.Dial] = field(default_factory=set)
    _waiting: dict[int, list[Message]] = field(default_factory=dict)

    def group(self, own: int, addresses: Mapping[int, str]) -> list[Effect]:
        """Take up a new group, in which this worker's rank is `own`; connect where needed."""
        self.own, self.addresses = own, addresses
        self._waiting.clear()
        dials = {do.Dial(rank, address) for rank, address in addresses.items() if rank > own}
        effects: list[Effect] = []
        for peer, link in list(self._links.items()):
            # Links made by others stay: they may know of a later group than this worker does.
            if link.dial is not None and link.dial not in dials:
                effects += self._close(peer, "it is not in the group any more")
        there = {link.dial for link in self._links.values()} | self._dialing
        wanted = sorted(dials - there, key=lambda dial: dial.rank)
        self._dialing |= set(wanted)
        return [*effects, *wanted]

    def say(self, rank: int, message: Message) -> list[Effect]:
        """Send `message` to `rank`, now or once the link to it is ready."""
        for peer, link in self._links.items():
            if link.rank == rank and link.ready:
                return [do.Send(peer, message)]
        self._waiting.setdefault(rank, []).append(message)
        return []

    def rank_of(self, peer: Peer) -> int | None:
        """Return the rank at the other end; None before the handshake is complete."""
        link = self._links.get(peer)
        return link.rank if link is not None and link.ready else None

    def has(self, peer: Peer) -> bool:
        """Return whether `peer` is one of these links."""
        return peer in self._links

    # --- events -----------------------------------------------------------------------------------

    def accepted(self, peer: Peer, nonce: str, now: float) -> list[Effect]:
        """Send a challenge to a peer that has connected."""
        self._links[peer] = Link(nonce, now, now)
        return [do.Send(peer, Challenge(version=VERSION, nonce=nonce))]

    def dialed(self, peer: Peer, dial: do.Dial, nonce: str, now: float) -> list[Effect]:
        """Take up the connection that `dial` requested."""
        self._dialing.discard(dial)
        if self.addresses.get(dial.rank) != dial.address:
            return [do.Close(peer, "it is not in the group any more")]
        self._links[peer] = Link(nonce, now, now, rank=dial.rank, dial=dial)
        return []

    def undialable(self, dial: do.Dial) -> bool:
        """Note that `dial` failed; return whether its connection is still wanted."""
        self._dialing.discard(dial)
        return self.addresses.get(dial.rank) == dial.address

    def heard(self, peer: Peer, now: float) -> None:
        """Note that a whole frame of `peer` came."""
        link = self._links.get(peer)
        if link is not None and link.ready:
            link.heard = now

    def greet(self, peer: Peer, message: Message, now: float) -> tuple[list[Effect], int | None]:
        """Take a message of a handshake; ProtocolError if it is not the one that comes next.

        Return the effects, and the rank whose older link was closed for this one, or None. Messages
        on the older link may be lost.
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
        """Close a link that broke or misbehaved; also return the other's rank if in the group."""
        rank = self._links[peer].rank
        return self._close(peer, reason), rank if rank in self.addresses else None

    def tick(self, now: float) -> tuple[list[Effect], list[tuple[Peer, str]]]:
        """Return the heartbeats that are due, and the silent peers, each with the reason."""
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
        """Close all links and forget the group."""
        self.own, self.addresses = None, {}
        self._dialing.clear()
        self._waiting.clear()
        reason = "this worker left its group"
        return [effect for peer in list(self._links) for effect in self._close(peer, reason)]

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
        if self.num_ranks is not None and hello.rank >= self.num_ranks:
            raise ProtocolError(f"Hello rank={hello.rank}: there are {self.num_ranks}")
        before = [old for old, other in self._links.items() if other.rank == hello.rank]
        effects = [effect for old in before for effect in self._close(old, AGAIN)]
        link.rank = hello.rank
        key = handshake.session_key(self.secret, challenge, hello)
        proof = handshake.proof_of_coordinator(self.secret, challenge, hello)
        accepted: list[Effect] = [do.Secure(peer, key), do.Send(peer, Accept(proof=proof))]
        ready = self._ready(peer, link, now)
        return [*effects, *accepted, *ready], hello.rank if before else None

    def _ready(self, peer: Peer, link: Link, now: float) -> list[Effect]:
        assert link.rank is not None, "known since the hello"
        link.ready, link.heard = True, now
        return [do.Send(peer, message) for message in self._waiting.pop(link.rank, [])]

    def _close(self, peer: Peer, reason: str) -> list[Effect]:
        del self._links[peer]
        return [do.Close(peer, reason)]
