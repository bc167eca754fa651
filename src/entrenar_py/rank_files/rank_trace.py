"""One rank's record of a run, read back from its file: every line is untrusted.

`rank_file` writes these files.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from entrenar_py import trace
from entrenar_py.errors import TraceError, UsageError
from entrenar_py.faults import Fault
from entrenar_py.rank_files import layout, rank_header
from entrenar_py.rank_files.layout import Layout, Piece
from entrenar_py.rank_files.rank_file import SUFFIX, closing_line
from entrenar_py.trace import records
from entrenar_py.untrusted import files

# What a judge needs is all in memory: ten times what 1000 steps of 300 tensors take.
FILE_BYTES_MAX = 2**30
EVENTS_MAX = 2**20

_NAME = re.compile(rf"[0-9]{{1,9}}-(?P<life>[0-9]{{1,9}}){re.escape(SUFFIX)}")
_CLOSED_WELL = closing_line().encode()


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The record of one rank in its `life`, 0 for its first one.

    - `header`: how it was launched, and what it declared.
    - `events`: in the order in which they were written.
    - `ended`: training came to its end; `problem` is the error it ended by, "" for none.
    - `layout`: how the ranks are arranged, None where it didn't say.
    - `pieces`: by name, the place of each tensor of which it holds a part.
    - `local`: buffers that follow its own samples, None where that isn't known.
    - `changed`: the optimizer's constants are not those of the header; learning rates aside.
    - `compression`: the format in which gradients were sent, "" for their own.
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
        """The number of the rank."""
        return int(self.header["rank"])


def load(path: Path) -> RankTrace:
    """Read the file of one rank, a line in memory at a time.

    A last line that was cut off when its writer died is left out. Raises TraceError, with the line,
    for what no rank wrote, and for more than FILE_BYTES_MAX or EVENTS_MAX.
    """
    life = life_of(path)
    try:
        with files.open_file(path, bytes_max=FILE_BYTES_MAX) as file:
            return _Reader(path).read(file, life)
    except OSError as error:
        advice = "; record fewer steps (--steps)" if error.errno == errno.EFBIG else ""
        raise TraceError(f"rank file {path}: can't be read ({error.strerror}{advice})") from error


class _Reader:
    """Reads one file line by line; errors name the line by its number."""

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
        """Return the record that the whole of `file` holds."""
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
            except UsageError as error:
                raise TraceError(f"{where}: {error}") from error
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
        """Take the record of one line after the header."""
        if self._closing is not None:
            raise TraceError("a line after the one that says that training is over")
        match record.get("kind"):
            case "closed":
                self._closing = record
            case "layout":
                self._layout, fresh = _layout(record, header)
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
            Fault.from_dict(event.fault)  # raises UsageError for what is none
        step = getattr(event, "step", None)
        if (step or 0) < 0:
            raise TraceError(f"step={step}: steps count from 0")
        if len(self._events) == EVENTS_MAX:
            raise TraceError(f"more than {EVENTS_MAX} events; record fewer steps (--steps)")
        self._events.append(event)


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TraceError("buffers: use a list of names")
    return value


def _layout(
    record: Mapping[str, Any], header: Mapping[str, Any]
) -> tuple[Layout, dict[str, Piece]]:
    try:
        axes = layout.require(dict(record["axes"]), int(header["world_size"]), "layout")
        arranged = Layout(axes=axes, tied=layout.require_ties(record["tied"]))
        pieces = {name: layout.piece_from(parts) for name, parts in record["pieces"].items()}
        return arranged, pieces
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(f"layout can't be read ({error!r})") from error


def life_of(path: Path) -> int:
    """Return which life of its rank a file is of, from 0.

    Raises TraceError for a file that isn't named as ranks name theirs.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise TraceError(
            f"rank file {path}: its name is not RANK-LIFE{SUFFIX}, as in 00000-000{SUFFIX}; keep "
            "the names that the ranks gave their files"
        )
    return int(match["life"])


def is_closed(path: Path) -> bool:
    """Return whether the rank has said that training is over, and by no error.

    Reads the end of the file alone.
    """
    try:
        with files.open_file(path) as file:
            file.seek(max(0, path.stat().st_size - len(_CLOSED_WELL)))
            return file.read(len(_CLOSED_WELL)) == _CLOSED_WELL
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
