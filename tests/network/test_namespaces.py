"""A coordinator and workers on hosts of their own: a link goes down, or packets are lost.

Programs get no error: bytes and acknowledgements don't arrive, and the kernel retransmits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from entrenar_py.shared.trace import Trace
from entrenar_py.train.wire import effects as do
from tests.network import hosts, trainings
from tests.network.hosts import Network, enter
from tests.network.trainings import RANK, Staff, Watched
from tests.systems import stars
from tests.systems.stars import REAL, subject
from tests.train.wire_io.fakes import TIMING, client_of

HOME = "coordinator"
PORT = 7070  # at which nobody listens
PLACES = ("Assign", "Average", "Commit")
WORLD_SIZE = 3
SHORT_S, PATIENCE_S = 0.4, 10.0


@cache
def _missing() -> str | None:
    return hosts.missing()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Return a network with a host for the coordinator, and one for each worker."""
    reason = _missing()
    if reason is not None:
        pytest.skip(reason)
    made = Network([HOME, *map(str, range(WORLD_SIZE))])
    yield made
    made.close()


@pytest.fixture(scope="module")
def staff(network: Network) -> Iterator[Staff]:
    """Return worker processes, one in each host."""
    made = Staff(hosts={rank: network.hosts[str(rank)] for rank in range(WORLD_SIZE)})
    yield made
    made.dismiss()


@pytest.fixture(autouse=True)
def _at_home(network: Network, staff: Staff, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings.employ(staff, monkeypatch, host=network.hosts[HOME].address)


def _train(network: Network, star: Watched) -> Trace:
    """Return the trace of `star`, run in the coordinator's host."""
    home = network.hosts[HOME]
    with ThreadPoolExecutor(1, initializer=enter, initargs=(home.pid,)) as thread:
        trace = thread.submit(star.train).result()
    assert star.struck
    trainings.require_right(trace)
    return trace


def _trouble(network: Network, how: str) -> dict[str, Any]:
    """Return the callbacks for `Watched`."""
    worker = str(RANK)
    match how:
        case "unplugged":
            return {"strikes": lambda: network.unplug(worker), "ends": lambda: network.plug(worker)}
        case "deaf":
            return {
                "strikes": lambda: network.swallow(HOME, worker),
                "ends": lambda: network.pass_on(HOME, worker),
            }
        case _:
            return {
                "strikes": lambda: network.swallow(worker, HOME),
                "ends": lambda: network.pass_on(worker, HOME),
            }


HOW = ("unplugged", "deaf", "mute")


@pytest.mark.parametrize(("how", "at"), list(zip(HOW, PLACES, strict=True)))
def test_a_long_while_costs_the_worker(network: Network, how: str, at: str) -> None:
    """For more than `dead_after_s`: the others go on, and the worker comes back later."""
    star = Watched(subject(REAL), at=at, after_s=None, **_trouble(network, how))
    trace = _train(network, star)
    stars.require_back(trace)


@pytest.mark.parametrize(("how", "at"), list(zip(HOW, PLACES, strict=True)))
def test_a_short_while_costs_nobody(network: Network, how: str, at: str) -> None:
    """For less than `dead_after_s`: the kernel retransmits, and no worker is dropped."""
    patient = {"heartbeat_s": 0.1, "dead_after_s": PATIENCE_S}
    scenario = subject(REAL, options=patient)
    star = Watched(scenario, at=at, after_s=SHORT_S, **_trouble(network, how))
    assert stars.changes(_train(network, star)) == []


def test_everyone_is_cut_off_at_once(network: Network) -> None:
    """The coordinator's link goes down for long: all reconnect, and make the step."""
    star = Watched(
        subject(REAL),
        at="Average",
        strikes=lambda: network.unplug(HOME),
        ends=lambda: network.plug(HOME),
        after_s=None,
    )
    trace = _train(network, star)
    left = {rank for _, rank, change in stars.changes(trace) if change == "left"}
    assert left == set(range(WORLD_SIZE))


def test_a_network_that_says_nothing_is_not_waited_for(network: Network) -> None:
    """Connecting ends after `hello_s`, and the error has the address."""
    home, elsewhere = network.hosts[HOME], network.hosts[str(RANK)]
    client = client_of(RANK, timing=replace(TIMING, hello_s=0.2))

    def connect() -> do.Finish:
        return asyncio.run(client.run(home.address, PORT, patience_s=0.1))

    network.swallow(HOME, str(RANK))
    try:
        with ThreadPoolExecutor(1, initializer=enter, initargs=(elsewhere.pid,)) as thread:
            finish = thread.submit(connect).result()
    finally:
        network.pass_on(HOME, str(RANK))
    where = f"not admitted at {home.address}:{PORT}"
    assert finish == do.Finish("failed", f"{where}: no answer from {home.address} within 0.2 s")
