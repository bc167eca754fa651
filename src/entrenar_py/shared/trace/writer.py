"""A trace's file that grows during its run and can be read at any time, up to its last whole line.

If the writing process dies, the file is a valid chain up to the last whole line. A partial last
line is removed when the file is opened again.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.scenario import ANY_SIZE, Scenario, TrainingPlan, plan_record
from entrenar_py.shared.trace import ledger, records
from entrenar_py.shared.trace.events import End, Event, Membership, Start, Update
from entrenar_py.shared.trace.ledger import Head
from entrenar_py.shared.trace.service_events import Gap
from entrenar_py.shared.untrusted import files

# The advice in errors about a ledger that a run can't continue.
_TO_DO = (
    "restore the ledger that the run has written, or move this one away: "
    "--resume then begins a new one, which records the gap"
)


@dataclass(frozen=True, slots=True)
class Mark:
    """A line of a file: its number, from 1, and its chain digest, which covers all lines before."""

    line: int
    chain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state at the end of a trace's file: ranks present, step, and the End event, if any.

    `num_made` is the number of steps up to and including the last one with an update. `is_new` is
    true if the file was just created.
    """

    present: tuple[int, ...] = ()
    step: int = 0
    end: End | None = None
    num_made: int = 0
    is_new: bool = False


class Writer:
    """Appends events to the file of one run.

    Methods raise OSError if the file can't be written; lines that were written before stay.
    """

    def __init__(self, file: FileIO, last: Mark) -> None:
        """Continue `file` after the line `last`. From now on the file belongs to this writer."""
        self._file, self._num_lines, self._chain = file, last.line, last.chain

    @property
    def path(self) -> Path:
        """The path of the file."""
        return Path(self._file.name)

    @property
    def last(self) -> Mark:
        """The last line that was written."""
        return Mark(self._num_lines, self._chain)

    def append(self, events: Iterable[Event]) -> None:
        """Write `events` to the file, so that they survive the death of this process.

        Raises UsageError for an event that could not be read again; then no event is written.
        """
        self.write(map(records.to_record, events))

    def sync(self) -> None:
        """Flush the file to disk: afterwards all lines would survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Write `entries` as lines, each chained to the previous one."""
        lines, chain = [], self._chain
        for entry in entries:
            line, chain = ledger.dump_line(chain, entry)
            lines.append(f"{line}\n")
        self._chain = chain
        self._num_lines += len(lines)
        left = memoryview("".join(lines).encode())
        while left.nbytes:
            left = left[self._file.write(left) :]


def require_new(path: Path) -> None:
    """Raise UsageError if there is a ledger at `path`."""
    if path.exists():
        raise _exists(path)


def _exists(path: Path) -> UsageError:
    return UsageError(
        f"ledger {path}: it already exists; continue with --resume, or give another path"
    )


def create(path: Path, head: Head) -> Writer:
    """Create a trace's file at `path`.

    Raises UsageError if it already exists or can't be created.
    """
    try:
        file = FileIO(path, "x")
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise _not_made(path, error) from error
    with _kept(file, path):
        try:
            writer = _begun(file, head)
            files.sync_folder(path.parent)
        except OSError:
            path.unlink()  # or it would block the next attempt
            raise
        return writer


def reopen(path: Path, head: Head, *, since: Gap | None = None) -> tuple[Writer, Standing]:
    """Open the file at `path` to continue it. Return its writer and the state at its end.

    A missing file is created; if the run resumes from a checkpoint, the new file is there with the
    gap `since`, or not at all. Raises TraceError for a file that is damaged before its last line,
    belongs to a run with a different `head`, or lacks the events before that checkpoint. Raises
    UsageError if another process is writing the file.
    """
    if not path.exists():
        if since is None:
            return create(path, head), Standing(is_new=True)
        _make(path, head, since)
        return reopen(path, head, since=since)[0], Standing(is_new=True)
    try:
        files.open_file(path).close()
        file = FileIO(path, "r+")
    except OSError as error:
        problem = f"can't be written ({error.strerror}); give another path"
        raise UsageError(f"ledger {path}: {problem}") from error
    with _kept(file, path), files.open_file(path) as lines:
        first = next(files.lines(lines), b"")
        if not first.endswith(b"\n"):  # its creator died while writing this line
            if since is not None and since.digest is not None:
                raise TraceError(f"ledger {path}: it has no complete line; {_TO_DO}")
            file.truncate(0)
            return _begun(file, head, since), Standing(is_new=True)
        lines.seek(0)
        reader = ledger.Reader(lines, path, cut=True)
        _require_same(reader.head.plan, head.plan, path)
        standing = _stand(reader if since is None else _through(reader, path, since))
        file.truncate(reader.num_bytes)
        file.seek(reader.num_bytes)
        return Writer(file, Mark(reader.num_lines, reader.chain)), standing


def _make(path: Path, head: Head, since: Gap) -> None:
    """Create the file at `path`, as a whole or not at all. Raises UsageError if it can't be."""
    partial = path.with_name(f"{path.name}.new")
    try:
        with FileIO(partial, "w") as file:
            _begun(file, head, since).sync()
        partial.replace(path)
        files.sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise _not_made(path, error) from error


def _not_made(path: Path, error: OSError) -> UsageError:
    problem = f"can't be made ({error.strerror}); give another path"
    return UsageError(f"ledger {path}: {problem}")


def _begun(file: FileIO, head: Head, since: Gap | None = None) -> Writer:
    """Write `head` and `since` to the empty `file`, and return the file's writer."""
    writer = Writer(file, Mark(0, ""))
    gap = () if since is None else (records.to_record(since),)
    writer.write([ledger.header(head), *gap])
    return writer


def _through(reader: ledger.Reader, path: Path, since: Gap) -> Iterator[Event]:
    """Yield the events of `reader`. Raises TraceError if events before the checkpoint are missing.

    No events are missing if the file contains the line that the checkpoint `since` names. None are
    missing either if the file contains a gap equal to `since`, because it was then started at that
    checkpoint. If the checkpoint names no line, only its step can be compared.
    """
    num_made = 0
    digest: str | None = None  # digest of the line that the checkpoint names
    is_begun = False
    for event in itertools.chain([None], reader):
        if reader.num_lines == since.lines:
            digest = reader.chain
        if isinstance(event, Update):
            num_made = max(num_made, event.step + 1)
        if isinstance(event, Gap):
            is_begun = is_begun or replace(event, reason=since.reason) == since
        if event is not None:
            yield event
    is_there = num_made >= since.step if since.digest is None else digest == since.digest
    if not is_there and not is_begun:
        raise TraceError(f"ledger {path}: {_lacking(since, reader, num_made, digest)}; {_TO_DO}")


def _lacking(since: Gap, reader: ledger.Reader, num_made: int, digest: str | None) -> str:
    """Return which events before the checkpoint `since` the file lacks, as text for an error."""
    if since.digest is None:
        return (
            f"it ends after {num_made} steps, but the checkpoint is of step {since.step} and "
            "names no ledger: the steps in between are not in it"
        )
    if digest is None:
        return (
            f"it has {reader.num_lines} complete lines, but had {since.lines} when the "
            f"checkpoint was written (digest of the last {since.digest}): the lines in between "
            "are lost"
        )
    return (
        f"its line {since.lines} has the digest {digest}, but the checkpoint names "
        f"{since.digest}: it belongs to a different run, or was rewritten"
    )


def _stand(events: Iterable[Event]) -> Standing:
    present: set[int] = set()
    step, end, num_made = 0, None, 0
    for event in events:
        end = event if isinstance(event, End) else None
        if end is not None:  # the run was stopped, and all its workers with it
            present.clear()
        if isinstance(event, Start):
            present.add(event.rank)
        elif isinstance(event, Membership) and event.change == "left":
            present.discard(event.rank)
        elif isinstance(event, Update):
            num_made = max(num_made, event.step + 1)
        reached = getattr(event, "step", None)
        step = step if reached is None else reached
    return Standing(present=tuple(sorted(present)), step=step, end=end, num_made=num_made)


def _require_same(theirs: TrainingPlan, ours: TrainingPlan, path: Path) -> None:
    wrote, writes = theirs.to_dict(), ours.to_dict()
    if not isinstance(ours, Scenario):
        wrote = dict(plan_record(wrote))
    free = "world_size" if writes.get("trainer") in ANY_SIZE else None
    for name in {**writes, **wrote}:
        if name != free and wrote.get(name) != writes.get(name):
            raise TraceError(
                f"ledger {path}: it was written by a run with {name}={wrote.get(name)!r}, but "
                f"this run has {name}={writes.get(name)!r}; continue with the configuration of "
                "that run, or give another path"
            )


@contextmanager
def _kept(file: FileIO, path: Path) -> Iterator[None]:
    """Lock `file`, if its file system has locks, and close it if the body raises.

    The lock stays after the body. Two writers would break the chain for both.
    """
    with ExitStack() as failing:
        failing.callback(file.close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "another process is writing it; stop that first"
            raise UsageError(f"ledger {path}: {problem}") from error
        except OSError:  # the file system has no locks
            pass
        yield
        failing.pop_all()
