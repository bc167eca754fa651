"""The file of a rank's calls, in the order in which they begin."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

from entrenar_py.check.anatomy import record
from entrenar_py.check.anatomy.record import Event
from entrenar_py.check.observing import FOLDER, surroundings


class Output:
    """The file of this rank. It is created with the first event that belongs to training."""

    def __init__(self) -> None:
        self._file: Any = None
        self._waiting: list[Event] = []
        self._open: deque[list[Event | None]] = deque()  # calls that have begun, and what followed
        self._written = 0

    def begin(self) -> list[Event | None]:
        """Keep a place for the event of a call that begins now."""
        place: list[Event | None] = [None]
        self._open.append(place)
        return place

    def end(self, place: list[Event | None], event: Event | None) -> None:
        """Write the event of a call, and then what was written during the call."""
        while self._open and self._open[-1] is not place:
            self._merge(self._open.pop())  # an exception has ended it
        if not self._open:
            return
        place[0] = event
        self._merge(self._open.pop())

    def _merge(self, events: list[Event | None]) -> None:
        for event in events:
            if event is not None:
                self.write(event)

    def write(self, event: Event) -> None:
        """Write an event, or keep it for as long as a call or the training hasn't begun."""
        if self._open:
            self._open[-1].append(event)
        elif self._file is None:
            self._waiting.append(event)
            if isinstance(event, record.Backward | record.Stepped):
                self._create()
        elif self._written < record.EVENTS_MAX - 1:
            self._written += 1
            self._file.write(record.line_of(event) + "\n")

    def _create(self) -> None:
        rank, world_size = surroundings.place()
        name = f"{rank}-{os.getpid()}{record.SUFFIX}"
        self._file = (Path(os.environ[FOLDER]) / name).open("w", buffering=1, encoding="utf-8")
        first = record.header(rank=rank, world_size=world_size, pid=os.getpid())
        self._file.write(first + "\n")
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self.write(event)

    def close(self, problem: str) -> None:
        """Write the last line."""
        while self._open:
            self._merge(self._open.pop())
        if self._file is not None and not self._file.closed:
            self._file.write(record.closing(problem) + "\n")
            self._file.close()
