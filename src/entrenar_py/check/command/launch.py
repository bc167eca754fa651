"""Running of a command to its end or its deadline, and ending of all processes that it started.

The command is a child of a subreaper, so that none of its processes stays behind. If the command
hangs, each observed rank answers SIGUSR1 with its stack, even while it waits inside a call to torch
(`observing.recording`). The stacks show at which lines of the script the ranks stand.
"""

from __future__ import annotations

import math
import os
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from entrenar_py.check.command import subreaper, warm
from entrenar_py.check.observing import FOLDER
from entrenar_py.check.rank_files.rank_file import STACK_SUFFIX, SUFFIX
from entrenar_py.shared import process
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import escaping, files, json_text
from entrenar_py.shared.wording import named

PATIENCE_S = 3.0
_HEADER_BYTES_MAX = _STACK_BYTES_MAX = 2**20
_POLL_S = 0.05
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
# A rank waits for other ranks in a collective (they are all in this file), or in the autograd
# engine, which runs the hooks of DistributedDataParallel.
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = "_engine_run_backward"
_NOT_THE_SCRIPT = ("/torch/", "/entrenar_py/", "/lib/python", "<")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The script's line at which a rank stands, and the collective it waits in ("" if none)."""

    file: str
    line: int
    call: str

    def __str__(self) -> str:
        return f"in {self.call or 'no collective'} ({self.file}:{self.line})"


def ask_for_stacks(folder: Path, alive: Collection[int]) -> None:
    """Request the stacks of the ranks that record to `folder`. Wait up to PATIENCE_S for them.

    `alive` has the process ids of the run: no signal is sent to any other process.
    """
    waiting = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            with files.open_file(path) as file:
                pid = int(json_text.load(file.readline(_HEADER_BYTES_MAX))["pid"])
            if pid in alive:
                os.kill(pid, signal.SIGUSR1)
                waiting.append(path.with_name(path.name.removesuffix(SUFFIX) + STACK_SUFFIX))
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not all(map(_is_whole, waiting)):
        time.sleep(_POLL_S)


def _is_whole(path: Path) -> bool:
    return "in <module>" in _text(path)


def _text(path: Path) -> str:
    with suppress(OSError):
        return files.read(path, bytes_max=_STACK_BYTES_MAX).decode(errors="replace")
    return ""


def places_of_ranks(folder: Path) -> dict[int, Place]:
    """Return rank -> the place where it stands, for each rank that wrote its stack."""
    places = {}
    for path in sorted(folder.glob(f"*{STACK_SUFFIX}")):
        place = _place(_text(path))
        if place is not None:
            places[int(path.name.partition("-")[0])] = place
    return places


def _place(text: str) -> Place | None:
    """Return the place in the main thread's stack, which is the last one in `text`, or None."""
    main = text.rpartition("hread 0x")[2]
    frames = [frame for line in main.splitlines() if (frame := _FRAME.fullmatch(line))]
    own = next((f for f in frames if not any(s in f["file"] for s in _NOT_THE_SCRIPT)), None)
    if own is None:
        return None
    inside = frames[: frames.index(own)]
    calls = [f["name"] for f in inside if f["file"].endswith(_COLLECTIVES)]
    if any(f["name"] == _BACKWARD for f in inside):
        calls.append("backward")
    return Place(file=own["file"], line=int(own["line"]), call=calls[-1] if calls else "")


def places_in_words(where: Mapping[int, Place], world_size: int) -> str:
    """Return in words where each rank stands, and which ranks never reached the awaited call."""
    stood = [f"rank {rank} {place}" for rank, place in sorted(where.items())]
    stood += [f"rank {rank} did not answer" for rank in range(world_size) if rank not in where]
    waiting = {place.call for place in where.values() if place.call}
    absent = [rank for rank in range(world_size) if rank not in where or not where[rank].call]
    if waiting and absent:
        calls = " or ".join(sorted(waiting))
        stood.append(f"{named('rank', absent)} never reached {calls}")
    return "; ".join(stood)


MERCY_S = 5.0  # seconds for the command after SIGTERM, in which torchrun ends its workers
GRACE_S = 1.0  # seconds for other processes after SIGTERM
_STARTING_S = 60.0
_STATUS_BYTES_MAX = 4096


class Leash:
    """A command that runs until it ends or `end` is called, and prints to `output`.

    - `is_forked`: whether one of `parents` forked the command.
    - `was_over`: whether the command ended before `end` was called, as far as `wait` noticed.
    - `peak_bytes`: the peak memory of its largest process.

    If this process dies, by any signal, the subreaper ends the command and all its descendants.

    Raises UsageError if the command can't be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path | None,
        parents: warm.Parents | None = None,
    ) -> None:
        self._parents = parents
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        self._process: subprocess.Popen[bytes] | warm.Warden
        try:
            pipes = (control, status)
            forked = parents and parents.start(command, environment, cwd, pipes, (MERCY_S, GRACE_S))
            self.is_forked = forked is not None
            self._process = forked or _start_subreaper(command, environment, cwd, pipes)
        except OSError as error:
            self._close()
            raise _refused(command, error.strerror) from error
        finally:
            os.close(control)
            os.close(status)
        assert self._process.stdout is not None, "it was asked for"
        self.output: IO[bytes] = self._process.stdout
        self.was_over, self.peak_bytes = False, 0
        self._lines: list[bytes] = []
        self._rest = b""
        self.command_pid = self._started(command)

    @property
    def pid(self) -> int:
        """The process id of the subreaper."""
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Return the command's exit code, or None if it hasn't ended within `seconds`.

        A negative code is the number of the signal that ended it. If the subreaper was killed, its
        own exit code is returned, since that of the command is unknown.
        """
        line = self._next("exit", seconds)
        if line is None and self._process.poll() is None:
            return None
        self.was_over = True
        return self._process.wait() if line is None else int(line)

    def end(self) -> int:
        """End the command and all its descendants.

        Return how many processes the command left behind.
        """
        try:
            os.close(self._control)
            self._control = -1
            self._process.send_signal(signal.SIGCONT)  # the command may have stopped the subreaper
            line = self._next("left", MERCY_S + GRACE_S + subreaper.KILLING_S)
            self.peak_bytes = int(self._next("peak", 0.0) or 0)
            return 0 if line is None else int(line)
        except BaseException:  # an interrupt: end everything at once
            self._process.send_signal(signal.SIGTERM)
            self._next("left", subreaper.KILLING_S)
            raise
        finally:
            self._process.kill()
            self._process.wait()
            self._note_cold()
            self._close()

    def _started(self, command: Sequence[str]) -> int:
        """Return the command's process id.

        Raises UsageError if the command can't be started, SystemFailure if the subreaper has died.
        """
        line = self._next("started", _STARTING_S)
        if line is not None:
            return int(line)
        self._process.kill()
        self._process.wait()
        self.output.close()
        self._close()
        for line_bytes in self._lines:
            if line_bytes.startswith(b"refused "):
                raise _refused(command, os.strerror(int(line_bytes.split()[1])))
        raise SystemFailure(
            f"{shlex.join(command)}: its supervising process died before the command started; "
            "run it again"
        )

    def _next(self, word: str, seconds: float) -> str | None:
        """Return what follows `word` in a line from the subreaper, None if none comes in time."""
        deadline = time.monotonic() + seconds
        ready = select.poll()  # select.select can't take descriptors above 1023
        ready.register(self._status, select.POLLIN)
        while True:
            for line in self._lines:
                kind, _, value = line.decode().partition(" ")
                if kind == word:
                    return value
            remaining_s = max(0.0, deadline - time.monotonic())
            if not ready.poll(remaining_s * 1000):
                return None
            piece = os.read(self._status, _STATUS_BYTES_MAX)
            if not piece:
                return None
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self._lines += lines

    def _note_cold(self) -> None:
        for line in self._lines:
            if line.startswith(b"cold ") and self._parents is not None:
                self._parents.reasons.setdefault(line[5:].decode(errors="replace"))

    def _close(self) -> None:
        for file in (self._control, self._status):
            if file >= 0:
                os.close(file)
        self._control = self._status = -1


def _start_subreaper(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path | None,
    pipes: tuple[int, int],
) -> subprocess.Popen[bytes]:
    """Start a subreaper that starts the command, and return the subreaper's process."""
    script = [sys.executable, "-I", "-S", subreaper.__file__, *map(str, pipes)]
    return subprocess.Popen(
        [*script, str(MERCY_S), str(GRACE_S), *command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=pipes,
    )


def _refused(command: Sequence[str], problem: str | None) -> UsageError:
    shown = escaping.shortened(shlex.join(command))
    return UsageError(f"{shown}: can't be started ({problem}); check its program and arguments")


OUTPUT = "output.txt"
OUTPUT_BYTES_MAX = 2**24  # the part of a run's output that is kept
TAIL_LINES = 20
PIECE_BYTES = 2**16
LOOK_EVERY_S = 1.0
LEAVING_S = 15.0  # seconds between the end of training and of the process, as some never end


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended.

    - `code`: its exit code (negative: the number of a signal), or None if the deadline ended it.
    - `tail`: the last lines that it printed.
    - `output`: the file with its output, up to OUTPUT_BYTES_MAX.
    - `num_left`: the number of processes that it left behind; they were killed.
    - `is_forked`: whether its launcher was forked from a process that had imported torch.
    - `peak_bytes`: the peak memory of its largest process.
    - `quiet_s`: seconds between the last record of a rank and the deadline, if that ended it.
    """

    code: int | None
    seconds: float
    tail: tuple[str, ...]
    output: Path
    num_left: int
    is_forked: bool = False
    peak_bytes: int = 0
    quiet_s: float = math.inf

    @property
    def how(self) -> str:
        """The end in words: `exit code 1`, `ended by SIGKILL`, `not finished after 300 s`."""
        if self.code is None:
            return f"not finished after {self.seconds:.0f} s"
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"ended by {signal.Signals(-self.code).name}"


def found(command: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """Return `command`; a program that is not on PATH is taken from next to this Python, if there.

    That is where torchrun is if the environment of entrenar-check was not activated.
    """
    program, *words = command
    near = Path(sys.executable).parent / program
    is_bare = os.sep not in program and shutil.which(program) is None
    return (str(near), *words) if is_bare and os.access(near, os.X_OK) else tuple(command)


def require_program(word: str, cwd: Path | None = None) -> None:
    """Raise UsageError unless the program `word` can be started in `cwd`.

    A `word` with a placeholder is not checked.
    """
    # The path is absolute, because a relative Path drops the ./ of ./train.sh, which would then be
    # looked for on PATH.
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
    """Run `command` with `variables` added to this process's environment; return how it ended.

    The variables in `usual` are added only if the environment lacks them. The command runs in the
    folder `cwd`, by default the current one. Its ranks record to `folder`, and its output is
    written to the file OUTPUT in it. The command has `deadline_s` seconds, and at most LEAVING_S
    once `is_over()` reports the end of training. It is ended as soon as `is_called_off()` is true.
    Its processes are forked by `parents` if possible.

    Raises UsageError if the command can't be started. Raises KeyboardInterrupt, after ending the
    command, if an interrupt was noted (`process.deferred_interrupts`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    output, started = folder / OUTPUT, time.monotonic()
    environment = {**(usual or {}), **os.environ, **variables, FOLDER: str(folder)}
    with ExitStack() as opened:  # opened before the command can remove the folder
        file = opened.enter_context(output.open("wb", buffering=0))
        leash = Leash(command, environment, cwd, parents)
        opened.pop_all()
    pipe = os.fstat(leash.output.fileno()).st_ino
    processes = partial(_processes, folder, session=leash.command_pid, pipe=pipe, leash=leash.pid)
    keeper = _OutputKeeper(leash.output, file)
    try:
        code = _wait(leash, deadline_s, is_over, is_called_off)
        seconds, quiet_s = time.monotonic() - started, math.inf
        if code is None:
            quiet_s = _quiet_s(folder)
            ask_for_stacks(folder, set(processes()))
    finally:
        num_left = _end(leash, processes)
        keeper.join(MERCY_S)  # with a limit, since a process of another user may hold the pipe
    return Ended(
        code=code,
        seconds=seconds,
        tail=keeper.tail,
        output=output,
        num_left=num_left,
        is_forked=leash.is_forked,
        peak_bytes=leash.peak_bytes,
        quiet_s=quiet_s,
    )


def _quiet_s(folder: Path) -> float:
    """Return for how long no rank has recorded anything in `folder`; inf if that is unknown."""
    with suppress(OSError):
        os.utime(folder / OUTPUT)  # now, by the clock of the file system
        written = [path.stat().st_mtime for path in folder.glob(f"*{SUFFIX}")]
        return (folder / OUTPUT).stat().st_mtime - max(written, default=-math.inf)
    return math.inf


def _wait(
    leash: Leash,
    deadline_s: float,
    is_over: Callable[[], bool],
    is_called_off: Callable[[], bool],
) -> int | None:
    """Return the exit code, or None if the command did not end in time or was called off."""
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
    try:
        num_left = leash.end()
    finally:  # also if an interrupt ends the waiting
        others = set(processes())  # not descendants of the subreaper; all, if it died
        subreaper.kill(others, signal.SIGKILL)
    return num_left + (len(others) if leash.was_over else 0)


def _processes(folder: Path, *, session: int, pipe: int, leash: int) -> Iterator[int]:
    """Yield the ids of a run's remaining processes, including the command itself.

    A process belongs to the run if it descends from the subreaper (process id `leash`), if its
    environment names `folder`, if it is in `session`, or if it can write to the command's output,
    the pipe with inode `pipe`. The subreaper itself is left out.
    """
    mark = os.fsencode(f"{FOLDER}={folder}")
    below = set(subreaper.descendants(leash))
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) in (os.getpid(), leash):
            continue  # this process may be the command of another run
        with suppress(OSError):  # the process has ended, or belongs to another user
            known = int(entry.name) in below
            known |= mark in (entry / "environ").read_bytes().split(b"\0")
            if known or _is_in_session(entry, session) or _can_print(entry, pipe):
                yield int(entry.name)


def _is_in_session(entry: Path, leader: int) -> bool:
    *_, fields = (entry / "stat").read_text(errors="replace").rpartition(")")
    state, _, _, session, *_ = fields.split()
    return int(session) == leader and state not in "ZX"  # not a zombie or dead process


def _can_print(entry: Path, pipe: int) -> bool:
    for link in (entry / "fd").iterdir():
        with suppress(OSError):
            if link.lstat().st_mode & 0o200 and link.stat().st_ino == pipe:
                return stat.S_ISFIFO(link.stat().st_mode)
    return False


class _OutputKeeper(threading.Thread):
    """A thread that writes a command's output, up to OUTPUT_BYTES_MAX, and keeps the last lines."""

    def __init__(self, source: IO[bytes], file: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._source, self._file = source, file
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES + 1)
        self.start()

    @property
    def tail(self) -> tuple[str, ...]:
        """The last non-empty lines; a long line is shortened in the middle."""
        lines = (line.decode(errors="replace").rstrip() for line in [*self._lines])
        return tuple(escaping.shortened(line) for line in lines if line)[-TAIL_LINES:]

    def run(self) -> None:
        """Read until every process has closed the pipe."""
        kept, rest = 0, b""
        with self._source, self._file as file:
            while piece := self._source.read1(PIECE_BYTES):  # type: ignore[attr-defined]
                with suppress(OSError):  # a full disk must not end the command
                    file.write(piece[: max(0, OUTPUT_BYTES_MAX - kept)])
                kept += len(piece)
                *lines, rest = (rest + piece).split(b"\n")
                self._lines.extend(lines[-TAIL_LINES:])
                rest = rest[-PIECE_BYTES:]
            self._lines.append(rest)
