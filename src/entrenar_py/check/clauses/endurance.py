"""F-WP-005: whatever faults strike workers and messages, the run ends with the right weights.

Source: wire-protocol-v1, F-WP-005.
"""

from __future__ import annotations

from entrenar_py.check import evidence
from entrenar_py.check.clauses import probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing
from entrenar_py.check.evidence.needs import CALM, Traces
from entrenar_py.shared.faults import LIE_PLACES, ON_THE_WAY, PLACES, STRANGERS, SURVIVED, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.verdict import Finding, Tally


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan one run for each kind of fault at messages in either direction; and one with several."""
    system = "parameter_server_simulated"
    usual = probes.scenario(system, world_size=3, num_steps=5, optimizer="momentum")
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


def judge(invariant: Invariant, runs: Traces) -> Finding:
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


ROWS = (
    Check(
        name="endurance",
        id="F-WP-005",
        decides="whatever befalls workers and messages, the run ends, on the same weights",
        spoken_of="coordinator crash reconnect retry message-loss",
        judge=judge,
        plan=plan,
        needs=(CALM,),
    ),
)
