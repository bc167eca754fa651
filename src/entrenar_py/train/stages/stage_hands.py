"""The work of a pipeline's worker before and after it knows which stage is its own."""

from __future__ import annotations

from collections.abc import Callable

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.stages.cut import Cut
from entrenar_py.train.stages.member import StageMember
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.frames import Buffer, new_room
from entrenar_py.train.wire.messages import (
    Activation,
    ActivationGradient,
    Average,
    Message,
    NonFinite,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.train.wire.pipeline_peers import Passed

_OPTIMIZER = "sgd"  # of workers, whose steps are the coordinator's


class StageHands:
    """Loads the stage that the coordinator gives this worker, by `make`, and then works in it.

    `hidden_bytes` is the most that hidden states of one shard have.
    """

    def __init__(self, cut: Cut, make: Callable[[int], StageMember], *, hidden_bytes: int) -> None:
        self._cut, self._make, self._hidden_bytes = cut, make, hidden_bytes
        self._members: dict[int, StageMember] = {}  # stage -> its work; at most one
        self._taken: tuple[Welcome, Buffer] | None = None
        self._is_loaded = False

    @property
    def member(self) -> StageMember:
        """The work of the stage that is loaded."""
        return next(iter(self._members.values()))

    @property
    def exchange(self) -> None:
        """Gradients are added nowhere but at the coordinator."""
        raise AssertionError("workers of a pipeline send each other no nodes")

    def sizes(self) -> dict[type[Message], int]:
        """Return the largest payload, in bytes, that a message of each kind may have."""
        states = [checkpoint.state_bytes(specs, _OPTIMIZER) for specs in self._cut.specs]
        return {
            Welcome: max(states),
            Weights: self._cut.blocks.num_bytes_max,
            Activation: self._hidden_bytes,
            ActivationGradient: self._hidden_bytes,
        }

    def room(self, message: Message, num_bytes: int) -> memoryview:
        """Return memory for the payload of `message`."""
        if self._is_loaded:
            return self.member.room(message, num_bytes)
        return new_room(message, num_bytes)

    def require(self, message: Message, payload: Buffer) -> None:
        """Raise ProtocolError unless `message` is possible here and its payload is complete."""
        if isinstance(message, Welcome):
            if message.rank >= self._cut.places.num_ranks:
                raise ProtocolError(f"Welcome rank={message.rank}: there is no such place")
            specs = self._cut.specs[self._cut.stage_of_rank(message.rank)]
            due = checkpoint.state_bytes(specs, _OPTIMIZER)
            if len(payload) != due or message.blocks != self._cut.blocks.count:
                raise ProtocolError(
                    f"Welcome with {len(payload)} bytes, blocks={message.blocks}: expected {due} "
                    f"and {self._cut.blocks.count}"
                )
        elif self._is_loaded:
            self.member.require(message, payload)
        elif len(payload):
            raise ProtocolError(f"{type(message).__name__} before the stage is loaded")

    def take(self, welcome: Welcome, payload: Buffer) -> None:
        """Keep a state until `load_taken`."""
        self._taken, self._is_loaded = (welcome, payload), False

    def load_taken(self) -> None:
        """Load the stage, unless it is here already, and take over its state; in any thread.

        The connection may end meanwhile, and another one bring the next state.
        """
        taken, self._taken = self._taken, None
        if taken is None:
            return  # an earlier call has loaded the state that this one was for
        welcome, payload = taken
        stage = self._cut.stage_of_rank(welcome.rank)
        if stage not in self._members:
            self._members.clear()
            self._members[stage] = self._make(stage)
        self.member.load(welcome, payload)
        self._is_loaded = self._taken is None

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        """Raise AssertionError: a stage is loaded by `take` and `load_taken`."""
        raise AssertionError("a stage is loaded in the background")

    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite:
        """Raise AssertionError: a stage's work is passes."""
        raise AssertionError(f"shards {shards} of step {step} pass through stages one by one")

    def receive(self, message: Message, payload: Buffer) -> None:
        """Keep a tensor from another stage."""
        self.member.receive(message, payload)

    def bind(self, asked: do.Pass) -> None:
        """Note that the pass `asked` is of the present round."""
        self.member.bind(asked)

    def run(self, asked: do.Pass) -> Passed | NonFinite:
        """Make the pass `asked`, in any thread."""
        return self.member.run(asked)

    def regroup(self, number: int) -> None:
        """Begin round `number`, or go on in it with the next step."""
        self.member.regroup(number)

    def hold(self, message: Average | Weights, payload: Buffer) -> None:
        """Keep a block of new weights until its step is made."""
        self.member.hold(message, payload)

    def make_held(self, step: int) -> None:
        """Make `step` with the new weights that arrived."""
        self.member.make_held(step)

    def payload(self, message: Message) -> Buffer:
        """Return the payload of `message`."""
        return self.member.payload(message) if self._is_loaded else b""
