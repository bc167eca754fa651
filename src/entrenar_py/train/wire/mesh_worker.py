"""A worker of a mesh: it averages the blocks that it owns, and gets the others from their owners.

It talks to the coordinator like a worker of a star, but sends its gradients to the other workers.
An exchange belongs to a step and a round. Messages of a later exchange are postponed until that
exchange begins here.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import messages as say
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.effects import Effect, Peer
from entrenar_py.train.wire.messages import (
    MESH_WORKER_MAY_HEAR,
    VERSION,
    Accept,
    Average,
    Challenge,
    Heartbeat,
    Hello,
    Message,
    Partial,
    Refuse,
    TreeNode,
)
from entrenar_py.train.wire.messages import WorkerPhase as Phase
from entrenar_py.train.wire.terms import Terms, Timing, proof_of_coordinator, session_key
from entrenar_py.train.wire.worker import Worker

# Links from a worker to the other workers of a mesh: connections, handshakes and timeouts.
#
# Of two workers, the one with the lower rank connects. The handshake is the same as with the
# coordinator: the accepting worker sends a challenge, the connecting worker sends a hello, and both
# prove that they know the secret. Messages for a worker wait until its link is ready.

AGAIN = "it has connected again"


@dataclass(slots=True)
class Link:
    """One connection to another worker.

    `rank` is the other worker's, None if unknown; `proof` is the proof that its Accept must have.
    """

    nonce: str
    heard: float
    said: float
    rank: int | None = None
    proof: str = ""
    dial: do.Dial | None = None  # the request that opened it; None if the other end connected
    ready: bool = False


@dataclass(slots=True)
class Links:
    """All links of one worker.

    `own` is its rank in the group; `addresses` has the addresses of the other workers.
    """

    terms: Terms
    secret: bytes
    backend: str
    timing: Timing
    # the number of ranks of the run, None if it is not known beforehand
    num_ranks: int | None = None
    own: int | None = None
    addresses: Mapping[int, str] = field(default_factory=dict)
    _links: dict[Peer, Link] = field(default_factory=dict)
    _dialing: set[do.Dial] = field(default_factory=set)
    _waiting: dict[int, list[Message]] = field(default_factory=dict)
    _ready_peers: dict[int, list[Peer]] = field(default_factory=dict)  # rank -> its ready links

    def group(self, own: int, addresses: Mapping[int, str]) -> list[Effect]:
        """Return the connections to open for a new group, in which this worker has rank `own`."""
        self.own, self.addresses = own, addresses
        self._waiting.clear()
        dials = {do.Dial(rank, address) for rank, address in addresses.items() if rank > own}
        effects: list[Effect] = []
        for peer, link in list(self._links.items()):
            # Links that other workers opened stay: those workers may know of a later group.
            if link.dial is not None and link.dial not in dials:
                effects += self._close(peer, "it is not in the group any more")
        there = {link.dial for link in self._links.values()} | self._dialing
        wanted = sorted(dials - there, key=lambda dial: dial.rank)
        self._dialing |= set(wanted)
        return [*effects, *wanted]

    def say(self, rank: int, message: Message) -> list[Effect]:
        """Return the effects that send `message` to `rank`, now or when the link to it is ready."""
        if peers := self._ready_peers.get(rank):
            return [do.Send(peers[0], message)]
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
        """Return the challenge for a peer that has connected."""
        self._links[peer] = Link(nonce, now, now)
        return [do.Send(peer, Challenge(version=VERSION, nonce=nonce))]

    def dialed(self, peer: Peer, dial: do.Dial, nonce: str, now: float) -> list[Effect]:
        """Return the effects of a new connection, which `dial` requested."""
        self._dialing.discard(dial)
        if self.addresses.get(dial.rank) != dial.address:
            return [do.Close(peer, "it is not in the group any more")]
        self._links[peer] = Link(nonce, now, now, rank=dial.rank, dial=dial)
        return []

    def undialable(self, dial: do.Dial) -> bool:
        """Return whether the connection of the failed `dial` is still wanted."""
        self._dialing.discard(dial)
        return self.addresses.get(dial.rank) == dial.address

    def heard(self, peer: Peer, now: float) -> None:
        """Note that a whole frame of `peer` arrived."""
        link = self._links.get(peer)
        if link is not None and link.ready:
            link.heard = now

    def greet(self, peer: Peer, message: Message, now: float) -> tuple[list[Effect], int | None]:
        """Return the effects of a handshake's message, and the rank of a link that it replaces.

        The rank is None if no older link to that worker was closed. Messages on an older link may
        be lost. Raises ProtocolError for a message that is not the next one of a handshake.
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
        """Return the effects that close a broken link, and its worker's rank if in the group."""
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
        """Return the effects that close all links; forget the group."""
        self.own, self.addresses = None, {}
        self._dialing.clear()
        self._waiting.clear()
        reason = "this worker left its group"
        return [effect for peer in list(self._links) for effect in self._close(peer, reason)]

    # --- helpers ----------------------------------------------------------------------------------

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
            raise ProtocolError(f"Hello rank={hello.rank}: there are only {self.num_ranks} ranks")
        before = [old for old, other in self._links.items() if other.rank == hello.rank]
        effects = [effect for old in before for effect in self._close(old, AGAIN)]
        link.rank = hello.rank
        key = session_key(self.secret, challenge, hello)
        proof = proof_of_coordinator(self.secret, challenge, hello)
        accepted: list[Effect] = [do.Secure(peer, key), do.Send(peer, Accept(proof=proof))]
        ready = self._ready(peer, link, now)
        return [*effects, *accepted, *ready], hello.rank if before else None

    def _ready(self, peer: Peer, link: Link, now: float) -> list[Effect]:
        assert link.rank is not None, "known since the hello"
        link.ready, link.heard = True, now
        self._ready_peers.setdefault(link.rank, []).append(peer)
        return [do.Send(peer, message) for message in self._waiting.pop(link.rank, [])]

    def _close(self, peer: Peer, reason: str) -> list[Effect]:
        link = self._links.pop(peer)
        if link.ready and link.rank is not None:
            self._ready_peers[link.rank].remove(peer)
        return [do.Close(peer, reason)]


Exchanged: TypeAlias = say.TreeNode | say.Partial | say.Average
IN_A_ROUND = (Phase.READY, Phase.COMPUTING, Phase.STAGED)


class MeshWorker(Worker):
    """The state machine of a mesh's worker. Other workers connect to its `port`."""

    may_hear = MESH_WORKER_MAY_HEAR
    parts: tuple[type[say.Message], ...] = (
        say.TreeNode,
        say.Average,
    )  # the messages between workers

    def __init__(
        self,
        terms: Terms,
        *,
        secret: bytes,
        backend: str,
        rank: int | None = None,
        port: int | None = None,
        timing: Timing,
    ) -> None:
        super().__init__(terms, secret=secret, backend=backend, rank=rank, port=port, timing=timing)
        self.links = Links(terms, secret, backend, timing)
        self._group: say.Group | None = None
        self._holders: Sequence[int] = ()  # for each shard of `step`, the rank that computes it
        self._own: list[say.TreeNode] = []  # all nodes of `step` computed by this worker
        self._missing: dict[int, set[int]] = {}  # owned block -> shards that have not arrived
        self._num_postponed = 0
        self._holds_state = False  # the state before `step`, even if disconnected
        self._made: int | None = None  # the last step applied since the state was loaded

    # --- events -----------------------------------------------------------------------------------

    def undialable(self, dial: do.Dial, reason: str) -> list[Effect]:
        """Return the complaint that `dial` failed, if its connection is still wanted."""
        wanted = self.links.undialable(dial)
        return self._complain(dial.rank, reason) if wanted else []

    def receive_from(self, peer: Peer, message: say.Message, now: float) -> list[Effect]:
        """Return the effects of another worker's message.

        An illegal message ends link and round.
        """
        if not self.links.has(peer):
            return []  # this worker closed the link while the message was on its way
        rank = self.links.rank_of(peer)
        try:
            if rank is None:
                effects, again = self.links.greet(peer, message, now)
                return effects + ([] if again is None else self._complain(again, AGAIN))
            if isinstance(message, say.Heartbeat):
                return []
            return self._exchanged(peer, rank, message)
        except ProtocolError as error:
            return self.lost_link(peer, str(error))

    def lost_link(self, peer: Peer, reason: str) -> list[Effect]:
        """Return the effects that close a broken link and complain to the coordinator."""
        if not self.links.has(peer):
            return []
        effects, rank = self.links.lost(peer, reason)
        return effects if rank is None else [*effects, *self._complain(rank, reason)]

    def reduced(self, step: int, block: int, loss: float, weight: float) -> list[Effect]:
        """Return the effects that send the finite average of an owned block to the others."""
        group = self._group
        if group is None:
            return []  # requested on a connection that has ended
        average = say.Average(step=step, round=group.round, block=block, loss=loss, weight=weight)
        return [*self._spread(average), *self._has(block)]

    def overflowed(self, step: int, block: int) -> list[Effect]:
        """Return the report that an owned block's average is not finite, so that the run halts."""
        overflow = do.Send(self._peer, say.Overflow(step=step, block=block))
        return [] if self._group is None else [overflow]

    def tick(self, now: float) -> list[Effect]:
        """Send the heartbeats that are due; disconnect from peers that are silent too long."""
        effects = super().tick(now)
        heartbeats, silent = self.links.tick(now)
        lost = [effect for peer, reason in silent for effect in self.lost_link(peer, reason)]
        return [*effects, *heartbeats, *lost]

    # --- a round ----------------------------------------------------------------------------------

    def _turn(self, message: say.Message) -> list[Effect]:
        match message:
            case say.Group():
                return self._regroup(message)
            case say.Fetch() if self.phase is Phase.GREETED:
                return self._asked_back(message)
            case say.Fetch():
                self._require_step(message.step)
                return [do.Send(self._peer, say.State(step=self.step))]
            case say.Commit():
                effects = super()._turn(message)
                self._made = message.step
                return effects
            case _:
                return super()._turn(message)

    def _asked_back(self, fetch: say.Fetch) -> list[Effect]:
        """Answer a coordinator that has lost every worker: send the state if it is still here.

        If the step was applied before the connection broke, report that first.
        """
        if self._holds_state and fetch.step == self.step:
            return [do.Send(self._peer, say.State(step=self.step))]
        if self._holds_state and fetch.step == self._made:
            return [do.Send(self._peer, say.Applied(step=fetch.step))]
        reason = f"holds no state before step {fetch.step}"
        return [do.Send(self._peer, say.Leave(reason=reason)), *self._drop(reason)]

    def broken(self, reason: str) -> list[Effect]:
        """Return the effects that end the connection after malformed bytes.

        These bytes may have overwritten the state.
        """
        self._holds_state = False
        return super().broken(reason)

    def _enter(self, welcome: say.Welcome) -> list[Effect]:
        effects = super()._enter(welcome)
        self._holds_state, self._made = True, None
        return effects

    def _regroup(self, group: say.Group) -> list[Effect]:
        self._require_step(group.step)
        if self.rank not in group.ranks or len(group.ranks) != len(group.addresses):
            raise ProtocolError(f"Group ranks={group.ranks}: this worker or an address is missing")
        self._group, self._holders = group, group.holders
        others = dict(zip(group.ranks, group.addresses, strict=True))
        own = self.rank
        del others[own]
        return [*self.links.group(own, others), *self._start_round()]

    def _begin(self, step: int) -> list[Effect]:
        super()._begin(step)
        self._own.clear()
        if self._group is None:
            return []
        return self._start_round()

    def _start_round(self) -> list[Effect]:
        """Begin a round of this step with only the tree nodes that this worker has computed."""
        group = self._group
        assert group is not None
        self.phase = Phase.COMPUTING if self._work else Phase.READY
        self._held.clear()
        own = [block for block in range(self._num_blocks) if self._owner(block) == self.rank]
        self._missing = {block: set(range(len(self._holders))) for block in own}
        self._num_postponed = 0
        return [do.Regroup(group.round), *self._send(self._own), do.Again()]

    def _deliver(self, nodes: Sequence[say.TreeNode]) -> list[Effect]:
        self._own += nodes
        return [] if self._group is None else self._send(nodes)

    def _send(self, nodes: Sequence[say.TreeNode]) -> list[Effect]:
        """Send each node to the owner of its block."""
        assert self._group is not None
        assert self.rank is not None
        effects: list[Effect] = []
        for node in nodes:
            message = replace(node, round=self._group.round)
            owner = self._owner(node.block)
            if owner == self.rank:
                effects += [do.Contribute(message), *self._count(owner, message)]
            else:
                effects += self.links.say(owner, message)
        return effects

    def _spread(self, average: say.Average) -> list[Effect]:
        assert self._group is not None
        others = [rank for rank in self._group.ranks if rank != self.rank]
        return [effect for rank in others for effect in self.links.say(rank, average)]

    def _owner(self, block: int) -> int:
        assert self._group is not None
        return self._group.ranks[block % len(self._group.ranks)]

    def _exchanged(self, peer: Peer, rank: int, message: say.Message) -> list[Effect]:
        if not isinstance(message, self.parts):
            raise ProtocolError(f"{type(message).__name__} from another worker")
        assert isinstance(message, say.TreeNode | say.Partial | say.Average)
        group = self._group
        if group is None or message.round > group.round or message.step > self.step:
            return self._postpone(peer)
        # A step ends only after all its messages, so a message of an earlier step is illegal now.
        if message.round < group.round and message.step == self.step:
            return []  # was sent before the round ended
        self._require_step(message.step)
        if rank not in self.links.addresses or message.block >= self._num_blocks:
            raise ProtocolError(f"{type(message).__name__} block={message.block} of rank {rank}")
        return self._part(peer, rank, message)

    def _part(self, peer: Peer, rank: int, message: Exchanged) -> list[Effect]:
        if isinstance(message, say.TreeNode):
            return [do.Keep(rank, message), *self._count(rank, message)]
        if self._owner(message.block) != rank or message.block in self._held:
            raise ProtocolError(f"Average block={message.block}: not due from rank {rank}")
        return [do.Hold(self.step, message.block), *self._has(message.block)]

    def _postpone(self, peer: Peer) -> list[Effect]:
        """Postpone an early message.

        Raises ProtocolError if there are more such messages than a round can have.
        """
        self._num_postponed += 1
        most = self._num_blocks * (len(self._holders) + 1)
        if self._group is not None and self._num_postponed > most:
            raise ProtocolError("more early messages than a round can have")
        return [do.Postpone(peer)]

    def _count(self, rank: int, node: say.TreeNode) -> list[Effect]:
        """Count a node of an owned block; average the block when all shards have arrived."""
        under = reduction.shards_under(node.level, node.index, len(self._holders))
        missing = self._missing.get(node.block, set())
        theirs = all(self._holders[shard] == rank for shard in under)
        if not under or not theirs or not missing.issuperset(under):
            raise ProtocolError(
                f"TreeNode block={node.block} level={node.level} index={node.index}: not due from "
                f"rank {rank}"
            )
        missing.difference_update(under)
        if missing:
            return []
        del self._missing[node.block]
        return [do.Reduce(self.step, node.block)]

    def _has(self, block: int) -> list[Effect]:
        """Record that `block` of the average is here; after the last one report Staged."""
        self._held.add(block)
        if len(self._held) < self._num_blocks:
            return []
        assert self._group is not None
        self.phase = Phase.STAGED
        return [do.Send(self._peer, say.Staged(step=self.step, round=self._group.round))]

    def _complain(self, rank: int, reason: str) -> list[Effect]:
        if self._group is None or self.phase not in IN_A_ROUND:
            return []
        complaint = say.Unreachable(round=self._group.round, rank=rank, reason=say.brief(reason))
        return [do.Send(self._peer, complaint)]

    # --- the end of a connection ------------------------------------------------------------------

    def _drop(self, reason: str) -> list[Effect]:
        self._group = None
        return [*super()._drop(reason), *self.links.close()]

    def _end(self, finish: do.Finish) -> list[Effect]:
        self._group = None
        return [*self.links.close(), *super()._end(finish)]


# A worker of a ring: each block is summed on its way around the ring, then its average is passed
# around.
#
# This is the classic ring all-reduce, coordinated as in a mesh. Each of N workers sends 2 (N - 1) /
# N times the size of the vector to the next one. Sums are added in ring order, so every worker and
# every run gets the same bits. A different number of workers rounds differently.


class RingWorker(MeshWorker):
    """The state machine of a ring's worker.

    The next worker has the next rank of the group, cyclically.
    """

    parts: tuple[type[Message], ...] = (Partial, Average)
    _is_computed = False  # whether all of this worker's shards are computed
    _combined: frozenset[int] = frozenset()  # blocks to which this worker added its part

    def combined(self, step: int, block: int, loss: float, weight: float) -> list[Effect]:
        """Return the effects of a new sum: average an owned block, or pass the sum on."""
        assert self._group is not None
        if self._owner(block) == self.rank:
            return [do.Reduce(step, block)]
        hops = self._hops(block)
        partial = Partial(
            step=step, round=self._group.round, block=block, hops=hops, loss=loss, weight=weight
        )
        return self.links.say(self._neighbour(1), partial)

    def _start_round(self) -> list[Effect]:
        self._is_computed, self._combined = False, frozenset()
        return super()._start_round()

    def _send(self, nodes: Sequence[TreeNode]) -> list[Effect]:
        """Start the blocks that begin at this worker, when all of its shards are computed."""
        under = [
            reduction.shards_under(node.level, node.index, len(self._holders)) for node in self._own
        ]
        computed = {shard for shards in under for shard in shards}
        mine = {shard for shard, rank in enumerate(self._holders) if rank == self.rank}
        if self._is_computed or computed != mine:
            return []
        self._is_computed = True
        first = [block for block in reversed(range(self._num_blocks)) if not self._hops(block)]
        return [*(effect for block in first for effect in self._combine(block)), do.Again()]

    def _part(self, peer: Peer, rank: int, message: Exchanged) -> list[Effect]:
        if rank != self._neighbour(-1):
            raise ProtocolError(
                f"{type(message).__name__} of rank {rank}: not the predecessor in the ring"
            )
        block = message.block
        if isinstance(message, Average):
            if block in self._held or self._owner(block) == self.rank:
                raise ProtocolError(f"Average block={block}: it was already received")
            return [do.Hold(self.step, block), *self._spread(message), *self._has(block)]
        assert isinstance(message, Partial)
        if not self._is_computed:
            return self._postpone(peer)
        if message.hops + 1 != self._hops(block) or block in self._combined:
            raise ProtocolError(f"Partial block={block} hops={message.hops}: not due here")
        return self._combine(block)

    def _combine(self, block: int) -> list[Effect]:
        self._combined |= {block}
        return [do.Combine(self.step, block)]

    def _spread(self, average: Average) -> list[Effect]:
        following = self._neighbour(1)
        return [] if following == self._owner(average.block) else self.links.say(following, average)

    def _hops(self, block: int) -> int:
        """Return how many workers add to `block` before this worker; the owner adds last."""
        assert self._group is not None
        ranks = self._group.ranks
        return (self._place() - block - 1) % len(ranks)

    def _neighbour(self, places: int) -> int:
        assert self._group is not None
        ranks = self._group.ranks
        return ranks[(self._place() + places) % len(ranks)]

    def _place(self) -> int:
        assert self._group is not None
        assert self.rank is not None
        return self._group.ranks.index(self.rank)
