"""The jobs of the processes in these tests: a job is a word that says what to do."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from entrenar_py.train.wire_io.processes import Job


def main(pipe: Connection) -> None:
    """Answer each job with the process id, after what the job says."""
    desk = Job(pipe)
    while (given := desk.next()) is not None:
        match given:
            case b"note":
                desk.note(b"one")
                desk.note(b"two")
            case b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case b"leave":
                return
        desk.answer(str(os.getpid()).encode())
