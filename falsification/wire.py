"""Bugs in the wire and in admission: in the codec, its refusals, its memory, and the handshake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.coordinator.server import Server
from entrenar_py.train.wire import frames, terms
from entrenar_py.train.wire.effects import Left
from entrenar_py.train.wire.messages import Challenge, Hello, Message, Refuse
from entrenar_py.train.wire.terms import Admission, Terms

PROTOCOL = "entrenar_py.train.wire"
_encode, _due_first = frames.Encoder.encode, frames.Decoder._due_first
_admit = terms.admit
_left, _apply_average = Server.left, Server.apply_average
_ALLOCATED_BYTES_MAX = 2**26
_bereaved: WeakSet[Server] = WeakSet()


def as_floats(
    self: frames.Encoder, message: Message, payload: frames.Buffer = b""
) -> Iterator[bytes | memoryview]:
    """Converts payloads of whole floats to numbers and back."""
    if len(payload) % 4 == 0:
        with np.errstate(invalid="ignore"):
            payload = (np.frombuffer(payload, np.float32) + np.float32(0)).tobytes()
    yield from _encode(self, message, payload)


def unchecked(
    key: bytes, fields: frames.Buffer, header: frames.Buffer, chunk: frames.Buffer
) -> bytes:
    """Returns the same checksum for every frame."""
    return bytes(16)


def set_aside_first(
    self: frames.Decoder, kind: type[Message], header_bytes: int, whole_bytes: int
) -> int:
    """Allocates the claimed size (here: at most 64 MiB) before it checks the claim."""
    claimed = bytearray(min(whole_bytes, _ALLOCATED_BYTES_MAX))
    due = _due_first(self, kind, header_bytes, whole_bytes)
    del claimed
    return due


def half_is_enough(
    hello: Hello, challenge: Challenge, agreed: Terms, *, secret: bytes, **rules: Any
) -> Admission | Refuse:
    """Compares only as many characters of the proof as were given."""
    right = terms.proof_of_worker(secret, challenge, hello)
    if hello.proof and right.startswith(hello.proof):
        hello = replace(hello, proof=right)
    return _admit(hello, challenge, agreed, secret=secret, **rules)


def none_taken(
    hello: Hello, challenge: Challenge, agreed: Terms, *, secret: bytes, **rules: Any
) -> Admission | Refuse:
    """Admits a worker under a rank that is already taken."""
    return _admit(hello, challenge, agreed, secret=secret, **{**rules, "taken": ()})


def any_manifest(
    hello: Hello, challenge: Challenge, agreed: Terms, *, secret: bytes, **rules: Any
) -> Admission | Refuse:
    """Admits a worker with another manifest."""
    same = replace(agreed, manifest=hello.manifest)
    return _admit(hello, challenge, same, secret=secret, **rules)


def bereaved(self: Server, effect: Left) -> None:
    """Remembers that a worker died in this step, for `stepped_twice`."""
    _bereaved.add(self)
    _left(self, effect)


def stepped_twice(self: Server, step: int) -> None:
    """Makes the step twice after a worker died in it."""
    if self in _bereaved:
        _bereaved.discard(self)
        average = self.average_held()
        self.replicas.move(self.replica, average.clipped, average.mean)
    _apply_average(self, step)


_WIRE = Scenario(system="wire", workload="linear", world_size=1, seed=0)
_STAR = Scenario(
    system="parameter_server_simulated",
    workload="linear",
    world_size=3,
    seed=0,
    num_steps=5,
    faults=(Fault(kind="kill", rank=1, step=2, at="TreeNode"),),
)

VARIANTS = (
    Variant(
        name="payload-as-floats",
        summary="payloads are read and written as numbers, and lose the sign of zero",
        source="classic (serialisation through numbers)",
        plants={f"{PROTOCOL}.frames.Encoder.encode": as_floats},
        scenario=_WIRE,
        invariants=("F-WP-001",),
        place={"tensor": "Welcome"},
    ),
    Variant(
        name="checksum-not-checked",
        summary="every frame has the same checksum, so every checksum matches",
        source="classic (placeholder hash)",
        plants={f"{PROTOCOL}.frames.checksum_of": unchecked},
        scenario=_WIRE,
        invariants=("F-WP-002",),
        place={"tensor": "another session's key"},
    ),
    Variant(
        name="length-checked-late",
        summary="memory is allocated for a frame's claimed size before the claim is checked",
        source="classic (length checked after allocation)",
        plants={f"{PROTOCOL}.frames.Decoder._due_first": set_aside_first},
        scenario=_WIRE,
        invariants=("F-WP-003",),
        place={"tensor": "payload of 2^62 bytes"},
    ),
    Variant(
        name="half-a-proof",
        summary="only as many bytes of a proof are compared as the peer sent",
        source="classic (prefix comparison)",
        plants={f"{PROTOCOL}.terms.admit": half_is_enough},
        scenario=_WIRE,
        invariants=("F-WP-004",),
        place={"tensor": "half a proof"},
    ),
    Variant(
        name="joins-twice",
        summary="a requested rank is assigned although a live worker has it",
        source="classic (two workers of one rank)",
        plants={f"{PROTOCOL}.terms.admit": none_taken},
        scenario=_STAR.with_(faults=(Fault(kind="stranger", step=1, rank=1, value="taken_rank"),)),
        invariants=("F-WP-004",),
        place={"tensor": "taken_rank"},
    ),
    Variant(
        name="manifest-not-compared",
        summary="the tensors of a worker that joins are not compared",
        source="classic (workers of two versions of a model)",
        plants={f"{PROTOCOL}.terms.admit": any_manifest},
        scenario=_WIRE,
        invariants=("F-WP-004",),
        place={"tensor": "another manifest"},
    ),
    Variant(
        name="server-steps-twice",
        summary="after a worker's death the server takes a step that it already took",
        source="classic (a second optimizer step after one that already stepped)",
        plants={
            "entrenar_py.train.coordinator.server.Server.left": bereaved,
            "entrenar_py.train.coordinator.server.Server.apply_average": stepped_twice,
        },
        scenario=_STAR,
        invariants=("F-WP-005",),
        place={"step": 3, "rank": 1},
    ),
)
