"""The file in which one rank of somebody's own trainer keeps what it records, line by line.

A header, an event a line, between them lines on how ranks are arranged, which pieces of tensors
this one holds, which buffers no other shares, whether the optimizer's constants changed and in
what gradients were sent, and a last line if training came to its end: what is there when the
process dies stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

from entrenar_py import trace
from entrenar_py.errors import TraceError, UsageError
from entrenar_py.observing import layout
from entrenar_py.observing.layout import Layout, Piece

VERSION = 1
SUFFIX = ".rank.jsonl"
STACK_SUFFIX = ".stack.txt"  # where the rank stands, if it is asked


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
        self._write(json.dumps({"kind": "rank", "version": VERSION, **header}) + "\n")

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
    """What is in the file of one rank, to its last whole line.

    Raises TraceError, with the line, for what no rank wrote. A last line that was cut off is none.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        raise TraceError(f"{path}: no header: the process died before it wrote one")
    records = [_record(path, number, line) for number, line in enumerate(lines, start=1)]
    header = records[0]
    if header.get("kind") != "rank" or header.get("version") != VERSION:
        raise TraceError(f"{path}:1: no header of a rank's file of version {VERSION}")
    closing = records[-1] if records[-1].get("kind") == "closed" else None
    events: list[trace.Event] = []
    arranged: Layout | None = None
    pieces: dict[str, Piece] = {}
    local: frozenset[str] | None = None
    changed, compression = False, ""
    for number, line in enumerate(lines[1 : len(lines) - (closing is not None)], start=2):
        try:
            if records[number - 1].get("kind") == "layout":
                arranged, fresh = _arranged(records[number - 1], header)
                pieces |= fresh
            elif records[number - 1].get("kind") == "local":
                local = (local or frozenset()).union(records[number - 1].get("buffers", ()))
            elif records[number - 1].get("kind") == "changed":
                changed = True
            elif records[number - 1].get("kind") == "compressed":
                compression = str(records[number - 1].get("to", ""))
            else:
                events += trace.load_events(line)
        except UsageError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
    return RankTrace(
        layout=arranged,
        pieces=pieces,
        local=local,
        changed=changed,
        compression=compression,
        life=life_of(path),
        header=header,
        events=tuple(events),
        ended=closing is not None,
        problem="" if closing is None else str(closing.get("problem", "")),
    )


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
    """Which life of its rank a file is of, from 0."""
    return int(path.name.removesuffix(SUFFIX).partition("-")[2])


def is_closed(path: Path) -> bool:
    """Whether the rank has said that training is over, and by nothing bad; reads the end alone."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(_WELL)))
        return file.read() == _WELL


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: no JSON ({error})") from error
    if not isinstance(record, dict):
        raise TraceError(f"{path}:{number}: no mapping")
    return record


def environment_rank() -> tuple[int, int]:
    """Rank and world size as torchrun tells them; 0 of 1 where it did not start this."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
