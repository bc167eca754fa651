"""F-WP-001 to F-WP-004: messages arrive as they were sent, nothing else does, and nobody else.

Source: wire-protocol-v1.
"""

from __future__ import annotations

from entrenar_py.checks import endurance, evidence, missing
from entrenar_py.checks.check import Check
from entrenar_py.checks.needs import Traces
from entrenar_py.contract import Invariant
from entrenar_py.faults import STRANGERS
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Admission, Carried, Refused
from entrenar_py.verdict import Finding, Tally

# What reading a message may take beside its payload. A header has at most 2 MiB: as it comes, as
# bytes and as text these are 6, and its values (65,536 numbers, or as many small things that are no
# numbers before they are refused) take up to 5 more.
BESIDE_BYTES = 12 * 2**20
REFUSAL = "ProtocolError"


def plan(invariant: Invariant) -> list[Scenario]:
    """Three seeds: other pieces, other bits."""
    return [
        Scenario(system="wire", workload="linear", world_size=1, seed=seed) for seed in range(3)
    ]


def plan_admission(invariant: Invariant) -> list[Scenario]:
    """The same, and a training that every kind of stranger comes to."""
    visited = Scenario(
        system="parameter_server_simulated",
        workload="linear",
        world_size=3,
        seed=0,
        num_steps=5,
        faults=tuple(endurance.stranger(value, step=2) for value in STRANGERS),
    )
    return [*plan(invariant), visited]


def judge_round_trip(invariant: Invariant, traces: Traces) -> Finding:
    """Every message came out as it went in."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for one in trace.of(Carried):
            what = f"{one.message} with {one.payload_bytes} bytes, in {one.pieces} pieces"
            place = {"tensor": one.message, "scenario": trace.scenario}
            tally.equal(one.sent, one.got, f"{what}, is not what was sent", **place)
    return _finding(tally, invariant, "no message was carried")


def judge_refusal(invariant: Invariant, traces: Traces) -> Finding:
    """Everything malformed gave the one error that there is for it."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for one in trace.of(Refused):
            what = f"{one.case} gave {one.error or 'a message'}"
            place = {"tensor": one.case, "scenario": trace.scenario}
            tally.equal(REFUSAL, one.error, what, **place)
    return _finding(tally, invariant, "nothing malformed was read")


def judge_memory(invariant: Invariant, traces: Traces) -> Finding:
    """Reading takes the payload's bytes and little more; what is refused takes little at all."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        scenario = trace.scenario
        for one in trace.of(Carried):
            most = one.payload_bytes + BESIDE_BYTES
            tally.check(
                one.allocated_bytes <= most,
                f"reading {one.message} with {one.payload_bytes} bytes took {one.allocated_bytes}",
                tensor=one.message,
                expected=f"<= {most}",
                got=str(one.allocated_bytes),
                scenario=scenario,
            )
        for refused in trace.of(Refused):
            tally.check(
                refused.allocated_bytes <= BESIDE_BYTES,
                f"refusing {refused.case} took {refused.allocated_bytes} bytes",
                tensor=refused.case,
                expected=f"<= {BESIDE_BYTES}",
                got=str(refused.allocated_bytes),
                scenario=scenario,
            )
    return _finding(tally, invariant, "no message was read")


def judge_admission(invariant: Invariant, traces: Traces) -> Finding:
    """Who is entitled is let in, and nobody else is."""
    tally = Tally(invariant.id)
    for trace in evidence.usable(traces, tally):
        for one in trace.of(Admission):
            was = "was let in" if one.let_in else "was turned away"
            place = {"tensor": one.case, "scenario": trace.scenario}
            tally.equal(one.entitled, one.let_in, f"{one.case}: {was}", **place)
    return _finding(tally, invariant, "nobody asked to join")


def _finding(tally: Tally, invariant: Invariant, nothing: str) -> Finding:
    return tally.finding(nothing=missing.probed(invariant, nothing))


ROWS = (
    Check(
        name="wire_round_trip",
        id="F-WP-001",
        decides="a message comes out of the wire as it went in, bit by bit, in whatever pieces",
        judge=judge_round_trip,
        plan=plan,
        explores=False,
    ),
    Check(
        name="wire_refusal",
        id="F-WP-002",
        decides="damaged and malformed bytes give a ProtocolError, and nothing else",
        judge=judge_refusal,
        plan=plan,
        explores=False,
    ),
    Check(
        name="wire_memory",
        id="F-WP-003",
        decides="reading takes the payload's memory and little more, whatever the bytes claim",
        judge=judge_memory,
        plan=plan,
        explores=False,
        tolerance_kinds=("bytes",),
    ),
    Check(
        name="admission",
        id="F-WP-004",
        decides="who proves the secret and agrees on the run is let in, and nobody else",
        judge=judge_admission,
        plan=plan_admission,
        explores=False,
    ),
)
