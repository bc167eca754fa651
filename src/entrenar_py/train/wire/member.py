"""One connection as the coordinator sees it: its phase, and the shards it has to deliver."""

from __future__ import annotations

from dataclasses import dataclass, field

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire.messages import Challenge, Computed, NonFinite, Summed, TreeNode
from entrenar_py.train.wire.phases import PeerPhase as Phase


@dataclass(slots=True)
class Member:
    """One connection. `rank` is None until the worker is admitted.

    A worker delivers its assignments in order: for each a Computed, then the tree nodes of its
    shards, from the last block to the first. `delivered` has those delivered shards that are void
    if the worker leaves: in a mesh all, in a star those that came while an audit was open.
    """

    challenge: Challenge
    phase: Phase
    heard: float
    said: float  # when the last heartbeat was sent to it
    welcomed: float = 0.0  # when the state was sent to it
    rank: int | None = None
    proof: str = ""  # the coordinator's, for its Welcome
    assigned: list[tuple[int, ...]] = field(default_factory=list)  # not completely delivered
    delivering: bool = False  # whether the Computed of the first assignment came
    covered: dict[int, set[int]] = field(default_factory=dict)  # block -> shards of it that came
    delivered: list[int] = field(default_factory=list)
    host: str = ""
    backend: str = ""
    address: str = ""  # where other workers of a mesh connect to it
    num_computing: int = 0  # assignments whose Computed has not come
    working_since: float = 0.0  # when it began the first of these

    def to_send(self) -> tuple[int, ...]:
        """Return the shards that others get if the worker leaves: `delivered` and `assigned`."""
        return (*self.delivered, *(shard for shards in self.assigned for shard in shards))

    def in_rank(self) -> int:
        """Return the rank of an admitted worker."""
        assert self.rank is not None
        return self.rank

    def begin_work(self, now: float) -> None:
        """Note that it gets one more assignment."""
        if not self.num_computing:
            self.working_since = now
        self.num_computing += 1

    def end_work(self, now: float) -> float:
        """Note that it has computed an assignment; return the seconds that this took."""
        seconds, self.working_since = now - self.working_since, now
        self.num_computing -= 1
        return seconds

    # --- a delivery -------------------------------------------------------------------------------

    def require_assigned(self, computed: Computed | Summed) -> None:
        """Raise ProtocolError unless `computed` is for the first assignment, and not repeated."""
        if [computed.shards] != self.assigned[:1] or self.delivering:
            raise ProtocolError(
                f"{type(computed).__name__} shards={computed.shards}: not the next assignment, or "
                "already reported"
            )

    def begin_delivery(self, computed: Computed | Summed) -> None:
        """Begin the delivery that `computed` announces; ProtocolError if it is out of turn."""
        self.require_assigned(computed)
        self.delivering = True

    def take(self, node: TreeNode, under: range, blocks: range) -> None:
        """Count a node with the shards `under` it as delivered; ProtocolError if it is out of turn.

        The last one of `blocks` must come first, and the first one last, which completes the
        delivery.
        """
        block = node.block
        if block != blocks[-1] and not self.is_whole(block + 1):
            raise ProtocolError(f"TreeNode block={block}: it comes when block {block + 1} is whole")
        came = self.covered.setdefault(block, set())
        # A node may not reach into the next one: an assignment counts, or is void, as a whole.
        due = set(self.assigned[0]) - came if self.delivering else set[int]()
        if not under or not due.issuperset(under):
            raise ProtocolError(
                f"TreeNode block={block} level={node.level} index={node.index}: "
                "its shards were not assigned, or came before"
            )
        came.update(under)

    def is_whole(self, block: int) -> bool:
        """Return whether `block` has come for every shard of the first assignment."""
        return len(self.covered.get(block, ())) == len(self.assigned[0])

    def start_over(self) -> None:
        """Forget the assignments, and what was delivered of them."""
        self.assigned.clear()
        self.delivered.clear()
        self.covered.clear()
        self.delivering, self.num_computing = False, 0
        self.phase = Phase.READY

    def end_delivery(self) -> tuple[int, ...]:
        """Remove the first assignment, which is completely delivered, and return its shards."""
        shards = self.assigned.pop(0)
        self.covered.clear()
        self.delivering = False
        if not self.assigned:
            self.phase = Phase.READY
        return shards

    def why_it_halts(self, report: NonFinite) -> str:
        """Return the reason for the halt; ProtocolError if its shard was not assigned."""
        if report.shard not in self.assigned[0]:
            raise ProtocolError(f"NonFinite shard={report.shard}: it was not assigned")
        what = f"loss {report.loss}"
        if report.tensor is not None:
            what = f"gradient {report.tensor}[{report.element}]"
        place = f"worker {self.in_rank()}, step {report.step}, shard {report.shard}"
        return f"non-finite {what} on {place}: training halted before any update"
