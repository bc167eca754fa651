"""A trace's file: JSON lines in a BLAKE3 chain.

Every line is one event plus `chain`: the BLAKE3 digest of the previous line's chain and this line
without it. The last event is `End`, so a truncated file is found too.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from entrenar_py.errors import ForeignTrace, TraceError, UsageError
from entrenar_py.trace import records, traits
from entrenar_py.trace.events import End, Event
from entrenar_py.trace.run import Trace
from entrenar_py.untrusted import files

VERSION = 1
EVENTS_MAX = 2**21  # of a run that is judged; who only verifies a ledger reads one of any length


def dump_lines(trace: Trace) -> Iterator[str]:
    """The lines of the trace's file, without line ends."""
    chain = ""
    for record in (header(trace), *map(records.to_record, trace.events)):
        line, chain = dump_line(chain, record)
        yield line


def header(trace: Trace) -> dict[str, Any]:
    """The record of the first line: all of `trace` but its events."""
    return {
        "kind": "trace",
        "version": VERSION,
        "scenario": trace.scenario.to_dict(),
        "environment": dict(trace.environment),
        "promises": list(trace.promises),
        "traits": trace.traits.to_dict(),
    }


def dump_line(chain: str, record: Mapping[str, Any]) -> tuple[str, str]:
    """The line of `record` after a line whose chain is `chain` ("" before the first); its chain."""
    body = json.dumps(record, separators=(",", ":"), allow_nan=False)
    chain = _link(chain, body)
    return f'{body[:-1]},"chain":"{chain}"}}', chain


def save(trace: Trace, path: Path) -> None:
    """Writes the trace's file; UsageError if that can't be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in dump_lines(trace))
    except OSError as error:
        raise UsageError(f"trace file {path}: can't be written ({error.strerror})") from error


def load(path: Path) -> Trace:
    """The trace that `save` wrote.

    Raises TraceError, with the line, for a file of another version, one that was edited,
    reordered or truncated, or that is no trace at all.
    """
    try:
        with files.open_file(path) as file:
            reader = Reader(file, path)
            events = tuple(islice(reader, EVENTS_MAX + 1))
    except OSError as error:
        raise TraceError(f"trace file {path}: can't be read ({error.strerror})") from error
    if len(events) > EVENTS_MAX:
        raise TraceError(
            f"{path}: more than {EVENTS_MAX} events: a judge has them all in memory; record fewer "
            "steps"
        )
    if not events or not isinstance(events[-1], End):
        where = f"{path}:{reader.num_lines}"
        raise TraceError(f"{where}: the trace is truncated: its last line is no end event")
    head = reader.head
    return Trace(
        scenario=head.scenario,
        environment=head.environment,
        promises=head.promises,
        traits=head.traits,
        events=events,
    )


def dump_events(events: Iterable[Event]) -> bytes:
    """`events` as JSON lines, without a chain: what one process tells another."""
    lines = (
        json.dumps(records.to_record(one), separators=(",", ":"), allow_nan=False) for one in events
    )
    return "".join(f"{line}\n" for line in lines).encode()


def load_events(data: bytes) -> list[Event]:
    """The events that `dump_events` wrote; TraceError, with the line, for anything else."""
    events = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            events.append(records.from_record(json.loads(line)))
        except (RecursionError, UsageError, ValueError) as error:
            raise TraceError(f"event {number} can't be read ({error})") from error
    return events


class Reader:
    """A trace's file, line by line: the first at once (`head`, a trace without events), then each
    event as it is asked for.

    `num_lines` were read, `num_bytes` long, and `chain` is the last one's. Raises TraceError, with
    the line, for what no writer wrote. A last line without its end was cut off when its writer
    died: with `cut` the events end before it, else it is as good as its chain.
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
                raise TraceError(f"{self._where}: event can't be read ({error})") from error

    @property
    def _where(self) -> str:
        return f"{self._path}:{self.num_lines}"

    def _next(self) -> dict[str, Any] | None:
        """The record of the next line, its chain checked; None after the last."""
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
        # A byte that is no UTF-8 must not hide which line it stands in: its chain will not match.
        text = line.decode(errors="backslashreplace").rstrip("\n")
        body, mark, digest = text.rpartition(',"chain":"')
        if not mark or not digest.endswith('"}'):
            problem = "not a line of a trace (no chain digest at its end)"
            if not line.endswith(b"\n"):
                problem += "; it is incomplete: its writer may have been stopped in the middle"
            wrong = ForeignTrace if self.num_lines == 1 else TraceError
            raise wrong(f"{self._where}: {problem}")
        record = self._parsed(body + "}")
        self.chain = _link(self.chain, body + "}")
        if digest[:-2] != self.chain:
            raise TraceError(
                f"{self._where}: chain digest {digest[:-2]} expected {self.chain}: this line or "
                "its place was changed after the run; record the run again"
            )
        return record

    def _parsed(self, body: str) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{self._where}: not JSON ({error})") from error
        if self.num_lines == 1 and record.get("version") != VERSION:
            raise ForeignTrace(
                f"{self._where}: trace version={record.get('version')!r}: this release reads "
                f"version {VERSION}; record the run again"
            )
        return record

    def _header(self, record: dict[str, Any]) -> Trace:
        if record.get("kind") != "trace":
            where = self._where
            raise ForeignTrace(f"{where}: first line kind={record.get('kind')!r}, not trace")
        try:
            scenario, observed = traits.from_header(record)
            return Trace(
                scenario=scenario,
                environment=dict(record["environment"]),
                promises=tuple(record["promises"]),
                traits=observed,
                events=(),
            )
        except (AttributeError, KeyError, TypeError, UsageError, ValueError) as error:
            raise TraceError(f"{self._path}:1: header can't be read ({error!r})") from error


def _link(chain: str, body: str) -> str:
    return str(blake3(f"{chain}\n{body}".encode()).hexdigest(16))
