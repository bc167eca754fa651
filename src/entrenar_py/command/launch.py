"""Runs a command to its end or its deadline; nothing that it started is left behind."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from entrenar_py.command import stacks
from entrenar_py.command.leash import MERCY_S, Leash
from entrenar_py.harness import interrupts
from entrenar_py.observing import FOLDER
from entrenar_py.untrusted import escaping

OUTPUT = "output.txt"
OUTPUT_BYTES_MAX = 2**24  # of a run that are kept
TAIL_LINES = 20
PIECE_BYTES = 2**16
LOOK_EVERY_S = 1.0
LEAVING_S = 15.0  # processes that hang when they take themselves down do not end at all


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended: its exit code (negative: the signal), None if the deadline ended it.

    `tail` are its last lines, all of which are in `output` (the first OUTPUT_BYTES_MAX of them).
    `num_left` processes were still there when it had ended, and were killed.
    """

    code: int | None
    seconds: float
    tail: tuple[str, ...]
    output: Path
    num_left: int

    @property
    def how(self) -> str:
        """In words: `exit code 1`, `ended by SIGKILL`."""
        if self.code is None:
            return f"not finished after {self.seconds:.0f} s"
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"ended by {signal.Signals(-self.code).name}"


def launch(
    command: Sequence[str],
    *,
    folder: Path,
    variables: Mapping[str, str],
    deadline_s: float,
    is_over: Callable[[], bool] = lambda: False,
    cwd: Path | None = None,
) -> Ended:
    """Runs `command` in the folder `cwd`, or else in this one, with `variables` beside this
    environment.

    Once training `is_over` it has LEAVING_S to end, as at its deadline it has none.
    Its ranks keep what they record in `folder`, and its output goes to OUTPUT there. Raises
    UsageError where it can't be started; KeyboardInterrupt, if one was noted, when it is ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output, started = folder / OUTPUT, time.monotonic()
    environment = {**os.environ, **variables, FOLDER: str(folder)}
    leash = Leash(command, environment, cwd)
    run = _Run(folder, leash.command_pid, os.fstat(leash.output.fileno()).st_ino, leash.pid)
    keeper = _Keeper(leash.output, output)
    try:
        code = _wait(leash, deadline_s, is_over)
        seconds = time.monotonic() - started
        if code is None:
            stacks.ask(folder, set(run.processes()))
    finally:
        num_left = _end(leash, run)
        keeper.join(MERCY_S)  # else somebody can print whom nobody here may see, or end
    return Ended(
        code=code,
        seconds=seconds,
        tail=keeper.tail,
        output=output,
        num_left=num_left,
    )


def _wait(leash: Leash, deadline_s: float, is_over: Callable[[], bool]) -> int | None:
    """The exit code; None where it did not end in time."""
    deadline, leaving = time.monotonic() + deadline_s, False
    while (left_s := deadline - time.monotonic()) > 0:
        interrupts.check()
        code = leash.wait(min(left_s, LOOK_EVERY_S))
        if code is not None:
            return code
        if not leaving and is_over():
            leaving, deadline = True, min(deadline, time.monotonic() + LEAVING_S)
    return None


def _end(leash: Leash, run: _Run) -> int:
    """Ends the command, if it has not ended, and all that it started; how many were left."""
    try:
        num_left = leash.end()
    finally:  # also if an interrupt ends the waiting
        others = set(run.processes())  # no descendants of it, or there is no subreaper
        for pid in others:
            _signal(pid, signal.SIGKILL)
    return num_left + (len(others) if leash.was_over else 0)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass(frozen=True)
class _Run:
    """By what the processes of a run are known, whoever is their parent by now."""

    folder: Path  # named by their environment
    session: int  # who has cleared that may be in the command's session still
    pipe: int  # or print where the command does: the inode
    leash: int  # the process in front of it, which is none of them

    def processes(self) -> Iterator[int]:
        """Those that are left, the command itself among them."""
        mark = os.fsencode(f"{FOLDER}={self.folder}")
        for entry in Path("/proc").glob("[0-9]*"):
            if int(entry.name) in (os.getpid(), self.leash):
                continue  # this may be a command of a run itself
            with suppress(OSError):  # it has ended meanwhile, or is somebody else's
                named = mark in (entry / "environ").read_bytes().split(b"\0")
                if named or self._is_in_session(entry) or self._can_print(entry):
                    yield int(entry.name)

    def _is_in_session(self, entry: Path) -> bool:
        *_, told = (entry / "stat").read_text(errors="replace").rpartition(")")
        state, _, _, session, *_ = told.split()
        return int(session) == self.session and state not in "ZX"  # dead, and nobody asked how

    def _can_print(self, entry: Path) -> bool:
        """Whether it has the pipe open to write: who only reads it keeps the output."""
        for link in (entry / "fd").iterdir():
            with suppress(OSError):
                if link.lstat().st_mode & 0o200 and link.stat().st_ino == self.pipe:
                    return stat.S_ISFIFO(link.stat().st_mode)
        return False


class _Keeper(threading.Thread):
    """Keeps the head of what a command prints in a file, and its last lines."""

    def __init__(self, source: IO[bytes], path: Path) -> None:
        super().__init__(daemon=True)
        self._source, self._path = source, path
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES + 1)
        self.start()

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, without those that are empty; a long one is cut in its middle."""
        told = (line.decode(errors="replace").rstrip() for line in [*self._lines])
        return tuple(escaping.shortened(line) for line in told if line)[-TAIL_LINES:]

    def run(self) -> None:
        """Until nobody can print any more."""
        kept, rest = 0, b""
        with self._source, self._path.open("wb", buffering=0) as file:
            while piece := self._source.read1(PIECE_BYTES):  # type: ignore[attr-defined]
                with suppress(OSError):  # a full disk: who prints is not to die of that
                    file.write(piece[: max(0, OUTPUT_BYTES_MAX - kept)])
                kept += len(piece)
                *lines, rest = (rest + piece).split(b"\n")
                self._lines.extend(lines[-TAIL_LINES:])
                rest = rest[-PIECE_BYTES:]
            self._lines.append(rest)
