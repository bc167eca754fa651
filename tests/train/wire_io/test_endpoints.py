"""An end of the protocol without the network: its codecs, effects and work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.effects import Peer
from entrenar_py.train.wire.frames import (
    CHUNK_BYTES,
    FROM_COORDINATOR,
    PREFIX_BYTES,
    TO_COORDINATOR,
    Buffer,
    new_room,
)
from entrenar_py.train.wire.frames import dump_header as dump
from entrenar_py.train.wire.messages import Heartbeat, Message, NonFinite, TreeNode
from entrenar_py.train.wire.terms import Run
from entrenar_py.train.wire_io.endpoints import (
    Background,
    CoordinatorEnd,
    Count,
    Meter,
    Stream,
    WorkerEnd,
)
from tests.train.wire_io.fakes import (
    SECRET,
    TIMING,
    AtOnce,
    FakeMember,
    FakeServer,
    run_of,
    worker_of,
)

NODE = TreeNode(step=1, round=0, block=0, level=0, index=0, loss=1.0, weight=2.0)


def stream(meter: Meter, direction: int) -> Stream:
    """Return a stream that accepts payloads of any size."""
    made = Stream({TreeNode: 2**30}, new_room, direction, meter)
    made.secure(bytes(range(32)))
    return made


def told(one: Stream, message: Message, payload: bytes = b"") -> bytes:
    """Return all bytes of a message."""
    return b"".join(one.encode(message, payload))


def heard(one: Stream, data: bytes) -> None:
    """Feed `data` to the decoder, as much at a time as it takes."""
    left = memoryview(data)
    while left.nbytes:
        place = one.decoder.buffer()
        num_bytes = min(place.nbytes, left.nbytes)
        place[:num_bytes] = left[:num_bytes]
        left = left[num_bytes:]
        one.filled(num_bytes)


def test_both_ends_count_the_same() -> None:
    """For each kind: messages, payload bytes, and bytes with prefixes and headers."""
    here, there = Meter(), Meter()
    ours, theirs = stream(here, TO_COORDINATOR), stream(there, FROM_COORDINATOR)
    payload = bytes(2 * CHUNK_BYTES + 5)
    for message, carried in ((NODE, b"1234"), (Heartbeat(), b""), (NODE, payload)):
        heard(theirs, told(ours, message, carried))
    headers = 2 * len(dump(NODE))
    assert (
        here.sent
        == there.got
        == {
            "TreeNode": Count(2, len(payload) + 4, len(payload) + 4 + headers + 4 * PREFIX_BYTES),
            "Heartbeat": Count(1, 0, PREFIX_BYTES + len(dump(Heartbeat()))),
        }
    )
    assert not here.got
    assert not there.sent


def test_what_is_not_whole_counts_as_bytes_alone() -> None:
    """A broken message counts in bytes at the sender, not at the receiver."""
    here, there = Meter(), Meter()
    ours, theirs = stream(here, TO_COORDINATOR), stream(there, FROM_COORDINATOR)
    first = next(iter(ours.encode(NODE, b"1234")))
    heard(theirs, bytes(first))
    assert here.sent == {"TreeNode": Count(0, 0, PREFIX_BYTES + len(dump(NODE)))}
    assert not there.got


NONCE = "0" * 32


class Wire:
    """Keeps what is written, until `pass_on` delivers it."""

    def __init__(self) -> None:
        self.bytes = b""
        self.said: list[str] = []
        self.closed: str | None = None

    def write(self, peer: Peer, message: Message, buffers: Iterable[Buffer]) -> None:
        self.said.append(type(message).__name__)
        self.bytes += b"".join(buffers)

    def close(self, peer: Peer, reason: str) -> None:
        self.closed = reason


class Pair:
    """A coordinator and one worker, which exchange bytes when `pass_on` is called."""

    def __init__(
        self, run: Run, server: FakeServer, member: FakeMember, background: Background | None = None
    ) -> None:
        self.now = 0.0
        self.down, self.up = Wire(), Wire()
        machine = Coordinator(run, secret=SECRET, timing=TIMING, now=0.0)
        self.coordinator = CoordinatorEnd(
            machine, server, self.down, self._clock, background or AtOnce(), AtOnce()
        )
        self.worker = WorkerEnd(worker_of(0), member, self.up, self._clock, self._compute)
        self.worker.connected("up", NONCE)
        self.coordinator.connected("down", NONCE)

    def pass_on(self) -> None:
        """Deliver bytes one at a time, until neither end sends more."""
        while self.down.bytes or self.up.bytes:
            data, self.down.bytes = self.down.bytes, b""
            for byte in data:
                if (buffer := self.worker.buffer("up")) is not None:
                    buffer[0] = byte
                    self.worker.filled("up", 1)
            data, self.up.bytes = self.up.bytes, b""
            for byte in data:
                if (buffer := self.coordinator.buffer("down")) is not None:
                    buffer[0] = byte
                    self.coordinator.filled("down", 1)

    def _clock(self) -> float:
        return self.now

    def _compute(self, asked: do.Compute) -> None:
        self.worker.computed(asked, self.worker.hands.work(asked.step, asked.shards))


def _alone(**changes: Any) -> Run:
    return run_of(world_size=1, awaited={}, **changes)


@pytest.mark.parametrize("by_server", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_run_byte_by_byte(num_blocks: int, by_server: bool) -> None:
    """Both make every step, a checkpoint is requested, and both finish."""
    server, member = FakeServer(), FakeMember()
    run = _alone(num_blocks=num_blocks, saves=[2], server_updates=by_server)
    pair = Pair(run, server, member)
    pair.pass_on()
    assert server.prepared == ([0, 1, 2] if by_server else [])
    assert pair.down.said.count("Weights" if by_server else "Average") == 3 * num_blocks
    assert server.made == member.made == [0, 1, 2]
    assert server.told == ["0 joined", "saved 2"]
    assert server.reduced == [[*reversed(range(num_blocks))]] * 3 + [[]]
    assert pair.coordinator.finished == pair.worker.finished == do.Finish("completed")
    assert pair.worker.num_stays == 1
    assert pair.down.said[:3] == ["Challenge", "Welcome", "Assign"]
    assert pair.up.said[:2] == ["Hello", "Loaded"]
    assert (pair.down.closed, pair.up.closed) == ("completed", "completed")
    assert pair.coordinator.buffer("down") is None


class Held:
    """Work to be done in parallel with everything else, held back until it is released."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.waiting.append((work, done))

    def forget(self) -> None:
        self.waiting.clear()


def test_copies_are_compared_beside_everything_else() -> None:
    """Only the step waits; the comparison has the copies at its start."""
    server, background = FakeServer(), Held()
    pair = Pair(_alone(num_steps=1, audited=lambda step: [1]), server, FakeMember(), background)
    pair.pass_on()
    ((work, done),) = background.waiting
    assert (server.concluded, server.copies) == ([], {1: [0]})
    server.copies[1].append(7)
    background.waiting.clear()
    done(work())
    assert server.concluded == [do.Conclude(0, 1, (0,), 0)]
    assert len(background.waiting) == 1, "the block of the step, which can be averaged now"


class Overflowing(FakeServer):
    """Hands whose average is not finite."""

    def reduce(self, block: int) -> tuple[float, float] | str:
        return "the average is not finite"


class Diverged(FakeMember):
    """Hands whose first shard is not finite."""

    def work(self, step: int, shards: tuple[int, ...]) -> Any:
        return NonFinite(step=step, shard=shards[0], tensor="w", element=3, loss=1.0, ids=(7,))


@pytest.mark.parametrize(
    ("server", "member", "reason"),
    [
        (Overflowing(), FakeMember(), "the average is not finite"),
        (FakeServer(), Diverged(), "non-finite gradient w[3] on worker 0, step 0, shard 0: "),
    ],
)
def test_a_halt_makes_no_step(server: FakeServer, member: FakeMember, reason: str) -> None:
    """Both ends finish as halted, for the same reason, without a step."""
    pair = Pair(_alone(), server, member)
    pair.pass_on()
    assert server.made == member.made == []
    assert server.stopped is not None
    assert reason in server.stopped.reason
    halted = do.Finish("halted", server.stopped.reason)
    assert pair.coordinator.finished == pair.worker.finished == halted


class Strict(FakeServer):
    """Hands that reject every message of a worker."""

    def require(self, rank: int, message: Message, payload: Buffer) -> None:
        raise ProtocolError(f"{type(message).__name__} of rank {rank} is wrong")


def test_what_hands_refuse_ends_the_connection() -> None:
    """The run stays, and waits for another worker."""
    server = Strict()
    pair = Pair(_alone(), server, FakeMember())
    pair.pass_on()
    assert pair.down.closed == "Loaded of rank 0 is wrong"
    assert pair.coordinator.buffer("down") is None
    assert pair.coordinator.finished is None


def test_a_payload_of_another_size_ends_the_connection() -> None:
    """A state or an average must have the manifest's size."""
    member = FakeMember(b"a longer content")
    pair = Pair(_alone(), FakeServer(), member)
    pair.pass_on()
    assert pair.up.closed == "Welcome with 7 bytes: 16 are due"
    assert pair.worker.num_stays == 0


def test_damaged_bytes_end_the_connection() -> None:
    """Either end closes it with the reason, and reads nothing after them."""
    pair = Pair(_alone(), FakeServer(), FakeMember())
    garbage = bytes(64)
    buffer = pair.worker.buffer("up")
    assert buffer is not None
    buffer[:] = garbage[: len(buffer)]
    pair.worker.filled("up", len(buffer))
    assert pair.up.closed is not None
    assert "magic=" in pair.up.closed
    below = pair.coordinator.buffer("down")
    assert below is not None
    below[:] = garbage[: len(below)]
    pair.coordinator.filled("down", len(below))
    assert pair.down.closed is not None
    assert "magic=" in pair.down.closed


def test_a_lost_connection_is_told_once() -> None:
    """The loss is recorded; a second report of it has no effect."""
    server = FakeServer()
    pair = Pair(run_of(awaited={1: [0, 1]}, world_size=2), server, FakeMember())
    pair.pass_on()
    pair.coordinator.lost("down", "cable cut")
    pair.coordinator.lost("down", "cable cut")
    pair.worker.lost("up", "cable cut")
    assert server.told == ["0 joined", "0 left: cable cut"]
    pair.worker.connected("up", NONCE)
    pair.coordinator.connected("down", NONCE)
    pair.up.bytes = b""
    pair.pass_on()
    assert pair.worker.num_stays == 2


def test_time_passes_at_both_ends() -> None:
    """Heartbeats are sent, and silent peers are dropped."""
    pair = Pair(run_of(awaited={0: [0, 1]}), FakeServer(), FakeMember())
    pair.pass_on()
    pair.now = TIMING.heartbeat_s
    pair.coordinator.tick()
    pair.worker.tick()
    assert (pair.down.said[-1], pair.up.said[-1]) == ("Heartbeat", "Heartbeat")
    pair.pass_on()
    pair.now += TIMING.dead_after_s
    pair.coordinator.tick()
    pair.worker.tick()
    assert pair.down.closed == "silent for 5.0 s"
    assert pair.up.closed == "the coordinator was silent for 5.0 s"


def test_a_connection_after_the_end_is_closed() -> None:
    """It gets no challenge; the reason is recorded."""
    pair = Pair(_alone(), FakeServer(), FakeMember())
    pair.pass_on()
    said = len(pair.down.said)
    pair.coordinator.connected("late", NONCE)
    assert pair.down.closed == "the run is over"
    assert len(pair.down.said) == said
    assert pair.coordinator.buffer("late") is None
