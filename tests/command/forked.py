"""Starts the ranks of a script as torchrun does, forked from one process that has torch loaded.

`python forked.py WORLD_SIZE SCRIPT ARGUMENTS ...`; torchrun takes seconds a rank to import it.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import traceback

# Loaded before the fork, as the first optimizer of every rank would load it after that.
import torch._dynamo.aot_compile
import torch.distributed
import torch.nn.parallel
import torch.utils.data  # noqa: F401

import entrenar_py.observing.observer  # noqa: F401


def main() -> int:
    """0 if every rank ended well; the others are killed when one does not."""
    world_size, script, *arguments = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = set()
    for rank in range(int(world_size)):
        pid = os.fork()
        if pid == 0:
            os.environ.update({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            return 0
        ranks.add(pid)
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return int(failed)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # noqa: BLE001  (a rank's: told as Python tells it, then its process ends)
        traceback.print_exc()
        sys.last_value = sys.exception()
        code = 1
    sys.exit(code)
