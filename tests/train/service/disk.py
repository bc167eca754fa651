"""A disk that loses what was not synced: what a folder may hold after a power cut at any moment.

While a `Disk` is in use, the files of its folder are real. It watches the calls that make data
durable or move names (`os.fsync`, `os.replace`), and takes a `Cut` before and after each. Until a
file is synced, a power cut may keep any part of what was written since: nothing, all, a beginning,
zeros in place of the data (the new size was durable, the data was not), or later pages without
earlier ones. Until the folder is synced, names may be the old or the new ones.

After "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from unittest.mock import patch


class Fate(StrEnum):
    """What becomes of the data that was written and not synced."""

    LOST = "lost"
    WHOLE = "whole"
    TORN = "torn"  # its beginning is there
    ZEROS = "zeros"
    HOLE = "hole"  # its end is there, with zeros before it


def remains(durable: bytes, written: bytes, fate: Fate) -> bytes:
    """Return what a power cut leaves of a file with the `durable` bytes, and `written` ones now."""
    kept = durable if written.startswith(durable) else b""  # it was truncated before it was written
    tail = written[len(kept) :]
    half = len(tail) // 2
    match fate:
        case Fate.LOST:
            return durable
        case Fate.WHOLE:
            return written
        case Fate.TORN:
            return kept + tail[:half]
        case Fate.ZEROS:
            return kept + bytes(len(tail))
        case Fate.HOLE:
            return kept + bytes(half) + tail[half:]


@dataclass(frozen=True)
class Cut:
    """A moment at which the power may fail: names and contents, durable ones and those written.

    `saved` counts the calls that had returned to the user of the disk (`Disk.note`).
    """

    durable_names: dict[str, int]
    names: dict[str, int]
    durable: dict[int, bytes]
    written: dict[int, bytes]
    saved: int

    def leave(self, folder: Path, fate: Fate, *, is_old: bool) -> None:
        """Write to `folder` what the power cut leaves, with the old names if `is_old`."""
        for name, file in (self.durable_names if is_old else self.names).items():
            durable = self.durable.get(file, b"")
            content = remains(durable, self.written.get(file, durable), fate)
            (folder / name).write_bytes(content)


@dataclass
class Disk:
    """The disk of `folder`, whose `fails_from`-th call of `watched` and all after it raise `error`.

    `cuts` are the moments so far.
    """

    folder: Path
    fails_from: int | None = None
    error: int = errno.ENOSPC
    cuts: list[Cut] = field(default_factory=list)
    _calls: Iterator[int] = field(default_factory=count)
    _files: Iterator[int] = field(default_factory=count)
    _inodes: dict[int, int] = field(default_factory=dict)  # of files that have a name -> file
    _names: dict[str, int] = field(default_factory=dict)
    _durable_names: dict[str, int] = field(default_factory=dict)
    _durable: dict[int, bytes] = field(default_factory=dict)
    _saved: int = 0

    @contextmanager
    def used(self) -> Iterator[Disk]:
        """Watch this process's calls."""
        sync, replace = os.fsync, os.replace
        with (
            patch.object(os, "fsync", lambda handle: self._call(sync, handle)),
            patch.object(os, "replace", lambda *paths: self._call(replace, *paths)),
        ):
            yield self

    def note(self) -> None:
        """Note that a call returned which promises that something is durable."""
        self._saved += 1
        self._cut()

    def _call(self, call: Callable[..., None], *arguments: object) -> None:
        self._cut()
        if self.fails_from is not None and next(self._calls) >= self.fails_from:
            raise OSError(self.error, os.strerror(self.error))
        call(*arguments)
        if call.__name__ == "fsync":
            self._sync(os.fstat(arguments[0]).st_ino)  # type: ignore[arg-type]
        self._cut()

    def _sync(self, inode: int) -> None:
        self._look()
        if inode == self.folder.stat().st_ino:
            self._durable_names = dict(self._names)
        else:
            file = self._inodes[inode]
            name = next(name for name, one in self._names.items() if one == file)
            self._durable[file] = (self.folder / name).read_bytes()

    def _look(self) -> None:
        """Read the folder; a file with a new inode is a new file."""
        inodes = {path.stat().st_ino: path.name for path in self.folder.iterdir()}
        known = self._inodes
        self._inodes = {inode: known.get(inode, -1) for inode in inodes}
        for inode, file in self._inodes.items():
            if file < 0:
                self._inodes[inode] = next(self._files)
        self._names = {name: self._inodes[inode] for inode, name in inodes.items()}

    def _cut(self) -> None:
        self._look()
        written = {file: (self.folder / name).read_bytes() for name, file in self._names.items()}
        names = dict(self._durable_names), dict(self._names)
        self.cuts.append(Cut(*names, dict(self._durable), written, self._saved))
