"""After many runs with faults, a process holds no more resources than before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from entrenar_py.shared.faults import Fault
from entrenar_py.systems import preload
from entrenar_py.systems.star import processes, worker_process
from entrenar_py.train.wire_io.processes import Crew
from tests.systems import stars
from tests.systems.holdings import holdings
from tests.systems.stars import REAL, subject
from tests.train.wire_io.fakes import (
    COMPLETED,
    LOOPBACK,
    FakeServer,
    client_of,
    go,
    listening,
    run_of,
    take_part,
    until,
)

NUM_RUNS = 20
FAULTS = (
    ("kill", "TreeNode"),
    ("kill", "Average"),
    ("cut", "Computed"),
    ("cut", "Commit"),
    ("half_open", "Average"),
    ("flip", "Staged"),
    ("truncate", "Assign"),
    ("duplicate", "Applied"),
    ("reorder", "TreeNode"),
)


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """Return worker processes that only these runs use."""
    made = Crew(worker_process.main, preload=preload.of_ranks())
    monkeypatch.setattr(processes, "crew", lambda: made)
    yield made
    made.dismiss()


@pytest.mark.usefixtures("crew")
@pytest.mark.slow
def test_runs_with_faults_leave_nothing_open() -> None:
    """No file, process, thread, task or connection is added after the first run."""
    stars.run(subject(REAL))  # starts all workers
    before = holdings()
    for number in range(NUM_RUNS):
        kind, at = FAULTS[number % len(FAULTS)]
        fault = Fault(kind=kind, step=1, rank=number % 3, at=at)
        trace = stars.run(subject(REAL, seed=number, num_steps=3, faults=(fault,)))
        assert stars.held(trace) == stars.expected(trace.scenario)
    # The worker that was killed last was not replaced if it was not needed again.
    after = holdings()
    assert after.processes <= before.processes
    assert after.files <= before.files
    assert (after.threads, after.objects) == (before.threads, before.objects)


def test_dismissed_workers_leave_nothing_open(crew: Crew) -> None:
    """Dismissing workers ends their processes and closes their pipes."""
    stars.run(subject(REAL))
    crew.dismiss()
    before = holdings()
    stars.run(subject(REAL))
    crew.dismiss()
    assert holdings() == before


def test_connections_leave_nothing_open() -> None:
    """One loop that coordinates again and again leaves nothing open, whoever connects.

    It runs in its own process: the leftovers of earlier tests change, and are slow to collect.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.systems.star.test_leaks"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def _story() -> None:
    # The loop's pool adds a thread whenever none is idle, and keeps it.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
    tasks = len(asyncio.all_tasks())
    await _one_run()
    await until(
        lambda: len(asyncio.all_tasks()) == tasks
    )  # tasks that are about to end are not counted
    before = holdings()
    for _ in range(NUM_RUNS):
        await _one_run()
    await until(lambda: holdings().within(before) and len(asyncio.all_tasks()) == tasks)


async def _one_run() -> None:
    server, port = await listening(run_of(), FakeServer())
    running = asyncio.ensure_future(server.finish())
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(100)):
        _, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(said)
        writer.transport.abort()
    refused = await client_of(1, secret=b"barley").run(LOOPBACK, port, patience_s=5.0)
    assert refused.status == "failed"
    finishes = await take_part([client_of(0), client_of(1)], port)
    assert [await running, *finishes] == [COMPLETED] * 3


if __name__ == "__main__":
    go(_story())
