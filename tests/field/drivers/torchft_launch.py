"""Start torchft's lighthouse and its replica groups, each by torchrun: GROUPS STEPS SCRIPT."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return int(taken.getsockname()[1])


def main(groups: int, steps: int, script: str) -> int:
    """Run `script` in replica groups of one process; return the first exit code that isn't 0."""
    port = free_port()
    fewest = os.environ.get("MIN_REPLICAS", str(groups))
    lighthouse = subprocess.Popen(
        [
            *("torchft_lighthouse", "--bind", f"[::]:{port}", "--min_replicas", fewest),
            *("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
        ]
    )
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    environment |= {"NUM_REPLICA_GROUPS": str(groups), "STEPS": str(steps)}
    environment["ENTRENAR_WORLD_SIZE"] = str(groups)
    replicas = [
        subprocess.Popen(
            [
                *("torchrun", f"--master_port={free_port()}", "--nnodes=1", "--nproc_per_node=1"),
                *("--max_restarts=10", script),
            ],
            env={**environment, "REPLICA_GROUP_ID": str(group), "ENTRENAR_RANK": str(group)},
        )
        for group in range(groups)
    ]
    signal.signal(signal.SIGTERM, lambda *_: [one.terminate() for one in replicas])
    codes = [one.wait() for one in replicas]
    lighthouse.kill()
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
