"""The file in which one rank of somebody's own trainer keeps what it records, line by line.

A header, an event a line, between them lines on how ranks are arranged, which pieces of tensors
this one holds, which buffers no other shares, whether the optimizer's constants changed and in
what gradients were sent, and a last line if training came to its end: what is there when the
process dies stays.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from entrenar_py import trace
from entrenar_py.errors import TraceError, UsageError
from entrenar_py.faults import Fault
from entrenar_py.rank_files import layout, rank_header
from entrenar_py.rank_files.layout import Layout, Piece
from entrenar_py.trace import records
from entrenar_py.untrusted import files

SUFFIX = ".rank.jsonl"
# What a judge needs is all in memory: ten times what 1000 steps of 300 tensors take.
FILE_BYTES_MAX = 2**30
EVENTS_MAX = 2**20
STACK_SUFFIX = ".stack.txt"  # where the rank stands, if it is asked

_NAME = re.compile(rf"[0-9]{{1,9}}-(?P<life>[0-9]{{1,9}}){re.escape(SUFFIX)}")


def _closing(problem: str) -> str:
    return json.dumps({"kind": "closed", "problem": problem}) + "\n"


_WELL = _closing("").encode()


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank recorded in its `life`, 0 for its first one.

    `header` is how it was launched and what it declared; `layout` how the ranks are arranged, None
    where it did not say, and `pieces` the place of each tensor of which it holds a part, by name;
    `local` names buffers that follow its own samples, None where none can be told. `changed` is
    whether the optimizer's constants are others than in the header, but for its rates;
    `compression` in what gradients were sent, empty if as they are. `ended` is whether training
    came to its end, and `problem` what it ended by, empty if by nothing.
    """

    life: int
    header: Mapping[str, Any]
    events: tuple[trace.Event, ...]
    ended: bool
    problem: str
    layout: Layout | None = None
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    local: frozenset[str] | None = None
    changed: bool = False
    compression: str = ""

    @property
    def rank(self) -> int:
        """The rank."""
        return int(self.header["rank"])


class RankFile:
    """The file, as the rank writes it; the process's own, whatever others there are in `folder`."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self.life = _new(folder, int(header["rank"]))
        self.stack = folder / f"{header['rank']:05}-{self.life:03}{STACK_SUFFIX}"
        self._write(json.dumps({"kind": "rank", "version": rank_header.VERSION, **header}) + "\n")

    def append(self, events: Iterable[trace.Event]) -> None:
        """Writes `events`: who kills the process now takes none of them along."""
        self._write(trace.dump_events(events).decode())

    def arrange(self, told: Mapping[str, Any]) -> None:
        """Writes how the ranks are arranged, and where pieces lie: it is so of what comes next."""
        self._write(json.dumps({"kind": "layout", **told}) + "\n")

    def leave_out(self, local: Iterable[str]) -> None:
        """Writes that these buffers are not to be compared, wherever they were recorded, and that
        others may be.
        """
        self._write(json.dumps({"kind": "local", "buffers": sorted(local)}) + "\n")

    def change(self) -> None:
        """Writes that the optimizer's constants are others from here on than in the header."""
        self._write(json.dumps({"kind": "changed"}) + "\n")

    def compress(self, compression: str) -> None:
        """Writes in what gradients are sent from here on; "" for what they are."""
        self._write(json.dumps({"kind": "compressed", "to": compression}) + "\n")

    def close(self, problem: str = "") -> None:
        """Says that training is over, and what by; nothing is written after that."""
        self._write(_closing(problem))
        self._file.close()

    def _write(self, text: str) -> None:
        if self._file.closed:
            return  # training is over: what a script tells after it is no part of it
        left = memoryview(text.encode())
        while left.nbytes:
            left = left[self._file.write(left) :]


def _new(folder: Path, rank: int) -> tuple[FileIO, int]:
    """A file of its own: a script may observe twice, and a rank may be started again."""
    for life in count():
        with suppress(FileExistsError):
            return FileIO(folder / f"{rank:05}-{life:03}{SUFFIX}", "x"), life
    raise AssertionError("there is always one more")


def load(path: Path) -> RankTrace:
    """Read the file of one rank, to its last whole line; a line in memory at a time.

    Raises TraceError, with the line, for what no rank wrote, and for more than may be read
    (FILE_BYTES_MAX, EVENTS_MAX). A last line that was cut off is none.
    """
    life = life_of(path)
    try:
        with files.open_file(path, bytes_max=FILE_BYTES_MAX) as file:
            return _Reader(path).read(file, life)
    except OSError as error:
        advice = "; record fewer steps (--steps)" if error.errno == errno.EFBIG else ""
        raise TraceError(f"rank file {path}: can't be read ({error.strerror}{advice})") from error


class _Reader:
    """One file, read line by line; each place is told with its number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._events: list[trace.Event] = []
        self._layout: Layout | None = None
        self._pieces: dict[str, Piece] = {}
        self._local: frozenset[str] | None = None
        self._changed, self._compression = False, ""
        self._closing: Mapping[str, Any] | None = None

    def read(self, file: BinaryIO, life: int) -> RankTrace:
        """All of it."""
        header: Mapping[str, Any] | None = None
        for line in files.lines(file):
            if not line.endswith(b"\n"):
                break
            self._number += 1
            where = f"{self._path}:{self._number}"
            record = _record(where, line)
            if header is None:
                header = rank_header.require(record, where)
                continue
            try:
                self._take(record, header)
            except (UsageError, *records.NOT_AN_EVENT) as error:
                raise TraceError(f"{where}: {_told(error)}") from error
        if header is None:
            raise TraceError(f"{self._path}: no header: the process died before it wrote one")
        return RankTrace(
            layout=self._layout,
            pieces=self._pieces,
            local=self._local,
            changed=self._changed,
            compression=self._compression,
            life=life,
            header=header,
            events=tuple(self._events),
            ended=self._closing is not None,
            problem="" if self._closing is None else str(self._closing.get("problem", "")),
        )

    def _take(self, record: dict[str, Any], header: Mapping[str, Any]) -> None:
        """One line behind the header."""
        if self._closing is not None:
            raise TraceError("a line behind the one that says that training is over")
        match record.get("kind"):
            case "closed":
                self._closing = record
            case "layout":
                self._layout, fresh = _arranged(record, header)
                self._pieces |= fresh
            case "local":
                self._local = (self._local or frozenset()).union(_names(record.get("buffers", [])))
            case "changed":
                self._changed = True
            case "compressed":
                self._compression = str(record.get("to", ""))
            case _:
                self._add(records.from_record(record))

    def _add(self, event: trace.Event) -> None:
        if isinstance(event, trace.Injected):
            Fault.from_dict(event.fault)  # says what is wrong with it
        if (getattr(event, "step", None) or 0) < 0:
            raise TraceError(f"step={getattr(event, 'step', None)}: steps count from 0")
        if len(self._events) == EVENTS_MAX:
            raise TraceError(f"more than {EVENTS_MAX} events; record fewer steps (--steps)")
        self._events.append(event)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, UsageError) else f"event can't be read ({error!r})"


def _names(told: Any) -> list[str]:
    if not isinstance(told, list) or not all(isinstance(name, str) for name in told):
        raise TraceError("buffers: use a list of names")
    return told


def _arranged(
    told: Mapping[str, Any], header: Mapping[str, Any]
) -> tuple[Layout, dict[str, Piece]]:
    try:
        axes = layout.require(dict(told["axes"]), int(header["world_size"]), "layout")
        found = Layout(axes=axes, tied=layout.require_ties(told["tied"]))
        return found, {name: layout.piece_from(one) for name, one in told["pieces"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"layout can't be read ({error!r})") from error


def life_of(path: Path) -> int:
    """Return which life of its rank a file is of, from 0; TraceError for another kind of name."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise TraceError(f"rank file {path}: no rank's file is called so, as 00000-000{SUFFIX} is")
    return int(found["life"])


def is_closed(path: Path) -> bool:
    """Whether the rank has said that training is over, and by nothing bad; reads the end alone."""
    try:
        with files.open_file(path) as file:
            file.seek(max(0, path.stat().st_size - len(_WELL)))
            return file.read(len(_WELL)) == _WELL
    except OSError:
        return False


def _record(where: str, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: no JSON ({error})") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: no mapping")
    return record


def environment_rank() -> tuple[int, int]:
    """Rank and world size as torchrun tells them; 0 of 1 where it did not start this."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
