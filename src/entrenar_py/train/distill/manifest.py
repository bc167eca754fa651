"""The manifest of a folder of shards: its facts, its complete shards, and claims on missing shards.

A manifest is one or more lists. A list is a file of JSON lines in a BLAKE3 chain, as in a ledger.
The first line has the facts; each further line names one complete shard. If a shard is produced
again, another line is added, which counts how often it had been produced before. A writer that
produces only some of the shards (`--part 2/3`) has a list of its own, so that folders can be merged
by copying.

A row of a shard is one position of one sample. The teacher saw the tokens up to that position, and
predicts the next token, `target`. Log-probabilities are natural, at temperature 1. `rest` is the
log of the total probability of all tokens that are not stored, -inf if all are stored.

A claim is a lock on one byte of the lock file, which has a byte for each shard. The kernel releases
a lock when its process ends, however it ends. So no claim outlives its owner, and claims need no
heartbeat. On NFS the server keeps the locks, for all machines that mount the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
import errno
import fcntl
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.trace import ledger
from entrenar_py.shared.untrusted import files, json_text

VERSION = 2
STORED = ("float16", "float32")
METADATA_KEY = b"entrenar-distill"  # of a file's metadata


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that all shards of a folder have in common.

    `teacher`, `tokenizer` and `data` are digests of 32 hex digits each. `rows` is the number of
    rows of each shard, `samples` the number of its samples. The order of samples in the shards
    follows from `seed`. `temperature` is always 1; the loss chooses its own later.

    `day` is the date that a chat template with a clock received, else None. It stands only in the
    lists: whoever continues tokenises the same rows from it. Whether they are the same, `data`
    decides, so neither the digest nor a comparison depends on it. Older lists have none.
    """

    teacher: str
    tokenizer: str
    data: str
    vocabulary: int
    top_k: int
    stored: str
    precision: str
    seed: int
    batch_tokens: int
    samples: tuple[int, ...]
    rows: tuple[int, ...]
    temperature: float = 1.0
    version: int = VERSION
    day: str | None = field(default=None, compare=False)

    @property
    def num_shards(self) -> int:
        """The number of shards once all are complete."""
        return len(self.rows)

    @property
    def digest(self) -> str:
        """32 hex digits over all facts but the day."""
        record = replace(self, day=None).to_dict()
        return blake3(json.dumps(record, sort_keys=True).encode()).hexdigest(16)

    @property
    def has_rest(self) -> bool:
        """False if a row has every token of the vocabulary."""
        return self.top_k < self.vocabulary

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as a mapping that JSON can hold."""
        record = asdict(self) | {"samples": list(self.samples), "rows": list(self.rows)}
        if self.day is None:
            del record["day"]
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Facts:
        """Return the facts from a mapping that `to_dict` returned.

        Raises UsageError for any other mapping, such as one of another version.
        """
        version = record.get("version")
        if version != VERSION:
            raise UsageError(
                f"version={version!r}: the shards must have version {VERSION}; create them again"
            )
        known = {own.name: own.type for own in fields(cls) if own.name != "day" or "day" in record}
        if record.keys() != known.keys():
            odd = sorted(record.keys() ^ known.keys())
            raise UsageError(f"{odd[0]}: this key is missing or unknown; create the shards again")
        kinds = {"int": int, "str": str, "float": float, "tuple[int, ...]": list}
        kinds["str | None"] = str  # the day, which is left out if there is none
        for name, kind in known.items():
            value = record[name]
            is_right = type(value) is kinds[str(kind)]
            if is_right and isinstance(value, list):
                is_right = all(type(one) is int and one >= 0 for one in value)
            if not is_right:
                raise UsageError(f"{name}={value!r}: use type {kind}; create the shards again")
        lists = {name: tuple(record[name]) for name in ("samples", "rows")}
        facts = cls(**{**record, **lists})
        if len(facts.samples) != len(facts.rows) or not facts.rows:
            raise UsageError(
                "samples and rows must have the same length, of at least 1; create the shards again"
            )
        if not 1 <= facts.top_k <= facts.vocabulary:
            raise UsageError(
                f"top_k={facts.top_k}: use 1 to {facts.vocabulary}; create the shards again"
            )
        if facts.stored not in STORED or facts.temperature != 1:
            stored = f"stored={facts.stored!r}, temperature={facts.temperature:g}"
            raise UsageError(f"{stored}: not supported; create the shards again")
        if facts.day is not None:
            try:
                date.fromisoformat(facts.day)
            except ValueError as error:
                raise UsageError(
                    f"day={facts.day!r}: is not a date; create the shards again"
                ) from error
        return facts


def vocabulary_digest(tokenizer: Any) -> str:
    """Return 32 hex digits over the text and the number of each token.

    Rows are tokenised once, by the student's tokenizer. So the teacher's tokenizer must give the
    same number to the same text. Its chat template may be different.
    """
    told = sorted(tokenizer.get_vocab().items())
    return blake3(json.dumps(told).encode()).hexdigest(16)


def num_tokens(tokenizer: Any) -> int:
    """Return the largest token number plus one. Numbers may have gaps."""
    return 1 + max(map(int, tokenizer.get_vocab().values()))


def file_name(number: int, num_shards: int) -> str:
    """Return the file name of the shard `number`, counted from 0."""
    return f"shard-{number:05d}-of-{num_shards:05d}.parquet"


def columns(facts: Facts, number: int) -> pa.Schema:
    """Return the Parquet schema of the shard `number`, with the facts in its metadata."""
    pa = arrow()
    value = {"float16": pa.float16(), "float32": pa.float32()}[facts.stored]
    listed = {**replace(facts, day=None).to_dict(), "shard": number}
    del listed["samples"], listed["rows"]  # a file need not repeat the sizes of all shards
    return pa.schema(
        [
            pa.field("sample", pa.int32(), nullable=False),
            pa.field("position", pa.int32(), nullable=False),
            pa.field("target", pa.int32(), nullable=False),
            pa.field("tokens", fixed(pa.int32(), facts.top_k), nullable=False),
            pa.field("log_probabilities", fixed(value, facts.top_k), nullable=False),
            pa.field("rest", pa.float32(), nullable=False),
        ],
        metadata={
            METADATA_KEY: json.dumps({**listed, "facts": facts.digest}, sort_keys=True).encode()
        },
    )


def fixed(kind: Any, size: int) -> Any:
    """Return the Arrow type of lists of `size` values of type `kind`."""
    pa = arrow()
    return pa.list_(pa.field("element", kind, nullable=False), size)


def arrow() -> Any:
    """Return pyarrow, which takes a quarter of a second to import. Raises UsageError without it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"entrenar distill needs pyarrow; {package_data.extra_advice('finetune')}"
        ) from error
    return pyarrow


CLAIMS_FILE = "claims.lock"
_FORM = "hhqqi0q"  # struct flock of Linux: type, whence, start, length, process
APPENDING_S = 60.0  # writing a line takes milliseconds, but a stopped process keeps its lock
CLAIM_LOOK_EVERY_S = 0.02
_APPENDING = 2**40  # the byte that stands for the lists; the bytes of shards begin at 0


class Claims:
    """The claims of this process in `folder`. A process may have only one such object for a folder.

    A process that closes any handle of a file releases all its locks on that file, so the handle
    stays open.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError if the lock file can't be opened."""
        self._file = files.open_to_write(folder / CLAIMS_FILE, flags=os.O_NOFOLLOW)
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
        """Release a claim."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, shard)

    @contextmanager
    def appending(self) -> Iterator[None]:
        """Keep other writers away from the folder's lists inside the context.

        Raises as `take` does, and SystemFailure if another process holds the lock for APPENDING_S.
        """
        until_s = time.monotonic() + APPENDING_S
        while not self.take(_APPENDING):
            if time.monotonic() >= until_s:
                owner = _owner(self._file, _APPENDING)
                holder = "another process" if owner is None else f"process {owner}"
                raise SystemFailure(
                    f"distill.logits={self._folder}: {holder} has kept its lists locked for "
                    f"{APPENDING_S:g} s (is it stopped?); end it, or let it continue"
                )
            time.sleep(CLAIM_LOOK_EVERY_S)
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
                f"distill.logits={self._folder}: its file system supports no locks "
                f"({error.strerror}), so two processes might make the same shard; use a "
                "folder on another file system"
            ) from error

    def close(self) -> None:
        """Release all claims."""
        os.close(self._file)


def being_made(folder: Path, num_shards: int) -> dict[int, int]:
    """Return the shards that other processes are producing, with the process id of each.

    The id of a process on another machine says nothing here. On systems other than Linux, the
    result is empty.
    """
    try:
        file = os.open(folder / CLAIMS_FILE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no process has ever claimed a shard here
        return {}
    owners: dict[int, int] = {}
    try:
        for shard in range(num_shards):
            if (owner := _owner(file, shard)) is not None:
                owners[shard] = owner
    except OSError:  # the file system has no locks
        return owners
    finally:
        os.close(file)
    return owners


def _owner(file: int, byte: int) -> int | None:
    """Return the process that holds the lock on `byte`; None if none does, or if this is not Linux.

    Raises OSError on a file system without locks.
    """
    if sys.platform != "linux":
        return None
    asked = struct.pack(_FORM, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, owner = struct.unpack(_FORM, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(owner)


PATTERN = "manifest*.jsonl"
_HEAD, _SHARD = "head", "shard"
_AGAIN = "make the shards again in an empty folder, or copy the folder again"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A complete shard in a list: its rows, its bytes, and the BLAKE3 digest of its file.

    `remade` is how often it had been produced before.
    """

    shard: int
    rows: int
    bytes: int
    digest: str
    remade: int = 0


@dataclass(frozen=True)
class Listed:
    """The merged lists of a folder: its facts, and its shards by number."""

    facts: Facts
    shards: dict[int, Entry]

    @property
    def missing(self) -> list[int]:
        """The numbers of the shards that are in no list."""
        return [n for n in range(self.facts.num_shards) if n not in self.shards]


def name_of(part: tuple[int, int] | None) -> str:
    """Return the file name of the list of all shards (None), or of part number k of n, (k, n)."""
    return "manifest.jsonl" if part is None else f"manifest-{part[0]}-of-{part[1]}.jsonl"


def read(folder: Path) -> Listed | None:
    """Return the merged lists of `folder`, read from the start; None if there is none yet."""
    return Lists(folder).read()


def day_of(folder: Path) -> str | None:
    """Return the day of the shards in `folder`; None if no list says one."""
    try:
        listed = read(folder)
    except UsageError:
        return None  # reported by whoever uses the shards
    return None if listed is None else listed.facts.day


def advice_on_day(there: Facts, day: str | None) -> str:
    """Return what to do if rows differ since the shards `there` had another day than `day`.

    Empty if the day can't be the reason.
    """
    if day is None or there.day == day:
        return ""
    if there.day is None:  # an older list
        return f"set data.date to the day on which they were begun (here it is {day}), or "
    return f"set data.date: {there.day}, the day on which they were begun (here it is {day}), or "


class Lists:
    """The lists of a folder, which may grow: each call of `read` reads only what was added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, _List] = {}

    def read(self) -> Listed | None:
        """Return all lists merged, or None if there is none yet.

        A last line that is not complete yet is ignored. Raises UsageError for a list that was
        edited or damaged, and for lists with different facts.
        """
        listed: Listed | None = None
        try:
            paths = sorted(self._folder.glob(PATTERN))
        except OSError as error:
            told = f"can't be read ({error.strerror or error})"
            raise UsageError(
                f"distill.logits={self._folder}: {told}; give another folder"
            ) from error
        for path in paths:
            own = self._known.setdefault(path, _List(path))
            own.update()
            if own.facts is None:
                continue
            if listed is None:
                listed = Listed(own.facts, dict(own.shards))
            elif listed.facts != own.facts:
                dates = (
                    "" if own.facts.day == listed.facts.day else "use one data.date for all, or "
                )
                raise UsageError(
                    f"{path}: it describes different shards from the other lists in its folder "
                    f"({_difference(own.facts, listed.facts)}); {dates}give each its own folder"
                )
            else:
                for shard, entry in own.shards.items():
                    if entry.remade >= listed.shards.get(shard, entry).remade:
                        listed.shards[shard] = entry
        return listed


def _difference(one: Facts, other: Facts) -> str:
    pairs = {name: (value, other.to_dict().get(name)) for name, value in one.to_dict().items()}
    return ", ".join(
        name if isinstance(here, list) else f"{name} {here} and {there}"
        for name, (here, there) in pairs.items()
        if here != there
    )


class _List:
    """A list up to its last complete line: its facts and shards, and where the next line begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.facts: Facts | None = None
        self.shards: dict[int, Entry] = {}
        self.end, self.chain, self._num_lines = 0, "", 0

    def update(self) -> None:
        """Read the lines that were added, or all lines if the file was replaced."""
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
                    if not line.endswith(b"\n"):  # its writer was killed, or is still writing
                        return
                    self._take(line)
        except FileNotFoundError:
            self._begin()
        except OSError as error:
            told = f"can't be read ({error.strerror or error})"
            raise UsageError(f"{self._path}: {told}; {_AGAIN}") from error

    def _take(self, line: bytes) -> None:
        """Add the next line. Raises UsageError for a line that breaks the chain."""
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
    """Appends to a list in `folder`. Several processes may append at the same time."""

    def __init__(
        self, folder: Path, facts: Facts, part: tuple[int, int] | None, claims: Claims
    ) -> None:
        """Begin the list if it does not exist.

        Raises UsageError if the folder has shards with different facts, and OSError if the list
        can't be written.
        """
        self._path, self._claims, self._lists = folder / name_of(part), claims, Lists(folder)
        self._list = _List(self._path)
        with claims.appending():
            there = self._lists.read()
            if there is not None and there.facts != facts:
                other = there.facts.data != facts.data
                advice = advice_on_day(there.facts, facts.day) if other else ""
                raise UsageError(
                    f"distill.logits={folder}: it has shards of a different run "
                    f"({_difference(there.facts, facts)} here); {advice}give another folder"
                )
            self._facts = facts
            self._update()

    def add(self, entry: Entry) -> Entry:
        """Add a shard with a file that is in place; return its entry in the list.

        Raises OSError if the list can't be written.
        """
        with self._claims.appending():
            there = self._lists.read()
            before = None if there is None else there.shards.get(entry.shard)
            entry = replace(entry, remade=0 if before is None else before.remade + 1)
            self._update()
            self._append({"what": _SHARD, **asdict(entry)})
        return entry

    def _update(self) -> None:
        self._list.update()
        if self._list.facts is None:
            self._append({"what": _HEAD, **self._facts.to_dict()})
            self._list.update()

    def _append(self, record: dict[str, Any]) -> None:
        """Write one line after the last complete one, and flush it to the disk."""
        text, _ = ledger.dump_line(self._list.chain, record)
        file = files.open_to_write(self._path)
        try:
            os.ftruncate(file, self._list.end)  # removes the partial line of a killed writer
            line, at = text.encode() + b"\n", self._list.end
            while line:  # a disk that is nearly full may accept only a part
                written = os.pwrite(file, line, at)
                line, at = line[written:], at + written
            os.fsync(file)
        finally:
            os.close(file)


def path_of(folder: Path, facts: Facts, shard: int) -> Path:
    """Return the path of a shard's file."""
    return folder / file_name(shard, facts.num_shards)
