"""Forked processes: leaving the parent's work, closing the parent's files, and messages.

Messages are JSON objects over Unix sockets, which can also pass open files.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Become(BaseException):
    """Raised in a forked process to unwind its parent's stack; `run` then calls `work`."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.work = work


def fork(work: Callable[[], object]) -> int:
    """Fork a process that does `work`, and return its id."""
    pid = os.fork()
    if pid == 0:
        raise Become(work)
    return pid


def run(work: Callable[[], object]) -> None:
    """Call `work`. A process that is forked meanwhile unwinds to here and calls its own work."""
    while True:
        try:
            work()
        except Become as born:
            work = born.work
        else:
            return


def settle(kept: set[int], own: set[int]) -> None:
    """Close the parent's files, except `kept` and `own`, and reset signals as at a fresh start."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *FORWARDED):
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for file in open_files() - kept - own - {0, 1, 2}:
        with suppress(OSError):
            os.close(file)


def set_standard_files(output: int, errors: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, source in ((0, nothing), (1, output), (2, errors)):
        os.dup2(source, stream)
    os.close(nothing)


def open_files() -> set[int]:
    """Return the open file descriptors of this process."""
    numbers = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            os.fstat(int(name))
            numbers.add(int(name))
    return numbers


def woken_by_children() -> int:
    """Return a descriptor that becomes readable when a child has ended."""
    awake, wake = os.pipe()
    for file in (awake, wake):
        os.set_blocking(file, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return awake


def ended(woken: int) -> Iterator[tuple[int, int]]:
    """Yield the id and the exit code of each child that has ended.

    `woken` is from `woken_by_children`.
    """
    os.read(woken, 4096)
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def end_like(code: int) -> NoReturn:
    """End this process with the exit code `code`, or by the signal -`code` if it is negative."""
    if code < 0 and code not in (-signal.SIGKILL, -signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def kill(pid: int, number: int) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


_LENGTH_BYTES = 8
_FDS_MAX = 8


def send(channel: socket.socket, message: Mapping[str, object], files: Sequence[int] = ()) -> None:
    """Send a message and the open descriptors `files`."""
    text = json.dumps(message).encode()
    socket.send_fds(channel, [len(text).to_bytes(_LENGTH_BYTES, "big")], [*files])
    channel.sendall(text)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors, or None if the channel was closed."""
    try:
        head, files, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, _FDS_MAX)
        if len(head) < _LENGTH_BYTES:
            return None
        left = int.from_bytes(head, "big")
        text = b""
        while len(text) < left and (piece := socket.socket.recv(channel, left - len(text))):
            text += piece
    except OSError:
        return None
    return (json.loads(text), files) if len(text) == left else None


def tell(file: int, line: str, *, closes: bool = True) -> None:
    """Write `line` to the descriptor `file`, even if nobody reads it.

    With `closes`, then close it.
    """
    with suppress(OSError):
        os.write(file, line.encode())
    if closes:
        os.close(file)
