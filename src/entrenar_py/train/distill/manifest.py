"""The list of a folder's shards: JSON lines in a BLAKE3 chain, as in a ledger.

The first line has the facts of the folder, each other one a shard that is whole. A shard that was
made again has a line more, which counts how often it had been made. A writer that has only some of
the shards (`--part 2/3`) has a list of its own, so that folders can be put together by copying.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.trace import ledger
from entrenar_py.shared.untrusted import files, json_text
from entrenar_py.train.distill.claims import Claims
from entrenar_py.train.distill.schema import Facts, file_name

PATTERN = "manifest*.jsonl"
_HEAD, _SHARD = "head", "shard"
_AGAIN = "make the shards again in an empty folder, or copy the folder again"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A shard that is whole: its rows, its bytes, and the BLAKE3 digest of its file.

    `remade` is how often it had been made before.
    """

    shard: int
    rows: int
    bytes: int
    digest: str
    remade: int = 0


@dataclass(frozen=True)
class Listed:
    """The lists of a folder, taken together: its facts, and its shards by number."""

    facts: Facts
    shards: dict[int, Entry]

    @property
    def missing(self) -> list[int]:
        """The numbers of the shards that no list has."""
        return [n for n in range(self.facts.num_shards) if n not in self.shards]


def name_of(part: tuple[int, int] | None) -> str:
    """Return the name of a list: of all shards, or of one part of several."""
    return "manifest.jsonl" if part is None else f"manifest-{part[0]}-of-{part[1]}.jsonl"


def read(folder: Path) -> Listed | None:
    """Return what `Lists` of `folder` say, all of them read anew."""
    return Lists(folder).read()


class Lists:
    """The lists of a folder, which may grow: each call of `read` reads what was added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, _List] = {}

    def read(self) -> Listed | None:
        """Return what all lists say together, or None if there is none yet.

        A last line that is not whole yet is left out. Raises UsageError for a list that was edited
        or damaged, and for lists of different facts.
        """
        found: Listed | None = None
        try:
            paths = sorted(self._folder.glob(PATTERN))
        except OSError as error:
            told = f"can't be read ({error.strerror or error})"
            raise UsageError(
                f"distill.logits={self._folder}: {told}; give another folder"
            ) from error
        for path in paths:
            one = self._known.setdefault(path, _List(path))
            one.update()
            if one.facts is None:
                continue
            if found is None:
                found = Listed(one.facts, dict(one.shards))
            elif found.facts != one.facts:
                raise UsageError(
                    f"{path}: it is of other shards than the other lists in its folder "
                    f"({_difference(one.facts, found.facts)}); give each its own folder"
                )
            else:
                for shard, entry in one.shards.items():
                    if entry.remade >= found.shards.get(shard, entry).remade:
                        found.shards[shard] = entry
        return found


def _difference(one: Facts, other: Facts) -> str:
    """Return the names and values that differ, but for lists, whose names are enough."""
    pairs = {name: (value, other.to_dict()[name]) for name, value in one.to_dict().items()}
    return ", ".join(
        name if isinstance(here, list) else f"{name} {here} and {there}"
        for name, (here, there) in pairs.items()
        if here != there
    )


class _List:
    """One list, up to its last whole line: its facts and shards, and where the next line begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.facts: Facts | None = None
        self.shards: dict[int, Entry] = {}
        self.end, self.chain, self._num_lines = 0, "", 0

    def update(self) -> None:
        """Read the lines that were added; all of them, if it is another file than before."""
        try:
            self._read_on()
        except UsageError:
            if not self.end:
                raise
            self._begin()
            self._read_on()

    def _read_on(self) -> None:
        try:
            with files.open_file(self._path) as file:
                if file.seek(0, os.SEEK_END) < self.end:
                    self._begin()
                file.seek(self.end)
                for line in files.lines(file):
                    if not line.endswith(b"\n"):  # its writer was killed, or is just writing it
                        return
                    self._take(line)
        except FileNotFoundError:
            self._begin()
        except OSError as error:
            told = f"can't be read ({error.strerror or error})"
            raise UsageError(f"{self._path}: {told}; {_AGAIN}") from error

    def _take(self, line: bytes) -> None:
        """Take up the next line. Raises UsageError for one that breaks the chain."""
        where = f"{self._path}:{self._num_lines + 1}"
        try:
            record = json_text.load(line)
            told = record.pop("chain")
            whole, chain = ledger.dump_line(self.chain, record)
            is_right = whole.encode() + b"\n" == line and told == chain
        except (ValueError, KeyError, AttributeError, TypeError):
            is_right = False
        if not is_right or record.pop("what", None) != (_HEAD if self.facts is None else _SHARD):
            raise UsageError(f"{where}: the line was edited, moved or damaged; {_AGAIN}")
        try:
            if self.facts is None:
                self.facts = Facts.from_dict(record)
            else:
                entry = _entry(record, self.facts)
                self.shards[entry.shard] = entry
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        self.end, self.chain = self.end + len(line), chain
        self._num_lines += 1


def _entry(record: dict[str, Any], facts: Facts) -> Entry:
    match record:
        case {
            "shard": int(shard),
            "rows": int(rows),
            "bytes": int(num_bytes),
            "digest": str(digest),
            "remade": int(remade),
        } if 0 <= shard < facts.num_shards and num_bytes > 0:
            if rows != facts.rows[shard]:
                raise UsageError(f"shard {shard} has {rows} rows of {facts.rows[shard]}; {_AGAIN}")
            return Entry(shard=shard, rows=rows, bytes=num_bytes, digest=digest, remade=remade)
    raise UsageError(f"the line names no shard of the folder; {_AGAIN}")


class Writer:
    """Appends to a list in `folder`; several processes may do so at a time."""

    def __init__(
        self, folder: Path, facts: Facts, part: tuple[int, int] | None, claims: Claims
    ) -> None:
        """Begin the list, if it is not there.

        Raises UsageError if the folder has shards of other facts, and OSError if it can't be
        written.
        """
        self._path, self._claims, self._lists = folder / name_of(part), claims, Lists(folder)
        self._list = _List(self._path)
        with claims.appending():
            there = self._lists.read()
            if there is not None and there.facts != facts:
                raise UsageError(
                    f"distill.logits={folder}: it has shards of another run "
                    f"({_difference(there.facts, facts)} here); give another folder"
                )
            self._facts = facts
            self._update()

    def add(self, entry: Entry) -> Entry:
        """Add a shard, whose file is in its place; return what the list has of it.

        Raises OSError if it can't be written.
        """
        with self._claims.appending():
            there = self._lists.read()
            before = None if there is None else there.shards.get(entry.shard)
            entry = replace(entry, remade=0 if before is None else before.remade + 1)
            self._update()
            self._append({"what": _SHARD, **asdict(entry)})
        return entry

    def _update(self) -> None:
        """Read what others have added, and begin a list that is not there, or no more."""
        self._list.update()
        if self._list.facts is None:
            self._append({"what": _HEAD, **self._facts.to_dict()})
            self._list.update()

    def _append(self, record: dict[str, Any]) -> None:
        """Write one line after the last whole one, and let the disk have it."""
        text, _ = ledger.dump_line(self._list.chain, record)
        file = files.open_to_write(self._path)
        try:
            os.ftruncate(file, self._list.end)  # a part of a line, whose writer was killed
            line, at = text.encode() + b"\n", self._list.end
            while line:  # a disk that is nearly full takes a part of it
                written = os.pwrite(file, line, at)
                line, at = line[written:], at + written
            os.fsync(file)
        finally:
            os.close(file)


def path_of(folder: Path, facts: Facts, shard: int) -> Path:
    """Return where the shard is."""
    return folder / file_name(shard, facts.num_shards)
