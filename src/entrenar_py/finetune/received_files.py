"""The worker's cache of files: named by their SHA-256, verified, shared by workers of one host.

A file is written to `DIGEST.part` by whoever holds the lock `DIGEST.lock`, and renamed when it is
whole and its digest is right. What a killed worker has left there is gone on with.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py.errors import SystemFailure, UsageError
from entrenar_py.finetune.package import File
from entrenar_py.protocol.effects import Finish
from entrenar_py.protocol.frames import Buffer
from entrenar_py.protocol.package import Part

WAIT_S = 0.2  # for another worker that fetches the same file
HASHED_BYTES = 2**20  # at a time
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

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Make the folder; UsageError if that is impossible."""
        self._folder, self._say = folder, say
        self._whole: set[str] = set()  # verified in this process
        self._partials: dict[str, _Partial] = {}
        self._num_wrong: dict[str, int] = {}
        self.num_fetched = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def path(self, file: File) -> Path:
        """Return where `file` is once it is whole."""
        return self._folder / file.digest

    async def get(self, files: Sequence[File], fetch: Fetch) -> Finish | None:
        """Return once all `files` are here, whole and verified; a Finish that isn't `completed`.

        Raises UsageError if they can't be written, SystemFailure if the coordinator sends others.
        """
        told_waiting = False
        while left := [file for file in files if not await asyncio.to_thread(self._has, file)]:
            with ExitStack() as locks:
                mine = [file for file in left if self._locks(file, locks)]
                mine = [file for file in mine if not self._has(file)]  # made before the lock
                finish = await self._fetch(mine, fetch, locks) if mine else None
            if finish is not None and finish.status != "completed":
                return finish
            if not mine:
                if not told_waiting:
                    self._say(f"another worker of this host fetches {left[0].name}: waits for it")
                told_waiting = True
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
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unwritable(error) from error
        if digest == file.digest:
            self._whole.add(digest)
            return True
        self._say(f"{file.name} in {self._folder} is damaged: it is fetched again")
        path.unlink(missing_ok=True)
        return False

    def _locks(self, file: File, locks: ExitStack) -> bool:
        """Lock `file` until `locks` is closed; return False if another process has the lock."""
        try:
            handle = os.open(
                self.path(file).with_suffix(".lock"),
                os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        locks.callback(os.close, handle)  # the file stays, since another may wait for it
        return True

    # --- files that are on their way --------------------------------------------------------------

    def _opened(self, file: File) -> _Partial:
        """Return what is here of `file`, hashed, and open for more."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(self.path(file).with_suffix(".part"), flags, 0o600)
            partial = _Partial(file, handle, 0, hashlib.sha256())
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size > file.num_bytes:
                os.ftruncate(handle, 0)
            while data := os.pread(handle, HASHED_BYTES, partial.num_bytes):
                partial.hasher.update(data)
                partial.num_bytes += len(data)
        except OSError as error:
            raise self._unwritable(error) from error
        return partial

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
            raise self._unwritable(error) from error
        self.num_fetched += memoryview(content).nbytes
        if partial.num_bytes == partial.file.num_bytes:
            self._end(partial)

    def _end(self, partial: _Partial) -> None:
        file = partial.file
        path = self.path(file).with_suffix(".part")
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

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(
            f"cache {self._folder}: can't be used ({error.strerror or error}); make room or give "
            "access, or set XDG_CACHE_HOME to another folder. What has come is kept"
        )
