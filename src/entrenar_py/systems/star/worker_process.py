"""What a worker process runs: one job after the other, each a stay in one run, over TCP.

A job is a JSON object: `scenario`, `terms`, `rank`, `backend`, `host`, `port`, `secret` (hex),
`timing`, `socket_bytes`, and `faults`, those that this process is to suffer, each noted
before that. Its answer says how the job went, what was measured, and when it was over, by the clock
of all processes here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch

from entrenar_py import mutants, trace
from entrenar_py.drivers.message_faults import Fate, Meddling
from entrenar_py.drivers.processes import Job
from entrenar_py.drivers.tcp import WorkerClient
from entrenar_py.drivers.tcp_mesh import MeshClient
from entrenar_py.faults import Fault
from entrenar_py.protocol.effects import Finish
from entrenar_py.protocol.mesh_worker import MeshWorker
from entrenar_py.protocol.messages import Message, NonFinite, TreeNode
from entrenar_py.protocol.ring_worker import RingWorker
from entrenar_py.protocol.terms import Terms, Timing
from entrenar_py.protocol.worker import Worker
from entrenar_py.scenario import Scenario
from entrenar_py.systems.star import reduction_measures, topology
from entrenar_py.systems.star.lies import Liar
from entrenar_py.systems.star.member import Member
from entrenar_py.systems.star.mesh_member import MeshMember
from entrenar_py.systems.star.ring_member import RingMember
from entrenar_py.training.vectors import GivenVectors


def main(pipe: Connection) -> None:
    """Does the jobs that come over `pipe`, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us decides
    torch.set_num_threads(1)
    desk = Job(pipe)
    while (given := desk.next()) is not None:
        job = json.loads(given)
        with mutants.planted(job["scenario"]["mutant"]) as planting:
            finish, measured = asyncio.run(_stay(desk, job))
            ended = time.monotonic()
        answer = {
            **asdict(finish),
            "struck": planting.struck,
            "measured": measured.decode(),
            "ended_s": ended,
        }
        desk.answer(json.dumps(answer).encode())


async def _stay(desk: Job, job: Mapping[str, Any]) -> tuple[Finish, bytes]:
    """One run, to its end; the events of what was measured in it."""
    asyncio.get_running_loop().add_reader(desk.fileno(), _abandoned)
    try:
        client = _client(desk, job)
        patience_s = Timing(**job["timing"]).gather_s
        finish = await client.run(job["host"], job["port"], patience_s=patience_s)
        known = job["scenario"]["workload"] == GivenVectors.name
        events = reduction_measures.traffic(client.end, job["rank"]) if known else ()
        return finish, trace.dump_events(events)
    finally:
        asyncio.get_running_loop().remove_reader(desk.fileno())


def _client(desk: Job, job: Mapping[str, Any]) -> WorkerClient:
    """A worker of a star, a mesh or a ring."""
    scenario, suffers = Scenario.from_dict(job["scenario"]), map(Fault.from_dict, job["faults"])
    terms = Terms(**job["terms"])
    machine: dict[str, Any] = {
        "secret": bytes.fromhex(job["secret"]),
        "backend": job["backend"],
        "rank": job["rank"],
        "timing": Timing(**job["timing"]),
    }
    way = topology.of(scenario)
    if way != topology.STAR:
        in_ring = way == topology.RING
        doomed = (DoomedInRing if in_ring else DoomedInMesh)(scenario, suffers, desk)
        worker = (RingWorker if in_ring else MeshWorker)(terms, port=None, **machine)
        return MeshClient(worker, doomed, **_driven(doomed, job))
    member = Doomed(scenario, suffers, desk)
    return WorkerClient(Worker(terms, **machine), member, **_driven(member, job))


def _driven(doomed: Doomed, job: Mapping[str, Any]) -> dict[str, Any]:
    """How a client is to drive `doomed`."""
    return {
        "meddle": doomed.meddle,
        "speak": doomed.speak,
        "buffer_bytes": job["socket_bytes"],
    }


def _abandoned() -> None:
    """The pipe has ended, and nobody waits for an answer."""
    os._exit(1)


class Doomed(Member):
    """A worker that suffers `faults`, in its own process: by real signals, on its real socket."""

    def __init__(self, scenario: Scenario, faults: Iterable[Fault], desk: Job) -> None:
        super().__init__(scenario)
        planned = list(faults)
        self._faults = [one for one in planned if one.kind != "lie"]
        self._lies = [one for one in planned if one.kind == "lie"]
        self._desk = desk
        self.speak = Liar(lambda: self._lies, self._tell_lie).speak

    def work(self, step: int, shards: Sequence[int]) -> list[TreeNode] | NonFinite:
        """As any worker; but one that is to leave in this step is killed first."""
        for fault in self._faults:
            if (fault.kind, fault.step) == ("leave", step):
                self._note(fault)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().work(step, shards)

    def meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        """What befalls a message that this worker sends, and the worker itself."""
        for fault in self._faults:
            if (fault.step, fault.at) == (getattr(message, "step", None), type(message).__name__):
                self._faults.remove(fault)
                return self._suffer(fault)
        return None

    def _tell_lie(self, fault: Fault) -> None:
        self._lies.remove(fault)
        self._note(fault)

    def _note(self, fault: Fault) -> None:
        self._desk.note(json.dumps(fault.to_dict()).encode())

    def _suffer(self, fault: Fault) -> Meddling:
        self._note(fault)
        if fault.kind == "kill":
            # In a moment: half of the message is on its way by then.
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGKILL)
        elif fault.kind == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        return Meddling(Fate(fault.kind), fault.seconds or 0.0)


class DoomedInMesh(Doomed, MeshMember):
    """The same, in a mesh."""


class DoomedInRing(Doomed, RingMember):
    """The same, in a ring."""
