"""Opening of files from outside: only regular files, and only up to a size.

`read` also takes pipes.

A folder, a device, a socket or an endless pipe raises an OSError. Its `strerror` says what the path
is and what to give instead. The caller adds the file's name.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

PIPE_S = 10.0  # the time limit for reading a pipe to its end
# Maximum length of a line in a JSON lines file. The longest lines have the values of a model's
# tensors.
LINE_BYTES_MAX = 2**28
PIECE_BYTES = 2**16

# O_NONBLOCK keeps the opening of a pipe without a writer from blocking. It has no effect on regular
# files.
_NO_WAIT = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: Path, *, bytes_max: int | None = None) -> BufferedReader:
    """Open the regular file at `path` for reading. Raises OSError at once for anything else.

    Also raises OSError for a file larger than `bytes_max`. None means no limit; then read it with
    `lines`, which limits each line.
    """
    handle = _opened(path)
    try:
        require_regular(handle)
        size = os.fstat(handle).st_size
        if bytes_max is not None and size > bytes_max:
            raise too_large(size, bytes_max)
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def open_to_write(path: Path, *, flags: int = 0, mode: int = 0o644) -> int:
    """Open the regular file at `path` to read and write, and return its descriptor.

    A missing file is created. `flags` are added to those of `os.open`. Raises OSError at once for
    anything but a regular file.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_WAIT | flags, mode)
    try:
        require_regular(handle)
    except OSError:
        os.close(handle)
        raise
    return handle


def require_regular(handle: int) -> None:
    """Raise OSError unless the descriptor `handle` belongs to a regular file."""
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        raise _no_file(mode)


def sync_folder(folder: Path) -> None:
    """Flush `folder` to disk: afterwards its new files would survive a power cut.

    Some file systems can't, or the user may not read the folder. Then this does nothing.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def problem(error: OSError, folder: Path) -> str:
    """Return why a file in `folder` can't be written.

    For a full disk, also how much space is free.
    """
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return reason
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return reason
    return f"{reason}: {free:,} bytes are free there"


def read(path: Path, *, bytes_max: int) -> bytes:
    """Return the bytes of the file at `path`, or of a pipe such as a shell's `<(command)`.

    A pipe must end within PIPE_S. Raises OSError for other kinds of files, and for more than
    `bytes_max` bytes.
    """
    handle = _opened(path)
    try:
        status = os.fstat(handle)
        if stat.S_ISFIFO(status.st_mode):
            return _piped(handle, bytes_max)
        if not stat.S_ISREG(status.st_mode):
            raise _no_file(status.st_mode)
        if status.st_size > bytes_max:
            raise too_large(status.st_size, bytes_max)
        with os.fdopen(os.dup(handle), "rb") as file:
            data = file.read(bytes_max + 1)  # it may have grown, or report a size of 0
    finally:
        os.close(handle)
    if len(data) > bytes_max:
        raise too_large(len(data), bytes_max)
    return data


def lines(file: BinaryIO, *, bytes_max: int = LINE_BYTES_MAX) -> Iterator[bytes]:
    """Yield the lines of `file` with their line ends, with only one line in memory at a time.

    Raises OSError for a line longer than `bytes_max`.
    """
    number = 0
    while line := file.readline(bytes_max + 1):
        number += 1
        if len(line) > bytes_max:
            problem = f"line {number} is longer than {bytes_max} bytes, the most that are read"
            raise OSError(errno.EFBIG, problem)
        yield line


def too_large(num_bytes: int, bytes_max: int) -> OSError:
    """Return the OSError for a file of `num_bytes` bytes, more than `bytes_max`."""
    return OSError(errno.EFBIG, f"it has {num_bytes} bytes or more; at most {bytes_max} are read")


def _no_file(mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    what = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
    return OSError(errno.EINVAL, f"it is {what}; give a file")


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | _NO_WAIT)
    except ValueError as error:  # the path has a NUL or another impossible character
        raise OSError(errno.EINVAL, f"not a possible path ({error}); give a file") from error


def _piped(handle: int, bytes_max: int) -> bytes:
    """Return all bytes written to a pipe until its writers have closed it, within PIPE_S."""
    pieces: list[bytes] = []
    deadline, size = time.monotonic() + PIPE_S, 0
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while size <= bytes_max:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(1000 * left_s):
            problem = f"it is a pipe that did not end within {PIPE_S:g} s; give a file"
            raise OSError(errno.ETIMEDOUT, problem)
        piece = os.read(handle, PIECE_BYTES)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
    raise too_large(size, bytes_max)
