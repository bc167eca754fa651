"""Runs a command to its end or its deadline; nothing that it started is left behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from entrenar_py.command import stacks
from entrenar_py.errors import UsageError
from entrenar_py.observing import FOLDER

OUTPUT = "output.txt"
OUTPUT_BYTES_MAX = 2**24  # of a run that are kept
TAIL_LINES = 20
PIECE_BYTES = 2**16
LOOK_EVERY_S = 1.0
LEAVING_S = 15.0  # processes that hang when they take themselves down do not end at all
MERCY_S = 5.0  # after SIGTERM: torchrun ends its workers itself


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
) -> Ended:
    """Runs `command` in this working folder, with `variables` beside this environment.

    Once training `is_over` it has LEAVING_S to end, as at its deadline it has none.
    Its ranks keep what they record in `folder`, and its output goes to OUTPUT there. Raises
    UsageError where it can't be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output, started = folder / OUTPUT, time.monotonic()
    environment = {**os.environ, **variables, FOLDER: str(folder)}
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(f"{shlex.join(command)}: can't be started ({error.strerror})") from error
    keeper = _Keeper(process.stdout, output)
    try:
        code = _wait(process, deadline_s, is_over)
        if code is None:
            stacks.ask(folder, set(_started_by(folder)))
    finally:
        num_left = _end(process, folder)
        keeper.join()
    return Ended(
        code=code,
        seconds=time.monotonic() - started,
        tail=keeper.tail,
        output=output,
        num_left=num_left,
    )


def _wait(
    process: subprocess.Popen[bytes], deadline_s: float, is_over: Callable[[], bool]
) -> int | None:
    """The exit code; None where it did not end in time."""
    deadline, leaving = time.monotonic() + deadline_s, False
    while (left_s := deadline - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(left_s, LOOK_EVERY_S))
        if not leaving and is_over():
            leaving, deadline = True, min(deadline, time.monotonic() + LEAVING_S)
    return None


def _end(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Ends the command, if it has not ended, and all that it started; how many were left."""
    over = process.poll() is not None
    if not over:
        _signal(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(MERCY_S)
    left = set(_started_by(folder)) - {process.pid}
    for pid in (process.pid, *left):
        _signal(pid, signal.SIGKILL)
    process.wait()
    return len(left) if over else 0


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _started_by(folder: Path) -> Iterator[int]:
    """The processes whose environment names `folder`: whoever is their parent by now."""
    mark = f"{FOLDER}={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


class _Keeper(threading.Thread):
    """Keeps the head of what a command prints in a file, and its last lines."""

    def __init__(self, source: IO[bytes] | None, path: Path) -> None:
        assert source is not None, "it was asked for"
        super().__init__(daemon=True)
        self._source, self._path = source, path
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES + 1)
        self.start()

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, without those that are empty."""
        told = (line.decode(errors="replace").rstrip() for line in self._lines)
        return tuple(line for line in told if line)[-TAIL_LINES:]

    def run(self) -> None:
        """Until nobody can print any more."""
        kept, rest = 0, b""
        with self._source, self._path.open("wb") as file:
            while piece := self._source.read1(PIECE_BYTES):  # type: ignore[attr-defined]
                file.write(piece[: max(0, OUTPUT_BYTES_MAX - kept)])
                kept += len(piece)
                *lines, rest = (rest + piece).split(b"\n")
                self._lines.extend(lines[-TAIL_LINES:])
                rest = rest[-PIECE_BYTES:]
            self._lines.append(rest)
