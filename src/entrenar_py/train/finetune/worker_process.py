"""A worker process of `entrenar finetune` on one machine: it joins the run that it is told of."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from entrenar_py import compute as backends
from entrenar_py.compute import Backend
from entrenar_py.shared import trace
from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator import topology
from entrenar_py.train.coordinator.member import Member
from entrenar_py.train.distill import student
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import prepared
from entrenar_py.train.service import measures
from entrenar_py.train.wire.effects import Effect, Finish, Load
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io.processes import Job
from entrenar_py.train.wire_io.tcp import WorkerClient

REPORT_EVERY_S = 2.0


def main(pipe: Connection) -> None:
    """Do the one job that comes over `pipe`."""
    torch.set_num_threads(1)  # how a sum is split over threads is part of its order
    desk = Job(pipe)
    given = desk.next()
    if given is not None:
        try:
            finish = asyncio.run(_stay(desk, json.loads(given)))
        except SystemFailure as error:  # a teacher's shard does not come, which no restart mends
            finish = Finish("failed", str(error))
        desk.answer(json.dumps({"status": finish.status, "reason": finish.reason}).encode())


async def _stay(desk: Job, job: Mapping[str, Any]) -> Finish:
    loop = asyncio.get_running_loop()
    loop.add_reader(desk.fileno(), _abandoned)
    scenario = Scenario.from_dict(job["scenario"])
    workload = student.workload(
        prepared.prepare(settings_file.of_text(job["settings"], "the settings"))
    )
    backend = backends.open_backend(job["backend"])
    member = Member(scenario, lambda rank: backend, workload)
    machine = topology.of(scenario).worker(
        member.terms,
        secret=bytes.fromhex(job["secret"]),
        backend=backend.name,
        rank=job["rank"],
        timing=Timing(),
    )
    client = WorkerClient(machine, member, notify=partial(_let_in, member, backend))
    reports = asyncio.create_task(_report_memory(desk))
    finish = await client.run(job["host"], job["port"], patience_s=Timing().gather_s)
    reports.cancel()
    loop.remove_reader(desk.fileno())
    return finish


async def _report_memory(desk: Job) -> None:
    """Note the peak of this process again and again."""
    while True:
        desk.note(json.dumps(measures.memory_peak()).encode())
        await asyncio.sleep(REPORT_EVERY_S)


def _let_in(member: Member, backend: Backend, effect: Effect) -> None:
    """Record what this worker computes on when it is admitted."""
    if isinstance(effect, Load):
        member.recorder.emit(
            trace.Attempt(
                backend=backend.name,
                served=True,
                device=backend.device,
                software=backend.software,
            )
        )


def _abandoned() -> None:
    """End this process: its parent has closed the pipe."""
    os._exit(1)
