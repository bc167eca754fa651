"""A worker process's reports on its job, and the faults that it injects into itself."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from entrenar_py.shared.faults import Fault
from entrenar_py.systems.star import worker_process
from entrenar_py.systems.star.worker_process import Doomed
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire.messages import Commit, Heartbeat, Staged
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io.injections import Fate, Meddling
from entrenar_py.train.wire_io.processes import Job
from tests.systems import stars
from tests.train.wire_io.fakes import free_port

SCENARIO = stars.subject("parameter_server")


@pytest.fixture
def as_before() -> Iterator[None]:
    """Undo a worker's changes to its process, which is this test's process here."""
    handler, num_threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    yield
    signal.signal(signal.SIGINT, handler)
    torch.set_num_threads(num_threads)


def _job(**changes: Any) -> dict[str, Any]:
    usual = {
        "scenario": SCENARIO.to_dict(),
        "terms": asdict(Server(SCENARIO).terms),
        "rank": 0,
        "backend": "cpu",
        "host": "127.0.0.1",
        "port": free_port(),
        "socket_bytes": 2**16,
        "secret": "00",
        "timing": asdict(Timing(gather_s=0.1)),
        "faults": [],
    }
    return {**usual, **changes}


def _answers(*jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a worker's answers to all its jobs."""
    ours, theirs = Pipe()
    answers = []

    def give() -> None:
        for job in jobs:
            ours.send_bytes(json.dumps(job).encode())
            answers.append(ours.recv_bytes())
        ours.close()

    giving = threading.Thread(target=give)
    giving.start()
    worker_process.main(theirs)
    giving.join()
    assert all(answer.startswith(b"=") for answer in answers)
    return [json.loads(answer[1:]) for answer in answers]


@pytest.mark.usefixtures("as_before")
def test_job_after_job() -> None:
    """Each job gets an answer; without a coordinator it names the address."""
    jobs = [_job(), _job(rank=1)]
    for job, answer in zip(jobs, _answers(*jobs), strict=True):
        assert answer["status"] == "failed"
        assert f"not admitted at 127.0.0.1:{job['port']}: " in answer["reason"]
        assert answer["struck"] is False


def _doomed(*faults: Fault) -> tuple[Doomed, Any]:
    """Return a worker that must inject `faults`, and the pipe's end that receives its notes."""
    ours, theirs = Pipe()
    return Doomed(faults, Job(theirs)), ours


def test_what_befalls_a_message_is_noted_before() -> None:
    """A fault is noted once, before it strikes, and only at its place."""
    fault = Fault(kind="delay", step=2, rank=0, at="Staged", seconds=0.5)
    doomed, notes = _doomed(fault)
    others = (Staged(step=1, round=0), Commit(step=2), Heartbeat())
    assert [doomed.meddle(0, True, one) for one in others] == [None] * 3
    assert not notes.poll()
    assert doomed.meddle(0, True, Staged(step=2, round=0)) == Meddling(Fate.DELAY, 0.5)
    assert notes.recv_bytes() == b"+" + json.dumps(fault.to_dict()).encode()
    assert doomed.meddle(0, True, Staged(step=2, round=0)) is None


def test_each_of_two_faults_strikes() -> None:
    """Two faults strike in their own steps."""
    faults = [Fault(kind="cut", step=step, rank=0, at="Staged") for step in (1, 3)]
    doomed, notes = _doomed(*faults)
    struck = [doomed.meddle(0, True, Staged(step=step, round=0)) for step in range(5)]
    cut = Meddling(Fate.CUT)
    assert struck == [None, cut, None, cut, None]
    assert [json.loads(notes.recv_bytes()[1:])["step"] for _ in faults] == [1, 3]
