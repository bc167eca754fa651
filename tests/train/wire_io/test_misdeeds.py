"""Strangers at real ports end their own connections only, whatever they do at any moment.

Listeners, workers and strangers share one loop, so that a stranger can act between any two turns,
even before its connection is accepted.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.mesh_coordinator import MeshCoordinator
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io.tcp import CoordinatorServer, WorkerClient
from tests.train.wire_io.certificates import Authority, client_context, server_context
from tests.train.wire_io.fakes import (
    COMPLETED,
    LOOPBACK,
    SECRET,
    FakeMember,
    FakeServer,
    client_of,
    go,
    run_of,
    until,
)
from tests.train.wire_io.mesh_fakes import FakeMeshMember, FakeMeshServer, mesh_client_of
from tests.train.wire_io.misdeeds import End, Misdeed, commit, misdeeds

# Who says nothing is soon sent away; who was let in is not.
TIMING = Timing(heartbeat_s=0.04, dead_after_s=20.0, hello_s=0.5, gather_s=20.0)
ALL = [0, 1, 2]
NUM_EXAMPLES = 25
DEEDS_MAX = 12
FEW = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # each costs a run
)
RESET = Misdeed(first=0, says=b"", answers=False, then=0, end=End.RESET)
RESET_SECURED = Misdeed(first=0, says=b"", answers=False, then=0, end=End.RESET, secured=10)


class Contexts:
    """The TLS contexts of a run, if any: the coordinator's, the workers' and a stranger's."""

    def __init__(self, authority: Authority | None) -> None:
        if authority is None:
            self.server = self.client = self.stranger = None
            return
        self.server = server_context(authority, mutual=False)
        self.client = self.stranger = client_context(authority, None)


async def disturbed(deeds: Sequence[Misdeed], contexts: Contexts, *, mesh: bool) -> None:
    """Run three steps, with the deeds before the last one. AssertionError unless the run completes
    and all strangers are disconnected.
    """
    hands = FakeMeshServer() if mesh else FakeServer()
    members = [FakeMeshMember() if mesh else FakeMember() for _ in range(2)]
    server = CoordinatorServer(
        run_of(awaited={0: [0], 2: [1]}),
        hands,
        timing=TIMING,
        secret=SECRET,
        kind=MeshCoordinator if mesh else Coordinator,
    )
    _, port = await server.listen(LOOPBACK, 0, context=contexts.server)
    running = asyncio.ensure_future(server.finish())
    clients = [_client(rank, one, contexts) for rank, one in enumerate(members)]
    first = asyncio.ensure_future(_take_part(clients[0], port, contexts.client))
    await until(lambda: server.end.machine.step == 2 or running.done())
    at = clients[0].end.machine.port if mesh else port
    assert at is not None
    open_still = await asyncio.gather(*(commit(one, at, contexts.stranger) for one in deeds))
    second = asyncio.ensure_future(_take_part(clients[1], port, contexts.client))
    assert await running == COMPLETED
    assert [await first, await second] == [COMPLETED, COMPLETED]
    assert members[0].made == members[1].made == ALL
    assert [one for one in hands.told if "left" in one] == []
    for sock in open_still:
        sock.close()


def _client(rank: int, hands: FakeMember, contexts: Contexts) -> WorkerClient:
    if isinstance(hands, FakeMeshMember):
        return mesh_client_of(rank, hands, door_context=contexts.server, timing=TIMING)
    return client_of(rank, hands, timing=TIMING)


async def _take_part(client: WorkerClient, port: int, context: ssl.SSLContext | None) -> object:
    return await client.run(LOOPBACK, port, patience_s=20.0, context=context)


@pytest.mark.parametrize("mesh", [False, True], ids=["coordinator", "mesh worker"])
@FEW
@given(st.lists(misdeeds(over_tls=False), min_size=1, max_size=DEEDS_MAX))
@example([RESET])
def test_a_plain_door(mesh: bool, deeds: list[Misdeed]) -> None:
    """Resets, half-closes and floods, without TLS."""
    go(disturbed(deeds, Contexts(None), mesh=mesh))


@pytest.mark.parametrize("mesh", [False, True], ids=["coordinator", "mesh worker"])
@FEW
@given(st.lists(misdeeds(over_tls=True), min_size=1, max_size=DEEDS_MAX))
@example([RESET])
@example([RESET_SECURED])
def test_a_door_over_tls(authority: Authority, mesh: bool, deeds: list[Misdeed]) -> None:
    """The same before, during and after the TLS handshake."""
    go(disturbed(deeds, Contexts(authority), mesh=mesh))
