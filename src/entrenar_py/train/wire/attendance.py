"""The peers of a coordinator: which are connected, take part, or have been silent too long.

`Coordinator` decides how the run proceeds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.messages import (
    MEMBERS,
    Challenge,
    Computed,
    NonFinite,
    Summed,
    TreeNode,
)
from entrenar_py.train.wire.messages import PeerPhase as Phase
from entrenar_py.train.wire.terms import Run, Timing


@dataclass(slots=True)
class Member:
    """One connection. `rank` is None until the worker is admitted.

    A worker delivers its assignments in order. For each it sends a Computed, then the tree nodes of
    its shards, from the last block to the first. `delivered` has the delivered shards that are void
    if the worker leaves: in a mesh all of them, in a star those that arrived during an audit.
    """

    challenge: Challenge
    phase: Phase
    heard: float
    said: float  # when the last heartbeat was sent to it
    welcomed: float = 0.0  # when the state was sent to it
    rank: int | None = None
    proof: str = ""  # the coordinator's proof, for the Welcome
    assigned: list[tuple[int, ...]] = field(default_factory=list)  # not completely delivered
    delivering: bool = False  # whether the Computed of the first assignment arrived
    covered: dict[int, set[int]] = field(default_factory=dict)  # block -> its shards that arrived
    delivered: list[int] = field(default_factory=list)
    host: str = ""
    backend: str = ""
    address: str = ""  # where other workers of a mesh connect to it
    num_computing: int = 0  # assignments not yet answered by a Computed
    working_since: float = 0.0  # when the worker began the first of these

    def to_send(self) -> tuple[int, ...]:
        """Return the shards to reassign if the worker leaves: `delivered` and `assigned`."""
        return (*self.delivered, *(shard for shards in self.assigned for shard in shards))

    def in_rank(self) -> int:
        """Return the rank of an admitted worker."""
        assert self.rank is not None
        return self.rank

    def begin_work(self, now: float) -> None:
        """Note that the worker gets one more assignment."""
        if not self.num_computing:
            self.working_since = now
        self.num_computing += 1

    def end_work(self, now: float) -> float:
        """Return the seconds that the worker took for an assignment, which is now computed."""
        seconds, self.working_since = now - self.working_since, now
        self.num_computing -= 1
        return seconds

    # --- a delivery -------------------------------------------------------------------------------

    def require_assigned(self, computed: Computed | Summed) -> None:
        """Raise ProtocolError if `computed` is repeated or isn't for the first assignment."""
        if [computed.shards] != self.assigned[:1] or self.delivering:
            raise ProtocolError(
                f"{type(computed).__name__} shards={computed.shards}: not the next assignment, or "
                "already reported"
            )

    def begin_delivery(self, computed: Computed | Summed) -> None:
        """Begin the delivery that `computed` announces.

        Raises ProtocolError if it is out of turn.
        """
        self.require_assigned(computed)
        self.delivering = True

    def take(self, node: TreeNode, under: range, blocks: range) -> None:
        """Count a node with the shards `under` it as delivered.

        The last of the `blocks` must arrive first. The first block arrives last and completes the
        delivery. Raises ProtocolError for a node that is out of turn.
        """
        block = node.block
        if block != blocks[-1] and not self.is_whole(block + 1):
            raise ProtocolError(
                f"TreeNode block={block}: it is due only when block {block + 1} is complete"
            )
        came = self.covered.setdefault(block, set())
        # A node may not include shards of the next assignment: an assignment counts, or is void, as
        # a whole.
        due = set(self.assigned[0]) - came if self.delivering else set[int]()
        if not under or not due.issuperset(under):
            raise ProtocolError(
                f"TreeNode block={block} level={node.level} index={node.index}: its shards were "
                "not assigned, or were already received"
            )
        came.update(under)

    def is_whole(self, block: int) -> bool:
        """Return whether `block` has arrived for every shard of the first assignment."""
        return len(self.covered.get(block, ())) == len(self.assigned[0])

    def start_over(self) -> None:
        """Forget the assignments and their delivered shards."""
        self.assigned.clear()
        self.delivered.clear()
        self.covered.clear()
        self.delivering, self.num_computing = False, 0
        self.phase = Phase.READY

    def end_delivery(self) -> tuple[int, ...]:
        """Return the shards of the first assignment, which is completely delivered; remove it."""
        shards = self.assigned.pop(0)
        self.covered.clear()
        self.delivering = False
        if not self.assigned:
            self.phase = Phase.READY
        return shards

    def why_it_halts(self, report: NonFinite) -> str:
        """Return the reason for the halt; raises ProtocolError if its shard was not assigned."""
        if report.shard not in self.assigned[0]:
            raise ProtocolError(f"NonFinite shard={report.shard}: it was not assigned")
        what = f"loss {report.loss}"
        if report.tensor is not None:
            what = f"gradient {report.tensor}[{report.element}]"
        place = f"worker {self.in_rank()}, step {report.step}, shard {report.shard}"
        return f"non-finite {what} on {place}: training halted before any update"


THROWN_OUT_MAX = 3  # expulsions for one reason that end the run, with no step applied in between

_NUMBER = re.compile(r"[0-9]+")


class Expulsions:
    """Counts expulsions by rank and reason. Reasons that differ only in numbers count as equal."""

    def __init__(self) -> None:
        self._times: Counter[tuple[int | None, str]] = Counter()

    def count(self, rank: int | None, reason: str) -> int:
        """Return how often `rank` was expelled for `reason`, with this time counted."""
        key = rank, _NUMBER.sub("#", reason)
        self._times[key] += 1
        return self._times[key]

    def clear(self) -> None:
        """Reset all counts, because a step was applied."""
        self._times.clear()


def problem(rank: int | None, step: int, times: int, reason: str) -> str:
    """Return the reason to give up on a worker that was expelled `times` times for `reason`."""
    return (
        f"worker {rank} was disconnected {times} times before step {step} was made, each time "
        f"for the same reason: {reason}"
    )


FETCHING_MAX = 16  # simultaneous fetchers beyond one for each rank; each costs some MiB
CONVICTIONS_MAX = 2  # one flipped bit is forgiven; a rank that audits catch this often is refused


class Attendance:
    """Every connection of one coordinator. Times are seconds on a monotonic clock."""

    def __init__(self, run: Run, *, secret: bytes, timing: Timing) -> None:
        self.run, self.secret, self.timing = run, secret, timing
        self.peers: dict[Peer, Member] = {}
        self._convicted: Counter[int] = Counter()  # rank -> how often audits caught it

    def heard(self, peer: Peer, now: float) -> None:
        """Note that a whole frame of `peer` arrived.

        It counts only after `peer` has proved itself.
        """
        member = self.peers.get(peer)
        if member is not None and member.phase is not Phase.CHALLENGED:
            member.heard = now

    def _challenge(self, peer: Peer, nonce: str, now: float, host: str) -> list[Effect]:
        challenge = say.Challenge(version=say.VERSION, nonce=nonce)
        self.peers[peer] = Member(challenge, Phase.CHALLENGED, now, now, host=host)
        return [do.Send(peer, challenge)]

    def _admit(self, peer: Peer, member: Member, hello: say.Hello) -> list[Effect]:
        """Return the answer to a hello.

        An admitted worker is now WAITING, others are disconnected.
        """
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
            answers: list[Effect] = [do.Secure(peer, answer.key), offer]
            if self._may_fetch():
                member.phase = Phase.FETCHING
                return answers
            del self.peers[peer]
            return [*answers, do.Close(peer, "told what the run is")]
        member.rank, member.proof, member.phase = answer.rank, answer.proof, Phase.WAITING
        member.backend = hello.backend
        return [do.Secure(peer, answer.key)]

    def _may_fetch(self) -> bool:
        num_fetching = len(self._peers_in(Phase.FETCHING))
        return self.run.package is not None and num_fetching < self.run.world_size + FETCHING_MAX

    def _barred(self) -> set[int]:
        return {rank for rank, times in self._convicted.items() if times >= CONVICTIONS_MAX}

    def _overdue(self, now: float) -> list[tuple[Peer, str]]:
        """Return the peers to disconnect, each with the reason."""
        overdue = []
        for peer, member in self.peers.items():
            loading_s = now - member.welcomed if member.phase is Phase.LOADING else 0.0
            if self._is_silent(member, now):
                overdue.append((peer, f"silent for {now - member.heard:.1f} s"))
            elif loading_s >= self.timing.gather_s:
                reason = f"did not receive and load the state within {loading_s:.0f} s; "
                reason += "if that takes longer, give a larger timing.gather_s"
                overdue.append((peer, reason))
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
        return self._peers_in(*MEMBERS)

    def _phases(self) -> Iterator[Phase]:
        """Yield the phase of each worker that takes part.

        Workers answer about in the order in which they were told. From the end, the first one that
        has not answered is found at once, so the messages of a step don't cost a look at all
        workers each.
        """
        phases = (member.phase for member in reversed(self.peers.values()))
        return (phase for phase in phases if phase in MEMBERS)

    def _peers_in(self, *phases: Phase) -> dict[Peer, Member]:
        return {peer: member for peer, member in self.peers.items() if member.phase in phases}

    def _tell(self, message: say.Message, phase: Phase) -> list[Effect]:
        members = self._members()
        for member in members.values():
            member.phase = phase
        return [do.Send(peer, message) for peer in members]

    def _dismiss(self, farewell: say.Message, reason: str) -> list[Effect]:
        admitted = [peer for peer, m in self.peers.items() if m.phase is not Phase.CHALLENGED]
        sends = [do.Send(peer, farewell) for peer in admitted]
        closes = [do.Close(peer, reason) for peer in self.peers]
        self.peers.clear()
        return [*sends, *closes]
