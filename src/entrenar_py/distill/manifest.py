"""The list of a folder's shards: JSON lines in a BLAKE3 chain, as in a ledger.

The first line has the facts of the folder, each other one a shard that is whole. A shard that was
made again has a line more, and the last one counts. A writer that has only some of the shards
(`--part 2/3`) has a list of its own, so that folders can be put together by copying.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from entrenar_py.distill.claims import Claims
from entrenar_py.distill.schema import Facts, file_name
from entrenar_py.errors import UsageError
from entrenar_py.trace import ledger
from entrenar_py.untrusted import files

PATTERN = "manifest*.jsonl"
_HEAD, _SHARD = "head", "shard"
_AGAIN = "make the shards again in an empty folder, or copy the folder again"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A shard that is whole: its rows, its bytes, and the BLAKE3 digest of its file."""

    shard: int
    rows: int
    bytes: int
    digest: str


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
    """Return what the lists in `folder` say, or None if there is none yet.

    A last line that is not whole yet is left out. Raises UsageError for a list that was edited or
    damaged, and for lists of different facts.
    """
    found: Listed | None = None
    for path in sorted(folder.glob(PATTERN)):
        one = _read(path)
        if one is None:
            continue
        if found is None:
            found = one
        elif found.facts != one.facts:
            raise UsageError(
                f"{path}: it is of other shards than the other lists in its folder "
                f"({_difference(found.facts, one.facts)}); give each its own folder"
            )
        else:
            found = Listed(found.facts, {**found.shards, **one.shards})
    return found


def _difference(one: Facts, other: Facts) -> str:
    ours, theirs = one.to_dict(), other.to_dict()
    return ", ".join(name for name in ours if ours[name] != theirs[name])


def _read(path: Path) -> Listed | None:
    try:
        return _parsed(path)
    except OSError as error:
        raise UsageError(f"{path}: can't be read ({error.strerror or error}); {_AGAIN}") from error


def _parsed(path: Path) -> Listed | None:
    facts: Facts | None = None
    shards: dict[int, Entry] = {}
    for number, record in enumerate(_records(path), start=1):
        try:
            if number == 1:
                facts = Facts.from_dict({k: v for k, v in record.items() if k != "what"})
                continue
            assert facts is not None, "the first line has them"
            entry = _entry(record, facts)
        except UsageError as error:
            raise UsageError(f"{path}:{number}: {error}") from error
        shards[entry.shard] = entry
    return None if facts is None else Listed(facts, shards)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the record of each whole line. Raises UsageError for a line that breaks the chain."""
    chain = ""
    with files.open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # its writer was killed, or is just writing it
                return
            if len(line) > files.LINE_BYTES_MAX:
                raise UsageError(f"{path}:{number}: the line is too long; {_AGAIN}")
            try:
                record = json.loads(line)
                told = record.pop("chain")
                whole, chain = ledger.dump_line(chain, record)
                is_right = whole.encode() + b"\n" == line and told == chain
            except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
                is_right = False
            if not is_right or record.get("what") != (_HEAD if number == 1 else _SHARD):
                raise UsageError(
                    f"{path}:{number}: the line was edited, moved or damaged; {_AGAIN}"
                )
            yield record


def _entry(record: dict[str, Any], facts: Facts) -> Entry:
    match record:
        case {
            "shard": int(shard),
            "rows": int(rows),
            "bytes": int(num_bytes),
            "digest": str(digest),
        } if 0 <= shard < facts.num_shards and num_bytes > 0:
            if rows != facts.rows[shard]:
                raise UsageError(f"shard {shard} has {rows} rows of {facts.rows[shard]}; {_AGAIN}")
            return Entry(shard=shard, rows=rows, bytes=num_bytes, digest=digest)
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
        self._path, self._claims = folder / name_of(part), claims
        with claims.appending():
            there = read(folder)
            if there is not None and there.facts != facts:
                raise UsageError(
                    f"distill.logits={folder}: it has shards of another run "
                    f"({_difference(there.facts, facts)} differ); give another folder"
                )
            if not self._path.exists() or not any(_records(self._path)):
                self._append({"what": _HEAD, **facts.to_dict()})

    def add(self, entry: Entry) -> None:
        """Add a shard, whose file is in its place."""
        with self._claims.appending():
            self._append({"what": _SHARD, **asdict(entry)})

    def _append(self, record: dict[str, Any]) -> None:
        """Write one line after the last whole one, and let the disk have it."""
        chain, end = "", 0
        if self._path.exists():
            for line in self._path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    chain, end = json.loads(line)["chain"], end + len(line)
        text, _ = ledger.dump_line(chain, record)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(file, end)  # a part of a line, whose writer was killed
            os.pwrite(file, text.encode() + b"\n", end)
            os.fsync(file)
        finally:
            os.close(file)


def path_of(folder: Path, facts: Facts, shard: int) -> Path:
    """Return where the shard is."""
    return folder / file_name(shard, facts.num_shards)
