"""Exceptions in our own code end the run or the worker, and are raised."""

from __future__ import annotations

import asyncio

import pytest

from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import NonFinite, TreeNode
from tests.train.wire_io.fakes import (
    COMPLETED,
    LOOPBACK,
    FakeMember,
    FakeServer,
    client_of,
    go,
    listening,
    run_of,
)


class Clumsy(FakeServer):
    """Hands of a coordinator that fail in the middle of a step."""

    def reduce(self, block: int) -> tuple[float, float] | str:
        raise ZeroDivisionError("no weight")


class Tired(FakeMember):
    """Hands of a worker that fail while it computes."""

    def work(self, step: int, shards: tuple[int, ...]) -> list[TreeNode] | NonFinite:
        raise ZeroDivisionError("no samples")


def _elsewhere(hands: FakeMember, rank: int, port: int) -> asyncio.Future[do.Finish]:
    """Run a worker in a loop of its own, so that its errors are not the coordinator's."""

    def work() -> do.Finish:
        return asyncio.run(client_of(rank, hands).run(LOOPBACK, port, patience_s=0.1))

    return asyncio.ensure_future(asyncio.to_thread(work))


def test_a_defect_of_the_coordinator_ends_the_run() -> None:
    """`finish` raises the exception of its hands."""

    async def story() -> None:
        server, port = await listening(run_of(awaited={}), Clumsy())
        worker = _elsewhere(FakeMember(), 0, port)
        with pytest.raises(ZeroDivisionError, match="no weight"):
            await server.finish()
        assert (await worker).status == "failed"

    go(story())


def test_a_defect_of_a_worker_ends_the_worker() -> None:
    """`run` raises the exception, and the others compute its shards."""

    async def story() -> None:
        hands = FakeServer()
        server, port = await listening(run_of(), hands)
        well, ill = _elsewhere(FakeMember(), 0, port), _elsewhere(Tired(), 1, port)
        assert await server.finish() == COMPLETED
        with pytest.raises(ZeroDivisionError, match="no samples"):
            await ill
        assert await well == COMPLETED
        assert hands.made == [0, 1, 2]
        assert any(one.startswith("1 left") for one in hands.told)

    go(story())
