"""A trace's file: JSON lines in a BLAKE3 chain.

Every line is one event plus `chain`: the BLAKE3 digest of the previous line's chain and this line
without it. The last event is `End`, so a truncated file is found too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from entrenar_py.errors import TraceError, UsageError
from entrenar_py.scenario import Scenario
from entrenar_py.trace import records
from entrenar_py.trace.events import End, Event, Trace

VERSION = 1


def dump_lines(trace: Trace) -> Iterator[str]:
    """The lines of the trace's file, without line ends."""
    header = {
        "kind": "trace",
        "version": VERSION,
        "scenario": trace.scenario.to_dict(),
        "environment": dict(trace.environment),
        "promises": list(trace.promises),
    }
    chain = ""
    for record in (header, *map(records.to_record, trace.events)):
        body = json.dumps(record, separators=(",", ":"), allow_nan=False)
        chain = _link(chain, body)
        yield f'{body[:-1]},"chain":"{chain}"}}'


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
        # A byte that is no UTF-8 must not hide which line it stands in: its chain will not match.
        with path.open(encoding="utf-8", errors="backslashreplace") as file:
            return _parse(file, path)
    except OSError as error:
        raise TraceError(f"trace file {path}: can't be read ({error.strerror})") from error


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
        except records.NOT_AN_EVENT as error:
            raise TraceError(f"event {number} can't be read ({error!r})") from error
    return events


def _parse(lines: Iterable[str], path: Path) -> Trace:
    chain, header, events = "", None, []
    number = 0
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        body, mark, digest = line.rstrip("\n").rpartition(',"chain":"')
        if not mark or not digest.endswith('"}'):
            raise TraceError(f"{where}: not a line of a trace (no chain digest at its end)")
        body += "}"
        try:
            record = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{where}: not JSON ({error})") from error
        if number == 1 and record.get("version") != VERSION:
            raise TraceError(
                f"{where}: trace version={record.get('version')!r}: this release reads version "
                f"{VERSION}; record the run again"
            )
        chain = _link(chain, body)
        if digest[:-2] != chain:
            raise TraceError(
                f"{where}: chain digest {digest[:-2]} expected {chain}: this line or its place "
                "was changed after the run; record the run again"
            )
        try:
            if header is None:
                header = record
                if record.get("kind") != "trace":
                    raise TraceError(f"{where}: first line kind={record.get('kind')!r}, not trace")
            else:
                events.append(records.from_record(record))
        except records.NOT_AN_EVENT as error:
            raise TraceError(f"{where}: event can't be read ({error!r})") from error
    if header is None:
        raise TraceError(f"{path}: the file is empty; a trace starts with a header line")
    if not events or not isinstance(events[-1], End):
        raise TraceError(f"{path}:{number}: the trace is truncated: its last line is no end event")
    try:
        return Trace(
            scenario=Scenario.from_dict(header["scenario"]),
            environment=dict(header["environment"]),
            promises=tuple(header["promises"]),
            events=tuple(events),
        )
    except (*records.NOT_AN_EVENT, UsageError) as error:
        raise TraceError(f"{path}:1: header can't be read ({error!r})") from error


def _link(chain: str, body: str) -> str:
    return str(blake3(f"{chain}\n{body}".encode()).hexdigest(16))
