"""A supervisor that runs a command, keeps track of all its descendants, and ends them with it.

This script needs only the standard library, so that it starts in about 30 ms: `subreaper.py CONTROL
STATUS MERCY_S GRACE_S COMMAND...`. It writes lines to the descriptor STATUS: `started PID` or
`refused ERRNO`, `exit CODE` (negative: a signal), `peak BYTES`, `left COUNT`. When the other end of
the pipe CONTROL is closed, it ends all processes after a delay; on SIGTERM, at once.

A daemon may detach from its session, environment and output. When its parent dies, Linux makes the
nearest subreaper, which is this process, its new parent. If the command kills this process with
SIGKILL, such a daemon survives: no remaining process knows of it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
KILLING_S = 10.0  # a process that survives this long can't be killed by this user
_POLL_S = 0.01


class Warden:
    """Ends the command `pid` and all its descendants, and reports to the descriptor `status`."""

    def __init__(self, pid: int, status: int) -> None:
        self._pid, self._status = pid, status
        self.is_over = False

    def reap(self) -> bool:
        """Reap every process that has ended. Return whether any children remain."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self.is_over = True
                tell(self._status, f"exit {os.waitstatus_to_exitcode(status)}")

    def end(self, mercy_s: float, grace_s: float) -> None:
        """End the command and all its descendants.

        After SIGTERM the command has `mercy_s` seconds, in which it may end its own children.
        Processes that remain then also get SIGTERM, and have `grace_s` seconds. The others are
        killed.
        """
        was_over = self.is_over
        if not was_over:
            kill([self._pid], signal.SIGTERM)
            self._wait(mercy_s, lambda: self.is_over)
        left = self._left()
        if left:
            kill(left, signal.SIGTERM)
            self._wait(grace_s, lambda: False)
        deadline = time.monotonic() + KILLING_S
        while self.reap() and time.monotonic() < deadline:
            kill(self._left(), signal.SIGKILL)  # orphans of these follow in the next round
            time.sleep(_POLL_S)
        peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        tell(self._status, f"peak {peak_kib * 1024}")
        tell(self._status, f"left {len(left) if was_over else 0}")

    def _left(self) -> list[int]:
        return descendants() or ([] if self.is_over else [self._pid])

    def _wait(self, seconds: float, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while self.reap() and not is_done() and not hurried and time.monotonic() < deadline:
            time.sleep(_POLL_S)


hurried: list[int] = []  # SIGTERM signals received; if there is one, everything ends at once


def descendants(of: int | None = None) -> list[int]:
    """Return the ids of the running descendants of process `of` (None: this process)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # the process has ended meanwhile
            state, parent, *_ = (
                (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            )
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.name))
    pids, parents = [], [of or os.getpid()]
    while parents:
        below = children.pop(parents.pop(), [])
        pids += below
        parents += below
    return pids


def kill(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that exists and that this user may signal."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def tell(status: int, line: str) -> None:
    """Write `line` to the descriptor `status`, if any process still reads it."""
    with suppress(OSError):
        os.write(status, f"{line}\n".encode())


def become_subreaper() -> None:
    """Become the parent of orphaned descendants, on systems that have subreapers."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def started(command: Sequence[str]) -> Any:
    """Start a command in its own session. Return an object for its process, with a `pid`."""
    return subprocess.Popen(command, start_new_session=True)


def main(arguments: Sequence[str], start: Callable[[Sequence[str]], Any] = started) -> None:
    """Start the command, and end it when CONTROL is closed or SIGTERM arrives."""
    control, status = int(arguments[0]), int(arguments[1])
    mercy_s, grace_s = float(arguments[2]), float(arguments[3])
    for file in (control, status):
        os.set_inheritable(file, False)
    become_subreaper()
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(awake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: hurried.append(number))
    try:
        command = start(arguments[4:])
    except OSError as error:
        tell(status, f"refused {error.errno}")
        return
    tell(status, f"started {command.pid}")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # an open stream here would keep the pipe of the command's output open
        os.dup2(nothing, stream)
    warden = Warden(command.pid, status)
    ready = select.poll()
    for file in (control, awake):
        ready.register(file, select.POLLIN)
    while not hurried:
        warden.reap()
        if any(file == control for file, _ in ready.poll()):
            break
        os.read(awake, 4096)
    warden.end(mercy_s, grace_s)
    command.returncode = 0  # this process has reaped it already
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
