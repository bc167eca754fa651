"""Ten thousand strangers at `entrenar coordinator`, in the middle of a run: `make soak-real`.

`python -m tests.systems.soak_strangers 10000` sends 10000 over TCP, and as many to another run
over TLS. Two real workers take part in each run, which must end on the reference's bits. The
coordinator must hold no more afterwards than before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import ssl
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py.train.wire_io import sockets
from tests.systems.mischief import Mischief, Recorder
from tests.train.service.cluster import cluster, metrics, weights
from tests.train.wire_io.certificates import Authority

NUMBER = 10_000
NUM_WARM = 300  # strangers before the first measurement of the coordinator
TRAINING: dict[str, Any] = {
    "workload": "mlp",
    "width": 128,
    "world_size": 2,
    "seed": 7,
    "num_steps": 3_000,
    "optimizer": "momentum",
}
SETTLED_S = 12.0  # by then every stranger is disconnected
LOOK_S = 0.1
MIB = 2**20
# Memory for as many connections as may be open at a time (docs/protocol.md), and for the allocator.
GROWTH_MIB_MAX = 48
KEPT_MIB_MAX = 16


@dataclass
class Held:
    """The resident memory and the open files of one process, now and at most so far."""

    pid: int
    rss_mib: float = 0.0
    files: int = 0
    rss_mib_max: float = 0.0
    files_max: int = 0

    def look(self) -> None:
        """Measure again."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.rss_mib = pages * os.sysconf("SC_PAGE_SIZE") / MIB
        self.files = sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())
        self.rss_mib_max = max(self.rss_mib_max, self.rss_mib)
        self.files_max = max(self.files_max, self.files)


@dataclass(frozen=True)
class Outcome:
    """The complaints about one run, of which there should be none."""

    wrong: list[str]
    recorded: bytes


async def disturbed(folder: Path, number: int, seed: int, *, secured: bool) -> Outcome:
    """Run two workers, one of them recorded, with `number` strangers in between."""
    with cluster(folder) as star:
        tls_files, believing, context = _secured(folder) if secured else ({}, [], None)
        star.configure(TRAINING, wait_for=2, metrics="metrics.jsonl", **tls_files)
        host, port = star.address.split(":")
        coordinator = star.coordinator(anew=True)
        await asyncio.to_thread(coordinator.until, "listens at")
        recorder = Recorder(host, int(port))
        near, star.address = star.address, f"{host}:{await recorder.listen()}"
        workers = [star.worker(*believing, anew=True)]
        star.address = near
        workers.append(star.worker(*believing, anew=True))
        await asyncio.to_thread(coordinator.until, r"step 1/")
        mischief = Mischief(host, int(port), context, recorder.recorded)
        print(f"{'over TLS' if secured else 'plain'}: {number} strangers, seed {seed}")
        wrong = await _misbehave(mischief, number, seed, coordinator.pid, folder)
        ends = [await asyncio.to_thread(one.code) for one in (coordinator, *workers)]
        recorder.close()
    if ends != [0, 0, 0]:
        wrong.append(f"exit codes {ends}: {coordinator.text[-2000:]}")
    last, right = coordinator.lines[-1], weights(TRAINING)
    if last != f"completed: step {TRAINING['num_steps']}, weights {right}":
        wrong.append(f"{last!r}, where {right} is right")
    if "left in step" in coordinator.text:
        wrong.append("a worker was lost")
    return Outcome(wrong, recorder.recorded)


async def _misbehave(
    mischief: Mischief, number: int, seed: int, pid: int, folder: Path
) -> list[str]:
    """Send the strangers and measure the coordinator meanwhile; return the complaints."""
    rng = random.Random(seed)
    before, during, after = Held(pid), Held(pid), Held(pid)
    before.look()
    num_files = before.files
    await mischief.run(NUM_WARM, rng)
    before.look()
    first, began = _step(folder), time.monotonic()
    doing = asyncio.create_task(mischief.run(number, rng))
    while not doing.done():
        during.look()
        await asyncio.wait([doing], timeout=LOOK_S)
    await doing
    took_s, last = time.monotonic() - began, _step(folder)
    await asyncio.sleep(SETTLED_S)
    after.look()
    print(
        f"  {sum(mischief.done.values())} done ({number / took_s:.0f} a second), "
        f"{mischief.num_answered} answered; steps {first} to {last} meanwhile; of the coordinator\n"
        f"  {before.rss_mib:.0f} MiB before, at most {during.rss_mib_max:.0f}, {after.rss_mib:.0f} "
        f"after; {num_files} files, at most {during.files_max}, {after.files}"
    )
    print("  " + ", ".join(f"{count} {kind}" for kind, count in sorted(mischief.done.items())))
    complaints = {
        "the run was over too soon: nobody was disturbed": last + 1 >= TRAINING["num_steps"],
        "memory has grown while they were here": during.rss_mib_max - before.rss_mib
        > GROWTH_MIB_MAX,
        "memory was kept": after.rss_mib - before.rss_mib > KEPT_MIB_MAX,
        "files were kept": after.files > num_files,
    }
    return [complaint for complaint, holds in complaints.items() if holds]


def _step(folder: Path) -> int:
    steps: list[int] = [one["step"] for one in metrics(folder) if one["what"] == "step"]
    return max(steps)


def _secured(folder: Path) -> tuple[dict[str, Any], list[object], ssl.SSLContext]:
    """Return the configuration of the coordinator, of the workers, and of the strangers."""
    authority = Authority(folder, "ca")
    own = authority.signed("coordinator")
    files = {"tls": {"cert": own.cert.name, "key": own.key.name}}
    return files, ["--tls-ca", authority.ca], sockets.client_context(ca=authority.ca)


def soak(number: int, seed: int) -> bool:
    """Make both runs; return whether all was right."""
    wrong = []
    for secured in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            outcome = asyncio.run(disturbed(Path(folder), number, seed, secured=secured))
        wrong += outcome.wrong
        for complaint in outcome.wrong:
            print(f"  WRONG: {complaint}")
    print("nothing was wrong" if not wrong else f"{len(wrong)} complaints")
    return not wrong


def main() -> int:
    """Soak as the command line says; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.systems.soak_strangers")
    parser.add_argument("number", type=int, nargs="?", default=NUMBER, help="of strangers")
    parser.add_argument("--seed", type=int, default=0, help="of what they do")
    options = parser.parse_args()
    return 0 if soak(options.number, options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
