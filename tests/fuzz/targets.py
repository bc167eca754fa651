"""The fuzzed functions of bytes, one for each kind of input. They return for any bytes.

An exception that the caller of a reader must expect is caught; any other one is a finding.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path

from blake3 import blake3

from entrenar_py.check import contract
from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.contract import Invariant, Vocabulary, validation
from entrenar_py.check.harness import counterexamples, judgement, plan
from entrenar_py.check.harness.plan import Task
from entrenar_py.check.project import configuration
from entrenar_py.shared import scenario, trace
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import (
    CheckpointError,
    ContractError,
    ProtocolError,
    TraceError,
    UsageError,
)
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.finetune import own_models
from entrenar_py.train.upstream.frames import WIRE_MESSAGES, ShardAssignment, WireMessage, encode
from entrenar_py.train.upstream.frames import Decoder as WireDecoder
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import frames
from entrenar_py.train.wire.frames import FIELDS, HEADER_BYTES_MAX, NO_KEY, Decoder, Encoder
from entrenar_py.train.wire.messages import VERSION, Hello, Message
from entrenar_py.train.wire_io.simulation import feed
from tests.fuzz.bad_contents import TRAINING
from tests.fuzz.door import (
    CHALLENGE,
    FUZZER,
    HONEST,
    NONCE,
    PASSER_BY,
    TERMS,
    Door,
    Mailbox,
    hello_of,
    proved,
    session_key,
    worker_end,
)
from tests.train.upstream import original
from tests.train.upstream.averaging import Office

KEY = bytes(range(32))
PAYLOAD_BYTES_MAX = 2**12
ITEM = struct.Struct("<BHH")  # of a script: tag, bytes of the header, bytes of the payload
NUM_SCENARIOS = 20  # that are looked at of one entry
COMPLETED = do.Finish("completed")
SHARD = ShardAssignment.tag
# Checks that apply to any training.
JUDGES = tuple(name for name, check in CHECKS.items() if check.explores)


# --- the wire ---------------------------------------------------------------------------------


def read_frames(data: bytes) -> None:
    """Read frames: each message that is accepted is one that a writer would have written.

    The first byte says whether there is a key.
    """
    key, stream = KEY if data[:1] > b"\x7f" else NO_KEY, data[1:]
    decoder, encoder = Decoder(lambda kind: PAYLOAD_BYTES_MAX, key), Encoder(key)
    written, at = bytearray(), 0

    with suppress(ProtocolError):
        while stream[at:]:
            place = decoder.buffer()
            assert 0 < place.nbytes <= max(HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX)
            piece = stream[at : at + place.nbytes]
            at += len(piece)
            for received in decoder.feed(piece):
                written.extend(b"".join(encoder.encode(received.message, received.payload)))
    assert stream.startswith(bytes(written))


def read_header(data: bytes) -> None:
    """Read a message's tag and header; writing it again gives the same."""
    with suppress(ProtocolError):
        message = frames.parse_header(data[0] if data else 0, data[1:])
        assert frames.dump_header(message) == data[1:]


# --- the door ---------------------------------------------------------------------------------


def knock(data: bytes) -> None:
    """A stranger sends anything during a step, without an effect on the run."""
    door = Door(0)
    door.say(data)
    peers = door.end.machine.peers
    assert peers[HONEST].rank == 0
    assert FUZZER not in peers or peers[FUZZER].rank is None, "without a proof there is no rank"
    _require_undisturbed(door)


def greet(data: bytes) -> None:
    """A peer with the secret sends any hello: it is admitted if it agrees; nothing else happens."""
    try:
        hello = frames.parse_header(Hello.tag, data)
    except ProtocolError:
        return
    assert isinstance(hello, Hello)
    door = Door(0)
    door.say(b"".join(Encoder().encode(proved(hello))))
    agrees = (hello.run, hello.manifest, hello.data) == (TERMS.run, TERMS.manifest, TERMS.data)
    entitled = agrees and hello.version == VERSION and hello.rank in (None, 1)
    assert (FUZZER in door.end.machine.peers) == entitled
    _require_undisturbed(door)


def take_part(data: bytes) -> None:
    """An admitted worker sends anything, in valid frames (see `spoken`).

    It may send what the protocol allows, and may halt the run. Anything else closes its connection,
    and the run ends without it.
    """
    door, hello = Door(0, 1), hello_of(1)
    door.say(b"".join(Encoder().encode(hello)))
    for frame in spoken(data, session_key(hello), direction=frames.TO_COORDINATOR):
        door.say(frame)
        door.work()
    finish = door.finish()
    assert finish is not None
    assert finish.status in ("completed", "halted")


def listen(data: bytes) -> None:
    """A coordinator with the secret sends anything to a worker, in valid frames."""
    asked: list[do.Compute] = []
    end = worker_end(1, Mailbox(), asked.append)
    end.connected(FUZZER, NONCE)

    opening = Encoder(direction=frames.FROM_COORDINATOR).encode(CHALLENGE)
    feed(end, FUZZER, b"".join(opening))
    for frame in spoken(data, session_key(hello_of(1)), direction=frames.FROM_COORDINATOR):
        feed(end, FUZZER, frame)
        while asked:
            work = asked.pop(0)
            end.computed(work, end.hands.work(work.step, work.shards))


def spoken(data: bytes, key: bytes, *, direction: int) -> Iterator[bytes]:
    """Return an opening and the frames after it, which are valid and hold the items (ITEM) of
    `data`.
    """
    number = 1
    while len(data) >= ITEM.size:
        tag, header_bytes, payload_bytes = ITEM.unpack_from(data)
        header, data = data[ITEM.size :][:header_bytes], data[ITEM.size + header_bytes :]
        payload, data = data[:payload_bytes], data[payload_bytes:]
        fields = FIELDS.pack(
            *(frames.MAGIC, VERSION, tag, 1, direction, number),
            *(len(header), len(payload), len(payload)),
        )
        yield fields + frames.checksum_of(key, fields, header, payload) + header + payload
        number += 1


def script(*said: tuple[Message, bytes]) -> bytes:
    """Return the items from which `spoken` makes these messages."""
    items = ((one.tag, frames.dump_header(one), payload) for one, payload in said)
    return b"".join(
        ITEM.pack(tag, len(header), len(payload)) + header + payload
        for tag, header, payload in items
    )


@cache
def _undisturbed() -> bytes:
    door = Door(0)
    assert door.finish() == COMPLETED
    return door.weights()


def _require_undisturbed(door: Door) -> None:
    assert door.finish() == COMPLETED
    assert door.weights() == _undisturbed()


# --- the original system's wire -----------------------------------------------------------------


def read_wire(data: bytes) -> None:
    """Read frames of the original system: each is read the same after it was written again."""

    def room(message: WireMessage, num_bytes: int) -> memoryview:
        assert num_bytes <= len(data), "memory was taken for what was only claimed"
        return memoryview(bytearray(num_bytes))

    def decoder() -> WireDecoder:
        kinds = tuple(WIRE_MESSAGES.values())
        return WireDecoder(bytes_max=max(len(data), 1), kinds=kinds, room=room)

    reader, read = decoder(), 0
    with suppress(ProtocolError):
        for one in reader.feed(data):
            frame = b"".join(encode(one.message, one.gradients or b"", counts=reader.counts))
            read += len(frame)
            (again,) = decoder().feed(frame)
            assert repr(again.message) == repr(one.message)
            assert bytes(again.gradients or b"") == bytes(one.gradients or b"")
    assert read <= len(data)


def average(data: bytes) -> None:
    """A worker of the original system sends anything, before or after it has joined.

    It may halt the run by a value that is not finite. Else the run is completed by another worker,
    whose connection never ends before.
    """
    office = Office()
    office.join(HONEST)
    if data[:1] > b"\x7f":
        office.join(FUZZER)
    else:
        office.join(PASSER_BY)
        office.connect(FUZZER)
    while office.end.finished is None:
        for tag, *fields in office.heard(HONEST):
            if tag == SHARD:
                office.say(HONEST, original.gradient(fields[0], 0, [1.0, 2.0]))
        if data:
            office.say(FUZZER, data[1:])
            data = b""
            for peer in (FUZZER, PASSER_BY):
                office.end.lost(peer, "died")
        assert HONEST not in office.closed or office.end.finished is not None
    assert office.end.finished.status in ("completed", "halted")


# --- other files --------------------------------------------------------------------------------


def read_events(data: bytes) -> None:
    """Read a worker's trace events from a payload; a second round trip changes nothing."""
    with suppress(TraceError):
        told = trace.dump_events(trace.load_events(data))
        assert trace.dump_events(trace.load_events(told)) == told


def read_trace(data: bytes) -> None:
    """Read a stored trace with its chain made valid line by line, to test its content."""
    chain, lines = "", []
    for line in data.decode("utf-8", "backslashreplace").split("\n"):
        body = line.rpartition(',"chain":"')[0] + "}"
        chain = blake3(f"{chain}\n{body}".encode()).hexdigest(16)
        lines.append(f'{body[:-1]},"chain":"{chain}"}}\n')
    with suppress(TraceError):
        trace.load(_written("".join(lines).encode()))


def read_contract(data: bytes) -> None:
    """Read a contract, expand its scenarios, and apply the published rules."""
    nothing = Vocabulary(checks=(), mutants=lambda: None)
    path = _written(data)
    found = validation.validate({path: ()}, vocabulary=nothing)
    try:
        loaded = contract.load(path, vocabulary=nothing)
    except ContractError:
        assert not found.is_valid
        return
    entries = [entry for clause in loaded.invariants for entry in clause.scenarios]
    for entry in entries:
        with suppress(UsageError):
            for one in islice(scenario.expand(entry), NUM_SCENARIOS):
                assert one.digest


def read_configuration(data: bytes) -> None:
    """Read a project's configuration; each problem has a line of the file."""
    path = _written(data)
    try:
        configuration.load(path)
    except ContractError as error:
        lines = data.count(b"\n") + 1
        for problem in error.problems:
            line, column, told = problem.rpartition(f"{path.name}:")[2].split(":", 2)
            assert 1 <= int(line) <= lines, problem
            assert int(column) >= 1, problem
            assert told.startswith(" error: "), problem
    except UsageError:
        pass


def read_checkpoint(data: bytes) -> None:
    """Read a checkpoint's content under a matching digest."""
    sealed = checkpoint.MAGIC + blake3(data).hexdigest().encode() + b"\n" + data
    server = Server(scenario.Scenario(system="parameter_server", **TRAINING))
    server.checkpoint_path = _written(sealed)
    with suppress(CheckpointError):
        assert 0 <= server.restore() <= server.plan.num_steps


def read_rank_file(data: bytes) -> None:
    """Read the file of a run's only rank, assemble a trace of it, and judge it."""
    path = Path(_folder().name, "00000-000.rank.jsonl")
    path.write_bytes(data)
    require_judged([path])


def require_judged(paths: Sequence[Path]) -> None:
    """Require that files are refused, or that every check of any training judges them."""
    try:
        traces = judgement.load_stored(paths)
    except UsageError:
        return
    for name in JUDGES:
        clause = Invariant(id="F-X", name="x", statement="", position=Position("c.yaml", 1, 1))
        planned = tuple(one.scenario for one in traces.values())
        task = Task(invariant=clause, check=CHECKS[name], planned=planned)
        for entry in judgement.judge_stored([task], traces):
            assert "crashed" not in entry.finding.reason, entry.finding.reason


def read_counterexample(data: bytes) -> None:
    """Read a saved counterexample with a matching digest: its scenario can be run or is refused."""
    try:
        record = json.loads(data)
        record["digest"] = counterexamples.digest_of({**record, "digest": None})
        data = json.dumps(record).encode()
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        pass  # it is tried as it is
    with suppress(UsageError):
        plan.require_known(counterexamples.load(_written(data)).scenario, "replay")


def read_coordinator(data: bytes) -> None:
    """Read a coordinator's configuration."""
    with suppress(ContractError):
        own_models.load(_written(data))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _written(data: bytes) -> Path:
    """Write `data` to a file that the next call replaces, and return its path."""
    path = Path(_folder().name, "fuzzed.yaml")
    path.write_bytes(data)
    return path


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    one.__name__: one
    for one in (
        *(read_frames, read_header, knock, greet, take_part, listen, read_wire, average),
        *(read_events, read_trace, read_contract, read_configuration, read_checkpoint),
        *(read_rank_file, read_counterexample, read_coordinator),
    )
}
