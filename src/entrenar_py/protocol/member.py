"""One connection as the coordinator sees it: where it stands, and what it has to deliver."""

from __future__ import annotations

from dataclasses import dataclass, field

from entrenar_py.errors import ProtocolError
from entrenar_py.protocol.messages import Challenge, Computed, NonFinite, TreeNode
from entrenar_py.protocol.phases import PeerPhase as Phase


@dataclass(slots=True)
class Member:
    """One connection. `rank` is known once it was let in.

    It delivers what it was assigned, first Computed, then the blocks of the shards' nodes from the
    last to the first. What was `delivered` goes with it in a mesh, where others have it and reach
    it at `address`, and while a shard of the step is audited.
    """

    challenge: Challenge
    phase: Phase
    heard: float
    said: float  # when it was last told that we live
    welcomed: float = 0.0  # when the state was sent to it
    rank: int | None = None
    proof: str = ""  # ours, for its welcome
    assigned: list[tuple[int, ...]] = field(default_factory=list)  # and not wholly delivered
    delivering: bool = False  # the first of them: its Computed came
    covered: dict[int, set[int]] = field(default_factory=dict)  # block -> shards of it that came
    delivered: list[int] = field(default_factory=list)
    host: str = ""
    backend: str = ""
    address: str = ""

    def to_send(self) -> tuple[int, ...]:
        """The shards of the step in work whose nodes it has or will have."""
        return (*self.delivered, *(shard for shards in self.assigned for shard in shards))

    def in_rank(self) -> int:
        """The rank of one that was let in."""
        assert self.rank is not None
        return self.rank

    # --- a delivery -------------------------------------------------------------------------------

    def require_assigned(self, said: Computed) -> None:
        """Returns if `said` begins the delivery that is due; ProtocolError if not."""
        if said.shards != self.assigned[0] or self.delivering:
            raise ProtocolError(f"Computed shards={said.shards}: not assigned, or said before")

    def begin_delivery(self, said: Computed) -> None:
        """The nodes of what it computed follow; ProtocolError if they are not due."""
        self.require_assigned(said)
        self.delivering = True

    def take(self, node: TreeNode, under: range, num_blocks: int) -> None:
        """Counts a node with the shards `under` it; ProtocolError if it is not its turn, or due.

        The last block goes first: so nobody owes any more when all are averaged.
        """
        block = node.block
        if block != num_blocks - 1 and not self.is_whole(block + 1):
            raise ProtocolError(f"TreeNode block={block}: it comes when block {block + 1} is whole")
        came = self.covered.setdefault(block, set())
        # Of the first delivery that is open: what is lost with a worker is whole deliveries.
        owed = set(self.assigned[0]) - came if self.delivering else set[int]()
        if not under or not owed.issuperset(under):
            raise ProtocolError(
                f"TreeNode block={block} level={node.level} index={node.index}: "
                "its shards are not all owed"
            )
        came.update(under)

    def is_whole(self, block: int) -> bool:
        """Return whether all of `block` of its first delivery came."""
        return len(self.covered.get(block, ())) == len(self.assigned[0])

    def end_delivery(self) -> tuple[int, ...]:
        """The first delivery is whole; its shards."""
        shards = self.assigned.pop(0)
        self.covered.clear()
        self.delivering = False
        if not self.assigned:
            self.phase = Phase.READY
        return shards

    def why_it_halts(self, said: NonFinite) -> str:
        """The reason for everyone; ProtocolError if the shard is not one that it was assigned."""
        if said.shard not in self.assigned[0]:
            raise ProtocolError(f"NonFinite shard={said.shard}: it was not assigned")
        what = f"loss {said.loss}"
        if said.tensor is not None:
            what = f"gradient {said.tensor}[{said.element}]"
        return (
            f"non-finite {what} on worker {self.in_rank()}, step {said.step}, shard {said.shard}: "
            "training halted before any update"
        )
