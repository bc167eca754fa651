"""Hands of coordinator and workers for the simulator: linear stages, in real arithmetic.

All report to a `Witness`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.arithmetic import reduction
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.frames import Buffer, new_room
from entrenar_py.train.wire.messages import (
    Activation,
    ActivationGradient,
    Message,
    NonFinite,
    Piece,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.train.wire.pipeline_peers import Passed
from entrenar_py.train.wire_io.endpoints import Saving
from tests.train.stages.linear import (
    CUTS,
    ROWS,
    STAGE,
    WIDTH,
    Array,
    Plan,
    backward,
    forward,
    initial,
    loss_of,
    moved,
    samples,
)
from tests.train.stages.witness import Witness


class LinearServer:
    """The coordinator's hands: all weights and the optimizer's state."""

    def __init__(self, plan: Plan, witness: Witness) -> None:
        self.plan, self.witness = plan, witness
        self.weights = initial(len(plan.ranks))
        self.velocity = [np.zeros(STAGE, np.float32) for _ in self.weights]
        self.step = 0  # the weights are those before it
        self.saved: tuple[int, list[Array], list[Array]] = 0, self.weights, self.velocity
        self.stopped: do.Stop | None = None
        self._nodes: dict[int, list[reduction.Node]] = {}
        self._sums: dict[int, Array] = {}
        self._next: tuple[list[Array], list[Array]] | None = None

    def restored(self) -> LinearServer:
        """Return the hands of a new process that goes on from the checkpoint."""
        server = LinearServer(self.plan, self.witness)
        server.saved = self.saved
        server.step, server.weights, server.velocity = self.saved
        return server

    def sizes(self) -> Mapping[type[Message], int]:
        return {TreeNode: 4 * CUTS[0].stop}

    def room(self, message: Message, num_bytes: int) -> memoryview:
        return new_room(message, num_bytes)

    def require(self, rank: int, message: Message, payload: Buffer) -> None:
        if isinstance(message, TreeNode):
            part = CUTS[message.block % len(CUTS)]
            if len(payload) != 4 * (part.stop - part.start):
                raise ProtocolError(f"TreeNode with {len(payload)} bytes")
        self.witness.heard(rank, message)

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        if isinstance(message, TreeNode):
            self.witness.summed(message)
            vector = np.frombuffer(bytes(payload), np.float32)
            node = reduction.Node(message.level, message.index, vector, message.loss, 1.0)
            self._nodes.setdefault(message.block, []).append(node)

    def deliver(self, rank: int) -> None:
        """All that is kept counts, or is forgotten at once."""

    def copy(self, rank: int, message: Message, payload: Buffer) -> None:
        raise AssertionError("a pipeline has no audits")

    def end_copy(self, rank: int, shard: int) -> None:
        raise AssertionError("a pipeline has no audits")

    def compare(self, shard: int) -> Callable[[], tuple[list[int], list[int]]]:
        raise AssertionError("a pipeline has no audits")

    def conclude(self, effect: do.Conclude) -> None:
        raise AssertionError("a pipeline has no audits")

    def piece(self, piece: Piece) -> bytes | str:
        raise AssertionError("there are no files")

    def payload(self, message: Message) -> Buffer:
        if isinstance(message, Welcome):
            assert message.step == self.step, "the state is that before the step"
            return self.weights[self.plan.places.stage_of(message.rank)].tobytes()
        if isinstance(message, Weights):
            assert self._next is not None, "it was prepared"
            stage, part = divmod(message.block, len(CUTS))
            return self._next[0][stage][CUTS[part]].tobytes()
        return b""

    def joined(self, effect: do.Joined) -> None:
        """The coordinator's machine knows."""

    def left(self, effect: do.Left) -> None:
        """What it delivered is void with the step."""

    def gather(self, step: int) -> None:
        assert step == self.step, f"step {step} is next, and the weights are before {self.step}"
        self._nodes.clear()
        self._sums.clear()
        self._next = None

    def complete(self, block: int) -> None:
        assert block not in self._sums, "a block is whole once"

    def reduce(self, block: int) -> tuple[float, float] | str:
        self._sums[block] = reduction.root(self._nodes[block], self.plan.num_shards).vector
        return 1.0, 1.0

    def prepare(self, step: int) -> tuple[float, float]:
        whole = [
            np.concatenate([self._sums[block] for block in blocks])
            for blocks in self.plan.places.blocks
        ]
        self._next = moved(self.weights, self.velocity, whole)
        return 1.0, 1.0

    def apply_average(self, step: int) -> None:
        assert self._next is not None, "it was prepared"
        self.witness.stepped(step)
        self.weights, self.velocity = self._next
        self.step = step + 1

    def save(self, step: int) -> Saving:
        assert step == self.step, "what is saved is the state before the step"
        self.saved = step, self.weights, self.velocity
        return lambda: lambda: None

    def stop(self, effect: do.Stop) -> None:
        self.stopped = effect


class LinearStage:
    """A worker's hands: the weights of one stage, and the tensors of one round."""

    def __init__(self, plan: Plan, witness: Witness) -> None:
        self.plan, self.witness = plan, witness
        self.stage = -1
        self.weights = np.zeros(STAGE, np.float32)
        self.made: list[int] = []
        self.not_finite: tuple[int, int] | None = None  # the step and shard that will not be
        self._taken: tuple[Welcome, bytes] | None = None
        self._round = 0
        self._bound: dict[do.Pass, int] = {}
        self._came: dict[tuple[int, bool], tuple[Array, int]] = {}
        self._kept: dict[int, tuple[Array, int]] = {}
        self._nodes: list[reduction.Node] = []
        self._out: dict[tuple[type[Message], int], bytes] = {}
        self._held: dict[int, bytes] = {}

    @property
    def exchange(self) -> Any:
        raise AssertionError("workers of a pipeline send each other no nodes")

    def sizes(self) -> Mapping[type[Message], int]:
        hidden = 4 * ROWS * WIDTH
        return {
            Welcome: 4 * STAGE,
            Weights: 4 * CUTS[0].stop,
            Activation: hidden,
            ActivationGradient: hidden,
        }

    def room(self, message: Message, num_bytes: int) -> memoryview:
        return new_room(message, num_bytes)

    def require(self, message: Message, payload: Buffer) -> None:
        if isinstance(message, Weights):
            part = CUTS[message.block % len(CUTS)]
            if len(payload) != 4 * (part.stop - part.start):
                raise ProtocolError(f"Weights with {len(payload)} bytes")
        elif len(payload) != self.sizes().get(type(message), 0):
            raise ProtocolError(f"{type(message).__name__} with {len(payload)} bytes")

    def take(self, welcome: Welcome, payload: Buffer) -> None:
        self._taken = welcome, bytes(payload)

    def load_taken(self) -> None:
        assert self._taken is not None, "it was welcomed"
        welcome, payload = self._taken
        self.stage = self.plan.places.stage_of(welcome.rank)
        self.weights = np.frombuffer(payload, np.float32)
        self.made = list(range(welcome.step))

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        raise AssertionError("a stage is loaded in the background")

    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite:
        raise AssertionError("a stage's work is passes")

    def regroup(self, number: int) -> None:
        self._round = number
        for kept in (self._came, self._kept, self._nodes, self._out, self._held):
            kept.clear()

    def receive(self, message: Message, payload: Buffer) -> None:
        assert isinstance(message, Activation | ActivationGradient)
        assert (message.round, message.step) == (self._round, len(self.made)), (
            f"a tensor of round {message.round} counts in {self._round}"
        )
        is_forward = isinstance(message, Activation)
        draws = message.draws if isinstance(message, Activation) else 0
        tensor = np.frombuffer(bytes(payload), np.float32).reshape(ROWS, WIDTH)
        self._came[message.shard, is_forward] = tensor, draws

    def bind(self, asked: do.Pass) -> None:
        self._bound[asked] = self._round

    def run(self, asked: do.Pass) -> Passed | NonFinite:
        if self._bound.pop(asked) != self._round:
            return Passed()
        assert asked.step == len(self.made), "a pass is of the step that is next"
        shard = asked.shard
        if self.not_finite == (asked.step, shard):
            return NonFinite(
                step=asked.step, shard=shard, tensor=None, element=None, loss=np.inf, ids=(shard,)
            )
        if asked.is_forward:
            first = samples(asked.step, shard), 0
            x, draws = first if self.stage == 0 else self._came.pop((shard, True))
            hidden = forward(self.weights, x, draws)
            if self.stage < len(self.plan.ranks) - 1:
                self._kept[shard] = x, draws
                self._out[Activation, shard] = hidden.tobytes()
                return Passed("float32", draws + 1)
            gradient, loss = hidden, loss_of(hidden)
        else:
            x, draws = self._kept.pop(shard)
            (gradient, _), loss = self._came.pop((shard, False)), 0.0
        own, back = backward(self.weights, x, draws, gradient)
        self._out[ActivationGradient, shard] = back.tobytes()
        self._add(reduction.Node(0, shard, own, loss, 1.0))
        return Passed(nodes=self._whole(asked.step)) if asked.is_last else Passed()

    def _add(self, leaf: reduction.Node) -> None:
        self._nodes = reduction.fold([*self._nodes, leaf], self.plan.num_shards)

    def _whole(self, step: int) -> list[TreeNode]:
        return [
            TreeNode(
                step=step,
                round=0,
                block=block,
                level=node.level,
                index=node.index,
                loss=node.loss,
                weight=node.weight,
            )
            for block in reversed(self.plan.places.blocks[self.stage])
            for node in self._nodes
        ]

    def hold(self, message: Any, payload: Buffer) -> None:
        assert message.step == len(self.made), "weights are those after the step that is next"
        self._held[message.block] = bytes(payload)

    def make_held(self, step: int) -> None:
        assert step == len(self.made), f"step {step} was made after {self.made}"
        parts = [self._held[block] for block in self.plan.places.blocks[self.stage]]
        self.weights = np.frombuffer(b"".join(parts), np.float32)
        self.witness.used(self.stage, step, self.weights)
        self.made.append(step)

    def payload(self, message: Message) -> Buffer:
        if isinstance(message, Activation | ActivationGradient):
            return self._out.pop((type(message), message.shard))
        if isinstance(message, TreeNode):
            (node,) = (
                one
                for one in self._nodes
                if (one.level, one.index) == (message.level, message.index)
            )
            return node.vector[CUTS[message.block % len(CUTS)]].tobytes()
        return b""
