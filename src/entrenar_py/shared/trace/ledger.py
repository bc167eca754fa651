"""The file of a trace: JSON lines in a BLAKE3 chain.

The file has a header line, then one event per line. Each line has a `chain`: the BLAKE3 digest of
the previous line's `chain` and of this line without its `chain`. The last event is `End`, so a
truncated file is detected, too.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from entrenar_py.shared.errors import ForeignTrace, TraceError, UsageError
from entrenar_py.shared.scenario import Scenario, TrainingPlan
from entrenar_py.shared.trace import records, traits
from entrenar_py.shared.trace.events import End, Event
from entrenar_py.shared.trace.run import Trace
from entrenar_py.shared.trace.traits import USUAL, Traits
from entrenar_py.shared.untrusted import files, json_text

VERSION = 1
_AGAIN = "record the run again"
EVENTS_MAX = 2**21  # events of a trace to judge; a ledger that is only verified may have any length


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first line of a trace's file: the facts known before the first event.

    `plan` is a Scenario if the harness ran it.
    """

    plan: TrainingPlan
    environment: Mapping[str, Any]
    promises: tuple[str, ...] = ()
    traits: Traits = USUAL


def dump_lines(trace: Trace) -> Iterator[str]:
    """Yield the lines of the file of `trace`, without line ends."""
    chain = ""
    head = Head(
        plan=trace.scenario,
        environment=trace.environment,
        promises=trace.promises,
        traits=trace.traits,
    )
    for record in (header(head), *map(records.to_record, trace.events)):
        line, chain = dump_line(chain, record)
        yield line


def header(head: Head) -> dict[str, Any]:
    """Return the record that is written as the first line."""
    return {
        "kind": "trace",
        "version": VERSION,
        "scenario" if isinstance(head.plan, Scenario) else "plan": head.plan.to_dict(),
        "environment": dict(head.environment),
        "promises": list(head.promises),
        "traits": head.traits.to_dict(),
    }


def dump_line(chain: str, record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the JSON line of `record` and the line's chain digest.

    `chain` is the digest of the previous line, "" for the first. Raises UsageError for a line that
    is too long to be read again.
    """
    body = json.dumps(record, separators=(",", ":"), allow_nan=False)
    chain = _link(chain, body)
    line = f'{body[:-1]},"chain":"{chain}"}}'
    if len(line) >= files.LINE_BYTES_MAX:
        raise UsageError(
            f"{record.get('kind', 'record')}: a line of {len(line) + 1} bytes: at most "
            f"{files.LINE_BYTES_MAX} are read; record digests instead of values"
        )
    return line, chain


def save(trace: Trace, path: Path) -> None:
    """Write the file of `trace` to `path`. Raises UsageError if it can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in dump_lines(trace))
    except OSError as error:
        problem = f"can't be written ({error.strerror}); give another folder"
        raise UsageError(f"trace file {path}: {problem}") from error


def load(path: Path) -> Trace:
    """Return the trace that `save` wrote to `path`.

    Raises TraceError, which names the line, for a file that is of a different version, was edited,
    reordered or truncated, or is not a trace.
    """
    try:
        with files.open_file(path) as file:
            reader = Reader(file, path)
            events = tuple(islice(reader, EVENTS_MAX + 1))
    except OSError as error:
        problem = f"can't be read ({error.strerror}); give a trace that can be read"
        raise TraceError(f"trace file {path}: {problem}") from error
    if len(events) > EVENTS_MAX:
        raise TraceError(
            f"{path}: more than {EVENTS_MAX} events: judging holds all of them in "
            "memory; record fewer steps"
        )
    if not events or not isinstance(events[-1], End):
        where = f"{path}:{reader.num_lines}: the trace is truncated"
        raise TraceError(f"{where}: its last line is not an end event; {_AGAIN}")
    head = reader.head
    return Trace(
        scenario=Scenario.of(head.plan),
        environment=head.environment,
        promises=head.promises,
        traits=head.traits,
        events=events,
    )


def dump_events(events: Iterable[Event]) -> bytes:
    """Return `events` as JSON lines without a chain, to be sent to another process."""
    lines = (
        json.dumps(records.to_record(event), separators=(",", ":"), allow_nan=False)
        for event in events
    )
    return "".join(f"{line}\n" for line in lines).encode()


def load_events(data: bytes) -> list[Event]:
    """Return the events that `dump_events` wrote. Raises TraceError that names a wrong event."""
    events = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            events.append(records.from_record(json_text.load(line)))
        except (UsageError, ValueError) as error:
            raise TraceError(f"event {number} can't be read ({error})") from error
    return events


class Reader:
    """A reader of a trace's file: the header is read at once as `head`, then the events one by one.

    `num_lines` and `num_bytes` count the lines and bytes read so far; `chain` is the digest of the
    last line read. Raises TraceError, which names the line, for content that no writer wrote. With
    `cut`, a last line without a line end is ignored, because its writer may have died while writing
    it.
    """

    def __init__(self, file: BinaryIO, path: Path, *, cut: bool = False) -> None:
        self.num_lines = self.num_bytes = 0
        self.chain = ""
        self._path, self._cut = path, cut
        self._lines = files.lines(file)
        first = self._next()
        if first is None:
            raise ForeignTrace(f"{path}: the file is empty; a trace starts with a header line")
        self.head = self._header(first)

    def __iter__(self) -> Iterator[Event]:
        while (record := self._next()) is not None:
            try:
                yield records.from_record(record)
            except UsageError as error:
                raise TraceError(f"{self._where}: not an event ({error}); {_AGAIN}") from error

    @property
    def _where(self) -> str:
        return f"{self._path}:{self.num_lines}"

    def _next(self) -> dict[str, Any] | None:
        """Return the record of the next line with its chain checked; None after the last line."""
        try:
            line = next(self._lines, b"")
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            wrong = TraceError if self.num_lines else ForeignTrace
            raise wrong(f"{self._path}: {error.strerror}") from error
        if not line or (self._cut and not line.endswith(b"\n")):
            return None
        self.num_lines += 1
        self.num_bytes += len(line)
        # Invalid UTF-8 is escaped, so that the check of the chain fails with an error that names
        # the line.
        text = line.decode(errors="backslashreplace").rstrip("\n")
        body, mark, digest = text.rpartition(',"chain":"')
        if not mark or not digest.endswith('"}'):
            problem = "not a line of a trace (no chain digest at its end); give it as written"
            if not line.endswith(b"\n"):
                problem += "; it is incomplete: its writer may have been stopped in the middle"
            wrong = ForeignTrace if self.num_lines == 1 else TraceError
            raise wrong(f"{self._where}: {problem}")
        record = self._parsed(body + "}")
        self.chain = _link(self.chain, body + "}")
        if digest[:-2] != self.chain:
            raise TraceError(
                f"{self._where}: chain digest {digest[:-2]}, expected {self.chain}: this line or "
                f"its place was changed after the run; {_AGAIN}"
            )
        return record

    def _parsed(self, body: str) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json_text.load(body)
        except ValueError as error:
            raise TraceError(f"{self._where}: not JSON ({error}); {_AGAIN}") from error
        if self.num_lines == 1 and record.get("version") != VERSION:
            raise ForeignTrace(
                f"{self._where}: trace version={record.get('version')!r}: this release reads "
                f"version {VERSION}; {_AGAIN}"
            )
        return record

    def _header(self, record: dict[str, Any]) -> Head:
        if record.get("kind") != "trace":
            problem = f"first line kind={record.get('kind')!r}: a trace's is 'trace'; give a trace"
            raise ForeignTrace(f"{self._where}: {problem}")
        try:
            plan, observed = traits.from_header(record)
            return Head(
                plan=plan,
                environment=dict(record["environment"]),
                promises=tuple(record["promises"]),
                traits=observed,
            )
        except (AttributeError, KeyError, TypeError, UsageError, ValueError) as error:
            raise TraceError(f"{self._path}:1: not a header ({error!r}); {_AGAIN}") from error


def _link(chain: str, body: str) -> str:
    return str(blake3(f"{chain}\n{body}".encode()).hexdigest(16))
