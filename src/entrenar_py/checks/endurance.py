"""F-WP-005: whatever befalls workers and messages, the run ends, and ends right.

Source: wire-protocol-v1, F-WP-005.
"""

from __future__ import annotations

from entrenar_py.checks import evidence, missing
from entrenar_py.checks.check import Check
from entrenar_py.checks.needs import CALM, Traces
from entrenar_py.contract import Invariant
from entrenar_py.faults import LIE_PLACES, ON_THE_WAY, PLACES, STRANGERS, SURVIVED, Fault
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Start, Trace
from entrenar_py.verdict import Finding, Tally


def plan(invariant: Invariant) -> list[Scenario]:
    """Each kind of trouble at messages of either direction, and a crowd of them in one run."""
    usual = Scenario(
        system="parameter_server_simulated",
        workload="linear",
        world_size=3,
        seed=0,
        num_steps=5,
        optimizer="momentum",
    )
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
    """A run that promises bits ends as the undisturbed one does, on the same weights."""
    tally = Tally(invariant.id)
    for trace in (runs.base,) if runs.base is not None else ():
        if not any(fault.kind in SURVIVED for fault in trace.scenario.faults):
            continue
        if trace.end.status == "failed" and not trace.of(Start):
            tally.miss(f"{trace.scenario.system} could not be run: {trace.end.reason}")
        elif "bitwise" not in trace.promises:
            tally.miss(f"{trace.scenario.system} promises no bits to compare")
        elif not runs.of(CALM):
            tally.miss("no undisturbed run of the same training to compare with")
        else:
            _ends_right(tally, runs.of(CALM)[0], trace)
    return tally.finding(nothing=missing.probed(invariant, "nothing befell any run"))


def _ends_right(tally: Tally, calm: Trace, trace: Trace) -> None:
    scenario = trace.scenario
    how = f"the run ended {trace.end.status} ({trace.end.reason}), undisturbed {calm.end.status}"
    tally.equal(calm.end.status, trace.end.status, how, scenario=scenario)
    expected, got = evidence.updates(calm), evidence.updates(trace)
    for step, by_rank in sorted(got.items()):
        for rank, update in sorted(by_rank.items()):
            model = evidence.any_rank(expected[step]) if step in expected else None
            place = {"step": step, "rank": rank, "scenario": scenario}
            if tally.check(model is not None, f"step {step} is not of this training", **place):
                assert model is not None
                message = "not the weights of the undisturbed run"
                evidence.compare_exact(tally, model.weights, update.weights, message, **place)
    lost = sorted(expected.keys() - got.keys())
    tally.check(
        not lost,
        f"steps {lost[:5]} were never made",
        step=lost[0] if lost else None,
        scenario=scenario,
    )


def stranger(value: str, *, step: int) -> Fault:
    """Somebody who must not be let in; where it claims a rank, that is 1."""
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
        judge=judge,
        plan=plan,
        needs=(CALM,),
        explores=False,
    ),
)
