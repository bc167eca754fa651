"""Runs of stars and meshes, and the results that the reference requires of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from entrenar_py import systems
from entrenar_py.shared.faults import LIE_PLACES, PLACES, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Admission, Injected, Membership, Tensors, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests import traces

REAL, SIMULATED = "parameter_server", "parameter_server_simulated"
MESH, MESH_SIMULATED = "mesh", "mesh_simulated"
# Silent workers are given up soon, so that tests need not wait for them.
SOON = {"heartbeat_s": 0.1, "dead_after_s": 2.0}
STEP = 2  # the step in which a fault strikes worker 1


def subject(system: str, **changes: Any) -> Scenario:
    """Return a run of five steps on three workers, with an optimizer that has a state."""
    usual: dict[str, Any] = {
        "workload": "linear",
        "world_size": 3,
        "seed": 0,
        "num_steps": 5,
        "optimizer": "momentum",
        "options": _options(system),
    }
    return Scenario(system=system, **{**usual, **changes})


def _options(system: str) -> dict[str, Any]:
    """Return the system's options; a mesh has two blocks, so that workers 0 and 1 own one each."""
    blocks = {"block_bytes": 4} if system in (MESH, MESH_SIMULATED) else {}
    return {**(SOON if system in (REAL, MESH) else {}), **blocks}


def in_blocks(system: str, block_bytes: int, **changes: Any) -> Scenario:
    """Return the same run with 151 parameters, or 604 bytes, which travel in blocks."""
    options = {**_options(system), "block_bytes": block_bytes}
    return subject(system, workload="mlp", width=1, options=options, **changes)


def struck(system: str, kind: str, at: str, seconds: float | None = None) -> Scenario:
    """Return the same run with a fault `kind` on worker 1 at message `at`."""
    fault = Fault(kind=kind, step=STEP, rank=1, at=at, seconds=seconds)
    return subject(system, faults=(fault,))


def lying(system: str, value: str, at: str) -> Scenario:
    """Return the same run with a lie of worker 1 at message `at`."""
    fault = Fault(kind="lie", step=STEP, rank=1, at=at, value=value)
    return subject(system, faults=(fault,))


def visited(system: str, value: str) -> Scenario:
    """Return the same run with a stranger."""
    rank = 1 if value == "taken_rank" else None
    return subject(system, faults=(Fault(kind="stranger", step=STEP, rank=rank, value=value),))


def spread(kinds: Sequence[str], places: Sequence[str], *, shift: int = 0) -> list[tuple[str, str]]:
    """Return pairs in which each kind and each place occurs.

    All pairs are drawn by `make soak`.
    """
    num = max(len(kinds), len(places))
    return [(kinds[i % len(kinds)], places[(i + shift) % len(places)]) for i in range(num)]


LIES = [(value, at) for value, places in LIE_PLACES.items() for at in places if at in PLACES]
# The start of the answer to each stranger; those without a hello get none.
TOLD = {
    **dict.fromkeys(("taken_rank", "one_too_many"), "all 3 ranks are taken by live workers"),
    "wrong_secret": "wrong secret",
    **{f"wrong_{name}": f"{name}='000" for name in ("run", "manifest", "data")},
    **dict.fromkeys(("garbage", "huge_claim", "silent", "slow_loris"), "nothing"),
}


def require_turned_away(trace: Trace) -> None:
    """Assert that the one stranger was refused with its reason, and that no worker moved."""
    (seen,) = trace.of(Admission)
    assert (seen.entitled, seen.let_in) == (False, False)
    assert seen.answer.startswith(TOLD[seen.case])
    assert changes(trace) == []


def held(trace: Trace) -> list[Tensors]:
    """Return the weights after each step, after checking that all workers agree."""
    assert trace.end.status == "completed", trace.end.reason
    found: dict[int, Tensors] = {}
    for update in trace.of(Update):
        assert found.setdefault(update.step, update.weights) == update.weights
    assert list(found) == list(range(trace.scenario.num_steps))
    return list(found.values())


@cache
def expected(scenario: Scenario) -> list[Tensors]:
    """Return the weights of the undisturbed reference with one worker, after each step."""
    calm = scenario.with_(system="reference", world_size=1, faults=(), stops=(), options={})
    return held(traces.run(calm))


def require_right(scenario: Scenario) -> Trace:
    """Return the trace of `scenario`, after checking faults and final bits against the reference.

    No sample was lost or drawn twice, all replicas agree, and the run completed.
    """
    trace = traces.run(scenario)
    assert held(trace) == expected(scenario)
    assert [event.fault for event in trace.of(Injected)] == [
        fault.to_dict() for fault in scenario.faults
    ]
    checks = ["coverage", "liveness"]
    checks += ["replica_identity"] if scenario.world_size > 1 else []
    checks += ["recovery"] if changes(trace) else []
    for check in checks:
        finding = traces.judge(check, traces.family(check, scenario))
        assert finding.verdict is Verdict.HELD, finding
    return trace


def changes(trace: Trace) -> list[tuple[int, int, str]]:
    """Return which ranks left and joined, and before or in which step."""
    return [(event.step, event.rank, event.change) for event in trace.of(Membership)]


def require_back(trace: Trace) -> None:
    """Assert that worker 1 left when the fault struck, and came back if there was time for it."""
    seen = changes(trace)
    assert seen in (
        [(STEP, 1, "left"), (STEP + 1, 1, "joined")],
        [(STEP + 1, 1, "left")],
        *([(STEP + 1, 1, "left"), (step, 1, "joined")] for step in (STEP + 1, STEP + 2)),
    ), seen


def run(scenario: Scenario) -> Trace:
    """Return the trace of `scenario`, however it ended, from a new run."""
    return systems.run(scenario)
