"""The files of a fine-tuning run, as workers fetch them: their list, and what it may contain.

A list is written by a coordinator and read by a worker, which trusts none of its names. It accepts
only plain names, of file types that hold no code and no pickles.

A worker's cache has verified files, named by their SHA-256 and shared by all workers of one host. A
file is written to `DIGEST.part` by the process that holds the lock `DIGEST.lock`, and renamed once
it is complete and its digest is right. What a killed worker left there is continued. The holder of
a lock signs it, and touches it whenever bytes were hashed or received. So a worker that waits for
the lock can see whether waiting makes sense.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import files as own_files
from entrenar_py.shared.untrusted import json_text
from entrenar_py.train.service import file_locks
from entrenar_py.train.wire.effects import Finish
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.terms import PIECE_BYTES, Part

VERSION = 1
LIST_BYTES_MAX = PIECE_BYTES
FILE_BYTES_MAX = 2**50
WEIGHTS = ".safetensors"
CODE = ".py"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.model",
    "bpe.codes",
    "dict.txt",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
# The files of a checkpoint other than weights. Others, such as pickled weights, are left out.
PLAIN = ("config.json", "generation_config.json", "model.safetensors.index.json", *TOKENIZER)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ADVICE = "use one release on both ends"


@dataclass(frozen=True, slots=True, order=True)
class File:
    """A file: its name without a folder, its size, and the SHA-256 of its content in hex digits."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The files for a worker: settings as a record, class weights, samples, and the checkpoint."""

    settings: Mapping[str, Any]
    class_weights: Sequence[float]
    samples: File
    model: Sequence[File]

    def files(self) -> list[File]:
        """Return all files of the package, without files of equal content, in a fixed order."""
        return list({file.digest: file for file in (*self.model, self.samples)}.values())


def may_be_named(name: str, *, with_code: bool) -> bool:
    """Return whether a checkpoint's file may have this name: no path, no pickle.

    Code is allowed only with `with_code`.
    """
    if _NAME.fullmatch(name) is None:
        return False
    return name in PLAIN or name.endswith(WEIGHTS) or (with_code and name.endswith(CODE))


def dump(contents: Contents) -> bytes:
    """Return the list of `contents`. Raises UsageError if a checkpoint has too many files."""
    record = {"version": VERSION, **asdict(contents)}
    text = json.dumps(record, sort_keys=True).encode()
    if len(text) > LIST_BYTES_MAX:
        raise UsageError(
            f"the list of the run's files has {len(text)} bytes, at most {LIST_BYTES_MAX} can be "
            "sent; use a checkpoint with fewer files"
        )
    return text


def parse(data: bytes) -> Contents:
    """Return the contents of a list. Raises UsageError for anything that `dump` can't write."""
    try:
        record = json_text.load(data, names_once=True)
        version = record.pop("version")
        if version != VERSION:
            raise ValueError(f"version {version!r}, but this worker reads version {VERSION}")
        contents = Contents(
            settings=_mapping(record.pop("settings")),
            class_weights=tuple(map(_weight, record.pop("class_weights"))),
            samples=_file(record.pop("samples")),
            model=tuple(map(_file, record.pop("model"))),
        )
        if record:
            raise ValueError(f"unknown keys {sorted(record)}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"the coordinator's list of files can't be read ({error}): {_ADVICE}"
        ) from error
    _require_safe(contents)
    return contents


def _require_safe(contents: Contents) -> None:
    trusts = contents.settings.get("trust_remote_code", False) is True
    names = [file.name for file in contents.model]
    for name in names:
        if not may_be_named(name, with_code=trusts):
            raise UsageError(
                f"the coordinator's list names a file {name!r}: a checkpoint has safetensors and "
                "plain text in one folder, and code only with trust_remote_code; nothing was "
                "fetched"
            )
    if len({name.lower() for name in names}) < len(names):
        raise UsageError("the coordinator's list names a file twice; nothing was fetched")
    sizes = dict[str, int]()
    for file in (*contents.model, contents.samples):
        if sizes.setdefault(file.digest, file.num_bytes) != file.num_bytes:
            raise UsageError(f"the coordinator's list gives {file.digest} two sizes")


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("settings are not a mapping")
    return value


def _weight(value: object) -> float:
    if not isinstance(value, float) or not (0 < value < math.inf):
        raise ValueError(f"class weight {value!r}")
    return value


def _file(record: Any) -> File:
    name, num_bytes, digest = (record.pop(key) for key in ("name", "num_bytes", "digest"))
    if not isinstance(name, str) or type(num_bytes) is not int or record:
        raise ValueError("a file has name, num_bytes and digest")
    if not 0 < num_bytes <= FILE_BYTES_MAX:
        raise ValueError(f"{name!r} of {num_bytes} bytes")
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"digest {digest!r} of {name!r}")
    return File(name, num_bytes, digest)


WAIT_S = 0.2  # between looks at a file that another worker fetches
HASHED_BYTES = 2**20  # bytes hashed at a time
TOUCHED_EVERY_S = 0.5
WRONG_MAX = 2  # the most attempts to fetch a file that end with a wrong digest

# Fetches files. The first argument lists what is missing, and is called before each connection; the
# second one stores a piece.
Fetch = Callable[
    [Callable[[], Sequence[Part]], Callable[[str, int, Buffer], None]], Awaitable[Finish]
]


@dataclass
class _Partial:
    """A file that is being fetched. Its first `num_bytes` are written, and it is open for more."""

    file: File
    handle: int
    num_bytes: int
    hasher: Any


class ReceivedFiles:
    """The files in `folder`. `num_fetched` counts the bytes received since this was created."""

    def __init__(self, folder: Path, say: Callable[[str], None], *, patience_s: float) -> None:
        """Create the folder. Raises UsageError if that is impossible.

        While another process fetches a file, this one waits until nothing has arrived for
        `patience_s`.
        """
        self._folder, self._say, self._patience_s = folder, say, patience_s
        self._locks = dict[str, int]()  # digest -> handle of the lock that this process holds
        self._has_locks = True  # until its file system says that it has none
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
        """Return the path of `file` once it is complete."""
        return self._folder / file.digest

    async def get(self, files: Sequence[File], fetch: Fetch) -> Finish | None:
        """Return None once all `files` are here and verified, or a Finish that isn't `completed`.

        Raises UsageError if they can't be written, and SystemFailure if the coordinator sends
        different bytes.
        """
        seen, since = list[int](), 0.0
        while left := [file for file in files if not await asyncio.to_thread(self._has, file)]:
            with ExitStack() as locks:
                mine = [file for file in left if self._lock(file, locks)]
                mine = [file for file in mine if not self._has(file)]  # may be new by now
                finish = await self._fetch(mine, fetch, locks) if mine else None
            if finish is not None and finish.status != "completed":
                return finish
            if mine:
                continue
            if not seen:
                self._say(f"waits for another worker of this host, which fetches {left[0].name}")
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
            if opened.num_bytes == file.num_bytes:  # a worker was killed before renaming it
                self._end(opened)
        here = sum(one.num_bytes for one in self._partials.values())
        total = sum(file.num_bytes for file in files)
        if not self._partials:
            return Finish("completed")
        self._say(f"fetches {len(files)} files, {total} bytes; {here} of them are here")
        return await fetch(self._missing, self._store)

    # --- whole files ------------------------------------------------------------------------------

    def _has(self, file: File) -> bool:
        """Return whether `file` is here with the right content. Removes it if it is damaged."""
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
        except OSError as error:
            if self._has_locks:
                self._has_locks = False
                self._say(
                    f"{self._folder}: its file system supports no locks ({error.strerror}): let "
                    "only one worker fetch at a time, or set XDG_CACHE_HOME to another folder"
                )
        file_locks.sign(handle)
        self._locks[file.digest] = handle
        locks.callback(self._unlock, file)
        return True

    def _unlock(self, file: File) -> None:
        # the lock's file stays: another process may be waiting for it
        os.close(self._locks.pop(file.digest))

    def _touch(self) -> None:
        """Touch this process's locks, so that the processes that wait for them see progress."""
        if time.monotonic() - self._touched_s >= TOUCHED_EVERY_S:
            self._touched_s = time.monotonic()
            for handle in self._locks.values():
                os.utime(handle)

    def _touched(self, file: File) -> int:
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
            f"({lock}); end that process, let it continue, or set XDG_CACHE_HOME to another folder"
        )

    def _beside(self, file: File, suffix: str) -> Path:
        return self.path(file).with_suffix(suffix)

    def _opened_own(self, file: File, suffix: str) -> int:
        path = self._beside(file, suffix)
        try:
            return own_files.open_to_write(path, flags=os.O_NOFOLLOW, mode=0o600)
        except OSError as error:
            raise self._unusable(path, error) from error

    # --- partial files ----------------------------------------------------------------------------

    def _opened(self, file: File) -> _Partial:
        """Return the part of `file` that is here, hashed, and open for more."""
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
        return [
            Part(one.file.digest, one.file.num_bytes, one.num_bytes)
            for one in self._partials.values()
        ]

    def _store(self, digest: str, offset: int, content: Buffer) -> None:
        """Append a piece. After the last one, rename the file."""
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
                f"{file.name}: the coordinator sends bytes that don't match SHA-256 "
                f"{file.digest}; start the run again"
            )
        self._say(f"{file.name}: the received file is damaged; it is fetched again")
        os.ftruncate(partial.handle, 0)
        partial.num_bytes, partial.hasher = 0, hashlib.sha256()

    def _unusable(self, path: Path, error: OSError) -> UsageError:
        name = "" if path == self._folder else f"{path.name} "
        return UsageError(
            f"cache {self._folder}: {name}can't be used ({own_files.problem(error, self._folder)});"
            " make room or give access, or set XDG_CACHE_HOME to another folder. What has arrived "
            "is kept"
        )
