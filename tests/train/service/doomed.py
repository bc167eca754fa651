"""A real run whose processes are struck at messages: killed, stopped, or cut off by a reset."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.train.service.cluster import Process
from tests.train.service.nursery import Strike

COORDINATOR = -1
UNTIL_S = 300.0
WHEN = ("before", "sent", "got")
HOW = ("kill", "stop", "reset")
DEAD_AFTER_S = 1.5
STOPPED_S = 2 * DEAD_AFTER_S  # long enough that the others give a stopped process up
TIMING = {"heartbeat_s": 0.3, "dead_after_s": DEAD_AFTER_S}

# Of these some come before the first step, and perhaps none later.
JOINING = ("Challenge", "Hello", "Offer", "Want", "Piece", "Welcome", "Loaded")

Messages = Mapping[int, Sequence[str]]  # role -> names of messages
Start = Callable[[int, list[Strike], bool], Process]


@dataclass(frozen=True)
class Doom:
    """What befalls `role` at a message: `how` is in HOW, `when` in WHEN."""

    role: int
    how: str
    when: str
    message: str


def every(how: str, when: str, messages: Messages) -> list[Doom]:
    """Return the same doom at each of the messages."""
    return [Doom(role, how, when, message) for role, names in messages.items() for message in names]


def meet(dooms: Sequence[Doom], start: Start, *, roles: Sequence[int]) -> list[Process]:
    """Run until the run is over; AssertionError if a doom was not met by then.

    The n-th doom comes in step n or later, one at a message of JOINING as soon as it can. `start`
    starts a role, and is told at which messages it is struck, as `nursery.start` is, and whether it
    has died before. Returns the last process of each role.
    """
    left = {
        role: [
            (one.how, one.when, one.message, 0 if one.message in JOINING else step)
            for step, one in enumerate(dooms, 1)
            if one.role == role
        ]
        for role in roles
    }
    running = {role: start(role, left[role], False) for role in roles}
    since = dict[int, float]()  # when a process was seen stopped
    end = time.monotonic() + UNTIL_S
    while not all(one.has_ended for one in running.values()):
        assert time.monotonic() < end, f"not met: {left}\n" + _texts(running.values())
        time.sleep(0.02)
        for role, process in running.items():
            if process.has_ended:
                if process.code() == -signal.SIGKILL:
                    _strike_off(left[role], process)
                    running[role] = start(role, left[role], True)
            elif not _is_stopped(process):
                since.pop(process.pid, None)
            elif time.monotonic() - since.setdefault(process.pid, time.monotonic()) > STOPPED_S:
                process.signal(signal.SIGCONT)
    for role, process in running.items():
        process.code()
        _strike_off(left[role], process)
    assert not any(left.values()), f"not met: {left}\n" + _texts(running.values())
    return [*running.values()]


def _strike_off(left: list[Strike], process: Process) -> None:
    """Remove from `left` what `process` says has befallen it."""
    struck = re.findall(r"^struck: (\w+) (\w+) (\w+)$", process.text, re.MULTILINE)
    left[:] = [one for one in left if one[:3] not in struck]


def _is_stopped(process: Process) -> bool:
    try:
        status = Path(f"/proc/{process.pid}/stat").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _texts(processes: Iterable[Process]) -> str:
    return "\n---\n".join(one.text for one in processes)
