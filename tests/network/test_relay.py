"""A worker behind a bad line: late, slow, a byte at a time, cut anywhere, or half open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

import tests
from entrenar_py.shared.trace import Trace
from tests.network import trainings
from tests.network.relay import Manner
from tests.network.trainings import RANK, Awaiting, Staff
from tests.systems import stars
from tests.systems.stars import REAL, subject

TOP = Path(next(iter(tests.__path__))).parent
KIB = 2**10
# Nobody is given up who is only slow.
PATIENT = {"heartbeat_s": 0.1, "dead_after_s": 20.0}
# Bytes of both directions after which a connection ends: in the challenge, the hello, the state,
# the worker's first record, and wherever in a step that happens to be.
ENDS = (0, 50, 300, 900, 2_000, 4_000, 6_000)


class Relay:
    """The relay process, which is started by `route`."""

    def __init__(self, *manners: Manner) -> None:
        # JSON has no infinity: those fields are left as they are by default.
        finite = [{n: v for n, v in asdict(one).items() if v != float("inf")} for one in manners]
        self._manners = json.dumps(finite)
        self._process: subprocess.Popen[str] | None = None

    def route(self, host: str, port: int) -> tuple[str, int]:
        """Return the relay's address, which leads to `host`:`port`."""
        path = os.pathsep.join([str(TOP), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.network.relay", host, str(port), self._manners],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdout is not None
        return "127.0.0.1", int(self._process.stdout.readline())

    def close(self) -> int:
        """End the relay; return the number of its connections."""
        assert self._process is not None, "nobody asked the way"
        said, _ = self._process.communicate()
        return int(said)


@pytest.fixture(scope="module")
def staff() -> Iterator[Staff]:
    """Return three worker processes."""
    made = Staff()
    yield made
    made.dismiss()


def _train(
    staff: Staff, patch: pytest.MonkeyPatch, *manners: Manner, patient: bool, num_steps: int = 5
) -> tuple[Trace, int]:
    """Return the trace of a run with worker RANK behind a relay, and its number of connections."""
    relay = Relay(*manners)
    staff.routes = {RANK: relay.route}
    trainings.employ(staff, patch)
    try:
        options = PATIENT if patient else stars.SOON
        trace = Awaiting(subject(REAL, num_steps=num_steps, options=options)).train()
    finally:
        num_connections = relay.close()
    trainings.require_right(trace)
    return trace, num_connections


@pytest.mark.parametrize(
    "manner",
    [
        Manner(delay_s=0.02),
        Manner(num_bytes=2 * KIB, bytes_per_s=KIB, piece_bytes=64),
        Manner(piece_bytes=1),
        Manner(piece_bytes=7, delay_s=0.0005),
    ],
    ids=["late", "1 KiB a second", "single bytes", "sevens"],
)
def test_a_slow_line_is_waited_for(
    staff: Staff, monkeypatch: pytest.MonkeyPatch, manner: Manner
) -> None:
    """No worker is dropped or reconnects, and all bits are the same."""
    trace, num_connections = _train(staff, monkeypatch, manner, patient=True)
    assert stars.changes(trace) == []
    assert num_connections == 1


@pytest.mark.parametrize("num_bytes", ENDS[::3])
def test_a_line_that_ends(staff: Staff, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """The worker reconnects, wherever the line goes silent, and the run completes."""
    manner = Manner(num_bytes=num_bytes, then="half_open")
    _, num_connections = _train(staff, monkeypatch, manner, patient=False)
    assert num_connections >= 2  # more, if its old place is still taken when it comes


def test_a_line_that_ends_again_and_again(staff: Staff, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line ends at every place, one after the other."""
    manners = [Manner(num_bytes=num_bytes, then="cut") for num_bytes in ENDS]
    _, num_connections = _train(staff, monkeypatch, *manners, patient=False, num_steps=15)
    assert num_connections >= len(ENDS) + 1
