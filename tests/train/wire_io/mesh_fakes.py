"""A mesh without arithmetic: hands that record what they receive, like those in `fakes`."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.mesh_worker import MeshWorker
from entrenar_py.train.wire.messages import Average, Message, State, TreeNode
from entrenar_py.train.wire.terms import Run, Timing
from entrenar_py.train.wire_io.injections import Meddle, unmeddled
from entrenar_py.train.wire_io.tcp import CoordinatorServer, MeshClient
from tests.train.wire_io.fakes import LOOPBACK, SECRET, TERMS, TIMING, FakeMember, FakeServer


class FakeMeshServer(FakeServer):
    """The coordinator's hands, which receive the state when it was requested."""

    def sizes(self) -> Mapping[type[Message], int]:
        return {State: len(self.content)}

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        if isinstance(message, State):
            assert payload == self.content
            self.told.append(f"{rank} gave the state before {message.step}")


class FakeMeshMember(FakeMember):
    """A worker's hands; `rounds` counts the rounds begun."""

    rounds = 0

    @property
    def exchange(self) -> FakeMeshMember:
        """The hands are also the exchange."""
        return self

    def sizes(self) -> Mapping[type[Message], int]:
        return {**super().sizes(), TreeNode: len(self.content)}

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        assert payload == self.content

    def contribute(self, node: TreeNode) -> None:
        """Nothing is added."""

    def complete(self, block: int) -> None:
        assert block not in self.held

    def reduce(self, block: int) -> tuple[float, float] | None:
        self.held.append(block)
        return 1.0, 1.0

    def regroup(self, number: int) -> None:
        self.held.clear()
        self.rounds += 1

    def payload(self, message: Message) -> Buffer:
        carried = isinstance(message, TreeNode | Average | State)
        return self.content if carried else b""


def mesh_worker_of(rank: int | None, *, timing: Timing = TIMING, **changes: Any) -> MeshWorker:
    """Return the machine of a mesh worker that requests `rank`."""
    usual: dict[str, Any] = {"secret": SECRET, "backend": "cpu", "port": None}
    return MeshWorker(TERMS, rank=rank, timing=timing, **{**usual, **changes})


def mesh_client_of(
    rank: int | None,
    hands: FakeMeshMember | None = None,
    *,
    meddle: Meddle = unmeddled,
    door_context: ssl.SSLContext | None = None,
    timing: Timing = TIMING,
) -> MeshClient:
    """Return a worker that can connect to a coordinator, and to other workers."""
    machine = mesh_worker_of(rank, timing=timing)
    return MeshClient(machine, hands or FakeMeshMember(), meddle=meddle, door_context=door_context)


async def mesh_listening(
    run: Run,
    hands: FakeMeshServer,
    *,
    timing: Timing = TIMING,
    host: str = LOOPBACK,
    context: ssl.SSLContext | None = None,
) -> tuple[CoordinatorServer, int]:
    """Return a coordinator of a mesh that listens, and its port."""
    server = CoordinatorServer(run, hands, timing=timing, secret=SECRET, kind=MeshCoordinator)
    _, port = await server.listen(host, 0, context=context)
    return server, port
