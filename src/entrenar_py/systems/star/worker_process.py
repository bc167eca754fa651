"""The main function of a worker process: it does one job after the other, each a session in a run.

A job is a JSON object: `scenario`, `terms`, `rank`, `backend`, `host`, `port`, `secret` (hex),
`timing`, `socket_bytes`, and `faults`. The process injects these faults into itself, each after a
note to its parent. The answer has the job's result, its measurements, and its monotonic end time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch

from entrenar_py.shared import mutants, trace
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.star.lies import Liar
from entrenar_py.train.arithmetic.workload import GivenVectors
from entrenar_py.train.coordinator import recorder, topology
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.wire.effects import Finish
from entrenar_py.train.wire.messages import Message
from entrenar_py.train.wire.terms import Terms, Timing
from entrenar_py.train.wire_io.injections import Fate, Meddling
from entrenar_py.train.wire_io.processes import Job
from entrenar_py.train.wire_io.tcp import WorkerClient


def main(pipe: Connection) -> None:
    """Do the jobs that arrive over `pipe`, until it is closed."""
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
    """Take part in one run to its end; return how it ended, and the measured events."""
    asyncio.get_running_loop().add_reader(desk.fileno(), _abandoned)
    try:
        client = _client(desk, job)
        patience_s = Timing(**job["timing"]).gather_s
        finish = await client.run(job["host"], job["port"], patience_s=patience_s)
        known = job["scenario"]["workload"] == GivenVectors.name
        events = recorder.traffic(client.end, job["rank"]) if known else ()
        return finish, trace.dump_events(events)
    finally:
        asyncio.get_running_loop().remove_reader(desk.fileno())


def _client(desk: Job, job: Mapping[str, Any]) -> WorkerClient:
    """Return a worker of the scenario's topology that injects the faults of `job`."""
    scenario = Scenario.from_dict(job["scenario"])
    doomed = Doomed(map(Fault.from_dict, job["faults"]), desk)
    kind = topology.of(scenario)
    machine = kind.worker(
        Terms(**job["terms"]),
        secret=bytes.fromhex(job["secret"]),
        backend=job["backend"],
        rank=job["rank"],
        timing=Timing(**job["timing"]),
    )
    return kind.client(
        machine,
        Member(scenario, faults=scenario.faults),
        meddle=doomed.meddle,
        speak=doomed.speak,
        buffer_bytes=job["socket_bytes"],
    )


def _abandoned() -> None:
    """End this process: its parent has closed the pipe."""
    os._exit(1)


class Doomed:
    """Injects a worker process's faults: real signals, and damage to the bytes of its socket."""

    def __init__(self, planned: Iterable[Fault], desk: Job) -> None:
        self._faults = list(planned)
        self._desk = desk
        self.speak = Liar(self._lies, self._suffer).speak

    def meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        """Return a fault's effect on `message`, or None; kill or freeze the process if planned."""
        place = getattr(message, "step", None), type(message).__name__
        for fault in self._faults:
            if fault.kind != "lie" and (fault.step, fault.at) == place:
                self._suffer(fault)
                if fault.kind == "restart":  # the coordinator dies: this message is sent as it is
                    return None
                if fault.kind == "kill":
                    # Not at once: half of the message is sent first.
                    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGKILL)
                elif fault.kind == "freeze":
                    os.kill(os.getpid(), signal.SIGSTOP)
                return Meddling(Fate(fault.kind), fault.seconds or 0.0)
        return None

    def _lies(self) -> list[Fault]:
        return [one for one in self._faults if one.kind == "lie"]

    def _suffer(self, fault: Fault) -> None:
        self._faults.remove(fault)
        self._desk.note(json.dumps(fault.to_dict()).encode())
