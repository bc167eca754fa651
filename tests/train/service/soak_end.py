"""Sends signals at the very end of runs: `python -m tests.train.service.soak_end [TIMES]`.

Coordinator and worker get a signal at a random moment after they print "completed". Their exit code
must be that of a complete run.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from entrenar_py.train.service import exit_codes
from tests.train.service.cluster import Cluster, cluster

LATEST_S = 0.2  # by then most have ended


def once(star: Cluster, chance: random.Random) -> None:
    """Make one run, and signal both processes when it is over."""
    for path in (star.folder / "state", star.folder / "ledger.jsonl"):
        path.unlink(missing_ok=True)
    ending = [star.coordinator(), star.worker()]
    for process in ending:
        process.until("completed")
        time.sleep(chance.random() * LATEST_S)
        number = chance.choice((signal.SIGTERM, signal.SIGINT))
        process.signal(number)
        assert process.code() == exit_codes.DONE, f"{number.name}: {process.text}"


def main(times: int) -> None:
    """Repeat runs; AssertionError, with the output, for a process with another exit code."""
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as star:
        star.configure(checkpoint={"path": "state", "every_steps": 5}, ledger="ledger.jsonl")
        for _ in range(times):
            once(star, chance)
    print(f"{times} complete runs, told to end in their last moments: exit code 0 of both")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
