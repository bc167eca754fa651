"""A mesh worker's end without a network: its hands carry out its machine's effects."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.frames import FROM_COORDINATOR, Buffer, Encoder
from entrenar_py.train.wire.messages import (
    VERSION,
    Assign,
    Average,
    Challenge,
    Group,
    Heartbeat,
    Hello,
    Message,
    TreeNode,
    Welcome,
)
from entrenar_py.train.wire_io.peer_ends import MeshEnd
from entrenar_py.train.wire_io.simulation import feed
from tests.train.wire_io.fakes import SECRET, TERMS, AtOnce
from tests.train.wire_io.mesh_fakes import FakeMeshMember, mesh_worker_of

NONCE = "0" * 32
CONTENT = b"content"
# Worker 1 averages the second of three blocks; shard 0 is with worker 0, which connects.
GROUP = Group(step=0, round=1, holders=(0, 1), ranks=(0, 1), addresses=("a:0", "b:1"))


def node(block: int = 1, round_: int = 1) -> TreeNode:
    """Return a node that worker 0 sends for a block of worker 1."""
    return TreeNode(step=0, round=round_, block=block, level=0, index=0, loss=1.0, weight=1.0)


class Recording(FakeMeshMember):
    """Hands that also record the calls in order."""

    def __init__(self) -> None:
        super().__init__(CONTENT)
        self.told: list[str] = []

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        super().keep(rank, message, payload)
        assert isinstance(message, TreeNode)
        self.told.append(f"keep block {message.block} of {rank} in round {message.round}")

    def contribute(self, node: TreeNode) -> None:
        self.told.append(f"contribute block {node.block}")

    def reduce(self, block: int) -> tuple[float, float] | None:
        self.told.append(f"reduce {block}")
        return super().reduce(block)

    def regroup(self, number: int) -> None:
        super().regroup(number)
        self.told.append("regroup")

    def require(self, message: Message, payload: Buffer) -> None:
        super().require(message, payload)
        if isinstance(message, TreeNode) and message.block == 7:
            raise ProtocolError("block=7: the hands refuse it")


class Bench:
    """The end of worker 1; `say` sends as the coordinator, `say_from` as worker 0."""

    def __init__(self, hands: Recording | None = None) -> None:
        self.hands = hands or Recording()
        self.said: list[tuple[Peer, Message]] = []
        self.closed: dict[Peer, str] = {}
        self.asked: list[do.Compute] = []
        self.dialed: list[do.Dial] = []
        machine = mesh_worker_of(1, port=1)
        self.end = MeshEnd(
            machine, self.hands, self, self._clock, self.asked.append, self.dialed.append, AtOnce()
        )
        self._down = Encoder(direction=FROM_COORDINATOR)
        self._encoders: dict[Peer, Encoder] = {}
        self._enter()

    def _clock(self) -> float:
        return 0.0  # time stands still

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        assert b"".join(buffers)
        self.said.append((peer, message))

    def close(self, peer: Peer, reason: str) -> None:
        self.closed[peer] = reason

    def say(self, message: Message, payload: bytes = b"") -> None:
        """Receive a message of the coordinator."""
        for data in self._down.encode(message, payload):
            feed(self.end, "coordinator", bytes(data))

    def say_from(self, peer: str, message: Message, payload: bytes = b"") -> None:
        """Receive a message of another worker."""
        self.feed_from(peer, b"".join(map(bytes, self._encoders[peer].encode(message, payload))))

    def feed_from(self, peer: str, data: bytes) -> None:
        """Receive bytes of another worker."""
        feed(self.end, peer, data)

    def link(self, peer: str) -> None:
        """Connect worker 0, and do the handshake."""
        self.end.accepted(peer, NONCE)
        challenge = Challenge(version=VERSION, nonce=NONCE)
        hello = _hello(0)
        proof = terms.proof_of_worker(SECRET, challenge, hello)
        self._encoders[peer] = Encoder()
        self.say_from(peer, _hello(0, proof))
        self._encoders[peer].key = terms.session_key(SECRET, challenge, hello)

    def _enter(self) -> None:
        self.end.connected("coordinator", NONCE)
        challenge = Challenge(version=VERSION, nonce=NONCE)
        self.say(challenge)
        (_, hello) = self.said[0]
        assert isinstance(hello, Hello)
        self._down.key = terms.session_key(SECRET, challenge, hello)
        proof = terms.proof_of_coordinator(SECRET, challenge, hello)
        self.say(Welcome(rank=1, step=0, blocks=3, resumed=False, proof=proof), CONTENT)


def _hello(rank: int, proof: str = "0" * 64) -> Hello:
    return Hello(
        version=VERSION,
        run=TERMS.run,
        manifest=TERMS.manifest,
        data=TERMS.data,
        backend="cpu",
        rank=rank,
        port=None,
        nonce=NONCE,
        proof=proof,
    )


def test_what_comes_of_another_worker_is_kept() -> None:
    """With its payload; a complete block is averaged and sent to the others."""
    bench = Bench()
    bench.link("in")
    bench.say(GROUP)
    bench.say_from("in", node(), CONTENT)
    bench.say(Assign(step=0, shards=(1,)))
    bench.end.computed(bench.asked[0], [_own(block) for block in (2, 1, 0)])
    assert bench.hands.told == [
        "regroup",
        "keep block 1 of 0 in round 1",
        "contribute block 1",
        "reduce 1",
    ]
    average = Average(step=0, round=1, block=1, loss=1.0, weight=1.0)
    assert ("in", average) in bench.said
    bench.say_from("in", Average(step=0, round=1, block=2, loss=1.0, weight=1.0), CONTENT)
    assert bench.hands.held == [1, 2]


def test_what_is_early_is_told_again() -> None:
    """A postponed message is delivered once, with its payload, in its round."""
    bench = Bench()
    bench.link("in")
    bench.say_from("in", node(), CONTENT)
    bench.say_from("in", node(round_=2), CONTENT)
    assert bench.hands.told == []
    bench.say(GROUP)
    assert bench.hands.told == ["regroup", "keep block 1 of 0 in round 1"]
    second = Group(step=0, round=2, holders=(0, 1), ranks=(0, 1), addresses=("a:0", "b:1"))
    bench.say(second)
    assert bench.hands.told[2:] == ["regroup", "keep block 1 of 0 in round 2"]


def test_what_is_early_of_a_link_that_is_lost_is_void() -> None:
    """Postponed messages of a lost link are dropped."""
    bench = Bench()
    bench.link("in")
    bench.say_from("in", node(), CONTENT)
    bench.end.lost("in", "cut")
    bench.say(GROUP)
    assert bench.hands.told == ["regroup"]


@pytest.mark.parametrize(
    ("message", "payload", "reason"),
    [
        (node(), CONTENT + b"!", "TreeNode with a payload of 8 bytes: 7 are allowed now"),
        (node(), b"", "TreeNode with 0 bytes: 7 are due"),
        (node(block=7), CONTENT, "block=7: the hands refuse it"),
        (Welcome(rank=0, step=0, blocks=1, resumed=False, proof="0" * 64), CONTENT, "Welcome from"),
    ],
)
def test_what_makes_no_sense_ends_that_link_alone(
    message: Message, payload: bytes, reason: str
) -> None:
    """The coordinator gets a complaint; the link reads nothing more."""
    bench = Bench()
    bench.link("in")
    bench.say(GROUP)
    bench.say_from("in", message, payload)
    assert reason in bench.closed.pop("in")
    assert bench.closed == {}
    assert bench.end.buffer("in") is None
    assert type(bench.said[-1][1]).__name__ == "Unreachable"
    bench.say(Heartbeat())
    assert bench.end.finished is None


def test_damaged_bytes_end_that_link_alone() -> None:
    """A link without a proof ends, too, but without a complaint."""
    bench = Bench()
    bench.end.accepted("stranger", NONCE)
    bench.feed_from("stranger", b"GET / HTTP/1.1\r\n" * 3)
    assert "magic=b'GET '" in bench.closed["stranger"]
    assert [type(one).__name__ for peer, one in bench.said if peer == "stranger"] == ["Challenge"]
    bench.end.lost("stranger", "gone")
    assert list(bench.closed) == ["stranger"]


def test_an_average_that_is_not_finite_is_told() -> None:
    """The coordinator gets a report, and no other worker the average."""

    class Overflowing(Recording):
        def reduce(self, block: int) -> tuple[float, float] | None:
            return None

    bench = Bench(Overflowing())
    bench.link("in")
    bench.say(GROUP)
    bench.say(Assign(step=0, shards=(1,)))
    bench.end.computed(bench.asked[0], [_own(block) for block in (2, 1, 0)])
    bench.say_from("in", node(), CONTENT)
    assert type(bench.said[-1][1]).__name__ == "Overflow"
    assert not any(isinstance(message, Average) for _, message in bench.said)


def _own(block: int) -> TreeNode:
    return TreeNode(step=0, round=0, block=block, level=0, index=1, loss=1.0, weight=1.0)
