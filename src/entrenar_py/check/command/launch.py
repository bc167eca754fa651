"""Run a command to its end or its deadline, and end every process that it started."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from entrenar_py.check.command import stacks, subreaper, warm
from entrenar_py.check.command.leash import MERCY_S, Leash
from entrenar_py.check.observing import FOLDER
from entrenar_py.shared import process
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping

OUTPUT = "output.txt"
OUTPUT_BYTES_MAX = 2**24  # kept of a run's output
TAIL_LINES = 20
PIECE_BYTES = 2**16
LOOK_EVERY_S = 1.0
LEAVING_S = 15.0  # from the end of training to that of the process: some hang there for ever


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a command.

    - `code`: its exit code (negative: the signal), None if the deadline ended it.
    - `tail`: the last lines that it printed.
    - `output`: the file with all of them, up to OUTPUT_BYTES_MAX.
    - `num_left`: how many processes it left behind, which were killed.
    - `is_forked`: its launcher was forked from a process with torch.
    - `peak_bytes`: the most memory that one of its processes had.
    """

    code: int | None
    seconds: float
    tail: tuple[str, ...]
    output: Path
    num_left: int
    is_forked: bool = False
    peak_bytes: int = 0

    @property
    def how(self) -> str:
        """The end in words: `exit code 1`, `ended by SIGKILL`, `not finished after 300 s`."""
        if self.code is None:
            return f"not finished after {self.seconds:.0f} s"
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"ended by {signal.Signals(-self.code).name}"


def require_program(word: str, cwd: Path | None = None) -> None:
    """Check that the program `word` can be started in `cwd`, as far as is known.

    Raises UsageError, with what to do, if there is no such program.
    """
    # Absolute: a relative Path drops the ./ of ./train.sh, which is then sought on PATH.
    program = str((cwd or Path()).absolute() / word) if os.sep in word else word
    if "{" not in word and shutil.which(program) is None:
        raise UsageError(
            f"the command {word!r} can't be started: there is no such program that may be "
            "executed; give its path, or the name of one on PATH "
            "(for a script: python my_train.py)",
            field="command",
        )


def launch(
    command: Sequence[str],
    *,
    folder: Path,
    variables: Mapping[str, str],
    deadline_s: float,
    usual: Mapping[str, str] | None = None,
    is_over: Callable[[], bool] = lambda: False,
    cwd: Path | None = None,
    parents: warm.Parents | None = None,
    is_called_off: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run `command` with `variables` added to this process's environment, and return how it ended.

    The variables in `usual` are added where the environment lacks them.
    The command runs in the folder `cwd`, by default in the current one. Its ranks record to
    `folder`, and its output goes to OUTPUT there. It has `deadline_s` seconds, and at most
    LEAVING_S once `is_over()` says that training is over; it is ended when it `is_called_off`. Its
    processes are forked by `parents`, where these can.

    Raises UsageError if the command can't be started. Raises KeyboardInterrupt, after ending the
    command, if an interrupt was noted (`process.deferred_interrupts`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    output, started = folder / OUTPUT, time.monotonic()
    environment = {**(usual or {}), **os.environ, **variables, FOLDER: str(folder)}
    with ExitStack() as opened:  # before the command can remove the folder
        file = opened.enter_context(output.open("wb", buffering=0))
        leash = Leash(command, environment, cwd, parents)
        opened.pop_all()
    pipe = os.fstat(leash.output.fileno()).st_ino
    processes = partial(_processes, folder, session=leash.command_pid, pipe=pipe, leash=leash.pid)
    keeper = _OutputKeeper(leash.output, file)
    try:
        code = _wait(leash, deadline_s, is_over, is_called_off)
        seconds = time.monotonic() - started
        if code is None:
            stacks.ask(folder, set(processes()))
    finally:
        num_left = _end(leash, processes)
        keeper.join(MERCY_S)  # not for ever: another user's process may hold the pipe
    return Ended(
        code=code,
        seconds=seconds,
        tail=keeper.tail,
        output=output,
        num_left=num_left,
        is_forked=leash.is_forked,
        peak_bytes=leash.peak_bytes,
    )


def _wait(
    leash: Leash,
    deadline_s: float,
    is_over: Callable[[], bool],
    is_called_off: Callable[[], bool],
) -> int | None:
    """Return the exit code, or None if the command did not end in time."""
    deadline, leaving = time.monotonic() + deadline_s, False
    while (remaining_s := deadline - time.monotonic()) > 0 and not is_called_off():
        process.check_interrupts()
        code = leash.wait(min(remaining_s, LOOK_EVERY_S))
        if code is not None:
            return code
        if not leaving and is_over():
            leaving, deadline = True, min(deadline, time.monotonic() + LEAVING_S)
    return None


def _end(leash: Leash, processes: Callable[[], Iterator[int]]) -> int:
    """End the command and every process it started; return how many processes it left behind."""
    try:
        num_left = leash.end()
    finally:  # also if an interrupt ends the waiting
        others = set(processes())  # those that are no descendants, or all without a subreaper
        subreaper.kill(others, signal.SIGKILL)
    return num_left + (len(others) if leash.was_over else 0)


def _processes(folder: Path, *, session: int, pipe: int, leash: int) -> Iterator[int]:
    """Yield the ids of a run's remaining processes, the command itself among them.

    A process belongs to the run if it descends from the subreaper in front of the command, whose id
    is `leash`, if its environment names `folder`, if it is in `session`, or if it can write to the
    command's output, the pipe with inode `pipe`. The subreaper itself is left out.
    """
    mark = os.fsencode(f"{FOLDER}={folder}")
    below = set(subreaper.descendants(leash))
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) in (os.getpid(), leash):
            continue  # this process may be the command of another run
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            known = int(entry.name) in below
            known |= mark in (entry / "environ").read_bytes().split(b"\0")
            if known or _is_in_session(entry, session) or _can_print(entry, pipe):
                yield int(entry.name)


def _is_in_session(entry: Path, leader: int) -> bool:
    *_, fields = (entry / "stat").read_text(errors="replace").rpartition(")")
    state, _, _, session, *_ = fields.split()
    return int(session) == leader and state not in "ZX"  # dead, and not reaped


def _can_print(entry: Path, pipe: int) -> bool:
    """Return whether the process `entry` has the pipe open for writing, not just for reading."""
    for link in (entry / "fd").iterdir():
        with suppress(OSError):
            if link.lstat().st_mode & 0o200 and link.stat().st_ino == pipe:
                return stat.S_ISFIFO(link.stat().st_mode)
    return False


class _OutputKeeper(threading.Thread):
    """Writes a command's output to `file`, up to OUTPUT_BYTES_MAX, and keeps the last lines."""

    def __init__(self, source: IO[bytes], file: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._source, self._file = source, file
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES + 1)
        self.start()

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines that are not empty; a long line is cut in its middle."""
        lines = (line.decode(errors="replace").rstrip() for line in [*self._lines])
        return tuple(escaping.shortened(line) for line in lines if line)[-TAIL_LINES:]

    def run(self) -> None:
        """Read until every process has closed the pipe."""
        kept, rest = 0, b""
        with self._source, self._file as file:
            while piece := self._source.read1(PIECE_BYTES):  # type: ignore[attr-defined]
                with suppress(OSError):  # a full disk is no reason for the command to die
                    file.write(piece[: max(0, OUTPUT_BYTES_MAX - kept)])
                kept += len(piece)
                *lines, rest = (rest + piece).split(b"\n")
                self._lines.extend(lines[-TAIL_LINES:])
                rest = rest[-PIECE_BYTES:]
            self._lines.append(rest)
