"""A late worker fetches 2 GiB while two others train: their steps, and the memory of both ends.

`python -m tests.benchmarks.late_worker` runs a coordinator, two workers whose steps exchange 1 MiB,
and from the hundredth step on a process that fetches a file of 2 GiB, verifies it, and keeps it.
All are real processes on loopback. Prints a row; exit code 1 if the file is not complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import median
from typing import Any

from entrenar_py.train.finetune.package import File, ReceivedFiles
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import Piece
from entrenar_py.train.wire.terms import PIECE_BYTES, Package, Timing
from entrenar_py.train.wire.worker import Worker
from entrenar_py.train.wire_io import queries
from entrenar_py.train.wire_io.tcp import CoordinatorServer, WorkerClient
from tests.train.wire_io.fakes import LOOPBACK, SECRET, TERMS, FakeMember, FakeServer, run_of
from tests.train.wire_io.test_queries import source

FILE_BYTES = 2**31
BLOCK_BYTES = 2**24
VECTOR = bytes(2**20)
WORK_S = 0.02
TIMING = Timing(heartbeat_s=1.0, dead_after_s=30.0)
QUIET_STEPS, NUM_STEPS = 100, 2000


class Hands(FakeServer):
    """Hands that read one file."""

    def __init__(self, path: Path) -> None:
        super().__init__(VECTOR)
        self._path = path

    def piece(self, piece: Piece) -> bytes | str:
        with self._path.open("rb") as file:
            return os.pread(file.fileno(), PIECE_BYTES, piece.offset)


class Working(FakeMember):
    """Hands whose shards take WORK_S."""

    def work(self, step: int, shards: tuple[int, ...]) -> Any:
        time.sleep(WORK_S)
        return super().work(step, shards)


def peak_mib() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def fetch(port: int, digest: str, folder: Path, told: Queue[tuple[float, float, bool]]) -> None:
    """Fetch the file; tell the seconds, the memory that this took, and whether it is whole."""
    cache = ReceivedFiles(folder, lambda text: None, patience_s=300.0)
    since, before = time.monotonic(), peak_mib()
    get = partial(queries.fetch, source(port, package=digest, timing=TIMING))
    finish = asyncio.run(cache.get([File("model.safetensors", FILE_BYTES, digest)], get))
    told.put((time.monotonic() - since, peak_mib() - before, finish is None))


def train(port: int, rank: int) -> None:
    """Take part in the run as `rank`."""
    machine = Worker(TERMS, secret=SECRET, backend="cpu", rank=rank, timing=TIMING)
    client = WorkerClient(machine, Working(VECTOR))
    asyncio.run(client.run(LOOPBACK, port, patience_s=30.0))


async def measure(path: Path, digest: str) -> bool:
    """Run it, and print the row; return whether the file came."""
    made: list[float] = []

    def notify(effect: do.Effect) -> None:
        if isinstance(effect, do.Apply):
            made.append(time.monotonic())

    run = run_of(num_steps=NUM_STEPS, package=Package(digest, {digest: FILE_BYTES}))
    server = CoordinatorServer(run, Hands(path), timing=TIMING, secret=SECRET, notify=notify)
    _, port = await server.listen(LOOPBACK, 0)
    running = asyncio.ensure_future(server.finish())
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=train, args=(port, rank)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    while len(made) < QUIET_STEPS:
        await asyncio.sleep(0.05)
    before, told = peak_mib(), spawn.Queue()
    late = spawn.Process(target=fetch, args=(port, digest, path.parent / "cache", told))
    late.start()
    began = time.monotonic()
    while late.is_alive() and told.empty():
        await asyncio.sleep(0.05)
    ended, (seconds, fetcher_mib, is_whole) = time.monotonic(), told.get()
    server.stop("measured")
    await running
    lengths = [(at, 1e3 * (at - last)) for last, at in pairwise(made)]
    quiet = [length for at, length in lengths if at < began]
    busy = [length for at, length in lengths if began + 1 < at < ended]
    print("| | median step, ms | longest | seconds | coordinator, MiB more | fetcher |")
    print("|---|---|---|---|---|---|")
    print(f"| nobody fetches | {median(quiet):.0f} | {max(quiet):.0f} | | | |")
    print(
        f"| 2 GiB are fetched | {median(busy):.0f} | {max(busy):.0f} | {seconds:.0f} "
        f"| {peak_mib() - before:.1f} | {fetcher_mib:.1f} |"
    )
    for process in (late, *workers):
        process.join()
    return bool(is_whole)


def main() -> int:
    """Make the file, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        path, hasher, block = Path(folder) / "file", hashlib.sha256(), os.urandom(BLOCK_BYTES)
        with path.open("wb") as file:
            for turn in range(FILE_BYTES // BLOCK_BYTES):
                data = block[turn:] + block[:turn]
                hasher.update(data)
                file.write(data)
        return int(not asyncio.run(measure(path, hasher.hexdigest())))


if __name__ == "__main__":
    sys.exit(main())
