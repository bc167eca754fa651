"""F-WP-001 to F-WP-005, F-WP-007: messages arrive as sent; bad bytes and peers are refused.

Whatever faults strike workers and messages, the run ends with the right weights. Averages for
workers of the original system depend only on the shards' gradients. Source: wire-protocol-v1.
"""

from __future__ import annotations

from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.clauses.check import Check, judge_each, probe
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing
from entrenar_py.check.evidence.needs import CALM, Traces
from entrenar_py.shared.faults import LIE_PLACES, ON_THE_WAY, PLACES, STRANGERS, SURVIVED, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Admission, Carried, Heard, Refused, Trace
from entrenar_py.shared.verdict import Finding, Tally

# The memory that reading a message may take in addition to its payload. A header has at most 2 MiB.
# It is kept as received, as bytes and as text, which makes 6 MiB. Its values (65,536 numbers, or as
# many small objects that are then refused) take up to 5 MiB more.
BESIDE_BYTES = 12 * 2**20
REFUSAL = "ProtocolError"


def plan_exchanges(invariant: Invariant) -> list[Scenario]:
    """Plan three seeds. Each cuts messages into different pieces, and damages different bits."""
    return [probe("wire", seed=seed) for seed in range(3)]


def plan_admission(invariant: Invariant) -> list[Scenario]:
    """Plan three seeds, and a training run to which every type of stranger connects."""
    faults = tuple(stranger(value, step=2) for value in STRANGERS)
    visited = probe("parameter_server_simulated", world_size=3, num_steps=5, faults=faults)
    return [*plan_exchanges(invariant), visited]


def compare_round_trip(tally: Tally, trace: Trace) -> None:
    """Check that every message was read as it was sent."""
    for carried in trace.of(Carried):
        what = f"{carried.message} with {carried.payload_bytes} bytes, in {carried.pieces} pieces"
        place = {"tensor": carried.message, "scenario": trace.scenario}
        tally.equal(carried.sent, carried.got, f"{what}, differs from the sent one", **place)


def compare_refusal(tally: Tally, trace: Trace) -> None:
    """Check that every malformed message was refused with a ProtocolError."""
    for refused in trace.of(Refused):
        what = f"{refused.case} gave {refused.error or 'a message'}"
        place = {"tensor": refused.case, "scenario": trace.scenario}
        tally.equal(REFUSAL, refused.error, what, **place)


def compare_memory(tally: Tally, trace: Trace) -> None:
    """Check the memory that reading takes beyond the payload, and that of a refusal."""
    for carried in trace.of(Carried):
        num_bytes = carried.allocated_bytes
        what = (
            f"reading {carried.message} with {carried.payload_bytes} bytes took {num_bytes} "
            "bytes of memory"
        )
        place: dict[str, Any] = {"tensor": carried.message, "scenario": trace.scenario}
        tally.at_most(carried.payload_bytes + BESIDE_BYTES, num_bytes, what, **place)
    for refused in trace.of(Refused):
        what = f"refusing {refused.case} took {refused.allocated_bytes} bytes of memory"
        place = {"tensor": refused.case, "scenario": trace.scenario}
        tally.at_most(BESIDE_BYTES, refused.allocated_bytes, what, **place)


def compare_admission(tally: Tally, trace: Trace) -> None:
    """Check that entitled connections, and no others, are accepted."""
    for admission in trace.of(Admission):
        was = "was let in" if admission.let_in else "was turned away"
        place = {"tensor": admission.case, "scenario": trace.scenario}
        tally.equal(admission.entitled, admission.let_in, f"{admission.case}: {was}", **place)


# --- faults of workers and messages ---------------------------------------------------------------


def plan_faults(invariant: Invariant) -> list[Scenario]:
    """Plan one run for each type of fault, at messages in both directions; and one with several."""
    system = "parameter_server_simulated"
    usual = probe(system, world_size=3, num_steps=5, optimizer="momentum")
    singles = [
        usual.with_(faults=(_trouble(kind, at, rank=1, step=2),))
        for kind in ON_THE_WAY
        for at in ("TreeNode", "Average", "Commit", "Applied")
    ]
    crowd = tuple(
        _trouble(kind, at, rank=rank, step=step)
        for kind, at, rank, step in (
            ("kill", "Computed", 0, 1),
            ("cut", "Average", 1, 1),
            ("half_open", "Commit", 2, 2),
            ("flip", "TreeNode", 0, 3),
            ("freeze", "Applied", 1, 3),
        )
    )
    restarts = [
        usual.with_(faults=(Fault(kind="restart", step=step, at=at),))
        for step, at in ((0, "Average"), (2, "Commit"), (4, "Applied"))
    ]
    lies = [
        usual.with_(faults=(Fault(kind="lie", step=2, rank=1, at=at, value=value),))
        for value, places in LIE_PLACES.items()
        for at in places
        if at in PLACES
    ]
    strangers = [usual.with_(faults=(stranger(value, step=2),)) for value in STRANGERS]
    return [*singles, *restarts, *lies, *strangers, usual.with_(faults=crowd)]


def judge_endurance(invariant: Invariant, runs: Traces) -> Finding:
    """Judge that a run with faults ends like the same run without them, with the same weights."""
    tally = Tally(invariant.id)
    trace = runs.base
    if trace is not None and any(fault.kind in SURVIVED for fault in trace.scenario.faults):
        calm = evidence.calm_run(tally, trace, runs)
        if calm is not None:
            _ends_right(tally, calm, trace)
    return tally.finding(nothing=missing.probed(invariant, "no run had a planned fault"))


def _ends_right(tally: Tally, calm: Trace, trace: Trace) -> None:
    how = f"the run ended {trace.end.status} ({trace.end.reason}), the undisturbed run ended "
    how += calm.end.status
    tally.equal(calm.end.status, trace.end.status, how, scenario=trace.scenario)
    message = "not the weights of the undisturbed run"
    closeness.compare_updates(tally, calm, trace, "weights", message)
    lost = evidence.updates(calm).keys() - evidence.updates(trace).keys()
    closeness.compare_steps_made(tally, lost, trace)


def stranger(value: str, *, step: int) -> Fault:
    """Return the fault of a connection that must be refused. Value `taken_rank` claims rank 1."""
    rank = 1 if value == "taken_rank" else None
    return Fault(kind="stranger", step=step, rank=rank, value=value)


def _trouble(kind: str, at: str, *, rank: int, step: int) -> Fault:
    seconds = 40.0 if kind in ("freeze", "delay") else None
    return Fault(kind=kind, step=step, rank=rank, at=at, seconds=seconds)


# --- averages on the original system's wire -------------------------------------------------------

ROUNDINGS_MAX = 1.0  # the unit is that of `Heard.roundings`


def plan_averages(invariant: Invariant) -> list[Scenario]:
    """Plan two seeds of terms and orders, each with as many shards as workers, and with more."""
    sizes: dict[str, Any] = {"num_samples": 23, "batch_size": 10, "num_steps": 4}
    return [
        probe("averaging", world_size=world_size, num_shards=num_shards, seed=seed, **sizes)
        for seed in range(2)
        for world_size, num_shards in ((3, 3), (2, 5))
    ]


def compare_averages(tally: Tally, trace: Trace) -> None:
    """Check that all workers received the right average, with the same bits in every schedule."""
    first: dict[tuple[int, str], Heard] = {}
    for heard in trace.of(Heard):
        what = f"the average of {heard.part} in step {heard.step}, with {heard.case}"
        place = {"step": heard.step, "tensor": heard.case, "scenario": trace.scenario}
        if heard.poisoned:
            tally.equal(None, heard.digest, f"{what}, was sent, though a term is a NaN", **place)
            continue
        if not tally.check(
            heard.roundings is not None, f"{what}, was not the same for all workers", **place
        ):
            continue
        assert heard.roundings is not None, "it was just compared"
        deviation = f"{what}, is not the weighted mean"
        tally.at_most(
            ROUNDINGS_MAX, heard.roundings, deviation, form=".3g", element=heard.element, **place
        )
        known = first.setdefault((heard.step, heard.part), heard)
        other = f"{what}, has different bits than with {known.case}"
        tally.equal(known.digest, heard.digest, other, **place)


ROWS = (
    Check(
        name="wire_round_trip",
        id="F-WP-001",
        decides="a decoded message equals the sent one bit for bit, in whatever pieces it arrives",
        spoken_of="round-trip roundtrip encode decode fidelity serialization",
        judge=judge_each(compare_round_trip, "no message was carried"),
        plan=plan_exchanges,
    ),
    Check(
        name="wire_refusal",
        id="F-WP-002",
        decides="damaged and malformed bytes raise ProtocolError, and nothing else",
        spoken_of="truncated malformed unknown-tag tag corrupt checksum",
        judge=judge_each(compare_refusal, "nothing malformed was read"),
        plan=plan_exchanges,
    ),
    Check(
        name="wire_memory",
        id="F-WP-003",
        decides="reading allocates little more than the payload, whatever size the bytes claim",
        spoken_of="oversized length-prefix allocation",
        judge=judge_each(compare_memory, "no message was read"),
        plan=plan_exchanges,
        tolerance_kinds=("bytes",),
    ),
    Check(
        name="admission",
        id="F-WP-004",
        decides="only workers that prove the secret and agree on the run are admitted",
        spoken_of="authentication secret join handshake",
        judge=judge_each(compare_admission, "no peer requested to join"),
        plan=plan_admission,
    ),
    Check(
        name="endurance",
        id="F-WP-005",
        decides="whatever happens to workers and messages, the run ends with the same weights",
        spoken_of="coordinator crash reconnect retry message-loss",
        judge=judge_endurance,
        plan=plan_faults,
        needs=(CALM,),
    ),
    Check(
        name="averages",
        id="F-WP-007",
        decides="averages for workers of the original system add the shards in order, bit for bit",
        spoken_of="upstream",
        judge=judge_each(compare_averages, "nothing was averaged"),
        plan=plan_averages,
    ),
)
