"""Forking of a command's launches from processes that have already imported torch (`forks`).

A launch of a tiny script spends most of its time on imports: torchrun and each rank import torch.
Here one process imports torch for all runs of a call, and forks launchers and ranks. There are two
such processes if the runs differ in what ranks read at their start. For example, on GPUs accelerate
leaves two ranks to torchrun, but starts a single rank itself.

No result depends on forking. If it isn't possible, the command is launched as it is, and `told`
says why.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, BinaryIO

from entrenar_py.check.command import fork_parent
from entrenar_py.check.command.forks import imports, processes
from entrenar_py.check.command.forks.interpreter import options_of
from entrenar_py.check.observing.auto import Settings
from entrenar_py.check.project import commands
from entrenar_py.shared import process

READY_S = 120.0
LOOK_EVERY_S = 0.5
_SCRIPT_BYTES_MAX = 4096
_ENTRIES = (
    *("torch.distributed.run", "torch.distributed.launch"),
    *("accelerate.commands.accelerate_cli", "accelerate.commands.launch"),
)
_WORKERS = ("--nproc_per_node", "--nproc-per-node", "--num_processes", "--num-processes")
# With these options, or with a GPU, accelerate leaves several ranks to torchrun. Otherwise it
# starts one rank.
_TO_TORCHRUN = ("--multi_gpu", "--multi-gpu", "--use_fsdp", "--use-fsdp", "--use_deepspeed")
GPUS = Path("/dev/nvidiactl")
_ON_CPUS = ("--cpu", "--use_cpu", "--use-cpu")
# Options that make the launcher start ranks in a different way, or on another machine.
_NOT_PLAIN = ("--run-path", "--run_path", "--no-python", "--no_python", "--start-method")


class _Cold(Exception):
    """Raised if a launch can't be forked. The text says why."""


@dataclass(frozen=True)
class Interpreter:
    """The Python interpreter of a launcher: its path, and how launcher and ranks are started.

    - `words`: the `sys.orig_argv` of the launcher's process.
    - `workers`: the number of ranks as written in the command, or None.
    """

    path: str
    words: tuple[str, ...]
    workers: str | None

    @property
    def is_unbuffered(self) -> bool:
        """True if ranks are started with -u, as by torchrun."""
        if not self._is_accelerate:
            return True
        is_for_torchrun = GPUS.exists() or not {*self.words}.isdisjoint(_TO_TORCHRUN)
        return is_for_torchrun and self.workers != "1" and not self._is_on_cpus

    def environment(self, launchers: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that all ranks have in common at their start.

        `launchers` is the environment of the launcher.
        """
        common = {
            name: text
            for name, text in launchers.items()
            if name not in imports.RANKS and not name.startswith(imports.PREFIXES)
        }
        if self.workers != "1":
            common.setdefault("OMP_NUM_THREADS", "1")
        if self._is_accelerate and self._is_on_cpus:
            common |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
        return common

    @property
    def _is_accelerate(self) -> bool:
        return "accelerate" in " ".join(self.words[:3])

    @property
    def _is_on_cpus(self) -> bool:
        return not {*self.words}.isdisjoint(_ON_CPUS)


def interpreter(command: Sequence[str], cwd: Path) -> Interpreter:
    """Return the Python interpreter that runs the launcher of `command`.

    Raises _Cold unless the command is plainly torchrun or `accelerate launch`.
    """
    program = shutil.which(str(cwd / command[0]) if os.sep in command[0] else command[0])
    if program is None:
        raise _Cold(f"{command[0]} isn't found")
    if Path(command[0]).name.startswith("python"):
        _, is_module, rest = options_of(command[1:])
        if not is_module or not rest or rest[0] not in _ENTRIES or command[1] != "-m":
            raise _Cold("the command is not a launcher with ranks that can be forked")
        # Resolved, so that the path is the same for each copy of the folder. In a copy, the
        # environment is a link.
        path = str(Path(program).parent.resolve() / Path(program).name)
        words = (path, *command[1:])
    else:
        path = _interpreter_of(Path(program))
        words = (path, program, *command[1:])
    if plain := set(_NOT_PLAIN).intersection(words):
        raise _Cold(f"the command has {min(plain)}")
    return Interpreter(path, words, _num_workers(words))


def _interpreter_of(program: Path) -> str:
    """Return the Python in the first line of torchrun or accelerate, as installed by pip."""
    with program.open("rb") as file:
        text = file.read(_SCRIPT_BYTES_MAX).decode(errors="replace")
    first, _, rest = text.partition("\n")
    path = first.removeprefix("#!").strip()
    if first[:2] != "#!" or not Path(path).is_file():
        raise _Cold(f"{program.name} isn't a Python script")
    if not any(f"from {entry} import main" in rest for entry in _ENTRIES):
        raise _Cold(f"{program.name} is not a launcher with ranks that can be forked")
    return path


def _num_workers(words: Sequence[str]) -> str | None:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in _WORKERS:
            return value if equals else after
    return None


def _require_pidfds() -> None:
    """Raise _Cold unless this Python and this kernel can send signals to wardens.

    A Python that was built on an old system lacks the functions; a container may forbid the calls.
    """
    try:
        own = os.pidfd_open(os.getpid())
        try:
            signal.pidfd_send_signal(own, 0)
        finally:
            os.close(own)
    except (AttributeError, OSError) as error:
        raise _Cold("this Python or this kernel has no pidfd_open") from error


@dataclass
class Parents:
    """The processes that import torch and fork all runs of a command with the script `script`.

    - `first`: the modules that the processes import for any script.
    - `reasons`: why launches were not forked.

    The processes end with `close`, or when this process ends.
    """

    script: Path | None
    first: tuple[str, ...] = imports.FIRST
    reasons: dict[str, None] = field(default_factory=dict)
    _parents: dict[tuple[object, ...], _Parent] = field(default_factory=dict)
    num_forked: int = 0
    _one_at_a_time: Lock = field(default_factory=Lock)

    def told(self) -> str:
        """Return in words how the command was launched: forked, or why not."""
        if self.script is None:
            return "as-is"
        how = "forked" if self.num_forked else "as-is"
        return f"{how} ({'; '.join(self.reasons)})" if self.reasons else how

    def prepare(
        self, command: Sequence[str], environment: Mapping[str, str], cwd: Path | None
    ) -> None:
        """Begin the imports that a later launch of `command` needs."""
        with suppress(_Cold, OSError):
            self._parent(command, environment, cwd or Path.cwd())

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path | None,
        pipes: tuple[int, int],
        seconds: tuple[float, float],
    ) -> Warden | None:
        """Return the warden of a new launch that uses the `pipes` CONTROL and STATUS.

        Return None if the launch can't be forked, so that the command must be started as it is.
        """
        here = cwd or Path.cwd()
        with self._one_at_a_time:
            try:
                parent, words = self._parent(command, environment, here)
                forked = parent.fork(words, environment, here, pipes, seconds)
            except (_Cold, OSError) as error:
                self.reasons.setdefault(str(error))
                return None
            self.num_forked += 1
            return Warden(*forked)  # outside of `try`: the command has begun, and must not be again

    def close(self) -> None:
        """End the processes."""
        for parent in self._parents.values():
            parent.close()
        self._parents.clear()

    def _parent(
        self, command: Sequence[str], environment: Mapping[str, str], cwd: Path
    ) -> tuple[_Parent, tuple[str, ...]]:
        if self.script is None:
            raise _Cold("it is unknown which script the command runs")
        _require_pidfds()
        python = interpreter(command, cwd)
        before = python.environment(environment)
        key = (python.path, python.is_unbuffered, *sorted(before.items()))
        if key not in self._parents:
            self._parents[key] = _Parent(python, before, self.script, cwd, self.first)
        return self._parents[key], python.words


class _Parent:
    """A process that imports torch, and then forks wardens."""

    def __init__(
        self,
        python: Interpreter,
        environment: Mapping[str, str],
        script: Path,
        folder: Path,
        first: Sequence[str],
    ) -> None:
        self._control, theirs = socket.socketpair()
        settings = {
            "control": theirs.fileno(),
            "script": str(script),
            "folder": str(folder),
            "first": [*first],
            "without": [],
        }
        flags = ["-u"] if python.is_unbuffered else []
        with theirs:
            self._process = subprocess.Popen(
                [python.path, *flags, fork_parent.__file__, json.dumps(settings)],
                env={**environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self._why_cold: str | None = None  # None: not known yet

    def fork(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        pipes: tuple[int, int],
        seconds: tuple[float, float],
    ) -> tuple[int, BinaryIO, IO[bytes]]:
        """Return the process id of a new warden, its reports, and the command's output.

        Raises _Cold if this process can't fork a warden.
        """
        self._await()
        output, theirs = os.pipe()
        report, theirs_of_report = socket.socketpair()
        message = {
            "words": [*words],
            "environment": {**environment},
            "cwd": str(cwd),
            "seconds": [*seconds],
        }
        try:
            processes.send(self._control, message, [*pipes, theirs, theirs_of_report.fileno()])
        finally:
            os.close(theirs)
            theirs_of_report.close()
        with report:
            lines = report.makefile("rb")
        if line := lines.readline().split():
            return int(line[1]), lines, os.fdopen(output, "rb")
        lines.close()
        os.close(output)
        raise _Cold("its process with torch ended")

    def close(self) -> None:
        """End the process."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _await(self) -> None:
        """Wait until everything is imported. Raises _Cold if an import fails."""
        deadline = time.monotonic() + READY_S
        while self._why_cold is None:
            process.check_interrupts()
            if select.select([self._control], [], [], LOOK_EVERY_S)[0]:
                answer = processes.receive(self._control)
                self._why_cold = answer[0]["cold"] if answer else "its process with torch ended"
            elif time.monotonic() > deadline:  # a later launch may find it ready
                raise _Cold(f"torch was not imported within {READY_S:.0f} s")
        if self._why_cold:
            raise _Cold(self._why_cold)


class Warden:
    """A forked process that supervises a launch, with the methods of `Popen` that a Leash needs.

    It is a child of its `_Parent`, not of this process. The parent reports its end in `lines`.
    """

    def __init__(self, pid: int, lines: BinaryIO, output: IO[bytes]) -> None:
        self.pid, self._lines, self.stdout = pid, lines, output
        try:
            self._file = os.pidfd_open(pid)
        except OSError:
            lines.close()
            output.close()
            raise
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code if the process has ended, else None."""
        if self._code is None and select.select([self._lines], [], [], 0.0)[0]:
            self.wait()
        return self._code

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        if self._code is None:
            line = self._lines.readline().split()
            self._code = int(line[1]) if line else -signal.SIGKILL
            self._lines.close()
            os.close(self._file)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self._code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def of(options: argparse.Namespace) -> Parents:
    """Return the `Parents` for the command in `options`. They begin to import torch at once."""
    if options.launcher == "as-is":
        return Parents(None)
    command = commands.of(options.command).command
    folder = options.command_folder or Path.cwd()
    parents_of_forks = Parents(commands.script(command, folder)[1])
    observing = Settings().variables()  # a script with the line gets them, too
    for size in options.world_size[:1] or (2,):
        words = [word.replace("{world_size}", str(size)) for word in command]
        environment = {**commands.usual_variables(words), **os.environ, **observing}
        parents_of_forks.prepare(words, environment, folder)
    return parents_of_forks
