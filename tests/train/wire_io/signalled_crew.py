"""A crew whose fork server loads this module, which takes a while; run by test_processes.py."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

from entrenar_py.train.wire_io.processes import Crew
from tests.train.wire_io import jobs

if __name__ == "tests.train.wire_io.signalled_crew":  # in the fork server
    print("loads", flush=True)
    time.sleep(1)

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: print("told", flush=True))
    crew = Crew(jobs.main, preload=["tests.train.wire_io.signalled_crew"])
    hand = crew.give(b"pid")
    crew.gather(20)
    print("answered" if hand.answer else "died", flush=True)
    print("left:", *Path(tempfile.gettempdir()).iterdir(), flush=True)  # if it is killed now
    crew.dismiss()
