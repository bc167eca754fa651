"""A worker of the service in its parts: its backend, and its events."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from typing import Any

import pytest

from entrenar_py import compute as backends
from entrenar_py.compute import Backend
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable, SystemFailure
from entrenar_py.train import cli as options
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.finetune import joining
from entrenar_py.train.service import signals, worker
from entrenar_py.train.wire.effects import Finish, Load
from entrenar_py.train.wire.messages import Loaded, Welcome
from entrenar_py.train.wire_io import queries
from entrenar_py.train.wire_io.queries import Told
from tests.systems.by_hand import PROOF
from tests.train.service.members import host_of, plan_of


def absent() -> Backend:
    """Raise BackendUnavailable, as for a missing device."""
    raise BackendUnavailable("no such thing")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this a machine with only a CPU."""
    monkeypatch.setitem(backends.BACKENDS, "cuda", absent)
    monkeypatch.setitem(backends.BACKENDS, "wgpu", absent)


@pytest.mark.usefixtures("alone")
def test_what_serves_is_taken_and_what_failed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """`auto` goes down the chain, and each attempt is an event of the ledger and a line."""
    backend, attempts = worker.opened("auto")
    assert backend.name == "cpu"
    assert [(one.backend, one.served) for one in attempts] == [
        ("cuda", False),
        ("wgpu", False),
        ("cpu", True),
    ]
    assert "worker: backend cuda: no such thing\n" in capsys.readouterr().out


@pytest.mark.usefixtures("alone")
def test_a_backend_asked_for_by_name_is_that_or_none() -> None:
    """A backend requested by name is never replaced silently."""
    with pytest.raises(BackendUnavailable, match="no such thing"):
        worker.opened("cuda")


def test_a_signal_while_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No supervisor has to wait for the thread that loads it: the process is ended."""
    ended, loads = threading.Event(), threading.Event()
    monkeypatch.setattr(signals, "LOST_S", 0.0)
    monkeypatch.setattr(signals, "end", ended.set)

    async def ask(*_: Any, **__: Any) -> Told:
        return Told(plan=b"{}", heartbeat_s=1.0, dead_after_s=2.0, package="0" * 64)

    def load() -> Finish:
        loads.set()
        assert ended.wait(20.0)
        return Finish("completed")

    async def obtain(*_: Any) -> Finish:
        return await asyncio.to_thread(load)

    async def story() -> Finish:
        stay = _stay()
        stay.obtain = obtain
        taking_part = asyncio.ensure_future(stay.take_part())
        await asyncio.to_thread(loads.wait)
        signal.raise_signal(signal.SIGTERM)
        return await taking_part

    monkeypatch.setattr(queries, "ask", ask)
    handlers = {number: signal.getsignal(number) for number in signals.NUMBERS}
    assert asyncio.run(story()) == Finish("stopped", "by SIGTERM")
    signals.settle()
    for number, handler in handlers.items():  # a worker that has left ends at the next one
        signal.signal(number, handler)


def test_every_stay_records_the_device() -> None:
    """Each session records the device, so the ledger has it also after a coordinator's death."""
    host = host_of(plan_of())
    stay = _stay()
    scenario = json.dumps(host.plan.to_dict()).encode()
    end = stay.join(Told(plan=scenario, heartbeat_s=1.0, dead_after_s=2.0, package=None)).end
    assert isinstance(end.hands, Member)
    welcome = Welcome(blocks=1, rank=1, step=0, resumed=False, proof=PROOF)
    for _ in range(2):
        end.hands.load(welcome, bytearray(host.server.payload(welcome)))
        end._notify(Load(1, 0))
        events = bytearray(end.hands.payload(Loaded(step=0)))
        host.server.require(1, Loaded(step=0), events)
        start, attempt = trace.load_events(bytes(events))
        assert isinstance(start, trace.Start)
        device = backends.open_backend("cpu").device
        assert attempt == trace.Attempt(backend="cpu", served=True, device=device)


def _stay() -> worker.Stay:
    """Return a worker on the CPU that has not connected yet."""
    given = options.parse(["worker", "--coordinator", "h:1", "--secret-file", "s"])
    return worker.Stay(given, b"the secret", None, *worker.opened("cpu"), joining.obtain)


def test_a_stay_is_shown_without_its_secret() -> None:
    """Its repr, which logs of bound methods show, has no secret."""
    assert "the secret" not in repr(_stay()._leave)


RING = b'{"system": "ring", "workload": "linear", "world_size": 2, "seed": 0}'


@pytest.mark.parametrize("scenario", [b"", b"[]", b'{"seed": 0}', b'{"sead": 0}', b"\xff", RING])
def test_a_scenario_of_another_release(scenario: bytes) -> None:
    """The message says that it can't be read, and what to do."""
    stay = _stay()
    told = Told(plan=scenario, heartbeat_s=1.0, dead_after_s=2.0, package=None)
    with pytest.raises(SystemFailure, match="use one release on both ends"):
        stay.join(told)
