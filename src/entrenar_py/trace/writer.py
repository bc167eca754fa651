"""A trace's file that grows while its run goes on, readable to its last whole line at any time.

Whoever dies with it leaves a chain that is right as far as it goes; a line that was cut off in the
middle is removed by who takes the file up again.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from entrenar_py.errors import TraceError, UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.trace import ledger, records
from entrenar_py.trace.events import End, Event, Gap, Membership, Start, Update
from entrenar_py.trace.run import Trace
from entrenar_py.untrusted import files

# Of a ledger that a run can't go on with.
_TO_DO = (
    "put back the one that the run has written, or move this one away: --resume then begins a new "
    "one, which says what it lacks"
)


@dataclass(frozen=True, slots=True)
class Mark:
    """One line of a file: its number, from 1, and its chain digest, which covers all before it."""

    line: int
    chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The end of a file: who had started and not left, in which step; whether the run is over.

    `num_made` steps have an update in it, or precede one. `is_new`: it was just begun.
    """

    present: tuple[int, ...] = ()
    step: int = 0
    end: End | None = None
    num_made: int = 0
    is_new: bool = False


class Writer:
    """The file of one run. OSError, wherever it can't be written; what came before stays."""

    def __init__(self, file: FileIO, last: Mark) -> None:
        """Writes behind the line `last`; the file is this writer's then."""
        self._file, self._num_lines, self._chain = file, last.line, last.chain

    @property
    def last(self) -> Mark:
        """The line that was written last."""
        return Mark(self._num_lines, self._chain)

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
        self._num_lines += len(lines)
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
        writer = _begun(file, head)
        _sync_folder(path)
        return writer


def reopen(path: Path, head: Trace, *, since: Gap | None = None) -> tuple[Writer, Standing]:
    """The file at `path`, to be gone on with, and where it ends; a new one if there is none.

    `since` is the gap that a new one would have, if the run goes on from a checkpoint. Raises
    TraceError for a file that is damaged before its last line, of another scenario than `head`'s,
    or without what led to that checkpoint; UsageError for one that another process is writing.
    """
    if not path.exists():
        return create(path, head), Standing(is_new=True)
    try:
        files.open_file(path).close()
        file = FileIO(path, "r+")
    except OSError as error:
        raise UsageError(f"ledger {path}: can't be written ({error.strerror})") from error
    with _kept(file, path), files.open_file(path) as lines:
        first = next(files.lines(lines), b"")
        if not first.endswith(b"\n"):  # whoever began it died in its first line
            if since is not None and since.digest is not None:
                raise TraceError(f"ledger {path}: it has no whole line; {_TO_DO}")
            file.truncate(0)
            return _begun(file, head), Standing(is_new=True)
        lines.seek(0)
        reader = ledger.Reader(lines, path, cut=True)
        _require_same(reader.head.scenario, head.scenario, path)
        standing = _stand(reader if since is None else _through(reader, path, since))
        file.truncate(reader.num_bytes)
        file.seek(reader.num_bytes)
        return Writer(file, Mark(reader.num_lines, reader.chain)), standing


def _begun(file: FileIO, head: Trace) -> Writer:
    """A file of one line: all of `head` but its events."""
    writer = Writer(file, Mark(0, ""))
    writer.write([ledger.header(head)])
    return writer


def _through(reader: ledger.Reader, path: Path, since: Gap) -> Iterator[Event]:
    """The events of `reader`; TraceError if what led to the checkpoint `since` isn't among them.

    It is if the line that the checkpoint names is there, or a gap that says the same as `since`:
    then the file was begun anew, from that checkpoint. One that names no line can only be compared
    by its step.
    """
    num_made = 0
    there: str | None = None  # the digest of the line that the checkpoint names
    is_begun = False
    for event in itertools.chain([None], reader):
        if reader.num_lines == since.lines:
            there = reader.chain
        if isinstance(event, Update):
            num_made = max(num_made, event.step + 1)
        if isinstance(event, Gap):
            is_begun = is_begun or replace(event, reason=since.reason) == since
        if event is not None:
            yield event
    is_there = num_made >= since.step if since.digest is None else there == since.digest
    if not is_there and not is_begun:
        raise TraceError(f"ledger {path}: {_lacking(since, reader, num_made, there)}; {_TO_DO}")


def _lacking(since: Gap, reader: ledger.Reader, num_made: int, there: str | None) -> str:
    """Return what of the way to the checkpoint `since` is not in the file."""
    if since.digest is None:
        return (
            f"it ends after {num_made} steps, the checkpoint is of step {since.step} and names no "
            "ledger: the steps between are not in it"
        )
    if there is None:
        return (
            f"it has {reader.num_lines} whole lines, the checkpoint was written when it had "
            f"{since.lines} (digest of the last {since.digest}): what came after is lost"
        )
    return (
        f"its line {since.lines} has the digest {there}, the checkpoint names {since.digest}: it "
        "is another run's, or was written anew"
    )


def _stand(events: Iterable[Event]) -> Standing:
    present: set[int] = set()
    step, end, num_made = 0, None, 0
    for event in events:
        end = event if isinstance(event, End) else None
        if isinstance(event, Start):
            present.add(event.rank)
        elif isinstance(event, Membership) and event.change == "left":
            present.discard(event.rank)
        elif isinstance(event, Update):
            num_made = max(num_made, event.step + 1)
        reached = getattr(event, "step", None)
        step = step if reached is None else reached
    return Standing(present=tuple(sorted(present)), step=step, end=end, num_made=num_made)


def _require_same(theirs: Scenario, ours: Scenario, path: Path) -> None:
    for name, value in ours.to_dict().items():
        if theirs.to_dict()[name] != value:
            raise TraceError(
                f"ledger {path}: it is of a run with {name}={theirs.to_dict()[name]!r}, this one "
                f"has {name}={value!r}; go on with the scenario that it began with, or give "
                "another path"
            )


def _sync_folder(path: Path) -> None:
    """Returns when the file at `path` would be found there after a power cut, too."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _kept(file: FileIO, path: Path) -> Iterator[None]:
    """While inside, `file` is closed if anything fails; it is locked, for good,
    where its file system has locks.

    Two writers would break the chain for both.
    """
    with ExitStack() as failing:
        failing.callback(file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "another process is writing it; stop that first"
            raise UsageError(f"ledger {path}: {problem}") from error
        except OSError:  # such a file system: nothing can be known
            pass
        yield
        failing.pop_all()
