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
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
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
