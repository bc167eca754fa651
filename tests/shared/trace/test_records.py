"""Events as records: round trips between processes, and refusal of wrong types."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.shared import trace
from entrenar_py.shared.codec import plain
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.trace import ledger
from tests.shared.trace.samples import EVENTS, WHOLE, any_event, nested

SHARD: dict[str, Any] = {
    "kind": "shard",
    "step": 0,
    "epoch": 1,
    "rank": 0,
    "shard": 2,
    "ids": [4, 1],
    "loss_sum": 0.5,
    "weight": 2.0,
    "finite": True,
}


def test_events_survive_the_wire() -> None:
    """Every kind of event comes back, NaN and -0.0 included. No events give no bytes."""
    assert repr(trace.load_events(trace.dump_events(EVENTS))) == repr(list(EVENTS))
    assert trace.dump_events(()) == b""
    assert trace.load_events(b"") == []


def test_the_liar_of_these_tests_can_tell_the_truth() -> None:
    """The unchanged event below is read, so the changed ones are refused for their change."""
    assert len(trace.load_events(json.dumps(SHARD).encode())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"step": "0"},
        {"step": 0.0},
        {"step": True},
        {"step": None},
        {"step": 2**63},
        {"step": -(2**63)},
        {"step": [[[]]]},
        {"rank": 1.5},
        {"ids": "41"},
        {"ids": ["4", "1"]},
        {"ids": [[4], [1]]},
        {"ids": {"4": 1}},
        {"ids": [10**400]},
        {"ids": None},
        {"loss_sum": "much"},
        {"loss_sum": "0.5"},
        {"loss_sum": True},
        {"loss_sum": 10**400},
        {"loss_sum": {}},
        {"finite": 1},
        {"finite": "yes"},
        {"draws": 3},
        {"gradient": None},
        {"gradient": ["w"]},
        {"gradient": {"w": None}},
        {"gradient": {"w": ["digest"]}},
        {"gradient": {"w": ["digest", 3, "float32"]}},
        {"gradient": {"w": ["digest", "", "float32", ""]}},
        {"mood": "good"},
        {"k" * 10**6: "v" * 10**6},
    ],
)
def test_lies_about_types_are_refused(change: dict[str, Any]) -> None:
    """Each wrong type raises a TraceError of readable length that names the place."""
    told = [json.dumps(record) for record in (SHARD, {**SHARD, **change})]
    with pytest.raises(TraceError, match=r"^event 2 can't be read") as caught:
        trace.load_events("\n".join(told).encode())
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("file", one) for one in ("", "k" * 5000, "train\0.py", "\ud800.py")),
        *(("line", one) for one in (0, -1, 2**40)),
        *(("what", one) for one in ("k" * 5000, "Step", "")),
    ],
)
def test_the_line_of_a_script_that_a_report_points_to_is_bounded(field: str, value: object) -> None:
    """Reports make a path of it, a place in an editor, and a key."""
    called = {"kind": "called", "rank": 0, "what": "step", "file": "train.py", "line": 3}
    assert trace.load_events(json.dumps(called).encode())
    with pytest.raises(TraceError, match=f"event 1 can't be read .called {field}=") as caught:
        trace.load_events(json.dumps({**called, field: value}).encode())
    assert len(str(caught.value)) < 300


def _started(progress: Any) -> bytes:
    record = {"kind": "start", "step": 0, "rank": 0, "weights": {}, "progress": progress}
    return json.dumps(record).encode()


@pytest.mark.parametrize("progress", [{}, {"epoch": 1, "rng": [[1], {"x": None}]}, nested(16)])
def test_own_words_are_kept(progress: Any) -> None:
    """A trainer's own notes on its position come back unchanged."""
    (start,) = trace.load_events(_started(progress))
    assert isinstance(start, trace.Start)
    assert start.progress == progress


@pytest.mark.parametrize("progress", [3, ["epoch"], None, nested(17), nested(60)])
def test_own_words_are_a_mapping_and_not_deep(progress: Any) -> None:
    """Notes that could not be written to a file again are refused."""
    with pytest.raises(TraceError, match=r"progress=.*use a mapping of at most 16 levels"):
        trace.load_events(_started(progress))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff",
        b"garbage",
        b"[]",
        b"3",
        b"null",
        b'"shard"',
        b"{}",
        b'{"kind":"party"}',
        b'{"kind":[]}',
        b'{"kind":"shard"}',
        b"[" * 10**5,
        b'{"a":' * 10**5,
        b"9" * 10**5,
    ],
)
def test_garbage_is_no_event(garbage: bytes) -> None:
    """Bytes, text, other JSON, and records too deep or too long are refused."""
    with pytest.raises(TraceError, match=r"^event 1 can't be read"):
        trace.load_events(garbage)


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_are_events_or_refused(data: bytes) -> None:
    """Any bytes are read as events or raise TraceError."""
    with suppress(TraceError):
        assert trace.load_events(data) == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.data())
def test_whatever_is_read_can_be_told_again(data: st.DataObject) -> None:
    """With any field replaced by any JSON, an event is refused, or read and dumped unchanged."""
    event = data.draw(st.sampled_from(EVENTS))
    record = json.loads(trace.dump_events([event]))
    record[data.draw(st.sampled_from(sorted(record)))] = data.draw(_JSON)
    try:
        read = trace.load_events(json.dumps(record).encode())
    except TraceError:
        return
    assert repr(trace.load_events(trace.dump_events(read))) == repr(read)


@settings(max_examples=100)  # there are some forty kinds
@given(any_event())
def test_whatever_a_writer_writes_is_read(event: trace.Event) -> None:
    """Any value that the annotations allow is read again, equal, in a whole chain and without one;
    or it is refused before anything of it is written, by an error that names kind and field.
    """
    run = replace(WHOLE, events=(event, EVENTS[-1]))
    problem: UsageError | None = None
    try:
        lines = list(ledger.dump_lines(run))
    except UsageError as error:
        problem = error
    if problem is not None:
        assert problem.field in {field.name for field in fields(event)}
        assert str(problem).startswith(f"{event.kind} {problem.field}=")
        assert len(str(problem)) < 300
        with pytest.raises(UsageError):
            trace.dump_events([event])
        return
    told = repr(_with_plain_words(event))
    reader = ledger.Reader(BytesIO("".join(f"{line}\n" for line in lines).encode()), Path("run"))
    assert [repr(one) for one in reader] == [told, repr(EVENTS[-1])]
    assert repr(trace.load_events(trace.dump_events([event]))) == f"[{told}]"


def _with_plain_words(event: trace.Event) -> trace.Event:
    """Return the event as it is read: NaN and infinities in a trainer's own notes are texts."""
    words = {
        name: plain(getattr(event, name)) for name in ("progress", "fault") if hasattr(event, name)
    }
    return replace(event, **words)
