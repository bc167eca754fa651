"""The end of this process at a planned step, as if the job was taken off the machine.

A script that gets a smaller {steps} may train otherwise before the stop: its schedule may depend on
that number. Then the harness stops it from inside, with the same {steps} as ever.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from entrenar_py.check.observing import FOLDER, STOP

PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.01


class PlannedStop:
    """Ends this process before a step, if the harness planned that for this launch.

    By then the script has written the checkpoints of the steps before. A rank waits for the others
    at that step, so that none is cut off while it writes; but not for ever.

    The plan is `6`, or `6 from 3` for a process that should go on after 3 steps. If it doesn't say
    with which step it `begins`, its steps count from 0: it ends before its fourth.
    """

    def __init__(self, rank: int, world_size: int, *, begins: int = 0) -> None:
        planned, _, made = os.environ.get(STOP, "").partition(" from ")
        ahead = int(made) if made and not begins else 0
        self._step = int(planned) - ahead if planned else None
        self._rank, self._world_size = rank, world_size

    def perhaps_end(self, step: int, micro_batch: int) -> None:
        """End the process, with exit code 0, if this is the planned step or a later one."""
        if self._step is None or step < self._step or micro_batch:
            return
        folder = Path(os.environ[FOLDER])
        (folder / f"{self._rank:05}.before-{self._step}").touch()
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if len([*folder.glob(f"*.before-{self._step}")]) >= self._world_size:
                break
            time.sleep(_LOOK_EVERY_S)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(0)
