"""F-DP-006: a worker's loss costs no sample, and training is soon back on its trajectory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from entrenar_py.checks import evidence, same_bits
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Membership, Trace, Update
from entrenar_py.verdict import Finding, Tally

ON_TRAJECTORY = 0.01  # relative distance of losses, the published bound of F-DP-005


def family(scenario: Scenario) -> list[Scenario]:
    """The disturbed run and the undisturbed one."""
    return evidence.distinct([scenario, scenario.with_(faults=())])


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Shards redistributed, no step lost, loss back within the tolerated steps (0: same bits)."""
    tally = Tally(invariant.id)
    for group in evidence.groups(evidence.usable(traces, tally), "faults"):
        calm = [trace for trace in group if not trace.scenario.faults]
        for trace in group:
            left = [change for change in trace.of(Membership) if change.change == "left"]
            if not left:
                continue
            if not calm:
                tally.miss("no undisturbed run of the same training to compare with")
                continue
            _continues(tally, calm[0], trace, left)
            _on_trajectory(tally, calm[0], trace, left, int(invariant.tolerance or 0))
            if "bitwise" in trace.promises:
                message = "bits differ from those of the undisturbed run"
                same_bits.compare_steps(tally, calm[0], trace, message)
    return tally.finding(nothing="no worker left in any run")


def _continues(tally: Tally, calm: Trace, trace: Trace, left: Sequence[Membership]) -> None:
    """Every step is made, with all its samples, and not by the one who left."""
    expected, got = evidence.shards(calm), evidence.shards(trace)
    for change in left:
        place = {"rank": change.rank, "scenario": trace.scenario.to_dict()}
        for step in sorted(step for step in expected if step >= change.step):
            before = sorted(i for shard in expected[step] for i in shard.ids)
            after = sorted(i for shard in got.get(step, ()) for i in shard.ids)
            lost = tuple(sorted(set(before) ^ set(after)))
            tally.check(
                before == after,
                f"after worker {change.rank} left, step {step} has other samples",
                step=step,
                sample_ids=lost,
                **place,
            )
        ghosts = [
            update
            for update in trace.of(Update)
            if update.rank == change.rank and update.step == change.step
        ]
        tally.check(
            not ghosts,
            f"worker {change.rank} left in step {change.step} and yet updated",
            step=change.step,
            **place,
        )


def _on_trajectory(
    tally: Tally, calm: Trace, trace: Trace, left: Sequence[Membership], within_steps: int
) -> None:
    """The loss after `within_steps` (or at the end of a shorter run) is the undisturbed one's."""
    expected, got = evidence.updates(calm), evidence.updates(trace)
    if not expected or not got:
        return
    if trace.scenario.dropout and "bitwise" not in trace.promises:
        tally.miss("dropout draws other masks once a worker has left: use dropout 0")
        return
    last = max(expected)
    for change in left:
        for step in range(min(change.step + within_steps, last), last + 1):
            place = {"step": step, "rank": change.rank, "scenario": trace.scenario.to_dict()}
            if step not in got:
                tally.check(False, f"no step {step} after worker {change.rank} left", **place)
                continue
            one, other = evidence.any_rank(expected[step]).loss, evidence.any_rank(got[step]).loss
            if not math.isfinite(one):
                tally.miss(f"the undisturbed run's loss of step {step} is not finite")
                continue
            tally.check(
                abs(other - one) <= ON_TRAJECTORY * abs(one) + 1e-7,
                f"loss is not back on the trajectory {step - change.step} steps after worker "
                f"{change.rank} left",
                expected=repr(one),
                got=repr(other),
                **place,
            )
