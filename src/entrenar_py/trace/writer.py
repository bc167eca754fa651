"""A trace's file that grows while its run goes on, readable to its last whole line at any time.

Whoever dies with it leaves a chain that is right as far as it goes; a line that was cut off in the
middle is removed by who takes the file up again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from entrenar_py.errors import TraceError, UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.trace import ledger, records
from entrenar_py.trace.events import End, Event, Membership, Start
from entrenar_py.trace.run import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a file ends: who had started and not left, in which step; whether the run is over."""

    present: tuple[int, ...] = ()
    step: int = 0
    end: End | None = None


class Writer:
    """The file of one run. OSError, wherever it can't be written; what came before stays."""

    def __init__(self, file: FileIO, chain: str) -> None:
        """Writes behind a line whose chain is `chain`; the file is this writer's then."""
        self._file, self._chain = file, chain

    def append(self, events: Iterable[Event]) -> None:
        """Writes `events` to the file: a process that dies now takes none of them along."""
        self.write(map(records.to_record, events))

    def sync(self) -> None:
        """Returns when all of it would be there after a power cut, too."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends the writing."""
        self._file.close()

    def write(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Writes these as lines, each linked to the one before."""
        lines = []
        for entry in entries:
            line, self._chain = ledger.dump_line(self._chain, entry)
            lines.append(f"{line}\n")
        left = memoryview("".join(lines).encode())
        while left.nbytes:
            left = left[self._file.write(left) :]


def create(path: Path, head: Trace) -> Writer:
    """A new file at `path`; UsageError if there is one, or if none can be made."""
    try:
        file = FileIO(path, "x")
    except FileExistsError as error:
        raise UsageError(
            f"ledger {path}: it is there already; go on with --resume, or give another path"
        ) from error
    except OSError as error:
        raise UsageError(f"ledger {path}: can't be made ({error.strerror})") from error
    with _kept(file, path):
        return _begun(file, head)


def reopen(path: Path, head: Trace) -> tuple[Writer, Standing]:
    """The file at `path`, to be gone on with, and where it ends; a new one if there is none.

    Raises TraceError for a file that is damaged before its last line, UsageError for one of another
    scenario than `head`'s, or that someone else is writing.
    """
    if not path.exists():
        return create(path, head), Standing()
    try:
        file = FileIO(path, "r+")
    except OSError as error:
        raise UsageError(f"ledger {path}: can't be written ({error.strerror})") from error
    with _kept(file, path), path.open("rb") as lines:
        if not lines.readline().endswith(b"\n"):  # whoever began it died in its first line
            file.truncate(0)
            return _begun(file, head), Standing()
        lines.seek(0)
        reader = ledger.Reader(lines, path, cut=True)
        _require_same(reader.head.scenario, head.scenario, path)
        standing = _stand(reader)
        file.truncate(reader.num_bytes)
        file.seek(reader.num_bytes)
        return Writer(file, reader.chain), standing


def _begun(file: FileIO, head: Trace) -> Writer:
    """A file of one line: all of `head` but its events."""
    writer = Writer(file, "")
    writer.write([ledger.header(head)])
    return writer


def _stand(events: Iterable[Event]) -> Standing:
    present: set[int] = set()
    step, end = 0, None
    for event in events:
        end = event if isinstance(event, End) else None
        if isinstance(event, Start):
            present.add(event.rank)
        elif isinstance(event, Membership) and event.change == "left":
            present.discard(event.rank)
        reached = getattr(event, "step", None)
        step = step if reached is None else reached
    return Standing(present=tuple(sorted(present)), step=step, end=end)


def _require_same(theirs: Scenario, ours: Scenario, path: Path) -> None:
    for name, value in ours.to_dict().items():
        if theirs.to_dict()[name] != value:
            raise TraceError(
                f"ledger {path}: it is of a run with {name}={theirs.to_dict()[name]!r}, this one "
                f"has {name}={value!r}; go on with the scenario that it began with, or give "
                "another path"
            )


@contextmanager
def _kept(file: FileIO, path: Path) -> Iterator[None]:
    """While inside, `file` is closed if anything fails; it is locked, for good.

    Two writers would break the chain for both.
    """
    with ExitStack() as failing:
        failing.callback(file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = "another process is writing it; stop that first"
            raise UsageError(f"ledger {path}: {problem}") from error
        yield
        failing.pop_all()
