"""The worker's cache of files: named by their SHA-256, verified, shared by workers of one host.

A file is written to `DIGEST.part` by whoever holds the lock `DIGEST.lock`, and renamed when it is
whole and its digest is right. What a killed worker has left there is gone on with. Who holds a lock
signs it, and touches it whenever bytes were hashed or came: a worker that waits for the lock sees
by that whether it makes sense to wait on.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import files as own_files
from entrenar_py.train.finetune.package import File
from entrenar_py.train.service import file_locks
from entrenar_py.train.wire.effects import Finish
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.terms import Part

WAIT_S = 0.2  # for another worker that fetches the same file
HASHED_BYTES = 2**20  # at a time
TOUCHED_EVERY_S = 0.5
WRONG_MAX = 2  # whole files with a wrong digest, of one file

# Fetches what its first argument lists before each connection, each piece by its second one.
Fetch = Callable[
    [Callable[[], Sequence[Part]], Callable[[str, int, Buffer], None]], Awaitable[Finish]
]


@dataclass
class _Partial:
    """A file that is being fetched, open for writing behind the `num_bytes` that are there."""

    file: File
    handle: int
    num_bytes: int
    hasher: Any


class ReceivedFiles:
    """The files in `folder`. `num_fetched` counts the bytes that came since this was made."""

    def __init__(self, folder: Path, say: Callable[[str], None], *, patience_s: float) -> None:
        """Make the folder; UsageError if that is impossible.

        Another process that fetches a file is waited for until nothing has come for `patience_s`.
        """
        self._folder, self._say, self._patience_s = folder, say, patience_s
        self._locks = dict[str, int]()  # digest -> handle of the lock that this process holds
        self._touched_s = 0.0
        self._whole: set[str] = set()  # verified in this process
        self._partials: dict[str, _Partial] = {}
        self._num_wrong: dict[str, int] = {}
        self.num_fetched = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(folder, error) from error

    def path(self, file: File) -> Path:
        """Return where `file` is once it is whole."""
        return self._folder / file.digest

    async def get(self, files: Sequence[File], fetch: Fetch) -> Finish | None:
        """Return once all `files` are here, whole and verified; a Finish that isn't `completed`.

        Raises UsageError if they can't be written, SystemFailure if the coordinator sends others.
        """
        seen, since = list[int](), 0.0
        while left := [file for file in files if not await asyncio.to_thread(self._has, file)]:
            with ExitStack() as locks:
                mine = [file for file in left if self._lock(file, locks)]
                mine = [file for file in mine if not self._has(file)]  # made before the lock
                finish = await self._fetch(mine, fetch, locks) if mine else None
            if finish is not None and finish.status != "completed":
                return finish
            if mine:
                continue
            if not seen:
                self._say(f"another worker of this host fetches {left[0].name}: waits for it")
            touched = [self._touched(file) for file in left]
            if touched != seen:
                seen, since = touched, time.monotonic()
            elif time.monotonic() - since >= self._patience_s:
                return Finish("failed", self._say_stuck(left[0]))
            await asyncio.sleep(WAIT_S)
        return None

    async def _fetch(self, files: Sequence[File], fetch: Fetch, stack: ExitStack) -> Finish:
        for file in files:
            opened = await asyncio.to_thread(self._opened, file)
            self._partials[file.digest] = opened
            stack.callback(self._closed, file)
            if opened.num_bytes == file.num_bytes:  # a worker was killed before it renamed it
                self._end(opened)
        here = sum(one.num_bytes for one in self._partials.values())
        total = sum(file.num_bytes for file in files)
        if not self._partials:
            return Finish("completed")
        self._say(f"fetches {len(files)} files, {total} bytes, of which {here} are here")
        return await fetch(self._missing, self._store)

    # --- whole files ------------------------------------------------------------------------------

    def _has(self, file: File) -> bool:
        """Return whether `file` is here with the right content. Remove it if it is damaged."""
        if file.digest in self._whole:
            return True
        path = self.path(file)
        try:
            with own_files.open_file(path) as content:
                hasher, _ = self._hash(content)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unusable(path, error) from error
        if hasher.hexdigest() == file.digest:
            self._whole.add(file.digest)
            return True
        self._say(f"{file.name} in {self._folder} is damaged: it is fetched again")
        path.unlink(missing_ok=True)
        return False

    def _hash(self, content: BinaryIO) -> tuple[Any, int]:
        """Return the hash of all that `content` has, and its number of bytes."""
        hasher, num_bytes = hashlib.sha256(), 0
        while data := content.read(HASHED_BYTES):
            hasher.update(data)
            num_bytes += len(data)
            self._touch()
        return hasher, num_bytes

    # --- locks ------------------------------------------------------------------------------------

    def _lock(self, file: File, locks: ExitStack) -> bool:
        """Lock `file` until `locks` is closed; return False if another process has the lock."""
        handle = self._opened_own(file, ".lock")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        file_locks.sign(handle)
        self._locks[file.digest] = handle
        locks.callback(self._unlock, file)
        return True

    def _unlock(self, file: File) -> None:
        os.close(self._locks.pop(file.digest))  # the file stays, since another may wait for it

    def _touch(self) -> None:
        """Show those that wait for this process's locks that it goes on."""
        if time.monotonic() - self._touched_s >= TOUCHED_EVERY_S:
            self._touched_s = time.monotonic()
            for handle in self._locks.values():
                os.utime(handle)

    def _touched(self, file: File) -> int:
        """Return when the lock of `file` was touched, on the clock of its file system."""
        try:
            return self._beside(file, ".lock").stat().st_mtime_ns
        except OSError as error:
            raise self._unusable(self._beside(file, ".lock"), error) from error

    def _say_stuck(self, file: File) -> str:
        handle, lock = self._opened_own(file, ".lock"), self._beside(file, ".lock")
        holder = file_locks.holder(handle)
        os.close(handle)
        return (
            f"{file.name}: {holder} fetches it, and nothing has come for {self._patience_s:g} s "
            f"({lock}); end that process or let it go on, or set XDG_CACHE_HOME to another folder"
        )

    def _beside(self, file: File, suffix: str) -> Path:
        return self.path(file).with_suffix(suffix)

    def _opened_own(self, file: File, suffix: str) -> int:
        """Return a handle of this worker's own file beside `file`; UsageError for anything else."""
        path = self._beside(file, suffix)
        try:
            return own_files.open_to_write(path, flags=os.O_NOFOLLOW, mode=0o600)
        except OSError as error:
            raise self._unusable(path, error) from error

    # --- files that are on their way --------------------------------------------------------------

    def _opened(self, file: File) -> _Partial:
        """Return what is here of `file`, hashed, and open for more."""
        handle = self._opened_own(file, ".part")
        try:
            if os.fstat(handle).st_size > file.num_bytes:
                os.ftruncate(handle, 0)
            with os.fdopen(handle, "rb", closefd=False) as content:
                hasher, num_bytes = self._hash(content)
        except OSError as error:
            os.close(handle)
            raise self._unusable(self._beside(file, ".part"), error) from error
        return _Partial(file, handle, num_bytes, hasher)

    def _closed(self, file: File) -> None:
        partial = self._partials.pop(file.digest, None)
        if partial is not None:
            os.close(partial.handle)

    def _missing(self) -> list[Part]:
        """Return what is still to come."""
        return [
            Part(one.file.digest, one.file.num_bytes, one.num_bytes)
            for one in self._partials.values()
        ]

    def _store(self, digest: str, offset: int, content: Buffer) -> None:
        """Write a piece behind what is there; rename the file after its last piece."""
        partial = self._partials[digest]
        assert offset == partial.num_bytes, "pieces come in order"
        try:
            left = memoryview(content)
            while left.nbytes:
                num_bytes = os.pwrite(partial.handle, left, partial.num_bytes)
                partial.hasher.update(left[:num_bytes])
                partial.num_bytes += num_bytes
                left = left[num_bytes:]
        except OSError as error:
            raise self._unusable(self._beside(partial.file, ".part"), error) from error
        self._touch()
        self.num_fetched += memoryview(content).nbytes
        if partial.num_bytes == partial.file.num_bytes:
            self._end(partial)

    def _end(self, partial: _Partial) -> None:
        file = partial.file
        path = self._beside(file, ".part")
        if partial.hasher.hexdigest() == file.digest:
            path.replace(self.path(file))
            self._whole.add(file.digest)
            self._closed(file)
            return
        wrong = self._num_wrong[file.digest] = self._num_wrong.get(file.digest, 0) + 1
        if wrong == WRONG_MAX:
            path.unlink()
            raise SystemFailure(
                f"{file.name}: the coordinator sends other bytes than those of SHA-256 "
                f"{file.digest}; start the run again"
            )
        self._say(f"{file.name}: what came is damaged; it is fetched again")
        os.ftruncate(partial.handle, 0)
        partial.num_bytes, partial.hasher = 0, hashlib.sha256()

    def _unusable(self, path: Path, error: OSError) -> UsageError:
        name = "" if path == self._folder else f"{path.name} "
        return UsageError(
            f"cache {self._folder}: {name}can't be used ({own_files.problem(error, self._folder)});"
            " make room or give access, or set XDG_CACHE_HOME to another folder. What has come is "
            "kept"
        )
