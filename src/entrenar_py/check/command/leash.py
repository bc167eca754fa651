"""A command with a subreaper in front of it, so that none of its processes stays behind."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from entrenar_py.check.command import subreaper, warm
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import escaping

MERCY_S = 5.0  # after SIGTERM: torchrun ends its workers itself
GRACE_S = 1.0  # after SIGTERM, for processes that the command has left behind
_STARTING_S = 60.0
_STATUS_BYTES_MAX = 4096


class Leash:
    """A command that runs until it ends or `end` is called, and prints to `output`.

    `is_forked` tells whether `parents` forked it, `was_over` whether the command ended by itself,
    `peak_bytes` the most memory that one of its processes had. If this process dies, by any signal,
    the subreaper ends the command and all its descendants.

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
            self._process = forked or _started(command, environment, cwd, pipes)
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
        """The subreaper's process id."""
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Return the command's exit code (negative: the signal); None if it hasn't ended in time.

        If the subreaper was killed, its own exit code is returned, as the command's is unknown.
        """
        line = self._next("exit", seconds)
        if line is None and self._process.poll() is None:
            return None
        self.was_over = True
        return self._process.wait() if line is None else int(line)

    def end(self) -> int:
        """End the command and all its descendants; return how many processes it had left behind."""
        try:
            os.close(self._control)
            self._control = -1
            self._process.send_signal(signal.SIGCONT)  # the command may have stopped it
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
        """Return the text after `word` in a line of the subreaper; None if none comes in time."""
        deadline = time.monotonic() + seconds
        ready = select.poll()  # select.select knows no descriptor past 1023
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
        """Tell why ranks were started anew, if they were."""
        for line in self._lines:
            if line.startswith(b"cold ") and self._parents is not None:
                self._parents.reasons.setdefault(line[5:].decode(errors="replace"))

    def _close(self) -> None:
        for file in (self._control, self._status):
            if file >= 0:
                os.close(file)
        self._control = self._status = -1


def _started(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path | None,
    pipes: tuple[int, int],
) -> subprocess.Popen[bytes]:
    """Return the process of a subreaper that starts the command."""
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
