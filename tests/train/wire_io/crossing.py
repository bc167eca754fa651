"""One end of a crossing: run as a script, it takes part in one step of large vectors.

    crossing.py coordinator NUM_BYTES          prints its port, then how much memory it took
    crossing.py worker NUM_BYTES PORT          prints how much memory it took

Memory is the most bytes resident during the run, above those resident before: in both of them one
vector lies ready to be sent, and one is received.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Average, Message, Weights, Welcome
from tests.train.wire_io.fakes import TIMING, FakeMember, FakeServer, client_of, listening, run_of

# The state takes its time, and so may looking at it.
PATIENT = replace(TIMING, dead_after_s=60.0, gather_s=60.0)


class Large(FakeServer):
    """Keeps only the last vector received."""

    def keep(self, rank: int, message: Message, payload: Buffer) -> None:
        self.kept = payload


class LargeMember(FakeMember):
    """Keeps the received state, then the average in its place."""

    def load(self, welcome: Welcome, payload: Buffer) -> None:
        """The average takes the place of the state."""
        self._num_blocks = welcome.blocks

    def hold(self, message: Average | Weights, payload: Buffer) -> None:
        super().hold(message, payload)
        self.kept = payload


async def coordinate(num_bytes: int) -> int:
    """Run a coordinator; return the bytes that it took."""
    hands = Large(b"x" * num_bytes)
    run = run_of(num_steps=1, num_shards=1, world_size=1, awaited={})
    before = _start_measuring()
    server, port = await listening(run, hands, timing=PATIENT)
    print(port, flush=True)
    assert (await server.finish()).status == "completed"
    return _peak() - before


async def work(num_bytes: int, port: int) -> int:
    """Run a worker; return the bytes that it took."""
    client = client_of(0, LargeMember(b"x" * num_bytes), timing=PATIENT)
    before = _start_measuring()
    assert (await client.run("127.0.0.1", port, patience_s=10.0)).status == "completed"
    return _peak() - before


def _start_measuring() -> int:
    """Reset the peak; return the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    end, num_bytes, *port = sys.argv[1:]
    story = work(int(num_bytes), *map(int, port)) if port else coordinate(int(num_bytes))
    print(asyncio.run(story))
