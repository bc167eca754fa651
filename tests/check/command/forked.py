"""Start the ranks of a script as torchrun does, forked from one process that has imported torch.

`python forked.py WORLD_SIZE SCRIPT ARGUMENTS ...`; torchrun takes seconds a rank to import it.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import numpy

# Loaded before the fork, as the first optimizer of every rank would load it after that.
import torch._dynamo.aot_compile
import torch.distributed
import torch.nn.parallel
import torch.utils.data
from torch.nn.parallel import DistributedDataParallel

import entrenar_py.check.observing.observer  # noqa: F401
from entrenar_py.check.observing.auto import SETTINGS, beginning

HOST = "127.0.0.1"


class Waiting:
    """The finder that waits for torch; here, all of torch is there."""

    def __init__(self) -> None:
        self.awaited: dict[str, Callable[[], None]] = {}


def main() -> int:
    """Return 0 if every rank ended well; if one does not, the others are killed."""
    world_size, script, *arguments = sys.argv[1:]
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    common = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "forked",  # by which Lightning knows that it was launched
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    ranks = set()
    for rank in range(int(world_size)):
        pid = os.fork()
        if pid == 0:
            listener.close()
            os.environ.update({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            sys.argv = [script, *arguments]
            _run(script)
        ranks.add(pid)
    # As torchrun's agent does: had rank 0 to open the port, another process might take it before.
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = True
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    del store
    return int(failed)


def _run(script: str) -> NoReturn:
    """Run the script and its exit handlers, and end this process at once.

    When the interpreter takes down a DistributedDataParallel while gloo's threads wait for it, it
    sometimes aborts or hangs: the destructor holds the interpreter's lock while it waits for a
    thread that needs the lock to free a context. So nothing of the script is taken down.
    """
    kept = None
    _keep_reducers()
    numpy.random.seed()  # as a new process does: a fork would have the state of the others
    torch.default_generator.seed()
    if os.environ.get(SETTINGS):
        beginning.begin(Waiting())
    try:
        kept = runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        kept = None if ended.code else {}
    except Exception:  # noqa: BLE001  (told as Python tells it)
        traceback.print_exc()
        sys.last_value = sys.exception()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(kept is None))


def _keep_reducers() -> None:
    """Keep the reducer of every DistributedDataParallel, which a function's end would free."""
    kept, build = list[object](), DistributedDataParallel.__init__

    def keep(self: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        kept.append(self.reducer)

    DistributedDataParallel.__init__ = keep  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
