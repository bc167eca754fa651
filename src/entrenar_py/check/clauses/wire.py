"""F-WP-001 to F-WP-004: messages arrive as sent, and bad bytes and connections are refused.

Source: wire-protocol-v1.
"""

from __future__ import annotations

from typing import Any

from entrenar_py.check.clauses import endurance, probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.shared.faults import STRANGERS
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Admission, Carried, Refused, Trace
from entrenar_py.shared.verdict import Tally

# The memory that reading a message may take in addition to its payload. A header has at most 2 MiB.
# It is held as received, as bytes and as text, which makes 6 MiB. Its values (65,536 numbers, or as
# many small objects that are then refused) take up to 5 MiB more.
BESIDE_BYTES = 12 * 2**20
REFUSAL = "ProtocolError"


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan three seeds, each of which cuts messages into other pieces and damages other bits."""
    return [probes.scenario("wire", seed=seed) for seed in range(3)]


def plan_admission(invariant: Invariant) -> list[Scenario]:
    """Plan three seeds, and a training to which every kind of stranger connects."""
    faults = tuple(endurance.stranger(value, step=2) for value in STRANGERS)
    visited = probes.scenario(
        "parameter_server_simulated", world_size=3, num_steps=5, faults=faults
    )
    return [*plan(invariant), visited]


def compare_round_trip(tally: Tally, trace: Trace) -> None:
    """Check that every message was read as it was sent."""
    for carried in trace.of(Carried):
        what = f"{carried.message} with {carried.payload_bytes} bytes, in {carried.pieces} pieces"
        place = {"tensor": carried.message, "scenario": trace.scenario}
        tally.equal(carried.sent, carried.got, f"{what}, is not what was sent", **place)


def compare_refusal(tally: Tally, trace: Trace) -> None:
    """Check that everything malformed gave a ProtocolError."""
    for refused in trace.of(Refused):
        what = f"{refused.case} gave {refused.error or 'a message'}"
        place = {"tensor": refused.case, "scenario": trace.scenario}
        tally.equal(REFUSAL, refused.error, what, **place)


def compare_memory(tally: Tally, trace: Trace) -> None:
    """Check that reading takes little memory beyond the payload, and a refusal little at all."""
    for carried in trace.of(Carried):
        num_bytes = carried.allocated_bytes
        what = f"reading {carried.message} with {carried.payload_bytes} bytes took {num_bytes}"
        place: dict[str, Any] = {"tensor": carried.message, "scenario": trace.scenario}
        tally.at_most(carried.payload_bytes + BESIDE_BYTES, num_bytes, what, **place)
    for refused in trace.of(Refused):
        what = f"refusing {refused.case} took {refused.allocated_bytes} bytes"
        place = {"tensor": refused.case, "scenario": trace.scenario}
        tally.at_most(BESIDE_BYTES, refused.allocated_bytes, what, **place)


def compare_admission(tally: Tally, trace: Trace) -> None:
    """Check that entitled connections, and no others, are accepted."""
    for asked in trace.of(Admission):
        was = "was let in" if asked.let_in else "was turned away"
        place = {"tensor": asked.case, "scenario": trace.scenario}
        tally.equal(asked.entitled, asked.let_in, f"{asked.case}: {was}", **place)


ROWS = (
    Check(
        name="wire_round_trip",
        id="F-WP-001",
        decides="a message comes out of the wire as it went in, bit by bit, in whatever pieces",
        spoken_of="round-trip roundtrip encode decode fidelity serialization",
        judge=probes.judge(compare_round_trip, "no message was carried"),
        plan=plan,
    ),
    Check(
        name="wire_refusal",
        id="F-WP-002",
        decides="damaged and malformed bytes give a ProtocolError, and nothing else",
        spoken_of="truncated malformed unknown-tag tag corrupt checksum",
        judge=probes.judge(compare_refusal, "nothing malformed was read"),
        plan=plan,
    ),
    Check(
        name="wire_memory",
        id="F-WP-003",
        decides="reading takes the payload's memory and little more, whatever the bytes claim",
        spoken_of="oversized length-prefix allocation",
        judge=probes.judge(compare_memory, "no message was read"),
        plan=plan,
        tolerance_kinds=("bytes",),
    ),
    Check(
        name="admission",
        id="F-WP-004",
        decides="a worker that proves the secret and agrees on the run is let in, and no other",
        spoken_of="authentication secret join handshake",
        judge=probes.judge(compare_admission, "nobody asked to join"),
        plan=plan_admission,
    ),
)
