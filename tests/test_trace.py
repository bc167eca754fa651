"""The trace's file: round trips, and every way to tamper with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py import trace
from entrenar_py.errors import TraceError, UsageError
from entrenar_py.scenario import Scenario

SCENARIO = Scenario(
    system="reference", workload="linear", world_size=1, seed=0, options={"m": [1, 2]}
)
NAN, INF = float("nan"), float("inf")
TENSORS = {
    "w": trace.record_tensor(np.array([1.5, -0.0, NAN, INF], np.float32), values=True),
    "count": trace.record_tensor(np.array([[3]], np.int64), values=True),
    "b": trace.record_tensor(np.zeros(0, np.float32)),
}
# One of every kind, with what JSON has no word for, at least once in each field that can hold it.
EVENTS: tuple[trace.Event, ...] = (
    trace.Start(
        step=0,
        rank=0,
        weights=TENSORS,
        optimizer=TENSORS,
        trainable=("w",),
        frozen=("b",),
        progress={"epoch": 0, "offset": 3, "note": None},
        resumed=True,
    ),
    trace.Shard(
        step=0, epoch=1, rank=0, shard=2, ids=(4, 1), loss_sum=NAN, weight=2.0, finite=False
    ),
    trace.Shard(
        step=0,
        epoch=1,
        rank=0,
        shard=3,
        ids=(),
        loss_sum=-0.0,
        weight=0.0,
        finite=True,
        draws="d",
        gradient=TENSORS,
    ),
    trace.Update(
        step=0,
        rank=0,
        loss=INF,
        weight=3.0,
        learning_rate=0.1,
        finite=True,
        weights=TENSORS,
        grad_norm=-INF,
        applied_norm=None,
    ),
    trace.Synchronised(step=1, rank=2, weights=TENSORS, collectives=1),
    trace.Membership(step=1, rank=2, change="left", reason='died, \u2028 "quoted" é'),
    trace.Injected(fault={"kind": "leave", "rank": 2}, step=1, rank=2),
    trace.Audit(
        step=1, shard=3, ranks=(1, 2, 0), alike=(0, 1, 1), culprit=1, tensor="w", element=2
    ),
    trace.Planted(name="ddp-bypass"),
    trace.Halt(step=1, reason="nan", shard=1, tensor="w", ids=(1, 2)),
    trace.Saved(step=1, rank=0, weights=TENSORS, progress={"epoch": 1}),
    trace.Manifest(backend="cpu", entries=(("w", (2, 3), "float32"), ("b", (), "float32"))),
    trace.Attempt(backend="cuda", served=False, reason="absent"),
    trace.Product(
        backend="wgpu",
        device="llvmpipe",
        software=True,
        shape=(1, 2, 3),
        result_shape=(1, 3),
        layout="plain",
        magnitude=1.0,
        finite=False,
        error_cpu=NAN,
        error_f64=INF,
        bound=1e-6,
        stated=True,
        digest="00",
    ),
    trace.Memory(
        rank=0, backend="cpu", peak_bytes=3, baseline_bytes=1, estimate_bytes=9, budget_bytes=99
    ),
    trace.Held(rank=1, num_parts=2, held_bytes=5, whole_bytes=9),
    trace.Carried(
        message="Average", payload_bytes=4, pieces=2, sent="00", got=None, allocated_bytes=64
    ),
    trace.Gap(step=3, lines=5, digest="0" * 32, reason="it was removed"),
    trace.Refused(case="flipped", error=None, claimed_bytes=2**62, allocated_bytes=0),
    trace.Admission(case="wrong secret", entitled=False, let_in=False, answer="refused"),
    trace.Reduced(step=0, rank=1, num_elements=5, roundings=INF, element=4),
    trace.Traffic(
        rank=None,
        peer="worker",
        direction="got",
        message="TreeNode",
        messages=2,
        payload_bytes=8,
        bytes=400,
    ),
    trace.Stepped(
        step=3,
        backend="wgpu",
        device="llvmpipe",
        software=True,
        num_samples=7,
        given="replica 0",
        earlier=1,
        submissions=1,
        read_backs=1,
        uploads=1,
        upload_bytes=512,
        declared_bytes=40,
        num_inputs=2,
        dispatches=5,
        compiled=0,
        traced=0,
        on_host=("aten.mm.default",),
        results=TENSORS,
    ),
    trace.Explained(
        of="mlp",
        tensor="loss",
        device="llvmpipe",
        software=True,
        finite=False,
        num_elements=3,
        num_bounded=2,
        element=1,
        error=INF,
        bound=1e-6,
        total_error=INF,
        total_bound=1e-5,
        step=3,
    ),
    trace.Poisoned(
        of="amax", tensor="result 0", device="llvmpipe", software=True, reached=2, lost=1, element=1
    ),
    trace.Declined(
        case="no kernel",
        operation="inv",
        error=None,
        message="",
        in_line=False,
        right=True,
        submissions=0,
    ),
    trace.End(status="completed"),
)
WHOLE = trace.Trace(
    scenario=SCENARIO, environment={"torch": "2"}, promises=("bitwise",), events=EVENTS
)


def _text(given: trace.Trace) -> str:
    return repr(given.events)  # repr, since a NaN is not equal to itself


def _chained(records: list[dict[str, Any]]) -> str:
    """A file whose chain is right whatever its records say: what a determined forger writes."""
    chain, lines = "", []
    for record in records:
        body = json.dumps(record)
        chain = blake3(f"{chain}\n{body}".encode()).hexdigest(16)
        lines.append(f'{body[:-1]},"chain":"{chain}"}}\n')
    return "".join(lines)


def test_every_kind_is_tried_here() -> None:
    """A new kind of event must join the round trip."""
    assert {event.kind for event in EVENTS} == set(trace.EVENTS)


def test_every_event_survives_the_file(tmp_path: Path) -> None:
    """Save and load, in a folder that was not there: the same events, NaN and -0.0 included."""
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


def test_tensor_values_come_back_as_bits() -> None:
    """dtype, NaN and the sign of zero; None when only the digest was kept."""
    values = TENSORS["w"].values()
    assert values is not None
    assert values.tobytes() == np.array([1.5, -0.0, NAN, INF], np.float32).tobytes()
    count = TENSORS["count"].values()
    assert count is not None
    assert (count.dtype, count.tolist()) == (np.int64, [3])
    assert TENSORS["b"].values() is None


def test_a_digest_sees_position_and_sign() -> None:
    """Swapped elements, and zeros of different sign, have different digests."""
    arrays = [[1, 2], [2, 1], [0.0, 1], [-0.0, 1]]
    digests = {trace.record_tensor(np.array(a, np.float32)).digest for a in arrays}
    assert len(digests) == 4


def test_of_and_end() -> None:
    """Events by kind, in order; a trace without end counts as failed."""
    assert [shard.shard for shard in WHOLE.of(trace.Shard)] == [2, 3]
    assert WHOLE.end.status == "completed"
    cut = replace(WHOLE, events=EVENTS[:-1])
    assert (cut.end.status, cut.end.reason) == ("failed", "the trace has no end event")


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
    """Each line edited, dropped, swapped with the next, repeated, and cut in half."""
    if tamper in (_drop, _swap) and at == NUM - 1:
        return  # dropping the last line is truncation, below; it has no next
    path = tmp_path / "run.jsonl"
    message = _refused(path, "".join(tamper(LINES, at)))
    assert message.startswith(f"{path}:{at + line}: ")


@pytest.mark.parametrize("kept", range(1, NUM))
def test_truncation_between_lines_is_found(kept: int, tmp_path: Path) -> None:
    """Whole lines missing at the end: the last line that is there is no end event."""
    message = _refused(tmp_path / "t", "".join(LINES[:kept]))
    assert f"t:{kept}: the trace is truncated" in message


@given(st.data())
def test_any_flipped_bit_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the bit, also one that makes the file no UTF-8: with the line it stands in."""
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
    """Only the last line end may be missing."""
    _refused(tmp_path_factory.mktemp("trace") / "t", "".join(LINES)[:length])


def test_appended_lines_are_found(tmp_path: Path) -> None:
    """A second trace behind the first, a blank line, and garbage."""
    for extra in (LINES[0], LINES[-1], "\n", "garbage\n"):
        assert f":{NUM + 1}: " in _refused(tmp_path / "t", "".join([*LINES, extra]))


def test_lines_of_another_run_are_found(tmp_path: Path) -> None:
    """A line at the same place of a longer run with another header does not fit."""
    other = replace(WHOLE, scenario=SCENARIO.with_(seed=1))
    mixed = [*LINES[:3], [line + "\n" for line in trace.dump_lines(other)][3], *LINES[4:]]
    assert "t:4: chain digest" in _refused(tmp_path / "t", "".join(mixed))


def test_another_version_is_named(tmp_path: Path) -> None:
    """Before anything else is read of it."""
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
    """Empty, binary, text, JSON of another kind."""
    assert message in _refused(tmp_path / "t", content)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder, and a file that is not there."""
    with pytest.raises(TraceError, match=r"can't be read \(Is a directory\)"):
        trace.load(tmp_path)
    with pytest.raises(TraceError, match=r"can't be read \(No such file"):
        trace.load(tmp_path / "absent")


def test_an_unwritable_place_is_a_usage_error(tmp_path: Path) -> None:
    """A file where a folder is needed, and a folder where the file should be."""
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
    """Without a change its files load; so what is refused below is refused for its content."""
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
    """A right chain over a wrong record: the line, never a traceback."""
    message = _refused(tmp_path / "t", _chained([HEADER, record, END]))
    assert "t:2: event can't be read" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "end"}, "first line kind='end', not trace"),
        ({"scenario": None}, "header can't be read"),
        ({"scenario": {**SCENARIO.to_dict(), "world_size": "1"}}, "header can't be read"),
        ({"environment": 3}, "header can't be read"),
        ({"promises": 3}, "header can't be read"),
    ],
)
def test_forged_headers_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The header is the scenario that will be judged: it must be one."""
    assert f"t:1: {message}" in _refused(tmp_path / "t", _chained([{**HEADER, **change}, END]))


def test_a_header_may_lack_nothing(tmp_path: Path) -> None:
    """Each key of it is needed."""
    for name in HEADER:
        rest = {key: value for key, value in HEADER.items() if key != name}
        assert "t:1: " in _refused(tmp_path / "t", _chained([rest, END]))


def test_records_of_all_fields(tmp_path: Path) -> None:
    """A line holds every field of its event, so that other tools need no defaults."""
    for event, line in zip(EVENTS, LINES[1:], strict=True):
        record = json.loads(line)
        assert set(record) == {"kind", "chain", *(f.name for f in fields(event))}


def test_negative_zero_keeps_its_sign(tmp_path: Path) -> None:
    """-0.0 is another bit pattern than 0.0."""
    trace.save(WHOLE, tmp_path / "t")
    loss = trace.load(tmp_path / "t").of(trace.Shard)[1].loss_sum
    assert loss is not None
    assert math.copysign(1, loss) == -1


# --- what one process tells another -------------------------------------------------------------

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
    """Every kind of event, NaN and -0.0 included; no events are no bytes."""
    assert repr(trace.load_events(trace.dump_events(EVENTS))) == repr(list(EVENTS))
    assert trace.dump_events(()) == b""
    assert trace.load_events(b"") == []


def test_the_liar_of_these_tests_can_tell_the_truth() -> None:
    """Unchanged, the event below is read: so what is refused below is refused for its change."""
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
    """A TraceError of a readable length with the place, never another exception and no event."""
    told = [json.dumps(record) for record in (SHARD, {**SHARD, **change})]
    with pytest.raises(TraceError, match=r"^event 2 can't be read") as caught:
        trace.load_events("\n".join(told).encode())
    assert len(str(caught.value)) < 300


def _nested(depth: int) -> Any:
    return {"a": _nested(depth - 1)} if depth else 1


def _started(progress: Any) -> bytes:
    record = {"kind": "start", "step": 0, "rank": 0, "weights": {}, "progress": progress}
    return json.dumps(record).encode()


@pytest.mark.parametrize("progress", [{}, {"epoch": 1, "rng": [[1], {"x": None}]}, _nested(16)])
def test_own_words_are_kept(progress: Any) -> None:
    """What a trainer notes of its position comes back whatever it is."""
    (start,) = trace.load_events(_started(progress))
    assert isinstance(start, trace.Start)
    assert start.progress == progress


@pytest.mark.parametrize("progress", [3, ["epoch"], None, _nested(17), _nested(300)])
def test_own_words_are_a_mapping_and_not_deep(progress: Any) -> None:
    """Nothing that could not be written to a file again."""
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
    """Bytes, text, JSON of another kind, too deep and too long."""
    with pytest.raises(TraceError, match=r"^event 1 can't be read"):
        trace.load_events(garbage)


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_are_events_or_refused(data: bytes) -> None:
    """A TraceError, or nothing at all."""
    with suppress(TraceError):
        assert trace.load_events(data) == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.data())
def test_whatever_is_read_can_be_told_again(data: st.DataObject) -> None:
    """Any field of any event replaced by any JSON: refused, or read and dumped to the same."""
    event = data.draw(st.sampled_from(EVENTS))
    record = json.loads(trace.dump_events([event]))
    record[data.draw(st.sampled_from(sorted(record)))] = data.draw(_JSON)
    try:
        read = trace.load_events(json.dumps(record).encode())
    except TraceError:
        return
    assert repr(trace.load_events(trace.dump_events(read))) == repr(read)
