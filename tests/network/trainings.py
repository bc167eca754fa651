"""Trainings whose workers are in other namespaces or behind a relay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest

from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.systems import preload
from entrenar_py.systems.star import processes, worker_process
from entrenar_py.systems.star.processes import ProcessTransport
from entrenar_py.systems.star.scenario_run import ScenarioRun
from entrenar_py.train.wire.effects import Effect, Left
from entrenar_py.train.wire.messages import Message
from entrenar_py.train.wire.terms import Run
from entrenar_py.train.wire_io.injections import Meddling
from entrenar_py.train.wire_io.processes import Crew, Hand
from tests.network.hosts import Host, enter
from tests.systems import stars

RANK = 1  # of the worker whose way is disturbed
Route = Callable[[str, int], tuple[str, int]]  # the coordinator's address -> where to connect to


class Staff:
    """Worker processes, each with its own place; a replacement for `processes.Crew`.

    `hosts` are the namespaces of ranks, `routes` functions that redirect their connections.
    """

    def __init__(self, hosts: Mapping[int, Host] | None = None) -> None:
        self._hosts = hosts or {}
        self.routes: Mapping[int, Route] = {}
        self._crews: dict[int, Crew] = {}
        # Started here, and so outside of every namespace: it outlives them.
        forkserver.set_forkserver_preload(list(preload.of_ranks()))
        forkserver.ensure_running()

    def give(self, job: bytes) -> Hand:
        given = json.loads(job)
        rank = given["rank"]
        if rank in self.routes:
            given["host"], given["port"] = self.routes[rank](given["host"], given["port"])
        return self._crew(rank).give(json.dumps(given).encode())

    def gather(self, timeout_s: float) -> None:
        """Wait until all processes have answered or died."""
        for crew in self._crews.values():
            crew.gather(timeout_s)

    def dismiss(self) -> None:
        """End every process."""
        for crew in self._crews.values():
            crew.dismiss()

    def _crew(self, rank: int) -> Crew:
        if rank not in self._crews:
            host = self._hosts.get(rank)
            main = worker_process.main if host is None else partial(_work_in, host.pid)
            self._crews[rank] = Crew(main, preload=preload.of_ranks())
        return self._crews[rank]


def _work_in(pid: int, pipe: Connection) -> None:
    """Run a worker process in the namespace of process `pid`."""
    enter(pid)
    worker_process.main(pipe)


class Awaiting(ScenarioRun):
    """A run whose steps wait for worker RANK."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, ProcessTransport)

    def run_of(self, first: int, last: int) -> Run:
        run = super().run_of(first, last)
        everyone = run.awaited[first]
        return replace(run, awaited={step: {RANK} for step in range(last)} | {first: everyone})


class Watched(Awaiting):
    """A run that calls `strikes` just before message `at` of a step goes to worker RANK.

    `ends` is called `after_s` later, or, if that is None, when the worker was dropped.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        at: str,
        strikes: Callable[[], None],
        ends: Callable[[], None],
        after_s: float | None,
    ) -> None:
        super().__init__(scenario)
        self._place, self._strikes, self._ends = (stars.STEP, at), strikes, ends
        self._after_s = after_s
        self.struck = False
        self._ended = False

    def meddle(self, rank: int | None, up: bool, message: Message) -> Meddling | None:
        place = (getattr(message, "step", None), type(message).__name__)
        if not self.struck and (rank, place) == (RANK, self._place):
            self.struck = True
            self._strikes()
            if self._after_s is not None:
                asyncio.get_running_loop().call_later(self._after_s, self._end)
        return super().meddle(rank, up, message)

    def notify(self, effect: Effect) -> None:
        super().notify(effect)
        if self.struck and isinstance(effect, Left) and effect.rank == RANK:
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._ends()


def employ(staff: Staff, patch: pytest.MonkeyPatch, *, host: str | None = None) -> None:
    """Make `staff` work for all later runs, whose coordinator is at address `host`."""
    patch.setattr(processes, "crew", lambda: staff)
    if host is not None:
        patch.setattr(processes, "LOOPBACK", host)


def require_right(trace: Trace) -> None:
    """AssertionError unless every step has the reference's bits, once, with its own samples."""
    assert stars.held(trace) == stars.expected(trace.scenario)
