"""The trace's file: round trips, and every way to tamper with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared import trace
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.trace import ledger
from tests.shared.trace.samples import EVENTS, SCENARIO, WHOLE


def _text(given: trace.Trace) -> str:
    return repr(given.events)  # repr, since a NaN is not equal to itself


def _chained(records: list[dict[str, Any]]) -> str:
    """Return a file with a valid chain whatever its records are, as a determined forger can."""
    chain, lines = "", []
    for record in records:
        body = json.dumps(record)
        chain = blake3(f"{chain}\n{body}".encode()).hexdigest(16)
        lines.append(f'{body[:-1]},"chain":"{chain}"}}\n')
    return "".join(lines)


def test_every_kind_is_tried_here() -> None:
    """The round trip below covers every kind of event."""
    assert {event.kind for event in EVENTS} == set(trace.EVENTS)


def test_every_event_survives_the_file(tmp_path: Path) -> None:
    """Events saved in a new folder load unchanged, NaN and -0.0 included."""
    path = tmp_path / "new" / "run.jsonl"
    trace.save(WHOLE, path)
    back = trace.load(path)
    assert _text(back) == _text(WHOLE)
    assert (back.scenario, back.environment, back.promises) == (
        SCENARIO,
        {"torch": "2"},
        ("bitwise",),
    )
    assert list(trace.dump_lines(back)) == list(trace.dump_lines(WHOLE))
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@given(
    st.floats(),
    st.none() | st.floats(),
    st.lists(st.integers(-(2**63) + 1, 2**63 - 1)),
    st.dictionaries(st.text(), st.builds(trace.TensorRecord, st.text())),
)
def test_any_numbers_and_names_survive(
    tmp_path_factory: pytest.TempPathFactory,
    loss: float,
    norm: float | None,
    ids: list[int],
    tensors: trace.Tensors,
) -> None:
    """Floats come back as the same bits, names as the same text."""
    shard = replace(EVENTS[1], loss_sum=loss, ids=tuple(ids), gradient=tensors)  # type: ignore[call-arg]
    update = replace(EVENTS[3], loss=loss, grad_norm=norm)  # type: ignore[call-arg]
    given_trace = replace(WHOLE, events=(shard, update, EVENTS[-1]))
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    trace.save(given_trace, path)
    assert _text(trace.load(path)) == _text(given_trace)


def test_a_line_too_long_to_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that no reader would take is refused, with its length."""
    monkeypatch.setattr("entrenar_py.shared.untrusted.files.LINE_BYTES_MAX", 200)
    assert len(ledger.dump_line("", {"text": "k" * 100})[0]) < 200
    with pytest.raises(UsageError, match=r"a line of 25\d bytes: at most 200 are read"):
        ledger.dump_line("", {"text": "k" * 199})


# --- tampering --------------------------------------------------------------------------------

LINES = [line + "\n" for line in trace.dump_lines(WHOLE)]
NUM = len(LINES)
Tamper = Callable[[list[str], int], list[str]]


def _edit(lines: list[str], at: int) -> list[str]:
    return [*lines[:at], lines[at].replace('"kind"', '"kind" ', 1), *lines[at + 1 :]]


def _drop(lines: list[str], at: int) -> list[str]:
    return lines[:at] + lines[at + 1 :]


def _swap(lines: list[str], at: int) -> list[str]:
    return [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]


def _repeat(lines: list[str], at: int) -> list[str]:
    return [*lines[: at + 1], *lines[at:]]


def _cut(lines: list[str], at: int) -> list[str]:
    return [*lines[:at], lines[at][: len(lines[at]) // 2]]


def _refused(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError) as caught:
        trace.load(path)
    message = str(caught.value)
    assert message.startswith((f"{path}:", f"trace file {path}:"))
    return message


@pytest.mark.parametrize("at", range(NUM))
@pytest.mark.parametrize(
    ("tamper", "line"), [(_edit, 1), (_drop, 1), (_swap, 1), (_repeat, 2), (_cut, 1)]
)
def test_tampering_names_its_line(tamper: Tamper, line: int, at: int, tmp_path: Path) -> None:
    """A line that is edited, dropped, swapped, repeated or cut in half is named."""
    if tamper in (_drop, _swap) and at == NUM - 1:
        return  # dropping the last line is truncation, below; it has no next
    path = tmp_path / "run.jsonl"
    message = _refused(path, "".join(tamper(LINES, at)))
    assert message.startswith(f"{path}:{at + line}: ")


@pytest.mark.parametrize("kept", range(1, NUM))
def test_truncation_between_lines_is_found(kept: int, tmp_path: Path) -> None:
    """Whole lines missing at the end are detected, because the last line is no end event."""
    message = _refused(tmp_path / "t", "".join(LINES[:kept]))
    assert f"t:{kept}: the trace is truncated" in message


@given(st.data())
def test_any_flipped_bit_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any flipped bit is detected with its line, even if it makes the file invalid UTF-8."""
    content = bytearray("".join(LINES).encode())
    position = data.draw(st.integers(0, len(content) - 2))  # the last line end may go
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("trace") / "t"
    line = "".join(LINES)[:position].count("\n") + 1
    assert f":{line}: " in _refused(path, bytes(content))


@given(st.integers(0, len("".join(LINES)) - 2))
def test_truncation_at_any_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    """A cut at any byte is detected, except one that only removes the last line end."""
    _refused(tmp_path_factory.mktemp("trace") / "t", "".join(LINES)[:length])


def test_appended_lines_are_found(tmp_path: Path) -> None:
    """A second trace, a blank line and garbage at the end are detected."""
    for extra in (LINES[0], LINES[-1], "\n", "garbage\n"):
        assert f":{NUM + 1}: " in _refused(tmp_path / "t", "".join([*LINES, extra]))


def test_lines_of_another_run_are_found(tmp_path: Path) -> None:
    """A line from the same place of another run's file does not fit the chain."""
    other = replace(WHOLE, scenario=SCENARIO.with_(seed=1))
    mixed = [*LINES[:3], [line + "\n" for line in trace.dump_lines(other)][3], *LINES[4:]]
    assert "t:4: chain digest" in _refused(tmp_path / "t", "".join(mixed))


def test_another_version_is_named(tmp_path: Path) -> None:
    """The version is checked before anything else."""
    text = "".join(LINES).replace('"version":1', '"version":2', 1)
    assert "t:1: trace version=2: this release reads version 1" in _refused(tmp_path / "t", text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\x00\xff\xfe\x80", ":1: not a line of a trace"),
        (bytes(range(256)) * 9, ":1: not a line of a trace"),
        (b"not a trace\n", ":1: not a line of a trace"),
        (b'{"a":1}\n', ":1: not a line of a trace"),
        (b'{"a":,"chain":"0"}\n', ":1: not JSON"),
        (b'{"a":' + b"9" * 5000 + b',"chain":"0"}\n', ":1: not JSON"),
        (b'{"a":' * 99_999 + b',"chain":"0"}\n', ":1: not JSON"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    """Empty files, binary files, text and other JSON are refused."""
    assert message in _refused(tmp_path / "t", content)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder and a missing file are refused."""
    with pytest.raises(TraceError, match=r"can't be read \(Is a directory\)"):
        trace.load(tmp_path)
    with pytest.raises(TraceError, match=r"can't be read \(No such file"):
        trace.load(tmp_path / "absent")


def test_an_unwritable_place_is_a_usage_error(tmp_path: Path) -> None:
    """A file in place of the folder, or a folder in place of the file, is a UsageError."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "t", tmp_path):
        with pytest.raises(UsageError, match="can't be written"):
            trace.save(WHOLE, path)


HEADER: dict[str, Any] = {
    "kind": "trace",
    "version": 1,
    "scenario": SCENARIO.to_dict(),
    "environment": {},
    "promises": [],
}
END: dict[str, Any] = {"kind": "end", "status": "completed", "reason": ""}


def test_the_forger_of_these_tests_can_forge(tmp_path: Path) -> None:
    """The forger's files load if unchanged, so the tests below fail only for their changes."""
    (tmp_path / "t").write_text(_chained([HEADER, END]))
    assert trace.load(tmp_path / "t").end.status == "completed"


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "party"},
        {"kind": ["end"]},
        {"status": "completed"},
        {"kind": "end"},
        {"kind": "end", "status": "completed", "mood": "good"},
        {"kind": "start", "step": 0, "rank": 0, "weights": ["w"]},
        {"kind": "start", "step": 0, "rank": 0, "weights": {"w": 5}},
        {"kind": "start", "step": 0, "rank": 0, "weights": {"w": ["a", "b", "c", "d"]}},
        {"kind": "update", "loss": "much"},
        {"kind": "update", "loss": 10**400},
        {"kind": "update", "loss": [1]},
    ],
)
def test_forged_events_are_refused(record: dict[str, Any], tmp_path: Path) -> None:
    """A wrong record in a valid chain raises TraceError that names the line."""
    message = _refused(tmp_path / "t", _chained([HEADER, record, END]))
    assert "t:2: not an event (" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "end"}, "first line kind='end': a trace's is 'trace'; give a trace"),
        ({"scenario": None}, "not a header ("),
        ({"scenario": {**SCENARIO.to_dict(), "world_size": "1"}}, "not a header ("),
        ({"environment": 3}, "not a header ("),
        ({"promises": 3}, "not a header ("),
    ],
)
def test_forged_headers_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A header without a valid scenario is refused."""
    assert f"t:1: {message}" in _refused(tmp_path / "t", _chained([{**HEADER, **change}, END]))


def test_a_header_may_lack_nothing(tmp_path: Path) -> None:
    """A header that lacks any key is refused."""
    for name in HEADER:
        rest = {key: value for key, value in HEADER.items() if key != name}
        assert "t:1: " in _refused(tmp_path / "t", _chained([rest, END]))


def test_records_of_all_fields(tmp_path: Path) -> None:
    """A line holds every field of its event, so that other tools need no defaults."""
    for event, line in zip(EVENTS, LINES[1:], strict=True):
        record = json.loads(line)
        assert set(record) == {"kind", "chain", *(f.name for f in fields(event))}


def test_negative_zero_keeps_its_sign(tmp_path: Path) -> None:
    """-0.0 comes back with its sign."""
    trace.save(WHOLE, tmp_path / "t")
    loss = trace.load(tmp_path / "t").of(trace.Shard)[1].loss_sum
    assert loss is not None
    assert math.copysign(1, loss) == -1
