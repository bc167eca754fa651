"""Locks that reserve a run's files for one coordinator, and checks that the files are writable."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import files, json_text, printing
from entrenar_py.train.arithmetic import checkpoint

SUFFIX = ".lock"
_TRIES = 10  # to lock a file that other processes remove at the same time
_HOLDER_BYTES_MAX = 1000
_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}")
_TIME = "%Y-%m-%d %H:%M:%S"
_TIME_FORM = re.compile(r"[0-9-]{10} [0-9:]{8}")


def require_distinct(paths: Mapping[str, Path | None]) -> None:
    """Raise UsageError if two of `paths`, keyed by their purpose, are the same file."""
    known: dict[Path, str] = {}
    for what, path in paths.items():
        if path is None:
            continue
        other = known.setdefault(Path(os.path.realpath(path)), what)
        if other != what:
            raise UsageError(f"{what}={path}: the {other} is the same file; give each its own")


def claim(paths: Mapping[str, Path | None], stack: ExitStack) -> None:
    """Lock the checkpoint and the ledger among `paths` until `stack` is closed.

    `paths` are keyed by their purpose. Raises UsageError if a path can't be used.
    """
    require_distinct(paths)
    for what in ("checkpoint", "ledger"):
        path = paths.get(what)
        if path is not None:
            stack.enter_context(claimed(path, what, warn=_warn))
    if (path := paths.get("checkpoint")) is not None:
        require_writable(path)


def _warn(text: str) -> None:
    printing.warn(f"entrenar: {text}")


@contextmanager
def claimed(path: Path, what: str, *, warn: Callable[[str], None]) -> Iterator[None]:
    """Lock `path` during the body, against coordinators on all machines that share the locks.

    The kernel releases the lock when this process ends, however it ends. Raises UsageError if
    another process has the lock (the message names it), or if the lock file can't be written. On a
    file system without locks, `warn` is called instead.
    """
    lock = path.with_name(path.name + SUFFIX)
    try:
        file = _locked(lock, path, what, warn)
    except OSError as error:
        if error.errno == errno.EINVAL:
            problem = f"{lock} is not a regular file; move it away"
            raise UsageError(f"{what} {path}: {problem}") from error
        problem = f"can't be written ({error.strerror or error})"
        raise UsageError(f"{what} {path}: {problem}; {_ADVICE}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            if _is_at(file, lock):
                lock.unlink()
        os.close(file)


def require_writable(path: Path) -> None:
    """Require that a checkpoint can be written at `path`: create and remove its temporary file.

    Raises UsageError if that fails, or if `path` is a folder or a device.
    """
    if path.is_dir():
        raise UsageError(f"checkpoint {path}: it is a directory; {_ADVICE}")
    if path.exists() and not path.is_file():
        raise UsageError(f"checkpoint {path}: it is not a regular file; {_ADVICE}")
    partial = checkpoint.partial_of(path)
    try:
        os.close(files.open_to_write(partial, mode=0o666))
        partial.unlink()
    except OSError as error:
        problem = f"{partial.name} can't be made next to it ({error.strerror or error})"
        raise UsageError(f"checkpoint {path}: {problem}; {_ADVICE}") from error


_ADVICE = "give a path in an existing folder that can be written"


def _locked(lock: Path, path: Path, what: str, warn: Callable[[str], None]) -> int:
    """Return the descriptor of the locked file at `lock`. Raises OSError if it can't be opened."""
    for _ in range(_TRIES):
        file = files.open_to_write(lock, flags=os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            process = holder(file)
            os.close(file)
            raise UsageError(
                f"{what} {path}: {process} is writing it; stop that first, or give another path"
            ) from error
        except OSError as error:  # the file system has no locks
            warn(
                f"{what} {path}: its file system supports no locks ({error.strerror}): see to it "
                "that no other coordinator writes it"
            )
        if _is_at(file, lock):  # otherwise its last holder has just removed it
            sign(file)
            return file
        os.close(file)
    raise UsageError(
        f"{what} {path}: other coordinators took and removed its lock {_TRIES} times; try again"
    )


def _is_at(file: int, lock: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), lock.stat())
    return False


def sign(file: int) -> None:
    """Write this process's ID, host and time to `file`. A full disk is ignored."""
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime(_TIME)}
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(record).encode(), 0)


def holder(file: int) -> str:
    """Return a description of the process that signed `file`. Its content is untrusted."""
    try:
        match json_text.load(os.pread(file, _HOLDER_BYTES_MAX, 0)):
            case {"pid": int(pid), "host": str(host), "since": str(since)} if (
                0 < pid < 2**31 and _HOST.fullmatch(host) and _TIME_FORM.fullmatch(since)
            ):
                return f"process {pid} on {host} (since {since} there)"
    except (OSError, ValueError):
        pass
    return "another process"
