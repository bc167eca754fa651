"""The peers of a coordinator: which are connected, which take part, which were silent too long.

`Coordinator` decides how the run proceeds.
"""

from __future__ import annotations

from collections import Counter

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.member import Member
from entrenar_py.train.wire.phases import MEMBERS
from entrenar_py.train.wire.phases import PeerPhase as Phase
from entrenar_py.train.wire.terms import Run, Timing

FETCHING_MAX = 16  # fetchers at a time beside one for each rank; each costs some MiB
CONVICTIONS_MAX = 2  # one flipped bit is forgiven; a rank caught this often is refused


class Attendance:
    """Every connection of one coordinator. Times are seconds on a monotonic clock."""

    def __init__(self, run: Run, *, secret: bytes, timing: Timing) -> None:
        self.run, self.secret, self.timing = run, secret, timing
        self.peers: dict[Peer, Member] = {}
        self._convicted: Counter[int] = Counter()  # rank -> how often an audit caught it

    def heard(self, peer: Peer, now: float) -> None:
        """Note that a whole frame of `peer` came. It counts only once `peer` has proved itself."""
        member = self.peers.get(peer)
        if member is not None and member.phase is not Phase.CHALLENGED:
            member.heard = now

    def _challenge(self, peer: Peer, nonce: str, now: float, host: str) -> list[Effect]:
        challenge = say.Challenge(version=say.VERSION, nonce=nonce)
        self.peers[peer] = Member(challenge, Phase.CHALLENGED, now, now, host=host)
        return [do.Send(peer, challenge)]

    def _admit(self, peer: Peer, member: Member, hello: say.Hello) -> list[Effect]:
        """Answer a hello: put an admitted worker into phase WAITING, close other connections."""
        answer = terms.admit(
            hello,
            member.challenge,
            self.run.terms,
            secret=self.secret,
            world_size=self.run.world_size,
            taken={other.rank for other in self.peers.values()},
            barred=self._barred(),
        )
        if isinstance(answer, say.Refuse):
            del self.peers[peer]
            return [do.Send(peer, answer), do.Close(peer, f"refused: {answer.reason}")]
        if answer.rank is None:
            # An applicant, which will connect again as a worker.
            offer = do.Send(peer, terms.offer(self.timing, answer.proof, self.run.package))
            told: list[Effect] = [do.Secure(peer, answer.key), offer]
            if self._may_fetch():
                member.phase = Phase.FETCHING
                return told
            del self.peers[peer]
            return [*told, do.Close(peer, "told what the run is")]
        member.rank, member.proof, member.phase = answer.rank, answer.proof, Phase.WAITING
        member.backend = hello.backend
        return [do.Secure(peer, answer.key)]

    def _may_fetch(self) -> bool:
        """Return whether there are files, and one more peer may fetch them."""
        num_fetching = len(self._peers_in(Phase.FETCHING))
        return self.run.package is not None and num_fetching < self.run.world_size + FETCHING_MAX

    def _barred(self) -> set[int]:
        """Return the ranks that may not join any more, because audits caught them too often."""
        return {rank for rank, times in self._convicted.items() if times >= CONVICTIONS_MAX}

    def _overdue(self, now: float) -> list[tuple[Peer, str]]:
        """Return the peers to disconnect, each with the reason."""
        overdue = []
        for peer, member in self.peers.items():
            loading_s = now - member.welcomed if member.phase is Phase.LOADING else 0.0
            if self._is_silent(member, now):
                overdue.append((peer, f"silent for {now - member.heard:.1f} s"))
            elif loading_s >= self.timing.gather_s:
                overdue.append((peer, f"has loaded for {loading_s:.0f} s"))
        return overdue

    def _is_silent(self, member: Member, now: float) -> bool:
        stranger = member.phase is Phase.CHALLENGED
        patience = self.timing.hello_s if stranger else self.timing.dead_after_s
        return now - member.heard >= patience

    def _beat(self, now: float) -> list[Effect]:
        """Send heartbeats to the admitted peers for which one is due."""
        effects: list[Effect] = []
        for peer, member in self.peers.items():
            is_due = now - member.said >= self.timing.heartbeat_s
            if is_due and member.phase is not Phase.CHALLENGED:
                member.said = now
                effects.append(do.Send(peer, say.Heartbeat()))
        return effects

    def _members(self) -> dict[Peer, Member]:
        """Return the peers that take part in steps."""
        return self._peers_in(*MEMBERS)

    def _peers_in(self, *phases: Phase) -> dict[Peer, Member]:
        return {peer: member for peer, member in self.peers.items() if member.phase in phases}

    def _tell(self, message: say.Message, phase: Phase) -> list[Effect]:
        """Send `message` to every member, and put each into `phase`."""
        members = self._members()
        for member in members.values():
            member.phase = phase
        return [do.Send(peer, message) for peer in members]

    def _dismiss(self, farewell: say.Message, reason: str) -> list[Effect]:
        """Send `farewell` to every admitted peer, and close every connection."""
        admitted = [peer for peer, m in self.peers.items() if m.phase is not Phase.CHALLENGED]
        sends = [do.Send(peer, farewell) for peer in admitted]
        closes = [do.Close(peer, reason) for peer in self.peers]
        self.peers.clear()
        return [*sends, *closes]
