"""Claims of processes on shards: one lock file of a folder, with a byte for each shard.

The kernel gives a lock up when its process ends, however it ends, so no claim outlives its owner.
On NFS the server keeps the locks, for all machines that mount the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import files

NAME = "claims.lock"
_FORM = "hhqqi0q"  # struct flock of Linux: type, whence, start, length, process
APPENDING_S = 60.0  # a line takes milliseconds, and a stopped process keeps the lock for ever
LOOK_EVERY_S = 0.02
_APPENDING = 2**40  # the byte that stands for the list; shards have those from 0 on


class Claims:
    """The claims of this process in `folder`. Only one object a process and folder may exist.

    A process that closes any handle of a file gives up all its locks on that file, so the handle
    stays open.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the lock file can't be opened."""
        self._file = files.open_to_write(folder / NAME, flags=os.O_NOFOLLOW)
        self._folder = folder

    def take(self, shard: int) -> bool:
        """Claim a shard; return False if another process has it.

        Raises UsageError on a file system without locks.
        """
        try:
            self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, shard)
        except (BlockingIOError, PermissionError):  # the standard allows either
            return False
        return True

    def give_up(self, shard: int) -> None:
        """Give a claim up."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, shard)

    @contextmanager
    def appending(self) -> Iterator[None]:
        """Keep other writers from the folder's lists in the body.

        Raises as `take` does, and SystemFailure if another process keeps this one out for long.
        """
        until_s = time.monotonic() + APPENDING_S
        while not self.take(_APPENDING):
            if time.monotonic() >= until_s:
                owner = _owner(self._file, _APPENDING)
                whose = "another process" if owner is None else f"process {owner}"
                raise SystemFailure(
                    f"distill.logits={self._folder}: {whose} has kept its lists locked for "
                    f"{APPENDING_S:g} s (is it stopped?); end it, or let it go on"
                )
            time.sleep(LOOK_EVERY_S)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _APPENDING)

    def _lock(self, how: int, byte: int) -> None:
        try:
            fcntl.lockf(self._file, how, 1, byte)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
                raise
            raise UsageError(
                f"distill.logits={self._folder}: its file system gives no locks "
                f"({error.strerror}), so two processes might make one shard twice; use a folder "
                "on another one"
            ) from error

    def close(self) -> None:
        """Give all claims up."""
        os.close(self._file)


def being_made(folder: Path, num_shards: int) -> dict[int, int]:
    """Return the shards that other processes make just now, with the process id of each.

    The id of a process on another machine says nothing. Only Linux is asked: elsewhere there are
    none.
    """
    try:
        file = os.open(folder / NAME, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nobody has made any here
        return {}
    found: dict[int, int] = {}
    try:
        for shard in range(num_shards):
            if (owner := _owner(file, shard)) is not None:
                found[shard] = owner
    except OSError:  # no locks there
        return found
    finally:
        os.close(file)
    return found


def _owner(file: int, byte: int) -> int | None:
    """Return the process that has the lock on `byte`; None if none has, or the system is not Linux.

    Raises OSError on a file system without locks.
    """
    if sys.platform != "linux":
        return None
    asked = struct.pack(_FORM, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, owner = struct.unpack(_FORM, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(owner)
