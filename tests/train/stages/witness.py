"""What has to hold at any time of a simulated pipeline, asserted as it happens."""

from __future__ import annotations

from dataclasses import dataclass, field

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.effects import Effect
from entrenar_py.train.wire.messages import Commit, Group, Message, Staged, TreeNode
from tests.train.stages.linear import Array, Plan, alone


@dataclass
class Witness:
    """Sees what the coordinator does and what is done by hands, and asserts that it may be done.

    `made` are the steps made by the coordinator that is alive, `rounds` counts all rounds.
    """

    plan: Plan
    round: int = 0
    rounds: int = 0
    present: set[int] = field(default_factory=set)  # the ranks of the round that are still there
    staged: set[tuple[int, int, int]] = field(default_factory=set)  # rank, step, round
    committed: set[int] = field(default_factory=set)
    made: list[int] = field(default_factory=list)
    left: list[do.Left] = field(default_factory=list)

    def restarted(self, step: int) -> None:
        """Note that a new coordinator begins with `step`."""
        self.round, self.made = 0, list(range(step))
        self.staged.clear()
        self.present.clear()

    def noticed(self, effect: Effect) -> None:
        """Take an effect of the coordinator."""
        match effect:
            case do.Send(_, Group() as group):
                self.rounds += group.round != self.round
                self.round, self.present = group.round, set(group.ranks)
            case do.Left(rank):
                self.present.discard(rank)
                self.left.append(effect)
            case do.Send(_, Commit(step=step)) if step not in self.committed:
                assert self.staged.issuperset((rank, step, self.round) for rank in self.present), (
                    f"step {step} was committed, and not all had staged it"
                )
                assert not self.plan.places.empty(self.present), "a stage has nobody"
                self.committed.add(step)

    def heard(self, rank: int, message: Message) -> None:
        """Take a message that the coordinator got."""
        if isinstance(message, Staged):
            self.staged.add((rank, message.step, message.round))

    def summed(self, node: TreeNode) -> None:
        """Take a node that counts."""
        assert node.round == self.round, f"a sum of round {node.round} counts in {self.round}"

    def stepped(self, step: int) -> None:
        """Take a step that the coordinator makes."""
        assert self.made == list(range(step)), f"step {step} was made after {self.made}"
        assert step in self.committed, f"step {step} was made before it was committed"
        self.made.append(step)

    def used(self, stage: int, step: int, weights: Array) -> None:
        """Take the weights that a worker uses from now on."""
        assert step in self.committed, f"stage {stage} made step {step} before its commit"
        assert weights.tobytes() == alone(self.plan)[step][stage], "not the bits of one process"
