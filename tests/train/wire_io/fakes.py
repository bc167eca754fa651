"""A run without arithmetic: hands that record the steps made, with payloads of any size."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.frames import Buffer, new_room
from entrenar_py.train.wire.messages import (
    Average,
    Message,
    NonFinite,
    Piece,
    TreeNode,
    Weights,
    Welcome,
)
from entrenar_py.train.wire.terms import PIECE_BYTES, Run, Terms, Timing
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io.endpoints import Saving
from entrenar_py.train.wire_io.tcp import CoordinatorServer, WorkerClient

TERMS = Terms(run="r", manifest="m", data="d")
TIMING = Timing(heartbeat_s=0.05, dead_after_s=5.0, hello_s=5.0, gather_s=5.0)
SECRET = b"open sesame"
LOOPBACK = "127.0.0.1"
COMPLETED = do.Finish("completed")


def run_of(**changes: Any) -> Run:
    """Return a run of three steps of four shards, by two workers, which are awaited."""
    usual: dict[str, Any] = {"world_size": 2, "num_shards": 4, "num_steps": 3, "num_blocks": 1}
    return Run(terms=TERMS, **{"awaited": {0: [0, 1]}, **usual, **changes})


class AtOnce:
    """In place of a background thread: does all work when it is requested."""

    def run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        done(work())

    def forget(self) -> None:
        """Nothing is pending."""


class FakeServer:
    """The coordinator's hands. The state and each block are `content`. `made` are the steps made,
    `reduced` the blocks averaged in each, `prepared` the steps prepared.
    """

    def __init__(self, content: bytes = b"content") -> None:
        self.content = content
        self.made: list[int] = []
        self.reduced: list[list[int]] = [[]]
        self.prepared: list[int] = []
        self.told: list[str] = []  # who joined and left
        self.stopped: do.Stop | None = None
        self.files: dict[str, bytes] = {}
        self.copies: dict[int, list[int]] = {}  # audited shard -> whose copies are whole
        self.concluded: list[do.Conclude] = []

    def sizes(self) -> Mapping[type[Message], int]:
        return {TreeNode: len(self.content)}

    def room(self, message: Message, num_bytes: int) -> memoryview:
        return new_room(message, num_bytes)

    def require(self, rank: int, message: Message, payload: Buffer) -> None:
        """Everything will do."""

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        if isinstance(message, TreeNode):
            assert payload == self.content

    def deliver(self, rank: int) -> None:
        """Nothing was kept."""

    def copy(self, rank: int, message: Message, payload: Buffer) -> None:
        self.keep(rank, message, payload)

    def end_copy(self, rank: int, shard: int) -> None:
        self.copies.setdefault(shard, []).append(rank)

    def compare(self, shard: int) -> Callable[[], tuple[list[int], list[int]]]:
        ranks = list(self.copies[shard])  # of one content all of them, as `keep` has seen
        return lambda: (ranks, [0] * len(ranks))

    def piece(self, piece: Piece) -> bytes | str:
        """Read from `files`; the names are any digests."""
        content = self.files.get(piece.file)
        if content is None:
            return f"{piece.file}: it has gone"
        return content[piece.offset : piece.offset + PIECE_BYTES]

    def conclude(self, effect: do.Conclude) -> None:
        del self.copies[effect.shard]
        self.concluded.append(effect)

    def payload(self, message: Message) -> Buffer:
        return self.content if isinstance(message, Welcome | Average | Weights) else b""

    def joined(self, effect: do.Joined) -> None:
        self.told.append(f"{effect.rank} joined")

    def left(self, effect: do.Left) -> None:
        self.told.append(f"{effect.rank} left: {effect.reason}")

    def gather(self, step: int) -> None:
        self.reduced.append([])

    def complete(self, block: int) -> None:
        assert block not in self.reduced[-1]

    def reduce(self, block: int) -> tuple[float, float] | str:
        self.reduced[-1].append(block)
        return 1.0, 1.0

    def prepare(self, step: int) -> tuple[float, float]:
        self.prepared.append(step)
        return 1.0, 1.0

    def apply_average(self, step: int) -> None:
        self.made.append(step)

    def save(self, step: int) -> Saving:
        return lambda: partial(self.told.append, f"saved {step}")

    def stop(self, effect: do.Stop) -> None:
        self.stopped = effect


class FakeMember:
    """A worker's hands; `made` are the steps in its state, `held` the blocks of the next one."""

    def __init__(self, content: bytes = b"content") -> None:
        self.content = content
        self.made: list[int] = []
        self.held: list[int] = []
        self._num_blocks = 0

    def sizes(self) -> Mapping[type[Message], int]:
        return dict.fromkeys((Welcome, Average, Weights), len(self.content))

    def room(self, message: Message, num_bytes: int) -> memoryview:
        return new_room(message, num_bytes)

    def require(self, message: Message, payload: Buffer) -> None:
        due = self.sizes().get(type(message), 0)
        if len(payload) != due:
            raise ProtocolError(
                f"{type(message).__name__} with {len(payload)} bytes: {due} are due"
            )

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        assert payload == self.content
        self.made, self._num_blocks = list(range(welcome.step)), welcome.blocks
        self.held.clear()

    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite:
        return [
            TreeNode(step=step, round=0, block=block, level=0, index=shard, loss=1.0, weight=1.0)
            for block in reversed(range(self._num_blocks))
            for shard in shards
        ]

    def hold(self, message: Average | Weights, payload: Buffer) -> None:
        assert payload == self.content
        self.held.append(message.block)

    def make_held(self, step: int) -> None:
        assert sorted(self.held) == list(range(self._num_blocks))
        self.held.clear()
        self.made.append(step)

    def payload(self, message: Message) -> Buffer:
        return self.content if isinstance(message, TreeNode) else b""


def worker_of(rank: int | None, *, secret: bytes = SECRET, timing: Timing = TIMING) -> Worker:
    """Return the machine of a worker that requests `rank`."""
    return Worker(TERMS, secret=secret, backend="cpu", rank=rank, timing=timing)


def client_of(rank: int | None, hands: FakeMember | None = None, **changes: Any) -> WorkerClient:
    """Return a worker that can connect to a coordinator."""
    return WorkerClient(worker_of(rank, **changes), hands or FakeMember())


async def listening(
    run: Run, hands: FakeServer, *, timing: Timing = TIMING, host: str = LOOPBACK, port: int = 0
) -> tuple[CoordinatorServer, int]:
    """Return a coordinator that listens, and its port."""
    server = CoordinatorServer(run, hands, timing=timing, secret=SECRET)
    _, port = await server.listen(host, port)
    return server, port


async def take_part(
    clients: Iterable[WorkerClient], port: int, host: str = LOOPBACK
) -> list[do.Finish]:
    """Return the Finish of each of `clients`."""
    staying = (client.run(host, port, patience_s=TIMING.gather_s) for client in clients)
    return await asyncio.gather(*staying)


def free_port(host: str = LOOPBACK) -> int:
    """Return a port at which no process listens at the moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as one:
        one.bind((host, 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def swallowing(host: str) -> Iterator[int]:
    """Yield a port of `host` whose connections are never established, or refused."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind((host, 0))
        full.listen(0)
        port = full.getsockname()[1]
        for _ in range(2):  # it holds one: who comes after these is not answered at all
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect((host, port))
        yield port


Until = Callable[[], bool]


async def until(holds: Until) -> None:
    """Run other tasks until `holds` returns True; only the test's time limit ends it otherwise."""
    async with asyncio.timeout(10.0):
        while not holds():
            await asyncio.sleep(0)


def go(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run an async test within a time limit."""
    asyncio.run(asyncio.wait_for(coroutine, 30))
