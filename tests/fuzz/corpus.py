"""The fuzzer's seeds: for each target valid inputs, and a few nearly valid ones."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from entrenar_py import systems
from entrenar_py.shared import trace
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire import frames, messages, terms
from entrenar_py.train.wire.frames import PREFIX_BYTES
from entrenar_py.train.wire.messages import (
    Applied,
    Assign,
    Average,
    Commit,
    Computed,
    Halt,
    Heartbeat,
    Leave,
    Loaded,
    Message,
    NonFinite,
    Refuse,
    Shutdown,
    Staged,
    TreeNode,
    Weights,
    Welcome,
)
from tests.fuzz import bad_contents
from tests.fuzz.door import CHALLENGE, SCENARIO, SECRET, hello_of
from tests.fuzz.targets import script
from tests.train.upstream import original
from tests.train.wire.samples import GOLDEN

TOP = Path(__file__).parents[2]
# Shards 2 and 3 belong to worker 1, and form one tree node.
SHARDS, LEVEL, INDEX = (2, 3), 1, 1

Said = tuple[Message, bytes]


@cache
def seeds() -> Mapping[str, list[bytes]]:
    """Return the inputs of each target, by its name."""
    golden = [bytes.fromhex(row["frame"]) for row in _golden()]
    return {
        "read_frames": [b"\xff" + b"".join(golden), *(b"\x00" + one for one in golden)],
        "read_header": [
            bytes([tag]) + row["header"].encode()
            for tag, row in zip(messages.MESSAGES, _golden(), strict=True)
        ],
        "knock": [*golden, b"".join(golden), b"GET / HTTP/1.1\r\n\r\n" * 9, _huge(golden[1])],
        "greet": [frames.dump_header(one) for one in _hellos()],
        "take_part": [script(*part_of_a_worker()), *(script(one) for one in _odd_words())],
        "listen": [script(*part_of_a_coordinator()), *(script(one) for one in _odd_orders())],
        "read_wire": [*_wire_frames(), b"".join(_wire_frames())],
        "average": [
            start + b"".join(said) for start in (b"\xff", b"\x00") for said in _wire_parts()
        ],
        "read_events": [trace.dump_events(_trace().events)],
        "read_trace": ["".join(f"{line}\n" for line in trace.dump_lines(_trace())).encode()],
        "read_contract": [
            path.read_bytes()
            for folder in ("contracts", "tests/check/contract/data")
            for path in sorted((TOP / folder).glob("*.yaml"))
        ],
        "read_configuration": [CONFIGURATION, b"[tool.entrenar-check]\n" + CONFIGURATION],
        "read_checkpoint": [_checkpoint(), *_checkpoints()],
        "read_rank_file": list(bad_contents.RANK_FILES.values()),
        "read_counterexample": list(bad_contents.REPLAYS.values()),
        "read_coordinator": [_configuration()],
    }


def _wire_frames() -> list[bytes]:
    """Return a frame of each message of the original system's wire, and two more with sizes."""
    parts = [frame for part in _wire_parts() for frame in part]
    sized = [
        original.block(0, 1, 0, 1, [1, 1], [1.0, 2.0], count="<I"),
        original.averaged_block(0, 0, [2], [1.0, 2.0]),
    ]
    answers = [original.accepted(1, 2), original.assignment(0, 0, 5), original.SHUTDOWN]
    averages = [original.averaged(0, [1.0], 0.5), original.averaged_non_block(0, 1, [1.0])]
    return [*parts, *sized, *answers, *averages]


def _wire_parts() -> list[list[bytes]]:
    """Return what workers of the original system may send: right, twice, with blocks, wrong."""
    whole = original.gradient(0, 1, [3.0, 4.0], total=5)
    blocks = [
        original.non_block(0, 1, 0, [1.0]),
        original.block(0, 1, 0, 2, [1, 1], [1.0, 2.0]),
        original.block(0, 1, 1, 2, [2], [1.0, 2.0]),
        original.gradient(0, 1, []),
    ]
    return [
        [whole, original.heartbeat()],
        [original.join("n"), whole, whole],
        blocks,
        [original.gradient(0, 1, [float("nan"), 1.0])],
        [original.gradient(1, 1, [1.0, 2.0]), whole],
    ]


CONFIGURATION = b"""\
contract = ["a.yaml", "b.yaml"]
command = 'train {world_size}' # {
world-size = [2, 4]
deadline = 1.5
github = true
json = \"\"\"out-{contract}.json\"\"\"
exclude = [
  {clause = "F-DP-003", reason = "why", until = 2027-01-31},
  {clause = ["A", "B"], reason = 'why', kind = "not-applicable"},
]
"""


def part_of_a_worker() -> list[Said]:
    """Return all messages that a well-behaved worker 1 sends, from its admission to the end."""
    vector = bytes(Server(SCENARIO).replicas.vector_bytes)
    said: list[Said] = [(Loaded(step=0), b"")]
    for step in range(SCENARIO.num_steps):
        node = TreeNode(step=step, round=0, block=0, level=LEVEL, index=INDEX, loss=1.0, weight=4.0)
        said += [(Computed(step=step, shards=SHARDS), b""), (Heartbeat(), b"")]
        said += [(node, vector), (Staged(step=step, round=0), b"")]
        said += [(Applied(step=step), b"")]
    return said


def part_of_a_coordinator() -> list[Said]:
    """Return all messages that a well-behaved coordinator sends to worker 1."""
    server = Server(SCENARIO)
    proof = terms.proof_of_coordinator(SECRET, CHALLENGE, hello_of(1))
    welcome = Welcome(rank=1, step=0, blocks=1, resumed=False, proof=proof)
    said: list[Said] = [(welcome, bytes(server.payload(welcome)))]
    for step in range(SCENARIO.num_steps):
        average = Average(step=step, round=0, block=0, loss=1.0, weight=8.0)
        said += [(Assign(step=step, shards=SHARDS), b""), (Heartbeat(), b"")]
        said += [(average, bytes(server.replicas.vector_bytes)), (Commit(step=step), b"")]
    return [*said, (Shutdown(problem=None), b"")]


def _odd_words() -> list[Said]:
    problem = NonFinite(step=0, shard=2, tensor="bias", element=0, loss=1.0, ids=(1, 2))
    return [(problem, b""), (Leave(reason="asked to"), b"")]


def _odd_orders() -> list[Said]:
    halt = Halt(step=0, reason="non-finite")
    weights = Weights(step=0, block=0, loss=1.0, weight=8.0)
    whole = bytes(Server(SCENARIO).replicas.vector_bytes)
    ends = [(Refuse(reason="full", retry=True), b""), (Shutdown(problem="lost"), b"")]
    return [(halt, b""), (weights, whole), *ends]


def _hellos() -> list[messages.Hello]:
    right = hello_of(1)
    return [
        right,
        replace(right, rank=None),
        replace(right, rank=0),
        replace(right, rank=2),
        replace(right, version=2),
        replace(right, run="another"),
        replace(right, manifest="another"),
        replace(right, data="another"),
    ]


def _huge(frame: bytes) -> bytes:
    """Return a frame that claims 2**62 bytes of payload."""
    claiming = bytearray(frame)
    struct.pack_into("<Q", claiming, PREFIX_BYTES - 24, 2**62)
    return bytes(claiming)


def _golden() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(GOLDEN.read_text("utf-8"))
    return rows


@cache
def _trace() -> trace.Trace:
    return systems.run(SCENARIO)


def _checkpoints() -> list[bytes]:
    """Return a checkpoint written by a coordinator, and nearly valid ones."""
    found = []
    for make in (bad_contents.saved, *bad_contents.CHECKPOINTS.values()):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint")
            make(path)
            found.append(path.read_bytes().partition(b"\n")[2])
    return found


def _configuration() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        bad_contents.write_configuration(
            path,
            checkpoint=bad_contents.EVERY_STEP,
            metrics="m",
            ledger="l",
            wait_for=2,
            audit_share=0.5,
            updates="server",
        )
        return path.read_bytes()


def _checkpoint() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        checkpoint.save(path, {"tensors/bias": np.zeros(2, np.float32)}, {"step": 1})
        return path.read_bytes().partition(b"\n")[2]
