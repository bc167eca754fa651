"""The file in which one rank of somebody's own trainer keeps what it records, line by line.

A header, an event a line, between them lines on how ranks are arranged, which pieces of tensors
this one holds, which buffers no other shares, whether the optimizer's constants changed and in
what gradients were sent, and a last line if training came to its end: what is there when the
process dies stays. `rank_trace` reads it back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

from entrenar_py import trace
from entrenar_py.rank_files import rank_header

SUFFIX = ".rank.jsonl"
STACK_SUFFIX = ".stack.txt"  # where the rank stands, if it is asked


def closing_line(problem: str = "") -> str:
    """Return the last line of a file whose rank came to the end of training, by `problem`."""
    return json.dumps({"kind": "closed", "problem": problem}) + "\n"


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
        self._write(closing_line(problem))
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


def environment_rank() -> tuple[int, int]:
    """Rank and world size as torchrun tells them; 0 of 1 where it did not start this."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
